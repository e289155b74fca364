"""Where a model comes from: a folder, a shape, both, or neither."""

import json
from pathlib import Path
from typing import Any

import bad_model_files
import pytest
from recipe_texts import TINY
from transformers import PretrainedConfig

from penstock.app.launch import from_scratch, require_weights
from penstock.app.recipe import from_json, to_json
from penstock.engine.config import DataConfig, ModelConfig, Recipe
from penstock.engine.data.tokenizer import train_tokenizer
from penstock.engine.hf.config import model_config
from penstock.engine.model.anatomy import take_apart
from penstock.storage.errors import UserError

SHAPE = TINY["model"] | {"vocab_size": 300, "max_position": 128}
CONFIG = bad_model_files.CONFIG | {"rms_norm_eps": 1e-3, "rope_theta": 5e5, "rope_scaling": None}
del CONFIG["torch_dtype"]
DATA = DataConfig(source="random", sequence_length=32)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 5e5}


def config_of(model: ModelConfig) -> PretrainedConfig:
    return model_config(Recipe(name="x", model=model, data=DATA), None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder with a config.json and no weights."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def test_a_folder_and_its_shape_are_one_model(folder: Path) -> None:
    config = config_of(ModelConfig(path=str(folder), **SHAPE))
    assert (config.rms_norm_eps, config.rope_parameters["rope_theta"]) == (1e-3, 5e5)
    assert config.to_dict() == config_of(ModelConfig(path=str(folder / "config.json"))).to_dict()


def test_a_shape_that_is_not_the_folder_s_is_named(folder: Path) -> None:
    others: dict[str, tuple[Any, str]] = {
        **{"num_layers": (3, "2"), "hidden_size": (64, "32"), "intermediate_size": (97, "64"), "num_heads": (8, "4")},
        **{"num_kv_heads": (4, "2"), "head_dim": (32, "8"), "vocab_size": (301, "300"), "max_position": (64, "128")},
        **{"model_type": ("mistral", "qwen3"), "tie_embeddings": (True, "False")},
    }
    for field, (value, found) in others.items():
        with pytest.raises(UserError, match=r"--set model\.path=") as caught:
            config_of(ModelConfig(path=str(folder), **(SHAPE | {field: value})))
        assert f"model.{field}: {value} in the recipe, but {found} in {folder}" in str(caught.value)


def test_overrides_go_on_top_of_folder_and_shape(folder: Path, tmp_path: Path) -> None:
    for former in (None, {"rope_type": "yarn", "factor": 2.0}):
        (folder / "config.json").write_text(json.dumps(CONFIG | {"rope_scaling": former}))
        for path in (folder, tmp_path / "none"):
            model = ModelConfig(path=str(path), **SHAPE, overrides={"rope_parameters": YARN})
            assert config_of(model).rope_parameters == YARN
            assert model.overrides == {"rope_parameters": YARN}


def test_from_scratch_takes_the_recipe_s_shape_and_the_folder_s_tokenizer(folder: Path, tmp_path: Path) -> None:
    recipe = Recipe(name="x", model=ModelConfig(path=str(tmp_path / "none"), **SHAPE))
    assert from_scratch(recipe) == Recipe(name="x", model=ModelConfig(**SHAPE))
    assert from_scratch(Recipe(name="x")) == Recipe(name="x")
    recipe = Recipe(name="x", model=ModelConfig(path=str(folder), **SHAPE))
    assert from_scratch(recipe).data.tokenizer is None
    train_tokenizer(["some text"] * 10, 300, folder)
    assert from_scratch(recipe).data.tokenizer == str(folder)


def test_from_scratch_takes_the_folder_s_shape_where_the_recipe_has_none(folder: Path) -> None:
    recipe = Recipe(name="x", model=ModelConfig(path=str(folder), overrides={"rope_parameters": YARN}), data=DATA)
    scratch = from_scratch(recipe)
    assert from_json(to_json(scratch)) == scratch
    assert (scratch.model.path, scratch.model.vocab_size) == (None, 300)
    ours, theirs = (config_of(r.model) for r in (scratch, recipe))
    assert ours.to_diff_dict() == theirs.to_diff_dict()
    assert take_apart(ours).buffers == take_apart(theirs).buffers


def test_without_any_shape_it_is_refused(tmp_path: Path) -> None:
    model = ModelConfig(path=str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"model\.path: .*none does not exist, and the recipe gives no shape"):
        config_of(model)
    with pytest.raises(UserError, match=r"--from-scratch: the recipe gives no shape, and model\.path .*none does not"):
        from_scratch(Recipe(name="x", model=model))


def test_weights_are_looked_for_before_anything_else(folder: Path) -> None:
    def recipe(path: Path) -> Recipe:
        return Recipe(name="x", model=ModelConfig(path=str(path)))

    reasons = {"": r"contains no \*\.safetensors", "config.json": "is not a folder", "none": "does not exist"}
    for name, reason in reasons.items():
        with pytest.raises(UserError, match=f"{reason}; put the model's .* --set model.path=.* --from-scratch"):
            require_weights(recipe(folder / name))
    (folder / "model.safetensors").write_bytes(b"")
    require_weights(recipe(folder))
    require_weights(Recipe(name="x"))
