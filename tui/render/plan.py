"""A plan beside the form that it follows, and in one row: what is known of it, and what is being done for it."""

from __future__ import annotations

from penstock.app.console.rows import Glyphs, Page, Row
from penstock.app.planning.view import fixes, machine_name, plan_rows, verdict
from penstock.app.runs.speed import speed_figure
from penstock.storage.files.units import duration_text, seconds_text
from penstock.tui.data.plan_client import PlanState

_PHASES = {"starting": "loading the planner", "planning": "planning", "advising": "searching for changes that help"}


def state_rows(state: PlanState, machine: str, width: int, glyphs: Glyphs) -> list[Row]:
    """The panel's rows, each of exactly `width` cells. `machine`: what is planned for, where no forecast says it."""
    page = Page(width, glyphs)
    forecast = state.forecast
    working = state.phase in _PHASES and state.trouble is None
    if state.trouble is not None:
        page.wrapped(f"{glyphs.cross} {state.trouble}", "bad")
        if state.phase == "idle":
            page.wrapped("You can go on editing; f5 tries again.", "dim")
        page.line([])
    if state.error is not None:
        page.line([(f"{glyphs.cross} no plan", "bad bold")])
        page.wrapped(state.error, "bad", 2)
        page.line([])
    status = f"{_PHASES[state.phase]}{glyphs.ellipsis}" if working else "outdated" if state.stale else ""
    if forecast is None:
        if state.error is None and state.trouble is None:
            page.ends([(f"for {machine or 'this machine'}", "text")], [(status, "accent")])
            page.wrapped("Here you will see whether it fits, how long a step takes and what limits it.", "dim")
        return page.rows
    rows = plan_rows(forecast, width, glyphs, status=status, advising=state.phase == "advising")
    if state.stale:
        rows = [[(text, token if text == status else "dim") for text, token in row] for row in rows]
    return page.rows + rows


def summary_row(state: PlanState, machine: str, width: int, glyphs: Glyphs) -> Row:
    """The plan in one row of `width` cells, what matters least cut off."""
    page = Page(width, glyphs)
    forecast, error = state.forecast, state.error or state.trouble
    working = f"{_PHASES[state.phase]}{glyphs.ellipsis}" if state.phase in ("starting", "planning") else ""
    if error is not None:
        page.line([(f"{glyphs.cross} no plan ", "bad bold"), (" ".join(error.split()), "bad")])
    elif forecast is None:
        page.ends([(f"plan for {machine or 'this machine'}", "dim")], [(working, "accent")])
    else:
        row: Row = [verdict(forecast, glyphs), (f" {machine_name(forecast)}", "text")]
        if forecast["fits"]:
            figures = (
                f"  planned {seconds_text(forecast['step_s'])} a step  {speed_figure(forecast['tokens_per_s'])} tok/s"
            )
            row += [(figures, "accent bold"), (f"  {forecast['bound_by']}-bound", "text")]
            row.append((f"  {duration_text(forecast['run']['seconds'])}", "text"))
        elif known := fixes(forecast):
            row.append((f"  1 {known[0]['text']}", "accent"))
        page.ends([(text, "dim") for text, _ in row] if state.stale else row, [(f" {working}", "accent")])
    return page.rows[0]
