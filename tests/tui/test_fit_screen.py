"""The Fit screen: cells as they come, details, another machine, a cell's recipe; with a command that is quick."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import real_runs
from textual.pilot import Pilot

from penstock.app import fit
from penstock.app.catalogue import known_model
from penstock.app.recipe import changes, load_recipe
from penstock.app.rows import ASCII, UNICODE, plain
from penstock.tui.app import PenstockApp
from penstock.tui.data import fit_client
from penstock.tui.data.fit_client import FitState
from penstock.tui.render.fit import detail_rows, matrix_rows
from penstock.tui.screens.configure import ConfigureScreen
from penstock.tui.screens.fit import FitScreen
from penstock.tui.screens.home import HomeScreen
from penstock.tui.screens.pickers import MachinePicker

ASKED = fit.ask(machine="rtx4090-64", models="Qwen2.5-7B,Llama-3.3-70B", contexts="8k,1M")
FITTING = {
    "fits": True,
    "tokens_per_s": 1691.0,
    "hours": 1.64,
    "bound_by": "compute",
    "written_bytes": 4 * 10**12,
    "endurance_share": 0.002,
    "kwh_at_most": 0.74,
    "step_s": 155.0,
    "mfu": 0.5,
    "peak_bytes": {"gpu": 2**34, "ram": 2**36, "nvme": 2**38},
}
REFUSED = {
    "fits": False,
    "tier": "gpu",
    "short_bytes": 7 * 2**29,
    "message": "budgets.gpu: too small",
    "changes": [
        {"set": ["data.sequence_length=524288"], "text": "a shorter context"},
        {"set": [], "text": "a machine with 26.35 GiB of GPU memory"},
    ],
}


def cell(model: str, context: int) -> dict[str, Any]:
    """The 70B does not fit with the long context."""
    known = known_model(model)
    recipe = fit.cell_recipe(ASKED, known, context)
    return {
        "model": model,
        "context": context,
        "tokens_per_step": 262_144,
        "gradient_dtype": recipe.train.gradient_dtype,
        "stretched": known.is_stretched(context),
        "recipe": changes(recipe),
    } | (REFUSED if (model, context) == ("Llama-3.3-70B", 1 << 20) else FITTING)


CELLS = [cell(model, context) for model in ASKED.models for context in ASKED.contexts]


def state(cells: list[dict[str, Any]], *, done: bool = True) -> FitState:
    return FitState(ASKED.to_json(), {(c["model"], c["context"]): c for c in cells}, done=done)


def test_what_fits_is_told_without_colours() -> None:
    for width, glyphs in ((80, UNICODE), (40, ASCII), (20, ASCII)):
        rows = matrix_rows(state(CELLS[1:], done=False), ("Llama-3.3-70B", 8192), width, 14, glyphs)
        assert all(sum(len(text) for text, _ in row) == width for row in rows)
    text = plain(matrix_rows(state(CELLS[1:], done=False), ("Llama-3.3-70B", 8192), 80, 14, UNICODE)).splitlines()
    assert text[0].split() == ["8k", "1M"]
    assert text[1].split() == ["Qwen2.5-7B", "…", "✓", "1,691", "1.6", "h"]
    assert text[2].split() == ["Llama-3.3-70B", "→", "✓", "1,691", "1.6", "h", "✗", "gpu"]


def test_the_matrix_is_scrolled_to_what_is_chosen() -> None:
    rows = matrix_rows(state(CELLS), ("Llama-3.3-70B", 8192), 60, 2, UNICODE)
    assert len(rows) == 2
    assert "Llama-3.3-70B" in plain(rows[1:])


def test_details_say_what_a_cell_costs_or_what_would_fit() -> None:
    text = plain(detail_rows(state(CELLS), ("Qwen2.5-7B", 1 << 20), 60, UNICODE))
    for part in ("1,691 tokens/s", "10M tokens take 1.6 h", "bound by compute", "writes 4.0 TB 0.2%", "kWh 0.74"):
        assert part in text
    assert "at its power limit of 450 W" in " ".join(text.split())
    text = " ".join(plain(detail_rows(state(CELLS), ("Llama-3.3-70B", 1 << 20), 100, UNICODE)).split())
    assert "does not fit: gpu tier too small by 3.5 GiB" in text
    assert "a shorter context (data.sequence_length=524288); or a machine with 26.35 GiB of GPU memory" in text
    assert "planning" in plain(detail_rows(state([], done=False), ("Qwen2.5-7B", 8192), 60, UNICODE))


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the command is given, a line a call."""
    log, script, lines = tmp_path / "calls", tmp_path / "fit.py", tmp_path / "lines"
    lines.write_text("\n".join(map(json.dumps, [ASKED.to_json(), *CELLS])) + "\n")
    script.write_text(
        f"import sys\nopen({str(log)!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')\n"
        "if 'dgx-spark' in sys.argv:\n    sys.exit('error: no such machine here')\n"
        f"print(open({str(lines)!r}).read(), end='', flush=True)\n"
    )
    monkeypatch.setattr(fit_client, "COMMAND", (sys.executable, str(script)))
    return log


async def until(pilot: Pilot[None], condition: Callable[[], bool]) -> None:
    await real_runs.until(condition, pilot.pause, 120)


async def test_from_home_to_a_cells_recipe(place: Path, log: Path) -> None:
    app = PenstockApp(place)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        await pilot.press("f")
        await until(pilot, lambda: isinstance(app.screen, FitScreen))
        screen = app.screen
        assert isinstance(screen, FitScreen)
        await until(pilot, lambda: screen.client.state.done)
        assert screen.chosen == ("Qwen2.5-7B", 8192)
        await pilot.press("down", "down", "right", "right")
        assert screen.chosen == ("Llama-3.3-70B", 1 << 20)
        await pilot.press("m")
        await until(pilot, lambda: isinstance(app.screen, MachinePicker))
        await pilot.press(*"rtx4090-64", "enter")
        await until(pilot, lambda: log.read_text() == "\n--machine rtx4090-64\n" and screen.client.state.done)
        await pilot.press("left", "enter")
        await until(pilot, lambda: isinstance(app.screen, ConfigureScreen))
        saved = place / "recipes" / "llama_3_3_70b_8k_rtx4090_64.json"
        assert load_recipe(saved) == fit.cell_recipe(ASKED, known_model("Llama-3.3-70B"), 8192)
        assert isinstance(app.screen, ConfigureScreen)
        assert app.screen.machine_name == "rtx4090-64"
        saved.write_text(saved.read_text().replace('"steps": ', '"steps": 1'))
        mine = saved.read_text()
        await pilot.press("escape")
        await until(pilot, lambda: app.screen is screen)
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, ConfigureScreen))
        assert saved.read_text() == mine, "what is there stays"


async def test_why_nothing_is_planned_is_said(place: Path, log: Path) -> None:
    app = PenstockApp(place)
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.pause()
        screen = FitScreen()
        screen.machine = "dgx-spark"
        await app.push_screen(screen)
        await until(pilot, lambda: screen.client.state.done)
        assert "no such machine here" in plain(screen._detail(98, 10))
        await pilot.press("enter")
        assert app.screen is screen


async def test_a_read_only_application_plans_nothing_and_says_so(place: Path, log: Path) -> None:
    app = PenstockApp(place, read_only=True)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        await pilot.press("f")
        await pilot.pause()
        assert isinstance(app.screen, HomeScreen)
        assert any("read-only" in notification.message for notification in app._notifications)
    assert not log.exists()
