"""What the application does not do: anything in a read-only window, and write outside the folder in a browser."""

import os
from pathlib import Path

import pytest
from seen import notices, press, running, until
from textual.pilot import Pilot
from textual.widgets import DataTable

from penstock.storage.errors import UserError
from penstock.tui.actions import ACTIONS
from penstock.tui.paths import written_path
from penstock.tui.screens.configure import ConfigureScreen
from penstock.tui.screens.confirm import TextDialog

ACTING = {(action.scope, action.id) for action in ACTIONS if action.acts}


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
            getattr(screen, f"action_{action.id}")()  # by whatever other way
            await pilot.pause()
            assert pilot.app.screen is screen, (action.id, pilot.app.screen)


def test_what_acts_is_marked_in_the_table() -> None:
    marked = {"home": "configure resume finetune", "finetune": "look configure", "fit": "configure"}
    marked |= {"configure": "save launch", "run": "save_checkpoint pause resume stop export"}
    marked |= {"timeline": "export export_run"}
    assert {(scope, action) for scope, ids in marked.items() for action in ids.split()} == ACTING


async def test_a_read_only_application_takes_no_action(root: Path) -> None:
    before = contents(root)
    async with running(root, read_only=True) as (app, pilot):
        await press_everything(pilot, "home")
        home = app.screen
        await press(pilot, "f")  # plans nothing either
        assert app.screen is home
        app.open_configure(root / "recipes" / "tiny.py")
        await pilot.pause()
        assert not isinstance(app.screen, ConfigureScreen)
        app.open_run(root / "runs" / "crashed")
        await until(pilot, lambda: getattr(app.screen, "data", None) and app.screen.data.step)
        await press_everything(pilot, "run")
        assert "read-only" in notices(pilot)
        app.open_timeline(root / "runs" / "first")
        await until(pilot, lambda: getattr(app.screen, "step", None) is not None)
        await press_everything(pilot, "timeline")
        offered = {(action.scope, action.id) for action in app.offered(app.screen)}
        assert offered
        assert not offered & ACTING
        shown = {binding.binding.action for binding in app.screen.active_bindings.values()}
        assert "next_step" in shown
        assert "export" not in shown
    assert contents(root) == before


@pytest.mark.parametrize("read_only", [True, False])
async def test_a_read_only_application_executes_no_recipe(tmp_path: Path, read_only: bool) -> None:
    (tmp_path / "recipes").mkdir()
    marker = tmp_path / "executed"
    code = f'from penstock.app.recipe import Recipe\nopen({str(marker)!r}, "w").close()\nrecipe = Recipe(name="a")\n'
    (tmp_path / "recipes" / "a.py").write_text(f'"""First of all."""\n{code}')
    async with running(tmp_path, read_only=read_only) as (app, pilot):
        await until(pilot, lambda: app.screen.query_one("#recipes", DataTable).row_count > 1)
        for key in ("enter", "c", "tab", "enter", "c"):
            await press(pilot, key)
    assert marker.exists() != read_only


# ---------------------------------------------------------------------- where files are written


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


async def test_a_recipe_is_saved_below_the_served_folder_alone(place: Path) -> None:
    (place / "recipes" / "tiny.py").write_text('from penstock.app.recipe import Recipe\nrecipe = Recipe(name="tiny")\n')
    before = contents(place.parent)
    async with running(place, served=True) as (app, pilot):
        app.open_configure(place / "recipes" / "tiny.py")
        await pilot.pause()
        for typed in ("../outside/victim.py", "way/victim.py", "recipes/dangling.py", "~nobody-of-that-name/a.py"):
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
