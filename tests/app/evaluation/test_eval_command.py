"""`penstock eval` and `penstock.evaluate`: what is said first, printed, kept and refused; and tasks of
lm-evaluation-harness, which a streamed model answers as the harness's own `hf` model of the same weights."""

import errno
import importlib.util
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from xml.etree import ElementTree

import pytest
from chat_model import make_chat_model
from cli_process import documented, refusal
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from recipe_texts import tiny_recipe
from small_tasks import TASKS, make_tasks

import penstock
from penstock.app.cli.main import main
from penstock.app.evaluation import harness
from penstock.app.evaluation.harness import HarnessModel, find_tasks, query_tasks
from penstock.app.evaluation.queried import QueriedModel, Requests
from penstock.app.runs.directory import RunDir
from penstock.engine.generate.decode import Decoding
from penstock.engine.opened_model import OpenedModel
from penstock.storage.files.errors import UserError

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
    assert found["needles"]["kinds"]["multivalue"]["queried"] == [[4, 4, 4], [4, 4, 4]]
    assert found["options"]["chat"] is True
    drawn = ElementTree.parse("found.svg").getroot()
    assert len(list(drawn.iter("{http://www.w3.org/2000/svg}rect"))) == 1 + 3 * 2 * 3


def test_a_model_that_says_the_numbers_finds_them(folder: Path, monkeypatch: Patch) -> None:
    """Its recall is the share of them that it says, and it is not asked for more once it has said them."""
    told: list[int] = []

    def write(self: QueriedModel, prompts: Any, writing: Any, on_done: Any, enough: Any) -> list[str]:
        texts = [self.decode(ids) for ids in prompts]
        numbers = [[word.strip(".") for word in text.split() if word.strip(".").isdigit()] for text in texts]
        told.extend(enough(place, " ".join(each)) for place, each in enumerate(numbers))
        return [" ".join(each[:2]) for each in numbers]

    monkeypatch.setattr(QueriedModel, "write", write)
    found = penstock.evaluate(folder, ["needles_multivalue", "needles_single"], lengths=[800], depths=2, samples=2)
    kinds = found["needles"]["kinds"]
    assert (kinds["single"]["recall"], kinds["multivalue"]["recall"]) == (1.0, 0.5)
    assert kinds["multivalue"]["right"] != kinds["multivalue"]["queried"]
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


BOTH = {"tasks": ["fruit_choice", "fruit_written", "needles_single"], "lengths": [300, 500], "answer_tokens": 5}


@pytest.mark.parametrize("count", [2, 3])
def test_several_processes_take_batches_in_turns(folder: Path, tmp_path: Path, count: int, capsys: Captured) -> None:
    """With the results of one, whether memory holds all prompts of a batch or not."""
    asked: dict[str, Any] = {**BOTH, "include_path": make_tasks(tmp_path / "tasks"), "batch_tokens": 700}
    found = [
        penstock.evaluate(folder, gpus=gpus, ram=ram, gpu="6MiB", **asked)
        for gpus, ram in ((1, "64MiB"), (count, "64MiB"), (count, f"{count * 3}MiB"))
    ]
    for each in found[1:]:
        assert each["tasks"] == found[0]["tasks"]
        assert each["needles"] == found[0]["needles"]


def test_a_run_is_asked_by_several_processes(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "needles.txt").write_text("One of the secret numbers of the amber anchor is 1234567. " * 99)
    run = penstock.train(tiny_recipe(data={"sequence_length": 400}), run_dir="run")
    asked: dict[str, Any] = {"tasks": ["needles_single"], "lengths": [400], "depths": 2, "answer_tokens": 4}
    one, two = (penstock.evaluate(run, gpus=gpus, **asked) for gpus in (1, 2))
    assert one["needles"] == two["needles"]
    with pytest.raises(UserError, match="--gpus 0: must be at least 1"):
        penstock.evaluate(run, gpus=0, **asked)


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
    assert found["queried"] == ["needles_single"]
    assert set(found) | {*found["needles"], *found["needles"]["kinds"]["single"]} <= documented("evals/")
    assert found["needles"]["kinds"]["single"]["queried"] == [[1, 1]]
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


