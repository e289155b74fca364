"""The action table, from which handlers, keys, help and palette come; what a read-only application does not do."""

import importlib
import os
from pathlib import Path
from typing import Any

import pytest
from seen import notices, press, running, until
from textual.pilot import Pilot
from textual.widgets import DataTable, OptionList

from penstock.storage.files.errors import UserError
from penstock.tui.actions import ACTIONS, actions, bindings, grouped, keys_page
from penstock.tui.app import PenstockApp, written_path
from penstock.tui.screens.configure import ConfigureScreen
from penstock.tui.screens.dialogs import HelpScreen, TextDialog

SCREENS = [scope for scope in dict.fromkeys(action.scope for action in ACTIONS) if scope != "global"]


def screen_class(scope: str) -> Any:
    return getattr(importlib.import_module(f"penstock.tui.screens.{scope}"), f"{scope.capitalize()}Screen")


@pytest.mark.parametrize("scope", ["global", *SCREENS])
def test_every_action_has_a_handler_and_every_binding_is_an_action(scope: str) -> None:
    owner = PenstockApp if scope == "global" else screen_class(scope)
    ids = [action.id for action in ACTIONS if action.scope == scope]
    assert [name for name in ids if not hasattr(owner, f"action_{name.partition('(')[0]}")] == []
    assert [binding.action for binding in bindings(scope)] == ids
    assert [binding.action if hasattr(binding, "action") else binding[1] for binding in owner.BINDINGS] == ids


@pytest.mark.parametrize("scope", SCREENS)
def test_keys_are_distinct_the_footer_is_short_and_help_has_them_all(scope: str) -> None:
    found = actions(scope)
    keys = [key for action in found for key in action.keys.split(",")]
    assert len(keys) == len(set(keys))
    for never in ({"resume", "export"}, {"freeze", "save_checkpoint", "stop"}):  # of a live run, of one that has ended
        assert sum(action.footer for action in found if scope != "run" or action.id not in never) <= 8
    groups = grouped(found)
    assert sorted(action.id for each in groups.values() for action in each) == sorted(action.id for action in found)


async def test_help_and_palette_of_a_screen_offer_what_it_can_do_and_do_what_the_key_does(
    app: PenstockApp, pilot: Pilot[None]
) -> None:
    before, offered = app.theme, app.offered(app.screen)
    assert {"open", "search", "mark", "quit"} <= {action.id for action in offered}
    commands = {command.title for command in app.get_system_commands(app.screen)}
    assert {f"{action.label} ({action.shown_key})" for action in offered if action.id != "command_palette"} <= commands
    await pilot.press("question_mark")
    assert isinstance(app.screen, HelpScreen)
    await pilot.press("escape")
    assert not isinstance(app.screen, HelpScreen)
    await press(pilot, "tab")  # recipes cannot be marked
    assert "mark" not in {action.id for action in app.offered(app.screen)}
    await pilot.press("ctrl+p", *"theme (f2)")
    await until(pilot, lambda: app.screen.query_one(OptionList).option_count == 1)
    await pilot.press("enter")
    await until(pilot, lambda: app.theme != before)


ACTING = {(action.scope, action.name) for action in ACTIONS if action.acts}


def contents(root: Path) -> dict[str, tuple[int, int]]:
    """Every file below a folder."""
    found = {path: path.lstat() for path in root.rglob("*") if "__pycache__" not in path.parts}
    return {str(path): (stat.st_mtime_ns, stat.st_size) for path, stat in found.items()}


async def press_everything(pilot: Pilot[None], scope: str) -> None:
    """Every key of a screen that acts, and the answers that would confirm it."""
    screen = pilot.app.screen
    for action in ACTIONS:
        if action.scope == scope and action.acts:
            for key in action.keys.split(","):
                await press(pilot, key)
                assert pilot.app.screen is screen, (action.id, pilot.app.screen)
            await pilot.app.run_action(action.id, screen)  # by whatever other way
            await pilot.pause()
            assert pilot.app.screen is screen, (action.id, pilot.app.screen)


def test_what_acts_is_marked_in_the_table_and_the_page_of_keys_is_written_of_it() -> None:
    marked = {"home": "configure resume screen", "finetune": "look configure", "fit": "configure"}
    marked |= {"configure": "save launch", "run": "save_checkpoint pause resume stop export"}
    marked |= {"timeline": "export export_run"}
    assert {(scope, action) for scope, ids in marked.items() for action in ids.split()} == ACTING
    page = Path(__file__).parents[2] / "docs" / "keys.md"
    assert page.read_text() == keys_page(), "make screens writes it anew"


