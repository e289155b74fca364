"""Home against real run directories, and against what is none."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import real_runs
from textual.pilot import Pilot
from textual.widgets import DataTable, Input, Static

from penstock.app.recipe import save_recipe
from penstock.engine.config import Recipe
from penstock.tui.app import PenstockApp
from penstock.tui.data.catalog import RunCatalog, plan_lines, read_run_entry
from penstock.tui.data.recipes import describe, find_recipes, matches, read_recipe_entry
from penstock.tui.screens.compare import CompareScreen
from penstock.tui.screens.configure import ConfigureScreen
from penstock.tui.screens.home import HomeScreen
from penstock.tui.screens.run import RunScreen
from penstock.tui.screens.timeline import TimelineScreen


def names(app: PenstockApp, table: str) -> list[str]:
    found = app.screen.query_one(f"#{table}", DataTable)
    return [Path(str(row.key.value)).name for row in found.ordered_rows]


def row_of(app: PenstockApp, path: Path, table: str = "runs") -> dict[str, str]:
    """Column's title -> what it shows of a run or a recipe."""
    found = app.screen.query_one(f"#{table}", DataTable)
    titles = [str(column.label) for column in found.ordered_columns]
    return dict(zip(titles, map(str, found.get_row(str(path))), strict=True))


async def select(pilot: Pilot[None], name: str, table: str = "runs") -> None:
    found = pilot.app.screen.query_one(f"#{table}", DataTable)
    found.focus()
    found.move_cursor(row=names(pilot.app, table).index(name))  # type: ignore[arg-type]
    await pilot.pause()


async def test_it_lists_runs_with_figures_and_recipes_own_ones_first(
    app: PenstockApp, pilot: Pilot[None], root: Path
) -> None:
    await pilot.pause()
    assert isinstance(app.screen, HomeScreen)
    assert set(names(app, "runs")) == {"first", "second", "crashed"}
    recipes = names(app, "recipes")
    assert recipes[:2] == ["tiny.py", "quickstart.py"]
    assert recipes.index("7b_512k.py") < recipes.index("14b_workstation.py") < recipes.index("120b_moe.py")
    await select(pilot, "first")
    cells = row_of(app, root / "runs" / "first")
    loss = json.loads((root / "runs/first/metrics.jsonl").read_text().splitlines()[-1])["loss"]
    assert [cells[name] for name in ("run", "state", "done", "step")] == ["first", "finished", "100%", "12/12"]
    assert (cells["loss"], len(cells["last steps"])) == (f"{loss:.4f}", 10)
    cells = row_of(app, root / "runs" / "crashed")
    assert [cells[name] for name in ("run", "state", "done", "step")] == ["crashed", "crashed", "75%", "9/12"]
    cells = row_of(app, root / "recipes" / "tiny.py", "recipes")
    assert [cells[name] for name in ("recipe", "size", "context", "fits here?")] == ["tiny", "?", "64", "?"]
    text = str(app.screen.query_one("#about", Static).render())
    assert "planned" in text
    summary = json.loads((app.root / "runs/first/summary.json").read_text())
    assert f"mean {summary['mean_step_s']:.3g} s a step, {summary['mean_tokens_per_s']:,.0f} tok/s" in text
    await select(pilot, "tiny.py", "recipes")
    text = str(app.screen.query_one("#about", Static).render())
    assert "3 layers" in text
    assert "64 tokens" in text


async def test_search_filters_both_lists_and_escape_ends_it(app: PenstockApp, pilot: Pilot[None]) -> None:
    await pilot.press("slash", *"crashed")
    await pilot.pause()
    assert names(app, "runs") == ["crashed"]
    assert names(app, "recipes") == []
    await pilot.press("enter")
    assert app.screen.query_one("#runs").has_focus
    await pilot.press("slash")
    app.screen.query_one(Input).value = "gpt-oss 128 experts"
    await pilot.pause()
    assert names(app, "recipes") == ["120b_moe.py"]
    await pilot.press("escape")
    await pilot.pause()
    assert len(names(app, "runs")) == 3
    assert isinstance(app.screen, HomeScreen)


async def test_marking_and_comparing(app: PenstockApp, pilot: Pilot[None]) -> None:
    await select(pilot, "first")
    await pilot.press("m")
    await pilot.pause()
    assert isinstance(app.screen, HomeScreen)  # one run is nothing to compare
    await pilot.press("space")
    await select(pilot, "second")
    await pilot.press("m")
    await pilot.pause()
    assert isinstance(app.screen, CompareScreen)
    await pilot.press("escape")
    await pilot.pause()
    assert isinstance(app.screen, HomeScreen)


async def test_enter_opens_what_the_cursor_is_on(app: PenstockApp, pilot: Pilot[None]) -> None:
    for key, table, name, screen in (
        ("enter", "runs", "first", RunScreen),
        ("t", "runs", "first", TimelineScreen),
        ("c", "runs", "first", ConfigureScreen),
        ("enter", "recipes", "tiny.py", ConfigureScreen),
    ):
        await select(pilot, name, table)
        await pilot.press(key)
        await real_runs.until(lambda screen=screen: isinstance(app.screen, screen), pilot.pause)
        await pilot.press("escape")
        await real_runs.until(lambda: isinstance(app.screen, HomeScreen), pilot.pause)


