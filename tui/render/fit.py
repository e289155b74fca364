"""What a machine can train: a matrix of models and contexts, and one of its cells in full."""

from __future__ import annotations

from typing import Any

from penstock.app.console.rows import Glyphs, Page, Row, exactly
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
from penstock.app.runs.speed import speed_figure
from penstock.storage.files.units import bytes_text, percent_text, seconds_text, tokens_text
from penstock.tui.data.fit_client import Cell, FitState

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
            changes_text(cell) or "its shortest context that does not fit lists changes that would help",
            "text",
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
