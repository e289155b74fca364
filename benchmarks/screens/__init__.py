"""`make screens`: the documentation's pictures, what the pictured run printed, and the list of keys.

Trains three times in a folder of its own, the third time while the pictures are taken: a model whose compute is small
and whose state is on NVMe, so that every lane works, on any machine.
"""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.screens.film import film
from benchmarks.screens.finetune import fill_form, make_chat, tune
from benchmarks.screens.session import without_fonts
from penstock.app.launch.launcher import start
from penstock.app.recipes import shipped
from penstock.app.recipes.recipe import apply_overrides, load_recipe
from penstock.app.runs.directory import RunInfo, is_live, read_info
from penstock.tui.actions import keys_page
from penstock.tui.app import PenstockApp
from penstock.tui.screens.finetune import FinetuneScreen
from penstock.tui.screens.fit import FitScreen
from penstock.tui.screens.home import HomeScreen
from penstock.tui.widgets.pages import PlanPanel

_LIVE_STEP = 22
"""Step of the live run from which on pictures are taken."""

_FRAME_S = 0.5
_FRAMES = 24

RECIPE = "text_small"
SETTINGS: tuple[str, ...] = (
    "model.num_layers=12",
    "data.sequence_length=256",
    "train.chunk_tokens=128",
    "budgets.nvme=4GiB",
    "after.sample_prompt=none",
)
"""Of all the runs."""

BEGIN, END = "<!-- what the pictured run printed, by make screens -->", "<!-- until here -->\n"
"""Around it in the guide."""


@dataclass(frozen=True, slots=True)
class Shot:
    """One picture."""

    name: str
    size: tuple[int, int]
    open: Callable[[PenstockApp], None]
    """Brings the application to what is to be seen."""
    theme: str = "penstock-dark"
    film: bool = False
    """Many pictures, half a second apart, as one that plays them."""


HOME = Shot("home", (120, 36), lambda app: None)
FORM = Shot("finetune-form", (120, 44), fill_form)


def shots(root: Path, live: Path, finished: list[Path]) -> list[Shot]:
    def run(app: PenstockApp) -> None:
        app.open("run", live)

    return [
        Shot("run-live", (120, 36), run, film=True),
        Shot("run", (120, 36), run),
        Shot("run-80x24", (80, 24), run),
        Shot("run-200x60", (200, 60), run),
        Shot("run-light", (120, 36), run, "penstock-light"),
        HOME,
        Shot("configure", (160, 44), lambda app: app.open("configure", root / "recipes/14b_workstation.py")),
        Shot("configure-refused", (120, 36), lambda app: app.open("configure", root / "recipes/120b_moe.py")),
        Shot("timeline", (160, 44), lambda app: app.open("timeline", finished[0], 12)),
        Shot("fit", (120, 36), lambda app: app.open("fit", "rtx4090-128")),
        Shot("compare", (120, 36), lambda app: app.open("compare", finished)),
        FORM,
    ]


def make_runs(root: Path) -> tuple[Path, list[Path]]:
    """A run under way, and two that have finished."""
    recipe = apply_overrides(load_recipe(RECIPE), SETTINGS)
    (root / "recipes").mkdir()
    for name, machine in (("14b_workstation", "rtx4090-128"), ("120b_moe", "rtx4090-64")):
        text = re.sub(r'\bpath="models/[^"]*",\s*', "", (shipped.FOLDER / f"{name}.py").read_text())
        text = re.sub(r'machine="[^"]*"', f'machine="{machine}"', text)
        (root / "recipes" / f"{name}.py").write_text(text)
    asyncio.run(take(HOME, root, root))  # what fits is planned while nothing runs, and kept
    finished = []
    for name, settings in (("slow-learner", ["train.lr=2e-4"]), ("baseline", ["train.lr=1e-3"])):
        settings += ["train.steps=20", "after.export=false", f"name={name}"]
        finished.append(start(apply_overrides(recipe, settings), root))
        _wait(finished[-1], lambda info: info.state == "finished", 600)
    live = start(recipe, root)
    _wait(live, lambda info: info.step >= _LIVE_STEP, 600)
    return live, finished


def _wait(run: Path, done: Callable[[RunInfo], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not done(info := read_info(run)):
        if time.monotonic() > deadline or info.state in ("failed", "crashed"):
            raise SystemExit(f"{run} is {info.state} at step {info.step}: {info.error}")
        time.sleep(0.5)


def _is_exported(run: Path) -> bool:
    return any((run / "export").glob("*.safetensors")) and is_live(run) is False


async def take(shot: Shot, root: Path, out: Path) -> None:
    """Write one picture, without the fonts that it would load from elsewhere."""
    app = PenstockApp(root, plans_recipes=True)
    async with app.run_test(size=shot.size) as pilot:
        app.theme = shot.theme
        await pilot.pause()
        shot.open(app)
        await pilot.pause(3)
        for _ in range(240):
            if _is_planned(app):
                break
            await pilot.pause(0.5)
        frames = [_picture(app)]
        while shot.film and len(frames) < _FRAMES:
            await pilot.pause(_FRAME_S)
            frames.append(_picture(app))
    (out / f"{shot.name}.svg").write_text(film(frames, _FRAME_S) if shot.film else frames[0])


def _is_planned(app: PenstockApp) -> bool:
    """Whether nothing more is to come of what the screen plans."""
    screen = app.screen
    if isinstance(screen, FitScreen):
        return screen.client.state.done
    if isinstance(screen, FinetuneScreen):
        return screen.client.state.done
    if isinstance(screen, HomeScreen):
        return not screen.will_plan
    panels = screen.query(PlanPanel)
    return all(panel.state.phase == "done" and panel.state.forecast is not None for panel in panels)


def _picture(app: PenstockApp) -> str:
    return without_fonts(app.export_screenshot(title="penstock", simplify=True))


def print_into(live: Path, guide: Path) -> None:
    """Put the pictured run's command and what it printed into the guide, between its marks."""
    command = " ".join(["penstock train", RECIPE, *(f"--set {text}" for text in SETTINGS)])
    printed = f"{BEGIN}\n```\n$ {command}\n{(live / 'output.log').read_text()}```\n"
    before, _, rest = guide.read_text().partition(f"{BEGIN}\n")
    guide.write_text(before + printed + END + rest.partition(END)[2])


def main(out: Path = Path("docs/screens"), only: str = "") -> None:
    """Write pictures (all, or those of --only NAME[,NAME...]) to --out.

    Beside that folder keys.md is written, and into guide.md what the pictured run printed.
    """
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    (out.parent / "keys.md").write_text(keys_page())
    os.environ["TEXTUAL_ANIMATIONS"] = "none"
    with tempfile.TemporaryDirectory() as home:
        os.environ["HOME"] = home  # paths are shown from here
        root = Path(home) / "work"
        root.mkdir()
        os.chdir(root)
        make_chat(root, lambda run: _wait(run, lambda info: info.state == "finished" and _is_exported(run), 600))
        tune(root, out)
        names = only.split(",") if only else []
        if names and all("finetune" in name for name in names):
            asyncio.run(take(FORM, root, out))
            return
        live, finished = make_runs(root)
        for shot in shots(root, live, finished):
            if not names or shot.name in names:
                asyncio.run(take(shot, root, out))
        _wait(live, lambda info: info.state == "finished", 600)
        print_into(live, out.parent / "guide.md")
