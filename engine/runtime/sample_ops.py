"""The ops that write samples: blocks on a few new tokens of several sequences, whose keys and values are kept."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.engine.attention.chunk import Handler
from penstock.engine.clock import wait_for_copies
from penstock.engine.generate.attend import KeysValues, rows_handler
from penstock.engine.generate.decode import Row
from penstock.engine.model.layers import LayerInputs
from penstock.engine.model.recurrence import Segment
from penstock.engine.runtime.batch import SampleChunk
from penstock.engine.runtime.handlers import handles
from penstock.engine.runtime.views import Views, keys_and_values
from penstock.engine.schedule import actions as a
from penstock.engine.schedule.ops import Op


class SampleOps:
    def __init__(self, views: Views, logits_bytes: int) -> None:
        self._views, self._runner, self._logits_bytes = views, views.runner, logits_bytes
        space = views.plan.problem.samples
        self._tokens = 0 if space is None else sum(space.lengths)
        self._ranges: list[tuple[int, int]] = []
        self._cached: dict[tuple[str, int], list[KeysValues]] = {}
        """(block, stage) -> keys and values there by sequence."""
        self.cut(space.lengths if space else ())
        self._inputs: tuple[tuple[int, int], LayerInputs, list[Segment]] | None = None
        """((pass, chunk), arguments of the layers, row by row where some carry a state) of the chunk computed last."""
        self._behind: list[Tensor] | None = None
        """The recurrent state of the layer that was computed last behind its last row."""

    def cut(self, lengths: Sequence[int]) -> None:
        """Sequences of so many tokens from now on, which are no more than the plan has, nor are their tokens."""
        assert sum(lengths) <= self._tokens
        self._ranges = list(itertools.pairwise([0, *itertools.accumulate(lengths)]))
        """Per sequence the first and the end of its places among all tokens."""
        self._cached.clear()

    # ------------------------------------------------------------------ operands

    def _chunk(self, op: Op) -> SampleChunk:
        return self._views.samples[op.batch].chunks[op.index]

    def _layer_inputs(self, op: Op) -> tuple[LayerInputs, list[Segment]]:
        key = (op.batch, op.index)
        if self._inputs is None or self._inputs[0] != key:
            self._inputs = None
            chunk, longest = self._chunk(op), self._views.samples[op.batch].longest
            lasts = torch.tensor([longest[row.sequence] for row in chunk.rows for _ in row.ids])
            segments = []
            if any(self._runner.spec.states):
                # As documents of a stream, of which the first may have begun before.
                starts = [0, *itertools.accumulate(len(row.ids) for row in chunk.rows[:-1])]
                documents = [start for start, row in zip(starts, chunk.rows, strict=True) if not row.start]
                segments = self._runner.segments(chunk.positions, lasts, 0, documents)
            self._inputs = key, self._runner.inputs(chunk.positions, lasts), segments
        return self._inputs[1:]

    def _keys_values(self, op: Op, raw: Tensor) -> list[KeysValues]:
        """Of the op's layer, by sequence, in `raw`."""
        shape = self._runner.spec.attention[self._views.layer(op)]
        assert shape is not None
        k, v = keys_and_values(raw, self._tokens, shape, self._views.dtype)
        return [KeysValues(k[first:end], v[first:end]) for first, end in self._ranges]

    def _staged(self, op: Op) -> list[KeysValues]:
        """Keys and values of the op's layer on the compute device, by sequence."""
        stage = op.slots[a.SAMPLE_KV]
        if (op.block, stage) not in self._cached:
            self._cached[op.block, stage] = self._keys_values(op, self._views.gpu.sample_stages[stage])
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
        shape, (inputs, segments) = self._runner.spec.attention[layer], self._layer_inputs(op)
        staged = [] if shape is None else self._staged(op)

        def attend(rows: Sequence[Row]) -> Handler | None:
            return None if shape is None else rows_handler(rows, [staged[row.sequence] for row in rows], shape.chunk)

        if self._runner.layers.balance is not None:
            self._runner.layers.balance.watch(chunk.chunk.end, counting=False)
        x = views.hidden(op.slots[a.X], chunk.chunk)
        if self._runner.spec.state_of(layer) is None:
            y = self._runner.layers.forward_by(layer, views.weights(op), x, inputs, attend(chunk.rows))
        else:
            of_segment = dict(zip((segment.start for segment in segments), chunk.rows, strict=True))
            y, self._behind = self._runner.layers.forward_segments(
                layer,
                views.weights(op),
                x,
                segments,
                lambda segment, backward: attend([of_segment[segment.start]]),
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

    # ------------------------------------------------------------------ copies

    @handles(a.TAKE_LOGITS)
    def _take(self, op: Op) -> None:
        here, there = self._views.ram.sample_logits, self._views.gpu.sample_logits
        assert here is not None
        assert there is not None
        self._views.ram.arena.copy(here, there)
        wait_for_copies(self._views.device)

    @handles(a.LOAD_SAMPLE_KV)
    def _load(self, op: Op) -> None:
        here, there = self._both_ends(op)
        for sequence, tokens in self._views.samples[op.batch].read.items():
            for target, source in zip(here[sequence], there[sequence], strict=True):
                self._views.ram.arena.copy(target[:tokens], source[:tokens])

    @handles(a.STORE_SAMPLE_KV)
    def _store(self, op: Op) -> None:
        here, there = self._both_ends(op)
        for row in itertools.chain.from_iterable(each.rows for each in self._views.samples[op.batch].chunks.values()):
            new = slice(row.start, row.end)
            for target, source in zip(there[row.sequence], here[row.sequence], strict=True):
                self._views.ram.arena.copy(target[new], source[new])

    def _both_ends(self, op: Op) -> tuple[list[KeysValues], list[KeysValues]]:
        """(on the compute device, in RAM): keys and values of the op's layer by sequence."""
        region = self._views.ram.sample_kv[self._views.block_index(op.block)]
        return self._staged(op), self._keys_values(op, region)
