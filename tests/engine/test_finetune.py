"""Fine-tuning from a Hugging Face folder: import, train, commit, export, load in transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from penstock.engine.config import ModelConfig
from penstock.engine.export import export
from penstock.engine.hf.config import model_config
from penstock.engine.model.spec import layouts
from penstock.storage.nvme import NvmeStore


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny bfloat16 checkpoint as transformers saves it."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    config = model_config(tiny.recipe(model=tiny.model(tie_embeddings=True)), None)
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def test_a_stopped_fresh_import_exports_byte_equal_and_a_trained_one_loads(tmp_path: Path, model_folder: Path) -> None:
    model = ModelConfig(path=str(model_folder))
    recipe = tiny.recipe(model=model)
    tiny.train_run(tmp_path / "run", tiny.Silent(stop_after=1), model=model, train=tiny.training(lr=1e-30))
    export(tmp_path / "run", recipe, out_dir=tmp_path / "same")
    before, after = load_file(model_folder / "model.safetensors"), load_file(tmp_path / "same" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(before[name].dtype == after[name].dtype and torch.equal(before[name], after[name]) for name in before)

    tiny.train_run(tmp_path / "tuned", tiny.Silent(), model=model)
    export(tmp_path / "tuned", recipe, out_dir=tmp_path / "out")
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert tuned.lm_head.weight is tuned.model.embed_tokens.weight
    assert not torch.equal(tuned.lm_head.weight, before["model.embed_tokens.weight"].float())
    store = NvmeStore.open(tmp_path / "tuned" / "state")
    spec = tiny.spec_of(tuned.config)
    assert set(store.meta) >= {"step", "cursor", "versions"}
    for name, tensor in tiny.parameters(store, spec).items():
        assert torch.equal(tuned.state_dict()[name], tensor.bfloat16().float()), name
    assert set(layouts(spec)) == {array.buffer for array in store.arrays()}
    store.close()


def test_overrides_reach_a_folder_s_config(model_folder: Path) -> None:
    config = model_config(
        tiny.recipe(model=ModelConfig(path=str(model_folder), overrides={"rms_norm_eps": 0.125})), None
    )
    assert config.rms_norm_eps == 0.125
