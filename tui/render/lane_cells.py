"""Cells, and what a lane's show: ops as boxes with their names, and the parts of a step, as a band and as letters."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.app.console.rows import Glyphs, Row
from penstock.app.runs.lanes import LANES
from penstock.app.runs.ops import PARTS, location_text, op_text, part_of
from penstock.tui.data.parts import NONE, Parts, Stretches, computed, parts_of, runs, updates
from penstock.tui.data.spans import Floats, Ints, SpanView
from penstock.tui.render.one_row import sparkline

BOX_CELLS = 6
"""From so many cells on, an op is drawn as a box with a name."""
_TALL_ROWS = 3


class Canvas:
    """Rows of cells: characters and tokens."""

    def __init__(self, rows: int, columns: int) -> None:
        self.num_rows, self.num_columns = rows, columns
        self.chars: NDArray[np.str_] = np.full((rows, columns), " ", dtype="<U1")
        self.tokens: NDArray[np.object_] = np.full((rows, columns), "text", dtype=object)

    def put(self, y: int, where: NDArray[np.bool_], char: str, token: str) -> None:
        """One character in some cells of a row."""
        self.chars[y, where] = char
        self.tokens[y, where] = token

    def write(self, y: int, x: int, text: str, token: str) -> None:
        """Text from column `x` on, as far as there is room."""
        text = text[: self.num_columns - x]
        self.chars[y, x : x + len(text)] = list(text)
        self.tokens[y, x : x + len(text)] = token

    def row(self, y: int) -> Row:
        """Neighbours of the same token as one piece."""
        tokens = self.tokens[y]
        borders = [0, *(np.flatnonzero(tokens[1:] != tokens[:-1]) + 1).tolist(), self.num_columns]
        text = "".join(self.chars[y].tolist())
        return [(text[a:b], tokens[a]) for a, b in itertools.pairwise(borders)]


def draw_boxes(canvas: Canvas, view: SpanView, rows: Ints, edges: Floats, lane: str, glyphs: Glyphs) -> None:
    """Names in the whole cells of ops that are wide enough and alone there, or in tracks where there is room."""
    cell_s = edges[1] - edges[0]
    wide = view.end_s[rows] - view.start_s[rows] >= BOX_CELLS * cell_s
    if not wide.any():
        return
    first = np.ceil((view.start_s[rows] - edges[0]) / cell_s - 1e-6).clip(0, canvas.num_columns).astype(int)
    last = np.floor((view.end_s[rows] - edges[0]) / cell_s + 1e-6).clip(0, canvas.num_columns).astype(int)
    tracks, depth = _tracks(view, rows)
    if depth > canvas.num_rows:
        alone = _alone(view, rows)
        wide &= alone
        tracks[:] = 0
        depth = 1
    each = canvas.num_rows // depth
    for i in np.flatnonzero(wide & (last - first >= BOX_CELLS - 1)):
        a, b = int(first[i]), int(last[i])
        top = int(tracks[i]) * each
        bottom = canvas.num_rows if depth == 1 else top + each
        style = f"box.{lane}" if lane in LANES else "box.other"
        for y in range(top, bottom):
            canvas.write(y, a, " " * (b - a), style)
        name = box_name(view, int(rows[i]), b - a - 1, glyphs.ellipsis)
        canvas.write(top + (bottom - top - 1) // 2, a, ("▏" if glyphs.braille else "|") + name, style)
    if depth > 1:
        _clear_between_tracks(canvas, tracks, first, last, each)


def draw_outline(canvas: Canvas, critical: NDArray[np.bool_], lane: str, glyphs: Glyphs) -> None:
    """A line below what is on the critical path, and above it where a lane is tall; a bar keeps its height."""
    style = f"line.{lane}" if lane in LANES else "line.other"
    critical = critical & (canvas.tokens[-1] != "selected")
    edges = {canvas.num_rows - 1: "▁"} | ({0: "▔"} if canvas.num_rows >= _TALL_ROWS else {})
    for y, line in edges.items():
        chars, tokens = canvas.chars[y], canvas.tokens[y]
        boxed = np.array([token.startswith("box.") for token in tokens])
        whole = critical & ((chars == glyphs.eighths[-1]) | (boxed & (chars == " ")))
        if glyphs.braille:
            canvas.put(y, whole, line, style)
        for cell in np.flatnonzero(critical & (~whole if glyphs.braille else True) & (chars != " ")):
            tokens[cell] += " line"


def _clear_between_tracks(canvas: Canvas, tracks: Ints, first: Ints, last: Ints, each: int) -> None:
    """Where ops lie in tracks, a track that holds nothing is empty, though the lane is busy there."""
    covered = np.zeros((canvas.num_rows, canvas.num_columns), bool)
    touched = np.zeros(canvas.num_columns, bool)
    for track, a, b in zip(tracks.tolist(), first.tolist(), last.tolist(), strict=True):
        covered[track * each : track * each + each, max(0, a - 1) : b + 1] = True
        if b - a >= BOX_CELLS - 1:
            touched[a:b] = True
    empty = ~covered & touched
    canvas.chars[empty] = " "
    canvas.tokens[empty] = "text"


def _tracks(view: SpanView, rows: Ints) -> tuple[Ints, int]:
    """The track of each op, so that none overlap in one, and their number; rows in order of start."""
    tracks = np.zeros(len(rows), np.int64)
    ends: list[float] = []
    if not (view.start_s[rows][1:] < np.maximum.accumulate(view.end_s[rows])[:-1]).any():
        return tracks, 1
    for i, row in enumerate(rows[:4000]):
        start_s = float(view.start_s[row])
        track = next((t for t, end_s in enumerate(ends) if end_s <= start_s), len(ends))
        ends[track : track + 1] = [float(view.end_s[row])]
        tracks[i] = track
    return tracks, max(1, len(ends))


def _alone(view: SpanView, rows: Ints) -> NDArray[np.bool_]:
    starts, ends = view.start_s[rows], view.end_s[rows]
    latest = np.concatenate(([-np.inf], np.maximum.accumulate(ends)[:-1]))
    following = np.concatenate((starts[1:], [np.inf]))
    return np.asarray((starts >= latest) & (following >= ends))


def box_name(view: SpanView, row: int, width: int, ellipsis: str) -> str:
    """As much of the op's name as `width` cells hold: of its block and chunk the end, which tells them apart."""
    op, block, chunk = view.ops[view.op[row]], view.blocks[view.block[row]], int(view.chunk[row])
    grid = location_text(block, chunk)
    end = ellipsis + grid.rpartition(".")[2]
    for text in (op_text(op, block, chunk), f"{op} {end}", op, grid, end):
        if len(text) <= width:
            return text
    return op[:width]


_MOST_ROWS = 20_000
"""With more ops in view their parts are no longer distinguished."""
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
