"""The command line around the real engine: a tiny model, trained, stopped, resumed, exported and sampled."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli_process import REPOSITORY, wait_until

from app.recipe import load_recipe

RECIPE = """
from app.recipe import AfterConfig, Recipe
from engine.config import BudgetConfig, DataConfig, ModelConfig, StorageConfig, TrainConfig

recipe = Recipe(
    name="tiny",
    model=ModelConfig(num_layers=3, hidden_size=32, intermediate_size=64, num_heads=4, num_kv_heads=2, head_dim=8),
    data=DataConfig(source="text", path="corpus", tokenizer_vocab_size=300, sequence_length=64,
                    validation_documents=1),
    train=TrainConfig(steps=30, chunk_tokens=24, lr=1e-2, compile="off", validate_every=5, validation_sequences=3),
    budgets=BudgetConfig(gpu="512KiB", ram="1MiB", nvme="64MiB"),
    storage=StorageConfig(part_bytes="64KiB", checkpoint_every=5),
    after=AfterConfig(export=True, sample_prompt="def ", sample_tokens=8),
)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs")
    (path / "tiny.py").write_text(RECIPE)
    (path / "corpus").mkdir()
    for name in ("recipe", "rundir", "launch"):
        (path / "corpus" / f"{name}.txt").write_text((REPOSITORY / "app" / f"{name}.py").read_text())
    return path


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "app.cli", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "COLUMNS": "100"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(folder: Path, *arguments: str) -> str:
    process = start(folder, *arguments)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out


def losses(run_path: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return {line["step"]: line["loss"] for line in lines}


def validations(run_path: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (run_path / "validation.jsonl").read_text().splitlines()]
    assert all(set(line) == {"step", "loss", "tokens", "seconds", "time"} for line in lines)
    return [(line["step"], line["loss"]) for line in lines]


@pytest.fixture(scope="module")
def whole_run(folder: Path) -> tuple[Path, str]:
    return folder / "whole", run(folder, "train", "tiny.py", "--run-dir", "whole")


def test_a_run_leaves_every_figure(whole_run: tuple[Path, str]) -> None:
    path, out = whole_run
    summary = json.loads((path / "summary.json").read_text())
    for line, begin in zip(
        out.splitlines(),
        (
            "run directory whole",
            "model: qwen3, ",
            "data: 3 documents, ",
            "plan: weights in ",
            "step 1 of 30  loss ",
            "step 10 of 30  loss ",
            "step 20 of 30  loss ",
            "trained to step 30, ",
            f"{summary['tokens_per_s']:,.0f} tokens/s, ",
            "exported to whole/export",
            "sample, 8 tokens by transformers behind the prompt: 'def ",
            "look closer: penstock watch whole; ",
        ),
        strict=True,
    ):
        assert line.startswith(begin)
    assert load_recipe(path.parent / "tiny.py").train.steps == len(losses(path)) == 30
    for tier in ("gpu", "ram", "nvme"):
        assert 0 < summary["tiers"][tier]["peak_bytes"] <= summary["tiers"][tier]["budget_bytes"]
    assert set(summary["lanes"]) == {"nvme_read", "h2d", "compute", "d2h", "optimizer", "nvme_write"}
    assert summary["last_loss"] < summary["first_loss"]
    measured = validations(path)
    assert [step for step, _ in measured] == [5, 10, 15, 20, 25, 30]
    last, best = measured[-1][1], min(loss for _, loss in measured)
    assert summary["validation_loss"] == {"last": last, "best": best, "best_step": {v: k for k, v in measured}[best]}
    assert last < measured[0][1]
    assert f"validation loss {last:.4f} (best " in out
    plan = json.loads((path / "plan.json").read_text())["run"]
    assert plan["validations"] == 6
    assert plan["validation_s"] > 0
    spans = [json.loads(line) for line in (path / "spans.jsonl").read_text().splitlines()]
    for lane, figures in summary["lanes"].items():
        own = [span for span in spans if span["lane"] == lane]
        assert sum(span["bytes"] for span in own) == figures["bytes"]
        assert all(0 <= span["start_s"] <= span["end_s"] for span in own)
    assert json.loads((path / "status.json").read_text())["state"] == "finished"


def test_trace_of_a_run(whole_run: tuple[Path, str]) -> None:
    path, _ = whole_run
    run(path.parent, "trace", "whole", "-o", "trace.json")
    events = json.loads((path.parent / "trace.json").read_text())["traceEvents"]
    assert {event["cat"] for event in events if event["ph"] == "X"} >= {"nvme_read", "compute", "nvme_write"}


def test_a_stopped_run_resumes_to_the_same_losses_and_export(whole_run: tuple[Path, str]) -> None:
    path, _ = whole_run
    again = path.parent / "again"
    process = start(path.parent, "train", "tiny.py", "--run-dir", "again")
    wait_until(lambda: (again / "metrics.jsonl").exists(), timeout_s=60)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "stopped after step" in out
    assert 0 < len(losses(again)) < 30
    run(path.parent, "resume", "again")
    assert losses(again) == losses(path)
    assert validations(again) == validations(path)
    assert (again / "export" / "model.safetensors").read_bytes() == (path / "export" / "model.safetensors").read_bytes()


def test_check_exit_codes(tmp_path: Path) -> None:
    for model_type, code in (("qwen3", 0), ("t5", 1), ("nonsense", 2)):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        process = start(tmp_path, "check", "config.json", "--json")
        out, err = process.communicate(timeout=120)
        assert process.returncode == code, err
        if code == 2:
            assert err.startswith("error: config.json: unknown architecture 'nonsense'")
            continue
        result = json.loads(out)
        assert list(result) == ["model_type", "ok", "max_rel_error", "worst_parameter", "reason"]
        assert (result["model_type"], result["ok"]) == (model_type, code == 0)
        assert (result["reason"] is None) == (code == 0)
