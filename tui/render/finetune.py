"""What a model and data were found to be, what was chosen for them, and the plan, as one page."""

from __future__ import annotations

from penstock.app.console.rows import Glyphs, Page, Row
from penstock.app.finetune.view import report_rows
from penstock.app.planning.view import plan_rows
from penstock.tui.data.finetune_client import FinetuneState

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
    if state.asked is None:
        for text in _ABOUT:
            page.wrapped(text, "dim")
            page.line([])
    elif state.trouble is not None:
        page.wrapped(state.trouble, "bad")
    elif state.report is None:
        page.wrapped(f"{state.doing or 'starting'} {glyphs.ellipsis}", "accent")
    else:
        found = report_rows(state.report, width, glyphs)
        return [*found, *page.rows, [(" " * width, "text")], *plan_rows(state.report["plan"], width, glyphs)]
    return page.rows