async def test_a_read_only_application_takes_no_action(root: Path) -> None:
    before = contents(root)
    async with running(root, read_only=True) as (app, pilot):
        await press_everything(pilot, "home")
        home = app.screen
        await press(pilot, "f")  # plans nothing either
        assert app.screen is home
        app.open("configure", root / "recipes" / "tiny.py")
        await pilot.pause()
        assert not isinstance(app.screen, ConfigureScreen)
        app.open("run", root / "runs" / "crashed")
        await until(pilot, lambda: getattr(app.screen, "data", None) and app.screen.data.step)
        await press_everything(pilot, "run")
        assert "read-only" in notices(pilot)
        app.open("timeline", root / "runs" / "first")
        await until(pilot, lambda: getattr(app.screen, "step", None) is not None)
        await press_everything(pilot, "timeline")
        offered = {(action.scope, action.name) for action in app.offered(app.screen)}
        assert offered
        assert not offered & ACTING
        shown = {binding.binding.action for binding in app.screen.active_bindings.values()}
        assert "go(1)" in shown
        assert "export" not in shown
    assert contents(root) == before


@pytest.mark.parametrize("read_only", [True, False])
async def test_a_read_only_application_executes_no_recipe(tmp_path: Path, few_fields: None, read_only: bool) -> None:
    (tmp_path / "recipes").mkdir()
    marker = tmp_path / "executed"
    code = f'from penstock import Recipe\nopen({str(marker)!r}, "w").close()\nrecipe = Recipe(name="a")\n'
    (tmp_path / "recipes" / "a.py").write_text(f'"""First of all."""\n{code}')
    async with running(tmp_path, read_only=read_only) as (app, pilot):
        await until(pilot, lambda: app.screen.query_one("#recipes", DataTable).row_count > 1)
        for key in ("enter", "c", "tab", "enter", "c") if read_only else ("enter", "tab", "enter"):
            await press(pilot, key)
    assert marker.exists() != read_only


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder to serve, with ways out of it: links to a folder and to a file outside."""
    folder = tmp_path / "place"
    (folder / "recipes").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "victim.py").write_text("kept")
    (folder / "way").symlink_to(tmp_path / "outside")
    (folder / "recipes" / "linked.py").symlink_to(tmp_path / "outside" / "victim.py")
    (folder / "recipes" / "dangling.py").symlink_to(tmp_path / "outside" / "new.py")
    return folder


OUTSIDE = ["../outside/victim.py", "recipes/../../outside/victim.py", "way/victim.py", "way/../outside/new.py"]
OUTSIDE += ["way/deeper/new.py", "recipes/linked.py", "recipes/dangling.py", "/etc/penstock.py", "~/victim.py"]
NO_PATH = ["recipes/a\0b.py", "~nobody-of-that-name/a.py", "recipes/\ud800.py", "recipes/" + "a" * 300 + ".py"]


async def test_a_recipe_is_saved_below_the_served_folder_alone(place: Path, few_fields: None) -> None:
    (place / "recipes" / "tiny.py").write_text('from penstock import Recipe\nrecipe = Recipe(name="tiny")\n')
    before = contents(place.parent)
    async with running(place, served=True) as (app, pilot):
        app.open("configure", place / "recipes" / "tiny.py")
        await pilot.pause()
        for typed in ("../outside/victim.py", "recipes/dangling.py"):
            await press(pilot, "ctrl+s")
            assert isinstance(app.screen, TextDialog)
            app.clear_notifications()
            app.screen.dismiss(typed)
            await until(pilot, lambda: any(note.severity == "error" for note in app._notifications))
            assert isinstance(app.screen, ConfigureScreen), typed  # no question whether to replace
            assert contents(place.parent) == before, typed


def test_below_the_folder_and_in_a_terminal_users_write_where_they_like(place: Path) -> None:
    for typed in ("recipes/new.py", "deeper/than/that/new.py", "recipes/../new.py", str(place / "new.py")):
        assert os.path.realpath(written_path(place, typed, inside=True)).startswith(f"{place}/")
    for typed in OUTSIDE:
        written_path(place, typed, inside=False)
    for typed, inside in [(typed, True) for typed in OUTSIDE + NO_PATH] + [(typed, False) for typed in NO_PATH]:
        with pytest.raises(UserError):
            written_path(place, typed, inside=inside)
