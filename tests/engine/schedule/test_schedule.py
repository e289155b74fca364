"""The schedule: whatever the plan, every access is ordered, slots are never shared, and the peak is the plan's; and the
table of actions against who emits them and who carries them out."""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from attention_reference import with_prefixes
from hypothesis import given
from hypothesis import strategies as st
from samples import sampled
from schedule_replay import Replay, races
from small_problems import planned, problem, problems, skipping, some_plan

from penstock.engine.plan.chunks import filled_streams, own, streams
from penstock.engine.plan.plan import Plan, sample_regions
from penstock.engine.plan.planner import make_plan
from penstock.engine.plan.problem import ALIGNMENT, DKV_SLOTS, KV_SLOTS, POOLS, PlanOptions, SampleSpace
from penstock.engine.runtime.block_ops import BlockOps
from penstock.engine.runtime.handlers import handlers_of, handles
from penstock.engine.runtime.layer_ops import BranchOps, LayerOps
from penstock.engine.runtime.sample_ops import SampleOps
from penstock.engine.runtime.state_ops import StateOps
from penstock.engine.schedule import actions as a
from penstock.engine.schedule import resources as r
from penstock.engine.schedule.action import LANES
from penstock.engine.schedule.builder import ScheduleBuilder
from penstock.engine.schedule.ops import Op
from penstock.engine.schedule.passes import evaluation, sampling, training

FORWARDS = {a.VISION_FORWARD, a.EMBED_FORWARD, a.LAYER_FORWARD, a.LAYER_FORWARD_BOTTOM, *a.BRANCH_FORWARD.values()}
TRAINS = FORWARDS | {
    a.VISION_BACKWARD,
    a.HEAD,
    a.LAYER_BACKWARD,
    a.LAYER_BACKWARD_BOTTOM,
    *a.BRANCH_BACKWARD.values(),
    a.EMBED_BACKWARD,
}
"""What takes a chunk through a block to its output, in a step; in a validation:"""
EVALUATES = {
    a.VISION_EVALUATE,
    a.EMBED_EVALUATE,
    a.LAYER_EVALUATE,
    a.LAYER_EVALUATE_BOTTOM,
    *a.BRANCH_EVALUATE.values(),
    a.HEAD_EVALUATE,
}
GENERATES = {a.VISION_GENERATE, a.EMBED_GENERATE, a.LAYER_GENERATE, *a.BRANCH_GENERATE.values(), a.HEAD_GENERATE}
validations = st.dictionaries(st.integers(1, 3), st.lists(st.integers(1, 3), min_size=1, max_size=3))
"""Step after which a validation is made -> micro-batches of its passes, as far as a step has so many."""
PREFIXES = st.lists(st.none() | st.tuples(st.integers(0, 9), st.integers(0, 159)), max_size=6)
"""For each document of a stream but the first: which earlier one it goes on from, and how many of its tokens."""
fillings = st.lists(st.lists(st.none() | st.integers(0, 160), min_size=5, max_size=5), min_size=2, max_size=2)
"""Of two steps, per micro-batch: its tokens before the padding, in 160ths of its length."""


