"""The compute ops of branches: parts of layers that are blocks of their own."""

from __future__ import annotations

from penstock.engine.runtime.handlers import handles
from penstock.engine.runtime.views import Views
from penstock.engine.schedule import actions as a
from penstock.engine.schedule.ops import Op


class BranchOps:
    def __init__(self, views: Views) -> None:
        self._views, self._branches = views, views.runner.branches

    @handles(*a.BRANCH_FORWARD.values(), *a.BRANCH_EVALUATE.values(), *a.BRANCH_GENERATE.values())
    def _forward(self, op: Op) -> None:
        """What the layer made of a chunk, with its branch's output added."""
        views, chunk = self._views, self._views.chunk(op)
        x, sent = views.hidden(op.slots[a.X], chunk), views.sent(op.slots[a.SENT], chunk)
        y = self._branches.forward(views.layer(op), views.weights(op), x, sent)
        views.hidden(op.slots[a.OUT], chunk).copy_(y)

    @handles(*a.BRANCH_BACKWARD.values())
    def _backward(self, op: Op) -> None:
        views, chunk = self._views, self._views.chunk(op)
        sent, dy = views.sent(op.slots[a.SENT], chunk), views.hidden(op.slots[a.DY], chunk)
        gradients = views.gradients(op)
        result = self._branches.backward(views.layer(op), views.weights(op), sent, dy, gradients)
        gradients.settle()
        if a.OUT in op.slots:  # else nothing below is trained
            views.hidden(op.slots[a.OUT], chunk).copy_(dy)
            targets = self._branches.with_gradient(views.sent(op.slots[a.DSENT], chunk))
            for target, gradient in zip(targets, result, strict=True):
                target.copy_(gradient)
