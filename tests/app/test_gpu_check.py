"""`make gpu-check` on a machine without a GPU, and with an interpreter that has nothing."""

import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).parents[2]


def gpu_check(python: str, results: Path) -> subprocess.CompletedProcess[str]:
    command = ["make", "gpu-check", f"PYTHON={python}", f"RESULTS={results}"]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_no_gpu_is_said_and_is_no_failure(tmp_path: Path) -> None:
    done = gpu_check(sys.executable, tmp_path / "results")
    assert done.returncode == 0, done.stderr
    assert "gpu-check: skipped: torch of" in done.stdout
    assert not (tmp_path / "results").exists()


def test_an_interpreter_without_torch_is_said_too(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    done = gpu_check(str(tmp_path / "bare" / "bin" / "python"), tmp_path / "results")
    assert done.returncode == 0, done.stderr
    assert "is missing or sees no CUDA device" in done.stdout
