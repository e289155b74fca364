"""What a transformers causal LM is made of, found by building it on the meta device and by running a shrunk copy: no
names of architectures or parameters are listed here."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from penstock.engine.branches.base import Sent, find_branch
from penstock.engine.config import AdapterConfig, Recipe
from penstock.engine.model import adapters, groups, skeleton
from penstock.engine.model.adapters import BASE, is_adapter, plain_name
from penstock.engine.model.buffers import branches_apart, make_buffers, own_buffers
from penstock.engine.model.checkpoint_format import CheckpointFormat, frozen_format
from penstock.engine.model.float32 import float32_names
from penstock.engine.model.graph_size import find_graph_bytes
from penstock.engine.model.reward import trained_whole
from penstock.engine.model.router import own_coefficient
from penstock.engine.model.shrink import shrink
from penstock.engine.model.spec import (
    EMBED,
    HEAD,
    VISION,
    BlockSpec,
    ModelSpec,
    block_of,
    buffers_of_blocks,
    rotary_tables,
)
from penstock.engine.model.tower import Trained, tower_params
from penstock.engine.model.trace import Trial, layer_shapes, run_trial
from penstock.engine.model.types import dropouts
from penstock.engine.optim.groups import nearest
from penstock.storage.files.errors import UserError, refused
from penstock.storage.files.untrusted import one_line
from penstock.storage.tier.layout import FlatLayout, ParamSpec

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def take_apart(
    config: PretrainedConfig,
    freeze: Sequence[str] = (),
    adapter: AdapterConfig | None = None,
    *,
    split_layers: str | None = None,
    frozen_format: str | CheckpointFormat = "compute",
    train_vision: Literal["none"] | Trained = "none",
) -> ModelSpec:
    """Take the model of `config` apart, without its weights; with an `adapter` its layers are part of it.

    `freeze`: patterns of the names of parameters that are never trained (TrainConfig.freeze); beside an adapter that is
    all of the base, but for a reward model's `score`. `split_layers`: that part of each layer is a block of its own
    (engine/branches). `frozen_format`: of the layers' matrices that are never trained (ModelConfig.frozen_format), or
    of those that a checkpoint holds so. `train_vision`: what of the vision tower is trained (ModelConfig.train_vision);
    the tower is a block then. Raises UserError for what cannot be trained, and for patterns that fit nothing or leave
    nothing to be trained.
    """
    refuse_unsupported(config)
    if adapter is not None:
        bare = _build(config)
        adapters.require_targets(bare, skeleton.find_layers(bare)[0], adapter)
    model = _build(config, adapter)
    prefix, layers = skeleton.find_layers(model)
    kind = f"model type '{config.model_type}'"
    with refused(f"{kind}: no small copy could be made for the self-check", with_type=False):
        small, stand_ins = shrink(config, adapter)
    with refused(f"{kind}: a small copy does not run with Penstock's attention, which makes no attention mask"):
        trial = run_trial(small, adapter)
    returns = [trial.returns[i] for i in stand_ins]
    attends = [trial.attends[i] for i in stand_ins]
    whole, shared = _buffers(model, prefix, layers, trial, stand_ins)
    branches: tuple[str | None, ...] = (None,) * len(layers)
    sent: tuple[Sent, ...] = ()
    text = config.get_text_config(decoder=True)
    per_token = getattr(text, "num_experts_per_tok", None) or 1
    if split_layers is not None:
        branch = find_branch(split_layers)
        branches, sent = tuple(map(branch.find, layers)), branch.sent(text.hidden_size, per_token)
        if not any(branches):
            raise UserError(f"train.split_layers: {kind} has no '{split_layers}' to split off its layers; leave it out")
        inside = tuple(f"{prefix}.{i}.{name}.".replace(f".{BASE}.", ".") for i, name in enumerate(branches) if name)
        adapted = (p.name for params in whole.values() for p in params if is_adapter(p.name))
        if (beside := next((name for name in adapted if name.startswith(inside)), None)) is not None:
            raise UserError(
                f"adapter.targets: '{beside}' is beside {branch.says}, which train.split_layers makes a block of its "
                "own, without an adapter; leave these targets out, or set train.split_layers=none"
            )
        whole = branches_apart(whole, prefix, branches, split_layers)
    names = [param.name for params in whole.values() for param in params]
    stays = frozenset(n for n in names if not is_adapter(n)) - trained_whole(config)
    if adapter is None:
        of_tower = frozenset[str]()
        if train_vision != "none":
            own, of_tower = tower_params(config, train_vision)
            whole = {VISION: own} | whole
        stays = of_tower | _frozen_names([*names, *(p.name for p in whole.get(VISION, ()))], freeze)
    with refused(f"{kind}: transformers cannot build the model in bfloat16", with_type=False):
        float32 = float32_names(model, prefix, names, small, stand_ins)
    structures = _structures(prefix, layers, stays, float32)
    held: frozenset[str] | None = None
    if isinstance(frozen_format, CheckpointFormat):
        with refused(f"{kind}: transformers does not say which of its matrices are quantised", with_type=False):
            format, held = frozen_format.name, frozen_format.names(_build(config))
    else:
        format = frozen_format
    buffers = make_buffers(whole, stays, float32, None if format == "compute" else format, held)
    blocks = [BlockSpec(VISION, VISION, own_buffers(VISION, buffers))] if VISION in whole else []
    blocks.append(BlockSpec(EMBED, "embed", own_buffers(EMBED, buffers)))
    for i in range(len(layers)):
        name = f"layers.{i}"
        blocks.append(BlockSpec(name, "layer", own_buffers(name, buffers), (blocks[-1].name,), layer=i))
        if split_layers is not None and branches[i] is not None:
            block = f"{name}.{split_layers}"
            blocks.append(BlockSpec(block, split_layers, own_buffers(block, buffers), (name,), branch_of=i))
    lent = [b for b in own_buffers(EMBED, buffers) if any(param.name in shared for param in buffers[b].params)]
    blocks.append(BlockSpec(HEAD, "head", (*own_buffers(HEAD, buffers), *lent), (blocks[-1].name,)))
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    constants = {name: tuple(value.shape) for name, value in model.state_dict().items() if name not in parameters}
    length_dependent = _length_dependent(model)
    with refused(f"{kind}: transformers does not run the model", with_type=False):
        # Last, as it takes the model's layers away.
        shapes, states = layer_shapes(model, structures, attends, returns, [trial.states[i] for i in stand_ins])
    whole_documents = trial.whole_documents or any(
        state is None and trial.states[i] is not None for state, i in zip(states, stand_ins, strict=True)
    )
    of_layers = ([name for name in (trial.unread[i],) if name is not None] for i in stand_ins)
    unread = tuple(next(iter(_outside(names, branch)), None) for names, branch in zip(of_layers, branches, strict=True))
    spec = ModelSpec(
        config=copy.deepcopy(config),
        model_type=config.model_type,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        num_params=sum(param.numel for params in whole.values() for param in params),
        blocks=tuple(blocks),
        buffers=buffers,
        constants=constants,
        experts=tuple(sorted({n for name in _EXPERT_COUNTS if isinstance(n := getattr(text, name, None), int)})),
        experts_per_token=per_token,
        attention=tuple(shapes),
        whole_documents=whole_documents,
        states=() if whole_documents or not any(states) else tuple(states),
        length_dependent_rotary=length_dependent,
        structures=tuple(structures),
        unread=unread,
        summed=tuple(trial.summed[i] for i in stand_ins),
        joined=tuple(
            _joined(
                f"{prefix}.{index}.",
                [_outside(group, branches[index]) for group in trial.sharing[i]],
                trial.unread[i],
                whole[f"layers.{index}"],
                stays | float32,
            )
            for index, i in enumerate(stand_ins)
        ),
        returns=tuple(returns),
        counts_positions=tuple(trial.counts_positions[i] for i in stand_ins),
        branches=branches if split_layers is not None else (),
        sent=sent,
        adapter=adapter,
        router_aux_loss=own_coefficient(config),
    )
    if not spec.num_trained:
        raise UserError(
            f"train.freeze: all {spec.num_params:,} parameters are frozen, so nothing is left to train; remove a "
            "pattern"
        )
    if format != "compute" and all(buffer.format is None for buffer in buffers.values()):
        raise UserError(
            f"model.frozen_format: {format if held is None else 'stored'}, but no matrix of a layer "
            f"{'' if held is None else 'that the checkpoint holds quantised '}is frozen; leave it out, or freeze some "
            "with train.freeze"
        )
    return spec


def spec_of_recipe(config: PretrainedConfig, recipe: Recipe) -> ModelSpec:
    """The model taken apart as a run of the recipe trains it."""
    adapter, train = recipe.adapter if recipe.adapter.is_used else None, recipe.train
    split, stored = train.split_layers, frozen_format(recipe.model)
    spec = take_apart(
        config,
        train.freeze,
        adapter,
        split_layers=split,
        frozen_format=stored,
        train_vision=recipe.model.train_vision,
    )
    return groups.cut(spec, train.expert_groups or 1)


def model_spec(config: PretrainedConfig, recipe: Recipe) -> ModelSpec:
    """The model taken apart. Raises UserError when it cannot be trained or does not reach the context."""
    spec = spec_of_recipe(config, recipe)
    for shape in spec.attention:
        # transformers accepts such a config, and kernels divide by the zero that comes of it.
        if shape is not None and shape.heads % shape.kv_heads:
            raise UserError(
                f"model.num_kv_heads: {shape.heads} query heads cannot share {shape.kv_heads} key and value heads; "
                "give a divisor of model.num_heads"
            )
    if recipe.model.added_tokens and spec.frozen_params:
        tables = skeleton.vocabulary_tables(skeleton.build(spec.config))
        for name in sorted(tables & spec.frozen_params):
            raise UserError(
                f"model.added_tokens: the rows of new tokens must be trained, but train.freeze freezes {name}; leave "
                "it out, or add no tokens"
            )
    both = (shape is not None and state is not None for shape, state in zip(spec.attention, spec.states, strict=False))
    if recipe.train.kv_window == "streamed" and any(both):
        raise UserError(
            f"train.kv_window: streamed, but layers of model type '{spec.model_type}' attend and carry a recurrent "
            "state at once, which needs all keys and values on the GPU; set auto or whole"
        )
    if recipe.train.chunk_tokens == 1 and spec.states:
        raise UserError(
            f"train.chunk_tokens: 1, but layers of model type '{spec.model_type}' hand a recurrent state from chunk to "
            "chunk, which takes at least 2 tokens; set a larger number or leave it out"
        )
    validate_context(spec, recipe.data.sequence_length)
    find_graph_bytes(spec, recipe.train.compute_dtype)
    return spec


def refuse_unsupported(config: PretrainedConfig) -> None:
    """Raise UserError when `config` alone shows that the model cannot be trained."""
    kind = f"model type '{config.model_type}'"
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"{kind} is an encoder-decoder model; only decoder-only causal language models can be trained")
    skeleton.auto_class(config)  # or it is refused
    for part, name in dropouts(config):
        raise UserError(
            f"{kind}: {name} is {getattr(part, name)}; dropout is not supported in training, set it to 0 in "
            "config.json or with model.overrides"
        )


def validate_context(spec: ModelSpec, sequence_length: int) -> None:
    """Raise UserError when positions up to `sequence_length` are beyond what the config's positions reach: `yarn` its
    factor times the original length, `dynamic` any, the others max_position_embeddings, if the config has that."""
    reach, tables = context_of(spec), rotary_tables(spec.config)
    if reach is None or sequence_length <= reach:
        return
    longest: int = spec.config.get_text_config(decoder=True).max_position_embeddings
    original = next((t["original_max_position_embeddings"] for t in tables if t.get("rope_type") == "yarn"), longest)
    if not (longest > 0 and original > 0):
        raise UserError(
            f"model type '{spec.model_type}': positions of {min(longest, original)} tokens; correct "
            "max_position_embeddings, or original_max_position_embeddings of its rope_parameters, in config.json"
        )
    kind = tables[0].get("rope_type") if tables else None
    have = f"max_position_embeddings {longest} with rotary scaling '{kind}'" if kind else "a table that is not rotary"
    factor = math.ceil(sequence_length / original)
    advice = (
        f", or set rope_parameters (for example rope_type yarn with a factor of {factor} "
        f"over {original}) and max_position_embeddings in config.json or model.overrides"
    )
    raise UserError(
        f"data.sequence_length: {sequence_length} tokens exceed the {reach} positions of model type "
        f"'{spec.model_type}': {have}; shorten the sequences{advice if kind else ''}"
    )


def context_of(spec: ModelSpec) -> int | None:
    """Tokens that the positions of a model reach, as `validate_context` has it; None where there is no limit."""
    longest = getattr(spec.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if not isinstance(longest, int):
        return None
    reach = min((_rotary_reach(table, longest) for table in rotary_tables(spec.config)), default=longest)
    return None if reach == math.inf else int(reach)


def _rotary_reach(table: dict[str, Any], longest: int) -> float:
    """Tokens that one rotary table is made for; `longest` is max_position_embeddings."""
    if table.get("rope_type") == "dynamic":
        return math.inf
    if table.get("rope_type") == "yarn":
        return float((table.get("factor") or 1) * table["original_max_position_embeddings"])
    return longest


class Initializer:
    """Random float32 values of a model's parameters, by the model's own initialiser."""

    def __init__(self, spec: ModelSpec, seed: int, embedding_std: float | None = None):
        """The same arguments give the same values, in any order of calls. `embedding_std`: standard deviation of the
        token embeddings, in place of the model's own."""
        self._cut, self._spec, self._seed, self._embedding_std = spec, groups.uncut(spec), seed, embedding_std
        self._model = _build(spec.config)  # once: with a thousand layers it takes seconds
        self._layers = skeleton.find_layers(self._model)[1]
        self._sites = skeleton.parameter_sites(self._model, exclude=" ")
        self._constructed: dict[str, Tensor] | None = None

    def buffers(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """All flat buffers in order, of a model with an adapter only the base's; one is in memory at a time."""
        buffers = self._spec.buffers.items()
        own = ((name, self.values(name)) for name, b in buffers if not all(is_adapter(p.name) for p in b.params))
        return groups.cut_values(self._cut, own)

    def values(self, buffer: str) -> dict[str, Tensor]:
        """The parameters by name of a flat buffer of the uncut model (model/groups.py), the same whatever is frozen; of
        a model with an adapter the base's.
        Raises UserError naming one that the model does not initialise."""
        owned = buffers_of_blocks(self._spec)
        # A layer and its branch are initialised as one.
        branches = {each.name: each.inputs[0] for each in self._spec.blocks if each.branch_of is not None}
        block = branches.get(block_of(buffer), block_of(buffer))
        names = [name for each in owned if branches.get(each, each) == block for name in owned[each]]
        digest = hashlib.sha256(f"{self._seed}/{block}".encode()).digest()
        members = [param for name in names for param in self._spec.buffers[name].params]
        params = sorted((p for p in members if not is_adapter(p.name)), key=lambda param: param.name)
        sites = [self._sites[plain_name(param.name)][0] for param in params]
        on_meta = [module._parameters[key] for module, key in sites]
        # Post-order, as transformers does it: a module's own initialiser overrules its children's.
        if block.startswith("layers."):
            modules = list(self._layers[int(block.removeprefix("layers."))].modules())[::-1]
        else:
            modules = [module for _, module in skeleton.outer_modules(self._model, self._layers)][::-1]
        try:
            for param, (module, key) in zip(params, sites, strict=True):
                module._parameters[key] = nn.Parameter(torch.full(param.shape, float("nan")), requires_grad=False)
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
                for module in modules:
                    self._model._init_weights(module)
                for module, key in sites:
                    if self._embedding_std is not None and module is self._model.get_input_embeddings():
                        nn.init.normal_(module.get_parameter(key), std=self._embedding_std)
            values = {p.name: skeleton.site_parameter(self._sites[plain_name(p.name)]).detach() for p in params}
        finally:
            for (module, key), parameter in zip(sites, on_meta, strict=True):
                module._parameters[key] = parameter
        unset = [name for name, value in values.items() if value.isnan().any()]
        if unset and self._constructed is None:
            self._constructed = skeleton.constructed_values(self._model, self._sites.keys())
        for name in unset:
            values[name] = (self._constructed or {}).get(plain_name(name), values[name]).float()
            if values[name].isnan().any():
                raise UserError(
                    f"model type '{self._spec.model_type}': transformers does not initialise the parameter {name}"
                )
        return {param.name: values[param.name] for param in self._spec.buffers[buffer].params}


def initial_constants(spec: ModelSpec) -> dict[str, Tensor]:
    """Initial values of the constants, by the model's own initialiser. Raises UserError naming one that only a
    checkpoint can give."""
    model = _build(spec.config, spec.adapter)
    skeleton.materialise_buffers(model, model.named_modules(), torch.device("cpu"))
    constants = {name: tensor for name, tensor in model.named_buffers() if name in spec.constants}
    for name, tensor in constants.items():
        if tensor.is_floating_point() and tensor.isnan().any():
            raise UserError(f"model type '{spec.model_type}': transformers does not initialise the buffer {name}")
    return constants


def _frozen_names(names: Sequence[str], patterns: Iterable[str]) -> frozenset[str]:
    """Those of a model's parameters `names` that a pattern of train.freeze fits. UserError for one that fits none."""
    result: set[str] = set()
    for pattern in patterns:
        fitting = [name for name in names if fnmatchcase(name, pattern)]
        if not fitting:
            raise UserError(
                f"train.freeze: '{one_line(pattern)}' matches no parameter; the nearest are {nearest(pattern, names)}"
            )
        result.update(fitting)
    return frozenset(result)


def _structures(prefix: str, layers: nn.ModuleList, *sorts: frozenset[str]) -> list[int]:
    """Per layer the first one that computes the same; layers of which other parameters are of one of the `sorts`, such
    as what is frozen, do not."""
    first: dict[Hashable, int] = {}
    keys = (
        (
            skeleton.structure_key(layer),
            tuple(frozenset(n for n, _ in layer.named_parameters() if f"{prefix}.{i}.{n}" in sort) for sort in sorts),
        )
        for i, layer in enumerate(layers)
    )
    return [first.setdefault(key, i) for i, key in enumerate(keys)]


def _joined(
    prefix: str,
    sharing: Sequence[Sequence[str]],
    unread: str | None,
    params: Sequence[ParamSpec],
    stays: frozenset[str],
) -> tuple[tuple[str, ...], ...]:
    """Of linear modules that read one tensor those that are trained, whose weights lie one behind the other, and of
    which all or none have a bias. `prefix` begins the names of the layer's `params`; `stays`: of those in other buffers
    than the layer's first."""
    names, trained = {param.name for param in params}, [param for param in params if param.name not in stays]
    offsets = FlatLayout.build(trained).offsets if trained else {}
    ends = {param.name: offsets[param.name] + param.numel for param in trained}
    result: list[list[str]] = []
    for readers in sharing:
        last: tuple[int, bool] | None = None
        """Where the one before ends, and whether it has a bias."""
        for name in readers:
            weight, bias = f"{prefix}{name}.weight", f"{prefix}{name}.bias"
            if weight in stays or bias in stays or name == unread:
                last = None
                continue
            if last == (offsets[weight], bias in names):
                result[-1].append(name)
            else:
                result.append([name])
            last = ends[weight], bias in names
    return tuple(tuple(group) for group in result if len(group) > 1)


def _outside(names: Sequence[str], branch: str | None) -> list[str]:
    """Those of a layer's modules that are not part of its branch."""
    return [name for name in names if branch is None or not f"{name}.".startswith(f"{branch}.")]


def _build(config: PretrainedConfig, adapter: AdapterConfig | None = None) -> PreTrainedModel:
    with refused(f"model type '{config.model_type}': transformers cannot build the model", with_type=False):
        return skeleton.build(config, adapter=adapter)


def _buffers(
    model: PreTrainedModel, prefix: str, layers: nn.ModuleList, trial: Trial, stand_ins: Sequence[int]
) -> tuple[dict[str, tuple[ParamSpec, ...]], frozenset[str]]:
    """Parameters of each block, and names of those that embedding and head share. `stand_ins[i]`: the layer of the
    trial's model that has the structure of layer i."""
    undecayed = trial.undecayed
    outer = {n: skeleton.site_parameter(sites) for n, sites in skeleton.parameter_sites(model, exclude=prefix).items()}
    unused = sorted(outer.keys() - trial.embed_parameters - trial.head_parameters)
    if unused:
        raise UserError(
            f"model type '{model.config.model_type}': {unused[0]} ({len(unused)} such parameters) is not part of the "
            "text model's embedding or head; models with parts other than the text decoder cannot be trained"
        )
    ends = {name: _spec(name, parameter, name in undecayed) for name, parameter in outer.items()}
    buffers = {EMBED: tuple(spec for name, spec in ends.items() if name in trial.embed_parameters)}
    for index, (layer, small) in enumerate(zip(layers, stand_ins, strict=True)):
        buffers[f"layers.{index}"] = tuple(
            _spec(f"{prefix}.{index}.{name}", parameter, f"{prefix}.{small}.{name}" in undecayed)
            for name, parameter in layer.named_parameters()
        )
    buffers[HEAD] = tuple(spec for name, spec in ends.items() if name not in trial.embed_parameters)
    names = [spec.name for params in buffers.values() for spec in params]
    ids = [id(p) for p in model.parameters()]
    if len(names) != len(ids):
        raise UserError(f"model type '{model.config.model_type}': its layers share parameters, which is not supported")
    return {name: params for name, params in buffers.items() if params}, trial.embed_parameters & trial.head_parameters


def _spec(name: str, parameter: Tensor, undecayed: bool) -> ParamSpec:
    return ParamSpec(name=name, shape=tuple(parameter.shape), decay=parameter.dim() > 1 and not undecayed)


def _length_dependent(model: PreTrainedModel) -> bool:
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
            if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope"):
                return True
    return False
