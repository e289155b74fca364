"""`--gpus N` as a user meets it: processes of one run on a CPU, whose figures are the run's, and which end with it and
it with them; what cannot be is one message."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from cli_process import REAL, Cli, is_running, json_lines, refusal, wait_until
from real_runs import make_corpus
from recipe_texts import recipe_text

from penstock.app.runs.files import span_of as span_line
from penstock.app.runs.ops import STEP_END
from penstock.app.runs.rank_spans import gpus_of, spans_of
from penstock.storage.generations.store import NvmeStore

RECIPE = recipe_text(
    data={"validation_documents": 1},
    train={
        **{"steps": 4, "global_batch_size": 6, "micro_batch_size": 1, "replicas": 6, "lr": 1e-2},
        **{"validate_every": 2, "validation_sequences": 5},
    },
    budgets={"ram": "64MiB"},
    samples={"every": 4, "prompts": ["def "], "tokens": 4},
    storage={"checkpoint_every": 2},
)


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Cli:
    folder = tmp_path_factory.mktemp("gpus")
    make_corpus(folder)
    (folder / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    return Cli(folder, RECIPE, REAL)


def checksums(run: Path) -> dict[str, tuple[int, ...]]:
    store = NvmeStore.open(run / "state", read_only=True)
    try:
        return {f"{spec.buffer} {spec.kind}": found for spec, found in store.checksums().items()}
    finally:
        store.close()


def ranks_of(process_id: int) -> list[int]:
    """Children of a process that are ranks of its run."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == process_id and b"app.launch.rank" in (path / "cmdline").read_bytes():
                found.append(int(path.name))
        except (OSError, ValueError):
            continue
    return found


EXPERTS = ["model.model_type=qwen3_moe", "train.router_aux_loss=0.5"]
EXPERTS += ['model.overrides={"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}']
"""Where routers send tokens is known to all."""


@pytest.mark.parametrize("parallel", ["data", "context"])
def test_a_run_on_several_is_the_run_on_one(cli: Cli, parallel: str) -> None:
    """State, losses, validations and samples to the bit; and what moved to and from the drive is that of all."""
    settings = [f"train.parallel={parallel}", "train.kv_window=auto", "budgets.gpu=1MiB"]
    settings += EXPERTS if parallel == "data" else []
    how = [each for one in settings for each in ("--set", one)]
    runs = {n: cli.folder / f"{parallel}{n}" for n in (1, 2, 3)}
    said = {n: cli.run("train", "tiny.py", "--gpus", str(n), "--run-dir", runs[n].name, *how).stdout for n in runs}
    assert "2 processes on the CPU train this run together" in said[2]
    found = {n: checksums(run) for n, run in runs.items()}
    assert found[1] == found[2] == found[3]
    for name in ("metrics", "validation", "samples"):
        lines = {n: json_lines(run / f"{name}.jsonl") for n, run in runs.items()}
        told = {
            n: [{key: line.get(key) for key in ("step", "loss", "grad_norm", "tokens", "accuracy")} for line in of_run]
            for n, of_run in lines.items()
        }
        assert told[1] == told[2] == told[3]
    assert [gpus_of(runs[n]) for n in runs] == [1, 2, 3]
    said_of_lanes: list[str] = []
    for gpu in range(3):
        spans = [span for line in json_lines(spans_of(runs[3], gpu)) if (span := span_line(line)) is not None]
        assert [span.step for span in spans if span.op == STEP_END] == [1, 2, 3, 4], "each has a timeline"
        told = cli.run("lanes", str(runs[3]), "--gpu", str(gpu)).stdout
        assert "compute" in told
        awaited = {other for span in spans for other, seconds in span.awaited if seconds > 0}
        assert awaited
        assert awaited <= {0, 1, 2} - {gpu}
        said_of_lanes.append(told)
    assert "waited for GPU" in "".join(said_of_lanes)
    assert "has ops of 3 GPUs, 0 to 2" in cli.run("lanes", str(runs[3]), "--gpu", "3", code=2).stderr
    texts = {n: [sample["text"] for line in json_lines(run / "samples.jsonl") for sample in line["samples"]]
             for n, run in runs.items()}  # fmt: skip
    assert texts[1] == texts[2] == texts[3]
    written = {
        n: json.loads((run / "summary.json").read_text())["drives"][0]["bytes_written"] for n, run in runs.items()
    }
    assert written[1] == pytest.approx(written[2], rel=0.01) == pytest.approx(written[3], rel=0.01)


