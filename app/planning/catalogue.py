"""Published models that `penstock fit` plans: their shapes, and what each is made of, read without PyTorch.

What a model is made of lies in catalogue.json.gz, which `python -m penstock.app.planning.catalogue` writes anew; a test
compares it with what is really computed (engine/model/anatomy.py).
"""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from penstock.app.recipes import shipped
from penstock.app.recipes.shapes import llama3, positions_of, qwen3, qwen25, stretched
from penstock.engine.config import DataConfig, ModelConfig, Recipe
from penstock.engine.model.spec import ModelSpec
from penstock.storage.files.errors import UserError

FILE = Path(__file__).with_suffix(".json.gz")
_LARGE_PARAMS = 60 * 10**9
"""From so many parameters on gradients wait in bfloat16, as in the recipes of such models."""


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A published model."""

    name: str
    """As its publisher calls it; its folder below models/ may have a longer name."""
    shape: ModelConfig
    spec: ModelSpec
    """What it is made of, without `config`."""

    @property
    def gradient_dtype(self) -> Literal["float32", "bfloat16"]:
        """train.gradient_dtype of its plans."""
        return "bfloat16" if self.spec.num_params >= _LARGE_PARAMS else "float32"

    def reaching(self, context: int) -> ModelConfig:
        """Its shape for so many tokens: stretched by YaRN where that is more than it reaches by itself."""
        if not self.is_stretched(context):
            return self.shape
        return stretched(self.shape, context, trained=positions_of(self.shape.model_type))

    def is_stretched(self, context: int) -> bool:
        return context > (self.shape.max_position or 0)


def _of_recipe(name: str) -> ModelConfig:
    """The shape that a shipped recipe spells."""
    from penstock.app.recipes.recipe import load_recipe

    return load_recipe(shipped.FOLDER / f"{name}.py").model


_SHAPES: dict[str, Callable[[], ModelConfig]] = {
    "Llama-3.2-1B": lambda: llama3("3.2-1B"),
    "Qwen3-4B": lambda: qwen3("4B"),
    "Qwen2.5-7B": lambda: qwen25("7B"),
    "Llama-3.1-8B": lambda: llama3("3.1-8B"),
    "Qwen2.5-14B": lambda: qwen25("14B"),
    "Qwen3-30B-A3B": lambda: qwen3("30B-A3B"),
    "Qwen2.5-32B": lambda: qwen25("32B"),
    "Llama-3.3-70B": lambda: llama3("3.3-70B-Instruct"),
    "gpt-oss-120b": lambda: _of_recipe("120b_moe"),
    "Mistral-Large-2": lambda: _of_recipe("120b_gh200"),
}
"""By name, the smallest first."""

NAMES = tuple(_SHAPES)


def matching(pattern: str | None) -> list[str]:
    """The names that match `pattern`, words or with * and ?; commas separate several. UserError for none."""
    if pattern is None:
        return list(NAMES)
    words = [word.strip().lower() for word in pattern.split(",") if word.strip()]
    tests = [word if any(char in word for char in "*?[") else f"*{word}*" for word in words]
    result = [name for name in NAMES if any(fnmatch(name.lower(), test) for test in tests)]
    if not result:
        raise UserError(f"--models {pattern}: matches none of {', '.join(NAMES)}")
    return result


def known_model(name: str) -> KnownModel:
    """The model of one of NAMES."""
    return KnownModel(name, _SHAPES[name](), msgspec.json.decode(_contents()[name], type=ModelSpec))


@cache
def _contents() -> dict[str, msgspec.Raw]:
    return msgspec.json.decode(gzip.decompress(FILE.read_bytes()), type=dict[str, msgspec.Raw])


def computed_spec(name: str, context: int = 8192) -> ModelSpec:
    """What the model is made of, taken apart; loads PyTorch and transformers, and takes seconds."""
    from penstock.engine.hf.config import model_config
    from penstock.engine.model.anatomy import model_spec
    from penstock.engine.model.graph_size import find_graph_bytes

    shape = KnownModel(name, _SHAPES[name](), spec=None).reaching(context)  # type: ignore[arg-type]
    recipe = Recipe(
        name="catalogue",
        model=replace(shape, path=None),
        data=DataConfig(source="random", sequence_length=context),
    )
    spec = model_spec(model_config(recipe, recipe.data.tokenizer_vocab_size), recipe)
    find_graph_bytes(spec, recipe.train.compute_dtype, compiled=True)
    return replace(spec, config=None)


if __name__ == "__main__":
    specs = {name: computed_spec(name) for name in NAMES}
    FILE.write_bytes(gzip.compress(msgspec.json.encode(specs), mtime=0))
