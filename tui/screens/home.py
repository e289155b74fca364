"""Home: the runs and the recipes that there are, with their key figures."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Container, Vertical, VerticalScroll
from textual.widgets import DataTable, Input, Static
from textual.worker import Worker

from penstock.app.console.rows import Row
from penstock.app.runs.directory import RunInfo
from penstock.app.runs.speed import speed_figure
from penstock.storage.files.errors import UserError
from penstock.storage.files.units import duration_text, seconds_text
from penstock.storage.files.untrusted import printable
from penstock.tui.data.catalog import RESUMABLE, RunCatalog, RunEntry, about_lines
from penstock.tui.data.recipes import RecipeCatalog, RecipeEntry, describe, matches
from penstock.tui.render.home_table import ColumnSpec, Table, recipes_table, runs_table, welcome_rows
from penstock.tui.render.kpi import STATE_TOKENS
from penstock.tui.render.one_row import sparkline
from penstock.tui.screens.base import PenstockScreen
from penstock.tui.theme import styled
from penstock.tui.widgets.lines import Footer

if TYPE_CHECKING:
    from penstock.app.planning.fits import Fit

_Read = tuple[list[RunEntry], list[RecipeEntry], "dict[Path, Fit | None]"]
_FRAME_ROWS = 3
_IDLE_S = 2.0
"""Without a key for so long, nobody is waiting."""


class HomeScreen(PenstockScreen):
    """Runs above, recipes below, and what is under the cursor beside them."""

    SCOPE = "home"
    DEFAULT_CSS = """
    HomeScreen #search { display: none; height: 3; border: round $primary; }
    HomeScreen #search.-shown { display: block; }
    HomeScreen #title { height: 1; padding: 0 1; }
    HomeScreen DataTable { background: $background; overflow-x: hidden; scrollbar-gutter: stable; }
    HomeScreen #runs { min-height: 4; max-height: 50%; }
    HomeScreen #welcome { height: auto; max-height: 75%; padding: 0 1; }
    HomeScreen #recipes { height: 1fr; }
    HomeScreen #main { layout: vertical; }
    HomeScreen #lists { width: 1fr; height: 1fr; }
    HomeScreen #detail { width: 1fr; height: 11; }
    HomeScreen.-narrow #detail, HomeScreen.-short #detail, HomeScreen.-tiny #detail { display: none; }
    HomeScreen.-very-wide #main { layout: horizontal; }
    HomeScreen.-very-wide #lists { width: 3fr; }
    HomeScreen.-very-wide #detail { display: block; width: 1fr; min-width: 48; height: 1fr; }
    HomeScreen.-tiny #title { display: none; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._recipes: list[RecipeEntry] = []
        self._runs: list[RunEntry] = []
        self._marked: set[Path] = set()
        self._words = ""
        self._drawn: tuple[Any, ...] = ()
        self._fits: dict[Path, Fit | None] = {}
        self._planning: set[Path] = set()
        self._plans: Worker[None] | None = None
        self._touched = time.monotonic()
        self._has_drawn = False

    def compose(self) -> ComposeResult:
        yield Static(id="title")
        yield Input(placeholder="search runs and recipes; esc ends the search", id="search")
        with Container(id="main"):
            with Vertical(id="lists"):
                yield _Table(cursor_type="row", id="runs", classes="pane")
                yield Static(id="welcome", classes="pane", markup=False)
                yield _Table(cursor_type="row", id="recipes", classes="pane")
            with VerticalScroll(id="detail", classes="pane"):
                yield Static(id="about", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#runs").border_title = self.query_one("#welcome").border_title = "runs"
        self.query_one("#recipes").border_title = "recipes"
        self._catalog = RunCatalog(self.penstock.root)
        self._recipe_catalog = RecipeCatalog(self.penstock.root)
        self.take((self._catalog.read(), self._recipe_catalog.read(), {}))
        self._table("runs" if self._runs else "recipes").focus()
        self.start_feed(self._read, self.take, every_s=0.5)
        self.set_interval(0.5, self._plan_when_idle)

    def _table(self, id: str) -> _Table:
        return self.query_one(f"#{id}", _Table)

    def _read(self) -> _Read:
        recipes = self._recipe_catalog.read()
        fits = self.penstock.home_plans.look(recipes) if self._has_drawn else {}  # what that imports waits
        self._has_drawn = True
        return self._catalog.read(), recipes, fits

    def take(self, result: _Read) -> None:
        """Show what was read, where it differs from what is shown."""
        self._runs, self._recipes, self._fits = result
        self._planning = {recipe.path for recipe in self._recipes if self.penstock.home_plans.will_plan(recipe)}
        self._marked &= {run.info.path for run in self._runs}
        self._draw()

    def _draw(self) -> None:
        dark, now = self.app.current_theme.dark, self.penstock.clock()
        available = self._table("recipes").scrollable_content_region.width
        ages = {run.info.path: _age(now - run.changed) for run in self._runs}
        drawn = (
            self._runs,
            self._recipes,
            self._words,
            set(self._marked),
            dark,
            available,
            ages,
            self._fits,
            self._planning,
        )
        if drawn == self._drawn:
            return
        self._drawn = drawn
        self._draw_title(dark)
        self._draw_welcome(dark)
        runs = [run for run in self._runs if matches(self._words, run.info.name, run.info.state, run.info.error or "")]
        self._table("runs").styles.height = len(runs) + _FRAME_ROWS
        table = runs_table(runs, [ages[run.info.path] for run in runs], self._marked, available, self.penstock.glyphs)
        self._table("runs").show(table, dark)
        own = {True: "own", False: "shipped"}
        recipes = [r for r in self._recipes if matches(self._words, r.name, r.text, own[r.own])]
        table = recipes_table(recipes, self._fits, self._planning, available, self.penstock.glyphs)
        self._table("recipes").show(table, dark)
        self._draw_detail()

    def _draw_title(self, dark: bool) -> None:
        live = sum(run.live for run in self._runs)
        runs, recipes = len(self._runs), len(self._recipes)
        counts = f"{runs} run{'s' * (runs != 1)}, {live} live   {recipes} recipe{'s' * (recipes != 1)}"
        marked = f"   {len(self._marked)} marked, m compares" if self._marked else ""
        root = f"   {_short(self.penstock.root)}   "
        title = styled([("penstock", "title"), (root, "dim"), (counts, "text"), (marked, "accent")], dark)
        self.query_one("#title", Static).update(title)

    def _draw_welcome(self, dark: bool) -> None:
        runs, welcome = self._table("runs"), self.query_one("#welcome", Static)
        if runs.has_focus and not self._runs:
            self._table("recipes").focus()
        runs.display, welcome.display = bool(self._runs), not self._runs
        if not self._runs:
            lines = welcome_rows(read_only=self.penstock.read_only)
            welcome.update(Text("\n").join(styled(line, dark) for line in lines))

    def _draw_detail(self) -> None:
        pane, about = self.query_one("#detail"), self.query_one("#about", Static)
        chosen = self.chosen
        pane.border_title = Text("" if chosen is None else _info(chosen).name)
        if isinstance(chosen, RunEntry):
            rows = _run_rows(chosen, self.penstock.glyphs.eighths, pane.size.width - 4)
        elif chosen is not None:
            rows = _recipe_rows(chosen, self._fits.get(chosen.path))
        else:
            rows = [[("nothing found" if self._words else "nothing is selected", "text")]]
        about.update(Text("\n").join(styled(row, self.app.current_theme.dark) for row in rows))

    @property
    def chosen(self) -> RunEntry | RecipeEntry | None:
        table = self._table("recipes" if self._table("recipes").has_focus else "runs")
        if not table.row_count or not table.is_valid_row_index(table.cursor_row):
            return None
        key = table.ordered_rows[table.cursor_row].key.value
        entries: list[RunEntry | RecipeEntry] = [*self._runs, *self._recipes]
        return next((entry for entry in entries if str(_info(entry).path) == key), None)

    @property
    def _chosen_run(self) -> RunInfo | None:
        chosen = self.chosen
        return chosen.info if isinstance(chosen, RunEntry) else None

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

    def on_screen_resume(self) -> None:
        self.penstock.home_plans.begin_stay()

    def on_screen_suspend(self) -> None:
        """Textual's hook: Home is left, or a dialog stands above it; nothing is planned meanwhile."""
        self.workers.cancel_group(self, "plans")

    def _is_idle(self) -> bool:
        return self.app.screen is self and time.monotonic() - self._touched >= _IDLE_S

    @property
    def will_plan(self) -> bool:
        """Whether answers to "fits here?" are missing that will come by themselves."""
        return any(self._fits.get(path) is None for path in self._planning)

    def _plan_when_idle(self) -> None:
        wanted = [recipe for recipe in self._recipes if self._fits.get(recipe.path) is None]
        if self.will_plan and self._is_idle() and (self._plans is None or self._plans.is_finished):
            plans = self.penstock.home_plans.plan(wanted, self._is_idle)
            self._plans = self.run_worker(plans, group="plans", exit_on_error=False)

    def action_open(self) -> None:
        chosen = self.chosen
        if isinstance(chosen, RunEntry):
            self.penstock.open("run", chosen.info.path)
        elif chosen is not None:
            self._configure(chosen)

    def action_configure(self) -> None:
        chosen = self.chosen
        if isinstance(chosen, RunEntry):
            self.penstock.open("configure", chosen.info.path / "recipe.json")
        elif chosen is not None:
            self._configure(chosen)

    def _configure(self, recipe: RecipeEntry) -> None:
        if recipe.problem is not None:
            self.notify(recipe.problem, severity="error")
        else:
            self.penstock.open("configure", recipe.path)

    def action_timeline(self) -> None:
        if (run := self._chosen_run) is not None:
            self.penstock.open("timeline", run.path)

    def action_mark(self) -> None:
        if (run := self._chosen_run) is not None:
            self._marked ^= {run.path}
            self._draw()

    def action_compare(self) -> None:
        paths = [run.info.path for run in self._runs if run.info.path in self._marked]
        run = self._chosen_run
        if run is not None and len(paths) < 2 and run.path not in paths:
            paths.append(run.path)
        if len(paths) < 2:
            self.notify("mark two or more runs with space, then compare them", severity="warning")
        else:
            self.penstock.open("compare", paths)

    def action_switch(self) -> None:
        to_runs = self._runs and self._table("recipes").has_focus
        self._table("runs" if to_runs else "recipes").focus()

    @work(group="action")
    async def action_resume(self) -> None:
        run = self._chosen_run
        if run is None or run.state not in RESUMABLE:
            return
        where = f"step {run.step:,} of {run.total_steps:,}"
        if await self.penstock.ask("Resume", f"Resume {run.name} ({run.state}, {where})?", yes="Resume"):
            from penstock.app.launch.launcher import resume

            try:
                await asyncio.to_thread(resume, run.path)
            except UserError as error:
                self.notify(str(error), severity="error")

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
        self._touched = time.monotonic()
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
        Binding(key, action, show=False)
        for key, action in (
            *(("up", "cursor_up"), ("down", "cursor_down"), ("pageup", "page_up"), ("pagedown", "page_down")),
            *(("home", "scroll_top"), ("end", "scroll_bottom")),
        )
    ]
    _shown: list[ColumnSpec] | None = None

    def show(self, table: Table, dark: bool) -> None:
        """Bring it to these columns and rows; cells change in place while rows and columns stay."""
        keys = [str(row.key.value) for row in self.ordered_rows]
        chosen = keys[self.cursor_row] if self.is_valid_row_index(self.cursor_row) else None
        rows = {
            key: [
                styled(cell, dark, justify="right" if spec.right else "left", no_wrap=True, overflow="ellipsis")
                for spec, cell in zip(table.columns, cells, strict=True)
            ]
            for key, cells in table.rows.items()
        }
        if keys == list(rows) and self._shown == table.columns:
            for key, cells in rows.items():
                for column, cell in zip(self.ordered_columns, cells, strict=True):
                    if self.get_cell(key, column.key) != cell:
                        self.update_cell(key, column.key, cell)
            return
        same, self._shown = self._shown == table.columns, table.columns
        self.clear(columns=not same)
        if not same:
            for number, spec in enumerate(table.columns):
                title = Text(spec.title, justify="right" if spec.right else "left")
                self.add_column(title, width=spec.width, key=str(number))
        for key, cells in rows.items():
            self.add_row(*cells, key=key)
        if chosen in rows:
            self.move_cursor(row=list(rows).index(chosen), animate=False)


