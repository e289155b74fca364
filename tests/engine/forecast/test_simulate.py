"""The simulator: clocks worked by hand, what holds for every plan, and shallow models that stand for deep ones."""

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from machines import ROUND, machines
from msgspec import structs
from samples import cases, sampled
from small_problems import planned, problem, some_plan
from some_ops import an_op

from penstock.engine.attention.spans import Documents, Prefix
from penstock.engine.events import Span
from penstock.engine.forecast.costs import Conditions, Costs, is_device_local
from penstock.engine.forecast.extrapolate import FULL_OPS, estimate, estimate_evaluation, num_ops
from penstock.engine.forecast.simulate import BUILD_S, DISPATCH_S, Clocks, Deadlock, busy_seconds, simulate
from penstock.engine.machine.profile import Machine
from penstock.engine.plan.plan import Plan
from penstock.engine.plan.problem import PlanInput, PlanOptions
from penstock.engine.schedule.action import LANES, Lane
from penstock.engine.schedule.builder import ScheduleBuilder
from penstock.engine.schedule.ops import Op
from penstock.engine.schedule.passes import evaluation, training

B, D = BUILD_S, DISPATCH_S
CPU = structs.replace(ROUND, gpu=None)
FAST_READS = structs.replace(CPU, drives=(structs.replace(ROUND.drives[0], read_bytes_per_s=1e10),))


def costs(*seconds: float) -> Any:
    """Costs that the test says, by the ops' numbers."""
    return SimpleNamespace(seconds=lambda op: seconds[op.id])


def times(ops: list[Op], seconds: list[float], machine: Machine = ROUND) -> list[tuple[float, float]]:
    """(start, end) of the ops, in their order."""
    clocks = Clocks(machine)
    clocks.run(ops, costs(*seconds))
    found = {op.id: (start, end) for op, start, end in clocks.times}
    assert clocks.done_at == {number: end for number, (_, end) in found.items()}
    return [found[op.id] for op in ops]


CHAIN = [an_op(0, "h2d"), an_op(1, "compute", 0), an_op(2, "h2d"), an_op(3, "compute", 2)]
UPDATE, COPY = ([an_op(0, "compute"), an_op(1, lane)] for lane in ("optimizer", "h2d"))
LINK = [an_op(0, "h2d"), an_op(1, "d2h")]
APART = [an_op(0, "h2d"), an_op(1, "compute"), an_op(2, "optimizer")]
TURNS = [an_op(0, "compute"), an_op(1, "h2d", 0), an_op(2, "h2d")]
BY_HAND: list[tuple[list[Op], list[float], Machine, list[tuple[float, float]]]] = [
    # Load for 1 s, compute on it for 2 s; meanwhile, D after the first load, load for 3 s, then compute for 1 s.
    (CHAIN, [1, 2, 3, 1], ROUND, [(0, 1), (1, 3), (1 + D, 4 + D), (4 + D, 5 + D)]),
    # With a short second load the lane that computes is what everything waits for.
    (CHAIN, [1, 2, 0.5, 1], ROUND, [(0, 1), (1, 3), (1 + D, 1.5 + D), (3 + D, 4 + D)]),
    # Ops start no sooner than they are built.
    (APART, [0.5, 0.5, 0.5], ROUND, [(0, 0.5), (B, B + 0.5), (2 * B, 2 * B + 0.5)]),
    # A lane keeps program order: op 2 has nothing to wait for, but its lane's op 1 does, until 2 s.
    (TURNS, [2, 1, 1], ROUND, [(0, 2), (2, 3), (3 + D, 4 + D)]),
    # Both directions share a link. Alone for B, then both at half speed: 1 s of work takes 2 s; of the load 2 - B - 1 s
    # are left, at full speed.
    (LINK, [2, 1], ROUND, [(0, 3), (B, 2 + B)]),
    (LINK, [2, 1], structs.replace(ROUND, duplex_share=1.0), [(0, 2), (B, 1 + B)]),
    # Reads and writes share the drives, at 0.8 of their speed: 4 s take 5 s. By then B + 4 of the read's 10 s are done.
    ([an_op(0, "nvme_read"), an_op(1, "nvme_write")], [10, 4], ROUND, [(0, 11), (B, 5 + B)]),
    # Without a GPU lanes share the cores. Each of these alone keeps all of them busy, and both are teams of threads,
    # which wait for one another: at 0.7 of half their speed, 1 s takes 20 / 7.
    (UPDATE, [2, 1], CPU, [(0, 1 + 20 / 7), (B, 20 / 7 + B)]),
    # The checksums of 5 GB/s take half a core, for which a team waits: both at 1 / 1.5. Without a team nobody does.
    ([an_op(0, "compute"), an_op(1, "nvme_read")], [2, 1], FAST_READS, [(0, 2.5), (B, 1.5 + B)]),
    ([an_op(0, "nvme_read")], [1], FAST_READS, [(0, 1)]),
    # A copy takes half of them: both at 2 / 3.
    (COPY, [3, 1], CPU, [(0, 3.5), (B, 1.5 + B)]),
    # Two copies leave each other enough.
    (LINK, [2, 1], CPU, [(0, 2), (B, 1 + B)]),
    # On a GPU the optimizer on the cores does not slow what computes.
    (UPDATE, [2, 1], ROUND, [(0, 2), (B, 1 + B)]),
]


