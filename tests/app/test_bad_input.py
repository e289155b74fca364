"""What a user may get wrong: one message that names it, exit code 2, and nothing lost."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bad_inputs import catalogue, faults, run, setting, tiny
from bad_model_files import CONFIG
from cli_process import refusal
from transformers import GPT2Config, PretrainedConfig, Qwen3Config

from penstock.engine.config import DataConfig
from penstock.engine.data.corpus import require_text
from penstock.engine.model.anatomy import take_apart, validate_context
from penstock.storage.errors import UserError

Train = Callable[..., str]


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Train:
    """Trains a tiny recipe with `--set` texts, which must fail with exit code 2; returns the one message."""
    tiny(tmp_path)
    monkeypatch.chdir(tmp_path)

    def train(*overrides: str) -> str:
        return refusal(capsys, *setting("train", *overrides))

    return train


NO_SIZES = ["0", "-1", "-5GiB", "0GiB", "0.1B", "nan", "inf", "1e999GiB", "", "5 apples"]
HUGE = ["2000000TB", "9" * 30, "9" * 400 + "GiB"]


@pytest.mark.parametrize(("tier", "sizes"), [("gpu", NO_SIZES + HUGE), ("ram", HUGE[:1]), ("nvme", NO_SIZES[:1])])
def test_a_budget_that_is_no_size_or_that_no_machine_has(refused: Train, tier: str, sizes: list[str]) -> None:
    for size in sizes:
        reason = "is larger than any machine" if size in HUGE else "is not a size; write for example"
        assert f"budgets.{tier}: '{size}' {reason}" in refused(f"budgets.{tier}={size}")


def test_data_without_a_token(refused: Train, tmp_path: Path) -> None:
    for number, (source, files) in enumerate(
        (
            ("text", {"a.txt": ""}),
            ("text", {}),
            ("text", {"a.txt": " \n\t \n", "b.txt": "\n"}),
            ("jsonl", {"a.jsonl": "\n\n"}),
            ("jsonl", {"a.jsonl": '{"text": ""}\n{"text": "  "}\n'}),
        )
    ):
        empty = tmp_path / f"empty{number}"
        empty.mkdir()
        for name, text in files.items():
            (empty / name).write_text(text)
        message = refused(f"data.source={source}", f"data.path={empty}")
        assert f"data.source: the corpus is empty: {source} found no text in {empty}" in message


def test_data_without_files_of_rows_path_or_documents(refused: Train, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("text\n")
    assert "texts holds no file of rows (.json, .jsonl" in refused("data.source=jsonl", "data.path=texts")
    with pytest.raises(UserError, match=r"data\.path: required with data\.source=jsonl"):
        require_text(DataConfig(source="jsonl"))
    assert "data.max_documents: 0 must be at least 1" in refused("data.max_documents=0")


def test_data_with_text_passes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(" \n")
    (tmp_path / "b.txt").write_text(" a")
    for data in (DataConfig(source="text", path=str(tmp_path)), DataConfig(source="random"), DataConfig()):
        require_text(data)


def test_a_context_beyond_the_model_s_positions(refused: Train) -> None:
    short = refused("model.max_position=32")
    assert "data.sequence_length: 64 tokens exceed the 32 positions" in short
    assert "'default'" in short
    assert "yarn with a factor of 2 over 32" in short
    yarn = '{"rope_type": "yarn", "factor": 1.5, "original_max_position_embeddings": 32, "rope_theta": 1e6}'
    message = refused(f"model.overrides.rope_parameters={yarn}", "model.overrides.max_position_embeddings=64")
    for part in ("64 tokens exceed the 48 positions", "max_position_embeddings 64", "'yarn'", "factor of 2 over 32"):
        assert part in message


def rope(kind: str, **values: object) -> PretrainedConfig:
    return Qwen3Config(**CONFIG, rope_parameters={"rope_type": kind, "rope_theta": 1e4, **values})


def test_how_far_positions_reach() -> None:
    small: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 300}
    absolute = GPT2Config(**small, n_positions=96, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    for config, reach in (
        (rope("default"), 128),
        (rope("linear", factor=4.0), 128),
        (rope("yarn", factor=2.0, original_max_position_embeddings=32), 64),
        (rope("yarn", factor=2.5, original_max_position_embeddings=128), 320),
        (absolute, 96),
    ):
        spec = take_apart(config)
        validate_context(spec, reach)
        with pytest.raises(UserError, match=f"{reach + 1} tokens exceed the {reach} positions") as caught:
            validate_context(spec, reach + 1)
        assert ("rope_parameters" in str(caught.value)) == (config.model_type != "gpt2")
    validate_context(take_apart(rope("dynamic", factor=2.0)), 10**6)


INPUTS = {f"{bad.family}: {bad.name}".encode("unicode_escape").decode(): bad for bad in catalogue()}


def test_the_catalogue_is_large() -> None:
    assert len(INPUTS) >= 300


@pytest.mark.parametrize("name", INPUTS)
def test_a_bad_input_is_one_message(name: str, tmp_path: Path) -> None:
    found = run(INPUTS[name], tmp_path)
    assert faults(INPUTS[name], found) == [], found


def test_an_adapter_that_does_not_fit(refused: Train, tmp_path: Path) -> None:
    for settings, message in (
        (['adapter.targets=["q_porj"]'], "'q_porj' matches no module of the model; the nearest are q_proj"),
        (["adapter.rank=100000"], "adapter.rank: 100000 is larger than the smallest side of 'model.layers.0."),
        (["adapter.rank=0"], "adapter.rank: 0 must be at least 1"),
        (["adapter.targets=[]"], "adapter.targets: the list is empty"),
        (["adapter.start=nowhere"], "nowhere: has no adapter_config.json"),
        (['train.freeze=["*lora_A*"]'], "train.freeze: cannot be used with an adapter"),
        (['model.added_tokens=["<new>"]'], "model.added_tokens: cannot be used with an adapter"),
        (["after.export_merged=true"], "after.export_merged: true, but nothing is exported"),
        (["adapter.method=none", "adapter.start=nowhere"], "adapter.start: names an adapter to continue from, but"),
    ):
        assert message in refused("adapter.method=lora", *settings)
    assert not list(tmp_path.glob("runs/*/state/manifest.json"))
