"""Measuring a plan's compute ops on the real device before the run: one of each kind, at the plan's own chunk.

The runtime carries out the schedule's ops in the plan's own GPU slots on the run's own lanes, on random weights and the
first batch; no state is touched. The run is planned once more with what is learnt, and is compiled by then.
"""

from __future__ import annotations

import gc
import itertools
import statistics
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from operator import attrgetter

import torch
from msgspec import structs
from torch import Tensor

from penstock.engine import preparing
from penstock.engine.clock import elapsed_s
from penstock.engine.config import TrainConfig
from penstock.engine.forecast.costs import Calibration, Conditions, Costs, Sample, op_kind
from penstock.engine.forecast.problem import LOGITS_BYTES
from penstock.engine.machine.profile import Machine
from penstock.engine.model.groups import num_experts, uncut
from penstock.engine.model.runner import ModelRunner
from penstock.engine.model.tokens import MicroBatch
from penstock.engine.optim.base import UpdateRange
from penstock.engine.plan.plan import Plan
from penstock.engine.plan.problem import ALIGNMENT, POOLS
from penstock.engine.runtime.batch import BatchCarrier
from penstock.engine.runtime.compute import Compute
from penstock.engine.runtime.executor import Executor
from penstock.engine.runtime.memory import GpuMemory, RamMemory, allocate_gpu
from penstock.engine.runtime.runtime import Runtime
from penstock.engine.runtime.views import sent_parts
from penstock.engine.schedule import actions as a
from penstock.engine.schedule import resources as r
from penstock.engine.schedule.builder import ScheduleBuilder
from penstock.engine.schedule.ops import WHOLE, Op
from penstock.engine.schedule.passes import training
from penstock.storage.tier.arena import HostArena
from penstock.storage.tier.layout import FlatLayout, ParamSpec

REPEATS = 8
"""Times that ops are measured after they have run once, which compiles them."""
SLOW_S = 0.6
"""Ops that have been measured for so long are not measured again."""
MOST_ATTENDS = 3
"""Of a chunk whose keys are streamed so many of its passes over a chunk of keys are run: they are alike."""
MOST_WAITING = 3
"""Units that run while a saved graph waits for its backward."""
BESIDE = ("h2d", "d2h", "optimizer")
"""Lanes that compute beside the compute lane."""
UPDATE_NUMEL = 1 << 22
COPY_BYTES = 1 << 26
_TILE = 1 << 20
_UNTIMED = (a.VISION_FORWARD, a.VISION_BACKWARD)
"""Ops whose work depends on images, of which the first batch has none yet."""
_ENDS_FORWARD = (a.LAYER_FORWARD, a.LAYER_FORWARD_BOTTOM)


@dataclass(frozen=True, slots=True, eq=False)
class _Unit:
    """Ops that are carried out together: a block's on a chunk in one pass, or in both where its graph is saved."""

    ops: tuple[Op, ...]
    kinds: tuple[str, ...]
    pairs: int
    between: tuple[_Unit, ...] = ()
    """What runs between its forward and its backward: a graph that waits is not in a cache any more."""


