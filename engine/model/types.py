"""The types of models that transformers knows, and a config of each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from penstock.storage.files.errors import refused

_INDEXER = {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 256}
_INDEXER |= {"indexer_budget": 2048, "indexer_compress_ratio": 16}
_LACKING: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dbrx": {"attn_config": {"kv_n_heads": 8, "rope_theta": 5e5, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 6, "first_k_dense_replace": 1},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
    "granitemoehybrid": {"layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 2) * 4},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
}
"""Fields without which a type's default config makes no model, or one without layers that all published ones have."""


def model_types() -> list[str]:
    """All types of causal language models and of models that read images and write text, in alphabetical order."""
    return sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) | set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES))


def default_config(model_type: str) -> PretrainedConfig:
    """The config of a type as transformers makes it, without dropout, and a decoder where it could be an encoder too.
    Raises UserError for a type that has none."""
    with refused("transformers has no default config of this type"):
        config = CONFIG_MAPPING[model_type](**_LACKING.get(model_type, {}))
    for part, name in dropouts(config):
        setattr(part, name, 0.0)
    if getattr(config, "is_decoder", None) is False:
        config.is_decoder = True
    return config


def dropouts(config: PretrainedConfig) -> Iterator[tuple[PretrainedConfig, str]]:
    """The fields of a config, and of its text model's, that switch dropout or other noise on in training."""
    for part in (config, config.get_text_config(decoder=True)):
        for name, value in list(vars(part).items()):
            noise = "dropout" in name or name.endswith(("pdrop", "_drop", "jitter_noise")) or name == "layerdrop"
            if noise and not name.startswith(("summary_", "classifier_")) and isinstance(value, float) and value > 0:
                yield part, name
