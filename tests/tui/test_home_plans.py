"""Which recipes fit, on Home: planned while nobody is waiting, kept, and nothing of the user's is run for it."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from seen import opened, running, until
from textual.widgets import DataTable

from penstock.app import fits, shipped
from penstock.app.fits import Fit, fit_of, here_digest, keep_fit, read_fit
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


def answers(app: Any) -> dict[str, str]:
    """Recipe's file -> what stands below `fits here?`."""
    table = app.screen.query_one("#recipes", DataTable)
    at = [str(column.label) for column in table.ordered_columns].index("fits here?")
    return {Path(str(row.key.value)).name: str(table.get_row(row.key)[at]) for row in table.ordered_rows}


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


async def test_a_program_is_known_once_it_was_opened(user: Path, planner: Path) -> None:
    program = user / "recipes" / "program.py"
    async with running(user) as (app, pilot):
        await until(pilot, lambda: answers(app).get("program.py") == "?")
        app.open_configure(program)
        configure = await opened(pilot, ConfigureScreen)
        await until(pilot, lambda: configure.client.state.phase == "done")
        await pilot.press("escape")
        await until(pilot, lambda: app.screen is not configure and answers(app)["program.py"] == "✓ fits")
        program.write_text("from penstock import Recipe\nrecipe = Recipe(name='other')\n")
        await until(pilot, lambda: answers(app)["program.py"] == "?")


async def test_nothing_is_planned_beside_another_screen_or_read_only(
    user: Path, planner: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: list[dict[str, bool]] = [{"plans_recipes": True, "read_only": True}, {}]
    for more in options:
        async with running(user, **more) as (app, pilot):
            await until(pilot, lambda app=app: "small.json" in answers(app))
            app.screen._plan_when_idle()
            assert (app.screen._plans, answers(app)["small.json"]) == (None, "?")
    monkeypatch.setattr(plan_client, "SERVER", (sys.executable, "-c", "import sys; sys.stdin.read()"))  # never answers
    async with running(user, plans_recipes=True) as (app, pilot):
        screen = app.screen
        await until(pilot, lambda: screen._plans is not None)
        assert answers(app)["small.json"] == "…"
        await pilot.press("question_mark")
        await until(pilot, lambda: screen._planner_is_done())
        screen._plan_when_idle()
        assert screen._planner_is_done()
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
    assert all(known[entry.path] is not None for entry in entries)
    assert (len(begun), asked(planner)) == (1, 0)
