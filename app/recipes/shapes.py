"""Shapes of published model families, as in their config.json files, for recipes of one family and `penstock fit`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.engine.config import ModelConfig

_QWEN25_POSITIONS = 32_768
"""Positions that Qwen2.5 was trained on."""
_QWEN3_POSITIONS = 32_768
"""Positions that Qwen3 was trained on; its config.json leaves room for 40,960."""


def qwen25(size: str, *, yarn_to: int | None = None) -> ModelConfig:
    """Qwen2.5-SIZE (7B, 14B, 32B), its folder below models/; `yarn_to`: positions that YaRN stretches it to."""
    layers, hidden, intermediate, heads, kv_heads = {
        "7B": (28, 3584, 18944, 28, 4),
        "14B": (48, 5120, 13824, 40, 8),
        "32B": (64, 5120, 27648, 40, 8),
    }[size]
    model = ModelConfig(
        path=f"models/Qwen2.5-{size}",
        model_type="qwen2",
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_heads=heads,
        num_kv_heads=kv_heads,
        vocab_size=152_064,
        max_position=131_072,
        overrides={"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    )
    return model if yarn_to is None else stretched(model, yarn_to, trained=_QWEN25_POSITIONS)


def llama3(name: str) -> ModelConfig:
    """Llama-NAME (3.1-8B, 3.2-1B, 3.3-70B-Instruct), its folder below models/, with the positions of its scaling."""
    layers, hidden, intermediate, heads, head_dim, factor = {
        "3.1-8B": (32, 4096, 14336, 32, 128, 8.0),
        "3.2-1B": (16, 2048, 8192, 32, 64, 32.0),
        "3.3-70B-Instruct": (80, 8192, 28672, 64, 128, 8.0),
    }[name]
    return ModelConfig(
        path=f"models/Llama-{name}",
        model_type="llama",
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=head_dim,
        vocab_size=128_256,
        max_position=131_072,
        tie_embeddings=name == "3.2-1B",
        overrides={
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
                "rope_theta": 5e5,
            }
        },
    )


def qwen3(size: str) -> ModelConfig:
    """Qwen3-SIZE (4B, 30B-A3B: 128 experts of which a token takes eight), its folder below models/."""
    layers, hidden, intermediate, kv_heads = {"4B": (36, 2560, 9728, 8), "30B-A3B": (48, 2048, 6144, 4)}[size]
    overrides: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    if size == "30B-A3B":
        overrides |= {
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return ModelConfig(
        path=f"models/Qwen3-{size}",
        model_type="qwen3_moe" if size == "30B-A3B" else "qwen3",
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_heads=32,
        num_kv_heads=kv_heads,
        head_dim=128,
        vocab_size=151_936,
        max_position=40_960,
        tie_embeddings=size == "4B",
        overrides=overrides,
    )


def gpt_oss_120b() -> ModelConfig:
    """gpt-oss-120b, 128 experts of which a token takes four, its folder below models/."""
    return ModelConfig(
        path="models/gpt-oss-120b",
        model_type="gpt_oss",
        num_layers=36,
        hidden_size=2880,
        intermediate_size=2880,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        vocab_size=201_088,
        max_position=131_072,
        overrides={
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "rope_theta": 150_000.0,
            },
        },
    )


def stretched(model: ModelConfig, positions: int, *, trained: int | None = None) -> ModelConfig:
    """The model with YaRN to `positions`, in place of its own scaling. `trained`: positions that it was trained on
    before any; None: those that its own scaling names, else `model.max_position`."""
    rope = model.overrides["rope_parameters"]
    trained = trained or rope.get("original_max_position_embeddings") or model.max_position
    assert trained is not None
    same = {name: rope[name] for name in ("beta_fast", "beta_slow", "truncate", "rope_theta") if name in rope}
    yarn = {"rope_type": "yarn", "factor": positions / trained, "original_max_position_embeddings": trained} | same
    others = {name: value for name, value in model.overrides.items() if name != "rope_parameters"}
    overrides = {"max_position_embeddings": positions, **others, "rope_parameters": yarn}
    return replace(model, max_position=None, overrides=overrides)


def positions_of(model_type: str) -> int | None:
    """Positions that a family was trained on where its config.json gives another number."""
    return {"qwen2": _QWEN25_POSITIONS, "qwen3": _QWEN3_POSITIONS, "qwen3_moe": _QWEN3_POSITIONS}.get(model_type)
