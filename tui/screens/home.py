"""Home: the runs and the recipes that there are, with their key figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.widgets import DataTable, Footer, Input, Static

from penstock.storage.errors import UserError
from penstock.storage.units import duration_text
from penstock.storage.untrusted import printable
from penstock.tui.data.catalog import (
    RecipeEntry,
    RunCatalog,
    RunEntry,
    describe,
    find_recipes,
    matches,
    plan_lines,
    summary_lines,
)
from penstock.tui.render.sparkline import sparkline
from penstock.tui.screens.base import PenstockScreen
from penstock.tui.theme import style, styled

STATE_TOKENS = {
    "running": "good",
    "preparing": "accent",
    "paused": "warn",
    "finished": "dim",
    "stopped": "warn",
    "failed": "bad",
    "crashed": "bad",
    "stale": "bad",
    "damaged": "bad",
    "unknown": "dim",
}
RESUMABLE = ("stopped", "failed", "crashed", "paused")
_RUN_COLUMNS = {"": 1, "run": 12, "state": 9, "step": 13, "loss": 7, "mean tok/s": 10, "left": 6, "last sign": 9}
"""Widths; a run's name takes what is left, and the last columns go where its least is not left."""
_RECIPE_COLUMNS = {"recipe": 22, "what it is": 48, "GPU": 24}
_PADDING = 2
"""Cells around a column."""


