"""Home against real run directories and what is none, its lists at any width, and which recipes it says fit."""

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from seen import append, opened, press, running, until
from textual.pilot import Pilot
from textual.widgets import DataTable, Input, Static

from penstock.app.console.rows import ASCII, UNICODE, Glyphs, plain
from penstock.app.planning import fits
from penstock.app.planning.fits import Fit, fit_of, here_digest, keep_fit, read_fit
from penstock.app.recipes import shipped
from penstock.app.recipes.recipe import save_recipe
from penstock.app.runs.directory import RunInfo
from penstock.engine.config import Recipe
from penstock.storage.files.units import tokens_text
from penstock.tui.app import PenstockApp
from penstock.tui.data import plan_client
from penstock.tui.data.catalog import RunCatalog, RunEntry, about_lines, read_run_entry
from penstock.tui.data.home_plans import HomePlans
from penstock.tui.data.recipes import RecipeCatalog, describe, matches, read_recipe_entry
from penstock.tui.render.home_table import PADDING, distinct, runs_table
from penstock.tui.screens import home
from penstock.tui.screens.compare import CompareScreen
from penstock.tui.screens.configure import ConfigureScreen
from penstock.tui.screens.home import HomeScreen
from penstock.tui.widgets.lines import Footer


def names(app: PenstockApp, table: str) -> list[str]:
    return list(rows_of(app, table))


def rows_of(app: PenstockApp, table: str, *titles: str) -> dict[str, list[str]]:
    """What columns show of each run or recipe."""
    found = app.screen.query_one(f"#{table}", DataTable)
    at = [[str(column.label) for column in found.ordered_columns].index(title) for title in titles]
    rows = {Path(str(row.key.value)).name: found.get_row(row.key) for row in found.ordered_rows}
    return {name: [str(cells[i]) for i in at] for name, cells in rows.items()}


def answers(app: PenstockApp) -> dict[str, str]:
    """Recipe's file -> what stands below `fits here?`."""
    return {name: fits for name, (fits,) in rows_of(app, "recipes", "fits here?").items()}


async def select(pilot: Pilot[None], name: str, table: str = "runs") -> None:
    found = pilot.app.screen.query_one(f"#{table}", DataTable)
    found.focus()
    found.move_cursor(row=names(pilot.app, table).index(name))  # type: ignore[arg-type]
    await pilot.pause()


async def test_it_lists_runs_with_figures_and_recipes_own_ones_first(
    app: PenstockApp, pilot: Pilot[None], root: Path
) -> None:
    def about() -> str:
        return str(app.screen.query_one("#about", Static).render())

    assert isinstance(app.screen, HomeScreen)
    assert set(names(app, "runs")) == {"first", "second", "crashed"}
    recipes = names(app, "recipes")
    assert recipes[:2] == ["tiny.py", "quickstart.py"]
    assert recipes.index("7b_512k.py") < recipes.index("14b_workstation.py") < recipes.index("120b_moe.py")
    await select(pilot, "first")
    assert rows_of(app, "runs", "run", "state", "done", "step")["crashed"] == ["crashed", "crashed", "75%", "9/12"]
    assert rows_of(app, "recipes", "recipe", "size", "context", "fits here?")["tiny.py"] == ["tiny", "?", "?", "?"]
    summary = json.loads((root / "runs/first/summary.json").read_text())
    assert f"mean {summary['mean_step_s']:.3g} s a step, {summary['mean_tokens_per_s']:,.0f} tok/s" in about()
    assert "planned" in about()
    await select(pilot, "quickstart.py", "recipes")
    assert "2 layers" in about()
    assert "8,192 tokens" in about()


async def test_search_filters_both_lists_and_marked_runs_are_compared(app: PenstockApp, pilot: Pilot[None]) -> None:
    await press(pilot, "slash", *"crashed")
    assert (names(app, "runs"), names(app, "recipes")) == (["crashed"], [])
    await pilot.press("enter")
    assert app.screen.query_one("#runs").has_focus
    await pilot.press("slash")
    app.screen.query_one(Input).value = "gpt-oss 128 experts"
    await pilot.pause()
    assert names(app, "recipes") == ["120b_moe.py", "120b_moe_24gb.py"]
    await press(pilot, "escape")
    assert len(names(app, "runs")) == 3
    assert isinstance(app.screen, HomeScreen)
    await select(pilot, "first")
    await press(pilot, "m")
    assert isinstance(app.screen, HomeScreen)  # one run is nothing to compare
    await pilot.press("space")
    await select(pilot, "second")
    await opened(pilot, CompareScreen, "m")
    footer = app.screen.query_one(Footer)
    await opened(pilot, HomeScreen, "escape")
    await until(pilot, lambda: not footer.is_attached)
    await footer.recompose()  # as one whose turn comes once the screen is closed


