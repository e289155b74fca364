"""Continuing token sequences: several at once, of unequal length, without padding, by whatever computes logits."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


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
    """Which prompt, counted from 0."""
    start: int
    """Position of the first of `ids`."""
    ids: Sequence[int]
    wanted: bool = True
    """Whether the logits behind the last of them are."""

    @property
    def end(self) -> int:
        """Position behind the last."""
        return self.start + len(self.ids)


class Forward(Protocol):
    """Reads tokens and says what may follow them."""

    def __call__(self, rows: Sequence[Row]) -> Tensor:
        """float32 [len(rows), vocab]: the logits behind the last token of each row. Keys and values are kept for later
        calls; a row that starts below what is kept of its sequence drops what lies behind."""


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
    known: Sequence[int] | None = None,
    first: int = 0,
) -> list[Continuation]:
    """Continue each of `prompts`, none of them empty, until it ends or has its tokens.

    Sequences that have ended leave the batch. What is drawn of a sequence depends on the seed, its number and the
    position only, beside its logits. `known`: of each prompt, how many of its first tokens `forward` has read already,
    fewer than all. `first`: what the first of them is numbered in draws.
    """
    assert all(prompts), "a prompt without tokens"
    made: list[list[int]] = [[] for _ in prompts]
    ended = [False] * len(prompts)
    ends: list[int | None] = [None] * len(prompts)
    if decoding.new_tokens == 0:
        return [Continuation([], False) for _ in prompts]
    starts = [0] * len(prompts) if known is None else known
    rows = [Row(i, start, ids[start:]) for i, (start, ids) in enumerate(zip(starts, prompts, strict=True))]
    while rows:
        targets = [(row.sequence, row.end) for row in rows]
        chosen = choose(forward(rows), [(first + sequence, position) for sequence, position in targets], decoding)
        rows = []
        for (sequence, position), token in zip(targets, chosen, strict=True):
            if token in decoding.stop_ids:
                ended[sequence], ends[sequence] = True, token
                continue
            made[sequence].append(token)
            if on_token is not None and on_token(sequence, token):
                ended[sequence] = True
            elif len(made[sequence]) < decoding.new_tokens:
                rows.append(Row(sequence, position, [token]))
    return [Continuation(*result) for result in zip(made, ended, ends, strict=True)]


def choose(logits: Tensor, targets: Sequence[tuple[int, int]], decoding: Decoding) -> list[int]:
    """The next token of each row of `logits` [rows, vocab]; `targets`: the (sequence, position) that each is for."""
    if not decoding.temperature:
        return [int(token) for token in logits.argmax(dim=-1).tolist()]
    # On the host and in float64: the draw is the same wherever the logits were made.
    probabilities = torch.softmax(logits.double().cpu() / decoding.temperature, dim=-1)
    ordered, ids = probabilities.sort(dim=-1, descending=True, stable=True)
    cumulative = ordered.cumsum(dim=-1)
    result = []
    for row, (sequence, position) in enumerate(targets):
        # Kept is every token before which less than `top_p` has been reached: at least the first.
        count = max(1, int(((cumulative[row] - ordered[row]) < decoding.top_p).sum()))
        share = random.Random(f"{decoding.seed}:{sequence}:{position}").random()
        choice = int(torch.searchsorted(cumulative[row, :count], share * float(cumulative[row, count - 1]), right=True))
        result.append(int(ids[row, min(choice, count - 1)]))
    return result
