"""Whole runs: calibration, training, validation, spilling, commits, a kill and a resume, with random delays too.

What kernels would compute is not there, so losses say nothing. But copies, the optimizer on the host, drives and
commits are real, and gradients are zeroed by a memset: the state after some steps depends on the order in which they
came.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
MIB = 1 << 20
STREAMED = {
    "data": {"sequence_length": 4096},
    "budgets": {"gpu": "150MiB", "ram": "20MiB", "nvme": "2GiB"},
    "train": {"compile": "off", "chunk_tokens": 512},
    "storage": {"reader": "direct"},
}
HALF_FROZEN = {"freeze": ["*embed_tokens*", "*.layers.0.*", "*.mlp.*"]}
"""Weights that are read from the committed state into slots of their own, beside those that are trained."""
LATE: dict[str, tuple[str, dict[str, Any]]] = {
    "direct": ("20MiB", {}),
    "kvikio": ("84MiB", {}),  # as much is spilled: kvikio takes 64 MiB of RAM for itself
    "half frozen": ("20MiB", HALF_FROZEN),
}
"""Case -> budgets.ram, fields of train."""


def command(folder: Path, wanted: dict[str, Any]) -> list[str]:
    return [sys.executable, str(HERE / "trained.py"), str(folder), json.dumps(wanted)]


def environment(**changes: str) -> dict[str, str]:
    path = os.pathsep.join(
        [str(HERE.parents[1] / "src"), str(HERE), str(HERE.parent / "support"), os.environ.get("PYTHONPATH", "")]
    )
    return os.environ | {"PYTHONPATH": path} | changes


def trained(folder: Path, wanted: dict[str, Any], **changes: str) -> dict[str, Any]:
    done = subprocess.run(command(folder, wanted), env=environment(**changes), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def with_train(wanted: dict[str, Any], **train: Any) -> dict[str, Any]:
    return wanted | {"train": wanted.get("train", {}) | train}


def test_a_compiled_run_keeps_to_its_plan(tmp_path: Path) -> None:
    """Calibration, compiled layers, validation and commits, in a budget that is enforced and nearly all planned."""
    wanted = {
        "model": {"num_layers": 6, "hidden_size": 768, "intermediate_size": 2304, "num_heads": 12, "num_kv_heads": 4},
        "data": {"sequence_length": 2048, "validation_documents": 2},
        "train": {"steps": 4, "chunk_tokens": 1024, "validate_every": 2}
        | {"activation_checkpointing": "auto", "kv_window": "auto"},
        "budgets": {"gpu": "1100MiB", "ram": "3GiB", "nvme": "8GiB"},
    }
    run = trained(tmp_path / "run", wanted)
    assert (run["steps"], run["committed_step"], run["validations"]) == (4, 4, 2)
    assert run["refusals"] == 0
    assert run["gpu_memory"]["allocated_bytes"] <= run["planned"]["gpu"] <= 1100 * MIB
    assert run["gpu_memory"]["reserved_bytes"] <= 1100 * MIB


@pytest.mark.parametrize("case", LATE)
def test_delays_change_no_bit_of_the_state(tmp_path: Path, case: str) -> None:
    """Through all three tiers with spilled activations; whichever stream comes late."""
    ram, fields = LATE[case]
    wanted = with_train(STREAMED, calibrate=False, activation_checkpointing="selective", **fields)
    reader = "kvikio" if case == "kvikio" else "direct"
    wanted |= {"budgets": STREAMED["budgets"] | {"ram": ram}, "storage": {"reader": reader}}
    runs = [trained(tmp_path / us, wanted, STANDIN_DELAY_US=us) for us in ("0", "500")]
    assert {run["committed_step"] for run in runs} == {runs[0]["steps"]}
    if not fields:
        assert set(runs[0]["lanes"]) >= {"nvme_read", "h2d", "compute", "d2h", "optimizer", "nvme_write"}
        assert runs[0]["spilled"] > 0
    assert len({run["digest"] for run in runs}) == 1
    assert [run["refusals"] for run in runs] == [0, 0]


@pytest.mark.parametrize("us", ["0", "500"])
def test_a_killed_run_is_resumed_to_the_same_bits(tmp_path: Path, us: str) -> None:
    wanted = with_train(STREAMED, calibrate=False, steps=8)
    whole = trained(tmp_path / "whole", wanted)
    folder = tmp_path / "killed"
    process = subprocess.Popen(
        command(folder, wanted), env=environment(STANDIN_DELAY_US="1000"), stdout=subprocess.PIPE
    )
    try:
        manifest = folder / "state" / "manifest.json"
        deadline = time.monotonic() + 300
        while not (manifest.exists() and json.loads(manifest.read_text())["meta"]["step"] >= 2):
            assert process.poll() is None, "the run ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.communicate()
    resumed = trained(folder, wanted, STANDIN_DELAY_US=us)
    assert 0 < resumed["steps_done"] < 8
    assert (resumed["committed_step"], resumed["digest"]) == (8, whole["digest"])
