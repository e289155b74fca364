"""FLOP formulas, worked by hand and against torch's own counter on plain transformers models."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from engine.flops import attention_flops, matmul_flops, model_flops, visible_pairs
from engine.model import AttentionShape, ModelSpec
from engine.prepare import make_config

SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def spec(model_type: str, **changes: Any) -> ModelSpec:
    return tiny.spec_of(make_config({"model_type": model_type, **SHAPE, **changes}, "test"))


def test_a_qwen3_by_hand() -> None:
    q_and_o, k_and_v, mlp, head = 2 * 32 * 32, 2 * 32 * 16, 3 * 32 * 48, 32 * 96
    forward = 2 * (2 * (q_and_o + k_and_v + mlp) + head)
    model = spec("qwen3")
    assert matmul_flops(model) == forward == 36_864
    # A document of 3 tokens has 6 visible pairs: 2 layers x 2 FLOP x 4 heads x (8 + 8) x 6.
    assert attention_flops(model, [3]) == 2 * 2 * 4 * 16 * 6
    assert model_flops(model, [3, 1]) == 3 * (4 * forward + 2 * 2 * 4 * 16 * 7)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("qwen3", {}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("llama", {"head_dim": 16}),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        (
            "qwen3_moe",
            {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "mlp_only_layers": [0]},
        ),
    ],
)
def test_against_what_torch_counts(model_type: str, changes: dict[str, Any]) -> None:
    """Eager attention computes all pairs, so n x n of them are put in place of the visible ones."""
    found, length = spec(model_type, **changes), 12
    model = AutoModelForCausalLM.from_config(found.config, attn_implementation="eager", dtype=torch.float32)
    model.set_experts_implementation("eager")  # torch counts no grouped products
    ids = torch.arange(length)[None]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=ids, use_cache=False)
    pairs = sum(2 * s.heads * (s.qk_dim + s.v_dim) * length**2 for s in found.attention if s is not None)
    assert counter.get_total_flops() == length * matmul_flops(found) + pairs


@given(st.integers(0, 40), st.integers(1, 50), st.booleans())
def test_visible_pairs_are_those_of_the_mask(length: int, size: int, chunked: bool) -> None:
    shape = AttentionShape(1, 1, 1, 1, None if chunked else size, size if chunked else None)
    visible = 0
    for query in range(length):
        for key in range(query + 1):
            visible += query // size == key // size if chunked else query - key < size
    assert visible_pairs(length, shape) == visible
    assert visible_pairs(length, AttentionShape(1, 1, 1, 1, None)) == length * (length + 1) // 2
