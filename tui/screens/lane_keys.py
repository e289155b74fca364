"""Zoom, pan and selection: the actions of screens that have a lane view."""

from __future__ import annotations

from collections.abc import Callable

from penstock.tui.widgets.lane_view import LaneView
from penstock.tui.widgets.loss_chart import LossChart


class LaneKeys:
    lane_view: LaneView

    def zoomed(self) -> LaneView | LossChart:
        """What zoom, pan and selection are for."""
        return self.lane_view

    def act(self, view: LaneView | LossChart, why_not: str, move: Callable[[], None]) -> None:
        """Move in a view; `why_not`: the reason where nothing moves."""
        move()

    def action_zoom(self, factor: float) -> None:
        view = self.zoomed()
        why_not = "cannot zoom in any further" if factor < 1 else "everything is in view already"
        self.act(view, why_not, lambda: view.zoom(factor))

    def action_pan(self, share: float) -> None:
        view = self.zoomed()
        self.act(view, "this is the latest" if share > 0 else "this is the beginning", lambda: view.pan(share))

    def action_fit(self) -> None:
        view = self.zoomed()
        self.act(view, "everything is in view already", view.fit)

    def action_span(self, by: int) -> None:
        view = self.zoomed()
        self.act(view, "this is the last one" if by > 0 else "this is the first one", lambda: view.action_move(by))

    def action_lane(self, by: int) -> None:
        why_not = "this is the last lane" if by > 0 else "this is the first lane"
        self.act(self.lane_view, why_not, lambda: self.lane_view.move_lane(by))
