"""The pipeline of a run: NVMe, RAM and GPU, and what flows between them."""

from __future__ import annotations

from penstock.app.console.rows import Row
from penstock.tui.data.flow import Flow, Marks, Route, flow
from penstock.tui.data.run_data import RunData
from penstock.tui.render.pipeline import pipeline_rows
from penstock.tui.widgets.lines import RunPane


class PipelineBar(RunPane):
    """Drawn again only where something else is to be seen."""

    DEFAULT_CSS = "PipelineBar { height: 3; padding: 0 1; }"

    def __init__(self, data: RunData, *, id: str | None = None) -> None:
        super().__init__(data, id=id)
        self._marks = Marks()
        self._shown: tuple[Flow, dict[Route, int]] | None = None

    def update(self) -> None:
        """Look again at what flows."""
        now = flow(self._data)
        self._marks.move(self._data.spans.view, now, behind=self._data.behind)
        shown = now, self._marks.offsets
        if shown != self._shown:
            self._shown = shown
            self.redraw()

    def rows(self, width: int, height: int) -> list[Row]:
        now, offsets = self._shown or (flow(self._data), self._marks.offsets)
        return pipeline_rows(width, height, now, offsets, self.glyphs)
