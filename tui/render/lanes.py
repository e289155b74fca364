"""The stream timeline: a row per lane, each cell showing how much of its time the lane was busy.

Where ops are wide enough they become boxes with their names. Nothing is drawn busy that was not: a cell that a span
merely touches shows the share that the span took.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.app.console.rows import Glyphs, Row, exactly
from penstock.app.runs.lanes import LANES
from penstock.app.runs.ops import op_text
from penstock.storage.files.units import rate_text
from penstock.tui.data.run_data import UnderWay
from penstock.tui.data.spans import Busy, Floats, Ints, Span, SpanView, StepWindow
from penstock.tui.render.lane_cells import BOX_CELLS, Canvas, InView, draw_boxes, draw_outline, has_parts, history
from penstock.tui.render.ticks import fit, linear_ticks, tick_texts

SHORT = {"nvme_read": "nvme r", "optimizer": "optim", "nvme_write": "nvme w"}
_IDLE_SHARE = 1 / 16
"""A compute cell less busy than this, while another lane works, is shown as a stall."""
_TILED_STEPS = 200
_TALLEST = 6
_PRIORITY = ("compute", "h2d", "nvme_read", "d2h", "optimizer", "nvme_write")
"""Lanes that are taller where rows are left over."""
_NOW_CELLS = 30


def op_name(op: Span | UnderWay) -> str:
    """Its op, block and chunk, as everywhere."""
    return op_text(op.op, op.block, op.chunk)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneScene:
    view: SpanView
    start_s: float
    end_s: float
    """The window in view, in the spans' clock."""
    until_s: float | None = None
    """Nothing is known behind this moment; None where all of the window has passed."""
    origin_s: float = 0.0
    """What the time axis calls 0."""
    steps: Sequence[StepWindow] = ()
    """Steps whose borders are marked, in order of time."""
    under_way: Sequence[UnderWay] = ()
    now: Sequence[UnderWay] | None = None
    """What runs at the right edge, named behind wide timelines; None: no room is kept for it."""
    predicted: SpanView | None = None
    """The forecast's step, counted from its start."""
    critical: Mapping[str, Busy] | None = None
    """Lane -> stretches of the critical path, which are outlined; None: it is not known."""
    lane: str | None = None
    row: int | None = None
    cursor_s: float | None = None
    title: str = ""
    history: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Lane -> a figure of each of the last steps, whose course stands behind the lane; none: there is no room kept."""
    status: str = ""
    info: Row = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Layout:
    """Which rows and columns show what."""

    label_cells: int
    num_cells: int
    share_cells: int
    history_cells: int
    now_cells: int
    lanes: tuple[str, ...]
    bar_rows: tuple[int, ...]
    predicted_row: bool
    title_row: bool
    band_row: bool
    axis_row: bool
    info_row: bool

    def lane_at(self, y: int) -> str | None:
        end = self.title_row + self.band_row
        for lane, bar_rows in zip(self.lanes, self.bar_rows, strict=True):
            begin, end = end, end + bar_rows + self.predicted_row
            if begin <= y < end:
                return lane
        return None

    def cell_at(self, x: int) -> int | None:
        """The cell of the timeline in column `x`."""
        cell = x - self.label_cells
        return cell if 0 <= cell < self.num_cells else None


def layout(width: int, height: int, scene: LaneScene) -> Layout:
    """Where things go: titles and axes first fall away, then the lanes least busy, then the timeline's margins.

    Words on what is pointed at have the axis's place where there is room for one of the two.
    """
    lanes = list(scene.view.lanes)
    title = height >= 3
    band = height >= len(lanes) + 2 and has_parts(scene.view)
    pointed = scene.row is not None or scene.cursor_s is not None
    left = height - len(lanes) - title - band
    info = left >= 2 or (left >= 1 and pointed)
    axis = left >= 1 + info
    available = height - title - band - axis - info
    if available < len(lanes):
        busiest = sorted(lanes, key=lambda lane: -scene.view.busy_s(lane, scene.start_s, scene.end_s))
        kept = {*busiest[: max(1, available)]}
        lanes = [lane for lane in lanes if lane in kept]
    each = max(1, available // len(lanes))
    predicted = scene.predicted is not None and each >= 2
    label = 11 if width >= 64 else 7 if width >= 36 else 0
    share = 5 if width >= 16 else 0
    if scene.predicted is not None and not predicted and width >= 60:
        share += 6
    each = min(_TALLEST, max(1, each - predicted))
    left = max(0, available - len(lanes) * (each + predicted)) if each < _TALLEST else 0
    tall = set(sorted(lanes, key=lambda lane: [*_PRIORITY, lane].index(lane))[:left])
    if width >= 100:
        share = max(share, 11) if each > 1 else share + 11
    now = _NOW_CELLS if width >= 150 and scene.now is not None else 0
    history = (9 if width < 110 else 13 if width < 170 else 25) if scene.history and width >= 70 else 0
    return Layout(
        label_cells=label,
        num_cells=max(1, width - label - share - history - now),
        share_cells=share,
        history_cells=history,
        now_cells=now,
        lanes=tuple(lanes),
        bar_rows=tuple(each + (lane in tall) for lane in lanes),
        predicted_row=predicted,
        title_row=title,
        band_row=band,
        axis_row=axis,
        info_row=info,
    )


def lanes_rows(width: int, height: int, scene: LaneScene, glyphs: Glyphs) -> list[Row]:
    """At most `height` rows of exactly `width` cells."""
    if width < 1 or height < 1:
        return []
    grid = layout(width, height, scene)
    edges = np.linspace(scene.start_s, scene.end_s, grid.num_cells + 1)
    known = scene.end_s if scene.until_s is None else min(scene.until_s, scene.end_s)
    busy = {lane: _busy(scene, lane, known) for lane in grid.lanes}
    covered = {lane: busy[lane].coverage(edges) for lane in grid.lanes}
    length_s = known - scene.start_s
    shares = {lane: busy[lane].between(scene.start_s, known) / length_s if length_s > 0 else 0.0 for lane in grid.lanes}
    bound = max(shares, key=lambda lane: shares[lane])
    moved = scene.view.bytes_by_lane(scene.start_s, known) if grid.share_cells >= 11 else {}
    in_window = _rows_with_boxes(scene, BOX_CELLS * float(edges[1] - edges[0]))
    in_view = InView(scene.view, edges, wanted=has_parts(scene.view))
    moving = sum(covered.values())
    rows: list[Row] = []
    if grid.title_row:
        rows.append(_title(width, scene, bound, shares))
    if grid.band_row:
        canvas = Canvas(1, grid.num_cells)
        in_view.draw_band(canvas, glyphs)
        rows.append([(fit("phase", grid.label_cells, ""), "dim"), *canvas.row(0)])
    for lane, bar_rows in zip(grid.lanes, grid.bar_rows, strict=True):
        canvas = Canvas(bar_rows, grid.num_cells)
        token = lane_token(lane)
        coverage = covered[lane]
        _draw_marks(canvas, scene, edges, glyphs)
        if lane == "compute":
            stalled = (coverage < _IDLE_SHARE) & (moving >= _IDLE_SHARE) & (edges[1:] <= known)
            canvas.put(bar_rows - 1, stalled, "╌" if glyphs.braille else "_", "stall")
        _draw_bars(canvas, coverage, token, glyphs)
        in_view.draw_marks(canvas, lane, coverage)
        mine = in_window[scene.view.lane[in_window] == scene.view.lanes.index(lane)]
        critical = _critical_cells(scene, lane, edges, coverage)
        draw_boxes(canvas, scene.view, mine, edges, lane, glyphs)
        _draw_selection(canvas, scene, lane, edges)
        draw_outline(canvas, critical, lane, glyphs)
        forecast = _forecast(scene, lane, edges, known) if scene.predicted is not None else None
        margin = _margin(grid, scene, shares[lane], moved.get(lane, 0), forecast, known)
        name = lane if grid.label_cells >= 11 else SHORT.get(lane, lane)
        more = " reverse" if lane == scene.lane else " bold" if lane == bound and shares[bound] > 0 else ""
        for y in range(bar_rows):
            first = y == 0
            label = fit(name if first else "", grid.label_cells, glyphs.ellipsis)
            rows.append(
                [
                    (label, token + more if first else "text"),
                    *canvas.row(y),
                    *exactly(margin[y] if y < len(margin) else [], grid.share_cells),
                    (history(scene.history, lane, grid.history_cells, glyphs) if first else "", "raw"),
                    *(_now(grid, scene, lane, glyphs) if first else []),
                ]
            )
        if grid.predicted_row and forecast is not None:
            rows.append(_predicted_row(grid, forecast, edges, glyphs))
    if grid.axis_row:
        rows.append(_axis(grid, scene, edges, glyphs))
    if grid.info_row:
        rows.append(scene.info)
    return [exactly(row, width) for row in rows[:height]]


def lane_token(lane: str) -> str:
    return f"lane.{lane}" if lane in LANES else "lane.other"


def _busy(scene: LaneScene, lane: str, known_s: float) -> Busy:
    busy = scene.view.busy_of(lane)
    starts = [op.start_s for op in scene.under_way if op.lane == lane and op.start_s is not None]
    starts = [start_s for start_s in starts if start_s < known_s]
    return busy.merge(np.array(starts), np.full(len(starts), known_s)) if starts else busy


def _rows_with_boxes(scene: LaneScene, length_s: float) -> Ints:
    """The rows in view, of lanes that have an op as long as that: no other draws boxes."""
    view = scene.view
    seen = (view.end_s > scene.start_s) & (view.start_s < scene.end_s)
    lanes = np.unique(view.lane[seen & (view.end_s - view.start_s >= length_s)])
    rows = np.flatnonzero(seen & np.isin(view.lane, lanes)) if len(lanes) else np.zeros(0, np.int64)
    return rows[np.argsort(view.start_s[rows], kind="stable")]


def _critical_cells(scene: LaneScene, lane: str, edges: Floats, coverage: Floats) -> NDArray[np.bool_]:
    path = scene.critical.get(lane) if scene.critical is not None else None
    if path is None:
        return np.zeros(len(coverage), bool)
    critical = path.coverage(edges)
    return np.asarray((critical >= coverage / 2) & (critical > 0))


def _draw_marks(canvas: Canvas, scene: LaneScene, edges: Floats, glyphs: Glyphs) -> None:
    cells = dict.fromkeys(_borders(scene, edges), "axis")
    if scene.cursor_s is not None and edges[0] <= scene.cursor_s < edges[-1]:
        cells[_cell(scene.cursor_s, edges)] = "accent"
    for cell, token in cells.items():
        canvas.chars[:, cell] = "┊" if glyphs.braille else ":"
        canvas.tokens[:, cell] = token


def _borders(scene: LaneScene, edges: Floats) -> dict[int, int]:
    """Cell -> the step that ends in it; crowded borders are left out."""
    ends = [step for step in scene.steps if edges[0] <= step.end_s < edges[-1]]
    if len(ends) > (len(edges) - 1) // 6:
        return {}
    return {_cell(step.end_s, edges): step.step for step in ends}


def _cell(time_s: float, edges: Floats) -> int:
    return int(np.clip(np.searchsorted(edges, time_s, side="right") - 1, 0, len(edges) - 2))


def _draw_bars(canvas: Canvas, coverage: Floats, token: str, glyphs: Glyphs) -> None:
    """Coverage in eighths of a cell, rising over all rows of the lane."""
    levels = np.rint(coverage * 8 * canvas.num_rows).astype(int)
    characters = np.array(list(glyphs.eighths))
    for y in range(canvas.num_rows):
        eighths = np.clip(levels - 8 * (canvas.num_rows - 1 - y), 0, 8)
        filled = eighths > 0
        canvas.chars[y, filled] = characters[eighths[filled]]
        canvas.tokens[y, filled] = token


def _draw_selection(canvas: Canvas, scene: LaneScene, lane: str, edges: Floats) -> None:
    view, row = scene.view, scene.row
    if row is None or row >= view.num_spans or view.lanes[view.lane[row]] != lane:
        return
    start_s, end_s = float(view.start_s[row]), float(view.end_s[row])
    if end_s < edges[0] or start_s > edges[-1]:
        return
    a, b = _cell(start_s, edges), _cell(max(start_s, end_s - 1e-12), edges)
    canvas.tokens[:, a : b + 1] = "selected"


class _Forecast(NamedTuple):
    busy_s: Floats
    """Of each cell."""
    share: float


def _forecast(scene: LaneScene, lane: str, edges: Floats, known_s: float) -> _Forecast:
    """The forecast's step, laid from the beginning of each step in view."""
    assert scene.predicted is not None
    busy = scene.predicted.busy_of(lane)
    covered = np.zeros(len(edges) - 1)
    spans = [(w.start_s, w.end_s) for w in scene.steps if w.end_s > edges[0] and w.start_s < edges[-1]][-_TILED_STEPS:]
    if scene.steps and scene.steps[-1].end_s < known_s:
        spans.append((scene.steps[-1].end_s, known_s))
    length_s = 0.0
    for begin, end in spans:
        within = np.clip(edges, begin, end)
        covered += np.diff(busy.until(within - begin))
        length_s += float(within[-1] - within[0])
    return _Forecast(covered, float(covered.sum()) / length_s if length_s > 0 else 0.0)


