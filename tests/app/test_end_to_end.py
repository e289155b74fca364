"""The command line around the real engine: a tiny model, trained, stopped, resumed, exported and sampled."""

import json
import signal
from pathlib import Path

import pytest
from cli_process import REAL, Cli, done, json_lines, refusal, steps, wait_until
from real_runs import make_root
from recipe_texts import recipe_text

from penstock.app.cli import main
from penstock.app.recipe import load_recipe

RECIPE = recipe_text(
    model={"num_layers": 3},
    data={"validation_documents": 1},
    train={
        **{"steps": 16, "lr": 1e-2, "validate_every": 4, "validation_sequences": 3},
        **{"activation_checkpointing": "auto", "kv_window": "auto", "calibrate": True},
    },
    storage={"checkpoint_every": 5},
    samples={"every": 8, "prompts": ["def ", "import os"], "tokens": 4},
    after={"export": True, "sample_prompt": "def ", "sample_tokens": 8},
)


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Cli:
    folder = make_root(tmp_path_factory.mktemp("runs"))
    return Cli(folder, RECIPE, REAL)


def losses(run: Path) -> list[float]:
    lines = json_lines(run / "metrics.jsonl")
    assert steps(run) == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


def validations(run: Path) -> list[tuple[int, float]]:
    lines = json_lines(run / "validation.jsonl")
    assert all(set(line) == {"step", "loss", "accuracy", "recall", "tokens", "seconds", "time"} for line in lines)
    return [(line["step"], line["loss"]) for line in lines]


@pytest.fixture(scope="module")
def whole_run(cli: Cli) -> tuple[Path, str]:
    return cli.folder / "whole", cli.run("train", "tiny.py", "--run-dir", "whole").stdout


def test_a_run_leaves_every_figure(whole_run: tuple[Path, str]) -> None:
    path, out = whole_run
    summary = json.loads((path / "summary.json").read_text())
    begins = (
        "run directory whole",
        "model: qwen3, ",
        "data: 3 documents, ",
        "plan: weights in ",
        "step 1 of 16  loss ",
        "step 6 of 16  loss ",
        "step 8: 'def ' -> ",
        "step 8: 'import os' -> ",
        "step 11 of 16  loss ",
        "step 16: 'def ' -> ",
        "step 16: 'import os' -> ",
        "trained to step 16, ",
        f"mean {summary['mean_tokens_per_s']:,.0f} tokens/s, ",
        "exported to whole/export",
        "sample, at most 8 tokens by transformers after the prompt: 'def ",
        "look closer with: penstock watch whole; ",
    )
    assert all(line.startswith(begin) for line, begin in zip(out.splitlines(), begins, strict=True)), out
    assert load_recipe(path.parent / "tiny.py").train.steps == len(losses(path)) == 16
    for tier in ("gpu", "ram", "nvme"):
        assert 0 < summary["tiers"][tier]["peak_bytes"] <= summary["tiers"][tier]["budget_bytes"]
    assert set(summary["lanes"]) == {"nvme_read", "h2d", "compute", "d2h", "optimizer", "nvme_write"}
    assert summary["last_loss"] < summary["first_loss"]
    measured = validations(path)
    assert [step for step, _ in measured] == [4, 8, 12, 16]
    last, best = measured[-1][1], min(loss for _, loss in measured)
    assert summary["validation_loss"] == {"last": last, "best": best, "best_step": {v: k for k, v in measured}[best]}
    assert last < measured[0][1]
    assert f"validation loss {last:.4f} (best " in out
    plan = json.loads((path / "plan.json").read_text())["run"]
    assert plan["validations"] == 4
    assert plan["validation_s"] > 0
    written = json_lines(path / "samples.jsonl")
    assert [line["step"] for line in written] == [8, 16]
    assert all(len(line["samples"]) == 2 and line["seconds"] > 0 for line in written)
    assert summary["samples"] == {"first": written[0], "last": written[-1]}
    assert plan["samples"]["times"] == 2
    said = [line["text"] for line in json_lines(path / "log.jsonl")]
    assert f"step 16: 'def ' -> {written[-1]['samples'][0]['text']!r}" in said
    spans = json_lines(path / "spans.jsonl")
    for lane, figures in summary["lanes"].items():
        own = [span for span in spans if span["lane"] == lane]
        assert sum(span["bytes"] for span in own) == figures["bytes"]
        assert all(0 <= span["start_s"] <= span["end_s"] for span in own)
    assert json.loads((path / "status.json").read_text())["state"] == "finished"
    assert main(["trace", str(path), "-o", str(path / "trace.json")]) == 0
    events = json.loads((path / "trace.json").read_text())["traceEvents"]
    assert {event["cat"] for event in events if event["ph"] == "X"} >= {"nvme_read", "compute", "nvme_write"}


@pytest.mark.long
def test_a_stopped_run_resumes_to_the_same_losses_and_export(cli: Cli, whole_run: tuple[Path, str]) -> None:
    path, _ = whole_run
    again = cli.folder / "again"
    process = cli.start("train", "tiny.py", "--run-dir", "again")
    wait_until(lambda: (again / "metrics.jsonl").exists())
    process.send_signal(signal.SIGTERM)
    assert "stopped after step" in done(process).stdout
    assert 0 < len(losses(again)) < 16
    cli.run("resume", "again")
    assert losses(again) == losses(path)
    assert validations(again) == validations(path)
    texts = [[line["samples"] for line in json_lines(run / "samples.jsonl")] for run in (again, path)]
    assert texts[0] == texts[1]
    assert (again / "export" / "model.safetensors").read_bytes() == (path / "export" / "model.safetensors").read_bytes()


def test_check_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    for model_type, code in (("qwen3", 0), ("t5", 1)):
        config.write_text(json.dumps({"model_type": model_type}))
        assert main(["check", str(config), "--json"]) == code
        result = json.loads(capsys.readouterr().out)
        assert list(result) == ["model_type", "ok", "max_rel_error", "worst_parameter", "reason"]
        assert (result["model_type"], result["ok"]) == (model_type, code == 0)
        assert (result["reason"] is None) == (code == 0)
    config.write_text(json.dumps({"model_type": "nonsense"}))
    assert f"{config}: unknown architecture 'nonsense'" in refusal(capsys, "check", str(config), "--json")
