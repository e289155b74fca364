"""gpu-check on a GPU whose kernels compute: its commands end, and its smoke agrees with plain PyTorch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KINDS = "device,smoke,tests,short,plan-268m-tiers,drive,storage"
"""One of each kind of command."""


@pytest.mark.long
def test_a_command_of_each_kind_gives_its_figures(tmp_path: Path) -> None:
    path = os.pathsep.join((str(ROOT / "src"), str(ROOT), os.environ["PYTHONPATH"]))
    homes = {name: str(tmp_path / "home") for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME")}
    words = ("--small", "--results", "found", "--limit-s", "3000", "--only", KINDS)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "benchmarks", "gpu_check", *words],
        cwd=tmp_path,
        env=os.environ | homes | {"PYTHONPATH": path, "STANDIN_GPU_GIB": "8"},
        capture_output=True,
        text=True,
    )
    records = json.loads((tmp_path / "found" / "gpu-check.json").read_text())["commands"]
    assert {record["name"]: record["reason"] for record in records} == dict.fromkeys(KINDS.split(","), "")
    assert done.returncode == 0, done.stderr[-2000:]
    smoke = records[1]["figures"]
    assert smoke["wrong"] == []
    assert smoke["plain"]["losses"][0] - smoke["plain"]["losses"][-1] > 0.5