def _predicted_row(grid: Layout, forecast: _Forecast, edges: Floats, glyphs: Glyphs) -> Row:
    levels = np.rint(forecast.busy_s / np.diff(edges) * 8).astype(int).clip(0, 8)
    text = "".join(glyphs.eighths[level] for level in levels)
    label = fit(" predicted" if grid.label_cells >= 11 else " plan", grid.label_cells)
    share = f" {forecast.share:4.0%}" if grid.share_cells else ""
    return [(label, "predicted"), (text, "predicted"), (fit(share, grid.share_cells, ""), "predicted")]


def _margin(
    grid: Layout, scene: LaneScene, share: float, num_bytes: int, forecast: _Forecast | None, known_s: float
) -> list[Row]:
    row: Row = [(f" {share:4.0%}", "bold" if share >= 0.5 else "text")]
    if forecast is not None and not grid.predicted_row and grid.share_cells >= 11:
        row.append((f" {forecast.share:4.0%}p", "predicted"))
    seconds = share * (known_s - scene.start_s)
    if not num_bytes or seconds <= 0:
        return [row]
    rate: Row = [(f" {rate_text(num_bytes / seconds):>10}", "dim")]
    return [row, rate] if min(grid.bar_rows) > 1 else [[*row, *rate]]


def _now(grid: Layout, scene: LaneScene, lane: str, glyphs: Glyphs) -> Row:
    ops = [op for op in scene.now or () if op.lane == lane]
    more = f" +{len(ops) - 1}" if len(ops) > 1 else ""
    text = f" {glyphs.arrow} {op_name(ops[0])}{more}" if ops else ""
    return [(fit(text, grid.now_cells, glyphs.ellipsis), "dim")]


