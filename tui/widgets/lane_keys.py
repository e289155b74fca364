"""Zoom, pan and selection: the actions of screens that have a lane view."""

from __future__ import annotations

from penstock.tui.widgets.lane_view import PAN, ZOOM, LaneView
from penstock.tui.widgets.loss_chart import LossChart


class LaneKeys:
    """The actions of a screen that has a LaneView."""

    lane_view: LaneView

    def zoomed(self) -> LaneView | LossChart:
        """What zoom, pan and selection are for."""
        return self.lane_view

    def action_zoom_in(self) -> None:
        self.zoomed().zoom(ZOOM)

    def action_zoom_out(self) -> None:
        self.zoomed().zoom(1 / ZOOM)

    def action_pan_left(self) -> None:
        self.zoomed().pan(-PAN)

    def action_pan_right(self) -> None:
        self.zoomed().pan(PAN)

    def action_fit(self) -> None:
        self.zoomed().fit()

    def move_span(self, by: int) -> None:
        """Along the ops, or the steps."""
        self.zoomed().action_move(by)

    def action_next_span(self) -> None:
        self.move_span(1)

    def action_previous_span(self) -> None:
        self.move_span(-1)

    def action_lane_up(self) -> None:
        self.lane_view.move_lane(-1)

    def action_lane_down(self) -> None:
        self.lane_view.move_lane(1)
