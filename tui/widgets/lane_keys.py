"""Zoom, pan and selection: the actions of screens that have a lane view."""

from __future__ import annotations

from collections.abc import Callable

from penstock.tui.widgets.lane_view import PAN, ZOOM, LaneView
from penstock.tui.widgets.loss_chart import LossChart


class LaneKeys:
    """The actions of a screen that has a LaneView."""

    lane_view: LaneView

    def zoomed(self) -> LaneView | LossChart:
        """What zoom, pan and selection are for."""
        return self.lane_view

    def act(self, view: LaneView | LossChart, why_not: str, move: Callable[[], None]) -> None:
        """Do what a key asks of a view; `why_not`: why nothing is to be seen of it, where that is so."""
        move()

    def action_zoom_in(self) -> None:
        self._zoom(ZOOM, "cannot zoom in any further")

    def action_zoom_out(self) -> None:
        self._zoom(1 / ZOOM, "everything is in view already")

    def _zoom(self, factor: float, why_not: str) -> None:
        view = self.zoomed()
        self.act(view, why_not, lambda: view.zoom(factor))

    def action_pan_left(self) -> None:
        self._pan(-PAN, "this is the beginning")

    def action_pan_right(self) -> None:
        self._pan(PAN, "this is the latest")

    def _pan(self, share: float, why_not: str) -> None:
        view = self.zoomed()
        self.act(view, why_not, lambda: view.pan(share))

    def action_fit(self) -> None:
        view = self.zoomed()
        self.act(view, "everything is in view already", view.fit)

    def move_span(self, by: int) -> None:
        """Along the ops, or the steps."""
        view = self.zoomed()
        self.act(view, "this is the last one" if by > 0 else "this is the first one", lambda: view.action_move(by))

    def action_next_span(self) -> None:
        self.move_span(1)

    def action_previous_span(self) -> None:
        self.move_span(-1)

    def action_lane_up(self) -> None:
        self.act(self.lane_view, "this is the first lane", lambda: self.lane_view.move_lane(-1))

    def action_lane_down(self) -> None:
        self.act(self.lane_view, "this is the last lane", lambda: self.lane_view.move_lane(1))
