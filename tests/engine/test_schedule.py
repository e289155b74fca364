"""The schedule: whatever the plan, every access is ordered, slots are never shared, and the peak is the plan's."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_check import races
from schedule_replay import Replay

from engine.ops import LANES, Op
from engine.plan import DKV_SLOTS, KV_SLOTS, BlockShape, BufferShape, Plan, Problem, Save, Window, cut_chunks
from engine.planner import make_plan
from engine.schedule import ScheduleBuilder
from storage.errors import BudgetError

BLOCK_OPS = {f"{role}_{mode}" for role in ("embed", "layer") for mode in ("forward", "backward")} | {"head"}
KV_DIM, HEAD_DIM, HEADS, HIDDEN = 16, 8, 4, 32


def problem(
    *,
    layers: int = 3,
    tied: bool = False,
    own_head: bool = True,
    edge: int = 8,
    micro_batches: int = 2,
    rows: int = 1,
    row_tokens: int = 256,
    chunk_tokens: int = 64,
    chunk_per_row: bool = False,
    without_attention: frozenset[int] = frozenset(),
    gpu_budget: int = 10**9,
    ram_budget: int = 10**9,
    device_reads: bool = True,
    reader_bytes: int = 0,
    save: Save = "attention",
    kv_window: Window = "whole",
    sliding: frozenset[int] = frozenset(),
    graph_bytes: int | None = 700,
    again_share: float = 0.3,
) -> Problem:
    """A small model with one page of parameters per layer and `edge` pages in embedding and head."""
    blocks = [BlockShape(name="embed", role="embed", buffers=("embed",))]
    for i in range(layers):
        attends = i not in without_attention
        blocks.append(
            BlockShape(
                name=f"layers.{i}",
                role="layer",
                buffers=(f"layers.{i}",),
                out_bytes_per_token=HEADS * HEAD_DIM * 2 * attends,
                lse_bytes_per_token=HEADS * 4 * attends,
                kv_bytes_per_token=2 * KV_DIM * 2 * attends,
                kv_numel_per_token=2 * KV_DIM * attends,
                q_numel_per_token=HEADS * HEAD_DIM * attends,
                out_numel_per_token=HEADS * HEAD_DIM * attends,
                window_tokens=20 if i in sliding else None,
                graph_bytes_per_token=graph_bytes,
                again_share=again_share if attends else 0.0,
            )
        )
    head = ("head",) if own_head else ()
    blocks.append(BlockShape(name="head", role="head", buffers=(*head, "embed") if tied or not own_head else head))
    sizes = {"embed": edge * 2048} | {f"layers.{i}": 4 * 2048 for i in range(layers)}
    if own_head:
        sizes["head"] = 2048 if tied else edge * 2048
    return Problem(
        blocks=tuple(blocks),
        buffers=tuple(BufferShape(name=n, numel=s, part_numel=min(s, 4096)) for n, s in sizes.items()),
        hidden_size=HIDDEN,
        compute_bytes=2,
        gradient_bytes=4,
        micro_batches=micro_batches,
        rows=rows,
        row_tokens=row_tokens,
        chunk_tokens=chunk_tokens,
        chunk_per_row=chunk_per_row,
        workspace_bytes=1000,
        gpu_budget=gpu_budget,
        ram_budget=ram_budget,
        device_reads=device_reads,
        reader_bytes=reader_bytes,
        save=save,
        kv_window=kv_window,
    )


general = st.builds(
    problem,
    layers=st.integers(1, 5),
    tied=st.booleans(),
    own_head=st.booleans(),
    edge=st.sampled_from([1, 4, 9]),
    micro_batches=st.integers(1, 3),
    rows=st.integers(1, 2),
    row_tokens=st.integers(3, 80),
    chunk_tokens=st.integers(9, 120),
    chunk_per_row=st.booleans(),
    without_attention=st.frozensets(st.integers(0, 4), max_size=2),
    gpu_budget=st.integers(200_000, 3_000_000),
    ram_budget=st.integers(150_000, 3_000_000),
    device_reads=st.booleans(),
    reader_bytes=st.sampled_from([0, 70_000]),
    save=st.sampled_from(["auto", "input", "attention"]),
    kv_window=st.sampled_from(["auto", "whole", "streamed"]),
    sliding=st.frozensets(st.integers(0, 4), max_size=2),
    graph_bytes=st.sampled_from([None, 300, 3000]),
    again_share=st.sampled_from([0.05, 0.3]),
)
streaming = st.builds(
    problem,
    layers=st.integers(1, 3),
    tied=st.booleans(),
    edge=st.just(1),
    micro_batches=st.integers(1, 2),
    rows=st.integers(1, 2),
    row_tokens=st.integers(30, 50),
    chunk_tokens=st.integers(7, 13),
    without_attention=st.frozensets(st.integers(0, 2), max_size=1),
    gpu_budget=st.integers(150_000, 600_000),
    ram_budget=st.integers(100_000, 1_000_000),
    save=st.sampled_from(["auto", "input", "attention"]),
    kv_window=st.just("streamed"),
    sliding=st.frozensets(st.integers(0, 2), max_size=2),
    graph_bytes=st.sampled_from([None, 300, 3000]),
    again_share=st.sampled_from([0.05, 0.3]),
)
problems = st.one_of(general, streaming)


def some_plan(shape: Problem) -> Plan:
    """A plan for `shape`; where a budget is too small, one for the budget that the refusal asks for."""
    for _ in range(3):
        try:
            return make_plan(shape)
        except BudgetError as refusal:
            need = int(str(refusal).split("give at least ")[1].split(" bytes")[0])
            field = "gpu_budget" if "budgets.gpu" in str(refusal) else "ram_budget"
            assert need > getattr(shape, field)
            shape = Problem(**{n: getattr(shape, n) for n in Problem.__slots__} | {field: need})
    raise AssertionError("the budgets that the refusals ask for are refused")


def steps_of(plan: Plan, steps: int = 3, documents: list[list[int]] | None = None) -> list[Op]:
    builder = ScheduleBuilder(plan)
    ops: list[Op] = []
    for step in range(1, steps + 1):
        ops += builder.step(step, commit_previous=step % 2 == 0, documents=documents)
    return ops + builder.finish(commit=True)


@settings(max_examples=120, deadline=None)
@given(problems)
def test_every_access_is_ordered_whatever_the_plan(shape: Problem) -> None:
    plan = some_plan(shape)
    for tier in plan.tiers.values():
        assert sum(tier.parts.values()) == tier.peak_bytes <= tier.budget_bytes
    ops = steps_of(plan)
    assert [op.id for op in ops] == list(range(len(ops)))
    assert {op.lane for op in ops} <= set(LANES)
    assert list(races(ops)) == []


@settings(max_examples=120, deadline=None)
@given(problems)
def test_slots_stay_within_the_plan_and_hold_what_is_read(shape: Problem) -> None:
    """Replays the ops and follows what each slot, region and part on disk holds."""
    plan = some_plan(shape)
    limits = {
        ("gpu.weights", "layer"): plan.weight_slots["layer"],
        ("gpu.weights", "edge"): plan.weight_slots["edge"],
        ("gpu.gradient", "layer"): plan.gradient_slots["layer"],
        ("gpu.gradient", "edge"): plan.gradient_slots["edge"],
        ("ram.state_stage",): plan.state_stages,
        ("ram.part_stage",): plan.part_stages,
        ("ram.activation_stage",): plan.activation_stages,
        ("gpu.kv",): KV_SLOTS if plan.streamed else plan.window_chunks,
        ("gpu.dkv",): DKV_SLOTS,
    }
    version = dict.fromkeys(plan.buffers, 0)
    held: dict[tuple[str | int, ...], tuple[str, int]] = {}
    computed: Counter[tuple[int, str, str, int]] = Counter()
    updated: Counter[tuple[int, str]] = Counter()
    for op in steps_of(plan):
        for resource in (*op.reads, *op.writes):
            for prefix, limit in limits.items():
                if resource[: len(prefix)] == prefix and len(resource) == len(prefix) + 1:
                    assert int(resource[-1]) < limit
        if op.action.startswith("update"):
            updated[op.step, op.block] += 1
            last = op.action == "update_on_gpu" or op.index == plan.buffers[op.block].num_parts - 1
            version[op.block] += last
        if op.action in ("load_weights", "load_weights_part", "read_weights_whole"):
            held["gpu.weights", plan.buffers[op.block].pool, op.slots[op.block]] = (op.block, version[op.block])
        if op.action in BLOCK_OPS:
            computed[op.step, op.action, op.block, op.index] += 1
            block = next(b for b in plan.blocks if b.name == op.block)
            for name in block.buffers:
                buffer = plan.buffers[name]
                # One update of the waiting gradient lies between any two steps.
                assert version[name] == op.step - 1
                if buffer.weights != "gpu":
                    assert held["gpu.weights", buffer.pool, op.slots[name]] == (name, op.step - 1)
    chunks = len(plan.chunks)
    assert set(computed.values()) == {1}
    assert len(computed) == 3 * chunks * (2 * (len(plan.blocks) - 1) + 1)
    for buffer in plan.buffers.values():
        parts = 1 if buffer.state == "gpu" else buffer.num_parts
        assert [updated[step, buffer.name] for step in (1, 2, 3)] == [parts] * 3


@settings(max_examples=200, deadline=None)
@given(problems, st.none() | st.lists(st.integers(1, 159), max_size=6))
def test_every_op_finds_what_it_wants_where_it_looks(shape: Problem, cuts: list[int] | None) -> None:
    """Replays the ops: every slot, region and file holds, when it is read, what the reader wants."""
    plan = some_plan(shape)
    rows = range(0, plan.window_tokens, shape.row_tokens)
    documents = [sorted({*rows, *(c for c in cuts or () if c < plan.window_tokens)})] * shape.micro_batches
    replay = Replay(plan, documents)
    for op in steps_of(plan, 2, None if cuts is None else documents):
        replay.perform(op)
    assert replay.spilled == plan.spilled
    files = [place for place, content in replay.held.items() if str(place[0]).startswith("nvme.") and content]
    assert files == [], "a file is left when the step is over"
    assert replay.graphs == 0
    kept_in_ram = [key for key in records(plan) if key not in plan.spilled and key not in plan.kept]
    if plan.spilled and kept_in_ram:
        last = max(block for block, _ in plan.spilled)
        assert all(block >= last for block, _ in kept_in_ram), "backward's last spill first"


def records(plan: Plan) -> list[tuple[int, int]]:
    layers = [i for i, block in enumerate(plan.blocks) if block.role == "layer"]
    return [(i, chunk.index) for i in layers for chunk in plan.chunks]


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 50), st.integers(1, 200), st.booleans())
def test_chunks_cover_each_micro_batch_once(
    micro_batches: int, rows: int, row_tokens: int, chunk_tokens: int, per_row: bool
) -> None:
    chunks = cut_chunks(micro_batches, rows, row_tokens, chunk_tokens, per_row)
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    for m in range(micro_batches):
        mine = [chunk for chunk in chunks if chunk.micro_batch == m]
        assert [t for chunk in mine for t in range(chunk.start, chunk.end)] == list(range(rows * row_tokens))
        assert [chunk.local for chunk in mine] == list(range(len(mine)))
        width = row_tokens if per_row else chunk_tokens
        assert all(chunk.end - chunk.start <= width for chunk in mine)


def test_placement_fills_the_gpu_then_ram_then_nvme() -> None:
    roomy = make_plan(problem())
    assert {b.state for b in roomy.buffers.values()} == {"gpu"}
    floor = some_plan(problem(gpu_budget=1)).tiers["gpu"].peak_bytes
    in_ram = make_plan(problem(gpu_budget=floor))
    assert {b.state for b in in_ram.buffers.values()} == {"ram"}
    ram_floor = some_plan(problem(gpu_budget=floor, ram_budget=1)).tiers["ram"].peak_bytes
    on_disk = make_plan(problem(gpu_budget=floor, ram_budget=ram_floor))
    assert {b.state for b in on_disk.buffers.values()} == {"nvme"}
    mixed = make_plan(problem(gpu_budget=floor, ram_budget=ram_floor + 500_000))
    assert {b.weights for b in mixed.buffers.values()} == {"ram"}, "weights cross most often and so come first"
    assert "nvme" in {b.state for b in mixed.buffers.values()}
    assert len(on_disk.spilled) == 3 * len(on_disk.chunks)
    assert 0 <= len(mixed.spilled) < len(on_disk.spilled)


def test_memory_left_over_keeps_graphs_first_where_steps_are_long() -> None:
    short = problem(save="auto", edge=64)
    need = some_plan(problem(save="attention", edge=64, gpu_budget=1)).tiers["gpu"].peak_bytes
    budget = need + 700_000
    few = make_plan(problem(save="auto", edge=64, gpu_budget=budget))
    many = make_plan(problem(save="auto", edge=64, row_tokens=512, micro_batches=32, gpu_budget=budget + 200_000))
    assert {b.state for b in few.buffers.values()} != {b.state for b in many.buffers.values()}
    assert "gpu" in {b.state for b in few.buffers.values()}
    assert len(many.kept) > len(few.kept)
    assert all(key in many.kept for key in [(3, c.index) for c in many.chunks][-len(many.kept) :]), (
        "the last ones first"
    )
    assert make_plan(short).kept == {(i, c.index) for i in (1, 2, 3) for c in make_plan(short).chunks}


def test_where_attention_is_cheap_it_is_computed_again_rather_than_spilled() -> None:
    floor = some_plan(problem(gpu_budget=1)).tiers["gpu"].peak_bytes
    ram = some_plan(problem(gpu_budget=floor, ram_budget=1, save="input")).tiers["ram"].peak_bytes + 60_000
    cheap = make_plan(problem(save="auto", again_share=0.05, gpu_budget=floor, ram_budget=ram))
    dear = make_plan(problem(save="auto", again_share=0.3, gpu_budget=floor, ram_budget=ram))
    assert cheap.recomputed
    assert not dear.recomputed
    assert len(cheap.spilled) < len(dear.spilled)


def test_a_window_is_streamed_only_where_it_would_not_fit() -> None:
    long = {"row_tokens": 2048, "save": "attention", "kv_window": "auto"}
    whole = make_plan(problem(**long))
    assert not whole.streamed
    need = some_plan(problem(**long | {"kv_window": "streamed"}, gpu_budget=1)).tiers["gpu"].peak_bytes
    tight = make_plan(problem(**long, gpu_budget=need))
    assert tight.streamed
    lengths = [make_plan(problem(**long | {"kv_window": "streamed", "row_tokens": n})) for n in (1024, 4096)]
    windows = [plan.tiers["gpu"].parts["K/V window"] for plan in lengths]
    assert windows[0] == windows[1], "what is streamed takes the same memory at any length"
    with pytest.raises(BudgetError, match=r"budgets\.gpu: .*give at least \d+ bytes"):
        make_plan(problem(**long | {"kv_window": "whole"}, gpu_budget=need))


def test_everything_is_kept_or_refused_with_the_need() -> None:
    with pytest.raises(
        BudgetError, match=r"budgets\.gpu: .*train\.save=everything needs.*give at least (\d+) bytes"
    ) as e:
        make_plan(problem(save="everything", gpu_budget=400_000))
    need = int(str(e.value).split("give at least ")[1].split(" bytes")[0])
    plan = make_plan(problem(save="everything", gpu_budget=need))
    assert len(plan.kept) == 3 * len(plan.chunks)
    with pytest.raises(BudgetError, match=r"train\.save: what layers\.0 would have to keep is not known"):
        make_plan(problem(save="everything", graph_bytes=None))


@pytest.mark.parametrize("tier", ["gpu", "ram"])
def test_a_budget_below_one_working_set_is_refused_with_the_need(tier: str) -> None:
    with pytest.raises(BudgetError, match=rf"budgets\.{tier}.*give at least \d+ bytes"):
        make_plan(problem(**{f"{tier}_budget": 1000}))