@pytest.fixture(scope="module", autouse=True)
def small_pieces() -> Iterator[None]:
    """Weights of these small models are loaded in pieces as well."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.engine.schedule.state.LEAST_PIECE_BYTES", 2 * ALIGNMENT)
        yield


def steps_of(
    plan: Plan,
    steps: int = 3,
    documents: Sequence[Sequence[int]] | None = None,
    passes: dict[int, list[int]] | None = None,
    filled: Sequence[list[int | None]] = (),
) -> list[Op]:
    """Ops of a whole run that commits every other step, be it in a validation; `filled`: of the first few steps, and of
    the validations after them. The second validation of a step is of the reference model, where there is one."""
    builder = ScheduleBuilder(plan)
    padding = dict(enumerate(filled, start=1))
    ops: list[Op] = []
    for step in range(1, steps + 1):
        filled_to = plan.filled_streams(padding[step]) if step in padding else None
        pass_ = training(plan, step, documents=documents, streams=filled_to)
        ops += builder.ops(pass_, commit_previous=step % 2 == 1)
        for number, count in enumerate((passes or {}).get(step, ()), start=1):
            count = min(count, plan.group)
            looked_at = (documents or plan.row_documents)[:count]
            commit = number == 1 and count == 1 and step % 2 == 0  # else the next step commits, or the end
            filled_to = plan.filled_streams(padding[step][:count]) if step in padding else None
            of_reference = bool(plan.problem.references) and number == 2
            pass_ = evaluation(plan, step, number, documents=looked_at, streams=filled_to, of_reference=of_reference)
            ops += builder.ops(pass_, commit_previous=commit)
        if plan.problem.samples is not None:
            ops += samples_of(plan, builder, step)
    ops += builder.finish(commit=True)
    assert not builder.uncommitted
    assert builder.finish(commit=True) == []
    return ops


def samples_of(plan: Plan, builder: ScheduleBuilder, step: int) -> list[Op]:
    """A pass over two chunks of prompts, where there are two, and one over a single token; it commits what is due."""
    halves = [replace(c, start=0, end=max(1, (c.end - c.start) // 2)) for c in plan.group_chunks[:2]]
    read = sum(chunk.end for chunk in halves) if plan.problem.samples.tier != "nowhere" else 0
    ops: list[Op] = []
    for number, chunks in enumerate([halves, [replace(halves[0], end=1)]], start=1):
        commit = number == 1 and step % 2 == 0 and builder.uncommitted
        wanted, read_tokens = [len(chunks) - 1], read * (number > 1)
        pass_ = sampling(plan, step, -2 * step - number, chunks=chunks, wanted=wanted, read_tokens=read_tokens)
        ops += builder.ops(pass_, commit_previous=commit)
    return ops


@sampled(25, 100)
@given(planned(problems | skipping), validations)
def test_every_access_is_ordered_whatever_the_plan(plan: Plan, passes: dict[int, list[int]]) -> None:
    """An op touches what its action says. Of a frozen buffer there is nothing to write, and below the lowest block that
    is trained there is no backward."""
    ops = steps_of(plan, passes=passes)
    assert [op.id for op in ops] == list(range(len(ops)))
    assert {op.lane for op in ops} <= set(LANES)
    assert list(races(ops)) == []
    frozen = {name for name, buffer in plan.buffers.items() if buffer.frozen}
    backward = {block.name for block in plan.blocks if block.backward}
    reads = {a.LOAD_WEIGHTS, a.LOAD_WEIGHTS_PART, a.READ_WEIGHTS, a.READ_WEIGHTS_WHOLE, a.DEQUANTISE}
    for op in ops:
        assert {place[0] for place in op.reads} <= {*op.action.reads, *op.action.adds}, op
        assert {place[0] for place in op.writes} <= {*op.action.writes, *op.action.adds}, op
        assert op.block not in frozen or op.action in reads, op
        assert frozen.isdisjoint(name for place in op.writes for name in place[1:] if place[0] != r.GPU_WEIGHTS), op
        assert not any(a.gradient_of(name) in op.slots or a.zero(name) in op.flags for name in frozen), op
        assert op.action.phase not in ("backward", "recompute") or op.action.kind or op.block in backward, op
    for name in frozen:
        assert (plan.buffers[name].state, plan.buffers[name].gradient) == (None, None)
        pool = plan.buffers[name].pool
        shares = pool == "float32" or plan.buffers[name].reference_of is not None
        assert shares or plan.gradient_slots[pool] == 0


@sampled(25, 100)
@given(planned(), validations)
def test_slots_stay_within_the_plan_and_hold_what_is_read(plan: Plan, passes: dict[int, list[int]]) -> None:
    """Replays the ops and follows what each slot, region and part on disk holds."""
    limits = {
        **{(r.GPU_WEIGHTS, pool): plan.weight_slots[pool] for pool in POOLS},
        **{(r.GPU_GRADIENT, pool): plan.gradient_slots[pool] for pool in POOLS},
        (r.RAM_STATE_STAGE,): plan.state_stages,
        (r.RAM_PART_STAGE,): plan.part_stages,
        (r.RAM_ACTIVATION_STAGE,): plan.activation_stages,
        (r.GPU_KV,): KV_SLOTS if plan.streamed else plan.windows * plan.window_chunks,
        (r.GPU_DKV,): DKV_SLOTS,
        (r.GPU_SAMPLE_KV,): len(sample_regions(plan.problem).stages),
    }
    version, references = dict.fromkeys(plan.buffers, 0), plan.problem.references
    held: dict[r.Resource, tuple[str, int]] = {}
    computed: Counter[tuple[int, a.Action, str, int]] = Counter()
    evaluated: Counter[tuple[int, int, str, int]] = Counter()
    generated: Counter[tuple[int, int, str, int]] = Counter()
    updated: Counter[tuple[int, str]] = Counter()
    coming: dict[tuple[str, int, str], int] = {}
    ops = steps_of(plan, passes=passes)
    for op in ops:
        for resource in (*op.reads, *op.writes):
            for prefix, limit in limits.items():
                if resource[: len(prefix)] == prefix and len(resource) == len(prefix) + 1:
                    assert int(resource[-1]) < limit
        if op.action.phase == "update":
            updated[op.step, op.block] += 1
            last = op.action is a.UPDATE_ON_GPU or op.index == plan.buffers[op.block].num_updates - 1
            version[op.block] += last
        if op.action in (a.LOAD_WEIGHTS, a.LOAD_WEIGHTS_PART):
            # A slot holds a buffer's weights once all of them have come, in order.
            start, end = pieces_of(plan, op)
            arrived = 0 if start == 0 else coming.pop((plan.buffers[op.block].pool, op.slots[op.block], op.block))
            assert start == arrived
            coming[plan.buffers[op.block].pool, op.slots[op.block], op.block] = end
            assert start < end
            if end < plan.buffers[op.block].numel:
                continue
        if op.action in (a.LOAD_WEIGHTS, a.LOAD_WEIGHTS_PART, a.READ_WEIGHTS_WHOLE):
            held[r.resource(r.GPU_WEIGHTS, plan.buffers[op.block].pool, op.slots[op.block])] = (
                op.block,
                version[op.block],
            )
        if op.action in TRAINS | EVALUATES | GENERATES:
            newest = op.step - (op.action in TRAINS)
            if op.batch < 0:
                generated[op.step, op.batch, op.block, op.index] += 1
            elif op.batch:
                evaluated[op.step, op.batch, op.block, op.index] += 1
            else:
                computed[op.step, op.action, op.block, op.index] += 1
            block = next(b for b in plan.blocks if b.name == op.block)
            for name in block.buffers:
                name = references.get(name, name) if op.batch == 2 else name
                buffer = plan.buffers[name]
                # One update of the waiting gradient lies between any two steps, and before a validation.
                assert version[name] == (0 if buffer.frozen else newest)
                if buffer.weights != "gpu":
                    assert held[r.resource(r.GPU_WEIGHTS, buffer.pool, op.slots[name])] == (name, version[name])
    chunks = len(plan.chunks)
    assert set(computed.values()) == {1}
    passes_of_step = len(plan.blocks) + sum(block.backward for block in plan.blocks[:-1])
    assert len(computed) == 3 * chunks * passes_of_step
    for buffer in plan.buffers.values():
        if buffer.frozen:
            assert not any(name == buffer.name for _, name in updated)
            continue
        parts = 1 if buffer.state == "gpu" else buffer.num_updates
        assert [updated[step, buffer.name] for step in (1, 2, 3)] == [parts] * 3
        ranges = [buffer.update(index) for index in range(buffer.num_updates)]
        assert [*ranges[0][:1], *(end for _, end in ranges)] == [*(start for start, _ in ranges), buffer.numel]
        staged = "nvme" in (buffer.weights, buffer.state, buffer.gradient)
        assert not staged or ranges == [buffer.part(part) for part in range(buffer.num_parts)]
    looked_at = sum(min(count, plan.group) for counts in passes.values() for count in counts)
    assert set(evaluated.values()) <= {1}
    assert len(evaluated) == looked_at * plan.window_chunks * len(plan.blocks)
    assert set(generated.values()) <= {1}
    chunks_of_pass = min(2, plan.num_group_chunks) + 1
    assert len(generated) == (plan.problem.samples is not None) * 3 * (chunks_of_pass * (len(plan.blocks) - 1) + 2)
    assert_generations(plan, ops, passes)


@sampled(25, 100)
@given(planned(), validations)
def test_weights_that_have_just_been_made_are_not_read_back(plan: Plan, passes: dict[int, list[int]]) -> None:
    """Between an update and the first op that computes with what it made, its weights are not read from NVMe."""
    unused: set[str] = set()
    users = {block.name: block.buffers for block in plan.blocks}
    for op in steps_of(plan, passes=passes):
        assert not (op.action in (a.READ_WEIGHTS, a.READ_WEIGHTS_WHOLE) and op.block in unused), op
        if op.action is a.WRITE_WEIGHTS:
            unused.add(op.block)
        if op.action in TRAINS | EVALUATES | GENERATES and not (plan.problem.references and op.batch == 2):
            unused.difference_update(users[op.block])


def pieces_of(plan: Plan, op: Op) -> tuple[int, int]:
    buffer = plan.buffers[op.block]
    return buffer.part(op.index) if op.action is a.LOAD_WEIGHTS_PART else buffer.piece(op.index, op.slots[a.PIECES])


@pytest.mark.parametrize("chunks", [1, 2, 6, 16])
def test_a_large_load_lets_small_ones_pass(chunks: int) -> None:
    """Weights in RAM come in pieces, all of them before half of the block before has been computed."""
    shape = problem(micro_batches=1, row_tokens=16 * chunks, chunk_tokens=16, gpu_budget=900_000)
    large = tuple(replace(b, numel=16 * 4096) if b.name.startswith("layers") else b for b in shape.buffers)
    plan = make_plan(replace(shape, buffers=large), PlanOptions(gpu_first="saved activations"))
    assert plan.buffers["layers.1"].weights == "ram"
    ops = steps_of(plan, 1)
    loads = [op for op in ops if op.action is a.LOAD_WEIGHTS and op.block == "layers.1"][: max(1, chunks // 2)]
    assert len(loads) == loads[0].slots[a.PIECES] == max(1, chunks // 2)
    copies = [op for op in ops if op.lane == "h2d"]
    between = [copies[copies.index(one) + 1 : copies.index(two)] for one, two in itertools.pairwise(loads)]
    forward = [op.id for op in ops if op.action is a.LAYER_FORWARD and op.block == "layers.0"]
    assert all(forward[i] < load.id < forward[i + 1] for i, load in enumerate(loads[: chunks - 1]))
    assert chunks < 6 or all(any(op.action is a.LOAD["x"] for op in some) for some in between)


def test_sums_of_earlier_groups_arrive_while_the_block_before_computes() -> None:
    plan = make_plan(problem(micro_batches=2, gpu_budget=330_000), PlanOptions(gpu_first="saved activations", group=1))
    ops = steps_of(plan, 1)
    sums = {op.block: op.id for op in ops if op.action is a.LOAD_SUM}
    assert set(sums) == set(plan.buffers)
    backward = [op for op in ops if op.action in (a.HEAD, a.LAYER_BACKWARD, a.EMBED_BACKWARD)]
    for before, op in itertools.pairwise(backward[len(backward) // 2 :]):  # of the second group
        if before.block != op.block:
            first = next(one for one in backward if one.block == before.block and one.id > sums[before.block])
            assert first.id < sums[op.block] < before.id


def assert_generations(plan: Plan, ops: list[Op], passes: dict[int, list[int]]) -> None:
    """Each commit has all of its generation's state behind it, of which nothing is written twice."""
    written: Counter[tuple[int, str]] = Counter()
    for op in ops:
        if op.action in (a.WRITE_STATE, a.CHECKPOINT_STATE, a.CHECKPOINT_STAGED):
            written[op.step, op.block] += 1
        if op.action is a.COMMIT:
            for buffer in plan.buffers.values():
                kinds = 0 if buffer.frozen else 3 if buffer.state == "gpu" else 1
                assert written[op.step, buffer.name] == kinds * buffer.num_parts
    assert [op.step for op in ops if op.action is a.COMMIT] == [2, 3]


