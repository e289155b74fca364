"""Rotary scaling that a recipe sets over a model folder's: trained as transformers computes it, and exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from model_folders import as_users_have_it
from samples import cases
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.engine.config import ModelConfig
from penstock.engine.export import export
from penstock.storage.errors import UserError

SCALED: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 10000.0,
    },
}


def sections(origin: Path, rope: Any) -> dict[str, Any]:
    overrides = {"rope_parameters": rope, "max_position_embeddings": 256}
    return {
        "model": ModelConfig(path=str(origin), overrides=overrides),
        "data": tiny.data(sequence_length=200, max_documents=4),
        "train": tiny.training(steps=1, chunk_tokens=64, global_batch_size=1),
    }


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return as_users_have_it(tmp_path_factory.mktemp("model") / "origin", "llama", False)


@pytest.mark.parametrize("kind", cases(SCALED, "yarn", "llama3"))
def test_it_trains_past_the_old_length_and_is_exported(tmp_path: Path, origin: Path, kind: str) -> None:
    run, observer = sections(origin, SCALED[kind]), tiny.Silent()
    tiny.train_run(tmp_path / "run", observer, **run)
    assert any(message.startswith("self-check: gradients equal") for message in observer.messages)
    export(tmp_path / "run", tiny.recipe(**run), out_dir=tmp_path / "out")
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert values["rope_parameters"] == SCALED[kind]
    assert "rope_scaling" not in values
    assert values["max_position_embeddings"] == 256
    assert AutoConfig.from_pretrained(tmp_path / "out").rope_parameters["rope_type"] == kind
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


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
        tiny.train_run(tmp_path / "run", tiny.Silent(), **sections(origin, rope))
    assert "\n" not in str(found.value)
