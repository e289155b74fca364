"""The commands that measure a machine, on a card that takes no time: they end, and say what they are to say."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.app.bench.cases import Case, Shape, cases_of
from penstock.app.bench.suites import run_case

REPOSITORY = Path(__file__).parents[2]


def run(*arguments: str, cwd: Path, limit_s: float, gpu_gib: int = 141) -> subprocess.CompletedProcess[str]:
    """`gpu_gib`: size of the card, which is ordinary memory here: on a small one commands choose small models."""
    env = os.environ | {"PYTHONPATH": str(REPOSITORY), "XDG_CONFIG_HOME": str(cwd / "config")}
    env["STANDIN_GPU_GIB"] = str(gpu_gib)
    return subprocess.run(
        [sys.executable, "-m", *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=limit_s
    )


def test_probe(tmp_path: Path) -> None:
    done = run("penstock.app.cli", "probe", str(tmp_path), "--seconds", "20", cwd=tmp_path, limit_s=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Stand-in H200" in done.stdout


def test_gpu_check_keeps_what_it_finds_and_goes_on_from_it(tmp_path: Path) -> None:
    """Stages device, smoke and drives to their end. The smoke compares losses, which here are all zero, and says so."""
    arguments = ("penstock.app.gpu_check", "--results", "found", "--only", "device,smoke,drives", "--limit-s", "420")
    done = run(*arguments, cwd=tmp_path, limit_s=600, gpu_gib=8)
    stages = json.loads((tmp_path / "found" / "gpu-check.json").read_text())["stages"]
    assert {(stage, case): found["status"] for stage, cases in stages.items() for case, found in cases.items()} == {
        ("device", "device"): "done",
        ("smoke", "smoke"): "failed",
        ("drives", "probe"): "done",
        ("drives", "storage"): "done",
    }, done.stderr[-4000:]
    assert "loss does not fall (0.0000 to 0.0000)" in stages["smoke"]["smoke"]["reason"]
    assert all(len(stages["smoke"]["smoke"][run]["losses"]) == 6 for run in ("penstock", "plain"))
    device = (tmp_path / "found" / "stages" / "device.json").read_text()  # with the time that it took
    again = run(*arguments, "--resume", "--only", "device,drives", cwd=tmp_path, limit_s=60, gpu_gib=8)
    assert again.returncode == 1, again.stderr[-4000:]
    assert "failed: smoke/smoke;" in again.stdout  # as it was found before
    assert (tmp_path / "found" / "stages" / "device.json").read_text() == device


CASES = list({case.name: case for _, case in cases_of("gpu")}.values())


def cut(shape: Shape) -> Shape:
    """A fourth of the width, with heads as wide as they are, and fewer words."""
    return replace(
        shape,
        hidden=shape.hidden // 4,
        intermediate=shape.intermediate // 4,
        heads=shape.heads // 4,
        kv_heads=max(1, shape.kv_heads // 4),
        vocab=8192,
    )


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_suite_case_cut_to_size(case: Case, tmp_path: Path) -> None:
    """Every case of gpu-check's suites through its own worker: fewer tokens, a fourth of the width, a small GPU."""
    small = replace(
        case,
        shapes=(cut(case.shapes[-1]),),
        row_tokens=min(case.row_tokens, 8192),
        rows=2,
        chunk_tokens=min(case.chunk_tokens, 2048),
        layers=(2,),
        gpu="2GiB",
    )
    outcome = run_case(small, tmp_path, None, 400.0)
    assert outcome["status"] == "done", outcome.get("reason")
    assert outcome["step_s"] > 0
