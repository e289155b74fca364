"""A screen: its key opens it about the run on show."""

from pathlib import Path

import real_runs

from penstock.tui.app import PenstockApp
from penstock.tui.screens.recipe import RecipeScreen
from penstock.tui.screens.run import RunScreen


async def test_its_key_opens_it_about_the_run(tmp_path: Path) -> None:
    root = real_runs.make_root(tmp_path)
    real_runs.train(root, "first")
    app = PenstockApp(root, run=root / "runs" / "first")
    async with app.run_test(size=(120, 50)) as pilot:
        await real_runs.until(lambda: isinstance(app.screen, RunScreen), pilot.pause)
        await pilot.press("r")
        await real_runs.until(lambda: isinstance(app.screen, RecipeScreen), pilot.pause)
        assert "sequence_length" in str(app.screen.query_one("#recipe").render())
