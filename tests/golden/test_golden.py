"""Not one bit of training changes without a word: digests and losses recorded at an earlier commit.

A change that means to compute other bits records them anew: `python tests/golden/golden_runs.py FOLDER > digests.json`.
"""

import contextlib
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from golden_runs import ENVIRONMENT, EXPECTED, OLD_RUN, RECIPES

from penstock.app.runs.directory import read_recipe
from penstock.engine.config import config_digest
from penstock.storage.generations.store import NvmeStore

NAMES = [file.stem for file in RECIPES]
FEW = ["all_on_nvme"]
OTHERS = [*(name for name in NAMES if name not in FEW), "old_run"]


@pytest.mark.parametrize("names", [FEW, pytest.param(OTHERS, marks=pytest.mark.long)], ids=["few", "others"])
def test_training_computes_the_recorded_bits(names: list[str], tmp_path: Path) -> None:
    assert len(NAMES) == 8
    done = subprocess.run(
        [sys.executable, str(EXPECTED.with_name("golden_runs.py")), str(tmp_path), *names],
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    expected = json.loads(EXPECTED.read_text())
    assert json.loads(done.stdout) == {name: expected[name] for name in names}


def test_a_run_from_before_is_known_as_the_recipe_s_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its recipe is read under the names that fields had, which one line says, and is the one it was trained with."""
    with tarfile.open(OLD_RUN) as archive:
        archive.extractall(tmp_path, filter="data")
    run = tmp_path / "old_run"
    recipe = read_recipe(run)
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1
    assert told[0].startswith(f"{run / 'recipe.json'}: read under old names: train.save is train.activation_check")
    with contextlib.closing(NvmeStore.open(run / "state", read_only=True)) as store:
        assert store.meta["recipe"] == config_digest(recipe)
