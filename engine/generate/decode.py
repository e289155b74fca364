"""Continuing token sequences: several at once, of unequal length, without padding, by whatever computes logits."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.engine.forecast.problem import DRAW_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoding:
    new_tokens: int = 64
    """At most so many of each sequence."""
    temperature: float = 0.0
    """Logits are divided by it before a token is drawn; 0: always the likeliest token."""
    top_p: float = 1.0
    """Drawn are the likeliest tokens that together have this probability, above 0 and at most 1."""
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()
    """A sequence ends at the first of these."""


class Row(NamedTuple):
    """Tokens of one sequence that a forward is to read."""

    sequence: int
    """Which one, counted from 0."""
    start: int
    """Position of the first of `ids`."""
    ids: Sequence[int]
    wanted: bool = True
    """Whether the logits behind the last of them are."""

    @property
    def end(self) -> int:
        """Position behind the last."""
        return self.start + len(self.ids)


class Target(NamedTuple):
    """A token that is to be chosen."""

    read: int
    """The sequence behind whose last token it stands: its own, or one that begins alike."""
    sequence: int
    """Its own."""
    position: int


Choose = Callable[[Tensor, int], list[int]]
"""(logits float32 [sequences, vocab] wherever they were computed, bytes that may be made of them) -> token ids."""


class Forward(Protocol):
    """Reads tokens and says what may follow them."""

    def __call__(self, rows: Sequence[Row], choose: Choose) -> list[int]:
        """What `choose` makes of the logits, in which those behind the last token of each row are by its sequence.

        Keys and values are kept for later calls; a row that starts below what is kept of its sequence drops what lies
        behind. Of several copies of a prompt the first alone reads it.
        """


class Continuation(NamedTuple):
    ids: list[int]
    """Without the token that ended it."""
    ended: bool
    """At one of `Decoding.stop_ids`, or since `on_token` said so; else it has all its tokens."""
    end: int | None = None
    """The token of `Decoding.stop_ids` that ended it."""


OnToken = Callable[[int, int], bool | None]
"""(sequence, token id), called for every token but the one of `Decoding.stop_ids`; True ends the sequence behind it."""


def decode(
    forward: Forward,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    on_token: OnToken | None = None,
    *,
    copies: int = 1,
    known: Sequence[int] | None = None,
    first: int = 0,
) -> list[Continuation]:
    """Continue each of `prompts`, none of them empty, `copies` times, until it ends or has its tokens.

    Sequences, copies of a prompt side by side, that have ended leave the batch. What is drawn of one depends on the
    seed, its number and the position only, beside its logits. `known`: of each prompt, how many of its first tokens
    `forward` has read already, fewer than all. `first`: what the first of them is numbered in draws.
    """
    assert all(prompts), "a prompt without tokens"
    count = len(prompts) * copies
    made: list[list[int]] = [[] for _ in range(count)]
    ended = [False] * count
    ends: list[int | None] = [None] * count
    if decoding.new_tokens == 0:
        return [Continuation([], False) for _ in range(count)]
    starts = [0] * len(prompts) if known is None else known
    rows = [Row(i * copies, start, ids[start:]) for i, (start, ids) in enumerate(zip(starts, prompts, strict=True))]
    targets = [Target(row.sequence, row.sequence + copy, row.end) for row in rows for copy in range(copies)]
    while rows:
        numbered = [target._replace(sequence=first + target.sequence) for target in targets]
        chosen = forward(rows, partial(choose, targets=numbered, decoding=decoding))
        rows = []
        for (_, sequence, position), token in zip(targets, chosen, strict=True):
            if token in decoding.stop_ids:
                ended[sequence], ends[sequence] = True, token
                continue
            made[sequence].append(token)
            if on_token is not None and on_token(sequence, token):
                ended[sequence] = True
            elif len(made[sequence]) < decoding.new_tokens:
                rows.append(Row(sequence, position, [token]))
        targets = [Target(row.sequence, row.sequence, row.end) for row in rows]
    return [Continuation(*result) for result in zip(made, ended, ends, strict=True)]


def choose(logits: Tensor, nbytes: int, *, targets: Sequence[Target], decoding: Decoding) -> list[int]:
    """The token of each target, by `logits` [sequences, vocab], of which `nbytes` are made at a time, or one row."""
    if not decoding.temperature:
        likeliest = logits.argmax(dim=-1).tolist()
        return [int(likeliest[target.read]) for target in targets]
    step = max(1, nbytes // (logits.shape[1] * DRAW_BYTES))
    result: list[int] = []
    for at in range(0, len(targets), step):
        some = targets[at : at + step]
        result += _draw(logits[[target.read for target in some]], some, decoding)
    return result


def _draw(logits: Tensor, targets: Sequence[Target], decoding: Decoding) -> list[int]:
    """A token by each row of logits [n, vocab], by the inverse of the distribution function. Sums over the vocabulary
    are of blocks, added up on the host, as no device adds a running sum in the same order twice."""
    weights = torch.softmax(logits.double() / decoding.temperature, dim=-1)
    draws = [random.Random(f"{decoding.seed}:{sequence}:{position}").random() for _, sequence, position in targets]
    shares, ids, most = torch.tensor(draws, dtype=torch.float64), None, None
    if decoding.top_p < 1:
        weights, ids = weights.sort(dim=-1, descending=True, stable=True)
        most, kept = _passing(weights, torch.full_like(shares, decoding.top_p), over=False)
        shares = shares * kept
    places, _ = _passing(weights, shares, over=True)
    if ids is None or most is None:
        return [int(place) for place in places.tolist()]
    chosen = ids.gather(1, torch.minimum(places, most)[:, None].to(ids.device))
    return [int(token) for token in chosen[:, 0].tolist()]


def _passing(weights: Tensor, limits: Tensor, *, over: bool) -> tuple[Tensor, Tensor]:
    """Where the running sum of each row of `weights` float64 [n, vocab], none below 0, first is `over` a limit [n], or
    at it, and that sum there; int64 and float64 [n], on the host. It is never beyond the last weight above 0."""
    n, width = len(limits), math.isqrt(weights.shape[1] - 1) + 1
    blocks = torch.nn.functional.pad(weights, (0, -weights.shape[1] % width)).view(n, -1, width)
    sums = blocks.sum(dim=-1).cpu().cumsum(dim=-1)
    limits = torch.minimum(limits, torch.nextafter(sums[:, -1], torch.zeros(n, dtype=sums.dtype)))[:, None]
    block = torch.searchsorted(sums, limits, right=over)
    before = torch.where(block > 0, sums.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = blocks[torch.arange(n, device=weights.device), block[:, 0].to(weights.device)].cpu()
    running = before + inside.cumsum(dim=-1)
    last = torch.where(inside > 0, torch.arange(width), 0).amax(dim=-1, keepdim=True)
    place = torch.minimum(torch.searchsorted(running, limits, right=over), last)
    return (block * width + place)[:, 0], running.gather(1, place)[:, 0]