def test_a_run_goes_on_on_fewer_and_on_more(cli: Cli) -> None:
    """To the bits of one that went straight on, on one."""
    run, straight = cli.folder / "moves", cli.folder / "straight"
    constant = ("--set", "train.lr_schedule=constant")
    cli.run("train", "tiny.py", "--gpus", "2", "--run-dir", run.name, "--set", "train.steps=2", *constant)
    cli.run("resume", str(run), "--gpus", "3", "--set", "train.steps=3")
    cli.run("resume", str(run), "--gpus", "1", "--set", "train.steps=4")
    cli.run("train", "tiny.py", "--gpus", "1", "--run-dir", straight.name, *constant)
    assert checksums(run) == checksums(straight)


@pytest.mark.parametrize("whom", ["another", "the first"])
def test_whoever_is_killed_all_end_and_nothing_is_lost(cli: Cli, whom: str, tmp_path: Path) -> None:
    run, shared = tmp_path / "run", set(os.listdir("/dev/shm"))
    process = cli.start("train", "tiny.py", "--gpus", "3", "--run-dir", str(run), "--set", "train.steps=400")
    wait_until(lambda: (run / "metrics.jsonl").exists() and len(json_lines(run / "metrics.jsonl")) > 3)
    others = ranks_of(process.pid)
    assert len(others) == 2
    os.kill(others[1] if whom == "another" else process.pid, signal.SIGKILL)
    killed = time.monotonic()
    _, error = process.communicate()
    wait_until(lambda: not any(map(is_running, others)))
    assert time.monotonic() - killed < 30, "within seconds"
    if whom == "another":
        assert process.returncode == 2
        line = error.splitlines()[-1]
        assert line.startswith(f"error: GPU 2: its process {others[1]} was killed by SIGKILL")
        assert "is intact: fix the cause, then resume" in line
        assert "Traceback" not in error
    assert set(os.listdir("/dev/shm")) <= shared
    cli.run("resume", str(run), "--gpus", "2", "--set", f"train.steps={len(json_lines(run / 'metrics.jsonl')) + 1}")


@pytest.mark.long
def test_a_rank_that_hangs_ends_the_run(cli: Cli, tmp_path: Path) -> None:
    """With a word on where it was."""
    run = tmp_path / "run"
    process = cli.start("train", "tiny.py", "--gpus", "2", "--run-dir", str(run), "--set", "train.steps=4000")
    wait_until(lambda: (run / "metrics.jsonl").exists() and len(json_lines(run / "metrics.jsonl")) > 3)
    (other,) = ranks_of(process.pid)
    os.kill(other, signal.SIGSTOP)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 1, error
    assert f"GPU 1: its process {other} shows no sign of life; its threads are here:" in error
    assert "most recent call first" in error
    assert not is_running(other)
    cli.run("resume", str(run), "--gpus", "2", "--set", f"train.steps={len(json_lines(run / 'metrics.jsonl')) + 1}")


PAIRS = ("--set", "data.source=preference", "--set", "data.path=pairs.jsonl", "--set", "train.validate_every=none")
PAIRS += ("--set", "train.validation_sequences=none", "--set", "data.validation_documents=none")
CONTEXT = ("--set", "train.parallel=context", "--set", "train.kv_window=auto")
REFUSED = {
    "train.replicas: the 6 micro-batches of a step": (
        "--gpus",
        "2",
        "--set",
        "train.replicas=4",
        "--set",
        "train.parallel=data",
    ),
    "sequences of 64 tokens cannot be cut into 400 pieces": ("--gpus", "2", "--set", "train.replicas=200"),
    "no graphs are kept of a sequence that GPUs share": (*CONTEXT, "--set", "train.activation_checkpointing=none"),
    "keys and values that GPUs give one another are streamed": (*CONTEXT, "--set", "train.kv_window=whole"),
    "train.gpus: 4 GPUs cannot share 6 replicas": ("--gpus", "4"),
    "train.objective=dpo needs whole sequences": ("--set", "train.objective=dpo", *PAIRS, *CONTEXT),
    "gradients are added in float32": ("--set", "train.gradient_dtype=bfloat16"),
    "train.gpus: 4 GPUs share a step: train.replicas": (
        *("--gpus", "4", "--set", "train.replicas=none", "--set", "train.parallel=data"),
    ),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_cannot_be_is_one_message(
    cli: Cli, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(cli.folder)
    folders = set(os.listdir(cli.folder))
    assert said in refusal(capsys, "plan", "tiny.py", *REFUSED[said])
    assert set(os.listdir(cli.folder)) == folders
