"""Seconds of each op, worked by hand from round rates. FLOP formulas: worked by hand, against torch's own counter on
plain transformers models, and against a step's ops."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from machines import ROUND
from msgspec import structs
from small_problems import problem, some_plan
from some_ops import an_op
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from transformers import AutoModelForCausalLM

from penstock.engine.attention import chunk as attention
from penstock.engine.forecast import costs as constants
from penstock.engine.forecast.costs import (
    Calibration,
    Conditions,
    Costs,
    Sample,
    attention_rate,
    op_kind,
    representatives,
)
from penstock.engine.forecast.flops import attention_flops, executed_flops, matmul_flops, model_flops
from penstock.engine.hf.config import model_config
from penstock.engine.model.spec import ModelSpec
from penstock.engine.plan.plan import Plan
from penstock.engine.plan.problem import BlockShape, PlanOptions
from penstock.engine.schedule.actions import ACTIONS, KEYS, SAVED_GRAPH, ZERO_DKV, zero
from penstock.engine.schedule.builder import ScheduleBuilder
from penstock.engine.schedule.ops import WHOLE, Op
from penstock.engine.schedule.passes import evaluation, training
from penstock.engine.schedule.resources import saved_activation
from penstock.engine.train import train_step

LAUNCH = constants.LAUNCH_S["gpu"]
CLIP_S, COMMIT_S, COPY_S, DISK_S = constants.CLIP_S, constants.COMMIT_S, constants.COPY_S, constants.DISK_S
HIDDEN_BYTES = 64 * 32 * 2
"""Of a chunk: 64 tokens, 32 wide, bfloat16."""
NUMEL = 8192
"""Parameters of a layer."""
LAYER, PROJECTION, UNREAD = 16_384, 4_096, 2_048
"""FLOPs a token of all its products, of those that make queries, keys and values, of those that backward leaves out."""
WEIGHTS_S = NUMEL * 2 / 1e8
"""Reading a layer's weights once."""
SUMS_S = NUMEL * (2 + 2 * 4) / 1e8
"""Its gradients in bfloat16 are added to float32 sums, which are read and written."""
GRAPH_BYTES = 700
"""Elementwise work passes what a graph would keep of a token through memory."""
PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm}
HALVES = ["*embed_tokens*", "*.layers.0.*", "*.mlp.*"]
ATTENTION_WEIGHTS, MLP, DOWN, HEAD = 2 * 32 * 32 + 2 * 32 * 16, 3 * 32 * 48, 48 * 32, 32 * 96
"""Weights of a layer's attention and MLP, of the last matrix of that, and of the head."""
LAYER_FLOPS = 2 * (ATTENTION_WEIGHTS + MLP)
AGAIN = LAYER_FLOPS - 2 * DOWN
"""FLOPs of a token forward, and once more in backward: nobody reads the output of the last product."""


def a_plan(streamed: bool = False, **changes: Any) -> Plan:
    """Two chunks of 64 tokens, or eight of 16, of a row of 128; layers as above and a head of 16,384 parameters."""
    size = {"row_tokens": 128, "micro_batches": 1, "chunk_tokens": 16 if streamed else 64, "kv_window": "auto"}
    return some_plan(problem(**(size | changes)), PlanOptions(streamed=streamed))


def op_of(action: str, index: int = 0, **changes: Any) -> Op:
    return an_op(0, ACTIONS[action], index=index, **({"block": "layers.1"} | changes))


def seconds(op: Op, plan: Plan | None = None, calibration: Calibration | None = None, **changes: Any) -> float:
    return Costs(plan or a_plan(), Conditions(structs.replace(ROUND, **changes), calibration)).seconds(op)


