"""`penstock finetune` and `penstock data`: from a model and a file to a trained model, and what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from chat_model import make_chat_model, make_tokenizer, talk, write_talks
from chat_templates import THINKING
from cli_process import json_lines, refusal

import penstock
from penstock.app.cli import main
from penstock.app.finetune import given_values, recipe_file, run_name
from penstock.app.recipe import load_recipe
from penstock.storage.errors import UserError

Captured = pytest.CaptureFixture[str]
OURS = ["tiny-chat", "talks.jsonl"]
FAST = ["--set", "train.compile=off", "--set", "train.calibrate=false", "--set", "train.device=cpu"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny chat model and sixty conversations."""
    folder = tmp_path_factory.mktemp("finetune")
    make_chat_model(folder / "tiny-chat")
    write_talks(folder / "talks.jsonl")
    return folder


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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


def test_a_run_is_named_after_both() -> None:
    for model, data, name in (
        ("models/Qwen3-8B/", "a/talks.jsonl.gz", "qwen3-8b-talks"),
        ("hf://Qwen/Qwen3-0.6B@main", "HuggingFaceH4/no_robots", "qwen3-0.6b-no_robots"),
        ("/m/é ü", "..", "x-x"),
        ("m" * 200, "d", "m" * 80),
    ):
        assert run_name(model, data) == name
        assert penstock.Recipe(name=name).name == name


def test_what_is_set_is_read_as_the_fields_types() -> None:
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
    for part in (
        "qwen3, 58.7 k parameters, context 1,024",
        "found by its generation markers",
        "60 documents, 4,350 tokens, of which 20.7% are trained",
        "talks.jsonl:2",
        "«The plum is blue.<|im_end|>»",
        "train.steps 6 set by you",
        "fits on this machine",
        "recipe written to tiny_chat_talks.py",
        "sample, at most 12 tokens by transformers after the prompt",
    ):
        assert part in printed, part
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


def test_from_python_it_is_the_same(here: Path) -> None:
    settings = ["train.steps=1", *FAST[1::2], "after.export=false"]
    run = penstock.finetune("tiny-chat", "talks.jsonl", overrides=settings, out="mine.json", run_dir="out")
    assert load_recipe("mine.json").train.steps == 1
    assert len(json_lines(run / "metrics.jsonl")) == 1
    with pytest.raises(UserError, match=r"mine\.json exists"):
        penstock.finetune("tiny-chat", "talks.jsonl", out="mine.json")
    with pytest.raises(UserError, match=r"does not fit: .*budgets.gpu"):
        penstock.finetune("tiny-chat", "talks.jsonl", overrides=["budgets.gpu=4KiB"])
    assert not (here / "tiny_chat_talks.py").exists()


def test_as_json_nothing_is_asked_written_or_trained(here: Path, capsys: Captured) -> None:
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


