"""Which part of a step the ops of a run are work for: forward, backward, update, validation, samples.

What several parts need, such as weights on their way, belongs to the part that computes with it: what comes in to the
op that computes next in the run's own order, what goes out to the one before.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.app.runs.ops import PARTS, part_of
from penstock.tui.data.spans import Floats, Ints, SpanView

NONE = -1
"""The part of what belongs to none, or is not known; others are places in PARTS."""
UPDATE = PARTS.index("update")
_INWARD = ("nvme_read", "h2d")

Parts = NDArray[np.int8]


class Stretches(NamedTuple):
    """A part of a step, from its first op to its last; in order of time."""

    part: Parts
    start_s: Floats
    end_s: Floats


def parts_of(view: SpanView, rows: Ints) -> Parts:
    """The part of each of some rows; rows that compute are looked for among them alone."""
    by_op = np.array([PARTS.index(part) if (part := part_of(op)) else NONE for op in view.ops], np.int8)
    if not len(rows) or not len(by_op):
        return np.full(len(rows), NONE, np.int8)
    parts = by_op[view.op[rows]]
    lane = view.lane[rows]
    computing = (lane == view.lanes.index("compute")) & (parts != NONE) & (parts != UPDATE)
    if not computing.any() or computing.all():
        return parts
    order = view.id[rows].astype(np.float64) if (view.id[rows] >= 0).all() else view.start_s[rows]
    at = np.flatnonzero(computing)
    at = at[np.argsort(order[at], kind="stable")]
    unknown = np.flatnonzero(parts == NONE)
    inward = np.isin(lane[unknown], [view.lanes.index(name) for name in _INWARD])
    following = np.searchsorted(order[at], order[unknown])
    neighbour = np.clip(np.where(inward, following, following - 1), 0, len(at) - 1)
    moves = view.bytes[rows][unknown] > 0
    parts[unknown[moves]] = parts[at[neighbour[moves]]]
    return parts


def computed(view: SpanView, rows: Ints, parts: Parts) -> Stretches:
    """The parts that the compute lane went through; rows in order of their start."""
    mine = np.flatnonzero((view.lane[rows] == view.lanes.index("compute")) & (parts != NONE) & (parts != UPDATE))
    first, last = runs(parts[mine])
    ends = np.maximum.accumulate(view.end_s[rows[mine]]) if len(mine) else np.zeros(0)
    return Stretches(parts[mine[first]], view.start_s[rows[mine[first]]], ends[last])


def updates(view: SpanView, rows: Ints, parts: Parts) -> Stretches:
    """The update of each step, on whichever lanes; in order of the steps."""
    mine = rows[parts == UPDATE]
    steps = np.unique(view.step[mine])
    of_step = [view.step[mine] == step for step in steps[-200:]]
    return Stretches(
        np.full(len(of_step), UPDATE, np.int8),
        np.array([view.start_s[mine[these]].min() for these in of_step]),
        np.array([view.end_s[mine[these]].max() for these in of_step]),
    )


def runs(values: NDArray[np.generic]) -> tuple[Ints, Ints]:
    """Where runs of equal values begin, and their last places."""
    if not len(values):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    borders = np.flatnonzero(values[1:] != values[:-1])
    return np.concatenate(([0], borders + 1)), np.concatenate((borders, [len(values) - 1]))
