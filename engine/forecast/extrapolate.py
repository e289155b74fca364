"""Simulating a deep model by a shallow one: layers that are treated alike take turns at the same pace.

Of each run of layers with the same shape, placement and saved activations the first few are simulated; the others add
the time that passes from one of these to the next. Slots bound how far a lane can lag, so the pace settles within two
or three layers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from penstock.engine.forecast.costs import Calibration, Costs, representatives
from penstock.engine.forecast.simulate import Clocks, Simulation, simulate
from penstock.engine.machine.profile import Machine
from penstock.engine.plan.plan import BufferPlan, Chunk, Filled, Plan
from penstock.engine.plan.problem import HIDDEN_SLOTS
from penstock.engine.schedule import actions as a
from penstock.engine.schedule.builder import Documents, ScheduleBuilder
from penstock.engine.schedule.ops import Op

FULL_OPS = 1_500
"""Steps of about so many ops are simulated whole."""
SIMULATED_LAYERS = 5
"""Layers simulated of each run: one at either end, and three that tell the pace."""
MOST_PERIOD = 6
"""Layers after which another pattern of layers may repeat."""
MOST_PARTS = 12
"""Parts of a buffer; where there are more, several are taken for one."""
MOST_CHUNKS = 8
"""Chunks of a step; where there are more, several neighbours are taken for one."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Layers treated alike, or a pattern of a few that repeats."""

    blocks: list[int]
    """Indices of those that are simulated."""
    dropped: int
    """Times that they repeat beyond that."""
    period: int
    """Layers after which they repeat: 2 where every other one has a sliding window, say."""


def estimate(
    plan: Plan,
    machine: Machine,
    calibration: Calibration | None = None,
    documents: Sequence[Sequence[int]] | None = None,
    filled: Filled | None = None,
    *,
    full: bool = False,
    settled: bool = True,
) -> Simulation:
    """A step of `plan`: simulated whole where it is small or `full`, else by a few layers of each kind.

    `settled`: see simulate; a few layers never are.
    The spans are those of the layers simulated. Raises engine.forecast.simulate.Deadlock.
    """
    if full or num_ops(plan) <= FULL_OPS:
        costs = Costs(plan, machine, calibration, documents, filled)
        return simulate(plan, costs, machine, documents, filled, settled=settled)
    runs, small, joined, filled, costs = _small(plan, machine, calibration, documents, filled)
    found = simulate(small, costs, machine, joined, filled, settled=False)
    return _extended(plan, runs, found)


def estimate_evaluation(
    plan: Plan,
    machine: Machine,
    calibration: Calibration | None = None,
    documents: Sequence[Sequence[int]] | None = None,
    filled: Filled | None = None,
    *,
    full: bool = False,
) -> float:
    """Seconds that a validation's pass over as much as a step has takes; what it updates, the next step need not."""

    def emit(builder: ScheduleBuilder, documents: Documents, chunks: Sequence[Chunk]) -> Iterator[list[Op]]:
        return builder.evaluate(1, 1, documents=documents, chunks=chunks)

    return _pass_seconds(emit, plan, machine, calibration, documents, filled, full)


