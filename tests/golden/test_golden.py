"""Not one bit of training changes without a word: digests and losses recorded at an earlier commit.

A change that means to compute other bits records them anew: `python tests/golden/golden_runs.py FOLDER > digests.json`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from golden_runs import ENVIRONMENT, EXPECTED, RECIPES

NAMES = [file.stem for file in RECIPES]
FEW = ["all_on_nvme"]
OTHERS = [name for name in NAMES if name not in FEW]


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
