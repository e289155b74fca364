"""Passes over the blocks of a model: a list of visits, each a block in one mode over some chunks.

A training step, a validation and the samples of a run are passes; the functions here say which visits each has. The
builder (engine/schedule/builder.py) emits the ops of any pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from penstock.engine.plan.chunks import Chunk, Streams, own
from penstock.engine.plan.plan import Plan
from penstock.engine.schedule import actions as a
from penstock.engine.schedule.actions import Action
from penstock.engine.schedule.kinds import Mode

Visit = tuple[Mode, int, list[Chunk]]
"""A mode, the index of a block, and the chunks that it computes, in their order; none where another rank does."""
Documents = Sequence[Sequence[int]]
"""Per micro-batch the sorted starts of its documents, with their prefixes (attention/spans.py)."""


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Chunks that go through all of their visits before those of the next group do."""

    chunks: list[Chunk]
    visits: list[Visit]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """What goes through the blocks as of one step."""

    step: int
    batch: int = 0
    """Whose tokens it is about: 0 the step's own, above 0 a validation's, below 0 those of samples."""
    groups: Sequence[Group]
    ends: Action
    """What takes the result."""
    streams: Streams = ()
    """Per micro-batch all chunks, whoever computes them; of samples, none."""
    documents: Documents | None = None
    """Where keys and values are streamed, those that no query of a chunk can see are left out; None: each row is a
    document."""
    read_tokens: int = 0
    """Of samples: how many of each layer's keys and values are there already."""
    moved_tokens: int = 0
    """How many of them attention moves through the compute device's memory, as often as it does."""
    of_reference: bool = False
    """Computed with the first values of all that is trained."""
    spread: Mapping[int, int] = field(default_factory=dict)
    """Block -> the rank that computes it, where that is one for the chunks of all."""

    @property
    def trains(self) -> bool:
        return self.batch == 0


def training(
    plan: Plan,
    step: int,
    *,
    documents: Documents | None = None,
    streams: Streams | None = None,
    others: Sequence[Chunk] | None = None,
) -> Pass:
    """Forward and backward of step `step`, group by group.

    `streams`: what the step needs of the plan's (Plan.filled_streams), and `others` of other ranks' chunks
    (Plan.others); None: all of it.
    """
    streams = plan.streams if streams is None else streams
    others = plan.others(None) if others is None else others
    groups = plan.groups(list(own(streams)))
    result = [Group(members, _forward_backward(plan, members, others)) for members in groups]
    return Pass(step=step, groups=result, ends=a.CLIP, streams=streams, documents=documents, spread=plan.spread)


def _forward_backward(plan: Plan, chunks: list[Chunk], others: Sequence[Chunk]) -> list[Visit]:
    last, shared, spread = len(plan.blocks) - 1, plan.problem.sharded, plan.spread
    # Where replicas are added, each one's gradient is complete before the next one's begins.
    parts = _by_replica(plan, chunks)
    everyone, of_all = list[Chunk](), list[list[Chunk]]()
    if spread:  # one chunk of each rank in turns
        size = len(plan.chunks)
        everyone = sorted([*chunks, *others], key=lambda c: (c.index % size, plan.rank_of(c.index)))
        of_all = _by_replica(plan, everyone)
    visits: list[Visit] = []
    for mode, block, order in _forward(plan, "forward", chunks):
        if block in spread:
            order = everyone if spread[block] == plan.rank else []
        visits.append((mode, block, order))
    if plan.problem.scores:
        visits.append(("score", last, chunks))
    # The loss goes in backward's order: its last gradients are the first ones needed.
    visits += [("loss", last, part) for part in parts]
    for block in range(last - 1, -1, -1):
        if not plan.blocks[block].backward:
            break  # nothing is trained from here on down
        if block in spread:
            visits += [("backward", block, part) for part in (of_all if spread[block] == plan.rank else [[]])]
            continue
        if shared and plan.blocks[block].attends:
            visits += _shared_backward(plan, block, chunks)
            continue
        if shared and plan.blocks[block].recurrent:
            visits.append(("backward", block, chunks[::-1]))  # a state's gradient goes back chunk by chunk
            continue
        if block not in plan.recomputed:
            visits += [("backward", block, part) for part in parts]
            continue
        # One micro-batch at a time: its keys and values are in the window when its backward begins.
        for _, stream in itertools.groupby(chunks[::-1], attrgetter("micro_batch")):
            order = list(stream)
            visits += [("recompute", block, order[::-1]), ("backward", block, order)]
    return visits