@sampled(75, 400)
@given(planned(), st.none() | st.lists(st.integers(1, 159), max_size=6), PREFIXES, st.none() | fillings, validations)
def test_every_op_finds_what_it_wants_where_it_looks(
    plan: Plan,
    cuts: list[int] | None,
    prefixes: list[tuple[int, int] | None],
    shares: list[list[int | None]] | None,
    passes: dict[int, list[int]],
) -> None:
    """Replays the ops: every slot, region and file holds, when it is read, what the reader wants. Documents that are
    known may begin anywhere: packed rows lie end to end, and one need not begin at a multiple of a row's length; they
    may go on from earlier ones. What begins in the padding has no op, and what it begins in is cut."""
    tokens, micro_batches = plan.window_tokens, plan.problem.micro_batches
    rows = range(0, tokens, plan.problem.row_tokens)
    starts = rows if cuts is None else {0, *(c for c in cuts if c < tokens)}
    documents = [with_prefixes(sorted(starts), prefixes if cuts else [])] * micro_batches
    whole: list[list[int | None]] = [[None] * micro_batches] * 2
    filled = [[None if s is None else s * tokens // 160 for s in step[:micro_batches]] for step in shares or whole]
    cut = {(step, 0): plan.filled_chunks(of_step) for step, of_step in enumerate(filled, start=1)}
    for step in passes.keys() & {1, 2}:
        for number, count in enumerate(passes[step], start=1):
            cut[step, number] = plan.filled_chunks(filled[step - 1][: min(count, plan.group)])
    ops = steps_of(plan, 2, None if cuts is None else documents, passes, filled if shares else ())
    replay = Replay(plan, documents, cut if shares else None)
    for op in ops:
        replay.perform(op)
    assert shares or replay.spilled == plan.spilled
    files = [place for place, content in replay.held.items() if str(place[0]).startswith("nvme.") and content]
    assert files == [], "a file is left when the step is over"
    assert replay.graphs == 0
    assert shares is None or list(races(ops)) == []
    computed = Counter((op.step, op.batch, op.action.phase == "forward", op.block, op.index) for op in ops
                       if op.action in TRAINS | EVALUATES)  # fmt: skip
    assert set(computed.values()) == {1}
    for (step, batch), chunks in cut.items():
        for block in plan.blocks:
            found = {key[-1] for key in computed if key[:2] == (step, batch) and key[3] == block.name}
            assert found == {chunk.index for chunk in chunks}
    trained = [buffer for buffer in plan.buffers.values() if not buffer.frozen]
    parts = {buffer.name: 1 if buffer.state == "gpu" else buffer.num_updates for buffer in trained}
    for step in (1, 2):
        updates = Counter(op.block for op in ops if op.action.phase == "update" and op.step == step)
        assert updates == parts, "a step updates everything, whatever it holds"


@given(
    st.integers(1, 3), st.integers(1, 60), st.integers(1, 70), st.integers(1, 40),
    st.lists(st.none() | st.integers(0, 60), min_size=3, max_size=3),
)  # fmt: skip
def test_a_batch_needs_the_chunks_that_hold_its_tokens(
    micro_batches: int, tokens: int, chunk_tokens: int, multiple: int, filled: list[int | None]
) -> None:
    filled = [None if n is None else min(n, tokens) for n in filled[:micro_batches]]
    whole_step = streams(problem(micro_batches=micro_batches, row_tokens=tokens, chunk_tokens=chunk_tokens))
    chunks, found = list(own(whole_step)), list(own(filled_streams(whole_step, filled, multiple)))
    assert found[0].index == 0
    covered = {(c.micro_batch, t) for c in found for t in range(c.start, c.end)}
    real = {(m, t) for m, n in enumerate(filled) for t in range(tokens if n is None else n)}
    assert real <= covered
    assert len(covered) < len(real) + max(1, micro_batches) * multiple + 1
    if multiple == 1 and filled[0] != 0:
        assert covered == real
    for chunk in found:
        whole = chunks[chunk.index]
        assert chunk.end == whole.end or (chunk.end - chunk.start) % multiple == 0
        assert (chunk.start, chunk.local, chunk.micro_batch) == (whole.start, whole.local, whole.micro_batch)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 50), st.integers(1, 200), st.booleans())
