"""FLOP formulas: worked by hand, against torch's own counter on plain transformers models, and against a step's ops."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from transformers import AutoModelForCausalLM

from penstock.engine.attention import chunk as attention
from penstock.engine.forecast.flops import attention_flops, executed_flops, matmul_flops, model_flops
from penstock.engine.hf.config import model_config
from penstock.engine.model.spec import ModelSpec
from penstock.engine.plan.plan import Plan
from penstock.engine.schedule.ops import Op
from penstock.engine.session import Session
from penstock.engine.train import train_step


def spec(model_type: str, freeze: list[str] | None = None, **overrides: Any) -> ModelSpec:
    model = tiny.model(model_type=model_type, num_layers=2, vocab_size=96, overrides=overrides)
    return tiny.spec_of(model_config(tiny.recipe(model=model), None), freeze or [])


HALVES = ["*embed_tokens*", "*.layers.0.*", "*.mlp.*"]


def test_a_qwen3_by_hand() -> None:
    q_and_o, k_and_v, mlp, head = 2 * 32 * 32, 2 * 32 * 16, 3 * 32 * 48, 32 * 96
    forward = 2 * (2 * (q_and_o + k_and_v + mlp) + head)
    model = spec("qwen3")
    assert matmul_flops(model) == forward == 36_864
    # A document of 3 tokens has 6 visible pairs: 2 layers x 2 FLOP x 4 heads x (8 + 8) x 6.
    assert attention_flops(model, [3]) == 2 * 2 * 4 * 16 * 6
    assert model_flops(model, [3, 1]) == 3 * (4 * forward + 2 * 2 * 4 * 16 * 7)


def test_what_is_frozen_costs_no_gradient_of_its_weights_by_hand() -> None:
    """The embedding, the first layer and the MLP of the second are frozen: backward ends with the second."""
    attention, mlp, head = 2 * 32 * 32 + 2 * 32 * 16, 3 * 32 * 48, 32 * 96
    model = spec("qwen3", HALVES)
    forward = 2 * (2 * (attention + mlp) + head)
    backward = 2 * (attention + mlp) + 2 * attention + 2 * 2 * head
    assert matmul_flops(model) == forward
    # Of the two layers' attention, which is 2 x 4 x 16 a pair, one goes backward, at twice that.
    assert model_flops(model, [3, 1]) == 4 * (forward + backward) + 2 * 4 * 16 * 7 * (2 + 2)
    again = 2 * (attention + mlp) - 2 * 48 * 32
    found = executed_flops(model, plan_of(model), [5, 3])
    assert found.layer_matmul == 8 * (4 * (attention + mlp) + 2 * (attention + mlp) + 2 * attention + again)
    assert found.head_matmul == 8 * 6 * head
    assert (found.attention_forward, found.attention_backward) == (2 * 2 * 4 * 16 * 21, 2 * 4 * 40 * 21)


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

    # Six of the eight tokens come before the padding: the second chunk is computed half.
    padded = executed_flops(model, plan, [5, 1], [6])
    per_token = 2 * (3 * layer + again) + projection
    assert padded.layer_matmul == 6 * per_token - 2 * again
    assert padded.head_matmul == 6 * 3 * 2 * head


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


PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm}


class ProductCounter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in PRODUCTS:
            self.flops += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=out)
        return out


def counted_step(session: Session) -> tuple[int, list[int]]:
    perform, counter = session.runtime.perform, ProductCounter()

    def counting(op: Op) -> Any:
        if op.lane != "compute":
            return perform(op)
        with counter:
            return perform(op)

    session.executor._perform = counting
    lengths = [n for m in session.loader.next_step() for n in m.lengths]
    session.loader.seek(session.store.meta["cursor"])
    train_step(session)
    return counter.flops, lengths


@pytest.mark.parametrize(
    ("checkpointing", "kv_window", "freeze"),
    [
        ("full", "whole", []),
        ("selective", "streamed", []),
        ("none", "whole", []),
        ("none", "streamed", HALVES),
        pytest.param("full", "streamed", [], marks=pytest.mark.long),
        pytest.param("full", "whole", HALVES, marks=pytest.mark.long),
    ],
)
def test_a_step_computes_what_the_formula_says(
    tmp_path: Path, checkpointing: str, kv_window: str, freeze: list[str]
) -> None:
    saved = {"activation_checkpointing": checkpointing, "kv_window": kv_window}
    t = tiny.training(steps=1, global_batch_size=1, chunk_tokens=20, freeze=freeze, **saved)
    with tiny.session(tmp_path, d=tiny.data(sequence_length=112), t=t) as session:
        attention.COUNTS.reset()
        products, lengths = counted_step(session)
        expected = executed_flops(session.spec, session.plan, lengths)
        spec = session.spec
    # The head's products count only tokens with a label, one fewer a document.
    head = expected.head_matmul * (sum(lengths) - len(lengths)) // sum(lengths)
    assert products == pytest.approx(expected.layer_matmul + head, rel=0.01)
    counts, forward = attention.COUNTS, attention_flops(spec, lengths)
    assert (counts.forward_flops, counts.backward_flops) == (expected.attention_forward, expected.attention_backward)
    if freeze:
        return
    assert counts.forward_flops == forward * (2 if checkpointing == "full" else 1)
    assert counts.backward_flops == forward * 5 // 2
    if checkpointing == "none" and kv_window == "whole":
        whole = model_flops(spec, lengths) + forward // 2  # a flash backward computes q.k again
        assert products + counts.forward_flops + counts.backward_flops == pytest.approx(whole, rel=0.02)
