"""One run of a shrunk copy of a model that shows how its parts are connected."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import PretrainedConfig, PreTrainedModel

from penstock.engine.attention import chunk as attention
from penstock.engine.attention.chunk import AttentionCall, MaskPattern
from penstock.engine.config import AdapterConfig
from penstock.engine.model import skeleton
from penstock.engine.model.decay import undecayed_matrices
from penstock.engine.model.joined import readers_of_one
from penstock.engine.model.recurrence import find_state, with_shapes
from penstock.engine.model.skeleton import LayerCall, hidden_states
from penstock.engine.model.spec import AttentionShape, RecurrentState
from penstock.engine.model.sums import summed_linears, unread_linear
from penstock.storage.files.errors import UserError

_TOKENS = 12
_CUT = 5


@dataclass(frozen=True, slots=True)
class Trial:
    """What was seen; `returns`, `unread`, `summed` and `counts_positions` are those of ModelSpec."""

    embed_parameters: frozenset[str]
    """Parameters outside the layers that the first layer's input depends on."""
    head_parameters: frozenset[str]
    """Parameters outside the layers that the logits depend on, given the last layer's output."""
    returns: tuple[int, ...]
    attends: tuple[bool, ...]
    unread: tuple[str | None, ...]
    summed: tuple[tuple[str, ...], ...]
    sharing: tuple[tuple[tuple[str, ...], ...], ...]
    """Per layer: those of them that read one tensor, in the order in which they are called (engine/model/joined.py)."""
    whole_documents: bool
    """Some layer mixes tokens outside of attention and hands nothing on, or attends without being told positions."""
    states: tuple[RecurrentState | None, ...]
    """Per layer what it hands on instead, without shapes."""
    counts_positions: tuple[bool, ...]
    """Per layer: whether it asks a cache how many tokens came before, to count its own from there."""
    undecayed: frozenset[str]
    """Parameters of two or more dimensions that are biases or factors of norms (engine/model/decay.py)."""


