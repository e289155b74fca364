"""Cells of a lane, and ops as boxes with their names where they are wide enough."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from penstock.app.console.rows import Glyphs, Row
from penstock.app.runs.lanes import LANES
from penstock.app.runs.ops import location_text, op_text
from penstock.tui.data.spans import Floats, Ints, SpanView

BOX_CELLS = 6
"""From so many cells on, an op is drawn as a box with a name."""
_TALL_ROWS = 3


class Canvas:
    """A lane's cells: characters and tokens."""

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


def draw_boxes(
    canvas: Canvas,
    view: SpanView,
    rows: Ints,
    edges: Floats,
    lane: str,
    glyphs: Glyphs,
) -> None:
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
        _clear_between_tracks(canvas, tracks, first, last, each, edges)


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


def _clear_between_tracks(
    canvas: Canvas,
    tracks: Ints,
    first: Ints,
    last: Ints,
    each: int,
    edges: Floats,
) -> None:
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
    place = location_text(block, chunk)
    end = ellipsis + place.rpartition(".")[2]
    for text in (op_text(op, block, chunk), f"{op} {end}", op, place, end):
        if len(text) <= width:
            return text
    return op[:width]
