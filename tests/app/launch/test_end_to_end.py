"""The command line around the real engine: a tiny model, trained, stopped, resumed, exported and sampled; checkpoints,
scrub and a resume with other means."""

import dataclasses
import json
import signal
from pathlib import Path

import pytest
from cli_process import REAL, Cli, documented, done, json_lines, refusal, steps, wait_until
from real_runs import make_root
from recipe_texts import recipe_text

from penstock.app.cli.main import main
from penstock.app.recipes.recipe import load_recipe
from penstock.app.runs.checkpoints import checkpoint_steps, committed_step, export_folder
from penstock.app.runs.directory import read_info, read_recipe
from penstock.engine.events import Recall, Spike, StepDocument
from penstock.storage.files.safetensors import CheckpointReader
from penstock.storage.generations.checkpoints import list_checkpoints

Captured = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
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
    names = {"step", "loss", "accuracy", "recall", "tokens", "seconds", "time", "measured"}
    assert all(set(line) == names for line in lines)
    return [(line["step"], line["loss"]) for line in lines]


@pytest.fixture(scope="module")
def whole_run(cli: Cli) -> tuple[Path, str]:
    return cli.folder / "whole", cli.run("train", "tiny.py", "--run-dir", "whole").stdout


def test_a_run_leaves_every_figure(whole_run: tuple[Path, str]) -> None:
    path, out = whole_run
    summary = json.loads((path / "summary.json").read_text())
    begins = ["run directory whole", "model: qwen3, ", "data: 3 documents, ", "plan: weights in "]
    begins += ["step 1 of 16  loss ", "step 6 of 16  loss ", "step 8: 'def ' -> ", "step 8: 'import os' -> "]
    begins += ["step 11 of 16  loss ", "step 16: 'def ' -> ", "step 16: 'import os' -> ", "trained to step 16, "]
    begins += [f"mean {summary['mean_tokens_per_s']:,.0f} tokens/s, ", "exported to whole/export"]
    begins += ["sample, at most 8 tokens by transformers after the prompt: 'def "]
    begins += ["look closer with: penstock watch whole; "]
    lines = [line for line in out.splitlines() if not line.startswith("  ")]  # an item that took long on a slow machine
    assert all(line.startswith(begin) for line, begin in zip(lines, begins, strict=True)), out
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


def test_the_page_names_every_field_that_a_run_writes(whole_run: tuple[Path, str]) -> None:
    """The tables of lines that are always whole name no others."""
    lines = ("metrics.jsonl", "validation.jsonl", "samples.jsonl", "spans.jsonl", "log.jsonl")
    written = {name: set().union(*json_lines(whole_run[0] / name)) for name in lines}
    written |= {name: set(json.loads((whole_run[0] / name).read_text())) for name in ("status.json", "summary.json")}
    written["validation.jsonl"] |= {field.name for field in dataclasses.fields(Recall)}
    written["spikes.jsonl"] = {field.name for kind in (Spike, StepDocument) for field in dataclasses.fields(kind)}
    assert not {name: missing for name, fields in written.items() if (missing := fields - documented(name))}
    for name in ("metrics.jsonl", "spans.jsonl"):
        assert documented(name, table=True) == written[name]


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


def test_check_exit_codes(tmp_path: Path, capsys: Captured) -> None:
    config = tmp_path / "config.json"
    for model_type, code, cut in (("qwen3", 0, "chunks"), ("mamba", 0, "documents"), ("t5", 1, None)):
        config.write_text(json.dumps({"model_type": model_type}))
        assert main(["check", str(config), "--json"]) == code
        result = json.loads(capsys.readouterr().out)
        assert list(result) == ["model_type", "ok", "max_rel_error", "worst_parameter", "reason", "cut"]
        assert (result["model_type"], result["ok"], result["cut"]) == (model_type, code == 0, cut)
        assert (result["reason"] is None) == (code == 0)