def test_bad_input_is_one_line(folder: Path, tmp_path: Path, capsys: Captured, monkeypatch: Patch) -> None:
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
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lm_eval" else found(name))
    with pytest.raises(UserError, match=r"needs lm-evaluation-harness, .*: pip install 'penstock\[eval\]'"):
        penstock.evaluate(folder, ["hellaswag"])


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("eval") / "model", max_position_embeddings=160)


@pytest.fixture
def model(narrow: Path) -> Iterator[OpenedModel]:
    with OpenedModel.open(narrow, device="cpu", dtype="float32", gpu_bytes=1 << 26, ram_bytes=1 << 26) as opened:
        yield opened


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tasks(tmp_path_factory.mktemp("eval") / "tasks")


@pytest.mark.parametrize("chat", [True, pytest.param(False, marks=pytest.mark.long)])
def test_every_metric_is_the_harness_s(model: OpenedModel, narrow: Path, tasks: Path, chat: bool) -> None:
    """And nobody is asked for local tasks."""
    queried, names = QueriedModel(model, batch_tokens=400), ["fruits", "fruit_text"]
    options: dict[str, Any] = {"num_fewshot": 2, "limit": 5, "chat": queried.template if chat else None}
    told: list[Requests] = []
    done: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        refuse = Mock(side_effect=OSError("no network"))
        patch.setattr(socket, "getaddrinfo", refuse)
        patch.setattr(socket.socket, "connect", refuse)
        index = find_tasks(names, tasks)
        found = query_tasks(queried, index, **options, report=told.append, say=pytest.fail, on_done=done.append)
        refuse.assert_not_called()
    theirs = HFLM(pretrained=str(narrow), dtype="float32", device="cpu", batch_size=3)
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    same: dict[str, Any] = {"num_fewshot": 2, "limit": 5, "apply_chat_template": chat, "bootstrap_iters": 1000}
    results = simple_evaluate(theirs, tasks=names, task_manager=manager, log_samples=False, **same)
    assert results is not None
    wanted, count = results["results"], 0
    for name in TASKS:
        assert (found["tasks"][name]["num_fewshot"], found["tasks"][name]["documents"]) == (2, 5)
        for one in found["tasks"][name]["metrics"]:
            count += 1
            assert one["value"] == pytest.approx(wanted[name][f"{one['metric']},none"], abs=1e-5, rel=1e-5)
            stderr = wanted[name][f"{one['metric']}_stderr,none"]
            assert one["stderr"] == (None if stderr == "N/A" else pytest.approx(stderr, abs=1e-5))
    assert count == 6
    group = {one["metric"]: one["value"] for one in found["groups"]["fruits"]["metrics"]}
    assert group["acc"] == pytest.approx(wanted["fruits"]["acc,none"])
    assert set(group) == {"acc", "exact_match"}
    (requests,) = told
    assert (requests.likelihoods, requests.texts, requests.new_tokens) == (5 * 4 + 5, 5, 12)
    assert sum(done) == requests.total


def test_likelihoods_and_texts_are_those_of_the_harness_own_model(model: OpenedModel, narrow: Path) -> None:
    """Beginnings that are cut where the context ends, empty contexts and stop texts are among them."""
    words = "The apple is red. What colour has the pear?\n" * 9
    pairs = [("What colour", " has the"), ("", "The apple"), (words, " red"), ("The fig is ", "blue. The"), ("a", " ")]
    texts = [("What colour has", {"until": ["e", "\n"], "max_gen_toks": 9}), ("The", {"until": [], "max_gen_toks": 20})]
    texts += [(words, {"until": ["zz"], "max_gen_toks": 9, "do_sample": False})]

    def requests(kind: Any, arguments: Any) -> list[Instance]:
        return [Instance(kind, {}, given, 0) for given in arguments]

    hf = HFLM(pretrained=str(narrow), dtype="float32", device="cpu", batch_size=2)
    ours = HarnessModel(QueriedModel(model), None, lambda _: None, lambda _: None)
    queried: dict[str, Any] = {"loglikelihood": pairs, "loglikelihood_rolling": [(words,), ("fig",)]}
    for kind, arguments in (queried | {"generate_until": texts}).items():
        wanted = getattr(hf, kind)(requests(kind, arguments))
        got = getattr(ours, kind)(requests(kind, arguments))
        if kind == "loglikelihood":
            assert [greedy for _, greedy in got] == [greedy for _, greedy in wanted]
            got, wanted = [value for value, _ in got], [value for value, _ in wanted]
        if kind == "generate_until":
            assert got == wanted
            assert all(got)
        else:
            assert got == pytest.approx(wanted, abs=1e-4)


