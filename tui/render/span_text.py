"""An op in words: its name, how long it took, what it moved, what it waited for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.app.console.rows import Row
from penstock.app.runs.ops import action_of
from penstock.storage.files.units import bytes_text, rate_text, seconds_text
from penstock.tui.data.fields import number, objects, whole
from penstock.tui.data.spans import SpanView, printable
from penstock.tui.render.lanes import UnderWay, lane_token, op_name


def span_row(view: SpanView, row: int) -> Row:
    """All that is known about an op, in one row: the most important first."""
    span = view.span(row)
    length_s = span.end_s - span.start_s
    pieces: Row = [
        (op_name(span), f"{lane_token(span.lane)} bold"),
        (f"  {seconds_text(length_s)}", "bold"),
    ]
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
    waited = view.waited(row)
    if not waited:
        return "waited for nothing"
    rows = [found for found in map(view.row_of_id, waited) if found is not None]
    if not rows:
        return f"waited for {len(waited)} earlier ops"
    last = view.span(max(rows, key=lambda other: view.end_s[other]))
    more = f" +{len(waited) - 1}" if len(waited) > 1 else ""
    return f"waited for {op_name(last)} ({last.lane}){more}"


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


def ops_under_way(now: Any, view: SpanView) -> list[UnderWay]:
    """status.json's `now`, without ops whose span has arrived meanwhile and without what is not as it should be."""
    found = []
    recent = slice(max(0, view.num_spans - 4096), view.num_spans)
    for lane in now if isinstance(now, dict) else ():
        for op in objects(now, lane):
            start_s, chunk = number(op, "start_s"), whole(op, "chunk")
            if start_s is not None and (np.abs(view.start_s[recent] - start_s) < 2e-6).any():
                continue
            name, block = (printable(str(op.get(key, ""))) for key in ("op", "block"))
            found.append(UnderWay(str(lane), name, block, -1 if chunk is None else chunk, start_s))
    return found[:100]
