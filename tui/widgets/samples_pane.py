"""The samples pane: what the model wrote behind one of the prompts, at the newest step with samples or one before."""

from __future__ import annotations

from penstock.app.console.rows import Row, exactly
from penstock.tui.data.fields import get
from penstock.tui.data.run_data import RunData
from penstock.tui.data.sample_log import Samples
from penstock.tui.render.log import sample_rows
from penstock.tui.widgets.lines import ScrolledLines


class SamplesPane(ScrolledLines):
    """Follows the newest samples until one goes to older ones."""

    _held: int | None = None
    """Step of the samples that are shown; None: the newest."""
    _prompt = 0

    def __init__(self, data: RunData) -> None:
        super().__init__()
        self._data = data

    @property
    def nothing(self) -> str:
        if get(self._data.recipe, "samples", "every") is None:
            return "this run generates no samples; set samples.every"
        return "no samples yet"

    def _at(self) -> int:
        found = self._data.samples
        steps = [one.step for one in found]
        return steps.index(self._held) if self._held in steps else len(found) - 1

    def go(self, by: int) -> bool:
        """To samples of so many steps later, or earlier; whether there are any. At the newest it follows again."""
        found, at = self._data.samples, self._at() + by
        if not 0 <= at < len(found):
            return False
        self._held = None if at == len(found) - 1 else found[at].step
        self.top = 0
        self.redraw()
        return True

    def next_prompt(self, by: int) -> bool:
        """To another prompt's sample; whether there is one."""
        found = self._data.samples
        if not found or len(found[self._at()].samples) == 1:
            return False
        self._prompt = (self._prompt + by) % len(found[self._at()].samples)
        self.top = 0
        self.redraw()
        return True

    def page(self, width: int) -> list[Row]:
        found: list[Samples] = self._data.samples
        if not found:
            return [exactly([(self.nothing, "dim")], width)]
        at = self._at()
        newer = len(found) - 1 - at
        note = f"{newer:,} newer: ]" if newer else f"{at:,} older: [" if at else ""
        shown = found[at]
        return sample_rows(shown, min(self._prompt, len(shown.samples) - 1), note, width, self.glyphs)