def _title(width: int, scene: LaneScene, bound: str, shares: Mapping[str, float]) -> Row:
    row: Row = [(scene.title, "title")]
    if shares[bound] > 0:
        row += [("  bound by ", "dim"), (bound, f"{lane_token(bound)} bold"), (f" {shares[bound]:.0%}", "bold")]
    used = sum(len(text) for text, _ in row)
    return [*row, (scene.status.rjust(width - used) if len(scene.status) + used + 2 <= width else "", "dim")]


def _axis(grid: Layout, scene: LaneScene, edges: Floats, glyphs: Glyphs) -> Row:
    canvas = Canvas(1, grid.num_cells)
    low, high = scene.start_s - scene.origin_s, scene.end_s - scene.origin_s
    ticks = linear_ticks(low, high, max(1, grid.num_cells // 12))
    scale, unit = (1.0, "s") if high - low >= 0.05 or abs(high) >= 1 else (1e3, "ms")
    for tick, text in zip(ticks, tick_texts([tick * scale for tick in ticks]), strict=True):
        cell = _cell(tick + scene.origin_s, edges)
        if cell + len(text) + 2 <= grid.num_cells:
            canvas.write(0, cell, f"{glyphs.vline}{text}", "axis")
    borders = _borders(scene, edges)
    for cell, step in borders.items():
        text = f"{glyphs.vline}step {step + 1}"
        crowded = any(cell < other < cell + len(text) + 1 for other in borders)
        if not crowded and cell + len(text) <= grid.num_cells:
            canvas.write(0, cell, text + " ", "bold")
        elif cell >= len(text) + 1 and cell + len(text) > grid.num_cells:
            canvas.write(0, cell - len(text), f" step {step}{glyphs.vline}", "bold")
    if scene.cursor_s is not None and edges[0] <= scene.cursor_s < edges[-1]:
        canvas.write(0, _cell(scene.cursor_s, edges), glyphs.up, "accent")
    return [
        (fit(unit.rjust(grid.label_cells - 1) if grid.label_cells else "", grid.label_cells, ""), "axis"),
        *canvas.row(0),
        (_heads(grid), "axis"),
    ]


def _heads(grid: Layout) -> str:
    rates = "while busy".rjust(11) if grid.share_cells >= 16 and not grid.predicted_row else ""
    share = ("busy".rjust(min(5, grid.share_cells)) + rates).ljust(grid.share_cells)
    return share + "per step".rjust(grid.history_cells) if grid.history_cells else share
