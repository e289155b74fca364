"""The parts of a step over the lanes: a band with their names, and a letter where a lane goes over to another one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from penstock.app.console.rows import Glyphs
from penstock.app.runs.ops import PARTS, part_of
from penstock.tui.data.parts import NONE, Parts, Stretches, computed, parts_of, runs, updates
from penstock.tui.data.spans import Floats, Ints, SpanView
from penstock.tui.render.lane_boxes import Canvas
from penstock.tui.render.one_row import sparkline

_MOST_ROWS = 20_000
"""With more ops in view their parts are no longer told apart."""
_MARK_CELLS = 5


def has_parts(view: SpanView) -> bool:
    """Whether any op of these spans is known to belong to a part of a step."""
    return any(part_of(op) for op in view.ops[:200])


class InView:
    """The ops between two moments, in order of their start, and the parts of a step that they belong to."""

    def __init__(self, view: SpanView, edges: Floats, *, wanted: bool) -> None:
        self.view, self.edges = view, edges
        self.rows: Ints = view.rows_between(float(edges[0]), float(edges[-1])) if wanted else np.zeros(0, np.int64)
        if len(self.rows) > _MOST_ROWS:
            self.rows = np.zeros(0, np.int64)
        self.parts: Parts = parts_of(view, self.rows)

    def draw_band(self, canvas: Canvas, glyphs: Glyphs) -> None:
        """Forward, backward, validation by what computes; the update beside or between them."""
        middles = (self.edges[1:] + self.edges[:-1]) / 2
        part = _at(computed(self.view, self.rows, self.parts), middles)
        updating = _at(updates(self.view, self.rows, self.parts), middles) != NONE
        first, last = runs(2 * part.astype(int) + updating)
        for a, b in zip(first.tolist(), (last + 1).tolist(), strict=True):
            if part[a] == NONE and not updating[a]:
                continue
            names = ([PARTS[part[a]]] if part[a] != NONE else []) + (["update"] if updating[a] else [])
            token = f"box.part.{names[0]}"
            canvas.write(0, a, " " * (b - a), token)
            canvas.write(0, a, (("▏" if glyphs.braille else "|") + _words(names, b - a - 1))[: b - a], token)

    def draw_marks(self, canvas: Canvas, lane: str, coverage: Floats) -> None:
        """The letter of each part, where the lane begins to work for it and goes on for a while."""
        if lane not in self.view.lanes:
            return
        mine = np.flatnonzero((self.view.lane[self.rows] == self.view.lanes.index(lane)) & (self.parts != NONE))
        first, last = runs(self.parts[mine])
        if not len(first):
            return
        starts, ends = self.view.start_s[self.rows[mine[first]]], self.view.end_s[self.rows[mine[last]]]
        cells = np.searchsorted(self.edges, starts, side="right").clip(1) - 1
        until = np.searchsorted(self.edges, ends, side="left")
        for a, b, part in zip(cells.tolist(), until.tolist(), self.parts[mine[first]].tolist(), strict=True):
            if b - a >= _MARK_CELLS and coverage[a] > 0:
                canvas.write(canvas.num_rows - 1, a, PARTS[part][0].upper(), f"box.part.{PARTS[part]}")


def _at(stretches: Stretches, times: Floats) -> Parts:
    if not len(stretches.part):
        return np.full(len(times), NONE, np.int8)
    i = np.searchsorted(stretches.start_s, times, side="right") - 1
    at = np.maximum(i, 0)
    inside = (i >= 0) & (times < stretches.end_s[at])
    return np.where(inside, stretches.part[at], np.int8(NONE)).astype(np.int8)


def _words(names: Sequence[str], width: int) -> str:
    for text in (" + ".join(names), "+".join(names), "+".join(name[0].upper() for name in names)):
        if len(text) <= width:
            return text
    return names[0][0].upper()[: max(0, width)]


def history(values: Mapping[str, Sequence[float]], lane: str, width: int, glyphs: Glyphs) -> str:
    """A lane's last steps, a cell each, from nothing to the most of them; the newest at the right."""
    shown = list(values.get(lane, ()))[-(width - 1) :] if width > 1 else []
    return sparkline(shown, width - 1, glyphs.eighths[:-1], low=0.0).rjust(width)
