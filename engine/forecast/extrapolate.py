"""Simulating a deep model by a shallow one: layers that are treated alike take turns at the same pace.

Of each run of layers with the same shape, placement and saved activations the first few are simulated; the others add
the time that passes from one of these to the next. Slots bound how far a lane can lag, so the pace settles within two
or three layers.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.engine.attention.spans import Documents as OfStream
from penstock.engine.attention.spans import Prefix, prefixes_of
from penstock.engine.forecast.costs import Conditions, Costs, representatives
from penstock.engine.forecast.simulate import Clocks, Simulation, simulate
from penstock.engine.plan.activations import ACTIVATIONS
from penstock.engine.plan.chunks import Chunk, Streams, cut_chunks, own
from penstock.engine.plan.plan import BufferPlan, Plan
from penstock.engine.plan.problem import FP32, BlockShape, PlanInput, PlanOptions
from penstock.engine.schedule import actions as a
from penstock.engine.schedule.action import LANES
from penstock.engine.schedule.builder import ScheduleBuilder
from penstock.engine.schedule.passes import Documents, Pass, evaluation, sampling

FULL_OPS = 1_500
"""Steps of about so many ops are simulated whole."""
SIMULATED_LAYERS = 5
"""Layers simulated of each run: one at either end, and three that tell the pace."""
MOST_PERIOD = 6
"""Layers, each with its branches, after which another pattern of layers may repeat."""
MOST_PARTS = 12
"""Parts of a buffer; where there are more, several are taken for one."""
MOST_CHUNKS = 8
"""Chunks of a group; where there are more, several neighbours are taken for one."""
MOST_GROUPS = 3
"""Groups simulated: the one before which all is updated, the one behind which gradients are complete, one between."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Layers treated alike, or a pattern of a few that repeats."""

    blocks: list[int]
    """Indices of those that are simulated."""
    dropped: int
    """Times that they repeat beyond that."""
    period: int
    """Layers after which they repeat: 2 where every other one has a sliding window, say."""


def estimate(plan: Plan, on: Conditions, *, full: bool = False, settled: bool = True) -> Simulation:
    """A step of `plan`: simulated whole where it is small or `full`, else by a few layers of each kind.

    `settled`: see simulate; a few layers never are.
    The spans are those of the layers simulated. Raises engine.forecast.simulate.Deadlock.
    """
    if full or num_ops(plan) <= FULL_OPS:
        return simulate(Costs(plan, on), settled=settled)
    runs, costs = _small(plan, on)
    return _extended(plan, runs, costs.plan, simulate(costs, settled=False))


def estimate_evaluation(plan: Plan, on: Conditions, *, of_reference: bool = False, full: bool = False) -> float:
    """Seconds that a validation's pass over as much as a step has takes; what it updates, the next step need not."""
    return plan.num_groups * evaluation_spent(plan, on, of_reference=of_reference, full=full).seconds


def evaluation_spent(plan: Plan, on: Conditions, *, of_reference: bool = False, full: bool = False) -> Spent:
    """Of one group's documents."""

    def make(plan: Plan, documents: Documents, streams: Streams) -> Pass:
        return evaluation(plan, 1, 1, documents=documents, streams=streams, of_reference=of_reference)

    return _spent(make, plan, on, full)