async def test_keys_open_what_the_cursor_is_on_and_it_stays_on_its_run_as_others_come_and_go(
    app: PenstockApp, pilot: Pilot[None], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, recipe = root / "runs" / "first", root / "recipes" / "tiny.py"
    for key, table, opens, path in (
        ("enter", "recipes", "configure", recipe),
        ("enter", "runs", "run", run),
        ("t", "runs", "timeline", run),
        ("c", "runs", "configure", run / "recipe.json"),
    ):
        open_it = Mock()
        monkeypatch.setattr(app, "open", open_it)
        await select(pilot, recipe.name if table == "recipes" else run.name, table)
        await press(pilot, key)
        open_it.assert_called_once_with(opens, path)
    shutil.copytree(root / "runs/first", root / "runs/third")
    shutil.rmtree(root / "runs/second")
    await until(pilot, lambda: set(names(app, "runs")) == {"first", "third", "crashed"})
    table = app.screen.query_one("#runs", DataTable)
    assert names(app, "runs")[table.cursor_row] == "first"


def test_the_catalog_reads_what_has_changed_and_lists_damaged_directories_with_what_is_wrong(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = RunCatalog(root)
    before = catalog.read()
    read = Mock(side_effect=read_run_entry)
    monkeypatch.setattr("penstock.tui.data.catalog.read_run_entry", read)
    assert (catalog.read(), read.called) == (before, False)
    append(root / "runs/second/metrics.jsonl", {"step": 9, "loss": 1.5})
    entry = next(entry for entry in catalog.read() if entry.info.name == "second")
    assert (entry.info.loss, [call.args[0].name for call in read.mock_calls]) == (1.5, ["second"])
    runs = root / "runs"
    (runs / "notes").mkdir()  # nothing of ours
    (runs / "notes" / "todo.txt").write_text("x")
    shutil.copytree(runs / "first", runs / "headless")
    (runs / "headless" / "recipe.json").unlink()
    odd = '{"state": 7, "step": "x", "total_steps": [], "error": {}}'
    statuses = {"no-json": "{", "a-list": "[1, 2]", "odd-types": odd, "deep": "[" * 100_000}
    for name, content in statuses.items():
        shutil.copytree(runs / "first", runs / name)
        (runs / name / "status.json").write_text(content)
    (runs / "odd-types" / "metrics.jsonl").write_text('[1]\n{"loss": "x", "step_s": null}\n\xff\n{"loss"')
    (runs / "binary").mkdir()
    (runs / "binary" / "recipe.json").write_bytes(os.urandom(5000))
    (runs / "binary" / "metrics.jsonl").write_bytes(os.urandom(200_000))
    (runs / "dangling").symlink_to(runs / "nowhere")
    (runs / "file").write_text("not a folder")
    found = {entry.info.name: entry.info for entry in RunCatalog(root).read()}
    assert set(found) == {"first", "second", "crashed", "headless", "binary", *statuses}
    assert (found["headless"].state, found["first"].state) == ("damaged", "finished")
    assert "recipe.json" in str(found["headless"].error)
    for content in ("[" * 100_000, "[]", '{"step_s": "x", "tokens_per_s": 1, "bound_by": "compute"}', '{"step_s": 1}'):
        (runs / "plan.json").write_text(content)
        assert about_lines(runs) == []
    refused = Mock(side_effect=PermissionError(13, "Permission denied"))
    monkeypatch.setattr("penstock.tui.data.catalog.read_info", refused)
    entry = read_run_entry(runs / "first")
    assert entry.info.state == "damaged"
    assert "Permission denied" in str(entry.info.error)


def test_recipes_that_are_broken_say_where_and_others_tell_what_they_say_plainly(tmp_path: Path) -> None:
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "broken.py").write_text("x = (\n")
    (folder / "bytes.py").write_bytes(b"\xff\xfe\x00")
    (folder / "torn.json").write_text('{"name": ')
    save_recipe(folder / "mine.json", Recipe(name="mine"))
    found = {entry.name: entry for entry in RecipeCatalog(tmp_path).read()}
    assert "line 1" in str(found["broken"].problem)
    assert found["bytes"].problem is not None
    assert "torn.json cannot be read" in str(found["torn"].problem)
    assert (found["mine"].problem, found["mine"].title) == (None, "a saved recipe")
    assert describe(Recipe(name="mine"))["machine"] == "any"
    assert found["mine"].recipe == Recipe(name="mine")
    assert (found["quickstart"].problem, found["quickstart"].own) == (None, False)
    assert found["7b_512k"].gpu.startswith("80 GB")
    assert "524,288" in found["7b_512k"].title
    matching = [matches(words, "xA", "yb") for words in ("b A", "a c", "")]
    assert matching == [True, False, True], "words match in any order and case"
    assert (found["7b_512k"].size_text, found["7b_512k"].context) == ("7B", 524_288)
    (folder / "a.py").write_text("import sys\nsys.exit(3)\n")
    entry = read_recipe_entry(folder / "a.py", own=True)
    assert (entry.problem, entry.size_text, entry.context) == (None, "", None), "a program of the user's is not run"
    said = {512: "512", 1024: "1k", 8192: "8k", 524_288: "512k", 1_048_576: "1M", 1000: "1,000", 5000: "5,000"}
    assert {tokens: tokens_text(tokens) for tokens in said} == said


@pytest.mark.parametrize("read_only", [False, True])
async def test_without_a_run_it_says_how_to_begin(tmp_path: Path, read_only: bool) -> None:
    async with running(tmp_path, (100, 30), read_only=read_only) as (app, pilot):
        welcome = app.screen.query_one("#welcome", Static)
        said = str(welcome.render())
        assert "penstock train quickstart" in said
        assert ("n      fine-tune" in said, "enter  open" in said) == (not read_only, not read_only)
        assert welcome.region.height == len(said.splitlines()) + 2, "all of it is in view"
        await pilot.press("tab")
        assert app.screen.query_one("#recipes", DataTable).has_focus
        (tmp_path / "runs" / "one").mkdir(parents=True)
        (tmp_path / "runs" / "one" / "recipe.json").write_text("{}")
        await until(pilot, lambda: names(app, "runs") == ["one"])
        assert not welcome.display


LONG = "llama-3.1-8b-code-mixture-lr1e-5-bs32-seed"


@given(st.lists(st.text("ab-1", min_size=1, max_size=40), max_size=8), st.integers(2, 30))
def test_names_that_differ_look_different(names: list[str], width: int) -> None:
    shown = distinct(names, width, "…")
    for a, b in zip(names, shown, strict=True):
        assert cell_len(b) <= max(width, cell_len(a))
        assert a == b or cell_len(a) > width
    assert len(set(shown)) == len(set(names))


def test_names_are_cut_where_they_are_alike() -> None:
    assert distinct(["run-20260101-120000", "run-20260101-130000"], 12, "…") == ["run-2…120000", "run-2…130000"]


@given(st.integers(20, 200), st.booleans(), st.sampled_from([UNICODE, ASCII]))
def test_columns_go_one_by_one_and_the_names_stay(width: int, marked: bool, glyphs: Glyphs) -> None:
    infos = [RunInfo(f"{LONG}{i}", Path(f"/runs/{LONG}{i}"), "running", 1240, 8000, 2.5, None) for i in (1, 2)]
    runs = [RunEntry(info._replace(mean_tokens_per_s=31_000.0), 0.0, (3.0, 2.0, 2.5), 720.0) for info in infos]
    table = runs_table(runs, ["now", "now"], {infos[0].path} if marked else set(), width, glyphs)
    titles = [spec.title for spec in table.columns]
    assert titles[int(marked) : int(marked) + 2] == ["run", "state"]
    names = {plain([cells[int(marked)]]) for cells in table.rows.values()}
    assert {name[-1] for name in names} == {"1", "2"}
    if width >= 75:
        assert {"done", "step", "loss", "mean tok/s", "ETA"} <= set(titles)
        assert sum(spec.width + PADDING for spec in table.columns) <= width
    if width >= 115:
        assert {"progress", "last steps", "updated"} <= set(titles)


SHIPPED = {path.name for path in shipped.FOLDER.glob("*.py")}


@pytest.fixture
def planner(planner_log: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The log of a quick planner, which is asked as soon as Home is there."""
    monkeypatch.setattr(home, "_IDLE_S", 0.0)
    monkeypatch.setattr(fits, "here_digest", lambda root: "here")  # whatever else takes this machine's memory
    return planner_log


@pytest.fixture
def user(tmp_path: Path) -> Path:
    """A folder with a program of the user's that tells when it is run, and two recipes in JSON, one of which fits."""
    root = tmp_path / "user"
    (root / "recipes").mkdir(parents=True)
    (root / "recipes" / "program.py").write_text(
        f"from penstock import Recipe\nopen({str(root / 'executed')!r}, 'w').close()\nrecipe = Recipe(name='mine')\n"
    )
    for name, chunk in (("small", 1024), ("large", 8192)):
        (root / "recipes" / f"{name}.json").write_text(json.dumps({"name": name, "train": {"chunk_tokens": chunk}}))
    return root


def asked(planner: Path) -> int:
    """How many plans were asked for."""
    requests = planner.with_suffix(".requests")
    return len(requests.read_text().splitlines()) if requests.exists() else 0


async def test_recipes_are_planned_once_and_programs_of_the_user_are_not_run(user: Path, planner: Path) -> None:
    async with running(user, plans_recipes=True) as (app, pilot):
        await until(pilot, lambda: "…" not in answers(app).values() and answers(app)["small.json"] != "?")
        found = answers(app)
    own = {"program.py": "?", "large.json": "no: GPU memory", "small.json": "✓ fits"}
    assert {name: found[name] for name in own} == own
    assert set(found) == SHIPPED | set(own)
    assert {found[name] for name in SHIPPED} <= {"✓ fits", "no: GPU memory"}
    assert not (user / "executed").exists()
    assert asked(planner) == len(SHIPPED) + 2
    async with running(user, plans_recipes=True) as (again, pilot):
        await until(pilot, lambda: answers(again)["small.json"] == "✓ fits")
        assert answers(again) == found
    assert asked(planner) == len(SHIPPED) + 2


async def test_a_program_is_known_once_it_was_opened(user: Path, planner: Path, few_fields: None) -> None:
    program = user / "recipes" / "program.py"
    async with running(user) as (app, pilot):
        await until(pilot, lambda: answers(app).get("program.py") == "?")
        app.screen._plan_when_idle()
        assert (app.screen._plans, answers(app)["small.json"]) == (None, "?")
        app.open("configure", program)
        configure = await opened(pilot, ConfigureScreen)
        await until(pilot, lambda: configure.client.state.phase == "done")
        await pilot.press("escape")
        await until(pilot, lambda: app.screen is not configure and answers(app)["program.py"] == "✓ fits")
        program.write_text("from penstock import Recipe\nrecipe = Recipe(name='other')\n")
        await until(pilot, lambda: answers(app)["program.py"] == "?")


async def test_nothing_is_planned_beside_another_screen_or_read_only(
    user: Path, planner: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(user, plans_recipes=True, read_only=True) as (app, pilot):
        await until(pilot, lambda: "small.json" in answers(app))
        app.screen._plan_when_idle()
        assert (app.screen._plans, answers(app)["small.json"]) == (None, "?")
    monkeypatch.setattr(plan_client, "SERVER", (sys.executable, "-c", "import sys; sys.stdin.read()"))  # never answers
    async with running(user, plans_recipes=True) as (app, pilot):
        screen = app.screen
        await until(pilot, lambda: screen._plans is not None)
        assert answers(app)["small.json"] == "…"
        await pilot.press("question_mark")
        await until(pilot, lambda: screen._plans.is_finished)
        screen._plan_when_idle()
        assert screen._plans.is_finished
    assert not planner.exists()


async def test_without_a_planner_nothing_is_claimed(user: Path, planner: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_client, "SERVER", ("/nowhere/python",))
    async with running(user, plans_recipes=True) as (app, pilot):
        await until(pilot, lambda: answers(app).get("small.json") == "?")
        assert list(answers(app).values()) == ["?"] * (len(SHIPPED) + 3)


def test_what_is_short_has_a_persons_name() -> None:
    known = {"model": {"params": 7, "layers": 1}, "context": 64, "fits": False}
    persons = {(None, "gpu"): "RAM", ("H200", "gpu"): "GPU memory", ("H200", "ram"): "RAM", (None, "nvme"): "disk"}
    for (gpu, tier), short in persons.items():
        refusal = {"tier": tier, "short_bytes": 1, "message": "why"}
        found = fit_of({**known, "machine": {"gpu": gpu}, "refusal": refusal})
        assert found == Fit(fits=False, short=short, message="why", params=7, context=64)
    here = here_digest(Path.cwd())
    keep_fit("recipe", here, found)
    assert read_fit("recipe", here) == found
    assert read_fit("recipe", "elsewhere") is read_fit("another", here) is None


async def test_nothing_is_planned_while_kept_answers_are_being_read(
    user: Path, planner: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = RecipeCatalog(user).read()
    for entry in entries:
        keep_fit(entry.digest, "here", Fit(fits=True))
    plans = HomePlans(user, may_plan=True)
    begun = []

    def slow(digest: str, here: str) -> Fit | None:
        if not begun:
            begun.append(digest)
            asyncio.run(plans.plan(entries, lambda: True))  # as the application may, beside the thread that reads
        return read_fit(digest, here)

    monkeypatch.setattr(fits, "read_fit", slow)
    known = await asyncio.to_thread(plans.look, entries)
    assert all(known[entry.path] is not None for entry in entries)
    assert (len(begun), asked(planner)) == (1, 0)
