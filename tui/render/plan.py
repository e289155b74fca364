"""What planning has found: a recipe's plan, a matrix of models and contexts, a model and data with their recipe."""

from __future__ import annotations

from typing import Any

from penstock.app.console.rows import Glyphs, Page, Row, exactly
from penstock.app.finetune.view import report_rows
from penstock.app.planning.fit_view import (
    changes_text,
    count_text,
    energy_text,
    head_lines,
    hours_text,
    notes,
    refusal_text,
    written_text,
)
from penstock.app.planning.view import fixes, machine_name, plan_rows, verdict
from penstock.app.runs.speed import speed_figure
from penstock.storage.files.units import bytes_text, duration_text, percent_text, seconds_text, tokens_text
from penstock.tui.data.plan_client import PlanState
from penstock.tui.data.processes import Cell, FinetuneState, FitState

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


_ABOUT = (
    "Give a model and data above and press enter. Penstock inspects both and proposes a recipe that trains every "
    "parameter. Nothing is trained until you launch it.",
    "Model: a Hugging Face folder, or OWNER/NAME on the hub.",
    "Data: a file or folder, or OWNER/NAME of a data set: conversations (messages, ShareGPT, Alpaca, prompt and "
    "completion) as JSON lines, JSON, Parquet, CSV or Arrow, or plain text.",
)


def finetune_rows(state: FinetuneState, width: int, glyphs: Glyphs) -> list[Row]:
    """The page: what to do, what is being done, why it cannot be done, or what was found."""
    page = Page(width, glyphs)
    if state.request is None:
        for text in _ABOUT:
            page.wrapped(text, "dim")
            page.line([])
    elif state.trouble is not None:
        page.wrapped(state.trouble, "bad")
    elif state.report is None:
        page.wrapped(f"{state.doing or 'starting'} {glyphs.ellipsis}", "accent")
    else:
        result = report_rows(state.report, width, glyphs)
        return [*result, *page.rows, [(" " * width, "text")], *plan_rows(state.report["plan"], width, glyphs)]
    return page.rows


_NAME = 16
_LEAST_CELL = 10
_WITH_HOURS = 19


def matrix_rows(state: FitState, chosen: Cell | None, width: int, height: int, glyphs: Glyphs) -> list[Row]:
    """A row a model, a column a context: a mark and tokens/s, or the tier that is too small.

    The chosen cell has an arrow before it and is shown reversed. Where the rows are too many, they are scrolled to it.
    """
    contexts = state.contexts
    each = max(_LEAST_CELL, min(26, (width - _NAME) // max(1, len(contexts))))
    head: Row = [(" " * _NAME, "dim"), *((f"{tokens_text(context):>{each}}", "title") for context in contexts)]
    rows = []
    for model in state.models:
        row: Row = [(f"{model:<{_NAME}}", "text")]
        for context in contexts:
            text, token = _cell_text(state.cells.get((model, context)), state.done, each - 2, glyphs)
            here = (model, context) == chosen
            row.append((f" {glyphs.arrow if here else ' '}", "accent"))
            row.append((f"{text:>{each - 2}}", f"{token} reverse" if here else token))
        rows.append(exactly(row, width, glyphs.ellipsis))
    at = state.models.index(chosen[0]) if chosen is not None else 0
    top = max(0, min(at - (height - 1) // 2, len(rows) - (height - 1)))
    return [exactly(head, width), *rows[top : top + height - 1]]


def _cell_text(cell: dict[str, Any] | None, done: bool, width: int, glyphs: Glyphs) -> tuple[str, str]:
    if cell is None:
        return ("n/a" if done else glyphs.ellipsis), "dim"
    if not cell["fits"]:
        return f"{glyphs.cross} {cell['tier']}", "bad"
    hours = f"  {hours_text(cell['hours']):>7}" if width + 2 >= _WITH_HOURS else ""
    return f"{glyphs.check} {speed_figure(cell['tokens_per_s'])}{hours}", "good"


def detail_rows(state: FitState, chosen: Cell | None, width: int, glyphs: Glyphs) -> list[Row]:
    """The chosen cell, then what was asked and what the figures mean."""
    page = Page(width, glyphs)
    if state.trouble is not None:
        page.wrapped(state.trouble, "bad")
    cell = None if chosen is None else state.cells.get(chosen)
    if chosen is not None:
        page.line([(f"{chosen[0]} at {chosen[1]:,} tokens of context", "title")])
    if cell is None:
        waiting = f"planning{glyphs.ellipsis}" if state.question is not None else f"starting{glyphs.ellipsis}"
        page.line([("not planned" if state.done else waiting, "dim")])
    elif cell["fits"]:
        _figures(page, state, cell)
    else:
        page.wrapped(f"does not fit: {refusal_text(cell)}", "bad")
        page.wrapped(
            changes_text(cell) or "its shortest context that does not fit lists changes that would help", "text"
        )
        page.wrapped(cell["message"], "dim")
    if state.question is not None:
        page.line([])
        for line in (*head_lines(state.question)[1:], *notes(state.question, state.cells.values())):
            page.wrapped(line, "dim")
    return page.rows


def _figures(page: Page, state: FitState, cell: dict[str, Any]) -> None:
    assert state.question is not None
    tokens = count_text(state.question["tokens"])
    peak = cell["peak_bytes"]
    held = ", ".join(f"{tier} {bytes_text(peak.get(tier))}" for tier in ("gpu", "ram", "nvme"))
    page.items(
        [
            f"{speed_figure(cell['tokens_per_s'])} tokens/s",
            f"{seconds_text(cell['step_s'])} a step of {cell['tokens_per_step']:,} tokens",
            f"{tokens} tokens take {hours_text(cell['hours'])}",
            f"bound by {cell['bound_by']}",
            f"MFU {percent_text(cell['mfu'])}",
            f"writes {written_text(cell)}",
            f"kWh {energy_text(cell)}",
            f"holds {held}",
        ],
        "   ",
        "text",
    )


def title_row(state: FitState, machine: str, width: int, glyphs: Glyphs) -> Row:
    """Whose matrix it is, and how much of it is there."""
    whole = len(state.models) * len(state.contexts)
    how = "done" if state.done else f"{len(state.cells)} of {whole} planned" if whole else f"starting{glyphs.ellipsis}"
    tokens = "" if state.question is None else f", tokens/s and time for {count_text(state.question['tokens'])} tokens"
    return exactly([("what ", "dim"), (machine, "title"), (f" can train{tokens}   ", "dim"), (how, "accent")], width)
