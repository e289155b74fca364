"""Recipe files of a tiny model, for tests that go through the command line."""

import dataclasses
from typing import Any

from penstock.engine.config import Recipe

TINY: dict[str, dict[str, Any]] = {
    "model": {
        "num_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
    },
    "data": {"source": "text", "path": "corpus", "tokenizer_vocab_size": 300, "sequence_length": 64},
    "train": {
        "steps": 1, "chunk_tokens": 24, "activation_checkpointing": "selective", "kv_window": "whole", "compile": "off",
        "device": "cpu", "calibrate": False,
    },
    "budgets": {"gpu": "512KiB", "ram": "1MiB", "nvme": "64MiB"},
    "storage": {"part_bytes": "64KiB"},
}  # fmt: skip
"""A step on a folder `corpus` of texts, state on all tiers. What a plan could choose is given: that spares a search."""


def sections(**changes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """TINY with `changes` of its sections' fields."""
    return {name: TINY.get(name, {}) | changes.get(name, {}) for name in TINY | changes}


def tiny_recipe(**changes: dict[str, Any]) -> Recipe:
    classes: dict[str, Any] = {field.name: field.default_factory for field in dataclasses.fields(Recipe)}
    return Recipe(name="tiny", **{name: classes[name](**values) for name, values in sections(**changes).items()})


def recipe_text(**changes: dict[str, Any]) -> str:
    """`tiny_recipe` as a Python file."""
    return f"from penstock import *\n\nrecipe = {tiny_recipe(**changes)!r}\n"


def settings(**changes: dict[str, Any]) -> list[str]:
    """`sections` as options that make another recipe as tiny."""
    found = sections(**changes)
    texts = [f"{section}.{name}={value}" for section, values in found.items() for name, value in values.items()]
    return [word for text in texts for word in ("--set", text)]
