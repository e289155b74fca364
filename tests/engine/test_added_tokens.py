"""Special tokens that a recipe adds: the tokenizer's copy, the rows they get, and the model that comes of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from model_folders import as_users_have_it
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.engine.config import DataConfig, ModelConfig
from penstock.engine.export import export
from penstock.storage.errors import UserError

ADDED = ["<|user|>", "<|tool|>"]
TEXT = "some text to train on, and <|user|> some more of it\n"


def text_file(folder: Path) -> Path:
    file = folder / "text.txt"
    file.write_text(TEXT * 40)
    return file


def model_of(folder: Path, tied: bool, rows: int) -> Path:
    """A model folder whose embedding has so many rows, its tokenizer 257 or a few more."""
    as_users_have_it(folder, "llama", tied)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(rows)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("tied", "spare"), [(False, 0), (True, 9)])
def test_rows_begin_as_the_mean_are_trained_and_exported(tmp_path: Path, tied: bool, spare: int) -> None:
    plain = as_users_have_it(tmp_path / "plain", "llama", tied)
    size = len(AutoTokenizer.from_pretrained(plain))
    origin = model_of(tmp_path / "origin", tied, size + spare)
    model = ModelConfig(path=str(origin), added_tokens=ADDED)
    data = DataConfig(source="text", path=str(text_file(tmp_path)), sequence_length=16)
    observer = tiny.Silent()
    # A rate at which bfloat16 keeps every value: what is exported is what was imported.
    sections = {"model": model, "data": data, "train": tiny.training(steps=2, lr=1e-30)}
    tiny.train_run(tmp_path / "run", observer, **sections)
    said = next(message for message in observer.messages if "tokens added" in message)
    grows, has = f"grows from {size} to {size + 2} rows", f"has {size + spare} rows, with spare rows for them"
    assert said == f"2 tokens added: the embedding {has if spare else grows}; new rows are the mean of the others"
    export(tmp_path / "run", tiny.recipe(**sections), out_dir=tmp_path / "out", dtype="float32")
    before, after = load_file(origin / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    tables = ["model.embed_tokens.weight"] + ([] if tied else ["lm_head.weight"])
    for name in tables:
        assert len(after[name]) == max(size + 2, size + spare)
        mean = before[name][:size].float().mean(dim=0)
        assert torch.allclose(after[name][size : size + 2], mean.expand(2, -1), atol=1e-6)
        rest = [*range(size), *range(size + 2, size + spare)]
        assert torch.allclose(after[name][rest], before[name].float()[rest], rtol=0, atol=1e-20)
    assert before.keys() == after.keys()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("a<|user|>b")["input_ids"].count(size) == 1
    assert tokenizer.convert_tokens_to_ids(ADDED) == [size, size + 1]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.config.vocab_size == max(size + 2, size + spare)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    ids = loaded.generate(**tokenizer("some<|user|>", return_tensors="pt"), max_new_tokens=3, do_sample=False)
    assert ids.shape[1] > 3


def test_new_rows_are_trained(tmp_path: Path) -> None:
    origin = model_of(
        tmp_path / "origin", True, len(AutoTokenizer.from_pretrained(as_users_have_it(tmp_path / "m", "llama", True)))
    )
    sections = {
        "model": ModelConfig(path=str(origin), added_tokens=ADDED),
        "data": DataConfig(source="text", path=str(text_file(tmp_path)), sequence_length=16),
        "train": tiny.training(steps=2, weight_decay=0.0),
    }
    tiny.train_run(tmp_path / "run", tiny.Silent(stop_after=1), **sections)
    tiny.train_run(tmp_path / "run", tiny.Silent(), resume=True, **sections)
    export(tmp_path / "run", tiny.recipe(**sections), out_dir=tmp_path / "out", dtype="float32")
    rows = load_file(tmp_path / "out" / "model.safetensors")["model.embed_tokens.weight"][-2:]
    assert not torch.allclose(rows[0], rows[1], atol=1e-4), "the one that occurs moves another way"


@pytest.mark.parametrize(
    ("added", "message"),
    [
        (["<a>", "<a>"], r"model\.added_tokens: '<a>' is listed twice"),
        (["  "], "is not a token"),
        (["<|endoftext|>"], r"'<\|endoftext\|>' is already a token of .*; remove it"),
    ],
)
def test_tokens_that_cannot_be_added(tmp_path: Path, added: list[str], message: str) -> None:
    origin = as_users_have_it(tmp_path / "origin", "llama", True)
    sections = {
        "model": ModelConfig(path=str(origin), added_tokens=added),
        "data": DataConfig(source="text", path=str(text_file(tmp_path)), sequence_length=16),
    }
    with pytest.raises(UserError, match=message) as found:
        tiny.train_run(tmp_path / "run", tiny.Silent(), **sections)
    assert "\n" not in str(found.value)
    assert not list((tmp_path / "run").rglob("tokenizer*.json"))


def test_a_tokenizer_beyond_the_embedding_is_refused_with_the_way_out(tmp_path: Path) -> None:
    origin = model_of(tmp_path / "origin", True, 200)
    data = DataConfig(source="text", path=str(text_file(tmp_path)), sequence_length=16)
    with pytest.raises(UserError, match=r"beyond the model's vocabulary of 200; .*model\.added_tokens"):
        tiny.train_run(tmp_path / "run", tiny.Silent(), model=ModelConfig(path=str(origin)), data=data)


@pytest.mark.parametrize("pattern", ["*embed_tokens*", "lm_head*"])
def test_rows_that_would_never_be_trained_are_not_added(tmp_path: Path, pattern: str) -> None:
    origin = as_users_have_it(tmp_path / "origin", "llama", False)
    sections = {
        "model": ModelConfig(path=str(origin), added_tokens=ADDED),
        "data": DataConfig(source="text", path=str(text_file(tmp_path)), sequence_length=16),
        "train": tiny.training(freeze=[pattern]),
    }
    said = rf"model\.added_tokens: the rows of new tokens must be trained, but train\.freeze freezes .*{pattern[1:6]}"
    with pytest.raises(UserError, match=said):
        tiny.train_run(tmp_path / "run", tiny.Silent(), **sections)
    assert not (tmp_path / "run" / "state").exists()
