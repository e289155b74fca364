"""The plan pane: the step that was planned beside the run's mean, and the lanes of the last one."""

from __future__ import annotations

from penstock.app.console.rows import Row
from penstock.app.runs.lanes import LANES
from penstock.tui.data.fields import number, text
from penstock.tui.data.run_data import RunData
from penstock.tui.render.plan_table import StepFigures, plan_rows
from penstock.tui.widgets.lines import RunPane


def planned_step(data: RunData) -> StepFigures:
    """What plan.json promised."""
    plan = data.plan
    shares = {lane: share for lane in LANES if (share := number(plan, "lanes", lane, "share")) is not None}
    return StepFigures(
        number(plan, "step_s"), number(plan, "tokens_per_s"), number(plan, "mfu"), text(plan, "bound_by"), shares
    )


def real_step(data: RunData) -> StepFigures:
    """The run's mean; lanes of the last step."""
    metrics, view = data.metrics, data.spans.view
    steps = view.steps()
    shares = {}
    bound_by = None
    if steps:
        last = steps[-1]
        shares = {lane: view.busy_s(lane, last.start_s, last.end_s) / (last.end_s - last.start_s) for lane in LANES}
        bound_by = max(shares, key=lambda lane: shares[lane])
    return StepFigures(metrics.last("mean_step_s"), metrics.last("mean_tokens_per_s"), data.mfu, bound_by, shares)


class PlanTable(RunPane, can_focus=True):
    """Redrawn as steps end."""

    def rows(self, width: int, height: int) -> list[Row]:
        return plan_rows(planned_step(self._data), real_step(self._data), LANES, width, height, self.glyphs)
