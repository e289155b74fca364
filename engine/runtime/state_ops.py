"""The ops on flat buffers: weights to the compute device, gradients away, updates, state to and from NVMe, commits."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from penstock.engine.model.quantise import Dequantiser
from penstock.engine.optim.base import Optimizer, UpdateRange
from penstock.engine.plan.plan import BufferPlan
from penstock.engine.runtime.exchange import Exchange
from penstock.engine.runtime.handlers import gather, handles
from penstock.engine.runtime.health import require_usable
from penstock.engine.runtime.idle import Chain, Idle
from penstock.engine.runtime.views import Views
from penstock.engine.schedule import actions as a
from penstock.engine.schedule.ops import Op
from penstock.storage.generations.store import NvmeStore


class StateOps:
    """`store`: the NVMe tier, or where weights that are never trained are read from; who carries out compute ops only
    needs none. `commit` is called with a step's number."""

    def __init__(
        self,
        views: Views,
        optimizer: Optimizer,
        store: object,
        commit: Callable[[int], None],
        idle: Idle | None,
        exchange: Exchange,
    ) -> None:
        self._views, self._nvme, self._commit, self._idle = views, cast(NvmeStore, store), commit, idle
        self._exchange = exchange
        self._optimizer, self._gpu, self._ram, self._kinds = (
            optimizer,
            views.gpu,
            views.ram,
            views.plan.problem.state_kinds,
        )
        self._dequantiser = Dequantiser(views.device) if views.plan.problem.copy_bytes else None

    def _buffer(self, op: Op) -> BufferPlan:
        return self._views.plan.buffers[op.block]

    def _part(self, op: Op) -> tuple[int, int]:
        return self._buffer(op).part(op.index)

    def _weights_dtype(self, op: Op) -> torch.dtype:
        return cast(torch.dtype, getattr(torch, self._buffer(op).dtype))

    def _staged(self, op: Op, dtype: torch.dtype, stage: str = a.STAGE) -> Tensor:
        start, end = self._part(op)
        return self._views.part_stage(op.slots[stage], end - start, dtype)

    def _flat(self, kind: str, op: Op) -> Tensor:
        return self._views.flat(kind, op.block, op.slots[op.block])

    # ------------------------------------------------------------------ weights

    @handles(a.LOAD_WEIGHTS, a.STORE_SUM, a.LOAD_SUM)
    def _move_piece(self, op: Op) -> None:
        start, end = self._buffer(op).piece(op.index, op.slots[a.PIECES])
        if op.action is a.LOAD_WEIGHTS:
            here, there = self._flat("weights", op), self._ram.buffers[op.block]["weights"]
        else:
            here, there = self._flat("gradient", op), self._ram.sums[op.block]
        target, source = (there, here) if op.action is a.STORE_SUM else (here, there)
        if op.action is a.LOAD_SUM and a.SKIPS in op.flags and self._idle is not None and not self._idle.begun(op):
            target[start:end].zero_()
        else:
            self._ram.copy(target[start:end], source[start:end])

    @handles(a.LOAD_WEIGHTS_PART)
    def _load_weights_part(self, op: Op) -> None:
        start, end = self._part(op)
        self._ram.copy(self._flat("weights", op)[start:end], self._staged(op, self._weights_dtype(op)))

    @handles(a.READ_WEIGHTS)
    def _read_weights(self, op: Op) -> Future[Any]:
        return self._nvme.read(op.block, "weights", op.index, self._staged(op, self._weights_dtype(op)))

    @handles(a.READ_WEIGHTS_WHOLE)
    def _read_weights_whole(self, op: Op) -> Future[Any]:
        """Every part of a buffer's weights at once, straight into their slot on the compute device."""
        buffer, flat = self._buffer(op), self._flat("weights", op)
        bounds = [buffer.part(part) for part in range(buffer.num_parts)]
        return gather([self._nvme.read(op.block, "weights", i, flat[s:e]) for i, (s, e) in enumerate(bounds)])

    @handles(a.WRITE_WEIGHTS)
    def _write_weights(self, op: Op) -> Future[Any]:
        return self._nvme.write(
            op.block, "weights", op.index, self._staged(op, self._weights_dtype(op), a.WEIGHTS_STAGE)
        )

    @handles(a.DEQUANTISE)
    def _dequantise(self, op: Op) -> None:
        runner, words = self._views.runner, self._flat("weights", op)
        layout, stored = self._views.layouts[op.block], runner.spec.buffers[op.block].stored
        assert stored is not None
        assert self._dequantiser is not None
        self._dequantiser.fill(self._views.copy(op.block), words, layout, stored, compiled=runner.compiled)

    # ------------------------------------------------------------------ gradients

    @handles(a.STORE_GRADIENT)
    def _store_gradient(self, op: Op) -> None:
        waiting, flat, buffer = self._ram.buffers[op.block]["gradient"], self._flat("gradient", op), self._buffer(op)
        for part in range(buffer.num_parts):
            start, end = buffer.part(part)
            self._ram.copy(waiting[start:end], flat[start:end].to(waiting.dtype))

    @handles(a.STORE_GRADIENT_PART)
    def _store_gradient_part(self, op: Op) -> None:
        (start, end), stage = self._part(op), self._staged(op, self._views.gradient_dtype)
        self._ram.copy(stage, self._flat("gradient", op)[start:end].to(stage.dtype))

    @handles(a.WRITE_GRADIENT)
    def _write_gradient(self, op: Op) -> Future[Any]:
        return self._nvme.write(op.block, "gradient", op.index, self._staged(op, self._views.gradient_dtype))

    @handles(a.HAND_OVER)
    def _hand_over(self, op: Op) -> None:
        start, end = self._part(op)
        self._ram.copy(self._exchange.ring(op), self._flat("gradient", op)[start:end])

    @handles(a.SIGNAL_GRADIENT)
    def _signal_gradient(self, op: Op) -> None:
        self._exchange.signal(op)

    @handles(a.ADD_REPLICA)
    def _add_replica(self, op: Op) -> None:
        views = self._views
        views.flat("gradient", op.block, op.slots[op.block]).add_(
            views.flat("gradient", op.block, op.slots[a.gradient_of(op.block)])
        )

    @handles(a.READ_GRADIENT)
    def _read_gradient(self, op: Op) -> Future[Any]:
        return self._nvme.read(op.block, "gradient", op.index, self._staged(op, torch.float32))

    @handles(a.ADD_GRADIENT)
    def _add_gradient(self, op: Op) -> None:
        kept, apart = self._buffer(op).kept(*self._part(op)), self._ram.added_apart.get(op.block)
        if apart is not None and a.APART in op.flags:
            waiting = apart[kept]
        elif a.STAGE in op.slots:
            waiting = self._staged(op, torch.float32)
        else:
            waiting = self._ram.buffers[op.block]["gradient"][kept]
        first = a.FIRST in op.flags
        for gradient in self._exchange.parts(op):
            if first:
                waiting.copy_(gradient)
            else:
                waiting.add_(gradient)
            first = False
        if a.COMPLETES in op.flags:
            if apart is not None:
                waiting.add_(apart[kept])
            self._exchange.note_square(op, waiting)

    @handles(a.AWAIT_WEIGHTS)
    def _await_weights(self, op: Op) -> None:
        self._exchange.await_weights(op)

    @handles(a.MEET)
    def _meet(self, op: Op) -> None:
        self._exchange.meet("layer")

    @handles(a.SIGNAL_STATE)
    def _signal_state(self, op: Op) -> None:
        self._exchange.signal_state(op)

    @handles(a.AWAIT_STATE)
    def _await_state(self, op: Op) -> None:
        self._exchange.await_state(op)

    @handles(a.SIGNAL_CHUNK)
    def _signal_chunk(self, op: Op) -> None:
        self._exchange.signal_chunk(op)

    @handles(a.AWAIT_CHUNK)
    def _await_chunk(self, op: Op) -> None:
        self._exchange.await_chunk(op)

    @handles(a.ADD_DKV)
    def _add_dkv(self, op: Op) -> None:
        sums = self._ram.window["dkv"][self._views.plan.chunks[op.index].local]
        self._exchange.add_dkv(op, sums[: op.nbytes])

    # ------------------------------------------------------------------ updates

    def _chain(self, op: Op) -> Chain | None:
        """What an op's update comes to, of a buffer that is updated when it is needed; None of any other."""
        return self._idle.chain(op) if self._idle is not None and a.CHAIN in op.slots else None

    @handles(a.UPDATE)
    def _update(self, op: Op) -> None:
        views, memory = self._views, self._ram.buffers[op.block]
        start, end = self._buffer(op).update(op.index)
        staged = self._ram.state_stages[op.slots[a.STAGE]] if a.STAGE in op.slots else {}

        own = self._buffer(op).kept(start, end)

        def of(kind: str) -> Tensor:
            return memory[kind][own] if kind in memory else staged[kind][: end - start]

        state = {kind: of(kind) for kind in self._kinds}
        gradient = of("gradient")
        if "weights" in memory:
            weights = memory["weights"][start:end]
        else:
            weights = views.part_stage(op.slots[a.WEIGHTS_STAGE], end - start, self._weights_dtype(op))
        where, chain = UpdateRange(views.layouts[op.block], start, end), self._chain(op)
        if chain is None or chain.gradient:
            self._optimizer.step(state, gradient, weights, where, views.steps[op.step].scalars["cpu"])
            return
        assert self._idle is not None
        gradient.zero_()
        for step in chain.steps:
            self._optimizer.step(state, gradient, weights, where, self._idle.scalars(self._optimizer, step))

    @handles(a.UPDATE_ON_GPU)
    def _update_on_gpu(self, op: Op) -> None:
        memory, layout = self._gpu.buffers[op.block], self._views.layouts[op.block]
        values = self._views.steps[op.step].scalars[self._views.device.type]
        where = UpdateRange(layout, 0, layout.numel)
        state = {kind: memory[kind] for kind in self._kinds}
        self._optimizer.step(state, memory["gradient"], memory["weights"], where, values)

    # ------------------------------------------------------------------ state

    @handles(a.READ_STATE)
    def _read_state(self, op: Op) -> Future[Any]:
        buffer, (start, end), chain = self._buffer(op), self._part(op), self._chain(op)
        kinds = self._kinds if buffer.state == "nvme" else ()
        kinds += ("gradient",) if buffer.gradient == "nvme" and (chain is None or chain.gradient) else ()
        stage = self._ram.state_stages[op.slots[a.STAGE]]
        return gather([self._nvme.read(op.block, kind, op.index, stage[kind][: end - start]) for kind in kinds])

    @handles(a.WRITE_STATE, a.CHECKPOINT_STATE)
    def _write_state(self, op: Op) -> Future[Any]:
        """From its stage, or from where it lives in RAM."""
        memory, (start, end) = self._ram.buffers[op.block], self._part(op)
        own = self._buffer(op).kept(start, end)
        if op.action is a.WRITE_STATE:
            memory, own = self._ram.state_stages[op.slots[a.STAGE]], slice(0, end - start)
        return gather([self._write(kind, op, memory[kind][own]) for kind in self._kinds])

    @handles(a.STAGE_STATE)
    def _stage_state(self, op: Op) -> None:
        start, end = self._part(op)
        resident = self._gpu.buffers[op.block][self._kinds[op.slots[a.KIND]]]
        self._ram.copy(self._staged(op, torch.float32), resident[start:end])

    @handles(a.CHECKPOINT_STAGED)
    def _checkpoint_staged(self, op: Op) -> Future[Any]:
        return self._write(self._kinds[op.slots[a.KIND]], op, self._staged(op, torch.float32))

    def _write(self, kind: str, op: Op, values: Tensor) -> Future[None]:
        """Write updated state, which is looked at on its way: what cannot be trained on never becomes a generation."""
        check = partial(require_usable, kind, op.block, op.step, values)
        return self._nvme.write(op.block, kind, op.index, values, check=check)

    @handles(a.COMMIT)
    def _commit_generation(self, op: Op) -> None:
        if self._idle is not None:
            self._idle.commits(op)
        self._commit(op.step)
