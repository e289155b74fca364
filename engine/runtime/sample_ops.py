"""The ops that write samples: blocks on a few new tokens of several sequences, whose keys and values are kept."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.engine.attention.chunk import Handler
from penstock.engine.generate.attend import KeysValues, NewTokens, rows_handler
from penstock.engine.generate.places import Place, merged
from penstock.engine.model.layers import LayerInputs
from penstock.engine.model.recurrence import Segment
from penstock.engine.runtime.batch import SampleChunk
from penstock.engine.runtime.handlers import handles
from penstock.engine.runtime.views import Views, keys_and_values
from penstock.engine.schedule import actions as a
from penstock.engine.schedule.ops import Op


class _Inputs(NamedTuple):
    """What the layers compute a chunk from."""

    layers: LayerInputs
    segments: list[Segment]
    """Row by row where some carry a state."""
    new: NewTokens


_LEAST_KEYS = 4096
"""Keys of single queries that are in float32 at once where chunks have fewer tokens."""


class SampleOps:
    def __init__(self, views: Views, logits_bytes: int) -> None:
        self._views, self._runner, self._logits_bytes = views, views.runner, logits_bytes
        space = views.plan.problem.samples
        self._num_rows, self._num_sequences = 0 if space is None else space.rows, views.plan.problem.sequences
        self._keys_at_once = max(_LEAST_KEYS, views.plan.max_chunk_tokens)
        self._places: Sequence[Place] = ()
        self._begun = False
        """Whether a pass has written keys and values of these."""
        self._cached: dict[tuple[str, int], KeysValues] = {}
        """(block, stage) -> keys and values there."""
        self._cleared: set[int] = set()
        """Stages that hold numbers: products pass over rows that nobody has written."""
        self._inputs: tuple[tuple[int, int], _Inputs] | None = None
        """((pass, chunk), its inputs) of the chunk computed last."""
        self._behind: list[Tensor] | None = None
        """The recurrent state of the layer that was computed last behind its last row."""

    def lay_out(self, places: Sequence[Place]) -> None:
        """Sequences with these places from now on; the plan has room for as many, and for their rows."""
        assert len(places) <= self._num_sequences
        self._places, self._begun = places, False

    def forget(self) -> None:
        """Let go of the tokens of a pass that is over."""
        self._inputs, self._begun = None, True

    # ------------------------------------------------------------------ operands

    def _chunk(self, op: Op) -> SampleChunk:
        return self._views.samples[op.batch].chunks[op.index]

    def _inputs_of(self, op: Op) -> _Inputs:
        key = (op.batch, op.index)
        if self._inputs is None or self._inputs[0] != key:
            self._inputs = None
            chunk, longest = self._chunk(op), self._views.samples[op.batch].longest
            lasts = torch.tensor([longest[row.sequence] for row in chunk.rows for _ in row.ids])
            segments: list[Segment] = []
            if any(self._runner.spec.states):
                # As documents of a stream, of which the first may have begun before.
                starts = [0, *itertools.accumulate(len(row.ids) for row in chunk.rows[:-1])]
                documents = [start for start, row in zip(starts, chunk.rows, strict=True) if not row.start]
                segments = self._runner.segments(chunk.positions, lasts, 0, documents)
            places = [self._places[row.sequence] for row in chunk.rows]
            new = NewTokens(chunk.rows, places, chunk.written, chunk.single, self._keys_at_once)
            self._inputs = key, _Inputs(self._runner.inputs(chunk.positions, lasts), segments, new)
        return self._inputs[1]

    def _keys_values(self, op: Op, raw: Tensor) -> KeysValues:
        """Of the op's layer in `raw`."""
        shape = self._runner.spec.attention[self._views.layer(op)]
        assert shape is not None
        return KeysValues(*keys_and_values(raw, self._num_rows, shape, self._views.dtype))

    def _staged(self, op: Op) -> KeysValues:
        """Keys and values of the op's layer on the compute device."""
        stage = op.slots[a.SAMPLE_KV]
        if (op.block, stage) not in self._cached:
            raw = self._views.gpu.sample_stages[stage]
            if stage not in self._cleared:
                raw.zero_()
                self._cleared.add(stage)
            self._cached[op.block, stage] = self._keys_values(op, raw)
        return self._cached[op.block, stage]

    # ------------------------------------------------------------------ blocks

    @handles(a.EMBED_GENERATE)
    def _embed(self, op: Op) -> None:
        views, chunk = self._views, self._chunk(op)
        x = self._runner.embed(views.weights(op), chunk.ids, chunk.positions)
        views.hidden(op.slots[a.OUT], chunk.chunk).copy_(x)

    @handles(a.LAYER_GENERATE)
    def _layer(self, op: Op) -> None:
        views, chunk, layer = self._views, self._chunk(op), self._views.layer(op)
        shape, (inputs, segments, new) = self._runner.spec.attention[layer], self._inputs_of(op)

        def attend(tokens: NewTokens) -> Handler | None:
            return None if shape is None else rows_handler(tokens, self._staged(op), shape.chunk)

        if self._runner.layers.balance is not None:
            self._runner.layers.balance.watch(chunk.chunk.end, counting=False)
        x = views.hidden(op.slots[a.X], chunk.chunk)
        if self._runner.spec.state_of(layer) is None:
            y = self._runner.layers.forward_by(layer, views.weights(op), x, inputs, attend(new))
        else:
            number = {segment.start: number for number, segment in enumerate(segments)}
            y, self._behind = self._runner.layers.forward_segments(
                layer,
                views.weights(op),
                x,
                segments,
                lambda segment, backward: attend(new.alone(number[segment.start])),
                self._behind,
            )
        views.hidden(op.slots[a.OUT], chunk.chunk).copy_(y)
        if a.SENT in op.slots:
            views.send(op.slots[a.SENT], chunk.chunk, self._runner.layers.sent)

    @handles(a.HEAD_GENERATE)
    def _head(self, op: Op) -> None:
        views, chunk = self._views, self._chunk(op)
        if not chunk.last.numel():
            return
        weights, x, logits = views.weights(op), views.hidden(op.slots[a.X], chunk.chunk), views.gpu.sample_logits
        assert logits is not None
        most = max(1, self._logits_bytes // (3 * logits[0].nbytes))
        for rows, sequences in zip(chunk.last.split(most), chunk.sequences.split(most), strict=True):
            logits.index_copy_(0, sequences, self._runner.logits(weights, x.index_select(0, rows)).float())

    @handles(a.CHOOSE)
    def _choose(self, op: Op) -> None:
        data, logits = self._views.samples[op.batch], self._views.gpu.sample_logits
        assert logits is not None
        if data.choose is not None:
            data.chosen = data.choose(logits, self._logits_bytes)

    # ------------------------------------------------------------------ copies

    @handles(a.LOAD_SAMPLE_KV)
    def _load(self, op: Op) -> None:
        here, there = self._both_ends(op)
        for first, end in self._views.samples[op.batch].read:
            for target, source in zip(here, there, strict=True):
                self._views.ram.arena.copy(target[first:end], source[first:end])

    @handles(a.STORE_SAMPLE_KV)
    def _store(self, op: Op) -> None:
        here, there = self._both_ends(op)
        rows = itertools.chain.from_iterable(each.rows for each in self._views.samples[op.batch].chunks.values())
        new = itertools.chain.from_iterable(self._places[row.sequence].ranges(row.start, row.end) for row in rows)
        pieces = merged(sorted(new))
        if not self._begun and self._places[0].width > 1:
            pieces = [(pieces[0][0], pieces[-1][1])]  # whatever lies between is nobody's yet
        for first, end in pieces:
            for target, source in zip(there, here, strict=True):
                self._views.ram.arena.copy(target[first:end], source[first:end])

    def _both_ends(self, op: Op) -> tuple[KeysValues, KeysValues]:
        """(on the compute device, in RAM): keys and values of the op's layer."""
        region = self._views.ram.sample_kv[self._views.block_index(op.block)]
        return self._staged(op), self._keys_values(op, region)
