"""Configure: the recipe's form, and beside it the plan that follows it as one types."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal
from textual.widgets import Input, Static

from penstock.app.console.rows import Glyphs, Row
from penstock.app.planning.view import fixes
from penstock.app.recipes import shipped
from penstock.app.recipes.recipe import Recipe, apply_overrides, from_dict, load_recipe, resolve_paths, save_recipe
from penstock.app.runs.speed import speed_figure
from penstock.storage.files.errors import UserError
from penstock.storage.files.units import duration_text, seconds_text
from penstock.tui.data.draft import PATHS, Draft, error_field, kind_of
from penstock.tui.data.plan_client import PlanClient, PlanState
from penstock.tui.data.recipes import content_digest
from penstock.tui.render.plan import summary_row
from penstock.tui.screens.base import PenstockScreen
from penstock.tui.screens.dialogs import THIS_MACHINE, ChangesDialog, MachinePicker, PathPicker
from penstock.tui.widgets.form import Form
from penstock.tui.widgets.lines import Drawn, Footer
from penstock.tui.widgets.pages import PlanPanel


class _Panes(Horizontal):
    """Form and plan. The number keys are bound here, as an action of the table cannot say which of its keys it was."""

    BINDINGS = [Binding(str(number), f"screen.fix({number})", show=False) for number in range(1, 10)]


class ConfigureScreen(PenstockScreen):
    """A recipe being edited; nothing is written until it is saved or launched."""

    SCOPE = "configure"
    DEFAULT_CSS = """
    ConfigureScreen #form { width: 1fr; }
    ConfigureScreen #plan { width: 1fr; }
    ConfigureScreen #summary { height: 1; display: none; }
    ConfigureScreen #broken { padding: 1 2; height: 1fr; }
    ConfigureScreen.-narrow #plan { display: none; }
    ConfigureScreen.-narrow #summary { display: block; padding: 0 1; }
    ConfigureScreen.-narrow.-planning #form { display: none; }
    ConfigureScreen.-narrow.-planning #plan { display: block; }
    ConfigureScreen.-narrow.-planning #summary { display: none; }
    ConfigureScreen.-very-wide #form { width: 4fr; }
    ConfigureScreen.-very-wide #plan { width: 5fr; }
    ConfigureScreen #launching { height: 1; display: none; padding: 0 1; background: $primary 30%; text-style: bold; }
    ConfigureScreen #launching.-shown { display: block; }
    ConfigureScreen.-tiny .pane { border: none; }
    """

    def __init__(self, recipe_path: Path) -> None:
        super().__init__()
        self.recipe_path = recipe_path
        self.machine: str | None = None
        """What is planned for: a preset or profile, empty for this machine, None for what the recipe says."""
        self._saved: list[Any] = []
        self._launching = ""
        """What is being done for the launch; empty where none is under way."""
        self._began_s = 0.0
        self._broken = ""
        """Why the recipe cannot be read: then no field of `draft` is shown, and no action taken."""
        self._digest = content_digest(recipe_path)
        try:
            self.draft = Draft(load_recipe(recipe_path))
        except UserError as error:
            self._broken, self.draft = str(error), Draft(Recipe(name="unreadable"))

    def compose(self) -> ComposeResult:
        if self._broken:
            yield Static(f"This recipe cannot be read.\n\n{self._broken}\n\nesc goes back.", id="broken", markup=False)
        else:
            with _Panes():
                yield Form(self.draft, self._changed)
                yield PlanPanel(id="plan", classes="pane")
            yield Drawn(self._summary_rows, id="summary")
            yield Static(id="launching", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        self.client = PlanClient(self.penstock.root, self._show_plan)
        self.set_interval(0.5, self._draw_launch)
        if not self._broken:
            self.penstock.home_plans.opened(self.recipe_path, self._digest, self.draft.base)
            self._changed()

    async def on_unmount(self) -> None:
        await self.client.close()

    @property
    def form(self) -> Form:
        return self.query_one(Form)

    @property
    def machine_name(self) -> str:
        if self.machine is not None:
            return self.machine or THIS_MACHINE
        return (self.draft.recipe.machine if self.draft.recipe is not None else "") or THIS_MACHINE

    @property
    def is_unsaved(self) -> bool:
        return bool(self.draft.differences) and self.draft.differences != self._saved

    def _summary_rows(self, width: int, height: int, glyphs: Glyphs) -> list[Row]:
        panel = self.query_one(PlanPanel)
        return [summary_row(panel.state, panel.machine, width, glyphs)]

    def _titles(self) -> None:
        changed = len(self.draft.differences)
        name = self.draft.text("name")
        self.form.border_title = Text(f"{name}: {changed} changed" if changed else name)
        self.form.border_subtitle = Text(self._base_name)
        self.query_one(PlanPanel).border_title = Text(f"plan for {Path(self.machine_name).name}")

    @property
    def _base_name(self) -> str:
        path = self.recipe_path.resolve()
        if path.parent == shipped.FOLDER:
            return f"recipes/{path.name}"
        return str(path.relative_to(self.penstock.root)) if path.is_relative_to(self.penstock.root) else str(path)

    def _show_plan(self) -> None:
        if not self.is_attached or not self.query(PlanPanel):
            return
        state = self.client.state
        if self.draft.errors:
            key, message = next(iter(self.draft.errors.items()))
            state = replace(state, error=f"{key}: {message}", stale=state.forecast is not None)
        self._show_home(state)
        if self.query_one(PlanPanel).show(state, self.machine_name):
            self.query_one("#summary", Drawn).redraw()
        error = self.client.state.error
        field = error_field(error) if error is not None else None
        result = {} if field is None or error is None else {field: error.removeprefix(f"{field}: ")}
        if result != self.form.planner_errors:
            self.form.planner_errors = result
            self.form.fields.redraw()

    def _show_home(self, state: PlanState) -> None:
        """A plan of the unchanged recipe for this machine is what Home says of it."""
        as_it_is = not state.stale and not self.draft.differences and self.machine_name == THIS_MACHINE
        if as_it_is and state.forecast is not None and state.phase == "done":
            self.penstock.home_plans.learn(self._digest, state.forecast)

    def _query_plan(self) -> None:
        if self.draft.recipe is None:
            self.client.forget()
            self._show_plan()
            return
        recipe, machine = self.draft.recipe, self.machine_name
        if self.machine == "":  # this one was chosen: without the recipe's own
            recipe = _without_machine(recipe)
        self.client.request(resolve_paths(recipe, self.penstock.root), None if machine == THIS_MACHINE else machine)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if self._broken:
            return action in ("back", "quit") or not hasattr(self, f"action_{action}")
        return True

    def action_edit(self) -> None:
        if kind_of(self.form.current) == "text":
            self.form.fields.begin_edit()
        else:
            self.form.cycle(1)

    def action_cycle(self, by: int) -> None:
        self.form.cycle(by)

    def action_reset(self) -> None:
        self.form.reset()

    @work
    async def action_reset_all(self) -> None:
        changed = len(self.draft.differences)
        if changed and await self.penstock.ask("Reset all", f"Undo {changed} changed fields?", "Undo", "Keep"):
            self.draft.reset_all()
            self.form.fields.redraw()
            self._changed()

    def action_filter(self) -> None:
        self.remove_class("-planning")
        self.form.begin_filter()

    def action_section(self, by: int) -> None:
        self.form.move_section(by)

    @work
    async def action_browse(self) -> None:
        key = self.form.current
        if key not in PATHS:
            self.notify(f"{key} is not a path; o browses for {', '.join(PATHS)}")
            return
        folders = key in ("model.path", "storage.nvme")
        picker = PathPicker(key, self.draft.text(key), self.penstock.root, folders_only=folders)
        result = await self.app.push_screen_wait(picker)
        if result is not None:
            self.form.set_text(key, result)

    def action_switch(self) -> None:
        panel = self.query_one(PlanPanel)
        to_plan = not panel.has_focus
        self.set_class(to_plan, "-planning")
        if to_plan:
            panel.focus()
        else:
            self.form.focus_fields()

    def action_fix(self, number: int = 1) -> None:
        result = fixes(self._current_forecast())
        if number > len(result):
            self.notify("there is no fix of this number; the plan lists them", severity="warning")
        else:
            self._apply(result[number - 1]["set"])

    def action_best(self) -> None:
        best = (self._current_forecast() or {}).get("best_change")
        if best is None or not best["set"]:
            self.notify("the plan has no fix to apply", severity="warning")
        else:
            self._apply(best["set"])

    def _current_forecast(self) -> dict[str, Any] | None:
        state = self.client.state
        return None if state.stale or state.error is not None else state.forecast

    def _apply(self, settings: list[str]) -> None:
        try:
            self.draft.apply(settings)
        except UserError as error:
            self.notify(str(error), severity="error")
            return
        self.form.go(settings[0].partition("=")[0].strip())
        self.form.fields.redraw()
        self._changed()
        self.notify(f"applied {', '.join(settings)}")

    def _changed(self) -> None:
        self._titles()
        self._query_plan()

    def action_replan(self) -> None:
        if self.draft.recipe is not None:
            self._query_plan()
            self.client.retry()

    @work
    async def action_machine(self) -> None:
        recipe = self.draft.recipe or self.draft.base
        result = await self.app.push_screen_wait(
            MachinePicker(recipe.machine if self.machine is None else self.machine)
        )
        if result is not None:
            self._set_machine(result)

    def _set_machine(self, machine: str | None) -> None:
        self.machine = machine
        self._changed()

    def action_differences(self) -> None:
        self.app.push_screen(ChangesDialog(self._base_name, self.draft.differences))

    @work
    async def action_save(self) -> None:
        recipe = self._valid()
        if recipe is None:
            return
        default = f"recipes/{recipe.name.replace('-', '_')}.json"
        answer = await self.penstock.ask_text("Save as", "JSON file, which `penstock train FILE` trains:", default)
        if answer is None or (path := self.penstock.target(answer)) is None:
            return
        overwrite = os.path.lexists(path)
        if overwrite and not await self.penstock.ask("Save as", f"Replace {path}?", "Replace", "Keep it"):
            return
        try:
            save_recipe(path, recipe, overwrite=overwrite)
        except UserError as error:
            self.notify(str(error), severity="error")
            return
        self._saved = self.draft.differences
        self.notify(f"saved as {path}")

    def _valid(self) -> Recipe | None:
        """The recipe; None, and the first field that is wrong, where there is none."""
        if self.draft.recipe is not None:
            return self.draft.recipe
        key, message = next(iter(self.draft.errors.items()))
        self.remove_class("-planning")
        if self.form.is_filtered:
            self.form.end_filter()
        self.form.go(key)
        self.notify(f"{key}: {message}", title="mend this first", severity="error")
        return None

    def action_launch(self) -> None:
        if self._launching:
            self.notify(self._launching, severity="warning")
        else:
            self._launch()

    @work(exclusive=True, group="launch")
    async def _launch(self) -> None:
        try:
            await self._plan_and_start()
        finally:
            self._show_launch("")

    def _show_launch(self, doing: str) -> None:
        """Show what is being done for the launch, at once; nothing: it is over."""
        self._launching, self._began_s = doing, time.monotonic()
        if self.is_attached and (lines := self.query("#launching")):
            lines.first().set_class(bool(doing), "-shown")
            self._draw_launch()

    def _draw_launch(self) -> None:
        if self._launching:
            seconds = int(time.monotonic() - self._began_s)
            text = f"{self._launching} {self.penstock.glyphs.ellipsis}" + (f"  {seconds} s" if seconds else "")
            self.query_one("#launching", Static).update(text)

    async def _plan_and_start(self) -> None:
        recipe = self._valid()
        if recipe is None:
            return
        scratch = False
        recipe = resolve_paths(recipe, self.penstock.root)
        if (missing := _missing_weights(recipe)) is not None:
            if not await self.penstock.ask(
                "No weights", f"{missing}\n\nStart from random weights of the same shape?", "Random weights", "Cancel"
            ):
                return
            scratch = True
        before, self.machine = self.machine, ""
        self._titles()
        self._show_launch("planning for this machine before launch")
        state = await self.client.plan(_without_machine(recipe), None, from_scratch=scratch, fetch=True)
        if state is None:
            return  # the recipe was edited meanwhile
        if scratch and state.recipe is not None:
            recipe = from_dict(state.recipe)
        self._show_launch("")
        title, text = f"Launch {recipe.name}", _launch_text(state)
        if state.error is not None or not await self.penstock.ask(title, text, "Launch", "Not yet"):
            if state.error is not None:
                self.notify(state.error, title="not launched", severity="error")
            self._set_machine(before)
            return
        self._show_launch(f"starting {recipe.name}")
        await self.client.close()
        await self._start(recipe)

    async def _start(self, recipe: Recipe) -> None:
        from penstock.app.launch.launcher import start

        worker = self.run_worker(lambda: start(recipe, self.penstock.root), thread=True, exit_on_error=False)
        try:
            run_path = await worker.wait()
        except Exception as error:
            reason = error.__cause__ or error
            self.notify(str(reason), title="not launched", severity="error")
            return
        self._saved = self.draft.differences  # the run has them
        self.penstock.open("run", run_path)

    async def action_back(self) -> None:
        if not self._broken and self.form.is_filtered:
            self.form.end_filter()
        elif not self._broken and self.query_one(PlanPanel).has_focus:
            self.action_switch()
        else:
            self._leave(self.penstock.action_back)

    def action_quit(self) -> None:
        self._leave(self.app.action_quit)

    @work(exclusive=True, group="leave")
    async def _leave(self, go: Callable[[], Awaitable[Any]]) -> None:
        if self.is_unsaved:
            changed = len(self.draft.differences)
            text = f"{changed} changed field{'' if changed == 1 else 's'} will be lost; ctrl+s saves them."
            if not await self.penstock.ask("Leave", text, "Leave", "Stay"):
                return
        self.app.call_later(go)  # by the application: this screen cannot wait for its own end

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Textual's hook: nothing of a field's input goes further."""
        event.stop()


def _without_machine(recipe: Recipe) -> Recipe:
    return apply_overrides(recipe, ["machine="])


def _missing_weights(recipe: Recipe) -> str | None:
    """Why the recipe's model folder cannot be trained from; None where it can."""
    from penstock.app.planning.inputs import require_weights

    try:
        require_weights(recipe)
    except UserError as error:
        return str(error).partition("; put")[0]
    return None


def _launch_text(state: PlanState) -> str:
    where = "The run starts on this machine, whichever you planned for, and keeps running when this window closes."
    forecast = state.forecast
    if state.trouble is not None or forecast is None:
        return f"{where}\n\nThere is no plan: {state.trouble or state.error or 'no answer'}"
    if not forecast["fits"]:
        return f"{where}\n\nIT DOES NOT FIT HERE: {forecast['refusal']['message']}\nThe run will refuse to start."
    run = duration_text((forecast.get("run") or {}).get("seconds"))
    return (
        f"{where}\n\nIt fits: planned {seconds_text(forecast['step_s'])} a step, "
        f"{speed_figure(forecast['tokens_per_s'])} tokens/s, {forecast['steps']:,} steps in {run}, "
        f"bound by {forecast['bound_by']}."
    )