async def test_new_runs_appear_and_vanished_ones_go(app: PenstockApp, pilot: Pilot[None], root: Path) -> None:
    await select(pilot, "first")
    shutil.copytree(root / "runs/first", root / "runs/third")
    shutil.rmtree(root / "runs/second")
    await real_runs.until(lambda: set(names(app, "runs")) == {"first", "third", "crashed"}, pilot.pause)
    table = app.screen.query_one("#runs", DataTable)
    assert names(app, "runs")[table.cursor_row] == "first"  # the cursor stays on its run


def test_foreign_and_damaged_directories_are_listed_with_what_is_wrong(root: Path) -> None:
    runs = root / "runs"
    (runs / "notes").mkdir()  # nothing of ours
    (runs / "notes" / "todo.txt").write_text("x")
    shutil.copytree(runs / "first", runs / "headless")
    (runs / "headless" / "recipe.json").unlink()
    for name, content in (
        ("no-json", "{"),
        ("a-list", "[1, 2]"),
        ("odd-types", '{"state": 7, "step": "x", "total_steps": [], "error": {}}'),
        ("deep", "[" * 100_000),
    ):
        shutil.copytree(runs / "first", runs / name)
        (runs / name / "status.json").write_text(content)
    (runs / "odd-types" / "metrics.jsonl").write_text('[1]\n{"loss": "x", "step_s": null}\n\xff\n{"loss"')
    (runs / "binary").mkdir()
    (runs / "binary" / "recipe.json").write_bytes(os.urandom(5000))
    (runs / "binary" / "metrics.jsonl").write_bytes(os.urandom(200_000))
    (runs / "dangling").symlink_to(runs / "nowhere")
    (runs / "file").write_text("not a folder")
    found = {entry.name: entry for entry in RunCatalog(root).read()}
    names = ["first", "second", "crashed", "headless", "no-json", "a-list", "odd-types", "deep", "binary"]
    assert sorted(found) == sorted(names)
    assert found["headless"].state == "damaged"
    assert "recipe.json" in str(found["headless"].error)
    assert found["first"].state == "finished"


def test_a_run_that_cannot_be_read_says_so(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("penstock.tui.data.catalog.read_info", refused)
    entry = read_run_entry(root / "runs/first")
    assert entry.state == "damaged"
    assert "Permission denied" in str(entry.error)


def test_the_catalog_reads_only_what_has_changed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = RunCatalog(root)
    before = catalog.read()
    read: list[str] = []
    original = read_run_entry
    monkeypatch.setattr(
        "penstock.tui.data.catalog.read_run_entry", lambda folder: read.append(folder.name) or original(folder)
    )
    assert catalog.read() == before
    assert read == []
    with (root / "runs/second/metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "loss": 1.5}\n')
    entry = next(entry for entry in catalog.read() if entry.name == "second")
    assert read == ["second"]
    assert entry.loss == 1.5


def test_recipes_that_are_broken_say_where(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "broken.py").write_text("x = (\n")
    (tmp_path / "recipes" / "bytes.py").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "recipes" / "torn.json").write_text('{"name": ')
    save_recipe(tmp_path / "recipes" / "mine.json", Recipe(name="mine"))
    found = {entry.name: entry for entry in find_recipes(tmp_path)}
    assert "line 1" in str(found["broken"].problem)
    assert found["bytes"].problem is not None
    assert "torn.json cannot be read" in str(found["torn"].problem)
    assert (found["mine"].problem, found["mine"].title) == (None, "a saved recipe")
    assert describe(found["mine"])["machine"] == "any"
    assert found["quickstart"].problem is None
    assert not found["quickstart"].own


def test_a_shipped_recipe_tells_its_needs(root: Path) -> None:
    entry = read_recipe_entry(Path(__file__).parents[2] / "recipes" / "7b_512k.py", own=False)
    assert entry.needs["GPU"].startswith("80 GB")
    assert "524,288" in entry.title


def test_words_match_in_any_order_and_case() -> None:
    assert matches("b A", "xA", "yb")
    assert not matches("a c", "xA", "yb")
    assert matches("", "anything")


def test_plans_of_any_content_are_no_crash(tmp_path: Path) -> None:
    for content in ("[" * 100_000, "[]", '{"step_s": "x", "tokens_per_s": 1, "bound_by": "compute"}', '{"step_s": 1}'):
        (tmp_path / "plan.json").write_text(content)
        assert plan_lines(tmp_path) == []


@pytest.mark.parametrize("read_only", [False, True])
async def test_without_a_run_it_says_how_to_begin(tmp_path: Path, read_only: bool) -> None:
    app = PenstockApp(tmp_path, read_only=read_only)
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.pause()
        welcome = app.screen.query_one("#welcome", Static)
        said = str(welcome.render())
        assert "penstock train quickstart" in said
        assert ("n      fine-tune" in said, "enter  open" in said) == (not read_only, not read_only)
        assert welcome.region.height == len(said.splitlines()) + 2, "all of it is in view"
        await pilot.press("tab")
        assert app.screen.query_one("#recipes", DataTable).has_focus
        (tmp_path / "runs" / "one").mkdir(parents=True)
        (tmp_path / "runs" / "one" / "recipe.json").write_text("{}")
        await real_runs.until(lambda: names(app, "runs") == ["one"], pilot.pause)
        assert not welcome.display
