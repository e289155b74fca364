"""The documentation's pictures of the screens and its list of keys: `make screens`.

Trains the quickstart three times in a folder of its own, the third time while the pictures are taken.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.app import shipped
from penstock.app.control import ask
from penstock.app.launcher import start
from penstock.app.recipe import apply_overrides, load_recipe
from penstock.app.rundir import RunInfo, read_info
from penstock.tui.actions import keys_page
from penstock.tui.app import PenstockApp
from penstock.tui.widgets.plan_panel import PlanPanel

_LIVE_STEP = 22
"""Step of the live run from which on pictures are taken."""


@dataclass(frozen=True, slots=True)
class Shot:
    """One picture."""

    name: str
    size: tuple[int, int]
    open: Callable[[PenstockApp], None]
    """Brings the application to what is to be seen."""
    theme: str = "penstock-dark"


def shots(root: Path, live: Path, finished: list[Path]) -> list[Shot]:
    def run(app: PenstockApp) -> None:
        app.open_run(live)

    return [
        Shot("run", (120, 36), run),
        Shot("run-80x24", (80, 24), run),
        Shot("run-200x60", (200, 60), run),
        Shot("run-light", (120, 36), run, "penstock-light"),
        Shot("home", (120, 36), lambda app: None),
        Shot("configure", (160, 44), lambda app: app.open_configure(root / "recipes/14b_workstation.py")),
        Shot("configure-refused", (120, 36), lambda app: app.open_configure(root / "recipes/120b_moe.py")),
        Shot("timeline", (160, 44), lambda app: app.open_timeline(finished[0], 12)),
        Shot("compare", (120, 36), lambda app: app.open_compare(finished)),
    ]


def make_runs(root: Path) -> tuple[Path, list[Path]]:
    """A run under way, and two that have finished."""
    quickstart = load_recipe(shipped.FOLDER / "quickstart.py")
    (root / "recipes").mkdir()
    for name, machine in (("14b_workstation", "rtx4090-128"), ("120b_moe", "rtx4090-64")):
        text = re.sub(r'\bpath="models/[^"]*",\s*', "", (shipped.FOLDER / f"{name}.py").read_text())
        text = re.sub(r'machine="[^"]*"', f'machine="{machine}"', text)
        (root / "recipes" / f"{name}.py").write_text(text)
    finished = []
    for name, settings in (("slow-learner", ["train.lr=2e-4"]), ("baseline", ["train.lr=1e-3"])):
        settings += ["train.steps=20", "after.export=false", "after.sample_prompt=none", f"name={name}"]
        finished.append(start(apply_overrides(quickstart, settings), root))
        _wait(finished[-1], lambda info: info.state == "finished", 600)
    settings = ["train.validate_every=7", "train.validation_sequences=1", "storage.checkpoint_every=10"]
    settings += ["storage.keep_every=10", "budgets.nvme=3GiB", "after.export=false", "after.sample_prompt=none"]
    live = start(apply_overrides(quickstart, settings), root)
    _wait(live, lambda info: info.step >= _LIVE_STEP, 600)
    return live, finished


def _wait(run: Path, done: Callable[[RunInfo], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not done(info := read_info(run)):
        if time.monotonic() > deadline or info.state in ("failed", "crashed"):
            raise SystemExit(f"{run} is {info.state} at step {info.step}: {info.error}")
        time.sleep(0.5)


async def take(shot: Shot, root: Path, out: Path) -> None:
    """Write one picture, without the fonts that it would load from elsewhere."""
    app = PenstockApp(root)
    async with app.run_test(size=shot.size) as pilot:
        app.theme = shot.theme
        await pilot.pause()
        shot.open(app)
        await pilot.pause(3)
        for _ in range(240):
            panels = pilot.app.screen.query(PlanPanel)
            if all(panel.state.phase == "done" and panel.state.forecast is not None for panel in panels):
                break
            await pilot.pause(0.5)
        svg = app.export_screenshot(title="penstock", simplify=True)
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL).replace("Fira Code", "ui-monospace, Menlo")
    (out / f"{shot.name}.svg").write_text(svg)


def main() -> None:
    out = Path(sys.argv[1]).resolve()
    wanted = sys.argv[2:]
    out.mkdir(parents=True, exist_ok=True)
    (out.parent / "keys.md").write_text(keys_page())
    os.environ["TEXTUAL_ANIMATIONS"] = "none"
    with tempfile.TemporaryDirectory() as home:
        os.environ["HOME"] = home  # paths are shown from here
        root = Path(home) / "work"
        root.mkdir()
        os.chdir(root)
        live, finished = make_runs(root)
        for shot in shots(root, live, finished):
            if not wanted or shot.name in wanted:
                asyncio.run(take(shot, root, out))
        ask(live, "stop")
        _wait(live, lambda info: info.state == "stopped", 120)


if __name__ == "__main__":
    main()
