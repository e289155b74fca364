"""What the Timeline says about a step: its critical path, why lanes were idle, its ops, one op in full."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.app.rows import Glyphs, Row, exactly
from penstock.storage.units import bytes_text, rate_text, seconds_text
from penstock.tui.data.critical import Blockers, IdleTotal, StepAnalysis
from penstock.tui.data.spans import Ints, SpanView
from penstock.tui.render.lanes import lane_token, op_name
from penstock.tui.render.ticks import fit

NOT_RECORDED = "This run did not record what its ops waited for: no critical path, and no reasons for idle lanes."
_MOST_WAITED = 12


def path_row(view: SpanView, analysis: StepAnalysis) -> Row:
    """The critical path's seconds by lane, longest first."""
    if not analysis.recorded:
        return [(NOT_RECORDED, "dim")]
    length_s = analysis.window.end_s - analysis.window.start_s
    row: Row = [("critical path ", "critical")]
    for lane, seconds in analysis.path_by_lane(view).items():
        row += [
            (f" {lane}", f"{lane_token(lane)} bold"),
            (f" {seconds_text(seconds)} {seconds / length_s:.0%} ", "text"),
        ]
    if analysis.gap_s > 0:
        row.append((f"  between ops {seconds_text(analysis.gap_s)} {analysis.gap_s / length_s:.0%}", "dim"))
    return row


def idle_rows(
    view: SpanView, analysis: StepAnalysis, width: int, height: int, lane: str | None, glyphs: Glyphs
) -> list[Row]:
    """How long each lane had nothing to do, and what it waited for; the selected lane's causes in full."""
    window = analysis.window
    length_s = window.end_s - window.start_s
    rows: list[Row] = [path_row(view, analysis)]
    lanes = list(view.lanes)
    spare = height - 1 - len(lanes)
    for name in lanes:
        idle_s = max(0.0, length_s - view.busy_s(name, window.start_s, window.end_s))
        row: Row = [
            (f"{fit(name, 11, glyphs.ellipsis)}", f"{lane_token(name)}{' reverse' if name == lane else ''}"),
            (f" idle {seconds_text(idle_s):>8} {idle_s / length_s:4.0%}  ", "text"),
        ]
        totals = analysis.idle_totals(view, name) if analysis.recorded else []
        if name == lane and spare >= 2 and len(totals) > 1:
            rows.append(row)
            shown = totals[: max(1, spare - 1)]
            rows += [
                [("             ", "text"), (f"{seconds_text(total.seconds):>8} ", "bold"), (cause_text(total), "text")]
                for total in shown
            ]
            spare -= len(shown)
            continue
        for total in totals:
            text = f"{seconds_text(total.seconds)} "
            if sum(len(piece) for piece, _ in row) + len(text) + 12 > width:
                break
            row += [(text, "bold"), (f"{cause_text(total)}   ", "dim")]
        rows.append(row)
    return [exactly(row, width) for row in rows[:height]]


def cause_text(total: IdleTotal) -> str:
    if total.kind == "waiting":
        blocks = total.blocks
        where = blocks[0] if len(blocks) == 1 else f"{blocks[0]} and {len(blocks) - 1} more"
        return f"waiting for {total.op} of {where}"
    return {
        "starting": "starting, with nothing missing",
        "for no op": "for no op: not queued yet, or its thread not running",
        "no more work": "no more work",
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
    room = height - 1
    at = int(np.flatnonzero(rows == selected)[0]) if selected is not None and (rows == selected).any() else 0
    first = min(max(0, at - room // 2), max(0, len(rows) - room))
    for row in rows[first : first + room].tolist():
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


def inspector_rows(view: SpanView, row: int | None, analysis: StepAnalysis | None, width: int) -> list[Row]:
    """One op in full: what it did, what it waited for and how long, and who waited for it."""
    if row is None:
        return [exactly([("no op selected:  .  and  ,  go along a lane", "dim")], width)]
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
    if analysis is not None and analysis.recorded:
        on_path = sum(part.end_s - part.start_s for part in analysis.path if part.row == row)
        if on_path:
            rows.append([("critical ", "critical"), (f"{seconds_text(on_path)} of the step's time", "text")])
        rows += _waiting_rows(view, row)
    elif span.waited is None:
        rows.append([("what it waited for is not recorded", "dim")])
    return [exactly(piece, width) for piece in rows]


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
    if view.waited(row) == ():
        rows.append([("waited   ", "dim"), ("for no op", "text")])
    op_id = int(view.id[row])
    later = np.flatnonzero(view.start_s >= view.end_s[row] - 1e-5).tolist()
    followers = [other for other in later if op_id in (view.waited(other) or ())]
    for i, other in enumerate(followers[:_MOST_WAITED]):
        rows.append(_other_row(view, other, "held up" if i == 0 else ""))
    return rows


def _other_row(view: SpanView, row: int, label: str, about: str = "") -> Row:
    """An op that has to do with the selected one."""
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
    found = np.ones(len(rows), bool)
    for i, word in enumerate(words):
        hit = lanes[i][view.lane[rows]] | ops[i][view.op[rows]] | blocks[i][view.block[rows]]
        chunk = word.strip("[]")
        if chunk.isdigit() and len(chunk) < 10:
            hit |= view.chunk[rows] == int(chunk)
        found &= hit
    return rows[found]
