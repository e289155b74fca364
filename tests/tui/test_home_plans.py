"""Which recipes fit, on Home: planned while nobody is waiting, kept, and nothing of the user's is run for it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import real_runs
from textual.pilot import Pilot
from textual.widgets import DataTable

from penstock.app import fits, shipped
from penstock.app.fits import Fit, fit_of, here_digest, keep_fit, read_fit
from penstock.tui.app import PenstockApp
from penstock.tui.data import plan_client
from penstock.tui.data.home_plans import HomePlans
from penstock.tui.data.recipes import find_recipes
from penstock.tui.screens import home
from penstock.tui.screens.configure import ConfigureScreen

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


def answers(app: PenstockApp) -> dict[str, str]:
    """Recipe's file -> what stands below `fits here?`."""
    table = app.screen.query_one("#recipes", DataTable)
    titles = [str(column.label) for column in table.ordered_columns]
    at = titles.index("fits here?")
    return {Path(str(row.key.value)).name: str(table.get_row(row.key)[at]) for row in table.ordered_rows}


async def until(pilot: Pilot[None], condition: Callable[[], bool]) -> None:
    await real_runs.until(condition, pilot.pause)


def asked(planner: Path) -> int:
    """How many plans were asked for."""
    requests = planner.with_suffix(".requests")
    return len(requests.read_text().splitlines()) if requests.exists() else 0


async def test_recipes_are_planned_once_and_programs_of_the_user_are_not_run(user: Path, planner: Path) -> None:
    app = PenstockApp(user, plans_recipes=True)
    async with app.run_test(size=(120, 36)) as pilot:
        await until(pilot, lambda: "…" not in answers(app).values() and answers(app)["small.json"] != "?")
        found = answers(app)
        assert (found.pop("program.py"), found.pop("large.json"), found.pop("small.json")) == (
            "?",
            "no: GPU memory",
            "✓ fits",
        )
        assert set(found) == SHIPPED
        assert set(found.values()) <= {"✓ fits", "no: GPU memory"}
        assert not (user / "executed").exists()
        assert asked(planner) == len(SHIPPED) + 2
    again = PenstockApp(user, plans_recipes=True)
    async with again.run_test(size=(120, 36)) as pilot:
        await until(pilot, lambda: answers(again)["small.json"] == "✓ fits")
        assert answers(again) == {**found, "program.py": "?", "large.json": "no: GPU memory", "small.json": "✓ fits"}
    assert asked(planner) == len(SHIPPED) + 2


async def test_a_program_is_known_once_it_was_opened(user: Path, planner: Path) -> None:
    app = PenstockApp(user)
    async with app.run_test(size=(120, 36)) as pilot:
        await until(pilot, lambda: "program.py" in answers(app))
        assert answers(app)["program.py"] == "?"
        app.open_configure(user / "recipes" / "program.py")
        await pilot.pause()
        configure = app.screen
        assert isinstance(configure, ConfigureScreen)
        await until(pilot, lambda: configure.client.state.phase == "done")
        await pilot.press("escape")
        await until(pilot, lambda: app.screen is not configure and answers(app)["program.py"] == "✓ fits")
        (user / "recipes" / "program.py").write_text("from penstock import Recipe\nrecipe = Recipe(name='other')\n")
        await until(pilot, lambda: answers(app)["program.py"] == "?")


async def test_nothing_is_planned_beside_another_screen_or_read_only(
    user: Path, planner: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for app in (PenstockApp(user, plans_recipes=True, read_only=True), PenstockApp(user)):
        async with app.run_test(size=(120, 36)) as pilot:
            await until(pilot, lambda app=app: "small.json" in answers(app))
            screen = app.screen
            assert isinstance(screen, home.HomeScreen)
            screen._plan_when_idle()
            assert screen._plans is None
            assert answers(app)["small.json"] == "?"
    app = PenstockApp(user, plans_recipes=True)
    monkeypatch.setattr(plan_client, "SERVER", (sys.executable, "-c", "import sys; sys.stdin.read()"))  # never answers
    async with app.run_test(size=(120, 36)) as pilot:
        screen = app.screen
        assert isinstance(screen, home.HomeScreen)
        await until(pilot, lambda: screen._plans is not None)
        assert answers(app)["small.json"] == "…"
        await pilot.press("question_mark")
        await until(pilot, lambda: screen._planner_is_done())
        screen._plan_when_idle()
        assert screen._planner_is_done()
    assert not planner.exists()


async def test_without_a_planner_nothing_is_claimed(user: Path, planner: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_client, "SERVER", ("/nowhere/python",))
    app = PenstockApp(user, plans_recipes=True)
    async with app.run_test(size=(120, 36)) as pilot:
        await until(pilot, lambda: answers(app).get("small.json") == "?")
        assert set(answers(app).values()) == {"?"}
        assert app.screen.query_one("#recipes", DataTable).row_count == len(SHIPPED) + 3


def test_what_is_short_has_a_persons_name() -> None:
    known = {"model": {"params": 7, "layers": 1}, "context": 64, "fits": False}
    for gpu, tier, short in (
        (None, "gpu", "RAM"),
        ("H200", "gpu", "GPU memory"),
        ("H200", "ram", "RAM"),
        (None, "nvme", "disk"),
    ):
        refusal = {"tier": tier, "short_bytes": 1, "message": "why"}
        found = fit_of({**known, "machine": {"gpu": gpu}, "refusal": refusal})
        assert found == Fit(fits=False, short=short, message="why", params=7, context=64)
    here = here_digest(Path.cwd())
    keep_fit("recipe", here, found)
    assert read_fit("recipe", here) == found
    assert read_fit("recipe", "elsewhere") is None
    assert read_fit("another", here) is None


async def test_nothing_is_planned_while_kept_answers_are_being_read(
    user: Path, planner: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = find_recipes(user)
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
    assert begun
    assert all(known[entry.path] is not None for entry in entries)
    assert asked(planner) == 0