def estimate_samples(plan: Plan, on: Conditions, *, new_tokens: int, full: bool = False) -> float:
    """Seconds of a step's samples: of each group of prompts a pass over these, and one for each further token, as it is
    halfway through."""
    space = plan.problem.samples
    assert space is not None
    count, total = len(space.lengths), sum(space.lengths)
    mean, groups = total // count, plan.problem.divided(count, count)
    rows, times = len(groups[0]), -(-len(groups) // plan.problem.ranks)
    first = sampling_spent(plan, on, rows, mean - new_tokens, full=full)
    later = later_spent(plan, on, rows, mean - new_tokens // 2, full=full)
    return times * (first.seconds + (new_tokens - 1) * later.seconds)


def estimate_completions(plan: Plan, on: Conditions, *, prompts: int, copies: int, full: bool = False) -> float:
    """Seconds in which `copies` completions of each of so many of the longest prompts are sampled, as many of them side
    by side as the plan has room for, if each has all its tokens."""
    space = plan.problem.samples
    assert space is not None
    groups, space = plan.problem.divided(prompts, space.at_once(copies)), replace(space, copies=copies)
    half, total = space.new_tokens // 2, 0.0
    for count, times in Counter(map(len, groups[:: plan.problem.ranks])).items():
        read_first = count if space.shared else count * space.copies
        first = sampling_spent(plan, on, read_first, space.prompt_tokens, full=full)
        sequences, tokens, rows = count * space.copies, space.prompt_tokens + half, count * space.rows_of_prompt(half)
        later = later_spent(plan, on, sequences, tokens, rows, full=full)
        total += times * (first.seconds + (space.new_tokens - 1) * later.seconds)
    return total


def later_spent(
    plan: Plan, on: Conditions, sequences: int, tokens: int, rows: int | None = None, *, full: bool = False
) -> Spent:
    """Of one more token of each of so many sequences, which have `tokens` so far, in as many rows for each, or in
    `rows` for all."""
    space = plan.problem.samples
    if space is not None and space.tier == "nowhere":
        return sampling_spent(plan, on, sequences, tokens, full=full)
    seen = sequences * tokens
    # Those of completions are read where they lie, others gathered, put in another order and read; on a CPU taken to
    # float32 between (engine/generate/attend.py).
    gathered = 5.0 if on.machine.gpu else 3 + 2 * FP32 / plan.problem.compute_bytes
    moved = round(seen * gathered) if rows is None or space is None or not space.shared else rows
    return sampling_spent(plan, on, sequences, 1, seen if rows is None else rows, moved, full=full)


def sampling_spent(
    plan: Plan, on: Conditions, sequences: int, new: int, read: int = 0, moved: int = 0, *, full: bool = False
) -> Spent:
    """Of `new` tokens of each of so many sequences, of which `read` earlier rows are there; attention moves as many
    bytes as `moved` of them have."""

    def make(plan: Plan, documents: Documents, streams: Streams) -> Pass:
        chunks = list(own(streams))
        last = [chunks[-1].index]
        return sampling(plan, 1, -1, chunks=chunks, wanted=last, read_tokens=read, moved_tokens=moved)

    window, tokens = plan.window_tokens, sequences * new
    times = -(-tokens // (window * plan.group))
    filled = [max(0, min(window, -(-tokens // times) - window * i)) for i in range(plan.problem.micro_batches)]
    documents = [list(range(0, window, max(1, new)))] * plan.problem.micro_batches
    spent = _spent(make, plan, replace(on, documents=documents, filled=filled), full)
    return Spent(times * spent.seconds, {lane: times * seconds for lane, seconds in spent.busy_s.items()})


@dataclass(frozen=True, slots=True)
class Spent:
    """Time of a pass forward."""

    seconds: float
    busy_s: dict[str, float]
    """Lane -> seconds in which it had an op under way."""


def _spent(make: Callable[[Plan, Documents, Streams], Pass], plan: Plan, on: Conditions, full: bool) -> Spent:
    """Of the pass forward that `make` makes of documents and chunks of one group."""
    runs: list[_Run] = []
    if full or num_ops(plan) <= FULL_OPS:
        costs = Costs(plan, on)
    else:
        # Where all chunks' hidden states fit their slots, none crosses the link.
        runs, costs = _small(plan, on, ACTIVATIONS["x"].slots)
    small, documents, filled = costs.plan, costs.on.documents, costs.on.filled
    clocks, streams = Clocks(on.machine), small.filled_streams(filled)[: small.group]
    clocks.run(ScheduleBuilder(small).ops(make(small, documents or small.row_documents, streams)), costs)
    ends = {op.block: end for op, _, end in clocks.times if op.lane == "compute"}
    dropped_s = sum(run.dropped * _pace([ends[plan.blocks[i].name] for i in run.blocks], run) for run in runs)
    references = plan.problem.references
    stands_for: dict[str, float] = {}
    """Block or buffer -> how many of the plan it is simulated for."""
    for run in runs:
        times = 1 + run.dropped * run.period / len(run.blocks)
        for block in (plan.blocks[i] for i in run.blocks):
            stands_for |= dict.fromkeys((block.name, *_with_references(block, references)), times)
    busy_s = dict.fromkeys(LANES, 0.0)
    for op, start, end in clocks.times:
        busy_s[op.lane] += (end - start) * stands_for.get(op.block, 1.0)
    return Spent(max(clocks.times[-1][2] + dropped_s, *busy_s.values()), {str(lane): s for lane, s in busy_s.items()})


def _small(plan: Plan, on: Conditions, more_than: int = 0) -> tuple[list[_Run], Costs]:
    """What the ops cost of the plan with a few layers of each run, groups, chunks and parts, and of its batch. It has
    `more_than` so many chunks in a group if the plan has."""
    runs = _runs(plan)
    plan, on = _few_groups(plan, on)
    shallow = _shallow(plan, [i for run in runs for i in run.blocks])
    times = -(-plan.num_group_chunks // MOST_CHUNKS)
    while times > 1 and _few_chunks(shallow, times).num_group_chunks <= more_than:
        times -= 1
    small, joined = _few_parts(_few_chunks(shallow, times)), _joined(plan, on, times)
    merged = round(len(plan.filled_chunks(on.filled)) / len(small.filled_chunks(joined.filled)))
    return runs, Costs(small, joined, merged)


def _pace(ends: Sequence[float], run: _Run) -> float:
    """Time from one layer, or pattern, of a run to the next in forward, of the ends of those simulated. Those at either
    end are hurried or held up by their other neighbours."""
    return (ends[4 * run.period - 1] - ends[2 * run.period - 1]) / 2 if run.dropped else 0.0


def num_ops(plan: Plan) -> int:
    """About how many ops a step has."""
    chunk_ops = 14 * len(plan.chunks) * len(plan.blocks)
    if plan.streamed:
        chunk_ops += 4 * len(plan.chunks) * plan.stream_chunks * len(plan.blocks)
    own = [b for b in plan.buffers.values() if b.reference_of is None]
    read = sum(b.num_parts for b in own if b.frozen and b.weights == "nvme")
    return chunk_ops + read + sum(4 * b.num_parts for b in plan.buffers.values() if b.state in ("ram", "nvme"))


def _runs(plan: Plan) -> list[_Run]:
    """Blocks in order; layers in runs of equals."""
    sets = (plan.saved_graphs, plan.offloaded_graphs, plan.saved_on_gpu, plan.spilled)
    counts = [Counter(block for block, _ in keys) for keys in sets]
    same, references, spread = representatives(plan.blocks), plan.problem.references, plan.spread
    kinds: list[object] = []
    for i, block in enumerate(plan.blocks):
        names = _with_references(block, references)
        buffers = [replace(plan.buffers[name], name="", reference_of=None) for name in names]
        placed = i in plan.recomputed, spread.get(i), *(count[i] for count in counts)
        kinds.append((same[i], buffers, *placed))
    distinct: list[object] = []
    for kind in kinds:
        if kind not in distinct:
            distinct.append(kind)
    numbers = [distinct.index(kind) for kind in kinds]
    branches = Counter(block.sent_to for block in plan.blocks if block.sent_to is not None)
    longest = MOST_PERIOD * (1 + max(branches.values(), default=0))
    runs, start = [], 0
    while start < len(numbers):
        times, period = max((_repeats(numbers, start, n), -n) for n in range(1, longest + 1))
        period = -period
        if times <= SIMULATED_LAYERS + 1:
            times, period = 1, 1
        simulated = min(times, SIMULATED_LAYERS)
        runs.append(_Run(list(range(start, start + simulated * period)), times - simulated, period))
        start += times * period
    return runs


def _with_references(block: BlockShape, references: Mapping[str, str]) -> list[str]:
    """A block's buffers, and those that keep their first values."""
    return [*block.buffers, *(references[name] for name in block.buffers if name in references)]


def _repeats(kinds: Sequence[int], start: int, period: int) -> int:
    """How often the `period` kinds from `start` on follow each other."""
    times, first = 1, kinds[start : start + period]
    while kinds[start + times * period : start + (times + 1) * period] == first:
        times += 1
    return times


def _few_groups(plan: Plan, on: Conditions) -> tuple[Plan, Conditions]:
    """The plan with its first two groups and its last one, and the batch of these."""
    if plan.num_groups <= MOST_GROUPS:
        return plan, on
    p, group = plan.problem, plan.group
    members = [*range(2 * group), *range((plan.num_groups - 1) * group, p.micro_batches)]
    replicas = p.ranks * (len(members) // p.apart) if p.apart else p.replicas
    problem = replace(p, micro_batches=len(members), replicas=replicas)
    documents = None if on.documents is None else [on.documents[i] for i in members]
    filled = None if on.filled is None else [on.filled[i] if i < len(on.filled) else 0 for i in members]
    return replace(plan, problem=problem, chunks=cut_chunks(problem)), replace(on, documents=documents, filled=filled)


def _few_parts(plan: Plan) -> Plan:
    def merged(buffer: BufferPlan) -> BufferPlan:
        times = -(-buffer.num_parts // MOST_PARTS)
        return replace(buffer, part_numel=buffer.part_numel * times)

    return replace(plan, buffers={name: merged(buffer) for name, buffer in plan.buffers.items()})


def _few_chunks(plan: Plan, times: int) -> Plan:
    """The plan with `times` neighbouring chunks taken for one: of a micro-batch, or else its whole micro-batches."""
    if times == 1:
        return plan
    p = plan.problem
    if p.sharded:
        return _few_shared_chunks(plan, times)
    within, batches = _group(plan, times)
    problem = replace(p, rows=p.rows * batches, micro_batches=-(-p.micro_batches // batches))
    chunks: list[Chunk] = []
    of: dict[int, int] = {}
    """Chunk of the plan -> the one that it is part of."""
    for batch in range(0, p.micro_batches, batches):
        members = [c for c in plan.chunks if batch <= c.micro_batch < batch + batches]
        width = within * batches
        for local, first in enumerate(range(0, len(members), width)):
            group = members[first : first + width]
            shift = [(c.micro_batch - batch) * plan.window_tokens for c in (group[0], group[-1])]
            of |= dict.fromkeys((c.index for c in group), len(chunks))
            start, end = group[0].start + shift[0], group[-1].end + shift[1]
            where = {"micro_batch": batch // batches, "local": local, "ordinal": local, "start": start, "end": end}
            chunks.append(Chunk(index=len(chunks), **where))
    choice = replace(plan.choice, group=plan.group // batches if plan.num_groups > 1 else 0)
    return _with_chunks(plan, problem, choice, tuple(chunks), of)


def _few_shared_chunks(plan: Plan, times: int) -> Plan:
    """The same where ranks share each sequence, with pieces of fewer chunks."""
    problem = replace(plan.problem, chunk_tokens=plan.problem.chunk_tokens * times)
    chunks = cut_chunks(problem)
    before, after = plan.window_chunks, len(chunks) // problem.micro_batches
    of = {c.index: c.micro_batch * after + c.local * after // before for c in plan.chunks}
    return _with_chunks(plan, problem, plan.choice, chunks, of)


def _with_chunks(
    plan: Plan, problem: PlanInput, choice: PlanOptions, chunks: tuple[Chunk, ...], of: Mapping[int, int]
) -> Plan:
    """The plan of other chunks; `of`: chunk of the plan -> the one that it is part of."""
    sizes = Counter(of[c.index] for c in plan.group_chunks)

    def shared(keys: frozenset[tuple[int, int]]) -> frozenset[tuple[int, int]]:
        """As many of the joined chunks of each block as come to the same share of its tokens, evenly spread."""
        counts = Counter((block, of[chunk]) for block, chunk in keys)
        result: set[tuple[int, int]] = set()
        for block in {block for block, _ in keys}:
            due, taken = 0.0, 0
            for chunk in sizes:
                due += counts[block, chunk] / sizes[chunk]
                if due + 0.5 >= taken + 1:
                    taken += 1
                    result.add((block, chunk))
        return frozenset(result)

    in_place = shared(plan.saved_graphs - plan.offloaded_graphs)
    on_gpu = shared(plan.saved_on_gpu) - in_place
    offloaded = shared(plan.offloaded_graphs) - in_place - on_gpu
    return replace(
        plan,
        problem=problem,
        choice=choice,
        chunks=chunks,
        spilled=shared(plan.spilled) - in_place - on_gpu,
        saved_on_gpu=on_gpu,
        saved_graphs=in_place | offloaded,
        offloaded_graphs=offloaded,
    )


def _group(plan: Plan, times: int) -> tuple[int, int]:
    """(chunks of a micro-batch, micro-batches) that become one chunk."""
    if plan.problem.sharded:
        return times, 1
    within = min(times, plan.window_chunks)
    most = plan.problem.apart or plan.group
    batches = min(most, -(-times // within))
    while (plan.num_groups > 1 or plan.problem.apart) and most % batches:
        batches -= 1
    return within, batches


def _joined(plan: Plan, on: Conditions, times: int) -> Conditions:
    """The batch of `_few_chunks`: of micro-batches that become one, what precedes the padding is laid end to end."""
    starts = plan.row_documents if on.documents is None else on.documents
    _, batches = _group(plan, times)
    ends = [plan.window_tokens if end is None else end for end in on.filled or [None] * plan.problem.micro_batches]
    joined: list[list[int]] = []
    totals: list[int | None] = []
    for first in range(0, plan.problem.micro_batches, batches):
        result, total = OfStream(), 0
        for of_one, end in zip(starts[first : first + batches], ends[first : first + batches], strict=True):
            result += [total + start for start in of_one if start < end]
            own = (prefix for prefix in prefixes_of(of_one) if prefix.document < end)
            result.prefixes += [Prefix(*(total + place for place in prefix)) for prefix in own]
            total += end
        joined.append(result or [0])
        totals.append(total)
    return replace(on, documents=joined, filled=None if on.filled is None else totals)


def _shallow(plan: Plan, blocks: list[int]) -> Plan:
    """The plan of a model that has these blocks only."""
    number = {old: new for new, old in enumerate(blocks)}
    references = plan.problem.references
    names = {name for i in blocks for name in _with_references(plan.blocks[i], references)}

    def alone(block: BlockShape) -> BlockShape:
        """With what is left of the blocks before it in the place of those that are not."""
        left = {i: bisect_right(blocks, i) - 1 for i in (*block.inputs, block.sent_to) if i is not None}
        inputs = tuple(left[i] for i in block.inputs)
        return replace(block, inputs=inputs, sent_to=None if block.sent_to is None else left[block.sent_to])

    problem = replace(
        plan.problem,
        blocks=tuple(alone(plan.blocks[i]) for i in blocks),
        buffers=tuple(b for b in plan.problem.buffers if b.name in names),
    )

    def moved(keys: frozenset[tuple[int, int]]) -> frozenset[tuple[int, int]]:
        return frozenset((number[block], chunk) for block, chunk in keys if block in number)

    return replace(
        plan,
        problem=problem,
        buffers={name: buffer for name, buffer in plan.buffers.items() if name in names},
        spilled=moved(plan.spilled),
        saved_on_gpu=moved(plan.saved_on_gpu),
        saved_graphs=moved(plan.saved_graphs),
        offloaded_graphs=moved(plan.offloaded_graphs),
        recomputed=frozenset(number[block] for block in plan.recomputed if block in number),
    )


def _filled(ends: Sequence[float | None]) -> list[float]:
    """When blocks ended, in the order in which they were computed; what other ranks compute with what came before."""
    result: list[float] = []
    for end in ends:
        result.append(end or (result[-1] if result else 0.0))
    return result


def _extended(plan: Plan, runs: list[_Run], small: Plan, result: Simulation) -> Simulation:
    """What the whole model and all groups take, from the layers and groups of `small` that were simulated."""
    groups = [{chunk.index for chunk in group} for group in small.groups(small.chunks)]
    number = {index: k for k, members in enumerate(groups) for index in members}
    computed = [s for s in result.spans if s.lane == "compute" and s.chunk in number and s.op != a.UPDATE_ON_GPU.name]
    group_ends = [max(s.end_s for s in computed if number[s.chunk] == k) for k in range(len(groups))]
    heads = [s for s in computed if s.op == a.HEAD.name]
    turns = [min(s.start_s for s in heads if number[s.chunk] == k) for k in range(len(groups))]
    ends: dict[tuple[int, str, bool], float] = {}
    for span in computed:
        k = number[span.chunk]
        key = (k, span.block, span.end_s <= turns[k])
        ends[key] = max(ends.get(key, 0.0), span.end_s)
    # Other lanes run ahead of the one that computes, or behind it, by about the same in each group.
    work: dict[tuple[int, str, str], float] = defaultdict(float)
    moved: dict[tuple[int, str, str], int] = defaultdict(int)
    for span in result.spans:
        k = min(bisect_left(group_ends, span.start_s), len(groups) - 1)
        work[k, span.block, span.lane] += span.end_s - span.start_s
        moved[k, span.block, span.lane] += span.bytes
    step_s, busy, total = result.step_s, dict(result.busy_s), dict(result.bytes)
    more = plan.num_groups - len(groups)
    """Groups that are like the second one and are not simulated."""
    if more:
        step_s += more * (group_ends[1] - group_ends[0])
        for of_second in [key for key in work if key[0] == 1]:
            busy[of_second[2]] += more * work[of_second]
            total[of_second[2]] += more * moved[of_second]
    for run, k in itertools.product([run for run in runs if run.dropped], range(len(groups))):
        times = run.dropped * (1 + more * (k == 1))
        names = [plan.blocks[i].name for i in run.blocks]
        pace = _pace(_filled([ends.get((k, name, True)) for name in names]), run)
        if plan.blocks[run.blocks[0]].backward:
            first, last = run.period, 3 * run.period
            backward = _filled([ends.get((k, name, False)) for name in reversed(names)])[::-1]
            pace += (backward[first] - backward[last]) / 2
        step_s += times * pace
        # Those at either end have other neighbours: the last one finds in slots what forward left there, in each group.
        inner = run.blocks[run.period : -run.period] if plan.num_groups > 1 else run.blocks[run.period :]
        owners = dict.fromkeys(name for i in inner for name in (plan.blocks[i].name, *plan.blocks[i].buffers))
        for lane in busy:
            busy[lane] += times * sum(work[k, name, lane] for name in owners) * run.period / len(inner)
            total[lane] += times * sum(moved[k, name, lane] for name in owners) * run.period // len(inner)
    step_s = max(step_s, *busy.values())
    return replace(result, step_s=step_s, busy_s=busy, bytes=total)