class HomeScreen(PenstockScreen):
    """Runs above, recipes below, and what is under the cursor beside them."""

    SCOPE = "home"
    DEFAULT_CSS = """
    HomeScreen #search { display: none; height: 3; border: round $primary; }
    HomeScreen #search.-shown { display: block; }
    HomeScreen #title { height: 1; padding: 0 1; }
    HomeScreen DataTable { height: 1fr; background: $background; overflow-x: hidden; scrollbar-gutter: stable; }
    HomeScreen #lists { width: 3fr; }
    HomeScreen #detail { width: 2fr; min-width: 40; }
    HomeScreen.-narrow #detail { display: none; }
    HomeScreen.-tiny #title { display: none; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._recipes: list[RecipeEntry] = []
        self._runs: list[RunEntry] = []
        self._marked: set[Path] = set()
        self._words = ""
        self._drawn: tuple[Any, ...] = ()

    def compose(self) -> ComposeResult:
        yield Static(id="title")
        yield Input(placeholder="words that a run or a recipe shows; esc ends the search", id="search")
        with Horizontal():
            with Vertical(id="lists"):
                yield _Table(cursor_type="row", id="runs", classes="pane")
                yield _Table(cursor_type="row", id="recipes", classes="pane")
            with VerticalScroll(id="detail", classes="pane"):
                yield Static(id="about", markup=False)
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        self.query_one("#runs").border_title = "runs"
        self.query_one("#recipes").border_title = "recipes"
        self._catalog = RunCatalog(self.penstock.root)
        self.take(self._read())
        self._table("runs" if self._runs else "recipes").focus()
        self.start_feed(self._read, self.take, every_s=0.5)

    def _table(self, id: str) -> DataTable[Any]:
        return self.query_one(f"#{id}", DataTable)

    def _read(self) -> tuple[list[RunEntry], list[RecipeEntry]]:
        return self._catalog.read(), find_recipes(self.penstock.root)

    def take(self, found: tuple[list[RunEntry], list[RecipeEntry]]) -> None:
        """Show what was read, where it differs from what is shown."""
        self._runs, self._recipes = found
        self._marked &= {run.path for run in self._runs}
        self._draw()

    def _draw(self) -> None:
        dark, now = self.app.current_theme.dark, self.penstock.clock()
        room = self._table("runs").scrollable_content_region.width
        ages = [_age(now - run.changed) for run in self._runs]
        drawn = (self._runs, self._recipes, self._words, frozenset(self._marked), dark, room, ages)
        if drawn == self._drawn:
            return
        self._drawn = drawn
        self._draw_title(dark)
        columns = _fitted(_RUN_COLUMNS, "run", room)
        check = self.penstock.glyphs.check
        runs = {
            str(run.path): _run_cells(run, age, check if run.path in self._marked else " ", dark)[: len(columns)]
            for run, age in zip(self._runs, ages, strict=True)
            if matches(self._words, run.name, run.state, run.error or "")
        }
        _fill(self._table("runs"), columns, runs)
        columns = _fitted(_RECIPE_COLUMNS, "what it is", room)
        recipes = {
            str(recipe.path): _recipe_cells(recipe, dark)[: len(columns)]
            for recipe in self._recipes
            if matches(self._words, recipe.name, recipe.text, "own" if recipe.own else "shipped")
        }
        _fill(self._table("recipes"), columns, recipes)
        self._draw_detail()

    def _draw_title(self, dark: bool) -> None:
        live = sum(run.live for run in self._runs)
        runs, recipes = len(self._runs), len(self._recipes)
        counts = f"{runs} run{'s' * (runs != 1)}, {live} live   {recipes} recipe{'s' * (recipes != 1)}"
        marked = f"   {len(self._marked)} marked, m compares" if self._marked else ""
        root = f"   {_short(self.penstock.root)}   "
        title = styled([("penstock", "title"), (root, "dim"), (counts, "text"), (marked, "accent")], dark)
        self.query_one("#title", Static).update(title)

    def _draw_detail(self) -> None:
        dark = self.app.current_theme.dark
        pane, about = self.query_one("#detail"), self.query_one("#about", Static)
        chosen = self.chosen
        if isinstance(chosen, RunEntry):
            pane.border_title = Text(chosen.name)
            about.update(_run_text(chosen, dark, self.penstock.glyphs.eighths, pane.size.width - 4))
        elif chosen is not None:
            pane.border_title = Text(chosen.name)
            about.update(_recipe_text(chosen, dark, execute=not self.penstock.read_only))
        else:
            pane.border_title = ""
            about.update("nothing here yet: a recipe is configured with enter" if not self._words else "nothing found")

    @property
    def chosen(self) -> RunEntry | RecipeEntry | None:
        """What the cursor of the list in use is on."""
        table = self._table("recipes" if self._table("recipes").has_focus else "runs")
        if not table.row_count or not table.is_valid_row_index(table.cursor_row):
            return None
        key = table.ordered_rows[table.cursor_row].key.value
        entries: list[RunEntry | RecipeEntry] = [*self._runs, *self._recipes]
        return next((entry for entry in entries if str(entry.path) == key), None)

    @property
    def _chosen_run(self) -> RunEntry | None:
        chosen = self.chosen
        return chosen if isinstance(chosen, RunEntry) else None

    def on_data_table_row_highlighted(self) -> None:
        self._draw_detail()
        self.refresh_bindings()

    on_descendant_focus = on_data_table_row_highlighted

    def on_data_table_row_selected(self) -> None:
        self.action_open()

    def on_resize(self) -> None:
        self._draw()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Textual's hook: what the line under the cursor allows."""
        if not self.is_mounted:
            return True
        if action in ("mark", "timeline"):
            return self._chosen_run is not None
        if action == "resume":
            return self._chosen_run is not None and self._chosen_run.state in RESUMABLE
        return True

    def action_open(self) -> None:
        chosen = self.chosen
        if isinstance(chosen, RunEntry):
            self.penstock.open_run(chosen.path)
        elif chosen is not None:
            self._configure(chosen)

    def action_configure(self) -> None:
        chosen = self.chosen
        if isinstance(chosen, RunEntry):
            self.penstock.open_configure(chosen.path / "recipe.json")
        elif chosen is not None:
            self._configure(chosen)

    def _configure(self, recipe: RecipeEntry) -> None:
        if recipe.problem is not None:
            self.notify(recipe.problem, severity="error")
        else:
            self.penstock.open_configure(recipe.path)

    def action_timeline(self) -> None:
        if (run := self._chosen_run) is not None:
            self.penstock.open_timeline(run.path)

    def action_mark(self) -> None:
        if (run := self._chosen_run) is not None:
            self._marked ^= {run.path}
            self._draw()

    def action_compare(self) -> None:
        paths = [run.path for run in self._runs if run.path in self._marked]
        run = self._chosen_run
        if run is not None and len(paths) < 2 and run.path not in paths:
            paths.append(run.path)
        if len(paths) < 2:
            self.notify("mark two or more runs with space, then compare them", severity="warning")
        else:
            self.penstock.open_compare(paths)

    def action_switch(self) -> None:
        self._table("runs" if self._table("recipes").has_focus else "recipes").focus()

    @work(group="action")
    async def action_resume(self) -> None:
        run = self._chosen_run
        if run is None or run.state not in RESUMABLE:
            return
        where = f"step {run.step:,} of {run.total_steps:,}"
        if await self.penstock.ask("resume", f"Go on with {run.name} ({run.state}, {where})?", yes="Resume"):
            self._resume(run.path)

    @work(thread=True, group="resume")
    def _resume(self, path: Path) -> None:
        from penstock.app.launcher import resume

        try:
            resume(path)
        except UserError as error:
            self.penstock.from_thread(self.notify, str(error), severity="error")

    def action_search(self) -> None:
        search = self.query_one("#search", Input)
        search.add_class("-shown")
        search.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._words = event.value
        self._draw()

    def on_input_submitted(self) -> None:
        """Textual's hook: back to the list that has something."""
        self._table("runs" if self._table("runs").row_count else "recipes").focus()

    def on_key(self, event: Any) -> None:
        """Textual's hook: escape in the search line ends the search."""
        search = self.query_one("#search", Input)
        if event.key == "escape" and (search.has_focus or search.value):
            event.stop()
            event.prevent_default()
            search.value = ""
            search.remove_class("-shown")
            self.on_input_submitted()