def test_a_question_is_asked_on_a_terminal_and_no_keeps_the_recipe(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    error = refusal(capsys, "finetune", *OURS)
    assert "there is no terminal to ask on; add --yes" in error
    assert not (here / "tiny_chat_talks.py").exists()
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.confirm", lambda *args, **options: False)
    assert main(["finetune", *OURS]) == 0
    said = capsys.readouterr().out
    assert "recipe written to tiny_chat_talks.py; to train it again: penstock train tiny_chat_talks.py" in said
    assert not (here / "runs").exists()
    assert recipe_file(load_recipe("tiny_chat_talks.py")) == Path("tiny_chat_talks_2.py")


def test_what_does_not_fit_is_told_and_nothing_is_written(here: Path, capsys: Captured) -> None:
    before = files(here)
    assert main(["finetune", *OURS, "--yes", "--set", "budgets.gpu=4KiB"]) == 1
    printed = capsys.readouterr().out
    assert "does not fit" in printed
    assert "--set" in printed, "what would make it fit"
    assert files(here) == before


def given(
    *words: str, files: dict[str, str | bytes] | None = None, without: tuple[str, ...] = ()
) -> Callable[[Path], list[str]]:
    """A case whose arguments these are, beside these files, where others of the model are gone."""

    def make(here: Path) -> list[str]:
        for name in without:
            (here / "tiny-chat" / name).unlink()
        for name, text in (files or {}).items():
            (here / name).parent.mkdir(exist_ok=True)
            (here / name).write_bytes(text.encode() if isinstance(text, str) else text)
        return list(words)

    return make


def no_template(here: Path) -> list[str]:
    make_tokenizer(here / "tiny-chat", template=None)
    (here / "tiny-chat" / "chat_template.jinja").unlink(missing_ok=True)
    return OURS


def data_of(text: str | bytes, name: str = "bad.jsonl") -> Callable[[Path], list[str]]:
    """A case whose data is a file of that text."""
    return given("tiny-chat", name, files={name: text})


def settings(*texts: str) -> Callable[[Path], list[str]]:
    """A case whose settings are wrong."""
    return given(*OURS, *(word for text in texts for word in ("--set", text)))


def other_adapter(here: Path) -> list[str]:
    """An adapter to go on from whose model is twice as wide."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(here / "tiny-chat")
    config.hidden_size *= 2
    peft = get_peft_model(AutoModelForCausalLM.from_config(config), LoraConfig(r=2, target_modules=["q_proj"]))
    peft.save_pretrained(here / "adapter")
    own = ("adapter.method=lora", "adapter.rank=2", "adapter.alpha=8", 'adapter.targets=["q_proj"]')
    return settings(*own, "adapter.start=adapter")(here)


GOOD = json.dumps(talk(1))
MUTE = json.dumps({"messages": [{"role": "user", "content": "hello"}]})
BAD: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "no model": (given("nothing-here", "talks.jsonl"), "nothing-here"),
    "no weights": (given(*OURS, without=("model.safetensors",)), "contains no *.safetensors"),
    "no tokenizer": (
        given(*OURS, without=("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")),
        "has no tokenizer files",
    ),
    "no template": (no_template, "chat template"),
    "no data": (given("tiny-chat", "nowhere.jsonl"), "nowhere.jsonl"),
    "a model of the hub without a network": (given("hf://nobody/x", "talks.jsonl"), "HF_HUB_OFFLINE is set"),
    "data of the hub without a network": (given("tiny-chat", "hf://nobody/x"), "HF_HUB_OFFLINE is set"),
    "an empty file": (data_of(""), "bad.jsonl"),
    "no JSON": (data_of(f"{GOOD}\n{{not json\n"), "bad.jsonl:2"),
    "unknown columns": (data_of('{"foo": 1}\n'), "foo"),
    "nothing to train": (data_of(f"{GOOD}\n{MUTE}\n"), "bad.jsonl:2"),
    "no text": (data_of(b"\x89PNG\r\n\x1a\n\0\0\0", "bad.png"), "bad.png"),
    "too short a context": (settings("data.sequence_length=8"), "raise"),
    "too short a context for what is dropped": (
        settings("data.sequence_length=16", "data.long_documents=drop"),
        "the shortest document has 29 tokens",
    ),
    "a context beyond the model's": (settings("data.sequence_length=4096"), "max_position_embeddings 1024"),
    "a tracker that nobody is logged in to": (settings('trackers=["wandb"]'), "wandb: you are not logged in"),
    "an adapter of another base": (other_adapter, "was trained on another base model"),
    "no adapter": (settings("adapter.method=lora", "adapter.start=nothing-here"), "nothing-here"),
    "a prompt beyond the context": (
        settings("samples.every=2", f'samples.prompts=["{"long " * 1024}"]'),
        "shorten the prompt",
    ),
    "an unknown field": (settings("train.learning_rate=1"), "train.lr"),
    "no epochs": (given(*OURS, "--epochs", "0"), "--epochs"),
    "a recipe that is there": (given(*OURS, "--out", "mine.py", files={"mine.py": "x = 1\n"}), "mine.py exists"),
    "a recipe of no known kind": (given(*OURS, "--out", "mine.txt"), "must end in .py or .json"),
    "a recipe where none can be": (given(*OURS, "--out", "talks.jsonl/a.py"), "talks.jsonl/a.py: cannot be written"),
    "a run that is there": (given(*OURS, "--run-dir", "taken", files={"taken/file": ""}), "is not empty"),
    "an unknown machine": (given(*OURS, "--machine", "nowhere-9000"), "nowhere-9000"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_leaves_nothing_behind(here: Path, capsys: Captured, case: str) -> None:
    make, part = BAD[case]
    arguments = make(here)
    before = files(here)
    error = refusal(capsys, "finetune", *arguments, "--yes")
    assert part in error
    assert len(error) < 1000
    assert files(here) == before


@pytest.mark.long
def test_another_machine_is_planned_for_and_nothing_trained(here: Path, capsys: Captured) -> None:
    chosen = settings("train.chunk_tokens=64", "train.activation_checkpointing=full", "train.kv_window=whole")(here)
    assert main(["finetune", *chosen, "--machine", "rtx4090-64", "--out", "there.json"]) == 0
    assert "fits on rtx4090-64" in capsys.readouterr().out
    assert load_recipe("there.json").machine == "rtx4090-64"
    assert not (here / "runs").exists()


def test_bad_rows_are_left_out_when_told_to_and_counted(here: Path, capsys: Captured) -> None:
    (here / "mixed.jsonl").write_text(f"{GOOD}\n{MUTE}\n{{broken\n{GOOD}\n")
    assert main(["finetune", "tiny-chat", "mixed.jsonl", "--json", "--set", "data.bad_rows=skip"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["lengths"]["documents"] == 2
    assert any("2 bad rows are skipped" in text for text in found["warnings"])
