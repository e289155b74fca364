"""A small config of the same architecture: every kind of layer, every mechanism, tiny dimensions.

The rules go by the names that transformers configs share. A field that no rule knows keeps its value; if the model then
cannot be built the self-check refuses it, so a missing rule costs a refusal and never a wrong pass.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Hashable
from typing import Any

from transformers import PretrainedConfig

from penstock.engine.config import AdapterConfig
from penstock.engine.model import skeleton

HIDDEN = 64
HEADS = 4
VOCABULARY = 151
WINDOW = 23
"""Sliding window of the shrunk model, shorter than the self-check's documents."""
THRESHOLD = 40
"""Length at which rotary scaling that depends on it sets in; the self-check's documents are longer."""
_EXPERTS = 8

_SIZES: tuple[tuple[str, int], ...] = (
    (r"vocab_size(_per_layer_input)?", VOCABULARY),
    (r"(hidden|embedding|word_embed_proj)_(size|dim)|n_embd|d_model|dim_model|lru_width", HIDDEN),
    (r"moe_(shared_expert_)?intermediate_size|shared_(expert_)?intermediate_size|expert_ffn_hidden_size", 32),
    (r"(\w+_)?intermediate_size(_mlp)?|ffn_dim|n_inner|ffn_hidden_size|d_ff|dim_ff|d_inner", 96),
    (r"(num|n)_(local_|routed_|)?experts|moe_num_experts|num_moe_experts|zero_expert_num", _EXPERTS),
    (r"n_group|moe_n_group|num_expert_group", 4),
    (r"topk_group", 2),
    (r"num_experts_per_tok|num_experts_per_token|moe_topk|moe_k|top_k_experts|moe_top_k", 3),
    (r"kv_lora_rank", 16),
    (r"q_lora_rank", 24),
    (r"qk_nope_head_dim", 16),
    (r"qk_rope_head_dim", 8),
    (r"qk_head_dim", 24),
    (r"v_head_dim", 12),
    (r"rotary_dim", 8),
    (r"kv_n_heads", 2),
    (r"linear_num_key_heads", 2),
    (r"linear_num_(value_)?heads", 4),
    (r"linear_((key|value)_)?head_dim", 16),
    (r"(mamba_)?(d_state|state_size)|ssm_state_size", 16),
    (r"mamba_d_head|mamba_head_?dim", 16),
    (r"mamba_(n|num)_heads|n_mamba_heads", 8),
    (r"mamba_d_ssm|d_ssm", 2 * HIDDEN),
    (r"mamba_dt_rank|time_step_rank", 4),
    (r"sliding_window(_size)?|attention_window_size|attention_chunk_size", WINDOW),
    (r"floor_scale", WINDOW),
    (r"pad_token_id", 5),
    (r"bos_token_id", 1),
    (r"eos_token_id", 2),
)


def shrink(config: PretrainedConfig, adapter: AdapterConfig | None = None) -> tuple[PretrainedConfig, list[int]]:
    """A config of the same model type with few, small layers that cover every distinct layer of `config` with its
    `adapter`; for every layer of `config` the small one that is alike. UserError where layers cannot be found."""
    small, stand_ins = fewer_layers(config, adapter)
    for part in _parts(small):
        _shrink_fields(part)
    return small, stand_ins


def fewer_layers(config: PretrainedConfig, adapter: AdapterConfig | None = None) -> tuple[PretrainedConfig, list[int]]:
    """`config` with the fewest first layers (at least two, if it has them) that hold every distinct layer structure;
    and for every layer of `config` the index of a kept one with the same structure."""
    total = skeleton.num_layers(config)
    wanted = _structures(config, adapter)
    for count in range(min(total, 2), total):
        small = _with_layers(config, total, count)
        try:
            covered = _structures(small, adapter)
        except Exception:  # a pattern that the config's own checks refuse at this depth
            continue
        if set(wanted) <= set(covered):
            return small, [covered.index(key) for key in wanted]
    return copy.deepcopy(config), list(range(total))


def _structures(config: PretrainedConfig, adapter: AdapterConfig | None) -> list[Hashable]:
    layers = skeleton.find_layers(skeleton.build(config, adapter=adapter))[1]
    return [skeleton.structure_key(layer) for layer in layers]


def _with_layers(config: PretrainedConfig, total: int, count: int) -> PretrainedConfig:
    small = copy.deepcopy(config)
    text = small.get_text_config(decoder=True)
    overrides = _take_overrides(text)
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == total:
            setattr(text, name, value[:count])
    text.num_hidden_layers = count
    if kept := {index: fields for index, fields in overrides.items() if int(index) < count}:
        text.per_layer_config = kept
    return small


