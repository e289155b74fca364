"""FLOP formulas, worked by hand and against torch's own counter on plain transformers models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from engine.attention.pairs import visible_pairs
from engine.forecast.flops import attention_flops, executed_flops, matmul_flops, model_flops
from engine.hf.config import make_config
from engine.model.spec import AttentionShape, ModelSpec
from engine.plan.plan import Plan

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


def plan_of(model: ModelSpec, **changes: Any) -> Plan:
    """Two chunks of 4 tokens, and what the test says about what is saved."""
    t = tiny.training(global_batch_size=1, chunk_tokens=4)
    plan = tiny.plan_of(model, tiny.recipe(data=tiny.data(sequence_length=8), train=t), "1GiB", "1GiB")
    return replace(plan, **({"recomputed": frozenset(), "saved_graphs": frozenset()} | changes))


def test_what_a_step_of_two_chunks_executes_by_hand() -> None:
    attention_weights, mlp, down, head = 2 * (32 * 32 + 32 * 16), 3 * 32 * 48, 48 * 32, 32 * 96
    layer = 2 * (attention_weights + mlp)
    again = layer - 2 * down  # nobody reads the output of the last product
    # Two documents of 5 and 3 tokens: 15 + 6 pairs, 4 heads; q.k and p.v forward, 3 and 2 of them backward.
    forward, backward = 2 * 4 * (8 + 8) * 21, 2 * 4 * (3 * 8 + 2 * 8) * 21
    model = spec("qwen3")
    assert set(model.unread) == {"mlp.down_proj"}

    flops = executed_flops(model, plan_of(model), [5, 3])
    assert flops.layer_matmul == 2 * 8 * (3 * layer + again)
    assert flops.head_matmul == 8 * 3 * 2 * head
    assert (flops.attention_forward, flops.attention_backward) == (2 * forward, 2 * backward)
    assert flops.total == 2 * 8 * (3 * layer + again) + 8 * 6 * head + 2 * (forward + backward)

    # Layer 1 (block 2) saves the graph of its second chunk, layer 0 (block 1) saves its input only.
    plan = plan_of(model, recomputed=frozenset({1}), saved_graphs=frozenset({(2, 1)}))
    changed = executed_flops(model, plan, [5, 3])
    projection = 2 * (32 * 32 + 2 * 32 * 16)  # queries, keys and values
    assert changed.layer_matmul == flops.layer_matmul + 8 * projection - 4 * again
    assert changed.attention_forward == flops.attention_forward + forward
    assert changed.attention_backward == flops.attention_backward

    streamed = executed_flops(model, plan_of(model, streamed=True), [5, 3])
    assert streamed.layer_matmul == flops.layer_matmul + 2 * 8 * projection
    assert streamed.attention_forward == flops.attention_forward


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
    assert visible_pairs(length, shape.window, shape.chunk) == visible
    assert visible_pairs(length, None, None) == length * (length + 1) // 2
