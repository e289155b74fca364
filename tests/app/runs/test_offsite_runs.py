"""Runs whose machine is lost: they go on from the bucket as from the drive, to the bit; and what is refused."""

import itertools
import json
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import tiny
from cli_process import REAL, Cli, done, is_running, json_lines, refusal, steps, wait_until
from model_folders import as_users_have_it
from recipe_texts import TINY, recipe_text, tiny_recipe
from s3_server import BUCKET, KEYS, S3, serving

import penstock
from penstock.app.cli.main import main
from penstock.app.runs.checkpoints import committed_step
from penstock.app.runs.directory import read_info
from penstock.storage.generations.checkpoints import checkpoint_names

ROOMY = {"gpu": "64MiB", "ram": "256MiB"}
NARROW = ("budgets.gpu=least", "budgets.ram=least")  # state that was in memory is on the drive


@pytest.fixture(scope="module")
def server() -> Iterator[S3]:
    with serving() as found:
        yield found


@pytest.fixture
def s3(server: S3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> S3:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    server.proxy.faults.clear()
    server.proxy.always = None
    monkeypatch.chdir(tmp_path)
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a.txt").write_text("Water comes down the pipe, and the wheel turns.\n" * 60)
    (tmp_path / "disk").mkdir()
    return server


_numbers = itertools.count()


def new_place() -> str:
    return f"s3://{BUCKET}/app/{next(_numbers)}"


def below(place: str) -> str:
    """The prefix of a place's keys."""
    return place.removeprefix(f"s3://{BUCKET}/")


def recipe(**changes: dict[str, Any]) -> penstock.Recipe:
    """Six steps on a folder of texts."""
    train = {"steps": 6, "lr": 1e-2} | changes.pop("train", {})
    return tiny_recipe(train=train, budgets=ROOMY, **changes)


def stop_at(step: int) -> Any:
    def on_step(metrics: penstock.StepMetrics) -> None:
        if metrics.step == step:
            raise penstock.StopTraining

    return on_step


def lost(step: int, **storage: Any) -> str:
    """The place of a run in the folder `lost` that was stopped at a step; every second one is uploaded there."""
    place = new_place()
    storage = {"offsite": place, "offsite_every": 2} | storage
    penstock.train(recipe(storage=storage), run_dir="lost", on_step=stop_at(step))
    return place


def losses(run: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in json_lines(run / "metrics.jsonl")]


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command prints, in this process."""
    capsys.readouterr()
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def listed_at(place: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The checkpoints at a place, as a command prints them."""
    return [line.split()[0] for line in said(capsys, "checkpoint", place).splitlines()]


@pytest.mark.parametrize("kind", ["s3", pytest.param("folder", marks=pytest.mark.long)])
def test_the_machine_is_lost(s3: S3, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Uninterrupted, resumed from the drive, resumed from the place where nothing else is left: the same bits."""
    place = new_place() if kind == "s3" else str(tmp_path / "disk" / "run")
    whole = penstock.train(recipe(), run_dir="whole")
    run = penstock.train(recipe(storage={"offsite": place, "offsite_every": 2}), run_dir="lost", on_step=stop_at(5))
    assert committed_step(run) == 5
    assert not any(name.startswith("offsite-") for name in checkpoint_names(run / "state"))
    secrets = [KEYS["AWS_ACCESS_KEY_ID"].encode(), KEYS["AWS_SECRET_ACCESS_KEY"].encode()]
    kept = [path.read_bytes() for path in run.rglob("*") if path.is_file()]
    kept += [s3.get(key) for key in s3.keys(below(place))] if kind == "s3" else []
    assert not any(secret in content for secret in secrets for content in kept)
    drive = shutil.copytree(run, tmp_path / "drive")
    shutil.rmtree(run)
    shutil.rmtree(tmp_path / "corpus")
    drives = [str(tmp_path / name) for name in ("d0", "d1")]
    overrides = [*NARROW, f"storage.nvme={json.dumps(drives)}", "storage.offsite=none"]
    found = penstock.resume(place, run_dir="found", overrides=overrides)
    penstock.resume(drive, overrides=["storage.offsite=none"])
    for resumed in (found, drive):
        assert (losses(resumed), tiny.digest_of(resumed)) == (losses(whole), tiny.digest_of(whole))
    assert all(any(Path(drive, "found").glob("*/*/[01]/c.*.0")) for drive in drives)
    assert (found / "state" / "manifest.json").exists()
    assert not any(found.glob("state/*/master"))
    listed = listed_at(place, capsys)
    assert listed in (["step-000002", "step-000004"], ["step-000002", "step-000005"]), "the newest there was"


@pytest.mark.long
def test_the_run_that_goes_on_uploads_there_again(s3: S3, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place, told = lost(3, offsite_keep=3), list[str]()
    found = penstock.resume(place, on_message=told.append)
    assert found.parent == tmp_path / "runs"
    assert any(line.startswith(f"storage.offsite: step 6 is at {place}: ") for line in told)
    assert listed_at(place, capsys) == ["step-000002", "step-000004", "step-000006"]
    assert "has continued this run 'tiny'" in refusal(capsys, "resume", str(tmp_path / "lost"))
    again = penstock.resume(f"{place}/step-000004", run_dir="again", overrides=["storage.offsite=none"])
    assert tiny.digest_of(again) == tiny.digest_of(found)


@pytest.mark.long
def test_what_the_recipe_names_elsewhere_comes_along(s3: S3, tmp_path: Path) -> None:
    """The model's folder and the data are gone: their small files serve, and the weights are the run's own."""
    place = new_place()
    folder = as_users_have_it(tmp_path / "model", "llama", tied=True)
    (tmp_path / "model" / "private.txt").write_text("nobody's business")
    model = dict.fromkeys(TINY["model"]) | {"path": str(folder)}
    whole = penstock.train(recipe(model=model), run_dir="whole")
    storage = {"offsite": place, "offsite_every": 3}
    penstock.train(recipe(model=model, storage=storage), run_dir="lost", on_step=stop_at(3))
    for name in ("lost", "model", "corpus"):
        shutil.rmtree(tmp_path / name)
    found = penstock.resume(place, overrides=["storage.offsite=none"])
    assert tiny.digest_of(found) == tiny.digest_of(whole)
    kept = sorted(path.name for path in (found / "inputs" / "model").iterdir())
    assert "config.json" in kept
    assert not {"model.safetensors", "private.txt", "README.md"} & set(kept)
    penstock.export(found, "exported")
    assert (tmp_path / "exported" / "model.safetensors").exists()


def test_a_checkpoint_goes_there_by_hand_and_two_runs_have_no_place_together(
    s3: S3, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place, other = new_place(), lost(2)
    run = penstock.train(recipe(), run_dir="run", on_step=stop_at(2))
    capsys.readouterr()
    assert main(["checkpoint", "run", "mine", "--to", place]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("checkpoint mine: step 2, ")
    assert printed.out.endswith(f"at {place}; to continue from there: penstock resume {place}/mine\n")
    assert not any(secret in printed.err + printed.out for secret in KEYS.values() if secret != "us-east-1")
    assert "mine" in checkpoint_names(run / "state")
    again = said(capsys, "checkpoint", "run", "mine", "--to", place)
    assert again == f"checkpoint mine: step 2 is already at {place}\n"
    assert said(capsys, "checkpoint", place).startswith("mine  step 2, generation ")
    assert "give the checkpoint's NAME" in refusal(capsys, "checkpoint", "run", "--to", place)
    assert "give the NAME of the checkpoint to delete" in refusal(capsys, "checkpoint", "run", "--delete")
    found = penstock.resume(f"{place}/mine", run_dir="found")
    assert losses(found)[:2] == losses(run)
    assert "is a run on this machine" in refusal(capsys, "resume", "run", "--run-dir", "other")
    (tmp_path / "tiny.py").write_text(recipe_text(budgets=ROOMY, storage={"offsite": other}))
    error = refusal(capsys, "train", "tiny.py", "--run-dir", "second")
    assert error.startswith(f"error: storage.offsite: {other}: holds run 'tiny' (last written by ")
    assert error.endswith(f"resume that run: penstock resume {other}\n")
    assert not (tmp_path / "second").exists()
    assert "holds run 'tiny'" in refusal(capsys, "checkpoint", "run", "x", "--to", other)
    assert "x" not in checkpoint_names(run / "state")


@pytest.mark.long
def test_of_a_running_run(s3: S3, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli = Cli(tmp_path, recipe_text(train={"steps": 100_000}, budgets=ROOMY), REAL)
    process = cli.start("train", "tiny.py", "--run-dir", "run")
    try:
        wait_until(lambda: (tmp_path / "run" / "metrics.jsonl").exists())
        place = new_place()
        assert said(capsys, "checkpoint", "run", "live", "--to", place).startswith("checkpoint live: step ")
    finally:
        process.send_signal(signal.SIGTERM)
        done(process)
    assert listed_at(place, capsys) == ["live"]


def test_bad_places_are_refused_before_anything_is_made(
    s3: S3, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for place, message in (
        ("s3://no-such-bucket-here/run", "the bucket does not exist; create it, or correct its name"),
        ("/nowhere/at/all", "/nowhere/at does not exist: is the disk mounted? Mount it, or choose another folder"),
    ):
        (tmp_path / "tiny.py").write_text(recipe_text(budgets=ROOMY, storage={"offsite": place}))
        assert message in refusal(capsys, "train", "tiny.py", "--run-dir", "run")
        assert not (tmp_path / "run").exists()


def test_a_failed_start_gives_the_place_back(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    place = new_place()
    monkeypatch.setattr("penstock.engine.train.train_step", Mock(side_effect=AssertionError))
    with pytest.raises(AssertionError):
        penstock.train(recipe(storage={"offsite": place}), run_dir="run")
    assert s3.keys(below(place)) == []


@pytest.mark.long
def test_training_goes_on_while_the_place_refuses(s3: S3, tmp_path: Path) -> None:
    """Credentials that stop working: a line for each upload that was due, which names the newest there, and no more."""
    place, told = new_place(), list[str]()
    prefix = below(place)

    def on_step(metrics: penstock.StepMetrics) -> None:
        if metrics.step == 3:
            index = f"{prefix}/penstock.json"
            wait_until(lambda: index in s3.keys(prefix) and b'"name": "step-000002"' in s3.get(index))
            s3.proxy.always = ("PUT", "", "403")

    storage = {"offsite": place, "offsite_every": 2, "checkpoint_every": 1}
    run = penstock.train(recipe(storage=storage), run_dir="run", on_step=on_step, on_message=told.append)
    s3.proxy.always = None
    assert read_info(run).state == "finished"
    failed = [line for line in told if "was not uploaded" in line]
    assert 1 <= len(failed) <= 3, told
    newest = "Step 2 is the newest there; it will be tried again with the next upload"
    for line in failed:
        assert re.fullmatch(f"storage.offsite: step .*the credentials were refused.*{newest}", line)
    assert not any(name.startswith("offsite-") for name in checkpoint_names(run / "state"))


@pytest.mark.long
def test_killed_while_it_uploads(s3: S3, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The upload is begun anew by whoever resumes, and the newest whole one is there all the time."""
    place = new_place()
    prefix = below(place)
    storage = {"offsite": place, "offsite_every": 2, "offsite_bandwidth": "200KiB"}
    cli = Cli(tmp_path, recipe_text(train={"steps": 1000}, budgets=ROOMY, storage=storage), REAL)
    process = cli.start("train", "tiny.py", "--run-dir", "run")
    wait_until(lambda: sum("/c." in key for key in s3.keys(prefix)) > 3)
    children = psutil.Process(process.pid).children()
    (mover,) = [child.pid for child in children if "penstock.storage.offsite.mover" in child.cmdline()]
    process.kill()
    process.communicate()
    wait_until(lambda: not is_running(mover))
    run = tmp_path / "run"
    left = [name for name in checkpoint_names(run / "state") if name.startswith("offsite-")]
    assert len(left) == 1
    assert "holds no complete generation yet" in cli.run("resume", place, code=2).stderr
    last = max(6, committed_step(run) or 0)
    told: list[str] = []
    penstock.resume(run, overrides=[f"train.steps={last}", "storage.offsite_bandwidth=none"], on_message=told.append)
    names = listed_at(place, capsys)
    assert names[-1] == f"step-{last:06}"
    folders = {key.removeprefix(f"{prefix}/").split("/")[0] for key in s3.keys(prefix)}
    assert len(folders) == len(names) + 2, "index, shared and what is listed: nothing of the broken upload"
    assert not any(name.startswith("offsite-") for name in checkpoint_names(run / "state"))


@pytest.mark.long
def test_killed_while_it_fetches(s3: S3, tmp_path: Path) -> None:
    """Nothing half is a run, and a second try goes on where the first was."""
    place, cli = lost(2), Cli(tmp_path, program=REAL)
    s3.proxy.always = ("GET", "c.", "delayed")
    process = cli.start("resume", place, "--set", "storage.offsite=none")
    wait_until(lambda: any((tmp_path / "runs").glob("*/state/*/*/0/c.*.0")))
    process.kill()
    process.communicate()
    s3.proxy.always = None
    assert cli.run("runs").stdout.count("tiny") == 0
    (half,) = (tmp_path / "runs").iterdir()
    assert not (half / "recipe.json").exists()
    assert penstock.resume(place, overrides=["storage.offsite=none"]) == half
    assert steps(half) == [1, 2, 3, 4, 5, 6]
    assert read_info(half).state == "finished"


@pytest.mark.long
def test_damage_on_the_way_makes_no_run(s3: S3, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = lost(2)
    key = next(key for key in s3.keys(below(place)) if key.endswith("master/c.0.0"))
    content = s3.get(key)
    s3.put(key, content[:-1] + bytes([content[-1] ^ 1]))
    capsys.readouterr()
    assert main(["resume", place, "--run-dir", "new"]) == 2
    assert "the manifest records" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "new" / "recipe.json").exists()
