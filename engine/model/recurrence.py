"""Layers that carry a state from token to token beside attention, a chunk at a time.

transformers hands such a state over in a cache: the layer takes what it holds of the tokens before, and puts there what
it holds of its own. Here the cache is a stand-in of one call (`StateCache`), so that a chunk begins with the state in
which the one before ended, and its gradient is a gradient of that one's output. A document begins without a state: a
chunk is run document by document (`Segment`), of which the first one only may have begun in a chunk before.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from penstock.engine.attention.chunk import AttentionCall, AttentionState, Handler
from penstock.engine.model.skeleton import LayerCall, TokensBefore
from penstock.engine.model.spec import RecurrentState, StateTensor

States = Sequence[Tensor]
"""Of one layer, as RecurrentState.tensors has them."""
_Key = tuple[str, int]


class StateCache(TokensBefore):
    """In place of a cache for one call of one layer, as transformers' Cache: the state before its tokens and behind."""

    def __init__(self, before: Mapping[_Key, Tensor], offsets: Any = 0) -> None:
        """`before`: (kind, number) -> state; empty at the start of a document. `offsets`: of TokensBefore, where the
        layer counts its positions."""
        super().__init__(offsets)
        self._before = before
        self.behind: dict[_Key, Tensor] = {}

    @classmethod
    def of(cls, state: RecurrentState, before: States | None, instead: Any) -> StateCache:
        """`instead`: what the layer would be given for a cache."""
        keys = ((tensor.kind, tensor.number) for tensor in state.tensors)
        offsets = instead.offsets if isinstance(instead, TokensBefore) else 0
        return cls(dict(zip(keys, before or (), strict=False)), offsets)

    def states(self, state: RecurrentState) -> list[Tensor]:
        """Behind the tokens."""
        return [self.behind[tensor.kind, tensor.number] for tensor in state.tensors]

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._before.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._before.get(("recurrent", state_idx))

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The inputs of a convolution [1, channels, n] behind those before them; the last ones are the state."""
        before = self._before.get(("conv", state_idx))
        whole = conv_states if before is None else torch.cat([before, conv_states], dim=-1)
        width = conv_kernel_size or (conv_states if before is None else before).shape[-1]
        last = whole[..., -width:]
        self.behind["conv", state_idx] = torch.nn.functional.pad(last, (width - last.shape[-1], 0))
        return whole

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        self.behind["recurrent", state_idx] = recurrent_states
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class Segment:
    """The tokens of a chunk that are of one document."""

    start: int
    """In the chunk."""
    end: int
    continues: bool
    """The document began in a chunk before."""
    calls: tuple[LayerCall, ...]
    """Arguments of every layer for its tokens; for two where it is one that continues: see `lengthened`."""

    @property
    def lengthened(self) -> bool:
        """A layer takes one token behind a state for one that is being generated, and has another way for it, without
        a gradient. So a second one goes along, of which nothing is used: it ends its document."""
        return self.continues and self.end - self.start == 1

    def of(self, x: Tensor) -> Tensor:
        """Its rows of x [n, ...]."""
        part = x[self.start : self.end]
        return torch.cat([part, part]) if self.lengthened else part

    def own(self, y: Tensor) -> Tensor:
        """What is its own of what was made of its rows."""
        return y[:1] if self.lengthened else y

    def gradient_of(self, dy: Tensor) -> Tensor:
        """Its rows of a gradient dy [n, ...]."""
        part = dy[self.start : self.end]
        return torch.cat([part, torch.zeros_like(part)]) if self.lengthened else part

    def call(self, index: int, state: RecurrentState, before: States | None) -> tuple[LayerCall, StateCache]:
        """Arguments of layer `index` with a cache that holds the state `before`."""
        call = self.calls[index]
        cache = StateCache.of(state, before if self.continues else None, call.kwargs.get(state.argument))
        return replace(call, kwargs={**call.kwargs, state.argument: cache}), cache

    def attends(self, state: AttentionState) -> AttentionState:
        """Attention of its tokens, of that of the chunk."""
        rows = slice(self.start, self.end)
        return replace(
            state,
            out=state.out[rows],
            lse=state.lse[:, rows],
            start=state.start + self.start,
            end=state.start + self.end,
        )

    def handler(self, handler: Handler | None) -> Handler | None:
        """`handler` for its own tokens."""
        if handler is None or not self.lengthened:
            return handler

        def handle(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
            out = handler(q[:1], k[:1], v[:1], call)
            return torch.cat([out, out])

        return handle


SegmentHandlers = Callable[[Segment, bool], Handler | None]
"""(part of a chunk, whether it goes backward) -> its attention; None of a layer without."""


def document_ranges(start: int, end: int, documents: Sequence[int]) -> list[tuple[int, int, bool]]:
    """Of the tokens [start, end) of a stream with documents that start at `documents`, counted from `start`: where each
    document begins and ends, and whether it began before."""
    inside = [first - start for first in documents if start < first < end]
    bounds = [0, *inside, end - start]
    return [(a, b, a == 0 and start not in documents) for a, b in itertools.pairwise(bounds)]


CACHES = ("past_key_values", "cache_params")
"""What transformers calls a layer's argument for a cache."""
Run = Callable[[Tensor, LayerCall], Tensor]
"""(a layer's input [1, n, hidden], its other arguments) -> its output."""


def find_state(run: Run, x: Tensor, cut: int, calls: Sequence[LayerCall]) -> RecurrentState | None:
    """What a layer hands on from the first `cut` tokens of x [1, n, hidden] to the others, where it thereby computes
    what it computes of the whole, forward and backward; without shapes. None where it does not. `calls`: its arguments
    for all of x, for the first tokens and for the others."""
    whole = x.detach().requires_grad_()
    weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    y = run(whole, calls[0])
    expected = [y.detach(), *torch.autograd.grad(y, whole, weight)]
    for name in CACHES:
        if name not in calls[0].kwargs:
            continue
        leaf, first = x.detach().requires_grad_(), StateCache({})
        try:
            top = run(leaf[:, :cut], _with(calls[1], name, first))
            if not first.behind:
                continue
            bottom = run(leaf[:, cut:], _with(calls[2], name, StateCache(first.behind)))
        except Exception:  # it wants more of a cache, or takes no state
            continue
        made = torch.cat([top, bottom], dim=1)
        found = [made.detach(), *torch.autograd.grad(made, leaf, weight)]
        if all((a - b).norm() <= 1e-4 * b.norm() for a, b in zip(found, expected, strict=True)):
            tensors = [StateTensor("conv" if kind == "conv" else "recurrent", n, (), False) for kind, n in first.behind]
            return RecurrentState(name, tuple(tensors))
    return None


def _with(call: LayerCall, name: str, cache: StateCache) -> LayerCall:
    return replace(call, kwargs={**call.kwargs, name: cache})


def with_shapes(state: RecurrentState, run: Run, x: Tensor, call: LayerCall) -> RecurrentState | None:
    """`state` with the shapes and dtypes of its tensors, as the layer makes them of x [1, n, hidden], which is
    bfloat16; None where the layer does not run on x's device."""
    cache = StateCache({})
    try:
        run(x, _with(call, state.argument, cache))
    except Exception:
        return None
    of = ((tensor, cache.behind[tensor.kind, tensor.number]) for tensor in state.tensors)
    tensors = [replace(t, shape=tuple(v.shape), float32=v.dtype == torch.float32) for t, v in of]
    return replace(state, tensors=tuple(sorted(tensors, key=lambda tensor: not tensor.float32)))  # aligned end to end