@pytest.mark.parametrize("case", BY_HAND)
def test_clocks_by_hand(case: tuple[list[Op], list[float], Machine, list[tuple[float, float]]]) -> None:
    assert times(*case[:3]) == [pytest.approx(pair, abs=1e-9) for pair in case[3]]


def test_spans_tell_what_was_waited_for() -> None:
    ops = [an_op(0, "h2d"), an_op(1, "compute", 0), an_op(2, "h2d", 0), an_op(3, "compute", 1, 2)]
    ops.append(an_op(4, "d2h", 0, 3))
    clocks = Clocks(ROUND)
    clocks.run(ops, costs(1, 1, 1, 1, 1))
    waited = {span.id: span.waited for span in clocks.spans(0.0)}
    # Op 2 follows op 0 on its own lane at once; op 3 finds op 1 done by its lane, and op 2 D later.
    assert waited == {0: (), 1: (0,), 2: (), 3: (), 4: (0, 3)}


def test_lanes_that_wait_for_each_other_are_a_deadlock() -> None:
    # A copy waits for op 1, which has its turn after op 0, which waits for the copy.
    turn = [an_op(0, "compute", 2), an_op(1, "compute"), an_op(2, "h2d", 1)]
    for ops in (turn, [an_op(0, "h2d", 1), an_op(1, "compute", 0)], [an_op(0, "compute", 7)]):
        with pytest.raises(Deadlock, match="noop of b"):
            times(ops, [1.0] * len(ops))


def test_busy_seconds_count_what_lies_between_the_two_times() -> None:
    def span(lane: Lane, start: float, end: float) -> Span:
        return Span(lane, "act", "b", 0, start, end, 1, 1)

    spans = [span("h2d", -1, 1), span("h2d", 3, 5), span("h2d", 4, 6), span("compute", 9, 12), span("d2h", 10, 12)]
    assert busy_seconds(spans, 0, 10) == dict.fromkeys(LANES, 0) | {"h2d": 1 + 2 + 1, "compute": 1}


