"""Bars, and curves of eighth blocks, in one row."""

from __future__ import annotations

import math
from collections.abc import Sequence

from penstock.app.console.rows import Glyphs, Row, merged


def bar(width: int, share: float | None, mark: float | None, glyphs: Glyphs, token: str) -> Row:
    """A bar of `width` cells filled to `share` of it, with a mark at `mark`; both 0..1, None where unknown."""
    if width < 1:
        return []
    filled = 0 if share is None or not math.isfinite(share) else round(min(1.0, max(0.0, share)) * width)
    cells = [(glyphs.bar_full, token)] * filled + [(glyphs.bar_empty, "axis")] * (width - filled)
    if mark is not None and math.isfinite(mark):
        position = min(width - 1, max(0, math.ceil(mark * width) - 1))
        peak = "┃" if glyphs.braille else glyphs.bar_peak
        cells[position] = (peak, "title" if position >= filled else token + " reverse")
    return merged(cells)


def sparkline(values: Sequence[float], width: int, eighths: str, low: float | None = None) -> str:
    """The last `width` values, a cell each, from `low`, else their smallest, to their largest; a gap where one is not
    finite."""
    shown = list(values)[-width:] if width > 0 else []
    finite = [value for value in shown if math.isfinite(value)]
    if not finite:
        return " " * len(shown)
    low, high = min(finite) if low is None else low, max(finite)
    scale = (len(eighths) - 2) / (high - low) if high > low else 0.0
    return "".join(eighths[1 + round((value - low) * scale)] if math.isfinite(value) else eighths[0] for value in shown)