def _take_overrides(config: PretrainedConfig) -> dict[int | str, dict[str, Any]]:
    """Remove and return the fields that single layers of a heterogeneous config have for themselves."""
    if not getattr(config, "is_heterogeneous", False):
        return {}
    overrides: dict[int | str, dict[str, Any]] = {
        int(index): dict(fields) for index, fields in config.to_dict()["per_layer_config"].items()
    }
    config.per_layer_config = None
    return overrides


def _parts(config: PretrainedConfig) -> list[PretrainedConfig]:
    return [config, *(p for v in vars(config).values() if isinstance(v, PretrainedConfig) for p in _parts(v))]


def _shrink_fields(config: PretrainedConfig) -> None:
    overrides = _take_overrides(config)
    before = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    heads = getattr(config, "num_attention_heads", None)
    kv_heads = getattr(config, "num_key_value_heads", None)
    hidden = getattr(config, "hidden_size", None)
    for name, value in before.items():
        if name == "eos_token_id" and isinstance(value, list):
            config.eos_token_id = 2
        if isinstance(value, bool) or not isinstance(value, int):
            continue
        size = next((size for pattern, size in _SIZES if re.fullmatch(pattern, name)), None)
        # A mechanism that is switched off (0 or 1 groups, no experts) stays off.
        if size is not None and (value > 1 or name.endswith("_token_id")):
            setattr(config, name, size if name.endswith("_token_id") else min(size, value))
    if isinstance(heads, int) and isinstance(hidden, int):
        small_heads = min(heads, HEADS)
        config.num_attention_heads = small_heads
        if isinstance(kv_heads, int):
            config.num_key_value_heads = small_heads if kv_heads == heads else min(kv_heads, 2)
        head_dim = before.get("head_dim")
        if isinstance(head_dim, int):
            if head_dim == before.get("qk_rope_head_dim"):
                config.head_dim = config.qk_rope_head_dim
            elif head_dim == before.get("qk_head_dim"):
                config.head_dim = config.qk_head_dim
            else:
                config.head_dim = HIDDEN // small_heads if head_dim * heads == hidden else 2 * HIDDEN // small_heads
    if isinstance(hidden, int) and isinstance(wide := before.get("attention_hidden_size"), int):
        config.attention_hidden_size = HIDDEN * wide // hidden
        if "attention_head_dim" in before:
            config.attention_head_dim = config.attention_hidden_size // config.num_attention_heads
    if isinstance(before.get("mamba_d_ssm"), int):
        config.mamba_n_heads = config.mamba_d_ssm // config.mamba_d_head
    if heads is None and {"expand", "num_heads", "head_dim"} <= before.keys():
        config.head_dim = 16
        config.num_heads = config.expand * HIDDEN // config.head_dim
    _shrink_rotary(config)
    for fields in overrides.values():
        for name, value in fields.items():
            if isinstance(value, int) and isinstance(before.get(name), int) and value > 1:
                fields[name] = max(1, getattr(config, name) * value // before[name])
    if overrides:
        config.per_layer_config = overrides


def _shrink_rotary(config: PretrainedConfig) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    tables = [rope] if "rope_type" in rope else [v for v in rope.values() if isinstance(v, dict)]
    types = {str(table.get("rope_type", "default")) for table in tables}
    longest = getattr(config, "max_position_embeddings", None)
    if isinstance(longest, int):
        config.max_position_embeddings = THRESHOLD if "dynamic" in types else min(longest, 512)
    if "longrope" in types and isinstance(getattr(config, "original_max_position_embeddings", None), int):
        config.original_max_position_embeddings = THRESHOLD
    heads = getattr(config, "num_attention_heads", None) or 1
    head_dim = getattr(config, "head_dim", None) or getattr(config, "hidden_size", HIDDEN) // heads
    for table in tables:
        if table.get("llama_4_scaling_beta"):
            table["original_max_position_embeddings"] = THRESHOLD
        if table.get("rope_type") == "longrope":
            table["original_max_position_embeddings"] = THRESHOLD
            half = int(head_dim * table.get("partial_rotary_factor", 1.0)) // 2
            for key in ("short_factor", "long_factor"):
                values = table[key]
                table[key] = [values[i * len(values) // half] for i in range(half)]
        if isinstance(sections := table.get("mrope_section"), list):
            half = int(head_dim * table.get("partial_rotary_factor", 1.0)) // 2
            rest = [s * half // sum(sections) for s in sections[1:]]
            table["mrope_section"] = [half - sum(rest), *rest]