def test_chunks_cover_a_batch(micro_batches: int, rows: int, row_tokens: int, chunk_tokens: int, per_row: bool) -> None:
    shape = {"micro_batches": micro_batches, "rows": rows, "row_tokens": row_tokens, "chunk_tokens": chunk_tokens}
    chunks = list(own(streams(problem(**shape, chunk_per_row=per_row))))
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    for m in range(micro_batches):
        mine = [chunk for chunk in chunks if chunk.micro_batch == m]
        assert [t for chunk in mine for t in range(chunk.start, chunk.end)] == list(range(rows * row_tokens))
        assert [chunk.local for chunk in mine] == list(range(len(mine)))
        width = row_tokens if per_row else chunk_tokens
        assert all(chunk.end - chunk.start <= width for chunk in mine)


SCARCE = {"gpu_budget": 1, "ram_budget": 1}
AUTO = {"activation_checkpointing": "auto"}
LONG = {"micro_batches": 1, "row_tokens": 512}
SHARED = SCARCE | LONG | {"replicas": 4, "ranks": 2, "sharded": True}
SPREAD = SCARCE | {"replicas": 4, "ranks": 2}
SAMPLES = {"samples": SampleSpace(lengths=(9, 4), keeps=True, vocabulary=50, tier="ram")}
PLANS: dict[str, tuple[dict[str, Any], PlanOptions]] = {
    "on the GPU, with samples": (SAMPLES, PlanOptions()),
    "in RAM": ({"gpu_budget": 1}, PlanOptions()),
    "on NVMe": (SCARCE, PlanOptions()),
    "on NVMe, read through RAM": (SCARCE | {"device_reads": False}, PlanOptions()),
    "on NVMe, recomputed": (SCARCE | {"activation_checkpointing": "full"}, PlanOptions(recompute="all")),
    "on NVMe, one chunk": (SCARCE | {"row_tokens": 64, "micro_batches": 1}, PlanOptions()),
    "on NVMe, streamed": (SCARCE | LONG, PlanOptions(streamed=True)),
    "in groups, graphs in RAM": (AUTO | {"gpu_budget": 300_000}, PlanOptions(group=1, offloaded_graphs="all")),
    "scores of whole sequences": ({"scores": True}, PlanOptions()),
    "experts": (SAMPLES | {"experts": frozenset({0, 2})}, PlanOptions()),
    "experts on NVMe": (SCARCE | {"experts": frozenset({0, 1, 2})}, PlanOptions()),
    "experts in groups, on NVMe": (SCARCE | {"experts": frozenset({0, 1}), "groups": 2}, PlanOptions()),
    "idle experts skipped": (SCARCE | {"experts": frozenset({0, 1}), "groups": 2, "skips": True}, PlanOptions()),
    "a state from chunk to chunk": ({"recurrent": frozenset({0, 2}), "gpu_budget": 1}, PlanOptions()),
    "a state from chunk to chunk on NVMe": (SCARCE | {"recurrent": frozenset({0, 1})}, PlanOptions()),
    "halves frozen, quantised": (SCARCE | {"halves": frozenset({1, 2}), "quantised": True}, PlanOptions()),
    "a vision tower, in groups, with samples": (SAMPLES | SCARCE | {"vision": True}, PlanOptions(group=1)),
    "a reference on NVMe": (SCARCE | {"references": True, "device_reads": False}, PlanOptions()),
    "replicas on two ranks, on NVMe": (SCARCE | {"replicas": 4, "ranks": 2}, PlanOptions()),
    "shards on two ranks, on NVMe": (SHARED, PlanOptions()),
    "shards on two ranks, with a state": (SHARED | {"recurrent": frozenset({0}), "kv_window": "auto"}, PlanOptions()),
    "experts spread over two ranks": (SPREAD | {"experts": frozenset({0, 1}), "groups": 2}, PlanOptions(spread=True)),
    "graphs on NVMe": (AUTO | SCARCE, PlanOptions(offloaded_graphs="all")),
}
"""Problems and choices in which every action has its place."""