def calibrate(
    plan: Plan,
    compute: Compute,
    train: TrainConfig,
    batch: Sequence[MicroBatch],
    machine: Machine,
    executor: Executor,
    *,
    brief: bool = False,
) -> Calibration:
    """Times of the compute ops of `plan`, and rates of the optimizer and the copies, on the device of `compute`, each
    on its lane of `executor`, which is idle. `machine` only serves to count what ops do. Takes the plan's GPU memory
    and gives it back. `brief`: layers only, once each."""
    device = compute.runner.device
    if device.type == "cpu":
        # OpenMP's threads spin between two kernels as long as there are no more of them than cores. In a run, whose
        # lanes compute on the same cores, there are, they sleep, and waking them takes what it takes.
        for lane in BESIDE:
            executor.call(lane, lambda: torch.zeros(_TILE).add_(1))
    samples, graphs = executor.call("compute", lambda: _compute_ops(plan, compute, train, batch, machine, brief))
    gc.collect()  # a runtime and its layers' ops refer to one another, and to all of the plan's slots
    if device.type == "cuda":
        torch.cuda.empty_cache()
    measured = {kind: tuple(result) for kind, result in samples.items()}
    if brief:
        return Calibration(samples=measured)
    up, down = _link_rates(executor, device)
    updates = any(buffer.state in ("ram", "nvme") for buffer in plan.buffers.values())
    rate = executor.call("optimizer", lambda: _update_rate(plan, compute, train)) if updates else None
    return Calibration(
        samples=measured,
        graph_bytes_per_token=graphs,
        update_params_per_s=rate,
        h2d_bytes_per_s=up,
        d2h_bytes_per_s=down,
    )


