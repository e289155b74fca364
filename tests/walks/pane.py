"""A pane: it is drawn, and its key goes there."""

import json
from pathlib import Path
from typing import cast

import real_runs

from penstock.app.console.rows import plain
from penstock.tui.app import PenstockApp
from penstock.tui.screens.run import RunScreen


async def test_it_is_shown_and_its_key_goes_there(tmp_path: Path) -> None:
    root = real_runs.make_root(tmp_path)
    real_runs.train(root, "first")
    run = root / "runs" / "first"
    best = min(json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines())
    app = PenstockApp(root, run=run)
    async with app.run_test(size=(120, 50)) as pilot:
        await real_runs.until(lambda: isinstance(app.screen, RunScreen), pilot.pause)
        screen = cast("RunScreen", app.screen)
        await real_runs.until(lambda: screen.data.metrics.rows == 12, pilot.pause)
        await pilot.pause(0.3)
        pane = screen.pane("best")
        assert plain(pane.rows(40, 1)).strip() == f"best loss {best:.4f}"
        assert pane.region.height > 0
        await pilot.press("8")
        assert screen.focused is pane
