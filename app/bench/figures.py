"""From the spans of a case's steps to its figures; nothing is measured here.

A step's window runs from the end of the step before (its `clip`) to the end of its own. Within it the compute lane
visits the layers twice: all of them forward before the head, all of them backward after it. A step of a model cut to
some of its layers is scaled to all of them by these two stretches, gaps between the ops included; the rest of the
window (embedding, head, and what is waited for at either end) counts once.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.app.runs.lanes import lane_shares, length, union
from penstock.app.runs.ops import STEP_END
from penstock.engine.forecast.flops import StepFlops
from penstock.storage.files.errors import UserError


@dataclass(frozen=True, slots=True)
class StepTimes:
    step_s: float
    layers_s: float
    """The stretches in which the compute lane was at the layers."""

    @property
    def edges_s(self) -> float:
        """The rest."""
        return self.step_s - self.layers_s

    def scaled(self, ratio: float) -> float:
        """Seconds of a step with `ratio` times as many layers."""
        return self.layers_s * ratio + self.edges_s


def step_times(spans: Sequence[dict[str, Any]], step: int) -> StepTimes:
    """Times of `step`, of which the spans hold all, and the end of the step before."""
    ends = {span["step"]: span["end_s"] for span in spans if span["op"] == STEP_END}
    start, end = ends[step - 1], ends[step]
    # Updates of the step before carry its number, whatever step's window they run in; compute ops carry their own.
    own = [s for s in spans if s["lane"] == "compute" and s["step"] == step]
    turn = min(span["start_s"] for span in own if span["op"] == "head")
    layers_s = 0.0
    for there in (lambda at: at < turn, lambda at: at >= turn):
        stretch = [s for s in own if s["block"].startswith("layers.") and there(s["start_s"])]
        layers_s += max(s["end_s"] for s in stretch) - min(s["start_s"] for s in stretch)
    return StepTimes(end - start, layers_s)


def median_times(spans: Sequence[dict[str, Any]], steps: Sequence[int]) -> tuple[StepTimes, list[float]]:
    """The step of the median duration (the earlier one of two), and all durations."""
    times = [step_times(spans, step) for step in steps]
    middle = statistics.median_low(each.step_s for each in times)
    return next(each for each in times if each.step_s == middle), [each.step_s for each in times]


def shares(spans: Sequence[dict[str, Any]], first: int, last: int) -> dict[str, Any]:
    """Busy share of every lane, I/O that computing waited for, and the compute lane's idle share."""
    found = lane_shares(spans, first, last)
    names = ("busy", "exposed_io", "idle", "bytes")
    return {name: getattr(found, name) for name in names} | {"compute_idle": 1 - found.busy["compute"]}


def scaled_flops(flops: StepFlops, ratio: float) -> StepFlops:
    """The same for `ratio` times as many layers of the same kind."""
    layer, forward, backward = (
        round(part * ratio) for part in (flops.layer_matmul, flops.attention_forward, flops.attention_backward)
    )
    return StepFlops(layer, flops.head_matmul, forward, backward)


def limit_s(flops: StepFlops, kernels: dict[str, Any]) -> float:
    """Seconds that these FLOPs take at the rates that the kernels reached alone."""
    matmul, attention = kernels["matmul_tflops"], kernels["attention_tflops"]
    parts = (
        (flops.layer_matmul, matmul["layer"]),
        (flops.head_matmul, matmul["head"]),
        (flops.attention_forward, attention["forward"]),
        (flops.attention_backward, attention["backward"]),
    )
    return sum(flop / (rate * 1e12) for flop, rate in parts)


def kernel_idle(events: Sequence[dict[str, Any]]) -> float:
    """Share of the time between the first and the last kernel in which none ran, on the stream with the most work.

    `events`: those of a profiler's Chrome trace, with ts and dur in microseconds.
    """
    streams: dict[Any, list[tuple[float, float]]] = {}
    for event in events:
        if event.get("cat") == "kernel":
            start = float(event["ts"])
            streams.setdefault(event["args"]["stream"], []).append((start, start + float(event["dur"])))
    if not streams:
        raise UserError("the profiler saw no kernel")
    busiest = max((union(intervals) for intervals in streams.values()), key=length)
    return 1 - length(busiest) / (busiest[-1][1] - busiest[0][0])
