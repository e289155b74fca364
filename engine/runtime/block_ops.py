"""The compute ops of vision tower, embedding and head, the spills of activations, and what is found out once a step."""

from __future__ import annotations

import itertools
import math
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from penstock.engine.clock import wait_for_copies
from penstock.engine.config import TrainConfig
from penstock.engine.model.tokens import mean_by_weight
from penstock.engine.objectives.base import Objective
from penstock.engine.optim.base import Optimizer
from penstock.engine.optim.lr import clip_coefficient, learning_rate
from penstock.engine.runtime.coefficients import Coefficients
from penstock.engine.runtime.exchange import Exchange
from penstock.engine.runtime.failures import DivergedError, first_not_finite
from penstock.engine.runtime.handlers import handles
from penstock.engine.runtime.idle import Idle
from penstock.engine.runtime.views import Views
from penstock.engine.schedule import actions as a
from penstock.engine.schedule.ops import WHOLE, Op
from penstock.storage.generations.store import NvmeStore
from penstock.storage.tier.arena import pinned_empty


class BlockOps:
    """`store`: the NVMe tier; who carries out compute ops only needs none."""

    def __init__(
        self,
        views: Views,
        optimizer: Optimizer,
        store: object,
        train: TrainConfig,
        logits_bytes: int,
        idle: Idle | None,
        objective: Objective,
        exchange: Exchange,
    ) -> None:
        self._idle, self._exchange = idle, exchange
        self._views, self._train, self._nvme = views, train, cast(NvmeStore, store)
        self._optimizer, self._runner, self._device, self._logits_bytes = (
            optimizer,
            views.runner,
            views.device,
            logits_bytes,
        )
        plan = views.plan
        self._number = {name: i for i, name in enumerate(plan.buffers)}
        # What "clip" reads of a step, in one tensor so that it is one copy.
        everyone = plan.problem.ranks if plan.choice.spread else 1
        self._sizes = [len(plan.chunks), len(plan.buffers), 2 * len(plan.blocks) * len(plan.chunks) * everyone]
        self._report = torch.zeros(sum(self._sizes), device=self._device)
        self._losses, self._square_norms, self._marks = self._split_report(self._report)
        # Of each target of an evaluation its log-probability and statistics, and whether it is the likeliest token; of
        # a chunk those at its tokens' places, from the first on.
        self._starts = [0, *itertools.accumulate(chunk.end - chunk.start for chunk in plan.chunks)]
        self._statistics = objective.statistics
        rows = 1 + len(self._statistics)
        self._scores = torch.zeros(rows, self._starts[-1], dtype=torch.float64, device=self._device)
        self._hits = torch.zeros(self._starts[-1], dtype=torch.bool, device=self._device)
        make = pinned_empty if self._device.type == "cuda" else torch.empty
        self._report_on_host, self._scores_on_host, self._hits_on_host = (
            make(tensor.numel(), dtype=tensor.dtype).view(tensor.shape)
            for tensor in (self._report, self._scores, self._hits)
        )
        self._temperature = objective.temperature
        self._coefficients: Coefficients | None = None
        if objective.whole_sequences:
            fetch = partial(self._to_host, self._scores, self._scores_on_host)
            self._coefficients = Coefficients(views, objective, exchange, self._scores_on_host, self._starts, fetch)

    # ------------------------------------------------------------------ blocks

    @handles(a.VISION_FORWARD, a.VISION_EVALUATE)
    def _look(self, op: Op) -> None:
        views, chunk, tower = self._views, self._views.chunk(op), self._runner.tower
        if (images := views.stream_images(op)) is not None and tower is not None:
            tower.look(views.weights(op), images, chunk.start, chunk.end)

    @handles(a.VISION_BACKWARD)
    def _look_backward(self, op: Op) -> None:
        views, chunk, tower = self._views, self._views.chunk(op), self._runner.tower
        gradients = views.gradients(op)  # zero, where there is no image
        if (images := views.stream_images(op)) is not None and tower is not None:
            tower.backward(views.weights(op), images, chunk.start, chunk.end, gradients)

    @handles(a.VISION_GENERATE)
    def _no_images(self, op: Op) -> None:
        """Samples are of texts alone."""

    @handles(a.EMBED_FORWARD, a.EMBED_EVALUATE)
    def _embed(self, op: Op) -> None:
        views, tokens = self._views, self._views.tokens(op)
        x = self._runner.embed(views.weights(op), tokens.ids, tokens.positions)
        out = views.hidden(op.slots[a.OUT], views.chunk(op))
        out.copy_(x)
        if (images := views.images(op)) is not None:
            images.embed(out)

    @handles(a.EMBED_BACKWARD)
    def _embed_backward(self, op: Op) -> None:
        views = self._views
        dx = views.hidden(op.slots[a.DY], views.chunk(op))
        if (images := views.images(op)) is not None:
            images.take(0, dx)
            dx = images.without(dx)
        self._runner.embed_backward(views.weights(op), views.tokens(op), dx, views.gradients(op))

    @handles(a.HEAD_EVALUATE, a.HEAD_SCORE)
    def _head_evaluate(self, op: Op) -> None:
        views = self._views
        x = views.hidden(op.slots[a.X], views.chunk(op))
        asked = op.action is a.HEAD_SCORE or views.evaluated[op.batch].with_statistics
        names = self._statistics if asked else ()
        found = self._runner.evaluate(
            views.weights(op), x, views.tokens(op), self._logits_bytes, self._temperature, names
        )
        there = slice(start := self._starts[op.index], start + found.right.shape[0])
        self._scores[: 1 + len(names), there], self._hits[there] = found.scores, found.right

    @handles(a.HEAD)
    def _head(self, op: Op) -> None:
        views, chunk = self._views, self._views.chunk(op)
        tokens, z_loss = views.tokens(op), self._train.z_loss
        scale = mean_by_weight(1.0, views.steps[op.step].total_weight)
        if self._coefficients is not None:
            tokens, scale = replace(tokens, weights=self._coefficients.of(op)), 1.0
        x, weights, gradients = views.hidden(op.slots[a.X], chunk), views.weights(op), views.gradients(op)
        limit, more = self._logits_bytes, {"z_loss": z_loss, "temperature": self._temperature}
        loss, dx = self._runner.head(weights, x, tokens, scale, gradients, limit, **more)
        self._losses[op.index] = loss
        if a.OUT in op.slots:  # else nothing below is trained
            views.hidden(op.slots[a.OUT], chunk).copy_(dx)

    def mark(self, op: Op) -> None:
        """Note a value that is finite if the output of a block's op is; "clip" names the first that is not."""
        views, backward = self._views, op.action.phase != "forward"
        result = views.hidden(op.slots[a.OUT], views.chunk(op))
        self._marks[int(backward), views.block_index(op.block), op.index].copy_(result.sum(dtype=torch.float32))

    # ------------------------------------------------------------------ activations on their way

    @handles(*a.SPILL.values())
    def _spill(self, op: Op) -> Future[Any]:
        return self._nvme.spilled.write(_file(op), self._views.offloaded(op))

    @handles(*a.UNSPILL.values(), *a.PEEK.values())
    def _unspill(self, op: Op) -> Future[Any]:
        return self._nvme.spilled.read(_file(op), self._views.offloaded(op), keep=op.action in a.PEEK.values())

    @handles(*a.DISCARD.values())
    def _discard(self, op: Op) -> Future[Any]:
        return self._nvme.spilled.discard(_file(op))

    # ------------------------------------------------------------------ once a step

    @handles(a.NORM)
    def _norm(self, op: Op) -> None:
        gradient = self._views.flat("gradient", op.block, op.slots.get(op.block, WHOLE))
        self._square_norms[self._number[op.block]] = torch.linalg.vector_norm(gradient).square()

    @handles(a.CLIP)
    def _clip(self, op: Op) -> None:
        """Loss, global norm and clipping factor of the step, checked before any state changes."""
        data = self._views.steps[op.step]
        self._to_host(self._report, self._report_on_host)
        losses, squares, marks = (part.double() for part in self._split_report(self._report_on_host))
        of_chunk = losses.tolist()
        data.chunk_losses = {index: of_chunk[index] for index in data.cut}
        total = float(losses[list(data.cut)].sum())
        plan = self._views.plan
        if plan.problem.adds_replicas and first_not_finite(plan, losses, torch.zeros(0), marks) is None:
            of_step, of_buffers = self._exchange.share(data.chunk_losses)
            squares, total = torch.tensor(of_buffers, dtype=torch.float64), math.fsum(of_step)
        if (culprit := first_not_finite(self._views.plan, losses, squares, marks)) is not None:
            raise DivergedError(f"step {op.step}: {culprit} is not finite")
        if self._coefficients is None:
            data.loss = mean_by_weight(total, data.total_weight)
        else:
            data.loss, data.chunk_losses = data.found.loss, {}
            if math.isnan(data.loss):
                raise DivergedError(f"step {op.step}: the loss is not finite")
        data.grad_norm = float(squares.sum().sqrt())
        clip = clip_coefficient(data.grad_norm, self._train.clip_norm)
        lr = learning_rate(self._train, op.step)
        for device in {torch.device("cpu"), self._device}:
            data.scalars[device.type] = self._optimizer.scalars(self._train, lr, op.step, clip, device)

    @handles(a.TAKE_ROUTES)
    def _take_routes(self, op: Op) -> None:
        assert self._idle is not None
        self._to_host(*self._idle.marks(op.block))
        self._idle.take(op)

    @handles(a.EVALUATE)
    def _evaluate(self, op: Op) -> None:
        data = self._views.evaluated[op.batch]
        self._to_host(self._scores, self._scores_on_host)
        self._to_host(self._hits, self._hits_on_host)
        starts = [(self._starts[index], data.chunks[index].labels.shape[0]) for index in sorted(data.cut)]
        data.scores, *statistics = (
            torch.cat([row[start : start + count] for start, count in starts]) for row in self._scores_on_host
        )
        if data.with_statistics:
            data.statistics = dict(zip(self._statistics, statistics, strict=True))
        data.right = torch.cat([self._hits_on_host[start : start + count] for start, count in starts])

    def _to_host(self, source: Tensor, target: Tensor) -> None:
        """Copy what ops that are done have left on the compute device, and wait for that copy alone."""
        target.copy_(source, non_blocking=True)
        wait_for_copies(self._device)

    def _split_report(self, report: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Losses [chunks], squared norms [buffers] and marks [2, blocks, chunks] in a step's report."""
        losses, squares, marks = report.split(self._sizes)
        return losses, squares, marks.view(2, len(self._views.plan.blocks), -1)


def _file(op: Op) -> str:
    return f"{op.action.kind}.{op.block}.{op.index}"
