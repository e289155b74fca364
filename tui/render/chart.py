"""Curves in braille dots, or in ASCII: the cost depends on the cells, hardly on the points.

Points are reduced to the least and the greatest of each column of dots before anything is drawn, so spikes survive.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from penstock.app.console.rows import Glyphs, Row, merged
from penstock.storage.files.units import count_text
from penstock.tui.render.lane_cells import Canvas
from penstock.tui.render.one_row import sparkline as one_row
from penstock.tui.render.ticks import linear_ticks, log_ticks, tick_texts, time_ticks

Floats = NDArray[np.float64]
XKind = Literal["step", "tokens", "time"]

_BRAILLE = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])
_ASCII_DOTS = np.array([ord(c) for c in " '-'.:.:"])  # bits: upper, middle and lower third
_ASCII_DOTS[7] = ord("|")
_NUM_DOTS = np.array([bits.bit_count() for bits in range(256)])
_THIN_DOTS = 2


@dataclass(frozen=True, slots=True)
class Curve:
    """Values over ascending x. NaN is a gap."""

    x: Floats
    y: Floats
    token: str
    points: bool = False
    """Marked one by one instead of joined to a line."""
    joined: bool = True
    """Whether the dots of a line are joined; if not, few values are a cloud and many a band."""
    mark: str = ""
    """The character of a point; a diamond by default."""


@dataclass(frozen=True, slots=True)
class Axes:
    low: float
    high: float
    """Of x."""
    bottom: float
    top: float
    """Of y, or of its logarithm."""
    log: bool


def chart(
    width: int,
    height: int,
    curves: Sequence[Curve],
    glyphs: Glyphs,
    *,
    x_kind: XKind = "step",
    x_range: tuple[float, float] | None = None,
    log_y: bool = False,
    clip: bool = True,
    marks: Sequence[float] = (),
    cursor: float | None = None,
    label_cells: int = 0,
) -> list[Row]:
    """Rows of exactly `width` cells. Later curves are drawn over earlier ones; `marks` stand on the x axis.

    `label_cells`: room for the numbers of the y axis at least, so that charts above each other agree.

    `clip`: the axis shows what is usual, and what is beyond it touches the edge.
    """
    if width < 1 or height < 1:
        return []
    low, high = x_bounds(curves) if x_range is None else x_range
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # of absurd figures the differences are lost
        high = low + max(1.0, 1e-6 * abs(low))
    num_axis = 2 if height >= 6 else 0
    plot_height = height - num_axis
    # How wide the numbers at the left are is known only once the bounds are; they hardly depend on the width.
    axes = _axes(curves, low, high, max(8, width - 7), log_y, clip)
    if axes is None:
        return _nothing(width, height, glyphs)
    ticks = _y_ticks(axes, plot_height)
    labels = tick_texts([value for _, value in ticks])
    gutter = max(label_cells, *map(len, labels)) + 2 if width >= 24 and labels else 0
    plot_width = width - gutter

    canvas = Canvas(plot_height, plot_width)
    if cursor is not None and low <= cursor <= high:
        column = _column(cursor, axes, plot_width)
        canvas.chars[:, column], canvas.tokens[:, column] = glyphs.vline, "axis"
    for curve in curves:
        draw = _draw_points if curve.points else _draw_line
        draw(canvas, curve, axes, glyphs)

    rows = [canvas.row(y) for y in range(plot_height)]
    if gutter:
        by_row = dict(zip((row for row, _ in ticks), labels, strict=True))
        for y, row in enumerate(rows):
            label, edge = by_row.get(y, ""), glyphs.tick if y in by_row else glyphs.vline
            rows[y] = [(label.rjust(gutter - 2) + " ", "dim"), (edge, "axis"), *row]
    if num_axis:
        rows += _x_axis(axes, plot_width, gutter, x_kind, marks, glyphs)
    return rows


def next_kind(kind: XKind) -> XKind:
    kinds: tuple[XKind, ...] = get_args(XKind)
    return kinds[(kinds.index(kind) + 1) % len(kinds)]


def x_bounds(curves: Sequence[Curve]) -> tuple[float, float]:
    """From the first point of any curve to the last one."""
    ends = [(float(curve.x[0]), float(curve.x[-1])) for curve in curves if len(curve.x)]
    if not ends:
        return 0.0, 1.0
    low, high = min(first for first, _ in ends), max(last for _, last in ends)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def decimate(x: Floats, y: Floats, low: float, high: float, columns: int) -> tuple[Floats, Floats]:
    """Least and greatest y in each of `columns` equal parts of [low, high], joined across empty ones; NaN is a gap."""
    least = np.full(columns, np.nan)
    greatest = np.full(columns, np.nan)
    bounds = _bounds(x, low, high, columns)
    used = np.flatnonzero(bounds[1:] > bounds[:-1])
    if not len(used):
        return least, greatest
    starts, ends = bounds[used], bounds[used + 1]
    inside = y[: ends[-1]]
    with np.errstate(invalid="ignore"):
        least[used] = np.fmin.reduceat(inside, starts)
        greatest[used] = np.fmax.reduceat(inside, starts)
    between = np.arange(used[0], used[-1] + 1)
    after = np.searchsorted(used, between)  # of a used column: itself
    empty = used[after] != between
    if empty.any():
        position, right = between[empty], after[empty]
        left = right - 1
        share = (position - used[left]) / (used[right] - used[left])
        joined = y[ends[left] - 1] * (1 - share) + y[starts[right]] * share
        least[position] = greatest[position] = joined
    return least, greatest


def _axes(curves: Sequence[Curve], low: float, high: float, columns: int, log: bool, clip: bool) -> Axes | None:
    lowest, highest, usual = math.inf, -math.inf, -math.inf
    for curve in curves:
        values = _scaled(curve.y, log)
        least, greatest = decimate(curve.x, values, low, high, columns)
        greatest = greatest[np.isfinite(greatest)]
        if not len(greatest):
            continue
        lowest = min(lowest, float(np.nanmin(least)))
        highest = max(highest, float(greatest.max()))
        share = 97 if len(greatest) >= 20 else 100
        usual = max(usual, float(np.percentile(greatest, share)))
    if lowest == math.inf:
        return None
    if clip and highest > usual + 0.3 * (usual - lowest):
        highest = usual
    spread = highest - lowest
    if spread <= 1e-9 * max(abs(highest), 1e-30):
        spread = max(abs(highest) * 0.02, 1e-9)
        lowest, highest = lowest - spread / 2, highest + spread / 2
    return Axes(low, high, lowest - 0.03 * spread, highest + 0.03 * spread, log)


def _scaled(y: Floats, log: bool) -> Floats:
    with np.errstate(all="ignore"):
        values = np.where(y > 0, np.log10(y), np.nan) if log else y
    return np.where(np.isfinite(values), values, np.nan) if not np.isfinite(values).all() else values


def _y_ticks(axes: Axes, height: int) -> list[tuple[int, float]]:
    most = max(2, height // 2)
    if axes.log:
        values = log_ticks(10**axes.bottom, 10**axes.top, most)
        positions = [math.log10(value) for value in values]
    else:
        values = linear_ticks(axes.bottom, axes.top, most)
        positions = values
    result: dict[int, float] = {}
    for value, position in zip(values, positions, strict=True):
        row = round((axes.top - position) / (axes.top - axes.bottom) * height - 0.5)
        if 0 <= row < height:
            result.setdefault(row, value)
    return sorted(result.items())


def _x_axis(axes: Axes, width: int, gutter: int, x_kind: XKind, marks: Sequence[float], glyphs: Glyphs) -> list[Row]:
    most = max(2, width // 12)
    if x_kind == "time":
        ticks = time_ticks(axes.low, axes.high, most)
        texts = [_clock_text(tick) for tick in ticks]
    else:
        ticks = [tick for tick in linear_ticks(axes.low, axes.high, most) if x_kind != "step" or tick % 1 == 0]
        texts = [count_text(tick) if axes.high >= 10_000 else f"{tick:,.0f}" for tick in ticks]
    line = [glyphs.hline] * width
    styles = ["axis"] * width
    for mark in marks:
        if axes.low <= mark <= axes.high:
            column = _column(mark, axes, width)
            line[column], styles[column] = glyphs.up, "checkpoint"
    numbers = [" "] * width
    name = {"step": "step", "tokens": "tokens", "time": "time"}[x_kind]
    numbers[width - len(name) :] = name[: max(0, width)]
    end = -1
    for tick, text in zip(ticks, texts, strict=True):
        column = _column(tick, axes, width)
        start = min(max(0, column - len(text) // 2), width - len(text))
        if start <= end or start + len(text) > width - len(name) - 1:
            continue
        if line[column] == glyphs.hline:
            line[column] = "┬" if glyphs.braille else "+"
        numbers[start : start + len(text)] = text
        end = start + len(text)
    corner = ("└" if glyphs.braille else "+").rjust(gutter) if gutter else ""
    axis: Row = [(corner, "axis")] if gutter else []
    axis += merged(zip(line, styles, strict=True))
    return [axis, [(" " * gutter + "".join(numbers)[:width], "dim")]]


def _clock_text(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m" if whole % 60 == 0 else f"{whole // 60}m{whole % 60:02d}s"
    if whole < 172_800:
        return f"{whole // 3600}h" if whole % 3600 == 0 else f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole / 86400:g}d"


def _column(x: float, axes: Axes, width: int) -> int:
    return min(width - 1, max(0, int((x - axes.low) / (axes.high - axes.low) * width)))


def _draw_line(canvas: Canvas, curve: Curve, axes: Axes, glyphs: Glyphs) -> None:
    height, width = canvas.num_rows, canvas.num_columns
    across, down = (2, 4) if glyphs.braille else (1, 3)
    least, greatest = decimate(curve.x, _scaled(curve.y, axes.log), axes.low, axes.high, width * across)
    num_dots = height * down
    scale = (num_dots - 1) / (axes.top - axes.bottom)
    if not curve.joined:
        bounds = _bounds(curve.x, axes.low, axes.high, width * across)
        least[bounds[1:] <= bounds[:-1]] = np.nan
    there = np.isfinite(least)
    sparse = not curve.joined and np.count_nonzero(there) * 2 < width * across
    with np.errstate(invalid="ignore"):
        first = np.rint(np.clip((axes.top - greatest) * scale, 0, num_dots - 1))
        last = np.rint(np.clip((axes.top - least) * scale, 0, num_dots - 1))
    # Neighbouring columns meet half way.
    for above, below in ((last[:-1], first[1:]), (last[1:], first[:-1])):
        apart = (below - above > 1) & there[:-1] & there[1:] & curve.joined
        middle = np.floor((above + below) / 2)
        above[apart] = middle[apart]
        below[apart] = middle[apart] + 1
    if sparse:  # single dots are hard to see
        last = np.minimum(last + 1, num_dots - 1)
    dots = np.arange(num_dots)[:, None]
    lit = (dots >= first) & (dots <= last) & there
    cells = lit.reshape(height, down, width, across)
    if glyphs.braille:
        bits = np.einsum("hdwa,da->hw", cells.astype(np.int64), _BRAILLE)
        result = 0x2800 + bits
    else:
        bits = np.einsum("hdw,d->hw", cells[..., 0].astype(np.int64), np.array([1, 2, 4]))
        result = _ASCII_DOTS[bits]
    mask, codes = bits > 0, canvas.chars.view(np.uint32)
    if glyphs.braille:
        # A thin line below shows through; a band gives way, so that the line over it can be followed.
        below = np.where((codes >= 0x2800) & (codes <= 0x28FF), codes - 0x2800, 0)
        result = np.where(_NUM_DOTS[below] <= _THIN_DOTS, result | below, result)
    codes[mask] = result[mask]
    canvas.tokens[mask] = curve.token


def _bounds(x: Floats, low: float, high: float, columns: int) -> NDArray[np.int64]:
    """Where in `x` each of `columns` equal parts of [low, high] begins, and where the last one ends."""
    bounds = np.searchsorted(x, np.linspace(low, high, columns + 1))
    bounds[-1] = np.searchsorted(x, high, side="right")
    return bounds


def _draw_points(canvas: Canvas, curve: Curve, axes: Axes, glyphs: Glyphs) -> None:
    height, width = canvas.num_rows, canvas.num_columns
    values = _scaled(curve.y, axes.log)
    seen = np.isfinite(values) & (curve.x >= axes.low) & (curve.x <= axes.high)
    column = ((curve.x[seen] - axes.low) / (axes.high - axes.low) * width).astype(int).clip(0, width - 1)
    # The cell in which a line's dot of the same value would be.
    num_dots = height * (4 if glyphs.braille else 3)
    dot = np.rint((axes.top - values[seen]) / (axes.top - axes.bottom) * (num_dots - 1)).clip(0, num_dots - 1)
    row = (dot // (num_dots // height)).astype(int)
    canvas.chars[row, column] = curve.mark or glyphs.diamond
    canvas.tokens[row, column] = curve.token


def _nothing(width: int, height: int, glyphs: Glyphs) -> list[Row]:
    text = "no values yet" if width >= 13 else glyphs.ellipsis
    rows: list[Row] = [[(" " * width, "text")] for _ in range(height)]
    rows[height // 2] = [(text.center(width)[:width], "dim")]
    return rows


def sparkline(values: Floats, width: int, glyphs: Glyphs) -> str:
    """All values in one row: the greatest of each column's, in eighths of a cell."""
    if len(values) > width > 0:
        values = decimate(np.arange(len(values), dtype=float), values, 0, len(values) - 1, width)[1]
    return one_row(values.tolist(), width, glyphs.eighths).ljust(max(0, width))
