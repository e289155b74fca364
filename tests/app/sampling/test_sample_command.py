"""`penstock sample`: what it prints, a chat, and what it refuses."""

import io
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from chat_model import make_chat_model
from cli_process import refusal
from recipe_texts import tiny_recipe
from transformers import AutoModelForCausalLM, AutoTokenizer

import penstock
from penstock.app.cli.main import main
from penstock.app.launch.run import sample_text
from penstock.app.runs.directory import RunLock
from penstock.app.sampling.sample import chat, decoding_of, opened
from penstock.storage.files.untrusted import printable

SMALL = ["--gpu", "1GiB", "--ram", "1GiB"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("models") / "talker", max_position_embeddings=256)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "corpus").mkdir()
    (folder / "corpus" / "a.txt").write_text("def f(x):\n    return x\n" * 200)
    recipe = tiny_recipe(train={"steps": 1})
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return penstock.train(recipe, run_dir="run").resolve()


def continued(model: Path, ids: list[int], tokens: int) -> list[int]:
    """By transformers, greedily."""
    with torch.no_grad():
        transformer = AutoModelForCausalLM.from_pretrained(model)
        made = transformer.generate(torch.tensor([ids]), max_new_tokens=tokens, do_sample=False)
    return list(made[0, len(ids) :].tolist())


def by_transformers(model: Path, prompt: str, tokens: int) -> str:
    tokenizer = AutoTokenizer.from_pretrained(model)
    return str(tokenizer.decode(continued(model, tokenizer(prompt).input_ids, tokens)))


