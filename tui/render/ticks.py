"""Where an axis carries numbers, and how figures read in few cells."""

from __future__ import annotations

import itertools
import math

_TIMES = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800)


def linear_ticks(low: float, high: float, most: int) -> list[float]:
    """At most `most` round numbers (1, 2 or 5 times a power of ten apart) within [low, high]."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low or most < 1:
        return []
    exponent = math.floor(math.log10((high - low) / most))
    for factor in (1, 2, 5, 10, 20, 50):
        spacing = factor * 10.0**exponent
        first, last = math.ceil(low / spacing - 1e-9), math.floor(high / spacing + 1e-9)
        if last - first + 1 <= most:
            return [number * spacing for number in range(first, last + 1)]
    return []


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """Powers of ten and, as far as there is room, 2 and 5 times them; over less than a decade as on a linear axis."""
    if not 0 < low < high or most < 1:
        return []
    if high / low < 12:
        return [tick for tick in linear_ticks(low, high, most) if tick > 0]
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for factors in ((1, 2, 5), (1, 3), (1,)):
        result = [f * 10.0**e for e in range(first, last + 1) for f in factors if low <= f * 10.0**e <= high]
        if len(result) <= most:
            return result
    every = -(-len(result) // most)
    return result[::every]


def time_ticks(low: float, high: float, most: int) -> list[float]:
    """Like `linear_ticks`, in seconds a person counts in: half minutes, hours, days."""
    for spacing in _TIMES:
        first, last = math.ceil(low / spacing), math.floor(high / spacing)
        if last - first + 1 <= most and high > low:
            return [float(number * spacing) for number in range(first, last + 1)] if high - low >= 4 else []
    return [tick * 86400 for tick in linear_ticks(low / 86400, high / 86400, most)]


def tick_texts(ticks: list[float]) -> list[str]:
    """The ticks as they stand on an axis, all with the same digits; very small or large ones as powers."""
    largest = max((abs(tick) for tick in ticks), default=0.0)
    if largest and (largest < 1e-3 or largest >= 1e6):
        return [f"{tick:.0e}".replace("e-0", "e-").replace("e+0", "e") if tick else "0" for tick in ticks]
    if ticks and min(ticks) > 0 and max(ticks) / min(ticks) >= 10:  # a logarithmic axis: each its own digits
        return [f"{tick:g}" for tick in ticks]
    digits = 0
    if len(ticks) > 1:
        spacing = min(abs(b - a) for a, b in itertools.pairwise(ticks))  # tells neighbours apart
        digits = min(6, max(0, -math.floor(math.log10(spacing) + 1e-9))) if spacing > 0 else 0
    elif ticks and ticks[0] % 1:
        digits = 2 * (abs(ticks[0]) < 100)
    return [f"{tick:.{digits}f}" for tick in ticks]


def fit(text: str, width: int, ellipsis: str = "…") -> str:
    """The text in exactly `width` cells, cut or padded at its right."""
    if len(text) > width:
        return text[: max(0, width - 1)] + ellipsis if width > 0 else ""
    return text.ljust(width)