def _compute_ops(
    plan: Plan, compute: Compute, train: TrainConfig, batch: Sequence[MicroBatch], machine: Machine, brief: bool
) -> tuple[dict[str, list[Sample]], dict[str, int]]:
    """Kind of op -> what was measured of it, and first layer of a kind -> bytes a token that a saved graph takes."""
    runner, documents = compute.runner, [m.documents for m in batch]
    device = runner.device
    gpu = allocate_gpu(plan, device)
    _fill(gpu, plan.max_chunk_tokens, runner)
    samples: dict[str, list[Sample]] = {}
    graphs: dict[str, int] = {}
    with closing(HostArena(ALIGNMENT, budget_bytes=ALIGNMENT)) as arena:
        work = plan, runner, compute.optimizer, None, gpu, RamMemory(arena)
        runtime = Runtime(*work, train, LOGITS_BYTES[device.type], lambda step: None)
        whole = [replace(m, filled=None) for m in batch]  # chunks of full length are measured, padding or not
        runtime.begin(1, BatchCarrier(plan, device).step(whole, {}))
        costs = Costs(plan, Conditions(machine, documents=documents))
        units = list(_units(plan, costs, documents))
        chosen = _chosen(units)
        if brief:
            layers = {block.name for block in plan.blocks if block.of_layer}
            chosen = [unit for unit in chosen if unit.ops[0].block in layers]
        timed = chosen + ([] if brief else _to_save(plan, units))
        for unit, times, last_graph_bytes in _measured(timed, runtime, 1 if brief else REPEATS):
            same, tokens = costs.representative(unit.ops[0].block), costs.tokens(unit.ops[0])
            for op, seconds in zip(unit.ops, times, strict=True):
                samples.setdefault(op_kind(op, same), []).append(Sample(tokens, costs.pairs(op), seconds))
            if last_graph_bytes:
                graphs[same] = -(-last_graph_bytes // tokens)
    runner.layers.unbind()
    return samples, graphs


def _fill(gpu: GpuMemory, tokens: int, runner: ModelRunner) -> None:
    """Ordinary numbers everywhere: what memory happens to hold could be slow to compute with. What is sent to
    experts, of so many `tokens`, goes to all in turn."""
    dtype = runner.dtype
    tile = (torch.randn(_TILE, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype)
    raws = [*(slot for pool in POOLS for slot in gpu.weights[pool]), *gpu.slots[r.GPU_HIDDEN]]
    flats = [raw.view(dtype) for raw in raws] + ([] if gpu.copy is None else [gpu.copy])
    flats += [b["weights"] for b in gpu.buffers.values() if "weights" in b and b["weights"].is_floating_point()]
    for flat in flats:
        source = tile.to(flat.device)
        for piece in flat.split(_TILE):
            piece.copy_(source[: piece.numel()])
    others = [each for space, each in gpu.slots.items() if space not in (r.GPU_HIDDEN, r.GPU_GRAPH_SLOT)]
    for raw in itertools.chain(*gpu.window.values(), *others):
        raw.zero_()
    for raw in gpu.slots.get(r.GPU_SENT, ()):
        _send_in_turn(raw, tokens, runner)


def _send_in_turn(raw: Tensor, tokens: int, runner: ModelRunner) -> None:
    """Let what a layer has sent of so many tokens choose all of its experts alike."""
    sent = runner.spec.sent
    for part, each in zip(sent_parts(raw, tokens, sent, runner.dtype), sent, strict=True):
        if each.dtype == "int32":
            turns = torch.arange(part.numel(), dtype=torch.int32, device=raw.device)
            part.copy_(turns.view_as(part) % num_experts(uncut(runner.spec)))
        else:
            part.fill_(1 / each.width)


def _units(plan: Plan, costs: Costs, documents: Sequence[Sequence[int]]) -> Iterator[_Unit]:
    """The compute ops of a step on chunks of full length."""
    tasks: dict[tuple[str, int], dict[str, list[Op]]] = {}
    plan = plan.unspread
    for op in ScheduleBuilder(plan).ops(training(plan, 1, documents=documents)):
        if op.action in _UNTIMED:
            continue
        if op.lane == "compute" and op.index != WHOLE and costs.tokens(op) == plan.max_chunk_tokens:
            passes = tasks.setdefault((op.block, op.index), {"forward": [], "recompute": [], "backward": []})
            # A pass through a streamed window ends with the layer's last op; what comes after it is recomputed.
            forward = any(done.action in _ENDS_FORWARD for done in passes["forward"])
            again = op.action.phase == "recompute" or (forward and op.action.phase == "forward")
            backward = op.action.phase == "backward" and op.action is not a.HEAD
            passes["backward" if backward else "recompute" if again else "forward"].append(op)
    for passes in tasks.values():
        graph = any(a.SAVED_GRAPH in op.flags for op in passes["forward"])
        for ops in [passes["forward"] + passes["backward"]] if graph else passes.values():
            if ops:
                kinds = tuple(dict.fromkeys(op_kind(op, costs.representative(op.block)) for op in ops))
                yield _Unit(tuple(_few_attends(ops)), kinds, sum(costs.pairs(op) for op in ops))


def _few_attends(ops: Sequence[Op]) -> list[Op]:
    """Without most of the passes over a chunk of keys that are neither the first nor the last."""
    result, seen = [], {a.ATTEND: 0, a.ATTEND_BACKWARD: 0}
    for op in ops:
        if op.action in seen and a.FIRST not in op.flags and a.LAST not in op.flags:
            seen[op.action] += 1
            if seen[op.action] > MOST_ATTENDS:
                continue
        result.append(op)
    return result


def _chosen(units: Sequence[_Unit]) -> list[_Unit]:
    """Of units with the same kinds of ops the one that attends to least and the one that attends to most."""
    alike: dict[tuple[str, ...], list[_Unit]] = {}
    for unit in units:
        alike.setdefault(unit.kinds, []).append(unit)
    pairs = attrgetter("pairs")
    chosen = []
    for result in alike.values():
        for unit in sorted({min(result, key=pairs), max(result, key=pairs)}, key=pairs):
            saves_graph = any(a.SAVED_GRAPH in op.flags for op in unit.ops)
            others = [other for other in result if other is not unit] if saves_graph else []
            chosen.append(replace(unit, between=tuple(others[:MOST_WAITING])))
    return chosen


def _to_save(plan: Plan, units: Sequence[_Unit]) -> list[_Unit]:
    """One unit of each layer's kind as it would be were its graph saved, where the plan may save graphs and saves none:
    it learns what they take, less than is computed when layers are compiled."""
    tier, shapes = plan.tiers["gpu"], {block.name: block for block in plan.blocks}
    if plan.saved_graphs or plan.streamed or plan.problem.activation_checkpointing != "auto":
        return []
    result: dict[str, _Unit] = {}
    capacity = tier.budget_bytes - tier.peak_bytes
    forward = {(u.ops[0].block, u.ops[0].index): u for u in units if u.ops[0].action is a.LAYER_FORWARD}
    for unit in units:
        op = unit.ops[0]
        kind = unit.kinds[0].partition(" ")[0]
        graph = shapes[op.block].graph_bytes_per_token
        if op.action is not a.LAYER_BACKWARD or kind in result or graph is None:
            continue
        if graph * plan.max_chunk_tokens > capacity:
            continue
        ops = (*forward[op.block, op.index].ops, op)
        result[kind] = replace(unit, ops=tuple(structs.replace(o, flags=o.flags | {a.SAVED_GRAPH}) for o in ops))
    return list(result.values())


def _measured(units: Sequence[_Unit], runtime: Runtime, repeats: int) -> Iterator[tuple[_Unit, list[float], int]]:
    """Each unit, the median seconds of its ops, and the bytes of the graph that it saves. After a run that compiles
    they take turns, so that each finds memory as others leave it."""

    def run(unit: _Unit) -> list[float]:
        times, between = [], unit.between
        for op in unit.ops:
            if op.action.phase == "backward":
                for other in between:
                    run(other)
                between = ()
            times.append(elapsed_s(lambda op=op: runtime.perform(op), runtime.runner.device))  # type: ignore[misc]
        return times

    last_graph_bytes = []
    for done, unit in enumerate(units):
        preparing.report(done / len(units), f"{unit.ops[0].action.name.replace('_', ' ')} of {unit.ops[0].block}")
        runtime.layer_ops.last_graph_bytes = 0
        run(unit)
        last_graph_bytes.append(runtime.layer_ops.last_graph_bytes)
    times: list[list[list[float]]] = [[] for _ in units]
    for _ in range(repeats):
        for unit, result in zip(units, times, strict=True):
            if sum(map(sum, result)) < SLOW_S:
                result.append(run(unit))
    for unit, result, measured in zip(units, times, last_graph_bytes, strict=True):
        yield unit, [statistics.median(each) for each in zip(*result, strict=True)], measured


def _link_rates(executor: Executor, device: torch.device) -> tuple[float, float]:
    """Bytes per second of a copy to the compute device and of one from it, each on its lane."""
    with closing(HostArena(COPY_BYTES, budget_bytes=COPY_BYTES)) as arena:
        host, there = arena.slot("host", COPY_BYTES).fill_(1), torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
        if device.type == "cuda":
            arena.pin()

        def rate(target: torch.Tensor, source: torch.Tensor) -> float:
            times = [elapsed_s(lambda: arena.copy(target, source), device) for _ in range(1 + REPEATS)]
            return COPY_BYTES / min(times[1:])

        return executor.call("h2d", lambda: rate(there, host)), executor.call("d2h", lambda: rate(host, there))


def _update_rate(plan: Plan, compute: Compute, train: TrainConfig) -> float:
    """Parameters that the optimizer updates per second in RAM."""
    numel, optimizer = min(plan.problem.state_part_numel, UPDATE_NUMEL), compute.optimizer
    state = {kind: torch.full((numel,), 1e-3, dtype=torch.float32) for kind in plan.problem.state_kinds}
    gradient = torch.full((numel,), 1e-3).to(getattr(torch, plan.problem.gradient_dtype))
    weights, cpu = torch.empty(numel, dtype=compute.runner.dtype), torch.device("cpu")
    values = optimizer.scalars(train, train.lr, 1, 1.0, cpu)
    halves = (ParamSpec("decayed", (numel // 2,), True), ParamSpec("other", (numel - numel // 2,), False))
    where = UpdateRange(FlatLayout(halves, {"decayed": 0, "other": numel // 2}, numel), 0, numel)
    times = [
        elapsed_s(lambda: optimizer.step(state, gradient, weights, where, values), cpu) for _ in range(2 * REPEATS)
    ]
    return numel / statistics.median(times[REPEATS:])
