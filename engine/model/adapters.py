"""Adapters: peft's own LoRA layers around modules of a transformers model.

Only the adapter's parameters (`is_adapter`) are trained. The base's have a `base_layer` in their names (`plain_name` is
what a checkpoint calls them). peft is imported where an adapter is used, and nowhere else.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from penstock.engine.config import AdapterConfig
from penstock.engine.model.reward import SCORE, SCORE_MODULE, is_reward
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import one_line

ALL_LINEAR = "all-linear"
NAME = "default"
"""What peft calls an adapter that nobody named; part of its parameters' names."""
MAGNITUDE = "lora_magnitude_vector"
_PARTS = frozenset({"lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", MAGNITUDE})
BASE = "base_layer"


def is_adapter(name: str) -> bool:
    """Whether the parameter with this state-dict name is an adapter's."""
    return not _PARTS.isdisjoint(name.split("."))


def adapted_module(name: str) -> str:
    """The module that the adapter's parameter `name` belongs to."""
    parts = name.split(".")
    return ".".join(parts[: next(i for i, part in enumerate(parts) if part in _PARTS)])


def plain_name(name: str) -> str:
    """The name that a parameter of the base has in a model without an adapter."""
    return ".".join(part for part in name.split(".") if part != BASE)


def id_axes(module: Any) -> tuple[Any, dict[int, int]]:
    """The model's own embedding where `module` may be peft's around it; what has tables, by id -> the ids' axis."""
    base = module.get_base_layer() if hasattr(module, "get_base_layer") else module
    columns = [module.lora_embedding_A] if hasattr(module, "lora_embedding_A") else []
    return base, {id(base): 0} | {id(part): 1 for part in columns}


class Targets(NamedTuple):
    """What of a model an adapter stands beside, by names in the model without it."""

    modules: tuple[str, ...]
    """Linear modules and embeddings."""
    parameters: tuple[str, ...]
    """Matrices of modules that are neither, or that peft reaches by their parameter only."""
    unmatched: tuple[str, ...]
    """Entries of `adapter.targets` that stand for none of these."""


def find_targets(model: PreTrainedModel, layers: str, adapter: AdapterConfig) -> Targets:
    """What `adapter.targets` stands for in a model that has none yet: modules by their name, its end or a pattern,
    where none fits, parameters. `layers` is the name of its list of layers."""
    modules = {name: module for name, module in model.named_modules() if isinstance(module, _MODULES)}
    held = {
        f"{name}.{key}": name
        for name, module in model.named_modules()
        if name not in modules
        for key, parameter in module.named_parameters(recurse=False)
        if parameter.dim() in (2, 3)
    }
    wanted: set[str] = set()
    parameters: set[str] = set()
    unmatched = []
    for target in adapter.targets:
        if target == ALL_LINEAR:
            linears = {
                n: m for n, m in modules.items() if n.startswith(f"{layers}.") and not isinstance(m, nn.Embedding)
            }
            # Not a single row or column, such as a gate's, of which any sum has rank one.
            result = {name for name, module in linears.items() if min(module.get_parameter("weight").shape) > 1}
        else:
            result = {name for name in modules if _fits(name, target)}
        among = {p for p, owner in held.items() if _fits(p, target) or _fits(owner, target)} if not result else set()
        wanted |= result
        parameters |= among
        if not result and not among:
            unmatched.append(target)
    by_parameter = _by_parameter(model, wanted, adapter)
    return Targets(
        tuple(name for name in modules if name in wanted - by_parameter),
        tuple(sorted(parameters | {f"{name}.weight" for name in by_parameter})),
        tuple(unmatched),
    )


_MODULES = (nn.Linear, Conv1D, nn.Embedding)


def _fits(name: str, target: str) -> bool:
    if "*" in target:
        return fnmatchcase(name, target)
    return name == target or name.endswith(f".{target}")


def _by_parameter(model: PreTrainedModel, names: Iterable[str], adapter: AdapterConfig) -> set[str]:
    """Those of the modules `names` that peft takes for experts which used to be modules, by the ends of their names:
    to these it adapts only where it is given the parameter itself."""
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    taken = {}
    for end in {name.rpartition(".")[2] for name in names}:
        config = _peft_config(adapter, [end], [])
        try:
            convert_peft_config_for_transformers(config, model=model, conversions=None)
        except ValueError:  # it misses another expert's
            taken[end] = True
            continue
        taken[end] = end not in (config.target_modules or ())
    return {name for name in names if taken[name.rpartition(".")[2]]}