@dataclass(slots=True)
class _Seen:
    hidden: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    attention_calls: int

    @property
    def output_hidden(self) -> Any:
        return hidden_states(self.output)


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside the block torch computes on one thread: between the tensors of a small model others only wait, on a busy
    machine for milliseconds each time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def random_model(
    config: PretrainedConfig, seed: int = 0, experts: str | None = None, adapter: AdapterConfig | None = None
) -> PreTrainedModel:
    """The model of `config` on the CPU in float32, no parameter or persistent buffer trivially zero or one."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = skeleton.build(config, device="cpu", experts=experts, adapter=adapter)
        for name, parameter in sorted(model.named_parameters()):
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
            if name.endswith("A_log"):
                # State-space layers start out forgetting within a token or two, which hides their state, and sum decay
                # logarithms up to 1e3 in float32, which hides errors: let the state last.
                parameter.sub_(3.0)
        persistent = model.state_dict().keys()
        for name, buffer in sorted(model.named_buffers()):
            if name in persistent and buffer.is_floating_point():
                noise = torch.randn_like(buffer) * 0.05
                # Zeros among other values may be a mask, and stay.
                buffer.copy_(buffer * (1 + noise) if buffer.any() else noise)
    return model


@one_thread()
def run_trial(config: PretrainedConfig, adapter: AdapterConfig | None = None) -> Trial:
    """Run the (already shrunk) model of `config`, with its `adapter`, and see what depends on what. Raises UserError
    naming what makes the model impossible to stream."""
    model = random_model(config, adapter=adapter)
    kind = f"model type '{config.model_type}'"
    prefix, layers = skeleton.find_layers(model)
    outer = {n: skeleton.site_parameter(s) for n, s in skeleton.parameter_sites(model, exclude=prefix).items()}
    seen, logits = _run_recorded(kind, model, layers, range(_TOKENS))
    _refuse_side_channels(kind, layers, seen)
    embed = _used(seen[0].hidden, outer)
    head = _used(logits, outer)
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    mixes = [_mixes_tokens(kind, i, layer, call) for i, (layer, call) in enumerate(zip(layers, seen, strict=True))]
    states = _states(kind, model, layers, seen, mixes) if any(mixes) else (None,) * len(layers)
    attends = tuple(call.attention_calls > 0 for call in seen)
    unread, summed, sharing = zip(*(_linears(*of) for of in zip(layers, seen, strict=True)), strict=True)
    return Trial(
        embed_parameters=frozenset(embed),
        head_parameters=frozenset(head),
        returns=tuple(len(call.output) if isinstance(call.output, tuple) else 0 for call in seen),
        attends=attends,
        unread=unread,
        summed=summed,
        sharing=sharing,
        whole_documents=any(mixed and state is None for mixed, state in zip(mixes, states, strict=True))
        or (any(attends) and not takes_positions),
        states=states,
        counts_positions=tuple(_counts_positions(layer, call) for layer, call in zip(layers, seen, strict=True)),
        undecayed=undecayed_matrices(model, _constant),
    )


def _states(
    kind: str, model: PreTrainedModel, layers: nn.ModuleList, seen: Sequence[_Seen], mixes: Sequence[bool]
) -> tuple[RecurrentState | None, ...]:
    """What each layer hands on from chunk to chunk, of those that mix tokens outside of attention."""
    parts = [_run_recorded(kind, model, layers, of)[0] for of in (range(_CUT), range(_CUT, _TOKENS))]
    result = []
    for layer, mixed, *calls in zip(layers, mixes, seen, *parts, strict=True):

        def run(x: Tensor, call: LayerCall, layer: nn.Module = layer) -> Tensor:
            output = layer(x, *call.args, **call.kwargs)
            y: Tensor = hidden_states(output)
            return y

        given = [LayerCall(call.args, call.kwargs) for call in calls]
        with attention.use(_blind), torch.enable_grad():
            result.append(find_state(run, calls[0].hidden, _CUT, given) if mixed else None)
    return tuple(result)


def _run_recorded(kind: str, model: PreTrainedModel, layers: nn.ModuleList, of: range) -> tuple[list[_Seen], Tensor]:
    """What every layer was given for tokens at positions `of` and returned, and the logits as a function of the last
    layer's detached output."""
    seen: list[_Seen] = []
    calls = 0

    def attend(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        nonlocal calls
        calls += 1
        return _blind(q, k, v, call)

    def record(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        nonlocal calls
        index = len(seen)
        if index >= len(layers) or module is not layers[index]:
            raise UserError(f"{kind}: its layers do not run once each in order, which is not supported")
        name = skeleton.first_parameter(module)
        rest = {key: value for key, value in kwargs.items() if key != name or args}
        seen.append(_Seen(args[0] if args else kwargs[name], args[1:], rest, output, calls))
        calls = 0
        if index < len(layers) - 1:
            return output
        cut = seen[-1].output_hidden.detach().requires_grad_()
        return (cut, *output[1:]) if isinstance(output, tuple) else cut

    positions = torch.arange(of.start, of.stop)[None]
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    kwargs = {"position_ids": positions} if takes_positions else {}
    with ExitStack() as hooks, attention.use(attend), torch.enable_grad():
        for layer in layers:
            hooks.enter_context(layer.register_forward_hook(record, with_kwargs=True))
        logits = model(input_ids=positions % 7 + 3, use_cache=False, **kwargs).logits
    if len(seen) != len(layers):
        raise UserError(f"{kind}: only {len(seen)} of its {len(layers)} layers run in a forward pass")
    return seen, logits


def _blind(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """Attention that sees nothing."""
    return q.new_zeros(q.shape[0], q.shape[1], v.shape[-1])


def _refuse_side_channels(kind: str, layers: nn.ModuleList, seen: list[_Seen]) -> None:
    for index, call in enumerate(seen):
        if call.attention_calls > 1:
            raise UserError(
                f"{kind}: layer {index} calls attention {call.attention_calls} times; only one call is supported"
            )
        if not isinstance(call.output_hidden, Tensor) or call.output_hidden.shape != call.hidden.shape:
            raise UserError(f"{kind}: layer {index} does not return a hidden state of its input's shape")
        if index and call.hidden is not seen[index - 1].output_hidden:
            raise UserError(
                f"{kind}: the model computes between layers {index - 1} and {index}, which is not supported"
            )
        positional = list(inspect.signature(layers[index].forward).parameters)[1:]
        given = dict(zip(positional, call.args, strict=False)) | call.kwargs
        for path, leaf in pytree.tree_flatten_with_path(given)[0]:
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                raise UserError(
                    f"{kind}: layer {index} is given {pytree.keystr(path)}, computed from trained parameters, in "
                    "addition to its hidden state; only the hidden state may carry gradients between layers"
                )


def _used(output: Tensor, parameters: dict[str, Tensor]) -> set[str]:
    """Names of the parameters that `output` depends on."""
    if not output.requires_grad:
        return set()
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
    grads = torch.autograd.grad(output, list(parameters.values()), weight, allow_unused=True, retain_graph=True)
    return {name for name, grad in zip(parameters, grads, strict=True) if grad is not None}


def _mixes_tokens(kind: str, index: int, layer: nn.Module, call: _Seen) -> bool:
    """Whether the layer's output depends on earlier tokens although its attention sees nothing."""
    with attention.use(_blind), torch.enable_grad():
        x = call.hidden.detach().requires_grad_()
        output = layer(x, *call.args, **call.kwargs)
        y = hidden_states(output)
    half = _TOKENS // 2
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(0))
    early, late = weight.clone(), weight
    early[:, half:] = 0
    late[:, :half] = 0
    (from_early,) = torch.autograd.grad(y, x, early, retain_graph=True)
    (from_late,) = torch.autograd.grad(y, x, late)
    if from_early[:, half:].any():
        raise UserError(
            f"{kind}: layer {index} ({type(layer).__name__}) lets tokens see later tokens: its attention does not go "
            "through transformers' attention interface, or it is not causal"
        )
    return bool(from_late[:, :half].any())


class _AskedCache(skeleton.TokensBefore):
    """Knows whether it was asked how many tokens came before."""

    queried = False

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        self.queried = True
        return self.offsets


def _counts_positions(layer: nn.Module, call: _Seen) -> bool:
    if call.kwargs.get(skeleton.CACHE, call) is not None:
        return False
    cache = _AskedCache(torch.arange(_TOKENS))
    try:
        with attention.use(_constant), torch.no_grad():
            layer(call.hidden.detach(), *call.args, **call.kwargs | {skeleton.CACHE: cache})
    except Exception:  # it wants more of a cache; if it counts as well, the self-check says so
        return False
    return cache.queried


def _linears(layer: nn.Module, call: _Seen) -> tuple[str | None, tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """A layer's linear modules: the one that is unread, those that are summed, and of these those that share."""
    x = call.hidden.detach().requires_grad_()

    def run(module: nn.Module) -> Tensor:
        output = module(x, *call.args, **call.kwargs)
        y: Tensor = hidden_states(output)
        return y

    with torch.enable_grad():
        with attention.use(_of_all):
            # On a copy: a layer may keep what it computed last, and could then not be copied any more.
            try:
                copied = copy.deepcopy(layer)
            except RuntimeError:
                raise UserError(
                    f"{type(layer).__name__} has kept tensors of its last call, which the next one would go on from"
                ) from None
            summed = summed_linears(copied, run, x)
        with attention.use(_constant):
            unread = unread_linear(layer, run, x)
        with attention.use(_of_all):
            return unread, summed, readers_of_one(layer, summed, run)


def _of_all(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """Instead of attention something that depends on all that it is given."""
    return q.sum(-1, keepdim=True) + k.sum((-2, -1))[:, None, None] + v.sum(-2)[:, None, :]


def _constant(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """Attention with an output of its own, whatever it is given; like the saved output in backward."""
    shape = (q.shape[0], q.shape[1], v.shape[-1])
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=q.dtype)


class _Captured(BaseException):
    """Leaves a layer at its attention call, with the fields of an AttentionShape as args."""


def layer_shapes(
    model: PreTrainedModel,
    structures: list[int],
    attends: list[bool],
    returns: list[int],
    states: list[RecurrentState | None],
) -> tuple[list[AttentionShape | None], list[RecurrentState | None]]:
    """Attention of each layer of `model` (on meta), None without, and `states` with their shapes. `structures[i]`: the
    first layer that is alike."""
    frame = skeleton.Skeleton(model, device=torch.device("cpu"), dtype=torch.float32, returns=returns)
    with torch.no_grad(), attention.mask_patterns():
        calls = frame.calls(torch.arange(2))
    remembered = _state_shapes(model, calls, structures, states)
    shapes: list[AttentionShape | None] = []
    for index, layer in enumerate(frame.layers):
        if not attends[index]:
            shapes.append(None)
            continue
        given = (calls[index].args, calls[index].kwargs)
        sizes = {leaf.kind: leaf.size for leaf in pytree.tree_leaves(given) if isinstance(leaf, MaskPattern)}
        sliding, chunked = sizes.get("sliding"), sizes.get("chunked")
        known = shapes[structures[index]] if structures[index] != index else None
        if known is not None:
            shapes.append(replace(known, window=known.window or sliding, chunk=chunked))
            continue

        def capture(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
            raise _Captured(q.shape[1], k.shape[1], q.shape[2], v.shape[2], call.window, None, call.softcap)

        given = pytree.tree_map_only(MaskPattern, lambda pattern: None, given)
        args, kwargs = pytree.tree_map_only(Tensor, lambda tensor: tensor.to("meta"), given)
        x = torch.empty(1, 2, model.config.get_text_config(decoder=True).hidden_size, device="meta")
        try:
            with attention.use(capture), torch.no_grad():
                type(layer).forward(layer, x, *args, **kwargs)
        except NotImplementedError as error:
            raise UserError(
                f"layer {index} ({type(layer).__name__}) looks at values before it attends, so the shapes of its "
                "attention are not known without data"
            ) from error
        except _Captured as found:
            shape = AttentionShape(*found.args)
            shapes.append(replace(shape, window=shape.window or sliding, chunk=chunked))
        else:
            raise AssertionError(f"layer {index} attends in the shrunk model only")
    return shapes, remembered


def _state_shapes(
    model: PreTrainedModel, calls: Sequence[LayerCall], structures: list[int], states: list[RecurrentState | None]
) -> list[RecurrentState | None]:
    """`states` of the layers of `model` (on meta, forwards replaced) with their shapes; `calls`: for two tokens."""
    layers, known = skeleton.find_layers(model)[1], dict[int, RecurrentState | None]()
    hidden = model.config.get_text_config(decoder=True).hidden_size
    for index, state in enumerate(states):
        if state is None or structures[index] in known:
            continue
        layer = copy.deepcopy(layers[index]).to(torch.bfloat16)

        def run(x: Tensor, call: LayerCall, layer: nn.Module = layer) -> Tensor:
            output = type(layer).forward(layer, x, *call.args, **call.kwargs)
            y: Tensor = hidden_states(output)
            return y

        given = pytree.tree_map_only(MaskPattern, lambda pattern: None, (calls[index].args, calls[index].kwargs))
        call = LayerCall(*pytree.tree_map_only(Tensor, lambda tensor: tensor.to("meta"), given))
        x = torch.empty(1, 2, hidden, dtype=torch.bfloat16, device="meta")
        with attention.use(_blind), torch.no_grad():
            known[structures[index]] = with_shapes(state, run, x, call)
    return [None if state is None else known[structures[i]] for i, state in enumerate(states)]