def _info(entry: RunEntry | RecipeEntry) -> RunInfo | RecipeEntry:
    return entry.info if isinstance(entry, RunEntry) else entry


def _run_rows(run: RunEntry, eighths: str, width: int) -> list[Row]:
    info = run.info
    step = f"   step {info.step:,} of {info.total_steps:,}" if info.total_steps else ""
    loss = "" if info.loss is None else f"   loss {info.loss:.4f}"
    rows: list[Row] = [[(info.state, STATE_TOKENS.get(info.state, "dim")), (step + loss, "text")]]
    rows += [[(_short(info.path), "dim")], []]
    if info.error:
        rows += [[(info.error, "bad")], []]
    if len(run.losses) > 1:
        rows.append([(f"loss of the last {len(run.losses)} steps", "dim")])
        rows += [[(sparkline(run.losses, max(10, min(width, 60)), eighths), "ema")], []]
    return rows + [[(line, "text")] for line in about_lines(info.path)]


def _recipe_rows(recipe: RecipeEntry, fit: Fit | None) -> list[Row]:
    result = {} if recipe.problem else (describe(recipe.recipe) if recipe.recipe else {}) | _fit_text(fit)
    rows: list[Row] = [[(recipe.problem or recipe.text, "text")], *([[]] if result else [])]
    rows += [[(f"{label:<8} ", "dim"), (value, "text")] for label, value in result.items()]
    return [*rows, [], [(_short(recipe.path), "dim")]]


def _fit_text(fit: Fit | None) -> dict[str, str]:
    if fit is None:
        return {}
    if not fit.fits:
        return {"here": f"not planned: {fit.message}" if fit.fits is None else f"does not fit: {fit.message}"}
    speed = "" if fit.tokens_per_s is None else f", planned {speed_figure(fit.tokens_per_s)} tok/s"
    return {"here": f"fits{speed}, {seconds_text(fit.step_s)} a step"}


def _age(seconds: float) -> str:
    if seconds < 5:
        return "now"
    return f"{duration_text(seconds // 10 * 10 if seconds > 60 else seconds)} ago"


def _short(path: Path) -> str:
    home = Path.home()
    return printable(f"~/{path.relative_to(home)}" if path.is_relative_to(home) and path != home else path)
