"""Fine-tuning from a Hugging Face folder: imported, trained, exported and loaded in transformers; with rotary scaling
that the recipe sets, and with special tokens that it adds: the tokenizer's copy, and the rows they get."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from model_folders import as_users_have_it
from safetensors.torch import load_file
from samples import cases
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from penstock.engine.config import DataConfig, ModelConfig
from penstock.engine.export import export
from penstock.engine.model.spec import layouts
from penstock.storage.errors import UserError
from penstock.storage.nvme import NvmeStore

SCALED: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0},
}
SCALED["llama3"] = SCALED["yarn"] | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def scaled(origin: Path, rope: Any) -> dict[str, Any]:
    overrides = {"rope_parameters": rope, "max_position_embeddings": 256}
    return {
        "model": ModelConfig(path=str(origin), overrides=overrides),
        "data": tiny.data(sequence_length=200, max_documents=4),
        "train": tiny.training(steps=1, chunk_tokens=200, global_batch_size=1),
    }


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return as_users_have_it(tmp_path_factory.mktemp("model") / "origin", "llama", False)


@pytest.mark.parametrize("kind", cases(SCALED, "llama3"))
def test_it_trains_past_the_old_length_and_is_exported(tmp_path: Path, origin: Path, kind: str) -> None:
    run, observer = scaled(origin, SCALED[kind]), tiny.Silent()
    tiny.train_run(tmp_path / "run", observer, **run)
    assert any(message.startswith("self-check: gradients equal") for message in observer.messages)
    export(tmp_path / "run", tiny.recipe(**run), out_dir=tmp_path / "out")
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert values["rope_parameters"] == SCALED[kind]
    assert "rope_scaling" not in values
    assert values["max_position_embeddings"] == 256
    assert AutoConfig.from_pretrained(tmp_path / "out").rope_parameters["rope_type"] == kind
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    before, spec = load_file(origin / "model.safetensors"), tiny.spec_of(tuned.config)
    with closing(NvmeStore.open(tmp_path / "run" / "state")) as store:
        assert set(store.meta) >= {"step", "cursor", "versions"}
        for name, tensor in tiny.parameters(store, spec).items():
            assert torch.equal(tuned.state_dict()[name], tensor.bfloat16().float()), name
            assert "norm" in name or not torch.equal(tensor, before[name].float()), name
        assert set(layouts(spec)) == {array.buffer for array in store.arrays()}


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "yarm", "factor": 4.0, "rope_theta": 10000.0}, "yarm"),
        ({"rope_type": "linear", "rope_theta": 10000.0}, "factor"),
        ({"rope_type": "yarn", "factor": "four", "rope_theta": 10000.0}, "factor"),
        ({"rope_type": "linear", "factor": 0.0, "rope_theta": 10000.0}, "factor"),
        ({"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0, "beta_fats": 1.0}, "beta_fats"),
        ("yarn", "rope_parameters"),
    ],
)
def test_a_slip_in_it_is_one_line(tmp_path: Path, origin: Path, rope: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as found:
        tiny.train_run(tmp_path / "run", tiny.Silent(), **scaled(origin, rope))
    assert "\n" not in str(found.value)


ADDED = ["<|user|>", "<|tool|>"]
TEXT = "some text to train on, and <|user|> some more of it\n"


def sections(folder: Path, origin: Path, added: list[str] = ADDED, **changes: Any) -> dict[str, Any]:
    """Of a run on some text, which is in `folder`."""
    file = folder / "text.txt"
    file.write_text(TEXT * 40)
    data = DataConfig(source="text", path=str(file), sequence_length=16)
    train = tiny.training(**{"steps": 2, "global_batch_size": 1} | changes)
    return {"model": ModelConfig(path=str(origin), added_tokens=added), "data": data, "train": train}


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
    # A rate at which bfloat16 keeps every value: what is exported is what was imported.
    run, observer = sections(tmp_path, origin, lr=1e-30), tiny.Silent()
    tiny.train_run(tmp_path / "run", observer, **run)
    said = next(message for message in observer.messages if "tokens added" in message)
    grows, has = f"grows from {size} to {size + 2} rows", f"has {size + spare} rows, with spare rows for them"
    assert said == f"2 tokens added: the embedding {has if spare else grows}; new rows are the mean of the others"
    export(tmp_path / "run", tiny.recipe(**run), out_dir=tmp_path / "out", dtype="float32")
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
    origin = as_users_have_it(tmp_path / "origin", "llama", True)
    size = len(AutoTokenizer.from_pretrained(origin))
    run = sections(tmp_path, origin, weight_decay=0.0)
    tiny.train_run(tmp_path / "run", tiny.Silent(stop_after=1), **run)
    tiny.train_run(tmp_path / "run", tiny.Silent(), resume=True, **run)
    export(tmp_path / "run", tiny.recipe(**run), out_dir=tmp_path / "out", dtype="float32")
    rows = load_file(tmp_path / "out" / "model.safetensors")["model.embed_tokens.weight"][size : size + 2]
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
    with pytest.raises(UserError, match=message) as found:
        tiny.train_run(tmp_path / "run", tiny.Silent(), **sections(tmp_path, origin, added))
    assert "\n" not in str(found.value)
    assert not list((tmp_path / "run").rglob("tokenizer*.json"))


def test_a_tokenizer_beyond_the_embedding_is_refused_with_the_way_out(tmp_path: Path) -> None:
    origin = model_of(tmp_path / "origin", True, 200)
    with pytest.raises(UserError, match=r"beyond the model's vocabulary of 200; .*model\.added_tokens"):
        tiny.train_run(tmp_path / "run", tiny.Silent(), **sections(tmp_path, origin, []))


@pytest.mark.parametrize("pattern", ["*embed_tokens*", "lm_head*"])
def test_rows_that_would_never_be_trained_are_not_added(tmp_path: Path, pattern: str) -> None:
    origin = as_users_have_it(tmp_path / "origin", "llama", False)
    said = rf"model\.added_tokens: the rows of new tokens must be trained, but train\.freeze freezes .*{pattern[1:6]}"
    with pytest.raises(UserError, match=said):
        tiny.train_run(tmp_path / "run", tiny.Silent(), **sections(tmp_path, origin, freeze=[pattern]))
    assert not (tmp_path / "run" / "state").exists()