@pytest.mark.parametrize("experts", [(), (1,)])
@pytest.mark.parametrize("budgets", [{}, {"gpu_budget": 1}, SCARCE])
def test_a_model_that_is_only_queried_is_a_plan_of_weights(budgets: dict[str, int], experts: tuple[int, ...]) -> None:
    """Nothing is written but what is computed, and no hidden state leaves where there are slots for all chunks."""
    for tier in (None, SAMPLES["samples"]):
        shape = problem(micro_batches=1, row_tokens=48, chunk_tokens=16, experts=frozenset(experts), **budgets)
        shape = replace(
            shape,
            samples=tier,
            state_kinds=(),
            buffers=tuple(replace(buffer, frozen=True) for buffer in shape.buffers),
            blocks=tuple(replace(block, backward=False, frozen_flops_per_token=0) for block in shape.blocks),
        )
        plan = some_plan(shape)
        assert "state" not in plan.tiers["gpu"].parts
        builder = ScheduleBuilder(plan)
        ops = builder.ops(evaluation(plan, 0, 1, documents=[[0, 20]])) if tier is None else samples_of(plan, builder, 0)
        assert list(races(ops)) == []
        assert {op.lane for op in ops} <= {"compute", "optimizer", "nvme_read", "h2d", "d2h"}
        assert (a.STORE["x"] in {op.action for op in ops}) == bool(experts)
        assert not builder.uncommitted
        read = {op.block for op in ops if op.lane == "nvme_read"}
        assert read == {name for name, buffer in plan.buffers.items() if buffer.weights == "nvme"}


