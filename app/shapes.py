"""Shapes of published model families, as their config.json files give them: recipes of one family share it here.

A recipe of another model names its fields itself, as `recipes/quickstart.py` does, or gets a function beside these.
"""

from __future__ import annotations

from typing import Any

from penstock.engine.config import ModelConfig

_QWEN25_POSITIONS = 32_768
"""Positions that Qwen2.5 was trained on."""


def qwen25(size: str, *, yarn_to: int | None = None) -> ModelConfig:
    """Qwen2.5-SIZE (7B, 14B, 32B), its folder below models/; `yarn_to`: positions that YaRN stretches it to."""
    layers, hidden, intermediate, heads, kv_heads = {
        "7B": (28, 3584, 18944, 28, 4),
        "14B": (48, 5120, 13824, 40, 8),
        "32B": (64, 5120, 27648, 40, 8),
    }[size]
    overrides: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    if yarn_to is not None:
        overrides = {
            "max_position_embeddings": yarn_to,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": yarn_to / _QWEN25_POSITIONS,
                "original_max_position_embeddings": _QWEN25_POSITIONS,
                "rope_theta": 1e6,
            },
        }
    return ModelConfig(
        path=f"models/Qwen2.5-{size}",
        model_type="qwen2",
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_heads=heads,
        num_kv_heads=kv_heads,
        vocab_size=152_064,
        max_position=131_072 if yarn_to is None else None,
        overrides=overrides,
    )


def llama3(name: str) -> ModelConfig:
    """Llama-NAME (3.1-8B, 3.3-70B-Instruct), its folder below models/, with the positions of its own scaling."""
    layers, hidden, intermediate, heads = {
        "3.1-8B": (32, 4096, 14336, 32),
        "3.3-70B-Instruct": (80, 8192, 28672, 64),
    }[name]
    return ModelConfig(
        path=f"models/Llama-{name}",
        model_type="llama",
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=128_256,
        max_position=131_072,
        overrides={
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
                "rope_theta": 5e5,
            }
        },
    )
