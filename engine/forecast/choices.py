"""What a search has to choose from: chunk lengths, and of each field of PlanOptions the values worth trying."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from penstock.engine.plan.problem import KV_SLOTS, OffloadedGraphs, PlanInput, PlanOptions

MOST_CHUNKS = 128
"""Chunks of one micro-batch that an automatic chunk length makes at most, unless shorter ones alone fit."""
_CHUNKS = tuple(1 << n for n in range(9, 17))
"""Chunk lengths tried where the recipe names none."""


def chunk_options(stream_tokens: int) -> list[int]:
    """Chunk lengths worth trying for a micro-batch of `stream_tokens` tokens, longest last."""
    shorter = [n for n in _CHUNKS if n < stream_tokens]
    few = [n for n in shorter if n * MOST_CHUNKS >= stream_tokens]
    return [*(few or shorter), *([stream_tokens] if stream_tokens <= _CHUNKS[-1] else [])]


def dimensions(problem: PlanInput, num_chunks: int) -> dict[str, list[Any]]:
    """Field of PlanOptions -> the values worth trying, the likeliest first."""
    attends = any(block.attends for block in problem.blocks)
    useful = attends and num_chunks > KV_SLOTS and problem.may_stream
    streamed = {"whole": [False], "streamed": [useful], "auto": [False, True] if useful else [False]}
    recompute: dict[str, list[Any]] = {"full": ["all"], "auto": ["none", "half", "all"] if attends else ["none"]}
    gpu_first = ["graphs", "blocks", "half", "graphs only", "weights", "saved activations"]
    if problem.activation_checkpointing != "auto":
        of_graphs = ["graphs"] if problem.activation_checkpointing == "none" else []
        gpu_first = [*of_graphs, "blocks", "graphs only", "weights", "saved activations"]
    return {
        "streamed": streamed[problem.kv_window],
        "gpu_first": gpu_first,
        "recompute": recompute.get(problem.activation_checkpointing, ["none"]),
        "ram_first": ["activations", "weights", "state", *["frozen last"] * any(b.frozen for b in problem.buffers)],
        "stages": [4, 2],
        "spare_slots": [1, 2],
        "group": _groups(problem),
        "offloaded_graphs": _offloaded_graphs(problem),
        "spread": _spread(problem),
    }


def _groups(problem: PlanInput) -> list[int]:
    """Micro-batches of a group: all of a step, half of them, and so on."""
    result = [0]
    size = 1 if problem.one_group else problem.micro_batches
    while size > max(1, problem.apart):
        result.append(size := problem.group_of(-(-size // 2)))
    return result


def _spread(problem: PlanInput) -> list[bool]:
    if problem.spread_experts is None and problem.may_spread:
        return [False, True]
    return [bool(problem.spread_experts)]


def _offloaded_graphs(problem: PlanInput) -> list[OffloadedGraphs]:
    known = any(b.backward and b.graph_bytes_per_token is not None for b in problem.blocks)
    if not known or problem.kv_window == "streamed" or problem.activation_checkpointing not in ("auto", "none"):
        return ["none"]
    if problem.activation_checkpointing == "none":
        return ["none", "all"]
    return ["none", "rest", "quarter", "half", "most", "all"]


def options(problem: PlanInput) -> dict[str, list[Any]]:
    """`dimensions` of a problem."""
    return dimensions(problem, -(-problem.rows * problem.row_tokens // problem.chunk_tokens))


def frugal_choices(problem: PlanInput) -> Iterator[PlanOptions]:
    """The choices that need least of each tier: one of them fits, or a plan is refused."""
    values = options(problem)
    names = ["group", "streamed", "recompute", "ram_first", "gpu_first"]
    ends = {name: list(dict.fromkeys((result[0], result[-1]))) for name, result in values.items()}
    ends["ram_first"] = values["ram_first"]
    if problem.activation_checkpointing == "none":  # else what leaves need not be saved
        names.insert(0, "offloaded_graphs")
    for way in itertools.product(*(ends[name] for name in names)):
        yield PlanOptions(**dict(zip(names, way, strict=True)), spread=values["spread"][0])
