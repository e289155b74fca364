"""The part of the schedule that moves keys and values of samples: they stay on the GPU, or are in RAM between a layer's
passes and staged on the GPU while the layer runs."""

from __future__ import annotations

from penstock.engine.plan.plan import Plan, sample_regions
from penstock.engine.schedule import actions as a
from penstock.engine.schedule import resources as r
from penstock.engine.schedule.ops import Emitter, Slots
from penstock.engine.schedule.resources import Resource


class SampleSchedule:
    """Emits the ops on keys and values of samples. A pass reads some tokens of them in each layer and adds some."""

    def __init__(self, plan: Plan, emitter: Emitter) -> None:
        self._plan, self._emit = plan, emitter.emit
        regions = sample_regions(plan.problem)
        self._layers, self._cached = regions.layers, regions.cached
        self._stages = Slots(r.GPU_SAMPLE_KV, len(regions.stages))
        self._stage: dict[int, int] = {}
        """Block -> the stage that it has: from `open` to `close`, or for good."""
        self._stay = plan.problem.samples is not None and plan.problem.samples.tier == "gpu"
        if self._stay:
            self._stage = {block: number for number, block in enumerate(regions.layers)}
        self._read_tokens = self._moved_tokens = self._new_tokens = 0

    def begin(self, read_tokens: int, moved_tokens: int, new_tokens: int) -> None:
        """What is emitted from now on is about a pass that finds so many tokens in each layer, moves keys and values of
        so many through the compute device's memory, and adds so many."""
        self._read_tokens, self._moved_tokens, self._new_tokens = read_tokens, moved_tokens, new_tokens

    def open(self, block: int) -> None:
        """Give a layer a stage, and bring there what is kept of it."""
        if block not in self._layers or self._stay:
            return
        self._stage[block] = self._stages.take(block)
        if self._read_tokens and block in self._cached:
            self._copy(a.LOAD_SAMPLE_KV, block, self._read_tokens)

    def close(self, block: int) -> None:
        """Offload what the pass has added, and let the stage go."""
        if block in self._cached:
            self._copy(a.STORE_SAMPLE_KV, block, self._new_tokens)
        if block in self._layers and not self._stay:
            self._stages.release(self._stage.pop(block))

    def operands(self, block: int) -> tuple[list[Resource], dict[str, int]]:
        """What a layer adds to, in which slot that is and how many tokens it moves; nothing without attention."""
        if block not in self._layers:
            return [], {}
        return [r.resource(r.GPU_SAMPLE_KV, self._stage[block])], {
            a.SAMPLE_KV: self._stage[block],
            a.MOVED_TOKENS: self._moved_tokens,
        }

    def _copy(self, action: a.Action, block: int, tokens: int) -> None:
        shape, stage = self._plan.blocks[block], self._stage[block]
        ends = [r.resource(r.GPU_SAMPLE_KV, stage)], [r.resource(r.RAM_SAMPLE_KV, block)]
        target, source = ends if action is a.LOAD_SAMPLE_KV else ends[::-1]
        nbytes, slots = tokens * shape.kv_bytes_per_token, {a.SAMPLE_KV: stage}
        self._emit(action, shape.name, reads=source, writes=target, nbytes=nbytes, slots=slots)