def test_every_action_has_one_handler() -> None:
    owners = [object.__new__(owner) for owner in (BlockOps, LayerOps, BranchOps, StateOps, SampleOps)]
    assert handlers_of(*owners).keys() == set(a.ACTIONS.values())
    assert all(name == action.name and action.lane in LANES for name, action in a.ACTIONS.items())

    class Owner:
        @handles(a.NORM, a.CLIP)
        def both(self, op: Op) -> None: ...

        @handles(a.CLIP)
        def again(self, op: Op) -> None: ...

    with pytest.raises(AssertionError, match="two handlers of clip"):
        handlers_of(Owner())


def test_every_action_is_emitted_by_some_plan() -> None:
    emitted = {
        op.action
        for shape, choice in PLANS.values()
        for op in steps_of(some_plan(problem(**shape), choice), 2, passes={1: [1]})
    }
    assert emitted == set(a.ACTIONS.values())


def test_every_action_says_which_way_it_moves_what_and_for_which_part() -> None:
    """What moves bytes goes over its lane's link, and says what it carries; what computes belongs to a part."""
    links = {"h2d": {("ram", "gpu")}, "d2h": {("gpu", "ram")}, "nvme_write": {("ram", "nvme")}}
    links["nvme_read"] = {("nvme", "ram"), ("nvme", "gpu")}
    for action in a.ACTIONS.values():
        moves = action.lane in links and action not in (a.COMMIT, a.AWAIT_CHUNK, *a.DISCARD.values())
        assert (action.route is not None) == moves == bool(action.cargo), action
        assert not moves or action.route in links[action.lane], action
        assert action.part or action.lane != "compute" or action is a.DEQUANTISE, action
        assert action.measured_as is None or a.ACTIONS[action.measured_as].lane == action.lane
    assert a.READ_WEIGHTS_WHOLE.route == ("nvme", "gpu")
    carried = (a.READ_WEIGHTS, a.READ_STATE, a.STORE_GRADIENT, a.CHECKPOINT_STAGED, a.LOAD[a.DY], a.SPILL[a.KV])
    assert [action.cargo for action in carried] == [
        "weights", "optimizer state", "gradients", "optimizer state", "activation gradients", "activations"
    ]  # fmt: skip
    parts = (a.READ_WEIGHTS, a.READ_STATE, a.STORE_GRADIENT, a.COMMIT, a.LAYER_RECOMPUTE, a.HEAD_EVALUATE, a.UPDATE,
             a.LAYER_GENERATE)  # fmt: skip
    assert [action.part for action in parts] == [
        "", "update", "backward", "update", "backward", "validation", "update", "samples"
    ]  # fmt: skip
