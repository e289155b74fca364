"""Fixtures of the terminal application's tests: real runs, made once."""

import fcntl
import json
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import quick_pilot
import real_runs
from seen import running
from textual.pilot import Pilot

from penstock.storage.files import user_cache
from penstock.tui.app import PenstockApp
from penstock.tui.data import plan_client
from penstock.tui.widgets import form

SECOND = {"lr": 3e-3, "steps": 8}
FEW_FIELDS = (
    "name machine model.path adapter.method data.source data.path train.steps train.global_batch_size train.lr "
    "train.lr_schedule train.chunk_tokens train.gradient_dtype budgets.gpu storage.nvme samples.every after.export"
)
FAKE_PLANNER = Path(__file__).parents[1] / "support" / "fake_planner.py"


@pytest.fixture(autouse=True)
def _steady(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No animation, no blinking, no colours switched off by the surroundings, UTF-8, no answers kept by other tests.

    A module whose subject is what is drawn when says DRAWN_AT_ONCE.
    """
    quick_pilot.make_quick(monkeypatch, drawn_at_once=getattr(request.module, "DRAWN_AT_ONCE", False))
    own, shared = tmp_path.with_name(f"{tmp_path.name}-cache"), user_cache.cache_folder
    monkeypatch.setattr(user_cache, "cache_folder", lambda kind: own / kind if kind == "fits" else shared(kind))
    monkeypatch.setenv("TEXTUAL_ANIMATIONS", "none")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("PENSTOCK_ASCII", raising=False)


@pytest.fixture(autouse=True)
def planner_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Of the quick planner that screens ask, where a test sets no other."""
    log = tmp_path.with_name(f"{tmp_path.name}-planner")
    monkeypatch.setattr(plan_client, "SERVER", (sys.executable, str(FAKE_PLANNER), "sample", str(log)))
    monkeypatch.setattr(plan_client, "DEBOUNCE_S", 0.01)
    return log


@pytest.fixture
def few_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    """Configure has rows for a few fields of each kind: to lay out all is most of what opening it costs."""
    few = {key: form.field_table()[key] for key in FEW_FIELDS.split()}
    monkeypatch.setattr(form, "field_table", lambda: few)


@pytest.fixture(scope="session")
def made_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with two finished runs, a real one and one like it that says SECOND; read only: tests take `root`."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    root, made = shared / "made", shared / "made.txt"
    with open(shared / "made.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one worker makes them for all
        if not made.exists():
            root.mkdir()
            real_runs.make_root(root)
            first, second = real_runs.train(root, "first"), root / "runs" / "second"
            shutil.copytree(first, second, copy_function=_linked)
            _change(second / "status.json", step=8, total_steps=8)
            _change(second / "recipe.json", train=json.loads((second / "recipe.json").read_text())["train"] | SECOND)
            _keep_lines(second / "metrics.jsonl", 8)
            made.touch()
    return root


def _change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def _keep_lines(path: Path, count: int, then: int = 0) -> None:
    """The first lines of a file, and so many characters of the next."""
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:count]) + lines[count][:then])


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A root with recipes and no run."""
    folder, recipes = tmp_path / "root", real_runs.REPOSITORY / "recipes"
    shutil.copytree(recipes, folder / "recipes", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def _linked(source: str, target: str) -> None:
    """Copies a file; of the state a link will do, which no test here trains on."""
    if re.fullmatch(r"c\.\d+\.0", os.path.basename(source)):
        os.link(source, target)
    else:
        shutil.copy2(source, target)


@pytest.fixture
def root(made_runs: Path, tmp_path: Path) -> Path:
    """A root of the test's own: finished runs `first` and `second`, and `crashed`, which a kill ended in step 9."""
    root = tmp_path / "root"
    shutil.copytree(made_runs, root, copy_function=_linked)
    crashed = root / "runs" / "crashed"
    shutil.copytree(root / "runs" / "first", crashed, copy_function=_linked)
    _change(crashed / "status.json", state="running", step=9)
    (crashed / "summary.json").unlink()
    _keep_lines(crashed / "metrics.jsonl", 9, 20)
    return root


@pytest.fixture
def first(root: Path) -> Path:
    """The finished run of 12 steps."""
    return root / "runs" / "first"


@pytest.fixture
async def pilot(root: Path) -> AsyncIterator[Pilot[None]]:
    """Of the application on `root`, at home."""
    async with running(root) as (_, pilot):
        yield pilot


@pytest.fixture
def app(pilot: Pilot[None]) -> PenstockApp:
    assert isinstance(pilot.app, PenstockApp)
    return pilot.app
