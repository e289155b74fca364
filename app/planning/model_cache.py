"""What models are made of, kept between plans, as PyTorch takes seconds for it. A training never reads it."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import msgspec

from penstock import engine
from penstock.engine.config import Recipe
from penstock.engine.model.spec import ModelSpec
from penstock.storage.files.model_folder import read_config_file
from penstock.storage.files.untrusted import typed
from penstock.storage.files.user_cache import code_digest, read_cached, write_cached

_MOST_FILES = 64
_CODE = ("branches", "model", "attention", "hf")
"""Rooms of the engine whose code says what a model is made of."""


def cached_spec(recipe: Recipe, make: Callable[[], ModelSpec], *, compiled: bool = False) -> ModelSpec:
    """What the recipe's model is made of, without its `config`: as kept, else as `make` says of the recipe, whose
    compute dtype is decided, of config.json, and of graphs of `compiled` layers if they are wanted."""
    digest = _digest(recipe, compiled)
    with contextlib.suppress(ValueError):
        return typed((read_cached("models", digest) or {}).get("spec"), ModelSpec)
    spec = replace(make(), config=None)
    write_cached("models", digest, {"spec": msgspec.to_builtins(spec)}, _MOST_FILES)
    return spec


def _digest(recipe: Recipe, compiled: bool) -> str:
    """Of everything that decides what the model is made of. UserError for a config.json that cannot be read."""
    config = None
    if recipe.model.path is not None and (path := Path(recipe.model.path).expanduser()).exists():
        config = hashlib.sha256(read_config_file(path)[1]).hexdigest()
    made_of = {
        "versions": [importlib.metadata.version(name) for name in ("penstock", "torch", "transformers")],
        "code": code_digest(Path(engine.__path__[0]) / room for room in _CODE),
        "model": asdict(recipe.model),
        "adapter": asdict(recipe.adapter),
        "freeze": recipe.train.freeze,
        "reward_model": recipe.train.objective == "reward",
        "split_layers": [recipe.train.split_layers, recipe.train.expert_groups],
        "config": config,
        "vocab_size": recipe.data.tokenizer_vocab_size,
        "sequence_length": recipe.data.sequence_length,
        "compute_dtype": recipe.train.compute_dtype,
        "compiled": compiled,
    }
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()