def require_targets(model: PreTrainedModel, layers: str, adapter: AdapterConfig) -> Targets:
    """As `find_targets`; raises UserError naming what of the section does not fit the model."""
    targets = find_targets(model, layers, adapter)
    if SCORE_MODULE in targets.modules and is_reward(model.config):
        raise UserError(f"adapter.targets: '{SCORE}' is trained whole beside an adapter; leave it out")
    for target in targets.unmatched:
        raise UserError(f"adapter.targets: {_no_match(model, layers, target)}")
    embeddings = [name for name in targets.modules if isinstance(model.get_submodule(name), nn.Embedding)]
    if adapter.method == "dora" and embeddings:
        raise UserError(
            f"adapter.method: dora, but '{embeddings[0]}' is an embedding, which dora does not support; use lora or "
            "rslora, or leave it out of adapter.targets"
        )
    if adapter.method == "dora" and targets.parameters:
        raise UserError(
            f"adapter.method: dora, but peft adapts '{targets.parameters[0]}' as a parameter, which has no dora; "
            "use lora or rslora, or leave it out of adapter.targets"
        )
    for name, shape in _adapted(model, targets):
        least = min(shape[-2:])
        if adapter.rank > least:
            raise UserError(
                f"adapter.rank: {adapter.rank} is larger than the smallest side of '{name}' "
                f"({' x '.join(f'{n:,}' for n in shape)}); use at most {least:,}, or choose other targets"
            )
    return targets


def smallest_side(model: PreTrainedModel, layers: str, adapter: AdapterConfig) -> int:
    """The largest rank that fits all that the adapter stands beside."""
    found = _adapted(model, find_targets(model, layers, adapter))
    return min((min(shape[-2:]) for _, shape in found), default=adapter.rank)


def _adapted(model: PreTrainedModel, targets: Targets) -> Iterator[tuple[str, torch.Size]]:
    """Names and shapes of the parameters that an adapter stands beside."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name in (*(f"{module}.weight" for module in targets.modules), *targets.parameters):
        yield name, parameters[name].shape


def _no_match(model: PreTrainedModel, layers: str, target: str) -> str:
    shown = one_line(target, 80)
    if any(_fits(name, target) for name, _ in model.named_modules() if name):
        inside = sorted(
            {
                name.rpartition(".")[2]
                for name, module in model.named_modules()
                if isinstance(module, _MODULES) and f".{target}." in f".{name}."
            }
        )
        parts = f"; name the modules in it: {', '.join(inside)}" if inside else ""
        return f"'{shown}' is not a linear module or an embedding{parts}"
    ends = sorted({name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, _MODULES)})
    near = difflib.get_close_matches(target.rpartition(".")[2], ends, n=3, cutoff=0.5)
    if near:
        return f"'{shown}' matches no module of the model; the nearest are {', '.join(near)}"
    return f"'{shown}' matches no module of the model; it has {', '.join(ends)}"


def _peft_config(adapter: AdapterConfig, modules: Iterable[str], parameters: Iterable[str], **more: Any) -> Any:
    from peft import LoraConfig

    values: dict[str, Any] = {
        "r": adapter.rank,
        "lora_alpha": adapter.alpha if adapter.alpha % 1 else int(adapter.alpha),
        "target_modules": list(modules),
        "target_parameters": list(parameters) or None,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_dora": adapter.method == "dora",
        "use_rslora": adapter.method == "rslora",
        "task_type": "CAUSAL_LM",
    }
    values |= more
    return LoraConfig(**values)


def inject(model: PreTrainedModel, layers: str, adapter: AdapterConfig) -> None:
    """Put peft's layers around what `adapter.targets` stands for; what it does not match is left out. `layers`: name of
    the model's list of layers. The adapter's parameters require gradients, the others as they did before."""
    from peft import inject_adapter_in_model

    from penstock.engine.model.peft_layers import make_compilable

    targets = find_targets(model, layers, adapter)
    if not targets.modules and not targets.parameters:
        return
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tied embeddings, whose merge is refused elsewhere
        inject_adapter_in_model(_peft_config(adapter, targets.modules, targets.parameters), model, NAME)
    for parameter in trained:
        parameter.requires_grad_(True)
    make_compilable(model)


def exported_config(model: PreTrainedModel, layers: str, adapter: AdapterConfig, base: str | None) -> dict[str, Any]:
    """What adapter_config.json says of an adapter of `model`, which has none; `base`: what the model is called."""
    targets, more = find_targets(model, layers, adapter), dict[str, Any]()
    if is_reward(model.config):
        more = {"task_type": "SEQ_CLS", "modules_to_save": [SCORE_MODULE]}
    config = _peft_config(
        adapter,
        _shortest(targets.modules, [name for name, _ in model.named_modules()]),
        _shortest(targets.parameters, [name for name, _ in model.named_parameters()], parts=2),
        base_model_name_or_path=base,
        inference_mode=True,
        **more,
    )
    return {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}


def _shortest(names: Sequence[str], among: Iterable[str], parts: int = 1) -> list[str]:
    """Ends of `names`, of so many parts, where nothing else of `among` ends so; else the whole names."""

    def end(name: str) -> str:
        return ".".join(name.split(".")[-parts:])

    wanted = set(names)
    others = {end(name) for name in among if name not in wanted}
    return sorted({name if end(name) in others else end(name) for name in names})