@sampled(10, 60)
@given(planned(), machines())
def test_lanes_and_dependencies_are_respected_whatever_the_plan(plan: Plan, machine: Machine) -> None:
    """And a step takes at least as long as any of its lanes."""
    builder, costs, clocks = ScheduleBuilder(plan), Costs(plan, Conditions(machine)), Clocks(machine)
    steps = [builder.ops(training(plan, 1)), builder.ops(training(plan, 2), commit_previous=True)]
    for number in (1, 2):
        looked_at = evaluation(plan, 2, number, documents=plan.row_documents[:number])
        steps.append(builder.ops(looked_at, commit_previous=number == 1))
    steps += [builder.ops(training(plan, 3)), builder.finish(commit=True)]
    for ops in steps:
        clocks.run(ops, costs, from_s=max(clocks.done_at.values(), default=0.0))
    every = [op for ops in steps for op in ops]
    assert sorted(op.id for op, _, _ in clocks.times) == [op.id for op in every], "each once, none dropped"
    found = {op.id: (start, end) for op, start, end in clocks.times}
    for op in every:
        start, end = found[op.id]
        # No op goes faster than alone.
        assert end - start >= costs.seconds(op) * (1 - 1e-6) - 1e-12
        assert all(found[dep][1] <= start for dep in op.deps)
    for lane in LANES:
        mine = [found[op.id] for op in every if op.lane == lane]
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(mine))
    told = simulate(costs)
    assert all(busy <= told.step_s * (1 + 1e-9) for busy in told.busy_s.values())
    assert told.busy_s[told.bound_by] == max(told.busy_s.values())
    assert all(span.start_s <= span.end_s and span.end_s >= 0 for span in told.spans)
    assert {span.step for span in told.spans} <= {1, 2}
    # Everything that a step computes lies within it; bytes leave the compute device or come to it, or go to a drive.
    builder = ScheduleBuilder(plan)
    _, second = builder.ops(training(plan, 1)), builder.ops(training(plan, 2))
    computed_s = sum(costs.seconds(op) for op in second if op.lane == "compute")
    assert told.busy_s["compute"] >= computed_s * (1 - 1e-6)
    moved = dict.fromkeys(LANES, 0)
    for op in second:
        moved[op.lane] += 0 if is_device_local(plan, op) else op.nbytes
    assert told.bytes == moved


def deep(layers: int, choice: PlanOptions | None = None, **shape: Any) -> tuple[PlanInput, PlanOptions]:
    return problem(layers=layers, **{"kv_window": "auto"} | shape), choice or PlanOptions()


STREAMED, RECORDS_FIRST = PlanOptions(streamed=True), PlanOptions(gpu_first="saved activations")
HALF = PlanOptions(group=4, offloaded_graphs="half")
BUT_EVERY_SIXTH = frozenset(range(60)) - frozenset(range(5, 60, 6))
SPREAD, MIXTURE = PlanOptions(spread=True), {"experts": frozenset(range(20)), "groups": 4, "ranks": 2, "replicas": 2}
DEEP = {
    "half on the GPU": deep(40, PlanOptions(gpu_first="blocks"), gpu_budget=4_000_000),
    "graphs of some": deep(30, gpu_budget=1_200_000, activation_checkpointing="auto"),
    "records on the GPU": deep(30, RECORDS_FIRST, gpu_budget=1_500_000, ram_budget=1_000_000),
    "all on NVMe": deep(28, gpu_budget=1, ram_budget=1),
    "weights in RAM": deep(24, gpu_budget=1, ram_budget=1_500_000),
    "attention recomputed": deep(36, PlanOptions(recompute="all"), gpu_budget=1, activation_checkpointing="full"),
    "streamed": deep(24, STREAMED, gpu_budget=1, micro_batches=1, row_tokens=512),
    "streamed, tight": deep(26, STREAMED, gpu_budget=1, ram_budget=1, micro_batches=1, row_tokens=512),
    "chunks of two micro-batches": deep(24, gpu_budget=1, micro_batches=10, row_tokens=192),
    "every other window slides": deep(36, sliding=frozenset(range(0, 36, 2)), gpu_budget=1, ram_budget=2_000_000),
    "one window in six is full": deep(60, sliding=BUT_EVERY_SIXTH, gpu_budget=1),
    "frozen but for a part of each": deep(32, frozen=frozenset({0, 33}), halves=frozenset(range(33)), gpu_budget=1),
    "frozen below, on NVMe": deep(32, frozen=frozenset(range(9)), gpu_budget=1, ram_budget=1),
    "groups": deep(28, PlanOptions(group=2), gpu_budget=1, micro_batches=12),
    "groups, the last one smaller": deep(26, PlanOptions(group=3), gpu_budget=1, micro_batches=11, row_tokens=192),
    "groups, half of the graphs in RAM": deep(
        26, HALF, gpu_budget=1, micro_batches=16, activation_checkpointing="auto"
    ),
    "experts spread": deep(20, SPREAD, **MIXTURE, gpu_budget=1),
    "experts spread unevenly, on NVMe": deep(20, SPREAD, **MIXTURE | {"groups": 5}, gpu_budget=1, ram_budget=1),
}
FAST = structs.replace(ROUND, matmul_flops=1e12, gpu_copy_bytes_per_s=1e12)
RATES = {
    "computing": ROUND,
    "link": structs.replace(FAST, drives_share=1000.0),
    "drives": structs.replace(FAST, h2d_bytes_per_s=1e9, d2h_bytes_per_s=1e9),
    "no GPU": structs.replace(CPU, drives_share=100.0, h2d_bytes_per_s=1e8, d2h_bytes_per_s=1e8),
}
OFTEN = [("chunks of two micro-batches", "computing"), ("frozen below, on NVMe", "link"), ("streamed, tight", "drives"),
         ("one window in six is full", "no GPU"), ("groups", "drives"), ("experts spread", "link"),
         ("experts spread unevenly, on NVMe", "computing")]  # fmt: skip


