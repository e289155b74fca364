"""What `penstock finetune` and `penstock data` make of files that compare answers."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_model import make_chat_model
from cli_process import json_lines, refusal

from penstock.app.cli.main import main
from penstock.app.console.rows import UNICODE, plain
from penstock.app.finetune.defaults import COMPARED_RATE, Found, choose, row_length
from penstock.app.finetune.propose import Proposal, propose, write_recipe
from penstock.app.finetune.view import report_rows
from penstock.app.recipes.recipe import load_recipe
from penstock.storage.files.errors import UserError

Captured = pytest.CaptureFixture[str]
FAST = ["--set", "train.compile=off", "--set", "train.calibrate=false", "--set", "train.device=cpu"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a model `tiny-chat`, sixty pairs and forty-five answers with a verdict."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    make_chat_model(tmp_path / "tiny-chat")
    asked = [{"role": "user", "content": "Which colour?"}]
    answers = [[{"role": "assistant", "content": text}] for text in ("It is blue.", "Go away.")]
    pairs = [{"prompt": asked, "chosen": answers[0], "rejected": answers[1], "score": n} for n in range(60)]
    pairs[7]["chosen"] = [{"role": "assistant", "content": "It is " + "very " * 60 + "blue."}]
    verdicts = [{"prompt": f"Sky {n}:", "completion": " blue", "label": n % 3 == 0} for n in range(45)]
    for name, rows in (("pairs.jsonl", pairs), ("verdicts.jsonl", verdicts)):
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def chosen(proposal: Proposal) -> dict[str, Any]:
    return {item.key: item.value for item in proposal.chosen}


def text_of(proposal: Proposal) -> str:
    return " ".join(plain(report_rows(proposal.report, 100, UNICODE)).split())


def test_pairs_are_proposed_for_dpo_whole_and_both_sides_are_shown(here: Path) -> None:
    found = propose("tiny-chat", "pairs.jsonl")
    values = chosen(found)
    assert (values["train.objective"], values["train.lr"]) == ("dpo", 5e-7)
    assert (values["data.packing"], values["data.long_documents"]) == ("best_fit", "drop")
    longest = found.report["lengths"]["max"]
    assert longest > 2 * found.report["lengths"]["median"]
    assert values["data.sequence_length"] >= longest, "of both sides"
    assert found.report["data"]["comparison"] == "pairs"
    (why,) = (item.why for item in found.chosen if item.key == "train.objective")
    assert why == "pairs of a chosen and a rejected answer"
    samples = found.report["samples"]
    assert [sample["where"].rpartition("/")[2] for sample in samples[:2]] == [
        "pairs.jsonl:1, chosen",
        "pairs.jsonl:1, rejected",
    ]
    for sample, answer in zip(samples[:2], ("It is blue.", "Go away."), strict=True):
        assert [piece["trained"] for piece in sample["pieces"]] == [False, True]
        assert sample["pieces"][0]["text"].endswith("<|im_start|>assistant\n")
        assert sample["pieces"][1]["text"].rstrip("\n") == f"{answer}<|im_end|>"
    for part in (
        "60 pairs: a prompt with the chosen answer, and again with the rejected one",
        "trained: all turns of the assistant in the answers",
        "tokens a pair",
        "«It is blue.<|im_end|>»",
        "train.objective dpo pairs of a chosen and a rejected answer",
        "both answers of a pair in one row",
    ):
        assert part in text_of(found)
    write_recipe(found, here / "made.py", ["finetune", "tiny-chat", "pairs.jsonl"])
    recipe = load_recipe("made.py")
    assert (recipe.data.source, recipe.train.objective, recipe.train.lr) == ("preference", "dpo", 5e-7)
    assert recipe.data.comparison == "pairs"


def test_one_line_trains_on_pairs(here: Path, capsys: Captured) -> None:
    command = ["finetune", "tiny-chat", "pairs.jsonl", "--yes", "--run-dir", "run", "--set", "train.steps=2", *FAST]
    assert main(command) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for part in (
        "60 pairs: a prompt with",
        "«Go away.<|im_end|>»",
        "train.objective dpo pairs of",
        "recipe written to",
    ):
        assert part in printed
    recipe = load_recipe("tiny_chat_pairs.py")
    assert (recipe.data.source, recipe.train.objective) == ("preference", "dpo")
    losses = [line["loss"] for line in json_lines(here / "run" / "metrics.jsonl")]
    assert losses == pytest.approx([math.log(2)] * 2, abs=1e-3), "the model still is the reference"


def test_an_objective_for_other_data_is_refused_and_nothing_written(here: Path, capsys: Captured) -> None:
    (here / "texts.jsonl").write_text('{"text": "The sky is blue."}\n' * 3)
    for data, objective, said in (
        ("texts.jsonl", "dpo", "dpo takes pairs of answers, and the data are texts"),
        ("pairs.jsonl", "kto", "kto takes answers with a verdict each, and the data are pairs of answers"),
        ("pairs.jsonl", "next_token", "next_token takes texts, and the data are pairs of answers"),
        ("verdicts.jsonl", "dpo", "dpo takes pairs of answers, and the data are answers with a verdict each"),
        ("pairs.jsonl", "dpa", "'dpa' is unknown; did you mean 'dpo'"),
    ):
        before = set(here.iterdir())
        assert said in refusal(capsys, "finetune", "tiny-chat", data, "--yes", "--set", f"train.objective={objective}")
        assert set(here.iterdir()) == before


def test_verdicts_are_proposed_for_kto(here: Path) -> None:
    found = propose("tiny-chat", "verdicts.jsonl", overrides=["adapter.method=lora"])
    values = chosen(found)
    assert (values["train.objective"], values["train.lr"], values["data.packing"]) == ("kto", 5e-6, "best_fit")
    assert [sample["where"].rpartition(", ")[2] for sample in found.report["samples"]] == [
        "wanted",
        "not wanted",
        "not wanted",
    ]
    assert "45 answers with a verdict: 15 wanted, 30 not" in text_of(found)
    assert found.report["warnings"] == []
    # Each answer is followed by its prompt with the answer before.
    lengths = found.report["lengths"]
    assert f"covers the longest, {2 * lengths['max']}" in text_of(found)
    lines = (here / "verdicts.jsonl").read_text().splitlines()
    (here / "wanted.jsonl").write_text("\n".join(lines[::3]))
    assert (
        "all of the answers are wanted; add some of the other kind"
        in propose("tiny-chat", "wanted.jsonl").report["warnings"]
    )


def test_pairs_are_taken_apart_where_that_is_said(here: Path) -> None:
    found = propose("tiny-chat", "pairs.jsonl", overrides=["data.source=unpaired_preference"])
    assert chosen(found)["train.objective"] == "kto"
    assert re.search(r"(\d+) answers with a verdict: (\d+) wanted, \2 not", text_of(found))
    with pytest.raises(UserError, match=r"set data.source=unpaired_preference, which takes them apart"):
        propose("tiny-chat", "pairs.jsonl", overrides=["train.objective=kto"])


def test_what_is_set_stays(here: Path) -> None:
    set_ = ["train.objective=orpo", "train.lr=8e-6", "data.sequence_length=256"]
    found = propose("tiny-chat", "pairs.jsonl", overrides=set_)
    assert chosen(found)["train.objective"] == found.recipe.train.objective == "orpo"
    assert (found.recipe.train.lr, found.recipe.data.sequence_length) == (8e-6, 256)
    assert "1 pair is longer than a row of 256 tokens, and left out" in text_of(found)
    with pytest.raises(
        UserError, match=r"data\.trained_tokens: all has no effect, as data\.source=preference compares"
    ):
        propose("tiny-chat", "pairs.jsonl", overrides=["data.trained_tokens=all"])


def test_a_row_covers_the_longest_pair_and_the_rate_is_that_of_comparisons_at_any_size() -> None:
    lengths = np.asarray([100] * 999 + [20_000])
    assert row_length(lengths, None, text=False, pairs=True)[0] == 32_768
    assert row_length(lengths, None, text=False)[0] < 20_000, "one document that is an outlier is not covered"
    for params in (10**6, 10**9, 10**11):
        facts = Found(
            num_params=params, context=None, text=False, lengths=lengths, rows=lambda _: 100, comparison="pairs"
        )
        values = {item.key: item.value for item in choose(facts, {})}
        assert (values["train.lr"], values["train.objective"]) == (COMPARED_RATE, "dpo")
        values = {item.key: item.value for item in choose(facts, {"adapter.method": "dora"})}
        assert values["train.lr"] == pytest.approx(10 * COMPARED_RATE)


def test_rows_are_printed_with_their_sides(here: Path, capsys: Captured) -> None:
    assert main(["data", "tiny-chat", "pairs.jsonl", "--json", "--show", "2"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 2
    for row in rows:
        before, second = row["sides"]
        assert row["comparison"] == "pairs"
        assert "".join(row["tokens"][before:second]).rstrip("\n") == "It is blue.<|im_end|>"
        trained = [index for index, weight in enumerate(row["weights"]) if weight]
        assert (trained[0], row["weights"][second]) == (before, 0)
        assert "".join(row["tokens"][at] for at in trained if at >= second).rstrip("\n") == "Go away.<|im_end|>"
    assert main(["data", "tiny-chat", "pairs.jsonl", "--show", "1"]) == 0
    printed = capsys.readouterr().out
    assert "pairs.jsonl:1, chosen" in printed
    assert "pairs.jsonl:1, rejected" in printed
    assert "60 pairs" in printed
    assert main(["data", "tiny-chat", "verdicts.jsonl", "--json", "--show", "2"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["sides"][1] for row in rows] == [1, 0]


def test_a_reward_model_is_proposed_trained_and_exported(here: Path, capsys: Captured) -> None:
    command = ["finetune", "tiny-chat", "pairs.jsonl", "--yes", "--run-dir", "run", "--set", "train.objective=reward"]
    assert main([*command, "--set", "train.steps=2", *FAST]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for part in ("train.objective reward set by you", "train.lr 1e-05 usual for a reward model", "margin"):
        assert part in printed
    assert "sample" not in printed.partition("train.objective")[2]
    assert "GGUF" not in printed
    measured = [line["measured"] for line in json_lines(here / "run" / "metrics.jsonl")]
    assert all(values.keys() >= {"accuracy", "margin", "mean_reward"} for values in measured)
    card = (here / "run" / "export" / "README.md").read_text()
    assert "pipeline_tag: text-classification" in card
    code = card.partition("```python\n")[2].partition("```")[0].replace('"export"', repr(str(here / "run" / "export")))
    names: dict[str, Any] = {}
    exec(code, names)
    assert math.isfinite(names["reward"])
    assert main(["plan", str(here / "tiny_chat_pairs.py")]) == 0
    said = refusal(capsys, "sample", "run", "--prompt", "Sky:")
    assert "a reward model, which has a value for a whole answer" in said
    dpo = ("finetune", "run/export", "pairs.jsonl", "--set", "train.objective=dpo", "--yes")
    assert "run/export is a reward model, which has no probabilities of tokens" in refusal(capsys, *dpo)
