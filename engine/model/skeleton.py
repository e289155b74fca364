"""A transformers causal LM taken apart without touching its code: the model around its layers, and the layers.

`Skeleton` runs the model's own forward with its decoder layers replaced by pass-throughs that record what they are
given. Stopped at the first layer it is the embedding; stopped at the last it yields every layer's keyword arguments;
given a hidden state to return from the last layer it is the head. Parameters are bound from outside, never copied.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Collection, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from penstock.engine.attention import chunk as attention
from penstock.engine.config import AdapterConfig
from penstock.engine.model import adapters, kernel_packages
from penstock.engine.model.reward import is_reward, score_layer
from penstock.engine.model.spec import ModelSpec
from penstock.storage.files.errors import UserError

Tensors = Mapping[str, Tensor]
"""By the parameter's state-dict name."""

_INDEX_NAMES = frozenset({"layer_idx", "layer_id", "layer_index", "layer_number", "block_idx", "idx"})
"""Attributes in which transformers layers keep their own number; they do not make two layers different."""


@dataclass(frozen=True, slots=True)
class LayerCall:
    """What the model passes to one layer besides the hidden state."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class TokensBefore:
    """In place of a cache for layers that count their tokens by one, to which a token's position is its number in the
    call and what the cache has: `offsets` (int64 [n]) makes that the position in the token's own document."""

    def __init__(self, offsets: Tensor) -> None:
        self.offsets = offsets

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        return self.offsets

    def update(self, k: Tensor, v: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return k, v


pytree.register_pytree_node(TokensBefore, lambda before: ([before.offsets], None), lambda of, _: TokensBefore(*of))
CACHE = "past_key_values"
"""What transformers calls a layer's argument for a cache."""


def hidden_states(output: Any) -> Any:
    """Of what a layer returns: they alone, or first of several."""
    return output[0] if isinstance(output, tuple) else output


class _Stop(BaseException):
    """Leaves the model's forward once everything of interest has happened; never seen outside."""


def auto_class(config: PretrainedConfig) -> Any:
    """Which of transformers' classes makes a model of `config` that has logits for texts, or rewards. UserError: none
    does."""
    if is_reward(config):
        return AutoModelForSequenceClassification
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    raise UserError(
        f"model type '{config.model_type}' is not a causal language model known to this version of transformers"
    )


def from_config(config: PretrainedConfig, **kwargs: Any) -> PreTrainedModel:
    """transformers' own model of `config`; of one that takes images and the like too only what texts go through."""
    model: PreTrainedModel = auto_class(config).from_config(config, **kwargs)
    if config.get_text_config(decoder=True) is not config:
        parts = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
        _keep_only(model, {id(part) for part in parts if part is not None})
    return model


def build_whole(config: PretrainedConfig) -> PreTrainedModel | None:
    """All of a model that takes images and the like too, on meta; None for one that takes texts alone."""
    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return None
    with torch.device("meta"):
        whole: PreTrainedModel = AutoModelForImageTextToText.from_config(copy.deepcopy(config), dtype=torch.float32)
    return whole


def _keep_only(module: nn.Module, kept: set[int]) -> None:
    """Take out of a module the parts with parameters that have nothing of `kept` (by id) in them; its own parameters
    become buffers, which nothing trains."""
    _to_buffers(module, list(module._parameters))
    for name, part in list(module.named_children()):
        if id(part) in kept:
            continue
        if any(id(inner) in kept for inner in part.modules()):
            _keep_only(part, kept)
        elif next(part.parameters(), None) is not None:
            setattr(module, name, None)


def build(
    config: PretrainedConfig,
    device: str = "meta",
    experts: str | None = None,
    adapter: AdapterConfig | None = None,
    attention_by: str = attention.NAME,
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """The model of `config` in eval mode; on meta it takes no memory. With an `adapter` it has peft's
    layers (model/adapters.py). `attention_by`: what transformers calls the implementation of its attention. Raises
    UserError for a model that has its own attention only."""
    attention.register()
    config = copy.deepcopy(config)
    config.use_cache = False
    text = config.get_text_config(decoder=True)
    if getattr(text, "output_router_logits", False):
        text.output_router_logits = False  # no router runs in a model whose layers are replaced
    kwargs = {} if experts is None else {"experts_implementation": experts}
    try:
        with torch.device(device):
            model = from_config(config, attn_implementation=attention_by, dtype=dtype, **kwargs)
    except KeyError as error:
        if error.args != (attention.NAME,):
            raise
        # Older models look their attention up in a table of their own.
        raise UserError(
            f"model type '{config.model_type}': its attention does not go through transformers' attention interface"
        ) from error
    if is_reward(config):
        score_layer(model)  # or it is refused
    model.eval()
    kernel_packages.keep_to_gpus(model)
    _untrained_to_buffers(model)
    if adapter is not None:
        with torch.device(device):
            adapters.inject(model, find_layers(model)[0], adapter)
    return model


def _untrained_to_buffers(model: nn.Module) -> None:
    """Make buffers of the parameters that the model itself does not train, such as routers' balancing biases."""
    for part in model.modules():
        _to_buffers(part, [key for key, value in part._parameters.items() if value is None or not value.requires_grad])


def _to_buffers(module: nn.Module, keys: Iterable[str]) -> None:
    for key in keys:
        if (parameter := module._parameters[key]) is not None:
            del module._parameters[key]
            module.register_buffer(key, parameter.detach())


def find_layers(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """The model's decoder layers and their name. UserError unless there is one list of num_hidden_layers modules."""
    count = num_layers(model.config)
    result = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    outermost = [(n, m) for n, m in result if not any(n.startswith(f"{other}.") for other, _ in result)]
    if len(outermost) > 1:
        # A list of norms or embeddings per layer may stand beside the layers, which hold nearly all parameters.
        sizes = [sum(p.numel() for p in m.parameters()) for _, m in outermost]
        largest = max(range(len(sizes)), key=sizes.__getitem__)
        if sizes[largest] > 4 * (sum(sizes) - sizes[largest]):
            outermost = [outermost[largest]]
    if len(outermost) != 1:
        raise UserError(
            f"model type '{model.config.model_type}': found {len(outermost)} lists of {count} layers in "
            f"{type(model).__name__} instead of exactly one; this model is built differently and cannot be trained"
        )
    return outermost[0]


def num_layers(config: PretrainedConfig) -> int:
    """Decoder layers that `config` asks for."""
    count = getattr(config.get_text_config(decoder=True), "num_hidden_layers", None)
    if not isinstance(count, int) or count < 1:
        raise UserError(f"model type '{config.model_type}': its config has no num_hidden_layers")
    return count


def structure_key(module: nn.Module) -> Hashable:
    """Equal for two layers that compute the same function of their parameters, whatever their position."""
    parts: list[Hashable] = []
    for name, part in module.named_modules():
        plain = tuple(
            sorted(
                (key, repr(value))
                for key, value in vars(part).items()
                if not key.startswith("_")
                and key not in _INDEX_NAMES
                and isinstance(value, bool | int | float | str | tuple | list | None)
            )
        )
        tensors = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
        shapes = tuple((key, tuple(value.shape)) for key, value in tensors)
        parts.append((name, type(part).__qualname__, plain, shapes))
    return tuple(parts)


def layer_index(template: nn.Module, layer: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """(part of `template`, attribute, value) of the layer number that `layer` knows of itself."""
    parts = dict(template.named_modules())  # a template may have parts of its own
    return [
        (parts[name], key, vars(source)[key])
        for name, source in layer.named_modules()
        if name in parts
        for key in sorted(_INDEX_NAMES & vars(source).keys())
    ]


class _SmallOnCpu(TorchFunctionMode):
    """What is made without values is made on meta, and takes no memory; the rest, such as constants, has its values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def constructed_values(model: PreTrainedModel, names: Collection[str]) -> dict[str, Tensor]:
    """Those of the buffers and parameters `names` whose values the model's own constructor sets, on the CPU."""
    with _SmallOnCpu(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            made = type(model)._from_config(copy.deepcopy(model.config), dtype=torch.float32)
        except Exception:  # a constructor that computes with both
            return {}
    values = (*made.named_buffers(), *made.named_parameters(remove_duplicate=False))
    return {name: value.detach() for name, value in values if name in names and not value.is_meta}


def materialise_buffers(model: PreTrainedModel, modules: Iterable[tuple[str, nn.Module]], device: torch.device) -> None:
    """Give the meta buffers of `modules`, by name, their initial values on `device`, by the model's own initialiser.

    A buffer may be set by a module that its own is part of, or by the constructor alone. A persistent float buffer that
    nothing sets is NaN, to be given by a checkpoint. Raises UserError naming any other float buffer that nothing sets.
    """
    result = [
        (name, part, key) for name, part in modules for key, b in part._buffers.items() if b is not None and b.is_meta
    ]
    for _, part, key in result:
        fresh = torch.empty_like(part.get_buffer(key), device="cpu")
        part._buffers[key] = fresh.fill_(float("nan")) if fresh.is_floating_point() else fresh.zero_()
    owners = {name for name, _, _ in result}
    above = {"", *(name[:end] for name in owners for end, mark in enumerate(name) if mark == ".")} if result else set()
    with torch.no_grad():
        # As transformers does it: a module's own initialiser overrules those of its parts.
        for name, part in [*model.named_modules()][::-1]:
            if name in owners or name in above:
                model._init_weights(part)
    unset = {f"{name}.{key}" for name, part, key in result if _has_nan(part.get_buffer(key))}
    constructed = constructed_values(model, unset) if unset else {}
    for name, part, key in result:
        value = constructed.get(f"{name}.{key}", part.get_buffer(key))
        if _has_nan(value) and key in part._non_persistent_buffers_set:
            raise UserError(
                f"model type '{model.config.model_type}': transformers does not initialise the buffer {name}.{key}"
            )
        part._buffers[key] = value.to(device)


def _has_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and bool(tensor.isnan().any())


def weight_dtype(dtype: torch.dtype, *, float32: bool) -> torch.dtype:
    """Of weights in a model that computes in `dtype`; `float32`: of what is kept in float32 (model/float32.py)."""
    return torch.promote_types(dtype, torch.float32) if float32 else dtype


def placeholder(parameter: Tensor, device: torch.device, dtype: torch.dtype, *, trained: bool = True) -> nn.Parameter:
    """A parameter of the right shape that takes one element of memory, to be bound before use."""
    empty = torch.zeros(1, dtype=dtype, device=device).expand(parameter.shape)
    return nn.Parameter(empty, requires_grad=trained)


def empty(module: nn.Module, prefix: str, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> None:
    """Put placeholders in the place of a module's parameters, whose names in the model begin with `prefix`."""
    frozen, float32 = spec.frozen_params, spec.float32_params
    for path, part in module.named_modules():
        for key, parameter in part._parameters.items():
            if parameter is not None:
                name = prefix + (f"{path}.{key}" if path else key)
                own = weight_dtype(dtype, float32=name in float32)
                part._parameters[key] = placeholder(parameter, device, own, trained=name not in frozen)


class Skeleton:
    """The model around its layers, its non-layer parameters bound from outside."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        device: torch.device,
        dtype: torch.dtype,
        returns: Sequence[int],
        counting: Sequence[bool] = (),
    ) -> None:
        """Take over `model` (on meta). `returns[i]`: 0 if layer i returns a tensor, else the length of its tuple;
        `counting[i]`: whether it counts its tokens by a cache (`TokensBefore`); none does where it is empty."""
        self.model = model
        self.device = device
        self.dtype = dtype
        self.prefix, self.layers = find_layers(model)
        self._returns = returns
        self._counting = counting
        self._calls: list[LayerCall] = []
        self._inject: Tensor | None = None
        self._until = ""
        self._sites = parameter_sites(model, exclude=self.prefix)
        self._placeholders = {
            name: placeholder(site_parameter(sites), device, dtype) for name, sites in self._sites.items()
        }
        materialise_buffers(model, outer_modules(model, self.layers), device)
        self._install(self._placeholders)
        for index, layer in enumerate(self.layers):
            layer.forward = self._pass_through(index, first_parameter(layer))
        self._accepts_positions = "position_ids" in inspect.signature(model.forward).parameters
        self._rotary = LengthState(model, self.layers)
        self._scores: Tensor | None = None
        if is_reward(model.config):  # whose logits are those of one token alone
            score_layer(model).register_forward_hook(self._keep_scores)

    def _keep_scores(self, layer: nn.Module, given: Any, scores: Tensor) -> None:
        self._scores = scores

    @contextmanager
    def bound(self, tensors: Tensors, frozen: Container[str] = ()) -> Iterator[dict[str, nn.Parameter]]:
        """Inside the block the model computes with `tensors`; yields the parameters that stand for them, of which those
        in `frozen` want no gradient."""
        given = {
            name: nn.Parameter(tensor, requires_grad=name not in frozen)
            for name, tensor in tensors.items()
            if name in self._sites
        }
        self._install({**self._placeholders, **given})
        try:
            yield given
        finally:
            self._install(self._placeholders)

    @contextmanager
    def compact_vocabulary(
        self, tensors: Tensors, distinct: Tensor
    ) -> Iterator[tuple[dict[str, Tensor], dict[str, int], int | None]]:
        """Inside the block the token table has rows for the ids `distinct` [u] only, in that order.

        Yields `tensors` with the table cut down to [u, hidden], and its adapter's to [rank, u]; the names of what was
        cut down -> the axis of the ids; and the padding id, which is to get no gradient (None: there is none; inside
        the block the table knows none).
        """
        module, axes = adapters.id_axes(self.model.get_input_embeddings())
        sites = ((name, id(part)) for name, places in self._sites.items() for part, _ in places)
        tables = {name: axes[part] for name, part in sites if part in axes and name in tensors}
        padding = getattr(module, "padding_idx", None)
        if padding is not None:
            module.padding_idx = None
        try:
            compact = {name: tensors[name].index_select(axis, distinct) for name, axis in tables.items()}
            yield {**tensors, **compact}, tables, padding
        finally:
            if padding is not None:
                module.padding_idx = padding

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """First layer's input [n, hidden] for ids and positions [n]."""
        self._run(ids, positions, "embed")
        assert self._inject is not None
        x, self._inject = self._inject, None
        return x.squeeze(0)

    def calls(self, positions: Tensor) -> list[LayerCall]:
        """Arguments of every layer for tokens at `positions` [n], or [n, 4] (model/images.py)."""
        self._rotary.reset()
        self._calls = []
        self._run(positions.new_zeros(len(positions)), positions, "calls")
        calls, self._calls = self._calls, []
        if any(self._counting):
            before = TokensBefore(positions - torch.arange(len(positions), device=positions.device))
            for call in itertools.compress(calls, self._counting):
                call.kwargs[CACHE] = before
        return calls

    def logits(self, x: Tensor) -> Tensor:
        """Logits [n, vocab], or a reward model's values [n, 1], of the last layer's output x [n, hidden]."""
        self._inject = x[None]
        zeros = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
        try:
            output = self._run(zeros, zeros, "logits")
            scores = self._scores
        finally:
            self._inject = self._scores = None
        logits: Tensor = output.logits if scores is None else scores
        return logits.squeeze(0)  # an index would copy the gradient on the way back

    def _install(self, parameters: Mapping[str, nn.Parameter]) -> None:
        for name, sites in self._sites.items():
            for module, key in sites:
                module._parameters[key] = parameters[name]

    def _run(self, ids: Tensor, positions: Tensor, until: str) -> Any:
        self._until = until
        places = positions[None] if positions.dim() == 1 else positions.T[:, None]
        kwargs: dict[str, Any] = {"position_ids": places} if self._accepts_positions else {}
        try:
            return self.model(input_ids=ids[None], use_cache=False, **kwargs)
        except _Stop:
            return None

    def _pass_through(self, index: int, hidden_name: str) -> Callable[..., Any]:
        last = len(self.layers) - 1

        def forward(*args: Any, **kwargs: Any) -> Any:
            x = args[0] if args else kwargs.pop(hidden_name)
            if self._until == "embed":
                self._inject = x
                raise _Stop
            if self._until == "calls":
                self._calls.append(LayerCall(args[1:], kwargs))
                if index == last:
                    raise _Stop
            elif index == last:
                x = self._inject
            width = self._returns[index]
            return (x, *(None,) * (width - 1)) if width else x

        return forward


_LENGTH = "max_seq_len_cached"
"""Part of the names under which rotary modules remember a length."""


class LengthState:
    """Undoes what rotary modules remember of earlier calls: `dynamic` tables would depend on the order of documents."""

    def __init__(self, model: PreTrainedModel, layers: nn.ModuleList) -> None:
        self._saved = []
        for _, module in outer_modules(model, layers):
            if any(_LENGTH in key for key in vars(module)):
                plain = {k: v for k, v in vars(module).items() if isinstance(v, int | float) and not k.startswith("_")}
                self._saved.append((module, plain, {k: b for k, b in module._buffers.items()}))

    def reset(self) -> None:
        for module, plain, buffers in self._saved:
            for key in [key for key in vars(module) if _LENGTH in key and key not in plain]:
                delattr(module, key)  # a table of one type of layers has a length of its own once it has grown
            vars(module).update(plain)
            module._buffers.update(buffers)


def outer_modules(model: PreTrainedModel, layers: nn.ModuleList) -> list[tuple[str, nn.Module]]:
    inner = {id(m) for m in layers.modules()}
    return [(n, m) for n, m in model.named_modules() if id(m) not in inner]


def parameter_sites(model: nn.Module, exclude: str) -> dict[str, list[tuple[nn.Module, str]]]:
    """Every place (module, attribute) of each parameter outside `exclude`, by the parameter's first name."""
    names: dict[int, str] = {}
    sites: dict[str, list[tuple[nn.Module, str]]] = {}
    for module_name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            full = f"{module_name}.{key}" if module_name else key
            if parameter is None or full.startswith(f"{exclude}."):
                continue
            sites.setdefault(names.setdefault(id(parameter), full), []).append((module, key))
    return sites


def vocabulary_tables(model: PreTrainedModel) -> set[str]:
    """Names of the parameters with a row for each token: the input embedding, the head and its bias."""
    modules: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    result = {id(p) for module in modules if module is not None for p in module.parameters(recurse=False)}
    return {name for name, parameter in model.named_parameters() if id(parameter) in result}


def first_parameter(layer: nn.Module) -> str:
    """Name of the layer's hidden state argument."""
    return next(iter(inspect.signature(layer.forward).parameters))


def site_parameter(sites: list[tuple[nn.Module, str]]) -> Tensor:
    module, key = sites[0]
    parameter = module._parameters[key]
    assert parameter is not None
    return parameter
