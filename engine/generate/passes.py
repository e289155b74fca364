"""One pass of new tokens through all blocks of a model, forward only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine.generate.attend import Place, positions_of, rows_handler
from penstock.engine.generate.decode import Row
from penstock.engine.generate.kept import Kept
from penstock.engine.generate.weights import Weights
from penstock.engine.model.layers import LayerInputs
from penstock.engine.model.runner import ModelRunner

_CHUNKS_ON_DEVICE = 4
"""Chunks whose hidden states stay on the compute device between two layers; those of more wait in RAM."""

Finish = Callable[[Tensor, Sequence[tuple[int, int, Place]], Callable[[Tensor], Tensor]], None]
"""(x [n, hidden], (row, first token of it in x, what x has of it) of each, logits): told of every chunk in turn.

x is the last layer's output; `logits` gives [m, vocab] of rows [m, hidden] of it."""


@dataclass(slots=True)
class _Chunk:
    """Tokens that pass through a layer at once: of one row, or of several one behind the other."""

    rows: list[int]
    sequences: list[int]
    places: list[Place]
    ids: list[int]
    inputs: LayerInputs | None = None

    @property
    def pieces(self) -> list[tuple[int, int, Place]]:
        found, first = [], 0
        for row, place in zip(self.rows, self.places, strict=True):
            found.append((row, first, place))
            first += place.length
        return found


def cut(rows: Sequence[Row], chunk_tokens: int, *, whole: bool) -> list[_Chunk]:
    """`rows` in chunks of at most so many tokens; `whole`: of a row each, whatever its length."""
    if whole:
        return [_Chunk([i], [row.sequence], [Place(row.start, len(row.ids))], [*row.ids]) for i, row in enumerate(rows)]
    chunks = [_Chunk([], [], [], [])]
    for i, row in enumerate(rows):
        done = 0
        while done < len(row.ids):
            if len(chunks[-1].ids) == chunk_tokens:
                chunks.append(_Chunk([], [], [], []))
            part = row.ids[done : done + chunk_tokens - len(chunks[-1].ids)]
            chunks[-1].rows.append(i)
            chunks[-1].sequences.append(row.sequence)
            chunks[-1].places.append(Place(row.start + done, len(part)))
            chunks[-1].ids += part
            done += len(part)
    return chunks


def run_pass(
    runner: ModelRunner, weights: Weights, rows: Sequence[Row], kept: Kept, chunk_tokens: int, finish: Finish
) -> None:
    """Read `rows`, each block once, their keys and values into `kept`.

    Of a recurrent model each row is its sequence from the first token on.
    """
    spec, device = runner.spec, runner.device
    chunks = cut(rows, chunk_tokens, whole=spec.recurrent)
    home = device if len(chunks) <= _CHUNKS_ON_DEVICE else torch.device("cpu")
    lengths = [row.start + len(row.ids) for row in rows]
    for chunk in chunks:
        chunk.inputs = _inputs(runner, chunk, lengths)
    with weights.block(0) as parameters:
        hidden = [
            runner.embed(parameters, torch.tensor(chunk.ids), positions_of(chunk.places)).to(home) for chunk in chunks
        ]
    for layer, shape in enumerate(spec.attention):
        with weights.block(layer + 1) as parameters:
            # Each sequence once: what earlier chunks of this pass made is there already.
            firsts = {s: p for chunk in chunks[::-1] for s, p in zip(chunk.sequences, chunk.places, strict=True)}
            kept.bring(layer, list(firsts.items()))
            for i, chunk in enumerate(chunks):
                handler = None
                if shape is not None:
                    rows_of = [kept.of(layer, sequence) for sequence in chunk.sequences]
                    handler = rows_handler(chunk.places, rows_of, shape.chunk)
                assert chunk.inputs is not None
                x = hidden[i].to(device)
                hidden[i] = runner.layers.forward_by(layer, parameters, x, chunk.inputs, handler).to(home)
            kept.take(layer, [pair for chunk in chunks for pair in zip(chunk.sequences, chunk.places, strict=True)])
    with weights.block(len(spec.blocks) - 1) as parameters:
        for x, chunk in zip(hidden, chunks, strict=True):
            finish(x.to(device), chunk.pieces, lambda some: runner.logits(parameters, some))


def _inputs(runner: ModelRunner, chunk: _Chunk, lengths: Sequence[int]) -> LayerInputs:
    """The layers' arguments; rotary tables that depend on a sequence's length are of each sequence's own."""
    longest = [
        lengths[row] - 1 for row, place in zip(chunk.rows, chunk.places, strict=True) for _ in range(place.length)
    ]
    return runner.inputs(positions_of(chunk.places), torch.tensor(longest))