ENDLESS = recipe_text(
    model={"num_layers": 3, "vocab_size": 300},
    data={"source": "random", "path": None, "max_documents": 40},
    train={"steps": 100_000, "lr": 1e-3},
    storage={"checkpoint_every": 5, "keep_good": None},
)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run `run` that was asked for checkpoint `live` while it ran, and then stopped."""
    folder = tmp_path_factory.mktemp("runs")
    process = Cli(folder, ENDLESS, REAL).start("train", "tiny.py", "--run-dir", "run")
    run = folder / "run"
    wait_until(lambda: (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size > 0)
    try:
        assert main(["checkpoint", str(run), "live"]) == 0
        assert main(["checkpoint", str(run), "live"]) == 2, "the name is taken"
        assert main(["scrub", str(run)]) == 2, "the run is running"
        assert main(["resume", str(run)]) == 2, "it is running already"
        assert main(["pause", str(run)]) == 0
        wait_until(lambda: read_info(run).state == "paused")
        paused_at = last_step(run)
        assert committed_step(run) == paused_at
        assert main(["resume", str(run), "--set", "train.steps=5"]) == 2, "stop it first"
        assert main(["checkpoint", str(run), "paused"]) == 0
        assert main(["export", str(run), str(folder / "paused-export")]) == 0
        assert last_step(run) == paused_at
        _, export, paused = checkpoint_steps(run)
        assert export[0].startswith("export-")
        assert (export[1], paused) == (paused_at, ("paused", paused_at))
        assert main(["resume", str(run)]) == 0
        wait_until(lambda: last_step(run) > paused_at + 2)
        assert main(["export", str(run), str(folder / "running-export")]) == 0
        assert main(["export", str(run), str(folder / "running-export")]) == 2, "there is something already"
    finally:
        process.send_signal(signal.SIGTERM)
        said = done(process)
    assert "checkpoint live: step" in said.stdout
    for name in [name for name, _ in checkpoint_steps(run) if name != "live"]:
        assert main(["checkpoint", str(run), name, "--delete"]) == 0
    return folder


def assert_other_weights(folder: Path, other: Path) -> None:
    found, others = (CheckpointReader(each).read("model.layers.0.mlp.up_proj.weight") for each in (folder, other))
    assert found.shape == others.shape
    assert not found.equal(others)


@pytest.mark.long
def test_a_live_run_is_exported(stopped: Path) -> None:
    assert_other_weights(stopped / "paused-export", stopped / "running-export")
    log = [line["text"] for line in json_lines(stopped / "run" / "log.jsonl")]
    said = ("checkpoint live: step", "paused; the step is committed", "continuing", "stopping after", "stopped after")
    for text in said:
        assert any(text in line for line in log), text


def last_step(run: Path) -> int:
    return steps(run)[-1]


def test_checkpoints_of_a_stopped_run(stopped: Path, capsys: Captured) -> None:
    run = stopped / "run"
    assert main(["checkpoint", str(run), "at-{step}"]) == 0
    assert capsys.readouterr().out == f"checkpoint at-{last_step(run)}: step {last_step(run):,}\n"
    assert main(["checkpoint", str(run), f"at-{last_step(run)}", "--delete"]) == 0
    assert main(["checkpoint", str(run), "late"]) == 0
    assert "checkpoint late: step" in capsys.readouterr().out
    found = list_checkpoints(run / "state")
    assert list(found) == ["live", "late"]
    live, late = found.values()
    assert 0 < live.meta["step"] < late.meta["step"] == last_step(run)
    assert main(["checkpoint", str(run)]) == 0
    assert f"live  step {live.meta['step']:,}, generation {live.generation}" in capsys.readouterr().out
    assert main(["checkpoint", str(run), "late", "--delete"]) == 0
    assert list(list_checkpoints(run / "state")) == ["live"]
    assert checkpoint_steps(run) == [("live", live.meta["step"])]
    assert committed_step(run) == last_step(run)
    for name in ("step-000010", "step-{step}", "at-{number}", "a/b", "..", ".hidden", "", "nul\0"):
        refusal(capsys, "checkpoint", str(run), name)
    assert list(list_checkpoints(run / "state")) == ["live"]


def test_a_checkpoint_is_exported_and_scrub_finds_its_flipped_bit(stopped: Path, capsys: Captured) -> None:
    run = stopped / "run"
    assert main(["export", str(run), str(stopped / "now")]) == 0
    assert main(["export", str(run), str(stopped / "then"), "--checkpoint", "live"]) == 0
    message = refusal(capsys, "export", str(run), str(stopped / "never"), "--checkpoint", "lively")
    assert "has no checkpoint 'lively'; it has live" in message
    assert_other_weights(stopped / "now", stopped / "then")
    assert main(["scrub", str(run)]) == 0
    assert "last generation and 1 checkpoint verified: " in capsys.readouterr().out
    victim = next((run / "state" / "checkpoints" / "live").rglob("c.0.0"))
    whole = victim.read_bytes()
    victim.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    message = refusal(capsys, "scrub", str(run))
    assert victim.name in message
    assert "checksum mismatch" in message
    victim.write_bytes(whole)
    assert main(["scrub", str(run)]) == 0


def test_a_resume_goes_back_and_changes_budgets_and_drives(stopped: Path, capsys: Captured, monkeypatch: Patch) -> None:
    run, at = stopped / "run", next(iter(list_checkpoints(stopped / "run" / "state").values())).meta["step"]
    monkeypatch.chdir(stopped)
    assert "model: cannot be changed in an existing" in refusal(capsys, "resume", "run", "--set", "model.num_layers=4")
    refusal(capsys, "resume", "run", "--set", f"train.steps={at + 3}", "--set", "storage.nvme=/proc/none")
    assert read_recipe(run).train.steps == 100_000, "a resume that is refused changes nothing"
    changes = [f"train.steps={at + 3}", "budgets.gpu=1GiB", "budgets.ram=1GiB", 'storage.nvme=["one", "two"]']
    overrides = [word for change in changes for word in ("--set", change)]
    assert main(["resume", "run", "--checkpoint", "live", *overrides]) == 0
    assert last_step(run) == at + 3
    recipe = read_recipe(run)
    assert (recipe.train.steps, recipe.budgets.ram) == (at + 3, "1GiB")
    assert recipe.storage.nvme == [str(stopped / "one"), str(stopped / "two")]
    drives = json.loads((run / "summary.json").read_text())["drives"]
    written = [drive["path"] for drive in drives if drive["bytes_written"]]
    assert written[:2] == [str(stopped / name / "run") for name in ("one", "two")]
    assert main(["scrub", "run"]) == 0
    assert main(["lanes", "run", "--steps", f"{at + 2}:{at + 3}"]) == 0
    assert "exposed I/O" in capsys.readouterr().out


def test_steps_of_damaged_manifests_are_unknown_and_a_free_folder_for_an_export_is_found(tmp_path: Path) -> None:
    assert (checkpoint_steps(tmp_path), committed_step(tmp_path)) == ([], None)
    for name, text in (("a", "{"), ("b", "[1]"), ("c", '{"meta": {"step": "x"}}'), ("d", '{"meta": {"step": 3}}')):
        folder = tmp_path / "state" / "checkpoints" / name
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(text)
        (tmp_path / "state" / "manifest.json").write_text(text)
    assert (checkpoint_steps(tmp_path), committed_step(tmp_path)) == ([("d", 3)], 3)
    assert export_folder(tmp_path, 20) == tmp_path / "export"
    for name in ("export", "export-step-20", "export-step-20-2"):
        (tmp_path / name).mkdir()
        assert export_folder(tmp_path, 20) == tmp_path / name, "an empty one will do"
        (tmp_path / name / "config.json").touch()
    assert export_folder(tmp_path, 20) == tmp_path / "export-step-20-3"
    assert export_folder(tmp_path, 22) == tmp_path / "export-step-22"
