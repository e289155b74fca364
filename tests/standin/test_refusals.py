"""What a run makes of a card that refuses, is not all there, or fails: it works, or says in one message why not."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
from test_runs import STREAMED, environment, trained, with_train

LIMITED = with_train(STREAMED, calibrate=False, steps=4, activation_checkpointing="selective") | {
    "budgets": STREAMED["budgets"] | {"ram": "48MiB"}
}
REFUSALS = {
    "a limit": {"STANDIN_PINNED_MIB": "24"},
    "no registration": {"STANDIN_REGISTER": "0"},
    "late streams": {"STANDIN_PINNED_MIB": "24", "STANDIN_DELAY_US": "500"},
}


@pytest.fixture(scope="module")
def pinned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The run that may pin what it likes."""
    return trained(tmp_path_factory.mktemp("pinned") / "run", LIMITED)


@pytest.mark.parametrize("case", REFUSALS)
def test_memory_that_cannot_be_pinned_changes_no_bit(tmp_path: Path, pinned: dict[str, Any], case: str) -> None:
    """Weights, gradients, activations and spills pass through the ring, and the run says so."""
    run = trained(tmp_path / "run", LIMITED, **REFUSALS[case])
    assert pinned["refusals"] == 0
    assert pinned["tiers"]["ram"]["peak_bytes"] > 24 << 20
    assert run["refusals"] > 0
    assert set(run["lanes"]) >= {"h2d", "d2h", "nvme_read", "nvme_write"}
    assert run["digest"] == pinned["digest"]
    assert run["committed_step"] == 4
    (said,) = [message for message in run["messages"] if "cannot pin" in message]
    assert "of pinned memory" in said


def test_the_ring_keeps_the_order_of_late_streams(tmp_path: Path) -> None:
    """Many pieces there, over to another stream, and back, with nothing but an event between the streams."""
    program = """
import torch
from penstock.storage import arena as arenas
arenas.RING_PIECE_BYTES = 64 << 10
arena = arenas.HostArena(8 << 20, budget_bytes=8 << 20)
here, back = arena.slot("here", 4 << 20), arena.slot("back", 4 << 20)
arena.pin()
assert "cannot pin 8.0 MiB" in arena.remark, arena.remark
there, other = (torch.empty(4 << 20, dtype=torch.uint8, device="cuda") for _ in range(2))
up, down = torch.cuda.Stream(), torch.cuda.Stream()
torch.cuda.synchronize()
for _ in range(3):
    values = torch.randint(256, (4 << 20,), dtype=torch.uint8)
    here.copy_(values)
    with torch.cuda.stream(up):
        arena.copy(there, here)
        here.zero_()  # what the host has to do with it is over
        other.copy_(there, non_blocking=True)
        arrived = torch.cuda.Event(blocking=True)
        arrived.record()
    with torch.cuda.stream(down):
        down.wait_event(arrived)
        arena.copy(back, other)
    print(torch.equal(back, values))
arena.close()
"""
    env = environment(STANDIN_PINNED_MIB="4", STANDIN_DELAY_US="300")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, timeout=300)
    assert done.stdout == "True\n" * 3, done.stdout + done.stderr


SETTINGS = {
    "model.vocab_size": 2048,
    "data.source": "random",
    "data.sequence_length": 1024,
    "data.max_documents": 64,
    "data.validation_documents": "none",
    "train.steps": 4,
    "train.warmup_steps": 0,
    "train.decay_steps": "none",
    "train.validate_every": "none",
    "train.validate_first": "false",
    "train.validation_sequences": "none",
    "train.calibrate": "false",
    "train.device": "cuda",
    "storage.checkpoint_every": 1,
    "after.export": "false",
}
"""The quickstart's recipe, in which all lanes work, without what kernels would have to compute."""


def penstock(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "penstock.app.cli", *arguments],
        cwd=cwd,
        env=environment(XDG_CONFIG_HOME=str(cwd / "config"), **variables),
        capture_output=True,
        text=True,
        timeout=400,
    )


def begun(cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    settings = [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}")]
    return penstock("train", "quickstart", "--from-scratch", "--run-dir", "run", *settings, cwd=cwd, **variables)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, int], str]:
    """What a run calls of CUDA that nothing happens to, and its state's digest."""
    folder = tmp_path_factory.mktemp("whole")
    done = begun(folder, STANDIN_SUMMARY="1")
    assert done.returncode == 0, done.stderr[-4000:]
    counts = done.stderr.rpartition("[standin] ")[2].split()
    return dict(zip(counts[::2], map(int, counts[1::2]), strict=True)), tiny.digest_of(folder / "run")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("kind", ["launch", "copy"])
def test_a_card_that_fails_ends_the_run_with_one_message(
    tmp_path: Path, whole: tuple[dict[str, int], str], kind: str, share: float
) -> None:
    """At the first launch or copy, while the run is prepared, and in its steps; on another card it goes on."""
    counts, digest = whole
    at = max(1, int(share * counts[kind]))
    failed = begun(tmp_path, **{f"STANDIN_FAIL_{kind.upper()}": str(at)})
    words = {"launch": "unspecified launch failure", "copy": "uncorrectable ECC error encountered"}[kind]
    assert failed.returncode == 2, failed.stderr[-4000:]
    assert "Traceback" not in failed.stderr
    before, _, message = f"\n{failed.stderr}".rpartition("\nerror: the GPU failed")
    assert "error" not in before.replace("CUDA error", "")  # kvikio may have been told first
    assert words in message
    assert "nvidia-smi" in message
    if (tmp_path / "run" / "state" / "manifest.json").exists():
        resumed = penstock("resume", "run", cwd=tmp_path)
        assert resumed.returncode == 0, resumed.stderr[-4000:]
        assert tiny.digest_of(tmp_path / "run") == digest
    else:
        assert share < 0.9
