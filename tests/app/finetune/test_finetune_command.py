"""`penstock finetune` and `penstock data`: from a model and a file to a trained model, and what is refused; what it
finds and chooses (cases worked by hand), and both as people read them."""

import json
import math
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_model import make_chat_model, make_tokenizer, talk, write_talks
from chat_templates import THINKING
from cli_process import json_lines, refusal
from rich.cells import cell_len
from rich.console import Console
from sample_proposal import Letters, document, proposal

import penstock
from penstock.app.cli.main import main
from penstock.app.console.printing import print_rows
from penstock.app.console.rows import ASCII, UNICODE, plain
from penstock.app.finetune.defaults import Found, choose, held_out, row_length
from penstock.app.finetune.propose import given_values, recipe_file, run_name
from penstock.app.finetune.report import Document, histogram, length_figures, sample, token_row
from penstock.app.finetune.view import SAMPLE_CHARS, marked_rows, report_rows, shortened
from penstock.app.recipes.recipe import load_recipe
from penstock.storage.files.errors import UserError

Captured = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
OURS = ["tiny-chat", "talks.jsonl"]
GOOD = json.dumps(talk(1))
MUTE = json.dumps({"messages": [{"role": "user", "content": "hello"}]})
FAST = ["--set", "train.compile=off", "--set", "train.calibrate=false", "--set", "train.device=cpu"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny chat model and sixty conversations."""
    folder = tmp_path_factory.mktemp("finetune")
    make_chat_model(folder / "tiny-chat")
    write_talks(folder / "talks.jsonl")
    return folder


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: Patch) -> Path:
    """The current folder, with a model `tiny-chat` and `talks.jsonl` of its own."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("PENSTOCK_OFFLINE_BY_DEFAULT", raising=False)  # of a command before in this process
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HOME", str(tmp_path))  # where nobody is logged in to a tracker
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_DIR", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_a_run_is_named_after_both_and_what_is_set_is_read_as_the_fields_types() -> None:
    for model, data, name in (
        ("models/Qwen3-8B/", "a/talks.jsonl.gz", "qwen3-8b-talks"),
        ("hf://Qwen/Qwen3-0.6B@main", "HuggingFaceH4/no_robots", "qwen3-0.6b-no_robots"),
        ("/m/é ü", "..", "x-x"),
        ("m" * 200, "d", "m" * 80),
    ):
        assert run_name(model, data) == name
        assert penstock.Recipe(name=name).name == name
    values = given_values(["train.lr=1e-5", "data.validation_documents=none", "model.overrides.rope_theta=1e6"])
    assert values == {"train.lr": 1e-5, "data.validation_documents": None, "model.overrides.rope_theta": "1e6"}
    with pytest.raises(UserError, match=r"--set: no field 'train\.stepz'; did you mean 'train\.steps'"):
        given_values(["train.stepz=1"])


def test_of_turns_that_the_template_renders_in_another_way_the_last_is_trained(here: Path, capsys: Captured) -> None:
    config = json.loads((here / "tiny-chat" / "tokenizer_config.json").read_text())
    (here / "tiny-chat" / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": None}))
    (here / "tiny-chat" / "chat_template.jinja").write_text(THINKING)
    assert main(["finetune", *OURS, "--json", *FAST]) == 0
    found = json.loads(capsys.readouterr().out)
    (said,) = (item for item in found["chosen"] if item["key"] == "data.trained_tokens")
    assert said["value"] == found["recipe"]["data"]["trained_tokens"] == "last"
    assert main(["finetune", *OURS, "--json", "--set", "data.trained_tokens=assistant"]) == 2
    assert "the chat template renders it as" in capsys.readouterr().err


def test_one_line_trains_a_model_and_leaves_a_recipe_that_repeats_it(here: Path, capsys: Captured) -> None:
    command = ["finetune", *OURS, "--yes", "--run-dir", "out", "--set", "train.steps=6", *FAST]
    assert main(command) == 0
    printed = " ".join(capsys.readouterr().out.split())
    parts = ["qwen3, 58.7 k parameters, context 1,024", "found by its generation markers", "talks.jsonl:2"]
    parts += ["60 documents, 4,350 tokens, of which 20.7% are trained", "«The plum is blue.<|im_end|>»"]
    parts += ["train.steps 6 set by you", "fits on this machine", "recipe written to tiny_chat_talks.py"]
    parts += ["sample, at most 12 tokens by transformers after the prompt"]
    assert [part for part in parts if part not in printed] == []
    recipe = load_recipe("tiny_chat_talks.py")
    assert (recipe.data.source, recipe.data.packing, recipe.train.steps) == ("messages", "best_fit", 6)
    assert recipe.after.sample_prompt is not None
    assert recipe.after.sample_prompt.endswith("<|im_start|>assistant\n")
    losses = [line["loss"] for line in json_lines(here / "out" / "metrics.jsonl")]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    assert (here / "out" / "export" / "model.safetensors").is_file()
    overrides = ["after.export=false", "after.sample_prompt=none"]
    again = penstock.train("tiny_chat_talks.py", run_dir="again", overrides=overrides)
    assert [line["loss"] for line in json_lines(again / "metrics.jsonl")] == losses


@pytest.mark.parametrize(("setting", "said"), [
    ("train.steps=2", "every parameter"),
    ("adapter.method=dora", "an adapter (dora)"),
    ('train.freeze=["*embed_tokens*"]', "parameters that are not in train.freeze"),
])  # fmt: skip
def test_a_recipe_says_what_of_the_model_is_trained(here: Path, setting: str, said: str) -> None:
    assert main(["finetune", *OURS, "--machine", "rtx4090-64", "--out", "made.py", "--set", setting]) == 0
    assert Path("made.py").read_text().startswith(f'"""Fine-tunes {said} of {here / "tiny-chat"} on ')


def test_an_adapters_base_may_be_quantised(here: Path, capsys: Captured) -> None:
    """Which is part of the model, and yet says nothing of how its data is read."""
    both = ("--set", "adapter.method=lora", "--set", "model.frozen_format=nf4")
    assert main(["finetune", *OURS, "--machine", "rtx4090-64", "--out", "made.py", *both]) == 0
    assert load_recipe("made.py").model.frozen_format == "nf4"
    said = refusal(capsys, "data", *OURS, *both[2:])
    assert "--set model.frozen_format: has no effect on how data is read; leave it out" in said


def test_from_python_it_is_the_same(here: Path) -> None:
    settings = ["train.steps=1", *FAST[1::2], "after.export=false"]
    run = penstock.finetune("tiny-chat", "talks.jsonl", overrides=settings, out="mine.json", run_dir="out")
    assert load_recipe("mine.json").train.steps == 1
    assert len(json_lines(run / "metrics.jsonl")) == 1
    with pytest.raises(UserError, match=r"does not fit: .*budgets.gpu"):
        penstock.finetune("tiny-chat", "talks.jsonl", overrides=["budgets.gpu=4KiB"])
    assert not (here / "tiny_chat_talks.py").exists()


def test_as_json_nothing_is_asked_written_or_trained_and_bad_rows_left_out(here: Path, capsys: Captured) -> None:
    before = files(here)
    assert main(["finetune", *OURS, "--json", "--epochs", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert files(here) == before
    assert found["plan"]["fits"]
    assert found["model"]["params"] == 58_656
    assert sum(bar["documents"] for bar in found["lengths"]["histogram"]) == 60
    assert {item["key"]: item["value"] for item in found["chosen"]}["data.sequence_length"] == 128
    assert found["recipe"]["data"]["source"] == "messages"
    assert [piece["trained"] for piece in found["samples"][0]["pieces"]] == [False, True]

    (here / "mixed.jsonl").write_text(f"{GOOD}\n{MUTE}\n{{broken\n{GOOD}\n")
    assert main(["finetune", "tiny-chat", "mixed.jsonl", "--json", "--set", "data.bad_rows=skip"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["lengths"]["documents"] == 2
    assert any("2 bad rows are skipped" in text for text in found["warnings"])


def test_rows_are_printed_as_training_reads_them(here: Path, capsys: Captured) -> None:
    assert main(["data", "tiny-chat", "talks.jsonl", "--json"]) == 0
    printed = capsys.readouterr()
    rows = [json.loads(line) for line in printed.out.splitlines()]
    assert len(rows) == 60
    assert rows[1]["where"].endswith("talks.jsonl:2")
    for number, row in enumerate(rows):
        assert len(row["ids"]) == len(row["weights"]) == len(row["tokens"])
        assert "".join(row["tokens"]) == row["text"]
        trained = "".join(text for text, weight in zip(row["tokens"], row["weights"], strict=True) if weight)
        said = [m["content"] for m in talk(number, 1 + number % 4)["messages"] if m["role"] == "assistant"]
        assert trained == "".join(f"{text}<|im_end|>" for text in said)
    assert "60 documents, 4,350 tokens" in printed.err

    (here / "recipe.py").write_text(
        "from penstock import *\nrecipe = Recipe(name='x', model=ModelConfig(path='tiny-chat'), "
        "data=DataConfig(source='messages', path='talks.jsonl', trained_tokens='last'))\n"
    )
    assert main(["data", "recipe.py", "--show", "2"]) == 0
    printed = capsys.readouterr()
    assert printed.out.count("talks.jsonl:") == 2
    assert "«The pear is green.<|im_end|>»" in printed.out
    assert "«The plum is blue.<|im_end|>»" not in printed.out, "only the last turn is trained"
    assert "the last turn of the assistant" in printed.out
    assert "give a recipe, or a model and its data" in refusal(capsys, "data", "tiny-chat")
    said = refusal(capsys, "data", "tiny-chat", "talks.jsonl", "--set", "adapter.rank=8")
    assert "--set adapter.rank: has no effect on how data is read; leave it out" in said


def test_prompts_are_shown_as_the_model_gets_them_and_nothing_of_them_is_trained(here: Path, capsys: Captured) -> None:
    asked = [{"role": "user", "content": "Which colour?"}]
    (here / "prompts.jsonl").write_text(json.dumps({"prompt": asked, "answer": "green"}) + "\n")
    assert main(["data", "tiny-chat", "prompts.jsonl", "--json"]) == 0
    printed = capsys.readouterr()
    (row,) = map(json.loads, printed.out.splitlines())
    assert row["text"] == "<|im_start|>user\nWhich colour?<|im_end|><|im_start|>assistant\n"
    assert set(row["weights"]) == {0}
    assert "of which 0.0% are trained" in printed.err
    assert "these are prompts without answers" in refusal(capsys, "finetune", "tiny-chat", "prompts.jsonl", "--yes")


def test_no_keeps_the_recipe_and_too_large_writes_none(here: Path, monkeypatch: Patch, capsys: Captured) -> None:
    given = sys.stdin
    for closed in (given, None):  # `<&-` makes it None
        monkeypatch.setattr("sys.stdin", closed)
        error = refusal(capsys, "finetune", *OURS)
        assert "there is no terminal to ask on; add --yes" in error
        assert not (here / "tiny_chat_talks.py").exists()
    monkeypatch.setattr("sys.stdin", given)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.confirm", lambda *args, **options: False)
    assert main(["finetune", *OURS]) == 0
    said = capsys.readouterr().out
    assert "recipe written to tiny_chat_talks.py; to train it again: penstock train tiny_chat_talks.py" in said
    before = files(here)
    assert main(["finetune", *OURS, "--yes", "--set", "budgets.gpu=4KiB"]) == 1
    printed = capsys.readouterr().out
    assert "does not fit" in printed
    assert "--set" in printed, "what would make it fit"
    assert files(here) == before
    assert not (here / "runs").exists()
    assert recipe_file(load_recipe("tiny_chat_talks.py")) == Path("tiny_chat_talks_2.py")


def sets(*texts: str) -> list[str]:
    return [*OURS, *(word for text in texts for word in ("--set", text))]


DROP = "data.long_documents=drop"
BAD: dict[str, tuple[list[str], str]] = {
    "no model": (["nothing-here", "talks.jsonl"], "nothing-here"),
    "no weights": (OURS, "contains no *.safetensors"),
    "no tokenizer": (OURS, "has no tokenizer files"),
    "no template": (OURS, "chat template"),
    "no data": (["tiny-chat", "nowhere.jsonl"], "nowhere.jsonl"),
    "a model of the hub without a network": (["hf://nobody/x", "talks.jsonl"], "HF_HUB_OFFLINE is set"),
    "data of the hub without a network": (["tiny-chat", "hf://nobody/x"], "HF_HUB_OFFLINE is set"),
    "nothing to train": (["tiny-chat", "bad.jsonl"], "bad.jsonl:2"),
    "too short a context": (sets("data.sequence_length=8"), "raise"),
    "too short for what is dropped": (sets("data.sequence_length=16", DROP), "the shortest document has 29 tokens"),
    "a context beyond the model's": (sets("data.sequence_length=4096"), "max_position_embeddings 1024"),
    "a tracker that nobody is logged in to": (sets('trackers=["wandb"]'), "wandb: you are not logged in"),
    "a prompt beyond it": (sets("samples.every=2", f'samples.prompts=["{"long " * 1024}"]'), "shorten the prompt"),
    "no epochs": ([*OURS, "--epochs", "0"], "--epochs"),
    "epochs and steps": ([*sets("train.steps=3"), "--epochs", "2"], "--epochs: 2 has no effect, as train.steps=3"),
    "a run that is not begun": ([*OURS, "--json", "--run-dir", "out"], "--run-dir: has no effect, as with --json"),
    "a recipe that is not written": ([*OURS, "--json", "--out", "a.py"], "--out: has no effect, as with --json"),
    "a recipe that is there": ([*OURS, "--out", "mine.py"], "mine.py exists"),
    "a recipe of no known kind": ([*OURS, "--out", "mine.txt"], "must end in .py or .json"),
    "a recipe where none can be": ([*OURS, "--out", "talks.jsonl/a.py"], "talks.jsonl/a.py: cannot be written"),
    "a run that is there": ([*OURS, "--run-dir", "taken"], "is not empty"),
    "a run where a link leads nowhere": ([*OURS, "--run-dir", "dangling"], "is a link that leads to no folder"),
    "an entry of the hub's cache": (["models--a--b", "talks.jsonl"], "models--a--b/snapshots/abc"),
    "an entry of the hub's cache for data": (["tiny-chat", "models--a--b"], "models--a--b/snapshots/abc"),
    "a pipe among the data": (["tiny-chat", "piped"], "p.jsonl: is neither a file nor a folder; remove it"),
    "an unknown machine": ([*OURS, "--machine", "nowhere-9000"], "nowhere-9000"),
}
WITHOUT = {"no weights": ["model.safetensors"], "no template": ["chat_template.jinja"]}
WITHOUT["no tokenizer"] = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_leaves_nothing_behind(here: Path, capsys: Captured, case: str) -> None:
    arguments, part = BAD[case]
    for name in ("taken", "piped", "models--a--b/snapshots/abc"):
        (here / name).mkdir(parents=True)
    (here / "dangling").symlink_to("nowhere")
    (here / "piped" / "a.jsonl").write_text(f"{GOOD}\n")
    os.mkfifo(here / "piped" / "p.jsonl")
    for name, text in (("taken/file", ""), ("mine.py", "x = 1\n"), ("bad.jsonl", f"{GOOD}\n{MUTE}\n")):
        (here / name).write_text(text)
    if case == "no template":
        make_tokenizer(here / "tiny-chat", template=None)
    for name in WITHOUT.get(case, ()):
        (here / "tiny-chat" / name).unlink(missing_ok=True)
    before = files(here)
    error = refusal(capsys, "finetune", *arguments, "--yes")
    assert part in error
    assert len(error) < 1000
    assert files(here) == before


@pytest.mark.long
def test_another_machine_is_planned_for_and_nothing_trained(here: Path, capsys: Captured) -> None:
    chosen = sets("train.chunk_tokens=64", "train.activation_checkpointing=full", "train.kv_window=whole")
    assert main(["finetune", *chosen, "--machine", "rtx4090-64", "--out", "there.json"]) == 0
    assert "fits on rtx4090-64" in capsys.readouterr().out
    assert load_recipe("there.json").machine == "rtx4090-64"
    assert not (here / "runs").exists()


def test_lengths_are_counted_in_bars_that_double_and_have_figures() -> None:
    # Eight bars at the most: what is shorter is in the first.
    assert [tuple(bar) for bar in histogram(np.asarray([1, 2, 3, 4, 5, 900]))] == [
        (1, 8, 5), (9, 16, 0), (17, 32, 0), (33, 64, 0), (65, 128, 0), (129, 256, 0), (257, 512, 0), (513, 1024, 1),
    ]  # fmt: skip
    assert [tuple(bar) for bar in histogram(np.asarray([5, 5]))] == [(5, 8, 2)]
    assert sum(bar.documents for bar in histogram(np.arange(1, 5000))) == 4999
    lengths = np.arange(1, 101)
    figures = length_figures(lengths, lengths // 2, 90)
    names = ("documents", "tokens", "trained_tokens", "median", "p95", "p99", "max", "longer")
    assert [figures[name] for name in names] == [100, 5050, 2500, 51, 96, 100, 100, 10]


def test_a_sample_is_cut_where_what_is_trained_begins_and_ends() -> None:
    found = sample(document("ab<cd>\x1b", "..xx.xx"), Letters())
    pieces = [(piece["text"], piece["trained"]) for piece in found["pieces"]]
    assert pieces == [("ab", False), ("<c", True), ("d", False), (">\ufffd", True)]
    assert (found["tokens"], found["trained_tokens"]) == (7, 4)
    whole = sample(Document("a", np.asarray([97, 98]), None), Letters())
    assert whole["pieces"] == [{"text": "ab", "trained": True}]
    row = token_row(document("ab", ".x"), Letters())
    assert row == {"where": "talks.jsonl:3", "ids": [97, 98], "weights": [0, 1], "text": "ab", "tokens": ["a", "b"]}


def test_trained_tokens_are_marked_without_colours() -> None:
    pieces = [{"text": "a", "trained": False}, {"text": "b\nc", "trained": True}, {"text": "d", "trained": False}]
    assert plain(marked_rows(pieces, 40, UNICODE)) == "a«b\nc»d"
    assert plain(marked_rows(pieces, 40, ASCII)) == "a[[b\nc]]d"


def test_long_lines_and_wide_characters_are_wrapped_and_none_is_lost() -> None:
    text = "学习 is learning " * 20
    for width in (4, 5, 40):
        rows = list(marked_rows([{"text": text, "trained": False}], width, UNICODE))
        assert all(cell_len(plain([row])) <= width for row in rows)
        assert plain(rows).replace("\n", "") == text


def test_of_a_long_document_both_ends_are_shown() -> None:
    pieces = [{"text": "a" * 5000, "trained": False}, {"text": "b" * 10, "trained": True}]
    cut = shortened(pieces, SAMPLE_CHARS, "...")
    assert "".join(piece["text"] for piece in cut if piece["trained"]) == "b" * 10
    assert cut[0]["text"] == "a" * (SAMPLE_CHARS // 2)
    assert "4,310 characters left out" in cut[1]["text"]
    assert sum(len(piece["text"]) for piece in cut if piece["trained"] is not None) == SAMPLE_CHARS
    assert shortened(pieces, 6000, "...") == pieces


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
@pytest.mark.parametrize("width", [30, 80, 120])
def test_a_report_fits_its_width_and_tells_all(glyphs: Any, width: int) -> None:
    rows = report_rows(proposal(), width, glyphs)
    assert {cell_len(plain([row])) for row in rows} == {width}
    text = " ".join(plain(rows).split())
    for part in ("llama, 1.5 B parameters", "messages: 5 rows", "5 documents, 1,253 tokens", "one row was left out"):
        assert part in text
    if width >= 80:
        for part in ("median 120, p95 900, longest 900", "usual for 1.5 B", "1 document is longer than a row of 512"):
            assert part in text
    assert plain(rows).isascii() or glyphs is UNICODE or "Käse" in plain(rows)


def test_a_report_is_printed_in_ascii_where_the_console_wants_it() -> None:
    console = Console(width=80, record=True, force_terminal=True, color_system="truecolor")
    print_rows(report_rows(proposal(), 80, UNICODE), console)
    text = console.export_text(styles=True)
    assert "«" in text
    assert "\x1b[4;32mKäse" in text, "underlined and green"


def found(lengths: list[int], **changes: Any) -> Found:
    """Documents of these lengths and a model of 1.5 B parameters; an epoch has as many rows as their tokens fill."""

    def rows(data: Mapping[str, Any]) -> int:
        left = len(lengths) - (data["data.validation_documents"] or 0)
        return math.ceil(sum(lengths[:left]) / data["data.sequence_length"])

    facts: dict[str, Any] = {"num_params": 1_500_000_000, "context": 32_768, "text": False, "rows": rows}
    return Found(lengths=np.asarray(lengths), **(facts | changes))


def values(lengths: list[int], given: dict[str, Any] | None = None, epochs: float | None = None, **changes: Any) -> Any:
    items = choose(found(lengths, **changes), given or {}, epochs)
    assert all(item.why for item in items)
    return {item.key: item.value for item in items}


def test_a_thousand_conversations_of_500_tokens() -> None:
    # 8 of 500 tokens are 4,000: rows of 4,096. 980 of them fill 119.6 rows; an epoch of 16 steps leaves 7 rows a step,
    # and 4 is the power of two below. 3 epochs of 120 rows, 4 a step, are 90 steps, 3 % of which are 2.7.
    assert values([500] * 1000) == {
        "data.sequence_length": 4096, "data.packing": "best_fit", "data.long_documents": "cut",
        "data.validation_documents": 20, "train.global_batch_size": 4, "train.steps": 90, "train.lr": 2e-5,
        "train.warmup_steps": 3, "train.lr_schedule": "cosine", "train.weight_decay": 0.01, "train.clip_norm": 1.0,
        "train.compute_dtype": "auto", "train.validate_every": 12, "storage.checkpoint_every": 18,
        "after.export": True,
    }  # fmt: skip


def test_ten_short_ones_hold_nothing_out_and_a_model_of_whole_documents_has_one_a_row() -> None:
    chosen = values([40] * 10)
    assert (chosen["data.sequence_length"], chosen["data.validation_documents"]) == (128, None)
    assert (chosen["train.global_batch_size"], chosen["train.steps"], chosen["train.warmup_steps"]) == (1, 12, 1)
    assert "train.validate_every" not in chosen
    chosen = values([500] * 1000, whole_documents=True)
    assert (chosen["data.sequence_length"], chosen["data.packing"]) == (512, "none")


def test_a_row_covers_the_documents() -> None:
    for lengths, context, text, row, why in (
        ([100] * 999 + [100_000], 32_768, False, 1024, "10 typical documents"),  # the outlier is 500 times the p99
        ([3000] * 40, 2048, False, 2048, "the model's own context"),
        ([3000] * 40, 5000, False, 4096, "covers the longest, 3,000"),
        ([100_000] * 3, 131_072, True, 8192, "rows of more than 8,192 have to be set by you"),
        ([100_000] * 3, 131_072, False, 32_768, "rows of more than 32,768 have to be set by you"),
        ([2048] * 10, None, False, 2048, "covers the longest, 2,048"),
        ([100] * 97 + [2000] * 3, 32_768, False, 2048, "covers the longest, 2,000"),
    ):
        length, reason = row_length(np.asarray(lengths), context, text=text)
        assert (length, why in reason) == (row, True), reason


def test_a_few_are_held_out_larger_models_take_smaller_steps_and_an_adapter_ten_times_the_rate() -> None:
    assert [held_out(count) for count in (39, 40, 1000, 10**6)] == [None, 4, 20, 256]
    rates = {5e5: 1e-3, 5e7: 2e-4, 5e8: 5e-5, 1.5e9: 2e-5, 7e9: 1e-5, 32e9: 1e-5, 7e10: 5e-6}
    assert {params: values([500] * 1000, num_params=int(params))["train.lr"] for params in rates} == rates
    items = {item.key: item for item in choose(found([500] * 1000, num_params=7 * 10**9), {"adapter.method": "lora"})}
    assert items["train.lr"].value == 1e-4
    assert "an adapter" in items["train.lr"].why


def test_much_data_is_read_once_in_steps_of_131_072_tokens_by_a_large_model() -> None:
    chosen = values([1000] * 200_000, num_params=8 * 10**9)  # 200 M tokens
    assert (chosen["data.sequence_length"], chosen["train.global_batch_size"]) == (8192, 16)
    assert chosen["train.steps"] == math.ceil(math.ceil(199_744_000 / 8192) / 16)


def test_what_the_user_sets_stays_and_the_rest_follows() -> None:
    given = {"data.sequence_length": 1000, "train.lr": 3e-4, "data.validation_documents": None}
    items = {item.key: item for item in choose(found([500] * 1000), given, 2)}
    assert items["data.sequence_length"][1:] == (1000, "set by you")
    assert items["train.lr"].value == 3e-4
    assert "train.validate_every" not in items
    # 500 rows an epoch, 31 a step at the most for 16 steps of it.
    assert items["train.global_batch_size"].value == 16
    assert items["train.steps"].value == math.ceil(2 * 500 / 16)
    assert "2 epochs of 500 rows, 16 a step" in items["train.steps"].why