def _by_replica(plan: Plan, chunks: Sequence[Chunk]) -> list[list[Chunk]]:
    """Those of each replica, the last replica and the last chunks first."""
    result: dict[tuple[int, int], list[Chunk]] = {}
    for chunk in sorted(chunks, key=attrgetter("index"), reverse=True):
        result.setdefault((plan.replica(chunk), plan.rank_of(chunk.index)), []).append(chunk)
    return [result[replica] for replica in sorted(result, reverse=True)]


def _by_stream(chunks: Sequence[Chunk]) -> list[list[Chunk]]:
    return [list(stream) for _, stream in itertools.groupby(chunks, attrgetter("micro_batch"))]


def _forward(plan: Plan, mode: Mode, chunks: list[Chunk]) -> Iterator[Visit]:
    """Visits of all blocks but the last. Where ranks share each sequence, all keys and values of a micro-batch are
    there before any of it is attended to."""
    for number, block in enumerate(plan.blocks[:-1]):
        if block.attends and plan.problem.sharded and mode != "generate":
            for stream in _by_stream(chunks):
                yield "publish", number, stream
                yield mode, number, stream
        else:
            yield mode, number, chunks


def _shared_backward(plan: Plan, block: int, chunks: list[Chunk]) -> Iterator[Visit]:
    """Backward of a layer that attends to what other ranks compute: up to attention, and once all of them have done
    that, the rest."""
    for stream in _by_stream(chunks)[::-1]:
        parts = _by_replica(plan, stream)
        yield "republish", block, stream
        if block in plan.recomputed:
            yield "recompute", block, stream
        for mode in ("backward_top", "backward"):
            yield from ((mode, block, part) for part in parts)


def evaluation(
    plan: Plan,
    step: int,
    batch: int,
    *,
    documents: Documents,
    streams: Streams | None = None,
    of_reference: bool = False,
) -> Pass:
    """The loss of the micro-batches of `documents` as of the end of step `step`, or by the reference model: a forward
    that nothing follows.

    There are no more of them than a group has; `streams` as for a step. `batch` is above 0 and no other's after the
    step.
    """
    assert batch > 0
    streams = plan.streams[: min(plan.group, len(documents))] if streams is None else streams
    chunks = list(own(streams))
    # The last block begins with the chunk that was computed last.
    group = _forward_only(plan, "evaluate", chunks, chunks[::-1])
    return Pass(
        step=step,
        batch=batch,
        groups=[group],
        ends=a.EVALUATE,
        streams=streams,
        documents=documents,
        of_reference=of_reference,
    )


def sampling(
    plan: Plan,
    step: int,
    batch: int,
    *,
    chunks: Sequence[Chunk],
    wanted: Sequence[int],
    read_tokens: int,
    moved_tokens: int = 0,
) -> Pass:
    """The tokens behind those of samples as of the end of step `step`.

    `chunks`: new tokens of all sequences, in the memory of as many chunks of a group, none longer than its own;
    `wanted`: indices of those with a token behind which one is wanted, at least one; `read_tokens`: how many the passes
    before have kept keys and values of; `moved_tokens`: see Pass, for forecasts. `batch` is below 0 and no other's.
    """
    assert batch < 0
    ends = [chunk for chunk in chunks[::-1] if chunk.index in wanted]
    group = _forward_only(plan, "generate", list(chunks), ends)
    return Pass(
        step=step, batch=batch, groups=[group], ends=a.CHOOSE, read_tokens=read_tokens, moved_tokens=moved_tokens
    )


def _forward_only(plan: Plan, mode: Mode, chunks: list[Chunk], of_last: list[Chunk]) -> Group:
    last = len(plan.blocks) - 1
    return Group(chunks, [*_forward(plan, mode, chunks), (mode, last, of_last)])


@dataclass(frozen=True, slots=True)
class Task:
    """A block computing one chunk."""

    group: Group
    visit: int
    """Number of the visit that it belongs to."""
    mode: Mode
    layer: int
    """Index of the block in the plan."""
    following: int | None
    """Index of the next other block that the group visits."""
    chunk: Chunk
    first: bool
    last: bool
    left_out: tuple[int, ...]
    """Blocks of the visits that come next and that other ranks make, in backward."""


def tasks(groups: Sequence[Group]) -> list[Task]:
    """All visits of a pass, chunk by chunk."""
    result: list[list[Task]] = []
    count = sum(bool(order) for group in groups for _, _, order in group.visits)
    for group in reversed(groups):
        following = after = None
        left_out: tuple[int, ...] = ()
        for mode, block, order in reversed(group.visits):
            if after != block:
                following, after = after, block
            if not order:
                left_out = (block, *left_out) if mode == "backward" else left_out
                continue
            count -= 1
            ends = order[0], order[-1]
            result.append(
                [Task(group, count, mode, block, following, c, c is ends[0], c is ends[1], left_out) for c in order]
            )
            left_out = ()
    return list(itertools.chain.from_iterable(reversed(result)))
