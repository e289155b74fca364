"""Checkpoints, scrub and a resume with other means, by the real command line on a real tiny run."""

import json
import signal
from pathlib import Path

import pytest
from cli_process import REAL, Cli, done, json_lines, refusal, steps, wait_until
from recipe_texts import recipe_text

from penstock.app.checkpoints import checkpoint_steps, committed_step, export_folder
from penstock.app.cli import main
from penstock.app.rundir import read_info, read_recipe
from penstock.storage.checkpoints import list_checkpoints
from penstock.storage.safetensors_io import CheckpointReader

RECIPE = recipe_text(
    model={"num_layers": 3, "vocab_size": 300},
    data={"source": "random", "max_documents": 40},
    train={"steps": 100_000, "lr": 1e-3},
    storage={"checkpoint_every": 5, "keep_good": None},
)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run `run` that was asked for checkpoint `live` while it ran, and then stopped."""
    folder = tmp_path_factory.mktemp("runs")
    process = Cli(folder, RECIPE, REAL).start("train", "tiny.py", "--run-dir", "run")
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


def test_checkpoints_of_a_stopped_run(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = stopped / "run"
    assert main(["checkpoint", str(run), "at-{step}"]) == 0
    assert capsys.readouterr().out == f"checkpoint at-{last_step(run)}: step {last_step(run):,}\n"
    assert main(["checkpoint", str(run), f"at-{last_step(run)}", "--delete"]) == 0
    assert main(["checkpoint", str(run), "late"]) == 0
    assert "checkpoint late: step" in capsys.readouterr().out
    live, late = list_checkpoints(run / "state")
    assert (live.name, late.name) == ("live", "late")
    assert 0 < live.meta["step"] < late.meta["step"] == last_step(run)
    assert main(["checkpoint", str(run)]) == 0
    assert f"live  step {live.meta['step']:,}, generation {live.generation}" in capsys.readouterr().out
    assert main(["checkpoint", str(run), "late", "--delete"]) == 0
    assert [info.name for info in list_checkpoints(run / "state")] == ["live"]
    assert checkpoint_steps(run) == [("live", live.meta["step"])]
    assert committed_step(run) == last_step(run)


def test_steps_of_damaged_manifests_are_unknown(tmp_path: Path) -> None:
    assert (checkpoint_steps(tmp_path), committed_step(tmp_path)) == ([], None)
    for name, text in (("a", "{"), ("b", "[1]"), ("c", '{"meta": {"step": "x"}}'), ("d", '{"meta": {"step": 3}}')):
        folder = tmp_path / "state" / "checkpoints" / name
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(text)
        (tmp_path / "state" / "manifest.json").write_text(text)
    assert (checkpoint_steps(tmp_path), committed_step(tmp_path)) == ([("d", 3)], 3)


def test_bad_names_are_refused(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("step-000010", "step-{step}", "at-{number}", "a/b", "..", ".hidden", "", "nul\0"):
        refusal(capsys, "checkpoint", str(stopped / "run"), name)
    assert [info.name for info in list_checkpoints(stopped / "run" / "state")] == ["live"]


def test_scrub_finds_the_flipped_bit(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = stopped / "run"
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


def test_export_of_a_checkpoint(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = stopped / "run"
    assert main(["export", str(run), str(stopped / "now")]) == 0
    assert main(["export", str(run), str(stopped / "then"), "--checkpoint", "live"]) == 0
    message = refusal(capsys, "export", str(run), str(stopped / "never"), "--checkpoint", "lively")
    assert "has no checkpoint 'lively'; it has live" in message
    assert_other_weights(stopped / "now", stopped / "then")


def test_a_resume_goes_back_and_changes_budgets_and_drives(
    stopped: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, at = stopped / "run", list_checkpoints(stopped / "run" / "state")[0].meta["step"]
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


def test_a_free_folder_for_an_export_is_found(tmp_path: Path) -> None:
    assert export_folder(tmp_path, 20) == tmp_path / "export"
    for name in ("export", "export-step-20", "export-step-20-2"):
        (tmp_path / name).mkdir()
        assert export_folder(tmp_path, 20) == tmp_path / name, "an empty one will do"
        (tmp_path / name / "config.json").touch()
    assert export_folder(tmp_path, 20) == tmp_path / "export-step-20-3"
    assert export_folder(tmp_path, 22) == tmp_path / "export-step-22"
