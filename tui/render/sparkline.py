"""A curve in one row of eighth blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence


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
