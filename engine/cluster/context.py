"""Context parallelism: the tokens of one stream over several ranks, which gather each layer's keys and values.

A stream is cut into twice as many pieces as there are ranks; rank r has piece r and the r-th from the end, so that all
have as much causal attention to compute. Queries stay where they are. Keys and values of a layer come from all ranks
(for packed documents what ring-flash-attention's author recommends over a ring), and a mask keeps documents apart;
transformers' own attention computes the rest. Gradients of keys and values are summed on their way back.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn.attention.flex_attention import create_block_mask
from transformers import AttentionInterface, AttentionMaskInterface

from penstock.engine.model.spec import ModelSpec
from penstock.engine.model.tokens import IGNORE_LABEL, MicroBatch
from penstock.storage.files.errors import UserError

NAME = "penstock_gathered"
"""What transformers calls attention of this rank's queries to all ranks' keys."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank computes of a micro-batch: all of it, or its tokens where a context is spread over ranks."""

    ids: Tensor
    """[rows, tokens] int64."""
    positions: Tensor
    """[rows, tokens] int64."""
    targets: Tensor
    """[n] int64: which of the rows' tokens, end to end, have something to predict."""
    labels: Tensor
    """[n] int64: what that is."""
    weights: Tensor | None
    """[n] float32: how much it counts; None: 1 for all."""
    filled: int
    """Of the rows' tokens, end to end, those before the padding."""

    @staticmethod
    def of(micro_batch: MicroBatch, pick: Callable[[Tensor, float], Tensor], rows: int, device: torch.device) -> Part:
        """What `pick` takes of each field [tokens], given the value of padding, as so many rows. Targets are counted on
        the CPU, without waiting for the device."""
        labels, weights = pick(micro_batch.labels, IGNORE_LABEL), micro_batch.weights
        targets = torch.nonzero(labels != IGNORE_LABEL).squeeze(1)
        real = torch.arange(len(micro_batch.ids)) < micro_batch.num_filled
        return Part(
            ids=pick(micro_batch.ids, int(micro_batch.ids[-1])).view(rows, -1).to(device),
            positions=pick(micro_batch.positions, 0).view(rows, -1).to(device),
            targets=targets.to(device),
            labels=labels[targets].to(device),
            weights=None if weights is None else pick(weights, 1)[targets].to(device),
            filled=int(pick(real, False).sum()),
        )


class Context:
    """The ranks that share one stream, of which this process is one."""

    _now: ClassVar[Context | None] = None
    """Whose forward is run: attention is called by the model, which knows nothing of it."""

    def __init__(self, spec: ModelSpec, group: dist.ProcessGroup, base: str) -> None:
        """`base`: transformers' attention that computes; UserError for a model whose layers need more than its keys."""
        for shape in spec.attention:
            if spec.recurrent or spec.length_dependent_rotary or shape is None or shape.chunk is not None:
                raise UserError(
                    f"--context-parallel: model type '{spec.model_type}' has layers that need more of a sequence than "
                    "keys and values (a state, attention in blocks, or rotary tables by length); leave the option out"
                )
        self._windows = [None if shape is None else shape.window for shape in spec.attention]
        self.group, self._base = group, base
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._masks: dict[int | None, Any] = {}
        self._at = self._documents = torch.empty(0)
        AttentionInterface.register(NAME, _gathered)
        AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)  # masks are ours

    def part(self, micro_batch: MicroBatch, device: torch.device) -> Part:
        """This rank's tokens; all that is computed until the next call belongs to this micro-batch."""
        tokens = len(micro_batch.ids)
        pieces = 2 * self.size
        length = -(-tokens // pieces) * pieces
        mine = [self._tokens_of(rank, length) for rank in range(self.size)]
        starts = torch.zeros(length, dtype=torch.int64)
        starts[[*micro_batch.documents, *([tokens] if length > tokens else ())]] = 1
        self._at = torch.cat(mine).to(device)
        self._documents = starts.cumsum(0)[torch.cat(mine)].to(device)
        self._masks.clear()
        Context._now = self
        own = mine[self.rank]

        def cut(values: Tensor, padding: float) -> Tensor:
            whole = torch.full((length,), padding, dtype=values.dtype)
            whole[:tokens] = values
            return whole[own]

        return Part.of(micro_batch, cut, 1, device)

    def _tokens_of(self, rank: int, length: int) -> Tensor:
        """Which tokens of a stream of `length` a rank has, ascending."""
        piece = length // (2 * self.size)
        numbers = (rank, 2 * self.size - 1 - rank)
        return torch.cat([torch.arange(n * piece, (n + 1) * piece) for n in numbers])

    def sees(self, window: int | None) -> Callable[..., Tensor]:
        """Whether query number q of this rank sees key number k of all ranks', as flex_attention asks it."""
        own = len(self._at) // self.size
        at, documents = self._at[self.rank * own :][:own], self._documents[self.rank * own :][:own]
        keys_at, keys_documents = self._at, self._documents

        def mask(batch: Any, head: Any, q: Tensor, k: Tensor) -> Tensor:
            seen = (documents[q] == keys_documents[k]) & (keys_at[k] <= at[q])
            return seen if window is None else seen & (at[q] - keys_at[k] < window)

        return mask

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Any:
        """Attention [1, heads, tokens, dim] of this rank's queries to all keys of the stream."""
        window = self._windows[int(module.layer_idx)]  # type: ignore[arg-type]
        if window not in self._masks:
            self._masks[window] = self._mask(self.sees(window), query)
        gathered = (torch.cat(all_gather(t.contiguous(), group=self.group), dim=2) for t in (key, value))
        if self._base == "eager":  # plain operations, in the model's own file
            compute: Callable[..., Any] = sys.modules[type(module).__module__].eager_attention_forward
        else:
            compute = AttentionInterface()[self._base]
        return compute(module, query, *gathered, self._masks[window], **kwargs)

    def _mask(self, sees: Callable[..., Tensor], query: Tensor) -> Any:
        own, every = query.shape[2], len(self._at)
        if self._base == "flex_attention":
            return create_block_mask(sees, None, None, own, every, device=str(query.device))
        q, k = (torch.arange(n, device=query.device) for n in (own, every))
        dense = sees(None, None, q[:, None], k[None, :])[None, None]
        if self._base == "eager":
            return torch.zeros(dense.shape, dtype=query.dtype, device=query.device).masked_fill_(
                ~dense, torch.finfo(query.dtype).min
            )
        return dense


def _gathered(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
    assert Context._now is not None, "attention of a context that is spread over ranks, outside of its forward"
    return Context._now.attend(module, query, key, value, **kwargs)


def whole_part(micro_batch: MicroBatch, device: torch.device) -> Part:
    """All of a micro-batch, without the padding at its end. Where no document crosses a row's end, each row is one of
    the model's own batch; else documents are laid end to end in one."""
    # Of padding alone one token is computed with.
    end = max(1, micro_batch.num_filled)
    return Part.of(micro_batch, lambda values, _: values[:end], _rows(micro_batch.documents, end), device)


def _rows(documents: Sequence[int], tokens: int) -> int:
    """The most rows of equal length in which no document crosses a row's end."""
    known = set(documents)
    for rows in range(len(documents), 1, -1):
        if tokens % rows == 0 and known.issuperset(range(0, tokens, tokens // rows)):
            return rows
    return 1