class _Table(DataTable[Any], inherit_bindings=False):
    """Enter is the screen's."""

    BINDINGS = [
        Binding("up", "cursor_up", show=False),
        Binding("down", "cursor_down", show=False),
        Binding("pageup", "page_up", show=False),
        Binding("pagedown", "page_down", show=False),
        Binding("home", "scroll_top", show=False),
        Binding("end", "scroll_bottom", show=False),
    ]


def _fitted(columns: dict[str, int], flexible: str, room: int) -> dict[str, int]:
    """The columns that fit `room` cells; `flexible` takes what the others leave."""
    shown = dict(columns)
    while len(shown) > 2 and sum(shown.values()) + _PADDING * len(shown) > room:
        shown.popitem()
    others = sum(shown.values()) - shown[flexible] + _PADDING * len(shown)
    return shown | {flexible: max(8, room - others)}


def _fill(table: DataTable[Any], columns: dict[str, int], rows: dict[str, list[Any]]) -> None:
    """Bring the table to these columns and rows; cells change in place while rows and columns stay."""
    keys = [row.key.value for row in table.ordered_rows]
    same_columns = {str(column.key.value): column.width for column in table.ordered_columns} == columns
    if keys == list(rows) and same_columns:
        for key, cells in rows.items():
            for column, cell in zip(table.ordered_columns, cells, strict=True):
                if table.get_cell(key, column.key) != cell:
                    table.update_cell(key, column.key, cell)
        return
    chosen = keys[table.cursor_row] if keys and table.is_valid_row_index(table.cursor_row) else None
    table.clear(columns=not same_columns)
    if not same_columns:
        for name, width in columns.items():
            table.add_column(name, width=width, key=name)
    for key, cells in rows.items():
        table.add_row(*cells, key=key)
    if chosen in rows:
        table.move_cursor(row=list(rows).index(str(chosen)), animate=False)


def _run_cells(run: RunEntry, age: str, mark: str, dark: bool) -> list[Any]:
    step = f"{run.step:,}/{run.total_steps:,}" if run.total_steps else "-"
    return [
        Text(mark, style=style("accent", dark)),
        Text(run.name, no_wrap=True, overflow="ellipsis"),
        Text(run.state, style=style(STATE_TOKENS.get(run.state, "dim"), dark)),
        Text(step, justify="right"),
        Text("-" if run.loss is None else f"{run.loss:.4f}", justify="right"),
        Text("-" if run.tokens_per_s is None else f"{run.tokens_per_s:,.0f}", justify="right"),
        Text("-" if run.left_s is None else duration_text(run.left_s), justify="right"),
        Text(age, justify="right", style=style("dim", dark)),
    ]


def _recipe_cells(recipe: RecipeEntry, dark: bool) -> list[Any]:
    name = Text.assemble(recipe.name, (" own" if recipe.own else "", style("accent", dark)))
    if recipe.problem is not None:
        return [name, Text(recipe.problem, style=style("bad", dark)), ""]
    gpu = Text(recipe.needs.get("GPU", ""), style=style("dim", dark), no_wrap=True, overflow="ellipsis")
    return [name, Text(recipe.title, no_wrap=True, overflow="ellipsis"), gpu]


def _run_text(run: RunEntry, dark: bool, eighths: str, width: int) -> Text:
    text = Text()
    text.append(run.state, style(STATE_TOKENS.get(run.state, "dim"), dark))
    if run.total_steps:
        text.append(f"   step {run.step:,} of {run.total_steps:,}")
    if run.loss is not None:
        text.append(f"   loss {run.loss:.4f}")
    text.append(f"\n{_short(run.path)}\n", style("dim", dark))
    if run.error:
        text.append(f"\n{run.error}\n", style("bad", dark))
    if len(run.losses) > 1:
        text.append(f"\nloss of the last {len(run.losses)} steps\n", style("dim", dark))
        text.append(sparkline(run.losses, max(10, min(width, 60)), eighths) + "\n", style("ema", dark))
    for line in [*plan_lines(run.path), *summary_lines(run.path)]:
        text.append(f"\n{line}")
    return text


def _recipe_text(recipe: RecipeEntry, dark: bool, *, execute: bool) -> Text:
    """`execute`: with what only the recipe's own code can say."""
    text = Text(recipe.problem or recipe.text)
    if recipe.problem is None and execute:
        try:
            found = describe(recipe)
        except UserError as error:
            return Text(str(error), style("bad", dark))
        text.append("\n")
        for label, value in found.items():
            text.append(f"\n{label:<8} ", style("dim", dark))
            text.append(value)
    text.append(f"\n\n{_short(recipe.path)}", style("dim", dark))
    return text


def _age(seconds: float) -> str:
    if seconds < 5:
        return "now"
    return f"{duration_text(seconds // 10 * 10 if seconds > 60 else seconds)} ago"


def _short(path: Path) -> str:
    home = Path.home()
    return printable(f"~/{path.relative_to(home)}" if path.is_relative_to(home) and path != home else path)