def test_a_layer_forward() -> None:
    # First chunk: 64 x 65 / 2 = 2,080 pairs of 4 heads x (2 x 8 for q.k + 2 x 8 for p.v) FLOPs.
    attention = 2_080 * 4 * (2 * 8 + 2 * 8) / 2e9
    expected = LAUNCH + 64 * LAYER / 1e9 + attention + 64 * GRAPH_BYTES / 1e8
    assert seconds(op_of("layer_forward")) == pytest.approx(expected)
    # Second chunk: each query also sees the 64 keys of the first.
    later = expected + 64 * 64 * 4 * (2 * 8 + 2 * 8) / 2e9
    assert seconds(op_of("layer_forward", index=1)) == pytest.approx(later)
    # Two documents of 96 and 32 tokens: of the second chunk 32 queries see 64 keys before it and 32 x 33 / 2 of its own
    # between them, the others 32 x 33 / 2.
    pairs = 32 * 64 + 2 * (32 * 33 // 2)
    documents = Costs(a_plan(), Conditions(ROUND, documents=[[0, 96]])).seconds(op_of("layer_forward", index=1))
    assert documents == pytest.approx(expected - attention + attention * pairs / 2_080)
    # A window of 20: 20 x 21 / 2 pairs of the first 20 queries, 20 of each of the other 44.
    few = 2_080 - (210 + 44 * 20)
    sliding = seconds(op_of("layer_forward"), a_plan(sliding=frozenset({1})))
    assert sliding == pytest.approx(expected - few * 4 * 32 / 2e9)
    # Few tokens wait for the weights.
    with_weights = LAUNCH + WEIGHTS_S + 64 * GRAPH_BYTES / 1e8 + attention
    assert seconds(op_of("layer_forward"), matmul_flops=1e15) == pytest.approx(with_weights)
    # Attention computed again: queries, keys and values of the chunk, a quarter of the layer's products.
    again = LAUNCH + 64 * PROJECTION / 1e9 + attention + PROJECTION / LAYER * 64 * GRAPH_BYTES / 1e8
    assert seconds(op_of("layer_recompute")) == pytest.approx(again, rel=1e-4)


def test_a_layer_backward() -> None:
    # The forward again without what nobody reads, then twice the forward: gradients of inputs and of weights.
    matmul = 64 * (LAYER - UNREAD + 2 * LAYER) / 1e9
    attention = 2_080 * 4 * (6 * 8 + 4 * 8) / 1e9  # q.k again, dq, dk; dp, dv
    passes = (LAYER - UNREAD + 2 * LAYER) / LAYER
    expected = 2 * LAUNCH + matmul + attention + (passes * 64 * GRAPH_BYTES) / 1e8 + SUMS_S
    assert seconds(op_of("layer_backward")) == pytest.approx(expected, rel=1e-4)
    # Of a saved graph nothing is computed again.
    kept = 2 * LAUNCH + 64 * 2 * LAYER / 1e9 + attention + (2 * 64 * GRAPH_BYTES) / 1e8 + SUMS_S
    assert seconds(op_of("layer_backward", flags=frozenset({SAVED_GRAPH}))) == pytest.approx(kept, rel=1e-4)
    # Gradients of the first chunk take the place of the sums, which are not read.
    first = op_of("layer_backward", flags=frozenset({zero("layers.1"), ZERO_DKV}))
    assert seconds(first) == pytest.approx(expected - NUMEL * 4 / 1e8, rel=1e-4)
    # Products that sum what they are the gradients of leave none in bfloat16, where a GPU does that.
    plan = a_plan()
    blocks = tuple(replace(block, summed_numel=NUMEL) for block in plan.blocks)
    summing = replace(plan, problem=replace(plan.problem, blocks=blocks))
    assert seconds(op_of("layer_backward"), summing) == pytest.approx(expected - NUMEL * 2 / 1e8, rel=1e-4)
    on_cpu = [seconds(op_of("layer_backward"), which, gpu=None) for which in (plan, summing)]
    assert on_cpu[0] == on_cpu[1], "a CPU has no such kernel for bfloat16"


def test_a_layer_backward_of_which_half_is_frozen() -> None:
    """Half of the products, by this problem's shares, have no gradient of their weights; a page of parameters has."""
    plan = a_plan(halves=frozenset({2}))
    attention = 2_080 * 4 * (6 * 8 + 4 * 8) / 1e9
    matmul = 64 * (LAYER - UNREAD + LAYER + LAYER // 2) / 1e9
    passes = (LAYER - UNREAD + 2 * LAYER) / LAYER
    sums = 2048 * (2 + 2 * 4) / 1e8
    expected = 2 * LAUNCH + matmul + attention + (passes * 64 * GRAPH_BYTES) / 1e8 + sums
    assert seconds(op_of("layer_backward"), plan) == pytest.approx(expected, rel=1e-4)
    # Frozen whole it only passes a gradient on; forward costs what it does.
    plan = a_plan(frozen=frozenset({2}), layers=4)
    expected += -64 * (LAYER // 2) / 1e9 - sums
    assert seconds(op_of("layer_backward"), plan) == pytest.approx(expected, rel=1e-4)
    assert seconds(op_of("layer_forward"), plan) == pytest.approx(seconds(op_of("layer_forward")))


def test_a_streamed_window() -> None:
    plan = a_plan(streamed=True)
    # 16 queries and a chunk of 16 earlier keys: 256 pairs; of its own keys: 16 x 17 / 2.
    earlier, own = (op_of("attend", index=3, slots={KEYS: keys}) for keys in (1, 3))
    assert seconds(earlier, plan) == pytest.approx(LAUNCH + 256 * 4 * 32 / 2e9)
    assert seconds(own, plan) == pytest.approx(LAUNCH + 136 * 4 * 32 / 2e9)
    backward = op_of("attend_backward", index=3, slots={KEYS: 1})
    assert seconds(backward, plan) == pytest.approx(LAUNCH + 256 * 4 * (6 * 8 + 4 * 8) / 1e9)
    # Up to attention and after it there are no pairs: projections alone, 16 tokens.
    project = LAUNCH + max(16 * PROJECTION / 1e9, WEIGHTS_S / 4) + 16 * GRAPH_BYTES / 4 / 1e8
    assert seconds(op_of("layer_project", index=3), plan) == pytest.approx(project, rel=1e-4)


def test_embedding_head_and_evaluation() -> None:
    assert seconds(op_of("embed_forward", block="embed")) == pytest.approx(LAUNCH + 6 * HIDDEN_BYTES / 1e8)
    # 8 pages of 2,048 parameters: 16,384 / 32 = 512 entries of the vocabulary; forward and backward three times.
    flops = 64 * 3 * 2 * 16_384
    moved = 12 * 512 * 64 + 8 * HIDDEN_BYTES + 16_384 * (2 + 8)
    expected = 2 * LAUNCH + flops / 1e9 + moved / 1e8
    assert seconds(op_of("head", block="head")) == pytest.approx(expected)
    # A forward that nothing follows.
    evaluation = op_of("layer_evaluate", batch=1)
    assert seconds(evaluation) == seconds(op_of("layer_forward"))
    assert seconds(op_of("embed_evaluate", block="embed")) == seconds(op_of("embed_forward", block="embed"))
    # The head's products once, not three times, and no gradients.
    moved = 12 * 512 * 64 + 2 * HIDDEN_BYTES
    expected = LAUNCH + 64 * 2 * 16_384 / 1e9 + moved / 1e8
    assert seconds(op_of("head_evaluate", block="head")) == pytest.approx(expected)
    assert seconds(op_of("evaluate")) == CLIP_S
    # Measured are the step's own ops.
    for flags in ((), (SAVED_GRAPH,)):
        kind = "+".join(("layers.0 layer_forward", *flags))
        calibration = Calibration(samples={kind: (Sample(tokens=64, pairs=2_080, seconds=0.5),)})
        assert seconds(evaluation, calibration=calibration) == pytest.approx(0.5, rel=1e-3)
    measured = Sample(tokens=64, pairs=0, seconds=7 * seconds(op_of("head", block="head")))
    head = Calibration(samples={"head head": (measured,)})
    assert seconds(op_of("head_evaluate", block="head"), calibration=head) == pytest.approx(7 * expected)


def test_updates_norms_copies_and_drives() -> None:
    # Parts of 4,096 parameters, at 10^6 a second.
    assert seconds(op_of("update")) == pytest.approx(COPY_S + 4_096 / 1e6)
    assert seconds(op_of("update_on_gpu", index=WHOLE)) == pytest.approx(COPY_S + NUMEL * 30 / 1e8)
    assert seconds(op_of("norm", index=WHOLE)) == pytest.approx(COPY_S + NUMEL * 4 / 1e8)
    assert seconds(op_of("clip")) == CLIP_S
    assert seconds(op_of("commit")) == COMMIT_S
    load, store = op_of("load_x", nbytes=10_000), op_of("store_x", nbytes=10_000)
    assert seconds(load) == pytest.approx(COPY_S + 10_000 / 1e6)
    assert seconds(store) == pytest.approx(COPY_S + 10_000 / 2e6)
    # What is saved there stays on the GPU: read and written at its own rate.
    plan = replace(a_plan(), saved_on_gpu=frozenset({(2, 0)}))
    for block, expected in ((2, 2 * 10_000 / 1e8), (1, 10_000 / 1e6)):
        aside = op_of("load_x", nbytes=10_000, reads=(saved_activation("x", block, 0),))
        assert seconds(aside, plan) == pytest.approx(COPY_S + expected)
    # Two drives, each at the slower one's rate, together half of that: 400,000 and 100,000 bytes a second.
    assert seconds(op_of("read_state", nbytes=10_000)) == pytest.approx(DISK_S + 10_000 / 4e5)
    assert seconds(op_of("write_state", nbytes=10_000)) == pytest.approx(DISK_S + 10_000 / 1e5)
    # Weights that go straight to the GPU cross its link on their way.
    whole = op_of("read_weights_whole", nbytes=10_000)
    assert seconds(whole, h2d_bytes_per_s=1e5) == pytest.approx(10_000 / 1e5)
    assert seconds(whole, h2d_bytes_per_s=1e5, gpu=None) == pytest.approx(DISK_S + 10_000 / 4e5)
    # Measured rates replace the machine's.
    calibration = Calibration(h2d_bytes_per_s=1e5, d2h_bytes_per_s=1e4, update_params_per_s=1e3)
    for op, expected in ((load, 0.1), (store, 1.0), (op_of("update"), 4.096)):
        assert seconds(op, calibration=calibration) == pytest.approx(COPY_S + expected)


def test_samples_correct_the_formula() -> None:
    op, other = op_of("layer_forward"), op_of("layer_forward", index=1)
    plain = [seconds(o) for o in (op, other)]
    kind = op_kind(op, "layers.0")
    assert kind == "layers.0 layer_forward"
    calibration = Calibration(samples={kind: (Sample(tokens=64, pairs=2_080, seconds=3 * plain[0]),)})
    found = [seconds(o, calibration=calibration) for o in (op, other)]
    assert found == pytest.approx([3 * s for s in plain])
    # An op that was not measured is off by as much as those that were.
    again = op_of("layer_recompute")
    assert seconds(again, calibration=calibration) == pytest.approx(3 * seconds(again))
    # Two samples tell tokens from pairs.
    samples = (Sample(tokens=64, pairs=1_000, seconds=0.5), Sample(tokens=64, pairs=3_000, seconds=0.9))
    calibration = Calibration(samples={"layers.0 layer_forward": samples})
    # 0.4 s for 2,000 pairs more: 0.0002 s a pair, and 0.5 - 0.2 = 0.3 s for 64 tokens. The first chunk has 2,080 pairs.
    assert seconds(op_of("layer_forward"), calibration=calibration) == pytest.approx(0.3 + 2_080 * 2e-4)
    short = a_plan(row_tokens=96)  # chunks of 64 and 32 tokens
    last = op_of("layer_forward", index=1)
    pairs = 32 * 64 + 32 * 33 // 2
    assert seconds(last, short, calibration) == pytest.approx(0.3 * 32 / 64 + pairs * 2e-4)
    kept = op_of("layer_forward", flags=frozenset({SAVED_GRAPH}))
    assert op_kind(kept, "layers.0") == "layers.0 layer_forward+saved_graph", "measured apart"


@pytest.mark.parametrize("pairs", [(2_080,), (1_000, 3_000)])
def test_what_recomputes_follows_from_what_was_measured_with_a_graph(pairs: tuple[int, ...]) -> None:
    kept, plain = (op_of("layer_backward", flags=flags) for flags in (frozenset({SAVED_GRAPH}), frozenset[str]()))
    more = seconds(plain) / seconds(kept)
    samples = tuple(Sample(tokens=64, pairs=count, seconds=0.5 + 1e-4 * count) for count in pairs)
    calibration = Calibration(samples={op_kind(kept, "layers.0"): samples})
    assert seconds(kept, calibration=calibration) == pytest.approx(0.5 + 1e-4 * 2_080)
    assert seconds(plain, calibration=calibration) == pytest.approx(more * (0.5 + 1e-4 * 2_080), rel=1e-3)
    assert more > 1.2


def test_the_nearest_attention_rate_and_representatives_of_blocks() -> None:
    assert attention_rate(ROUND, 8, 64).forward_flops == 2e9
    assert attention_rate(ROUND, 16, 400).forward_flops == 8e9
    assert attention_rate(ROUND, 128, 4_096).forward_flops == 9e9, "the head size counts first"
    blocks = a_plan(sliding=frozenset({1})).blocks
    assert representatives(blocks) == ["embed", "layers.0", "layers.1", "layers.0", "head"]
    twin = BlockShape(name="other", kind="layer", buffers=("other",))
    assert representatives([twin, replace(twin, name="another", buffers=("a", "b"))]) == ["other", "other"]


def test_every_op_of_a_schedule_takes_time() -> None:
    for plan in (a_plan(), a_plan(streamed=True), a_plan(gpu_budget=1, ram_budget=1)):
        costs = Costs(plan, Conditions(ROUND))
        builder = ScheduleBuilder(plan)
        for pass_ in (training(plan, 1), evaluation(plan, 1, 1, documents=plan.row_documents)):
            assert all(0 < costs.seconds(op) < 10 for op in builder.ops(pass_))


def spec(model_type: str, freeze: list[str] | None = None, **overrides: Any) -> ModelSpec:
    model = tiny.model(model_type=model_type, num_layers=2, vocab_size=96, overrides=overrides)
    return tiny.spec_of(model_config(tiny.recipe(model=model), None), freeze or [])


def test_a_qwen3_whole_and_half_frozen_by_hand() -> None:
    forward, model = 36_864, spec("qwen3")
    assert matmul_flops(model) == 2 * (2 * (ATTENTION_WEIGHTS + MLP) + HEAD) == forward
    # A document of 3 tokens has 6 visible pairs: 2 layers x 2 FLOP x 4 heads x (8 + 8) x 6.
    assert attention_flops(model, [3]) == 2 * 2 * 4 * 16 * 6
    assert model_flops(model, [3, 1]) == 3 * (4 * forward + 2 * 2 * 4 * 16 * 7)
    # The embedding, the first layer and the MLP of the second are frozen: backward ends with the second.
    model = spec("qwen3", HALVES)
    backward = LAYER_FLOPS + 2 * ATTENTION_WEIGHTS + 2 * 2 * HEAD
    assert matmul_flops(model) == 2 * LAYER_FLOPS + 2 * HEAD
    # Of the two layers' attention, which is 2 x 4 x 16 a pair, one goes backward, at twice that.
    assert model_flops(model, [3, 1]) == 4 * (2 * LAYER_FLOPS + 2 * HEAD + backward) + 2 * 4 * 16 * 7 * (2 + 2)


@pytest.mark.parametrize("groups", [1, 2])
def test_experts_apart_are_executed_like_experts_in_their_layers(groups: int) -> None:
    config = model_config(tiny.recipe(model=tiny.model(model_type="qwen3_moe", overrides=tiny.EXPERTS)), None)
    whole, apart = tiny.spec_of(config), tiny.spec_of(config, split_layers="experts", expert_groups=groups)
    found = [executed_flops(model, two_chunks(model), [5, 3]) for model in (whole, apart)]
    assert found[0] == found[1]
    assert model_flops(whole, [5, 3]) == model_flops(apart, [5, 3]) < found[0].total


def two_chunks(model: ModelSpec, **changes: Any) -> Plan:
    """Two chunks of 4 tokens, and what the test says about what is saved."""
    t = tiny.training(global_batch_size=1, chunk_tokens=4)
    plan = tiny.plan_of(model, tiny.recipe(data=tiny.data(sequence_length=8), train=t), "1GiB", "1GiB")
    return replace(plan, **({"recomputed": frozenset(), "saved_graphs": frozenset()} | changes))


def test_what_a_step_of_two_chunks_executes_by_hand() -> None:
    # Two documents of 5 and 3 tokens: 15 + 6 pairs, 4 heads; q.k and p.v forward, 3 and 2 of them backward.
    forward, backward = 2 * 4 * (8 + 8) * 21, 2 * 4 * (3 * 8 + 2 * 8) * 21
    model = spec("qwen3")
    assert set(model.unread) == {"mlp.down_proj"}

    flops = executed_flops(model, two_chunks(model), [5, 3])
    assert (flops.layer_matmul, flops.head_matmul) == (2 * 8 * (3 * LAYER_FLOPS + AGAIN), 8 * 3 * 2 * HEAD)
    assert (flops.attention_forward, flops.attention_backward) == (2 * forward, 2 * backward)
    assert flops.total == 2 * 8 * (3 * LAYER_FLOPS + AGAIN) + 8 * 6 * HEAD + 2 * (forward + backward)

    # Layer 1 (block 2) saves the graph of its second chunk, LAYER_FLOPS 0 (block 1) saves its input only.
    plan = two_chunks(model, recomputed=frozenset({1}), saved_graphs=frozenset({(2, 1)}))
    changed = executed_flops(model, plan, [5, 3])
    projection = 2 * (32 * 32 + 2 * 32 * 16)  # queries, keys and values
    assert changed.layer_matmul == flops.layer_matmul + 8 * projection - 4 * AGAIN
    assert changed.attention_forward == flops.attention_forward + forward
    assert changed.attention_backward == flops.attention_backward

    streamed = executed_flops(model, two_chunks(model, streamed=True), [5, 3])
    assert streamed.layer_matmul == flops.layer_matmul + 2 * 8 * projection
    assert streamed.attention_forward == flops.attention_forward

    # Six of the eight tokens come before the padding: the second chunk is computed half.
    padded = executed_flops(model, plan, [5, 1], [6])
    per_token = 2 * (3 * LAYER_FLOPS + AGAIN) + projection
    assert padded.layer_matmul == 6 * per_token - 2 * AGAIN
    assert padded.head_matmul == 6 * 3 * 2 * HEAD


@pytest.mark.parametrize(("model_type", "changes"), [
    ("qwen3", {}),
    ("qwen3", {"tie_word_embeddings": True}),
    ("llama", {"head_dim": 16}),
    ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    (
        "qwen3_moe",
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "mlp_only_layers": [0]},
    ),
])  # fmt: skip
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


class ProductCounter(TorchDispatchMode):
    flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in PRODUCTS:
            self.flops += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=out)
        return out


@pytest.mark.parametrize(("saving", "kv_window", "freeze"), [
    ("full", "whole", []),
    ("selective", "streamed", []),
    ("none", "whole", []),
    ("none", "streamed", HALVES),
    pytest.param("full", "streamed", [], marks=pytest.mark.long),
    pytest.param("full", "whole", HALVES, marks=pytest.mark.long),
])  # fmt: skip
def test_a_step_computes_what_the_formula_says(tmp_path: Path, saving: str, kv_window: str, freeze: list[str]) -> None:
    ways = {"activation_checkpointing": saving, "kv_window": kv_window, "freeze": freeze}
    t = tiny.training(steps=1, global_batch_size=1, chunk_tokens=20, **ways)
    with tiny.session(tmp_path, d=tiny.data(sequence_length=112), t=t) as session:
        attention.COUNTS.reset()
        perform, counter = session.runtime.perform, ProductCounter()

        def counting(op: Op) -> Any:
            with counter if op.lane == "compute" else nullcontext():
                return perform(op)

        session.executor._perform = counting
        lengths = [n for m in session.loader.next_step() for n in m.lengths]
        session.loader.seek(session.store.meta["cursor"])
        train_step(session)
        products, spec = counter.flops, session.spec
        expected = executed_flops(spec, session.plan, lengths)
    # The head's products count only tokens with a label, one fewer a document.
    head = expected.head_matmul * (sum(lengths) - len(lengths)) // sum(lengths)
    assert products == pytest.approx(expected.layer_matmul + head, rel=0.01)
    counts, forward = attention.COUNTS, attention_flops(spec, lengths)
    assert (counts.forward_flops, counts.backward_flops) == (expected.attention_forward, expected.attention_backward)
    if freeze:
        return
    assert counts.forward_flops == forward * (2 if saving == "full" else 1)
    assert counts.backward_flops == forward * 5 // 2
    if saving == "none" and kv_window == "whole":
        whole = model_flops(spec, lengths) + forward // 2  # a flash backward computes q.k again
        assert products + counts.forward_flops + counts.backward_flops == pytest.approx(whole, rel=0.02)
