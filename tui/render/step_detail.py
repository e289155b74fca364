"""Ops in words; and of a step its critical path, why lanes were idle, its ops, and one op in full."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from penstock.app.console.rows import Glyphs, Row, beside, exactly
from penstock.app.runs.ops import action_of, location_text, op_text
from penstock.storage.files.units import bytes_text, rate_text, seconds_text
from penstock.tui.data.critical import Blockers, IdleTotal, StepAnalysis
from penstock.tui.data.run_data import UnderWay
from penstock.tui.data.spans import Ints, SpanView
from penstock.tui.render.lanes import SHORT, lane_token, op_name
from penstock.tui.render.ticks import fit


def span_row(view: SpanView, row: int) -> Row:
    """All that is known about an op, in one row: the most important first."""
    span = view.span(row)
    length_s = span.end_s - span.start_s
    pieces: Row = [(op_name(span), f"{lane_token(span.lane)} bold"), (f"  {seconds_text(length_s)}", "bold")]
    if span.bytes:
        rate = f"  {rate_text(span.bytes / length_s)}" if length_s > 0 else ""
        pieces.append((f"  {bytes_text(span.bytes)}{rate}", "text"))
    pieces.append((f"  {waited_text(view, row)}", "text"))
    pieces.append((f"  step {span.step}, from {span.start_s:.6f} s", "dim"))
    if (action := action_of(span.op)) is not None:
        pieces.append((f"  {action.says}", "dim"))
    return pieces


def waited_text(view: SpanView, row: int) -> str:
    """What an op waited for: of the ops that were not done when its lane reached it, the one that ended last."""
    waited, awaited = view.waited(row), awaited_text(view, row)
    if not waited:
        return f"waited for {awaited or 'nothing'}"
    rows = [result for result in map(view.row_of_id, waited) if result is not None]
    if not rows:
        return f"waited for {len(waited)} earlier ops" + (f" and {awaited}" if awaited else "")
    last = view.span(max(rows, key=lambda other: view.end_s[other]))
    more = f" +{len(waited) - 1}" if len(waited) > 1 else ""
    return f"waited for {op_name(last)} ({last.lane}){more}" + (f", then {awaited}" if awaited else "")


def awaited_text(view: SpanView, row: int) -> str:
    """The other GPUs that an op waited for as it ran, the one that took longest first."""
    ordered = sorted(view.span(row).awaited, key=lambda pair: -pair[1])
    return ", ".join(f"GPU {gpu} ({seconds_text(seconds)})" for gpu, seconds in ordered)


def now_row(under_way: Sequence[UnderWay]) -> Row:
    """What is under way, compute first."""
    ops = sorted(under_way, key=lambda op: op.lane != "compute")
    return [("now", "dim"), *((f"  {op_name(op)}", lane_token(op.lane)) for op in ops)]


def ops_at(view: SpanView, under_way: Sequence[UnderWay], time_s: float) -> list[UnderWay]:
    """What ran at a moment, by the spans and by what has not ended yet."""
    rows = np.flatnonzero((view.start_s <= time_s) & (view.end_s > time_s))
    spans = [view.span(int(row)) for row in rows[:100]]
    ended = [UnderWay(span.lane, span.op, span.block, span.chunk, span.start_s) for span in spans]
    return ended + [op for op in under_way if op.start_s is None or op.start_s <= time_s]


def without_ended(now: Sequence[UnderWay], view: SpanView) -> list[UnderWay]:
    """The ops under way but for those whose span has arrived meanwhile."""
    starts = view.start_s[-4096:]
    return [op for op in now if op.start_s is None or not (np.abs(starts - op.start_s) < 2e-6).any()]


_MOST_WAITED = 12
_LANE_CELLS = 11
_TWO_COLUMNS = 110
_GAP = 2
_LONG_NAMES = 76
_OUTLINE_ROWS = 4


def path_row(view: SpanView, analysis: StepAnalysis) -> Row:
    row: Row = [("critical path ", "critical")]
    for lane, seconds in analysis.path_by_lane(view).items():
        row += [
            (f" {lane}", f"{lane_token(lane)} bold"),
            (f" {seconds_text(seconds)} {seconds / analysis.length_s:.0%} ", "text"),
        ]
    if analysis.gap_s > 0:
        row.append((f"  between ops {seconds_text(analysis.gap_s)} {analysis.gap_s / analysis.length_s:.0%}", "dim"))
    return row


def path_stretches(view: SpanView, analysis: StepAnalysis) -> list[tuple[str, str, float]]:
    """The critical path in order: (lane, ops of one name from the first to the last, seconds)."""
    result = []
    for (lane, op), group in groupby(analysis.path_ops, lambda part: (int(view.lane[part[0]]), int(view.op[part[0]]))):
        rows, seconds = zip(*group, strict=True)
        ends = [location_text(view.blocks[view.block[row]], int(view.chunk[row])) for row in (rows[0], rows[-1])]
        result.append((view.lanes[lane], f"{view.ops[op]} {' to '.join(dict.fromkeys(ends))}", sum(seconds)))
    return result


def idle_rows(
    view: SpanView, analysis: StepAnalysis, width: int, height: int, lane: str | None, glyphs: Glyphs
) -> list[Row]:
    """The critical path, what the compute lane waited for, and the same of the selected lane; of the others a figure.

    Where there is room the path's ops stand beside it, or below, in their order.
    """
    if width >= _TWO_COLUMNS:
        left = (width - _GAP) // 2
        waits = _waiting_part(view, analysis, left, height - 1, lane, glyphs)
        path = _path_outline(view, analysis, width - left - _GAP, height - 1, glyphs)
        waits += [[]] * (len(path) - len(waits))
        rows = beside([exactly(row, left) for row in waits], path)
    else:
        rows = _waiting_part(view, analysis, width, height - 1, lane, glyphs)
        if height - 2 - len(rows) >= _OUTLINE_ROWS:
            rows += [[], *_path_outline(view, analysis, width, height - 2 - len(rows), glyphs)]
    return [exactly(row, width) for row in [path_row(view, analysis), *rows][:height]]


def _waiting_part(
    view: SpanView, analysis: StepAnalysis, width: int, height: int, lane: str | None, glyphs: Glyphs
) -> list[Row]:
    first = "compute" if "compute" in view.lanes else next(iter(view.lanes), "")
    shown = [first, *([lane] if lane is not None and lane in view.lanes and lane != first else [])]
    parts = [_waits(view, analysis, name, name == lane, glyphs) for name in shown]
    others = _others(analysis, [name for name in view.lanes if name not in shown], width)
    available = max(0, height - bool(others))
    rows = (
        parts[0][: max(available - sum(map(len, parts[1:])), available - available // 2)]
        if len(parts) > 1
        else parts[0][:available]
    )
    rows += [row for part in parts[1:] for row in part][: available - len(rows)]
    return [*rows, exactly(others, width, glyphs.ellipsis)] if others else rows


def _waits(view: SpanView, analysis: StepAnalysis, lane: str, selected: bool, glyphs: Glyphs) -> list[Row]:
    idle_s = analysis.idle_s(lane)
    name = fit(lane, _LANE_CELLS, glyphs.ellipsis)
    rows: list[Row] = [
        [
            (name, f"{lane_token(lane)}{' reverse' if selected else ' bold'}"),
            (f" idle {seconds_text(idle_s)}, {idle_s / analysis.length_s:.0%} of the step", "text"),
        ]
    ]
    for total in analysis.idle_totals(view, lane):
        row: Row = [(" " * (_LANE_CELLS + 1), "text"), (f"{seconds_text(total.seconds):>8}", "bold")]
        rows.append([*row, (f"  {cause_text(total)}", "text")])
    return rows


def _others(analysis: StepAnalysis, lanes: Sequence[str], width: int) -> Row:
    row: Row = [("idle", "dim")]
    for name in lanes:
        label = SHORT.get(name, name) if width < _LONG_NAMES else name
        row += [("  " + label, lane_token(name)), (f" {analysis.idle_s(name) / analysis.length_s:.0%}", "text")]
    return row if lanes else []


def _path_outline(view: SpanView, analysis: StepAnalysis, width: int, height: int, glyphs: Glyphs) -> list[Row]:
    stretches = path_stretches(view, analysis)
    rows: list[Row] = [[("critical path, in order", "critical")]]
    shown = stretches if len(stretches) < height else stretches[: max(0, height - 2)]
    for lane, ops, seconds in shown:
        text = fit(ops, max(0, width - _LANE_CELLS - 11), glyphs.ellipsis)
        name = (fit(lane, _LANE_CELLS + 1), lane_token(lane))
        rows.append([name, (f"{seconds_text(seconds):>8}  ", "bold"), (text, "text")])
    if len(shown) < len(stretches):
        rows.append([(f"{' ' * (_LANE_CELLS + 1)}and {len(stretches) - len(shown)} more; c steps through them", "dim")])
    return rows


def cause_text(total: IdleTotal) -> str:
    """Why a lane was idle, as one would say it."""
    if total.kind == "waiting":
        more = len(total.blocks) - 1
        others = f" and of {more} more block{'s' * (more > 1)}" if more else ""
        return f"waited for {op_text(total.op, total.blocks[0], -1)}{others}"
    return {
        "starting": "ready, about to start",
        "for no op": "not scheduled yet",
        "no more work": "queue was empty",
    }[total.kind]


def op_rows(
    view: SpanView,
    rows: Ints,
    selected: int | None,
    critical: set[int],
    origin_s: float,
    width: int,
    height: int,
    glyphs: Glyphs,
) -> list[Row]:
    """A list of ops, the selected one in its middle."""
    if width < 1 or height < 1:
        return []
    name_cells = max(12, width - 33)
    head = f"  {'from':>9} {'took':>8}  {fit('op', name_cells, '')} {'rate':>10}"
    shown: list[Row] = [[(fit(head, width, ""), "dim")]]
    available = height - 1
    at = int(np.flatnonzero(rows == selected)[0]) if selected is not None and (rows == selected).any() else 0
    first = min(max(0, at - available // 2), max(0, len(rows) - available))
    for row in rows[first : first + available].tolist():
        span = view.span(row)
        length_s = span.end_s - span.start_s
        rate = rate_text(span.bytes / length_s) if span.bytes and length_s > 0 else ""
        mark = glyphs.diamond if row in critical else " "
        begin = f"{mark} {span.start_s - origin_s:9.4f} {seconds_text(length_s):>8}  "
        token = "selected" if row == selected else ""
        cells: Row = [
            (begin, token or ("critical" if row in critical else "text")),
            (fit(op_name(span), name_cells, glyphs.ellipsis), token or lane_token(span.lane)),
            (f" {rate:>10}", token or "dim"),
        ]
        shown.append(exactly(cells, width))
    if not len(rows):
        shown.append([(fit("none", width, ""), "dim")])
    return shown


def inspector_rows(view: SpanView, row: int | None, analysis: StepAnalysis, width: int) -> list[Row]:
    """One op in full: what it did, what it waited for and how long, and who waited for it."""
    if row is None:
        return [exactly([("no op selected:  .  and  ,  step along a lane", "dim")], width)]
    span = view.span(row)
    length_s = span.end_s - span.start_s
    rows: list[Row] = [
        [(op_name(span), f"{lane_token(span.lane)} bold")],
        [("lane     ", "dim"), (span.lane, lane_token(span.lane)), (f"   step {span.step}", "text")],
        [
            ("took     ", "dim"),
            (seconds_text(length_s), "bold"),
            (f"   {span.start_s:.6f} to {span.end_s:.6f} s", "dim"),
        ],
    ]
    if span.bytes:
        rate = f"   {rate_text(span.bytes / length_s)}" if length_s > 0 else ""
        rows.append([("moved    ", "dim"), (f"{bytes_text(span.bytes)}{rate}", "text")])
    on_path = sum(seconds for other, seconds in analysis.path_ops if other == row)
    if on_path:
        rows.append([("critical ", "critical"), (f"{seconds_text(on_path)} of the step's time", "text")])
    return [exactly(piece, width) for piece in rows + _waiting_rows(view, row)]


def _waiting_rows(view: SpanView, row: int) -> list[Row]:
    blockers = Blockers(view)
    blocker = blockers.blocker(row)
    rows: list[Row] = []
    if blocker is not None:
        gap_s = max(0.0, float(view.start_s[row] - view.end_s[blocker]))
        rows.append(_other_row(view, blocker, "after", f"   {seconds_text(gap_s)} later  (b)"))
    waited = sorted(blockers.waited(row), key=lambda other: -view.end_s[other])
    for i, other in enumerate(waited[:_MOST_WAITED]):
        took_s = float(view.end_s[other] - view.start_s[other])
        rows.append(_other_row(view, other, "waited" if i == 0 else "", f"   took {seconds_text(took_s)}"))
    if awaited := awaited_text(view, row):
        rows.append([("as it ran", "dim"), (f" waited for {awaited}", "text")])
    if not view.waited(row):
        rows.append([("waited   ", "dim"), ("for nothing", "text")])
    op_id = int(view.id[row])
    later = np.flatnonzero(view.start_s >= view.end_s[row] - 1e-5).tolist()
    followers = [other for other in later if op_id in view.waited(other)]
    for i, other in enumerate(followers[:_MOST_WAITED]):
        rows.append(_other_row(view, other, "held up" if i == 0 else ""))
    return rows


def _other_row(view: SpanView, row: int, label: str, about: str = "") -> Row:
    span = view.span(row)
    return [(f"{label:<9}", "dim"), (op_name(span), lane_token(span.lane)), (about, "dim")]


def matching_rows(view: SpanView, rows: Sequence[int] | Ints, text: str) -> Ints:
    """Those whose lane, op, block or chunk hold every word of `text`."""
    words = text.lower().split()
    lanes, ops, blocks = (
        np.array([[word in name.lower() for name in names] or [False] for word in words], dtype=bool)
        for names in (view.lanes, list(view.ops), list(view.blocks))
    )
    rows = np.asarray(rows, dtype=np.int64)
    result = np.ones(len(rows), bool)
    for i, word in enumerate(words):
        hit = lanes[i][view.lane[rows]] | ops[i][view.op[rows]] | blocks[i][view.block[rows]]
        chunk = word.strip("[]")
        if chunk.isdigit() and len(chunk) < 10:
            hit |= view.chunk[rows] == int(chunk)
        result &= hit
    return rows[result]
