"""A model for the stand-in: wide enough for the kernels a real one uses, small enough to be compiled in seconds."""

from __future__ import annotations

from typing import Any

import tiny

from penstock.engine.config import ModelConfig, TrainConfig


def model(**changes: Any) -> ModelConfig:
    """Three layers of width 256, some 5M parameters."""
    shape: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 768, "head_dim": 64, "vocab_size": 2048}
    return tiny.model(**(shape | changes))


def training(**changes: Any) -> TrainConfig:
    """bfloat16, compiled, in four chunks of two sequences."""
    settings: dict[str, Any] = {"compute_dtype": "bfloat16", "compile": "on", "chunk_tokens": 256, "steps": 6}
    return tiny.training(**(settings | changes))
