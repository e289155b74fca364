"""The ops that write samples: blocks on a few new tokens of several sequences, whose keys and values are kept."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from penstock.engine.clock import wait_for_copies
from penstock.engine.generate.attend import KeysValues, Place, rows_handler
from penstock.engine.model.layers import LayerInputs
from penstock.engine.runtime.batch import SampleChunk, SampleRow
from penstock.engine.runtime.handlers import handles
from penstock.engine.runtime.views import Views, keys_and_values
from penstock.engine.schedule import actions as a
from penstock.engine.schedule.ops import Op


class SampleOps:
    def __init__(self, views: Views) -> None:
        self._views, self._runner = views, views.runner
        space = views.plan.problem.samples
        self._kept_tokens = 0 if space is None else space.kept_tokens
        self._room = list(itertools.pairwise([0, *itertools.accumulate(space.lengths if space else ())]))
        """Per sequence the first and the end of its places among the kept tokens."""
        self._inputs: tuple[tuple[int, int], LayerInputs] | None = None
        """((pass, chunk), arguments of the layers) of the chunk that was computed last."""

    # ------------------------------------------------------------------ operands

    def _chunk(self, op: Op) -> SampleChunk:
        return self._views.samples[op.batch].chunks[op.index]

    def _layer_inputs(self, op: Op) -> LayerInputs:
        key = (op.batch, op.index)
        if self._inputs is None or self._inputs[0] != key:
            self._inputs = None
            chunk, longest = self._chunk(op), self._views.samples[op.batch].longest
            lasts = [longest[row.sequence] for row in chunk.rows for _ in row.ids]
            self._inputs = key, self._runner.inputs(chunk.positions, torch.tensor(lasts))
        return self._inputs[1]

    def _kept(self, op: Op, raw: Tensor) -> list[KeysValues]:
        """Keys and values of the op's layer, by sequence, in `raw`."""
        shape = self._runner.spec.attention[self._views.layer(op)]
        assert shape is not None
        k, v = keys_and_values(raw, self._kept_tokens, shape, self._views.dtype)
        return [KeysValues(k[first:end], v[first:end]) for first, end in self._room]

    # ------------------------------------------------------------------ blocks

    @handles(a.EMBED_GENERATE)
    def _embed(self, op: Op) -> None:
        views, chunk = self._views, self._chunk(op)
        x = self._runner.embed(views.weights(op), chunk.ids, chunk.positions)
        views.hidden(op.slots[a.OUT], chunk.chunk).copy_(x)

    @handles(a.LAYER_GENERATE)
    def _layer(self, op: Op) -> None:
        views, chunk, layer = self._views, self._chunk(op), self._views.layer(op)
        shape, handler = self._runner.spec.attention[layer], None
        if shape is not None:
            places = [Place(row.start, len(row.ids)) for row in chunk.rows]
            if a.SAMPLE_KV in op.slots:
                of_all = self._kept(op, views.gpu.sample_stages[op.slots[a.SAMPLE_KV]])
                kept = [of_all[row.sequence] for row in chunk.rows]
            else:  # whole sequences, of which nothing is kept
                made = partial(KeysValues.empty, dtype=views.dtype, device=views.device)
                kept = [made(shape, place.end) for place in places]
            handler = rows_handler(places, kept, shape.chunk)
        if self._runner.layers.balance is not None:
            self._runner.layers.balance.watch(chunk.chunk.end, counting=False)
        x = views.hidden(op.slots[a.X], chunk.chunk)
        y = self._runner.layers.forward_by(layer, views.weights(op), x, self._layer_inputs(op), handler)
        views.hidden(op.slots[a.OUT], chunk.chunk).copy_(y)
        if a.ROUTED in op.slots:
            views.send(op.slots[a.ROUTED], chunk.chunk, self._runner.layers.sent)

    @handles(a.HEAD_GENERATE)
    def _head(self, op: Op) -> None:
        views, chunk = self._views, self._chunk(op)
        if not chunk.last.numel():
            return
        x = views.hidden(op.slots[a.X], chunk.chunk).index_select(0, chunk.last)
        logits = views.gpu.sample_logits
        assert logits is not None
        logits.index_copy_(0, chunk.sequences, self._runner.logits(views.weights(op), x).float())

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
        here, there = self._places(op)
        for sequence, tokens in self._views.samples[op.batch].read.items():
            for target, source in zip(here[sequence], there[sequence], strict=True):
                self._views.ram.arena.copy(target[:tokens], source[:tokens])

    @handles(a.STORE_SAMPLE_KV)
    def _store(self, op: Op) -> None:
        here, there = self._places(op)
        for row in self._rows(op):
            new = slice(row.start, row.start + len(row.ids))
            for target, source in zip(there[row.sequence], here[row.sequence], strict=True):
                self._views.ram.arena.copy(target[new], source[new])

    def _places(self, op: Op) -> tuple[list[KeysValues], list[KeysValues]]:
        """(on the compute device, in RAM): keys and values of the op's layer by sequence."""
        stage = self._views.gpu.sample_stages[op.slots[a.SAMPLE_KV]]
        region = self._views.ram.sample_kv[self._views.block_index(op.block)]
        return self._kept(op, stage), self._kept(op, region)

    def _rows(self, op: Op) -> Iterator[SampleRow]:
        return itertools.chain.from_iterable(
            of_chunk.rows for of_chunk in self._views.samples[op.batch].chunks.values()
        )
