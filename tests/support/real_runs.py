"""Real tiny runs for the screens: the command line itself trains them, in a folder with a recipe and a corpus."""

import asyncio
import os
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from cli_process import PATIENCE_S, REAL, REPOSITORY, done, started
from recipe_texts import recipe_text

RECIPE = '''"""A tiny model learns three files, state on all tiers.

GPU    none needed
RAM    1 GB
NVMe   64 MB
Model  none: random weights
"""

'''
RECIPE += recipe_text(
    model={"num_layers": 3}, train={"steps": 12, "lr": 1e-2, "calibrate": True}, storage={"checkpoint_every": 5}
)
RECIPE += """
if __name__ == "__main__":
    run_recipe(__file__)
"""


def make_root(folder: Path) -> Path:
    """A folder with recipes/tiny.py and the corpus that it reads."""
    (folder / "recipes").mkdir(parents=True)
    (folder / "recipes" / "tiny.py").write_text(RECIPE)
    make_corpus(folder)
    return folder


def make_corpus(folder: Path) -> None:
    (folder / "corpus").mkdir()
    for name in ("recipes/recipe", "runs/directory", "launch/run"):
        text = (REPOSITORY / "app" / f"{name}.py").read_text()
        (folder / "corpus" / f"{Path(name).name}.txt").write_text(text)


def environment() -> dict[str, str]:
    """Of the runs: one thread, this checkout."""
    return os.environ | {"PYTHONPATH": str(REPOSITORY / "src"), "COLUMNS": "100", "OMP_NUM_THREADS": "1"}


def start(root: Path, *arguments: str) -> subprocess.Popen[str]:
    """A command, under way."""
    return started(root, *REAL, *arguments, stderr=subprocess.STDOUT, OMP_NUM_THREADS="1")


def command(root: Path, *arguments: str) -> str:
    """A command, done; its output. Fails where the command does."""
    return done(start(root, *arguments)).stdout


def train(root: Path, name: str, *overrides: str) -> Path:
    """A finished run at runs/NAME of `root`."""
    settings = [text for override in overrides for text in ("--set", override)]
    command(root, "train", "recipes/tiny.py", "--run-dir", f"runs/{name}", *settings)
    return root / "runs" / name


async def until(
    condition: Callable[[], bool],
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    timeout_s: float = PATIENCE_S,
) -> None:
    """Wait, letting an application go on by its `pause`, until `condition`; fails after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        await pause(0.05)
