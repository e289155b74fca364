"""The lane view's actions, for screens that have one."""

from __future__ import annotations

from tui.widgets.lane_view import LaneView


class LaneKeys:
    """The actions of a screen that has a LaneView."""

    lane_view: LaneView

    def action_zoom_in(self) -> None:
        """Half as long a time."""
        self.lane_view.zoom_in()

    def action_zoom_out(self) -> None:
        """Twice as long a time."""
        self.lane_view.zoom_out()

    def action_pan_left(self) -> None:
        """Back in time."""
        self.lane_view.pan_left()

    def action_pan_right(self) -> None:
        """On in time."""
        self.lane_view.pan_right()

    def action_fit(self) -> None:
        """The whole step."""
        self.lane_view.fit()

    def action_next_span(self) -> None:
        """The lane's next op."""
        self.lane_view.next_span()

    def action_previous_span(self) -> None:
        """The lane's op before."""
        self.lane_view.previous_span()

    def action_lane_up(self) -> None:
        """The lane above."""
        self.lane_view.lane_up()

    def action_lane_down(self) -> None:
        """The lane below."""
        self.lane_view.lane_down()
