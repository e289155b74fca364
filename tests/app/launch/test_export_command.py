"""`penstock export`: dtype and size of files, the model card, and the push to the hub."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cli_process import refusal
from fake_hub import FakeHub, fake_hub
from model_folders import as_users_have_it
from safetensors.torch import load_file

import penstock
from penstock import AdapterConfig, AfterConfig, BudgetConfig, DataConfig, ModelConfig, Recipe, TrainConfig
from penstock.app.cli.main import main
from penstock.app.hub.push import require_push
from penstock.app.recipes.recipe import from_dict
from penstock.app.runs.directory import read_recipe
from penstock.storage.files.errors import UserError

Captured = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps from a model of the hub's cache, whose files are links to blobs, on a text, validated."""
    folder = tmp_path_factory.mktemp("run")
    model = as_users_have_it(folder / "hub/models--small--llama/snapshots" / ("ab" * 20), "llama", True)
    blobs = model.parents[1] / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(model.iterdir())):
        file.rename(blobs / f"b{number}")
        file.symlink_to(f"../../blobs/b{number}")
    (folder / "text").mkdir()
    for number in range(8):
        (folder / "text" / f"{number}.txt").write_text("some text to train on\n" * 5)
    recipe = Recipe(
        name="tuned",
        model=ModelConfig(path=str(model)),
        data=DataConfig(source="text", path=str(folder / "text"), sequence_length=16, validation_documents=2),
        train=TrainConfig(steps=2, validate_every=2, compile="off", calibrate=False, device="cpu"),
        budgets=BudgetConfig(gpu="1GiB", ram="1GiB"),
    )
    return penstock.train(recipe, run_dir=folder / "run")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: Patch) -> Iterator[FakeHub]:
    from huggingface_hub import constants

    with fake_hub() as running:
        for name in ("HF_HUB_OFFLINE", "PENSTOCK_OFFLINE_BY_DEFAULT"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HF_TOKEN", running.token)
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        yield running


def test_options_and_what_is_said(run: Path, tmp_path: Path, capsys: Captured) -> None:
    for options, message in (
        (["--dtype", "int8"], "--dtype int8: write bf16, fp16 or fp32"),
        (["--max-shard-size", "big"], "--max-shard-size: 'big' is not a size"),
        (["--push", "x"], "write hf://OWNER/NAME"),
        (["--push", "me/model@v1"], "uploads to the main branch"),
        (["--merged"], "this run trains no adapter"),
    ):
        assert message in refusal(capsys, "export", str(run), str(tmp_path / "out"), *options)
        assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match=r"after\.push: .* set after\.export=true"):
        penstock.plan(Recipe(name="x", after=AfterConfig(push="me/tuned")))
    out = tmp_path / "my model"
    assert main(["export", str(run), str(out), "--dtype", "fp32", "--max-shard-size", "30kB"]) == 0
    said = capsys.readouterr().out
    for part in ("exported to", f"python convert_hf_to_gguf.py '{out}' --outtype bf16", "ollama create"):
        assert part in said
    shards = sorted(out.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert {t.dtype for shard in shards for t in load_file(shard).values()} == {torch.float32}
    assert not list(out.glob(".*"))
    assert not any(file.is_symlink() for file in out.iterdir())


def test_the_card_says_what_the_model_was_made_of(run: Path, tmp_path: Path, hub: FakeHub) -> None:
    penstock.export(run, tmp_path / "out")
    assert hub.requests == [], "nothing is pushed unasked"
    card = (tmp_path / "out" / "README.md").read_text()
    front = card.split("---\n")[1]
    for part in ("library_name: transformers", "base_model: small/llama", "- penstock"):
        assert part in front
    assert re.search(r"\| steps \| 2 of 2 \|", card)
    for loss in ("training loss", "validation loss"):
        assert re.search(rf"\| {loss} \| \d+\.\d{{4}} \(step 2\) \|", card)
    content = json.loads((run / "data" / "corpus" / "meta.json").read_text())["content"]
    assert f"| SHA-256 of the tokens | `{content}` |" in card
    assert "8 documents" in card
    block = json.loads(re.search(r"```json\n(.*?)\n```", card, re.DOTALL)[1])
    made = read_recipe(run)
    assert block["model"]["path"] == "hf://small/llama@" + "ab" * 20
    block["model"]["path"] = made.model.path
    assert from_dict(block) == made
    assert "penstock train recipe.json" in card
    assert "transformers " in card


def test_a_push_makes_a_private_repository(run: Path, tmp_path: Path, hub: FakeHub, capsys: Captured) -> None:
    assert main(["export", str(run), str(tmp_path / "out"), "--push", "me/tuned"]) == 0
    assert "a new private repository" in capsys.readouterr().out
    pushed = hub.repos["models/me/tuned"]
    assert pushed.private
    assert pushed.files == {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    hub.repos["models/me/tuned"].private = False
    assert main(["export", str(run), str(tmp_path / "again"), "--push", "hf://me/tuned", "--dtype", "fp32"]) == 0
    assert "new private" not in capsys.readouterr().out
    assert not pushed.private
    assert pushed.files["model.safetensors"] == (tmp_path / "again" / "model.safetensors").read_bytes()


def test_a_push_that_fails(run: Path, tmp_path: Path, hub: FakeHub, capsys: Captured, monkeypatch: Patch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_bad")
    error = refusal(capsys, "export", str(run), str(tmp_path / "out"), "--push", "me/tuned")
    assert "`hf auth login`" in error
    assert f"hf upload me/tuned {tmp_path / 'out'}" in error
    assert (tmp_path / "out" / "README.md").exists()
    monkeypatch.delenv("HF_TOKEN")
    error = refusal(capsys, "export", str(run), str(tmp_path / "none"), "--push", "me/tuned")
    assert "you are not logged in" in error
    assert not (tmp_path / "none").exists()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("PENSTOCK_OFFLINE_BY_DEFAULT", raising=False)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set"):
        require_push("me/tuned")


def test_an_adapter_is_exported_as_its_folder_or_merged(run: Path, tmp_path: Path, capsys: Captured) -> None:
    """At the end of its run, which asks it to go on with a prompt, and by the command."""
    adapter = AdapterConfig(method="lora", rank=2, targets=["q_proj"])
    after = AfterConfig(export=True, sample_prompt="some text", sample_tokens=3)
    adapter_run = penstock.train(replace(read_recipe(run), adapter=adapter, after=after), run_dir=tmp_path / "run")
    capsys.readouterr()
    out = adapter_run / "export"
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == "small/llama"
    assert (out / "tokenizer.json").exists()
    card = (out / "README.md").read_text()
    front = card.split("---\n")[1]
    for part in ("library_name: peft", "base_model: small/llama", "base_model_relation: adapter"):
        assert part in front
    assert "A lora adapter of " in card
    assert 'PeftModel.from_pretrained(base, "export")' in card
    assert main(["export", str(adapter_run), str(tmp_path / "merged"), "--merged", "--dtype", "fp32"]) == 0
    assert "convert_hf_to_gguf.py" in capsys.readouterr().out
    assert {t.dtype for t in load_file(tmp_path / "merged" / "model.safetensors").values()} == {torch.float32}
    assert "with a lora adapter merged in" in (tmp_path / "merged" / "README.md").read_text()
    assert main(["export", str(adapter_run), str(tmp_path / "adapter"), "--dtype", "bf16"]) == 0
    assert "vllm serve small/llama --enable-lora" in capsys.readouterr().out
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
