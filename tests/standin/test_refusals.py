"""What a run makes of a card that refuses, is not all there, or fails: it works, or says in one message why not."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import small_model
import standin
import tiny
import torch
from test_runs import STREAMED, environment, trained, with_train

from penstock.engine.runtime.failures import explain
from penstock.engine.train import train_step

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
from penstock.storage.tier import arena as arenas
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
        [sys.executable, "-m", "penstock.app.cli.main", *arguments],
        cwd=cwd,
        env=environment(XDG_CONFIG_HOME=str(cwd / "config"), **variables),
        capture_output=True,
        text=True,
        timeout=400,
    )


def begun(cwd: Path, *changes: str, **variables: str) -> subprocess.CompletedProcess[str]:
    texts = [*(f"{name}={value}" for name, value in SETTINGS.items()), *changes]
    settings = [word for text in texts for word in ("--set", text)]
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


def test_what_other_processes_hold_of_the_card_is_not_planned_with(tmp_path: Path) -> None:
    """A budget of half the card is refused where less is left, and one that is left out follows what is."""
    taken = {"STANDIN_GPU_GIB": "8", "STANDIN_TAKEN_MIB": str(6 << 10)}
    given = begun(tmp_path, "budgets.gpu=4GiB", **taken)
    assert given.returncode == 2
    assert "budgets.gpu: 4,294,967,296 bytes, but 6,442,450,944 of the GPU's 8,589,934,592" in given.stderr
    assert "nvidia-smi" in given.stderr
    free = begun(tmp_path, "budgets.gpu=none", "train.steps=1", **taken)
    assert free.returncode == 0, free.stderr[-4000:]
    (budget,) = re.findall(r"GPU memory: (\S+ \S+) of 8.0 GiB are this run's budget", free.stdout + free.stderr)
    assert budget == "1.2 GiB"  # 2 GiB less 768 MiB


@pytest.mark.parametrize("card", ["gb10", "gh200"])
def test_memory_that_gpu_and_host_share_is_counted_once(tmp_path: Path, card: str) -> None:
    """A GB10 has no memory of its own: both budgets come from what the host has free. A GH200 has."""
    done = begun(tmp_path, "budgets.gpu=none", "budgets.ram=none", "train.steps=1", STANDIN_CARD=card)
    assert done.returncode == 0, done.stderr[-4000:]
    tiers = json.loads((tmp_path / "run" / "summary.json").read_text())["tiers"]
    both = tiers["gpu"]["budget_bytes"] + tiers["ram"]["budget_bytes"]
    assert (both < psutil.virtual_memory().total) is (card == "gb10")
    log = (tmp_path / "run" / "log.jsonl").read_text()
    assert ("both tiers share the machine's" in log) is (card == "gb10")


def test_memory_that_goes_while_a_run_works_is_told(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    t = small_model.training(compile="off")
    with tiny.session(tmp_path, m=small_model.model(), d=tiny.data(sequence_length=512), t=t, device=device) as session:
        torch.cuda.empty_cache()
        total = torch.cuda.mem_get_info()[1] >> 20
        with standin.setting("STANDIN_TAKEN_MIB", total, after=0), pytest.raises(torch.OutOfMemoryError) as caught:
            train_step(session)
        said = str(explain(caught.value, session.executor.failed_op, session.plan))
    assert re.match(r"budgets\.gpu: out of GPU memory despite the plan: .* asked for ", said), said
    assert "stop the other programs on this GPU" in said
