"""Tasks of lm-evaluation-harness: a streamed model answers them as the harness's own `hf` model of the same weights."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from chat_model import make_chat_model
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from small_tasks import TASKS, make_tasks

from penstock.app.evaluation import harness
from penstock.app.evaluation.asked import Asked, Requests, Writing
from penstock.app.evaluation.harness import HarnessModel, TaskOptions, ask_tasks, find_tasks
from penstock.engine.generate.streamed import StreamedModel
from penstock.storage.errors import UserError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("eval") / "model", max_position_embeddings=160)


@pytest.fixture
def model(folder: Path) -> Iterator[StreamedModel]:
    with StreamedModel.open(folder, device="cpu", dtype="float32", gpu_bytes=1 << 26, ram_bytes=1 << 26) as opened:
        yield opened


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tasks(tmp_path_factory.mktemp("eval") / "tasks")


def answers(asked: Asked, tasks: Path, **options: Any) -> tuple[dict[str, Any], list[Requests], list[int]]:
    told: list[Requests] = []
    done: list[int] = []
    index = find_tasks(["fruits", "fruit_text"], tasks)
    found = ask_tasks(asked, index, TaskOptions(**options), tell=told.append, say=pytest.fail, on_done=done.append)
    return found, told, done


def theirs(folder: Path, tasks: Path, **options: Any) -> dict[str, Any]:
    model = HFLM(pretrained=str(folder), dtype="float32", device="cpu", batch_size=3)
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    results = simple_evaluate(
        model, tasks=["fruits", "fruit_text"], task_manager=manager, bootstrap_iters=1000, log_samples=False, **options
    )
    assert results is not None
    return dict(results["results"])


@pytest.mark.parametrize("chat", [True, pytest.param(False, marks=pytest.mark.long)])
def test_every_metric_is_that_of_the_harness_own_model(
    model: StreamedModel, folder: Path, tasks: Path, chat: bool
) -> None:
    asked = Asked(model, batch_tokens=400)
    template = asked.template if chat else None
    found, told, done = answers(asked, tasks, num_fewshot=2, limit=5, chat=template)
    wanted = theirs(folder, tasks, num_fewshot=2, limit=5, apply_chat_template=chat)
    count = 0
    for name in TASKS:
        assert found["tasks"][name]["num_fewshot"] == 2
        assert found["tasks"][name]["documents"] == 5
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


def test_likelihoods_and_texts_are_those_of_the_harness_own_model(model: StreamedModel, folder: Path) -> None:
    """Beginnings that are cut where the context ends, empty contexts and stop texts are among them."""
    words = "The apple is red. What colour has the pear?\n" * 9
    pairs = [("What colour", " has the"), ("", "The apple"), (words, " red"), ("The fig is ", "blue. The"), ("a", " ")]
    texts = [("What colour has", {"until": ["e", "\n"], "max_gen_toks": 9}), ("The", {"until": [], "max_gen_toks": 20})]
    texts += [(words, {"until": ["zz"], "max_gen_toks": 9, "do_sample": False})]

    def requests(kind: Any, arguments: Any) -> list[Instance]:
        return [Instance(kind, {}, given, 0) for given in arguments]

    hf = HFLM(pretrained=str(folder), dtype="float32", device="cpu", batch_size=2)
    ours = HarnessModel(Asked(model), None, lambda _: None, lambda _: None)
    asked: dict[str, Any] = {"loglikelihood": pairs, "loglikelihood_rolling": [(words,), ("fig",)]}
    for kind, arguments in (asked | {"generate_until": texts}).items():
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


def test_weights_stream_by_once_for_a_batch(model: StreamedModel) -> None:
    asked = Asked(model, batch_tokens=54)
    done: list[int] = []
    found = asked.loglikelihoods([([1, 2, 3], [4] * size) for size in (1, 50, 20, 20, 3)], done.append)
    assert done == [1, 3, 1]
    assert model.passes == 3
    assert found[1][0] < found[2][0] == found[3][0] < found[4][0] < found[0][0] < 0


def test_a_text_that_is_enough_is_not_gone_on_with(model: StreamedModel) -> None:
    asked = Asked(model)
    prompts = [asked.encode("The apple is"), asked.encode("What colour")]
    whole = asked.write(prompts, Writing(12), lambda _: None)
    passes = model.passes
    some = asked.write(prompts, Writing(12), lambda _: None, lambda place, text: len(text) > 2 * place)
    assert [len(text) > 2 * place for place, text in enumerate(some)] == [True, True]
    assert all(text.startswith(part) and len(part) < len(text) for text, part in zip(whole, some, strict=True))
    assert model.passes - passes < passes


def test_local_tasks_ask_nobody(model: StreamedModel, tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse = Mock(side_effect=OSError("no network"))
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    answers(Asked(model), tasks, limit=1)
    refuse.assert_not_called()


def test_a_task_that_there_is_not_is_told_with_near_ones(tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_what_is_not_done_is_refused_in_a_line(
    model: StreamedModel, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(model)
    with pytest.raises(UserError, match="200 new tokens leave no room for a prompt in a context of 160"):
        asked.write([[1, 2]], Writing(200), lambda _: None)
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
            ask_tasks(asked, index, TaskOptions(), tell=pytest.fail, say=pytest.fail, on_done=lambda _: None)