@pytest.mark.parametrize("pair", cases(itertools.product(DEEP, RATES), *OFTEN), ids="-".join)
def test_a_few_layers_tell_what_many_take(pair: tuple[str, str]) -> None:
    plan, on = some_plan(*DEEP[pair[0]]), Conditions(RATES[pair[1]])
    assert num_ops(plan) > FULL_OPS
    whole, short = estimate(plan, on, full=True), estimate(plan, on)
    assert len(short.spans) < len(whole.spans)
    assert short.step_s == pytest.approx(whole.step_s, rel=0.1)
    for lane in LANES:
        assert short.busy_s[lane] == pytest.approx(whole.busy_s[lane], rel=0.1, abs=0.1 * whole.step_s)
        assert short.bytes[lane] == pytest.approx(whole.bytes[lane], rel=0.1, abs=0.01 * max(whole.bytes.values()))
    evaluation_s = estimate_evaluation(plan, on, full=True)
    assert estimate_evaluation(plan, on) == pytest.approx(evaluation_s, rel=0.1)
    assert evaluation_s < 0.7 * whole.step_s


@pytest.mark.parametrize("case", cases(["streamed", "chunks of two micro-batches"], "streamed"))
def test_padding_that_is_not_computed_is_not_predicted(case: str) -> None:
    """Micro-batches filled by quarters, one of them empty: told by a few layers and merged chunks as by all of them."""
    plan = some_plan(*DEEP[case])
    documents = [list(range(0, plan.window_tokens, 16)) for _ in range(plan.problem.micro_batches)]
    shares = [2, 4, 3, 1, 0, 4, 3]
    filled = [shares[m % 7] * plan.window_tokens // 4 for m in range(plan.problem.micro_batches)]
    unpadded = Conditions(ROUND, documents=documents)
    padded = replace(unpadded, filled=filled)
    whole, less = (estimate(plan, on, full=True) for on in (unpadded, padded))
    short = estimate(plan, padded)
    assert less.step_s < whole.step_s
    assert less.busy_s["compute"] < 0.9 * whole.busy_s["compute"]
    assert less.bytes["d2h"] < whole.bytes["d2h"]
    assert short.step_s == pytest.approx(less.step_s, rel=0.15)
    evaluation_s = [estimate_evaluation(plan, on, full=True) for on in (unpadded, padded)]
    assert evaluation_s[1] < evaluation_s[0]


@pytest.mark.parametrize("case", cases(["streamed", "chunks of two micro-batches"], "chunks of two micro-batches"))
def test_what_is_seen_of_a_prefix_is_predicted(case: str) -> None:
    """A micro-batch's second half goes on from its first one, also where micro-batches are simulated as one."""
    plan = some_plan(*DEEP[case])
    half = plan.window_tokens // 2
    apart = Conditions(ROUND, documents=[[0, half]] * plan.problem.micro_batches)
    shared = Documents([0, half], [Prefix(half, 0, half)])
    joined = replace(apart, documents=[shared] * plan.problem.micro_batches)
    less, whole = (estimate(plan, on, full=True) for on in (apart, joined))
    assert whole.busy_s["compute"] > 1.001 * less.busy_s["compute"]
    found = [estimate(plan, on).busy_s["compute"] for on in (apart, joined)]
    more = whole.busy_s["compute"] - less.busy_s["compute"]
    assert found[1] - found[0] == pytest.approx(more, rel=0.1)