def estimate_samples(
    plan: Plan, machine: Machine, calibration: Calibration | None = None, *, new_tokens: int, full: bool = False
) -> float:
    """Seconds that the samples of a step take, with `new_tokens` behind each prompt: a pass over the prompts, and one
    for each further token, as it is halfway through."""
    space = plan.problem.samples
    assert space is not None
    rows, window = len(space.lengths), plan.window_tokens
    prompts, so_far = sum(space.lengths) - rows * new_tokens, sum(space.lengths) - rows * new_tokens // 2

    def seconds(tokens: int, read_tokens: int) -> float:
        def emit(builder: ScheduleBuilder, documents: Documents, chunks: Sequence[Chunk]) -> Iterator[list[Op]]:
            last = chunks[-1].index
            return builder.generate(1, -1, chunks=chunks, wanted=[last], read_tokens=read_tokens)

        times, micro_batches = -(-tokens // (window * plan.problem.micro_batches)), plan.problem.micro_batches
        filled = [max(0, min(window, -(-tokens // times) - window * i)) for i in range(micro_batches)]
        return times * _pass_seconds(emit, plan, machine, calibration, None, filled, full)

    later_s = seconds(rows, so_far) if space.keeps else seconds(so_far, 0)
    return seconds(prompts, 0) + (new_tokens - 1) * later_s


def _pass_seconds(
    emit: Callable[[ScheduleBuilder, Documents, Sequence[Chunk]], Iterator[list[Op]]],
    plan: Plan,
    machine: Machine,
    calibration: Calibration | None,
    documents: Documents | None,
    filled: Filled | None,
    full: bool,
) -> float:
    """Seconds of the pass forward that `emit` makes of documents and chunks."""
    runs: list[_Run] = []
    small, joined = plan, plan.row_documents if documents is None else documents
    if full or num_ops(plan) <= FULL_OPS:
        costs = Costs(plan, machine, calibration, documents, filled)
    else:
        # Where all chunks' hidden states fit their slots, none crosses the link.
        more_than = HIDDEN_SLOTS
        runs, small, joined, filled, costs = _small(plan, machine, calibration, documents, filled, more_than)
    clocks, chunks = Clocks(machine), small.filled_chunks(filled)
    clocks.run([op for ops in emit(ScheduleBuilder(small), joined, chunks) for op in ops], costs)
    ends = {op.block: end for op, _, end in clocks.times if op.lane == "compute"}
    dropped_s = sum(run.dropped * _pace([ends[plan.blocks[i].name] for i in run.blocks], run) for run in runs)
    return clocks.times[-1][2] + dropped_s


def _small(
    plan: Plan,
    machine: Machine,
    calibration: Calibration | None,
    documents: Sequence[Sequence[int]] | None,
    filled: Filled | None,
    more_than: int = 0,
) -> tuple[list[_Run], Plan, list[list[int]], Filled | None, Costs]:
    """The plan with a few layers of each run, chunks and parts; its documents and padding, and what its ops cost.

    It has `more_than` so many chunks if the plan has.
    """
    runs = _runs(plan)
    shallow = _shallow(plan, [i for run in runs for i in run.blocks])
    times = -(-len(plan.chunks) // MOST_CHUNKS)
    while times > 1 and len(_few_chunks(shallow, times).chunks) <= more_than:
        times -= 1
    small = _few_parts(_few_chunks(shallow, times))
    joined, few_filled = _joined(plan, documents, filled, times)
    merged = round(len(plan.filled_chunks(filled)) / len(small.filled_chunks(few_filled)))
    return runs, small, joined, few_filled, Costs(small, machine, calibration, joined, few_filled, merged=merged)


def _pace(ends: Sequence[float], run: _Run) -> float:
    """Time from one layer, or pattern, of a run to the next in forward, of the ends of those simulated.

    Those at either end are hurried or held up by their other neighbours.
    """
    return (ends[4 * run.period - 1] - ends[2 * run.period - 1]) / 2 if run.dropped else 0.0


def num_ops(plan: Plan) -> int:
    """About how many ops a step has."""
    chunk_ops = 14 * len(plan.chunks) * len(plan.blocks)
    if plan.streamed:
        chunk_ops += 4 * len(plan.chunks) * plan.window_chunks * len(plan.blocks)
    read = sum(b.num_parts for b in plan.buffers.values() if b.frozen and b.weights == "nvme")
    return chunk_ops + read + sum(4 * b.num_parts for b in plan.buffers.values() if b.state in ("ram", "nvme"))


def _runs(plan: Plan) -> list[_Run]:
    """Blocks in order; layers in runs of equals."""
    counts: dict[str, dict[int, int]] = {}
    for name in ("saved_graphs", "saved_on_gpu", "spilled"):
        counts[name] = defaultdict(int)
        for block, _ in getattr(plan, name):
            counts[name][block] += 1
    same = representatives(plan.blocks)
    kinds: list[object] = []
    for i, block in enumerate(plan.blocks):
        buffers = [replace(plan.buffers[name], name="") for name in block.buffers]
        kinds.append((same[i], buffers, i in plan.recomputed, *(counts[name][i] for name in counts)))
    runs, start = [], 0
    while start < len(kinds):
        times, period = max((_repeats(kinds, start, n), -n) for n in range(1, MOST_PERIOD + 1))
        period = -period
        if times <= SIMULATED_LAYERS + 1:
            times, period = 1, 1
        kept = min(times, SIMULATED_LAYERS)
        runs.append(_Run(list(range(start, start + kept * period)), times - kept, period))
        start += times * period
    return runs


def _repeats(kinds: Sequence[object], start: int, period: int) -> int:
    """How often the `period` kinds from `start` on follow each other."""
    times, first = 1, kinds[start : start + period]
    while kinds[start + times * period : start + (times + 1) * period] == first:
        times += 1
    return times


def _few_parts(plan: Plan) -> Plan:
    """The plan with few, large parts."""

    def merged(buffer: BufferPlan) -> BufferPlan:
        times = -(-buffer.num_parts // MOST_PARTS)
        return replace(buffer, part_numel=buffer.part_numel * times)

    return replace(plan, buffers={name: merged(buffer) for name, buffer in plan.buffers.items()})


def _few_chunks(plan: Plan, times: int) -> Plan:
    """The plan with `times` neighbouring chunks taken for one: of a micro-batch, or else its whole micro-batches."""
    if times == 1:
        return plan
    p = plan.problem
    within, batches = _group(plan, times)
    problem = replace(p, rows=p.rows * batches, micro_batches=-(-p.micro_batches // batches))
    chunks: list[Chunk] = []
    for batch in range(0, p.micro_batches, batches):
        members = [c for c in plan.chunks if batch <= c.micro_batch < batch + batches]
        width = within * batches
        for local, first in enumerate(range(0, len(members), width)):
            group = members[first : first + width]
            shift = [(c.micro_batch - batch) * plan.window_tokens for c in (group[0], group[-1])]
            chunks.append(
                Chunk(
                    index=len(chunks),
                    micro_batch=batch // batches,
                    local=local,
                    start=group[0].start + shift[0],
                    end=group[-1].end + shift[1],
                )
            )
    of = {c.index: _index_of(chunks, c, plan, batches) for c in plan.chunks}
    sizes = Counter(of.values())

    def most(keys: frozenset[tuple[int, int]]) -> frozenset[tuple[int, int]]:
        counts = Counter((block, of[chunk]) for block, chunk in keys)
        return frozenset(key for key, count in counts.items() if 2 * count >= sizes[key[1]])

    return replace(
        plan,
        problem=problem,
        chunks=tuple(chunks),
        spilled=most(plan.spilled),
        saved_on_gpu=most(plan.saved_on_gpu),
        saved_graphs=most(plan.saved_graphs),
    )


def _group(plan: Plan, times: int) -> tuple[int, int]:
    """(chunks of a micro-batch, micro-batches) that become one chunk."""
    within = min(times, plan.window_chunks)
    return within, min(plan.problem.micro_batches, -(-times // within))


def _index_of(chunks: list[Chunk], chunk: Chunk, plan: Plan, batches: int) -> int:
    """Which of the joined `chunks` holds `chunk`."""
    start = chunk.start + chunk.micro_batch % batches * plan.window_tokens
    batch = chunk.micro_batch // batches
    return next(c.index for c in chunks if c.micro_batch == batch and c.start <= start < c.end)


def _joined(
    plan: Plan, documents: Sequence[Sequence[int]] | None, filled: Filled | None, times: int
) -> tuple[list[list[int]], Filled | None]:
    """Per micro-batch of `_few_chunks` the starts of its documents, and its tokens before the padding.

    What is in front of the padding of those that become one is laid end to end.
    """
    starts = plan.row_documents if documents is None else documents
    _, batches = _group(plan, times)
    ends = [plan.window_tokens if end is None else end for end in filled or [None] * plan.problem.micro_batches]
    joined: list[list[int]] = []
    totals: list[int | None] = []
    for first in range(0, plan.problem.micro_batches, batches):
        found, total = [], 0
        for of_one, end in zip(starts[first : first + batches], ends[first : first + batches], strict=True):
            found += [total + start for start in of_one if start < end]
            total += end
        joined.append(found or [0])
        totals.append(total)
    return joined, None if filled is None else totals


def _shallow(plan: Plan, blocks: list[int]) -> Plan:
    """The plan of a model that has these blocks only."""
    number = {old: new for new, old in enumerate(blocks)}
    names = {name for i in blocks for name in plan.blocks[i].buffers}
    problem = replace(
        plan.problem,
        blocks=tuple(plan.blocks[i] for i in blocks),
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
        recomputed=frozenset(number[block] for block in plan.recomputed if block in number),
    )


def _extended(plan: Plan, runs: list[_Run], found: Simulation) -> Simulation:
    """What the whole model takes, from the layers that were simulated."""
    ends: dict[tuple[str, bool], float] = {}
    work: dict[tuple[str, str], float] = defaultdict(float)
    moved: dict[tuple[str, str], int] = defaultdict(int)
    turn = min(span.start_s for span in found.spans if span.op == a.HEAD.name)
    for span in found.spans:
        work[span.block, span.lane] += span.end_s - span.start_s
        moved[span.block, span.lane] += span.bytes
        if span.lane == "compute" and span.op != a.UPDATE_ON_GPU.name:
            key = (span.block, span.end_s <= turn)
            ends[key] = max(ends.get(key, 0.0), span.end_s)
    step_s, busy, total = found.step_s, dict(found.busy_s), dict(found.bytes)
    for run in runs:
        if not run.dropped:
            continue
        names = [plan.blocks[i].name for i in run.blocks]
        pace = _pace([ends[name, True] for name in names], run)
        if plan.blocks[run.blocks[0]].backward:
            first, last = run.period, 3 * run.period
            pace += (ends[names[first], False] - ends[names[last], False]) / 2
        step_s += run.dropped * pace
        inner = run.blocks[run.period :]
        owners = dict.fromkeys(name for i in inner for name in (plan.blocks[i].name, *plan.blocks[i].buffers))
        for lane in busy:
            busy[lane] += run.dropped * sum(work[name, lane] for name in owners) * run.period / len(inner)
            total[lane] += run.dropped * sum(moved[name, lane] for name in owners) * run.period // len(inner)
    step_s = max(step_s, *busy.values())
    return replace(found, step_s=step_s, busy_s=busy, bytes=total)
