"""Fit: which published models a machine can train, at which contexts; a cell opens as a recipe."""

from __future__ import annotations

from pathlib import Path

from textual import work
from textual.app import ComposeResult

from penstock.app.console.rows import Glyphs, Row
from penstock.app.recipes.recipe import from_dict
from penstock.tui.data.processes import Cell, FitClient
from penstock.tui.render.plan import detail_rows, matrix_rows, title_row
from penstock.tui.screens.base import PenstockScreen
from penstock.tui.screens.dialogs import THIS_MACHINE, MachinePicker
from penstock.tui.widgets.lines import Drawn, Footer


class FitScreen(PenstockScreen):
    """The matrix above, the chosen cell below. It is planned by a process of its own, from the first cell on."""

    SCOPE = "fit"
    DEFAULT_CSS = """
    FitScreen #title { height: 1; padding: 0 1; }
    FitScreen #matrix { height: 14; }
    FitScreen.-tiny #matrix { height: 1fr; border: none; }
    FitScreen.-tiny #detail { border: none; }
    """

    def __init__(self, machine: str = "") -> None:
        super().__init__()
        self.machine = machine
        """What is planned for: a preset or a profile, empty for this machine."""
        self._row = self._column = 0

    def compose(self) -> ComposeResult:
        yield Drawn(self._title, id="title")
        yield Drawn(lambda *more: matrix_rows(self.client.state, self.chosen, *more), id="matrix", classes="pane")
        yield Drawn(self._detail, id="detail", classes="pane")
        yield Footer()

    def on_mount(self) -> None:
        self.client = FitClient(self.penstock.root, self._show)
        self._ask()

    @property
    def chosen(self) -> Cell | None:
        """The cell under the cursor; None while nothing is known."""
        models, contexts = self.client.state.models, self.client.state.contexts
        if not models or not contexts:
            return None
        return models[min(self._row, len(models) - 1)], contexts[min(self._column, len(contexts) - 1)]

    def _title(self, width: int, height: int, glyphs: Glyphs) -> list[Row]:
        name = Path(self.machine).name or THIS_MACHINE
        return [title_row(self.client.state, name, width, glyphs)]

    def _detail(self, width: int, height: int, glyphs: Glyphs) -> list[Row]:
        return detail_rows(self.client.state, self.chosen, width, glyphs)

    def _show(self) -> None:
        if self.is_attached:
            for pane in self.query(Drawn):
                pane.redraw()

    def action_move(self, rows: int, columns: int) -> None:
        state = self.client.state
        self._row = max(0, min(self._row + rows, len(state.models) - 1))
        self._column = max(0, min(self._column + columns, len(state.contexts) - 1))
        self._show()

    @work
    async def action_machine(self) -> None:
        result = await self.app.push_screen_wait(MachinePicker(self.machine))
        if result is not None and result != self.machine:
            self.machine = result
            self._ask()

    def action_replan(self) -> None:
        self._ask()

    @work(exclusive=True, group="ask", exit_on_error=False)
    async def _ask(self) -> None:
        await self.client.ask(self.machine)

    def action_configure(self) -> None:
        cell = None if self.chosen is None else self.client.state.cells.get(self.chosen)
        if cell is None:
            self.notify("this context is not planned yet", severity="warning")
            return
        recipe = from_dict(cell["recipe"])
        self.save_and_configure(recipe, "-".join(filter(None, [recipe.name, Path(self.machine).stem])))
