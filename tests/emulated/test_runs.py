"""Whole runs on the emulated GPU through the command line: validation, samples, checkpoints and uploads, killed at any
moment under random delays and resumed, to the bits of the run left alone; in float32 with the losses of the CPU."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tiny

REPOSITORY = Path(__file__).parents[2]
STEPS = 8
RECIPE = f"""
from penstock import BudgetConfig, DataConfig, ModelConfig, Recipe, SamplesConfig, StorageConfig, TrainConfig

recipe = Recipe(
    name="emulated",
    model=ModelConfig(
        model_type="qwen3", num_layers=3, hidden_size=32, intermediate_size=48,
        num_heads=4, num_kv_heads=2, head_dim=8,
    ),
    data=DataConfig(
        source="jsonl", path="text.jsonl", tokenizer_vocab_size=300, sequence_length=48, validation_documents=2
    ),
    train=TrainConfig(
        steps={STEPS}, global_batch_size=2, chunk_tokens=16, lr=1e-2, compile="off", calibrate=False,
        deterministic=True, validate_every=2,
    ),
    samples=SamplesConfig(every=2, prompts=["the mill", "a wheel"], tokens=4),
    budgets=BudgetConfig(gpu="1GiB", ram="1GiB", nvme="1GiB"),
    storage=StorageConfig(part_bytes="16KiB", checkpoint_every=2, offsite="uploads", offsite_every=4),
)
"""


def command(folder: Path, name: str, device: str, *overrides: str, resume: bool = False) -> list[str]:
    """Of a run directory `name` in `folder`, which it makes or goes on from."""
    (folder / "recipe.py").write_text(RECIPE)
    words = "the stone turns a wheel of the mill and the mill turns a stone, "
    texts = [(words * 4)[i % 20 : 90 + 7 * (i % 13)] for i in range(60)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    start = [sys.executable, "-m", "penstock.app.cli.main"]
    if resume:
        return [*start, "resume", name]
    sets = [f"train.device={device}", f"storage.offsite={folder / ('uploads-' + name)}", *overrides]
    return [*start, "train", "recipe.py", "--run-dir", name, *(word for text in sets for word in ("--set", text))]


def environment(folder: Path, delay_us: int) -> dict[str, str]:
    path = os.pathsep.join((str(REPOSITORY / "src"), os.environ["PYTHONPATH"]))
    delays = {"STANDIN_DELAY_US": str(delay_us), "STANDIN_COPY_US": str(5 * delay_us)}
    homes = {name: str(folder / "home") for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME")}
    return os.environ | {"PYTHONPATH": path, "STANDIN_DELAY_SEED": str(delay_us)} | delays | homes


def left_alone(folder: Path, name: str, device: str, *overrides: str, resume: bool = False, delay_us: int = 0) -> None:
    words = command(folder, name, device, *overrides, resume=resume)
    done = subprocess.run(words, cwd=folder, env=environment(folder, delay_us), capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def least(folder: Path, name: str, *overrides: str) -> list[str]:
    """Trains in the smallest budgets that the planner accepts, with the state on NVMe; the overrides that say so."""
    budgets = {"gpu": "1MiB", "ram": "1MiB"}
    for _ in range(6):
        sets = [*overrides, *(f"budgets.{tier}={size}" for tier, size in budgets.items())]
        words = command(folder, name, "cuda", *sets)
        done = subprocess.run(words, cwd=folder, env=environment(folder, 0), capture_output=True, text=True)
        if done.returncode == 0:
            return sets
        asked = re.search(r"budgets\.(gpu|ram):.*? give at least (\w+)", done.stderr, re.S)
        assert asked, done.stderr[-3000:]
        budgets[asked[1]] = asked[2]
    raise AssertionError(f"{budgets} are refused, too")


def committed(run: Path) -> int:
    try:
        return int(json.loads((run / "state" / "manifest.json").read_text())["meta"]["step"])
    except FileNotFoundError:
        return -1


def rows(run: Path, name: str, *fields: str) -> dict[int, Any]:
    """Step -> fields of a file of rows; a step that was repeated has its last ones."""
    found = (json.loads(line) for line in (run / name).read_text().splitlines())
    return {row["step"]: [row[field] for field in fields] for row in found if "step" in row and fields[0] in row}


def result(run: Path) -> dict[str, Any]:
    """What a run leaves that a kill may not change."""
    samples = rows(run, "samples.jsonl", "samples")
    return {
        "digest": tiny.digest_of(run),
        "losses": rows(run, "metrics.jsonl", "loss", "grad_norm"),
        "validation": rows(run, "validation.jsonl", "loss"),
        "samples": {step: [one["text"] for one in found[0]] for step, found in samples.items()},
    }


@pytest.mark.parametrize(
    ("where", "dtype", "compile"),
    [(where, dtype, "off") for where in ("gpu", "nvme") for dtype in ("float32", "bfloat16")]
    + [("nvme", "bfloat16", "on")],
)
def test_a_run_that_is_killed_ends_as_if_it_had_not_been(where: str, dtype: str, compile: str, tmp_path: Path) -> None:
    overrides = [f"train.compute_dtype={dtype}", f"train.compile={compile}"]
    if where == "nvme":
        overrides = least(tmp_path, "whole", *overrides)
    else:
        left_alone(tmp_path, "whole", "cuda", *overrides)
    expected = result(tmp_path / "whole")
    assert sorted(expected["losses"]) == list(range(1, STEPS + 1))
    assert sorted(expected["samples"]) == [2, 4, 6, 8]
    run, chance = tmp_path / "killed", random.Random(dtype + where)
    for seed in (1, 2):
        words = command(tmp_path, "killed", "cuda", *overrides, resume=run.exists())
        env = environment(tmp_path, 500 * seed)
        process = subprocess.Popen(words, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        try:
            target, deadline = 2 * seed, time.monotonic() + 300
            while committed(run) < target:
                assert process.poll() is None, process.communicate()[1].decode()[-3000:]
                assert time.monotonic() < deadline
                time.sleep(0.01)
            time.sleep(chance.random() * 0.3)
            process.send_signal(signal.SIGKILL)
        finally:
            process.kill()
            process.communicate()
    left_alone(tmp_path, "killed", "cuda", resume=True, delay_us=300)
    assert result(run) == expected
    assert len(list((tmp_path / "uploads-killed").iterdir())) >= 2
    if dtype == "float32":
        left_alone(tmp_path, "cpu", "cpu", *overrides)
        on_cpu = result(tmp_path / "cpu")
        for step, (loss, norm) in on_cpu["losses"].items():
            assert expected["losses"][step] == [pytest.approx(loss, rel=1e-5), pytest.approx(norm, rel=1e-3)], step
        assert expected["samples"] == on_cpu["samples"]
