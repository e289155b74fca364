"""A run that fails before its first step has ended leaves nothing, and what can be seen early is refused early."""

import json
import os
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_run
import pytest
from cli_process import FAKE, done, refusal, started, wait_until
from nvme_state import make

from penstock.app import launcher
from penstock.app.cli import main
from penstock.app.launch import require_inputs
from penstock.app.recipe import to_json
from penstock.app.rundir import RunDir
from penstock.engine.config import DataConfig, ModelConfig, Recipe, StorageConfig, TrainConfig
from penstock.storage.errors import UserError
from penstock.tui.data.alerts import alerts
from penstock.tui.data.run_data import RunData

Patch = pytest.MonkeyPatch
RANDOM = DataConfig(source="random")
RECIPE = Recipe(name="tiny", model=ModelConfig(vocab_size=300), data=RANDOM, train=TrainConfig(steps=4))


@pytest.fixture
def trains(monkeypatch: Patch, tmp_path: Path) -> Patch:
    """A stand-in for the engine trains in this process, in a folder with the recipe tiny.json."""
    monkeypatch.setitem(sys.modules, "penstock.engine.train", SimpleNamespace(train=fake_run.train))
    monkeypatch.setenv("FAKE_STEP_S", "0.001")
    monkeypatch.chdir(tmp_path)
    Path("tiny.json").write_text(to_json(RECIPE))
    return monkeypatch


def test_nothing_is_left_of_a_failed_start(trains: Patch, capsys: pytest.CaptureFixture[str]) -> None:
    trains.setenv("FAKE_FAIL_AT", "1:user")
    for given in ([], ["--run-dir", "new/out"]):
        assert "loss is NaN" in refusal(capsys, "train", "tiny.json", *given)
        assert [path.name for path in Path().iterdir()] == ["tiny.json"]
    trains.setenv("FAKE_FAIL_AT", "1:bug")
    with pytest.raises(RuntimeError, match="a bug"):  # its traceback alone
        main(["train", "tiny.json"])
    assert [path.name for path in Path().iterdir()] == ["tiny.json"]


def test_a_folder_that_was_there_stays_as_it_was(trains: Patch, capsys: pytest.CaptureFixture[str]) -> None:
    trains.setenv("FAKE_FAIL_AT", "1:user")
    Path("empty").mkdir()
    refusal(capsys, "train", "tiny.json", "--run-dir", "empty")
    assert list(Path("empty").iterdir()) == []
    own = {"recipe.json": to_json(RECIPE), "output.log": "mine"}
    Path("own").mkdir()
    for name, text in own.items():
        Path("own", name).write_text(text)
    refusal(capsys, "train", "own/recipe.json", "--run-dir", "own")
    assert {path.name: path.read_text() for path in Path("own").iterdir()} == own


def test_a_run_that_has_begun_or_is_resumed_stays(trains: Patch, capsys: pytest.CaptureFixture[str]) -> None:
    trains.setenv("FAKE_FAIL_AT", "2:user")
    refusal(capsys, "train", "tiny.json", "--run-dir", "out")
    assert json.loads(Path("out/status.json").read_text())["state"] == "failed"
    refusal(capsys, "resume", "out")  # in its first step
    assert Path("out/metrics.jsonl").exists()
    Path("out/metrics.jsonl").unlink()
    refusal(capsys, "resume", "out")
    assert Path("out/recipe.json").exists()


def test_a_discarded_run_leaves_its_drives_as_well(tmp_path: Path) -> None:
    drives = [tmp_path / "a", tmp_path / "b"]
    recipe = Recipe(name="x", storage=StorageConfig(nvme=[str(drive) for drive in drives]))
    with RunDir.create(recipe, tmp_path / "out") as run:
        make(run.path / "state", 0, drives=[drive / "out" for drive in drives]).close()
        with closing(make(tmp_path / "other", 1, drives=[drives[0] / "other"])) as other:
            run.discard()
            assert other.verify() > 0
    assert not (tmp_path / "out").exists()
    assert [path.name for drive in drives for path in drive.iterdir()] == ["other"]


@pytest.mark.long
def test_a_start_from_the_terminal_application_leaves_its_words(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(launcher, "CLI", FAKE)
    monkeypatch.setenv("FAKE_FAIL_AT", "1:user")
    monkeypatch.setenv("FAKE_PREPARE_S", "0.5")
    path = launcher.start(RECIPE, tmp_path)
    data = RunData(path)
    wait_until(lambda: data.poll() is not None and data.state == "failed" and not data.exists)
    assert list((tmp_path / "runs").iterdir()) == []
    assert data.error == "loss is NaN in step 3, chunk 1"
    assert [alert.text for alert in alerts(data)] == [
        "loss is NaN in step 3, chunk 1",
        "the run failed before its first step finished and left nothing behind",
    ]
    assert launcher.last_words(tmp_path / "runs" / "never") is None


BAD_DATA: list[tuple[list[str], str]] = [
    (["data.source=jsonl", "data.path=none.jsonl"], "no `text` field; the row has content"),
    (["data.source=jsonl", "data.path=torn.jsonl"], "not a JSON object"),
    (["data.source=jsonl", "data.path=nowhere"], "nowhere does not exist"),
    (["data.source=text", "data.path=folder"], "the corpus is empty"),
    (["data.source=text", "data.path=latin.txt"], "not UTF-8 text"),
    (["data.tokenizer=nowhere"], "nowhere does not exist"),
    (["data.source=random"], "model.vocab_size: data.source=random needs it"),
]
TRAINS_WITHOUT_TORCH = """
import contextlib, io, json, sys
from penstock.app.cli import main
told = []
for settings in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as error:
        code = main(["train", "tiny.json", *(word for text in settings for word in ("--set", text))])
    told.append([code, error.getvalue(), "torch" in sys.modules])
print(json.dumps(told))
"""


def test_data_that_is_not_there_is_refused_before_pytorch_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "tiny.json").write_text(to_json(Recipe(name="tiny")))
    (tmp_path / "none.jsonl").write_text('{"content": "x"}\n{"text": "x"}\n')
    (tmp_path / "torn.jsonl").write_text('{"text": \n')
    (tmp_path / "latin.txt").write_bytes(b"\xe9t\xe9 " * 100)
    (tmp_path / "folder").mkdir()
    before = sorted(path.name for path in tmp_path.iterdir())
    given = json.dumps([settings for settings, _ in BAD_DATA])
    process = started(tmp_path, sys.executable, "-c", TRAINS_WITHOUT_TORCH, given)
    told: list[list[Any]] = json.loads(done(process).stdout)
    for (settings, words), (code, error, torch) in zip(BAD_DATA, told, strict=True):
        assert (code, words in error, torch) == (2, True, False), (settings, error)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: Patch) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("text")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "b.txt")  # root may read everything
    with pytest.raises(UserError, match=r"b\.txt cannot be read by this user"):
        require_inputs(Recipe(name="x", data=DataConfig(source="text", path=str(tmp_path))))
