"""`penstock eval` and `penstock.evaluate`: what is said first, what is printed and kept, and what is refused."""

import errno
import importlib.util
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from xml.etree import ElementTree

import pytest
from chat_model import make_chat_model
from cli_process import refusal
from recipe_texts import tiny_recipe
from small_tasks import make_tasks

import penstock
from penstock.app.cli import main
from penstock.app.rundir import RunDir
from penstock.storage.errors import UserError

Captured = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
NEEDLES = ("--tasks", "needles", "--lengths", "600,800", "--depths", "3", "--samples", "1", "--answer-tokens", "6")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("eval") / "model")


def test_needles_are_printed_kept_and_drawn(folder: Path, tmp_path: Path, capsys: Captured, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["eval", str(folder), *NEEDLES, "--chat", "--out", "found.json", "--svg", "found.svg"]) == 0
    said = capsys.readouterr()
    assert "evaluating 18 texts of at most 6 tokens after" in said.err
    assert "bound by" in said.err
    for kind in ("single", "multikey", "multivalue"):
        assert f"0% right needles, {kind}" in said.out
    found = json.loads(Path("found.json").read_text())
    assert found["needles"]["kinds"]["multivalue"]["lengths"] == [600, 800]
    assert found["needles"]["kinds"]["multivalue"]["asked"] == [[4, 4, 4], [4, 4, 4]]
    assert found["options"]["chat"] is True
    drawn = ElementTree.parse("found.svg").getroot()
    assert len(list(drawn.iter("{http://www.w3.org/2000/svg}rect"))) == 1 + 3 * 2 * 3


def test_a_model_that_says_the_numbers_finds_them(folder: Path, monkeypatch: Patch) -> None:
    """Its recall is the share of them that it says, and it is not asked for more once it has said them."""
    from penstock.app.evaluation.asked import Asked

    told: list[int] = []

    def write(self: Asked, prompts: Any, writing: Any, on_done: Any, enough: Any) -> list[str]:
        texts = [self.decode(ids) for ids in prompts]
        numbers = [[word.strip(".") for word in text.split() if word.strip(".").isdigit()] for text in texts]
        told.extend(enough(place, " ".join(each)) for place, each in enumerate(numbers))
        return [" ".join(each[:2]) for each in numbers]

    monkeypatch.setattr(Asked, "write", write)
    found = penstock.evaluate(folder, ["needles_multivalue", "needles_single"], lengths=[800], depths=2, samples=2)
    kinds = found["needles"]["kinds"]
    assert (kinds["single"]["recall"], kinds["multivalue"]["recall"]) == (1.0, 0.5)
    assert kinds["multivalue"]["right"] != kinds["multivalue"]["asked"]
    assert all(told)


def test_tasks_of_a_folder_are_printed_and_are_json(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    tasks = make_tasks(tmp_path / "tasks")
    arguments = ["eval", str(folder), "--tasks", "fruit_choice,fruit_written", "--include-path", str(tasks)]
    assert main([*arguments, "--limit", "3"]) == 0
    said = capsys.readouterr()
    assert "evaluating 12 log-likelihoods" in said.err
    assert "3 texts of at most 12 tokens" in said.err
    assert "fruit_choice" in said.out
    assert "acc_norm" in said.out
    assert main([*arguments, "--limit", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["tasks"]) == {"fruit_choice", "fruit_written"}
    assert found["tasks"]["fruit_choice"]["documents"] == 2


def test_results_of_a_run_are_kept_in_its_directory(tmp_path: Path, capsys: Captured, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "needles.txt").write_text("One of the secret numbers of the amber anchor is 1234567. " * 99)
    run = penstock.train(tiny_recipe(data={"sequence_length": 400}), run_dir="run")
    capsys.readouterr()
    arguments = ["eval", "run", "--tasks", "needles_single", "--lengths", "400", "--depths", "2", "--samples", "1"]
    assert main([*arguments, "--answer-tokens", "4", "--gpu", "64MiB", "--ram", "64MiB"]) == 0
    (kept,) = (run / "evals").iterdir()
    assert f"written to {kept.relative_to(tmp_path)}" in capsys.readouterr().out
    found = json.loads(kept.read_text())
    assert kept.name.startswith("needles_single-")
    assert found["asked"] == ["needles_single"]
    assert found["needles"]["kinds"]["single"]["asked"] == [[1, 1]]
    with RunDir.open(run), pytest.raises(UserError, match="is running; keep a checkpoint of it"):
        penstock.evaluate(run, ["needles"])
    kept.unlink()
    (run / "evals").rmdir()
    (run / "evals").symlink_to(tmp_path / "corpus")
    with pytest.raises(UserError, match="evals: is a link"):
        penstock.evaluate(run, ["needles"])


def test_results_are_not_lost_where_they_cannot_be_kept(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    short = ["--tasks", "needles_single", "--lengths", "600", "--depths", "1", "--samples", "1", "--answer-tokens", "2"]
    with pytest.MonkeyPatch.context() as patch:
        full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
        patch.setattr("penstock.app.evaluation.run.atomic_write", full)
        assert main(["eval", str(folder), *short, "--out", str(tmp_path / "found.json")]) == 0
    said = capsys.readouterr()
    assert "0% right needles, single" in said.out
    assert "found.json: not written (No space left on device)" in said.err


def test_bad_input_is_one_line(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    for arguments, message in (
        ("needles --lengths 2048", "--lengths 2,048: exceeds the model's context of 1,024 tokens"),
        ("needles --lengths 200", "--lengths 200: too short for the hidden text"),
        ("needles --lengths many", "--lengths many: not a number"),
        ("needles --filler poems", "--filler poems: write essay or noise"),
        (",", "--tasks: no task given"),
        ("needles --depths 0", "--depths 0: must be at least 1"),
        ("needles --out nowhere/found.json", "its folder does not exist"),
        ("needles --gpu lots", "--gpu: 'lots' is not a size"),
        ("needles --checkpoint step-3", "step-3"),
    ):
        assert message in refusal(capsys, "eval", str(folder), "--tasks", *arguments.split())
    for where, message in ((tmp_path, "neither a run, which has a recipe.json"), (tmp_path / "x", "no such run")):
        assert message in refusal(capsys, "eval", str(where), "--tasks", "needles")


def test_without_the_harness_it_is_said_how_to_get_it(folder: Path, monkeypatch: Patch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lm_eval" else found(name))
    with pytest.raises(UserError, match=r"needs lm-evaluation-harness, .*: pip install 'penstock\[eval\]'"):
        penstock.evaluate(folder, ["hellaswag"])