def test_texts_are_continued_and_what_it_takes_is_said_first(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ["What colour has the apple?", "The"]
    expected = [by_transformers(model, prompt, 6) for prompt in prompts]
    assert penstock.sample(model, prompts, tokens=6, gpu="1GiB", ram="1GiB") == expected
    assert main(["sample", str(model), "--prompt", prompts[0], "--tokens", "6", *SMALL]) == 0
    said = capsys.readouterr()
    assert said.out == prompts[0] + expected[0] + "\n"
    before, after = said.err.strip().split("\n")[-2:]
    taken = "parameters in float32.*stay in memory; keys and values stay in memory; about .* a token, .*bound by"
    assert re.search(taken, before)
    assert after.startswith("6 passes in ")
    arguments = ["--prompt", prompts[0], "--prompt", prompts[1], "--tokens", "6", "--json"]
    assert main(["sample", str(model), *arguments, *SMALL]) == 0
    found = json.loads(capsys.readouterr().out)
    assert ([one["text"] for one in found["samples"]], found["passes"]) == (expected, 6)


def test_a_finished_run_s_sample_is_the_prompt_and_tokens_drawn_with_a_seed(model: Path, tmp_path: Path) -> None:
    """A model that is all but certain of each token leaves the draw one choice: the most likely tokens."""
    assert sample_text(model, "What colour", 12) == sample_text(model, "What colour", 12)
    folder = Path(shutil.copytree(model, tmp_path / "certain"))
    certain = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        certain.get_output_embeddings().weight.mul_(1e5)
    certain.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("What colour").input_ids
    likeliest = continued(folder, ids, 12)
    assert len(likeliest) == 12
    assert sample_text(folder, "What colour", 12) == tokenizer.decode(ids + likeliest, skip_special_tokens=True)


def test_a_run_is_asked_as_it_is_and_by_its_checkpoint(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = penstock.export(run, tmp_path / "export")
    expected = by_transformers(out, "def", 5)
    file = tmp_path / "prompt"
    file.write_text("def")
    assert main(["sample", str(run), "--prompt-file", str(file), "--tokens", "5", *SMALL]) == 0
    assert capsys.readouterr().out == printable(f"def{expected}\n")
    assert main(["checkpoint", str(run), "kept"]) == 0
    lock = RunLock(run)
    try:
        said = refusal(capsys, "sample", str(run), "--prompt", "def")
        assert "is running; keep a checkpoint of it" in said
        assert penstock.sample(run, "def", tokens=5, checkpoint="kept", gpu="1GiB", ram="1GiB") == [expected]
    finally:
        lock.release()


def test_a_chat_reads_what_is_new_and_answers_by_the_template(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[str] = []
    said = iter(["What colour has the apple?", "", "And the pear?", None])
    with opened(model, gpu="1GiB", ram="1GiB") as found:
        decoding = decoding_of(found, 5, 0.0, 1.0, 0)
        messages = chat(found, decoding, lambda: next(said), on_text=shown.append)
        expected = continued(model, found.encode_chat(messages[:3]), 5)
    assert not set(expected) & found.stop_ids
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    assert messages[3]["content"] == AutoTokenizer.from_pretrained(model).decode(expected)
    assert "".join(shown) == "".join(message["content"] + "\n" for message in messages[1::2])
    monkeypatch.setattr("sys.stdin", io.StringIO("What colour has the apple?\n"))
    asks, answer = ["--prompt", "What colour has the apple?"], messages[1]["content"] + "\n"
    answers = "".join(f"[{number}] {asks[1]}\n{answer}\n" for number in (1, 2))
    for prompts, printed in (([], answer), (asks, answer), ([*asks, *asks], answers)):
        assert main(["sample", str(model), "--chat", *prompts, "--tokens", "5", *SMALL]) == 0
        assert capsys.readouterr().out == printed
    assert penstock.sample(model, asks[1], chat=True, tokens=5, gpu="1GiB", ram="1GiB") == [messages[1]["content"]]


def test_what_it_refuses(
    model: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line each."""
    monkeypatch.chdir(tmp_path)
    make_chat_model(Path("mute"), template=None)
    shutil.copytree(model, "bare", ignore=shutil.ignore_patterns("*token*", "chat_template.jinja"))
    for name in ("empty", "unborn"):
        Path(name).mkdir()
    shutil.copy(run / "recipe.json", "unborn")

    def refused(*arguments: str) -> str:
        return refusal(capsys, "sample", *arguments)

    asks = ["--prompt", "x"]
    assert "prompt 1: " in (said := refused(str(model), "--prompt", "apple " * 300))
    assert "and the model's context is 256; shorten it" in said
    assert "it has no tokenizer" in refused("bare", *asks)
    assert "has no chat template" in refused("mute", "--chat")
    assert "not a model: neither a run, which has a recipe.json, nor a Hugging Face folder" in refused("empty", *asks)
    assert "nothing: no such run" in refused("nothing", *asks)
    assert "unborn" in refused("unborn", *asks)
    assert "only runs have checkpoints" in refused(str(model), *asks, "--checkpoint", "x")
    assert "checkpoint" in refused(str(run), *asks, "--checkpoint", "never")
    assert "--gpu: 64KiB cannot hold one block" in (said := refused(str(model), *asks, "--gpu", "64KiB"))
    assert "give at least " in said
    assert "--gpu: 'much' is not a size" in refused(str(model), *asks, "--gpu", "much")
    assert "give --prompt TEXT, --prompt-file FILE or --chat" in refused(str(model))
    interactive = "--json: cannot be used in an interactive chat; give --prompt TEXT"
    assert interactive in refused(str(model), "--chat", "--json")
    assert "--top-p: 0 must be above 0" in refused(str(model), *asks, "--top-p", "0")
    for option in (("--top-p", "0.5"), ("--seed", "7")):
        assert f"{option[0]}: has no effect, as --temperature 0 always" in refused(str(model), *asks, *option)
    assert "--temperature: -1" in refused(str(model), *asks, "--temperature", "-1")
    assert "--tokens: 0" in refused(str(model), *asks, "--tokens", "0")
    assert "an empty prompt" in refused(str(model), "--prompt", "")
    assert "cannot be read" in refused(str(model), "--prompt-file", "nowhere")
