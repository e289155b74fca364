"""A bar that is filled to a share of it."""

from __future__ import annotations

import math

from penstock.app.console.rows import Glyphs, Row, merged


def bar(width: int, share: float | None, mark: float | None, glyphs: Glyphs, token: str) -> Row:
    """A bar of `width` cells filled to `share` of it, with a mark at `mark`; both 0..1, None where unknown."""
    if width < 1:
        return []
    filled = 0 if share is None or not math.isfinite(share) else round(min(1.0, max(0.0, share)) * width)
    cells = [(glyphs.bar_full, token)] * filled + [(glyphs.bar_empty, "axis")] * (width - filled)
    if mark is not None and math.isfinite(mark):
        place = min(width - 1, max(0, math.ceil(mark * width) - 1))
        peak = "┃" if glyphs.braille else glyphs.bar_peak
        cells[place] = (peak, "title" if place >= filled else token + " reverse")
    return merged(cells)