def test_weights_stream_by_once_for_a_batch(model: OpenedModel) -> None:
    queried = QueriedModel(model, batch_tokens=54)
    done: list[int] = []
    found = queried.loglikelihoods([([1, 2, 3], [4] * size) for size in (1, 50, 20, 20, 3)], done.append)
    assert done == [1, 3, 1]
    assert model.passes == 3
    assert found[1][0] < found[2][0] == found[3][0] < found[4][0] < found[0][0] < 0


def test_a_text_that_is_enough_is_not_gone_on_with(model: OpenedModel) -> None:
    queried = QueriedModel(model)
    prompts = [queried.encode("The apple is"), queried.encode("What colour")]
    whole = queried.write(prompts, Decoding(new_tokens=12), lambda _: None)
    passes = model.passes
    some = queried.write(prompts, Decoding(new_tokens=12), lambda _: None, lambda place, text: len(text) > 2 * place)
    assert [len(text) > 2 * place for place, text in enumerate(some)] == [True, True]
    assert all(text.startswith(part) and len(part) < len(text) for text, part in zip(whole, some, strict=True))
    assert model.passes - passes < passes


def test_a_task_that_there_is_not_is_told_with_near_ones(tasks: Path, monkeypatch: Patch) -> None:
    # Reading the harness's own takes seconds.
    monkeypatch.setattr(harness, "TaskManager", lambda **more: TaskManager(**(more | {"include_defaults": False})))
    with pytest.raises(UserError, match=r"--tasks fruit_choise: no such task; did you mean fruit_choice"):
        find_tasks(["fruit_choise"], tasks)
    assert find_tasks(["fruit_*"], tasks).names == sorted(TASKS)
    with pytest.raises(UserError, match="no such folder"):
        find_tasks(["fruit_choice"], tasks / "nothing")


@pytest.mark.long
def test_the_harness_own_tasks_are_found() -> None:
    assert {"hellaswag", "arc_easy", "arc_challenge"} <= set(find_tasks(["hellaswag", "arc_*"], None).names)
    with pytest.raises(UserError, match=r"--tasks hellaswug: no such task; did you mean hellaswag"):
        find_tasks(["hellaswug"], None)


def test_what_is_not_done_is_refused_in_a_line(model: OpenedModel, tasks: Path, monkeypatch: Patch) -> None:
    queried = QueriedModel(model)
    with pytest.raises(UserError, match="200 new tokens leave no room for a prompt in a context of 160"):
        queried.write([[1, 2]], Decoding(new_tokens=200), lambda _: None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("PENSTOCK_OFFLINE_BY_DEFAULT", raising=False)  # as if the command line had not been imported
    lost = "task: lost\ndataset_path: json\ndataset_kwargs: {data_files: nowhere.jsonl}\noutput_type: multiple_choice\n"
    remote = "task: remote\ndataset_path: nobody/nothing\noutput_type: multiple_choice\n"
    for name, text, message in (
        ("lost", lost, r"--tasks lost: cannot be loaded: .*nowhere.jsonl"),
        ("remote", remote, "HF_HUB_OFFLINE is set and data of it is not in the cache"),
    ):
        (tasks / f"{name}.yaml").write_text(text)
        index = find_tasks([name], tasks)
        with pytest.raises(UserError, match=message):
            query_tasks(queried, index, report=pytest.fail, say=pytest.fail, on_done=lambda _: None)
