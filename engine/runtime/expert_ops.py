"""The compute ops of blocks of experts."""

from __future__ import annotations

from penstock.engine.runtime.handlers import handles
from penstock.engine.runtime.views import Views
from penstock.engine.schedule import actions as a
from penstock.engine.schedule.ops import Op


class ExpertOps:
    def __init__(self, views: Views) -> None:
        self._views, self._experts = views, views.runner.experts

    @handles(a.EXPERTS_FORWARD, a.EXPERTS_EVALUATE, a.EXPERTS_GENERATE)
    def _forward(self, op: Op) -> None:
        """What the layer made of a chunk, with its experts' outputs added."""
        views, chunk = self._views, self._views.chunk(op)
        x, routed = views.hidden(op.slots[a.X], chunk), views.routed(op.slots[a.ROUTED], chunk)
        y = self._experts.forward(views.experts_of(op), views.weights(op), x, routed)
        views.hidden(op.slots[a.OUT], chunk).copy_(y)

    @handles(a.EXPERTS_BACKWARD)
    def _backward(self, op: Op) -> None:
        views, chunk = self._views, self._views.chunk(op)
        routed, dy = views.routed(op.slots[a.ROUTED], chunk), views.hidden(op.slots[a.DY], chunk)
        gradients = views.gradients(op)
        result = self._experts.backward(views.experts_of(op), views.weights(op), routed, dy, gradients)
        gradients.settle()
        if a.OUT in op.slots:  # else nothing below is trained
            views.hidden(op.slots[a.OUT], chunk).copy_(dy)
            sent = views.routed(op.slots[a.DROUTED], chunk)
            sent.hidden.copy_(result[0])
            sent.shares.copy_(result[1])
