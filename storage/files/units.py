"""Figures as people read them: sizes, rates, times, shares and counts. What is not known reads n/a."""

from __future__ import annotations

import math
from collections.abc import Callable

Report = Callable[[float, str], None]
"""Is given the share of work that is done, and what it is a share of."""


def no_report(share: float, words: str) -> None:
    """Nobody needs the progress."""


def bytes_text(num_bytes: float | None) -> str:
    """A size in binary units, in at most eight cells below 1000 TiB: 512 B, 1.5 GiB, 480 GiB, 3.12 TiB."""
    if num_bytes is None or not math.isfinite(num_bytes):
        return "n/a"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1023.5:
            return f"{num_bytes:.{0 if unit == 'B' or abs(num_bytes) >= 99.95 else 1}f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.{2 if abs(num_bytes) < 9.995 else 1 if abs(num_bytes) < 99.95 else 0}f} TiB"


def size_text(num_bytes: int) -> str:
    """A size as a field of a recipe takes it, `120MiB`: the very same if a unit divides it, else up to 1 % more."""
    units = [(2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")]
    for scale, unit in units:
        if num_bytes >= scale and num_bytes % scale == 0:
            return f"{num_bytes // scale}{unit}"
    for scale, unit in units:
        if num_bytes >= 100 * scale:
            return f"{-(-num_bytes // scale)}{unit}"
    return str(num_bytes)


def whole_kib(num_bytes: int) -> int:
    """The least whole KiB that hold so many bytes, in bytes."""
    return -(-num_bytes // 1024) * 1024


def least_text(num_bytes: int) -> str:
    """The least size that is enough, as a field of a recipe takes it: whole KiB, or a larger unit that divides it."""
    return size_text(num_bytes) if num_bytes % 2**20 == 0 else f"{whole_kib(num_bytes) // 1024}KiB"


def of_text(held: float | None, budget: float | None) -> str:
    """A size of another: `61.2 of 78.4 GiB`, where one unit serves both."""
    part, whole = bytes_text(held), bytes_text(budget)
    number, _, unit = part.partition(" ")
    return f"{number if unit and whole.endswith(f' {unit}') else part} of {whole}"


def rate_text(bytes_per_s: float | None) -> str:
    """A rate in decimal units, as drives are sold: 3.1 GB/s."""
    if bytes_per_s is None or not math.isfinite(bytes_per_s):
        return "n/a"
    for unit in ("B", "kB", "MB"):
        if bytes_per_s < 999.5:
            return f"{bytes_per_s:.{1 if bytes_per_s < 99.95 and unit != 'B' else 0}f} {unit}/s"
        bytes_per_s /= 1000
    return f"{bytes_per_s:.{1 if bytes_per_s < 99.95 else 0}f} GB/s"


def seconds_text(seconds: float | None) -> str:
    """A time of work in three figures: 450 us, 12.3 ms, 4.20 s, 95.3 s; from ten minutes on as `duration_text`."""
    if seconds is None or not math.isfinite(seconds):
        return "n/a"
    if seconds >= 600:
        return duration_text(seconds)
    for scale, unit in ((1.0, "s"), (1e3, "ms")):
        if (value := seconds * scale) >= 0.9995:
            return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"
    return f"{seconds * 1e6:.0f} us" if seconds > 0 else "0 s"


def duration_text(seconds: float | None) -> str:
    """A duration in its two leading units: 42s, 3m05s, 6h12m, 2d03h."""
    if seconds is None or not math.isfinite(seconds):
        return "n/a"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def percent_text(share: float | None, digits: int = 1) -> str:
    return "n/a" if share is None or not math.isfinite(share) else f"{share:.{digits}%}"


def params_text(number: float) -> str:
    """A number of parameters: 812, 1.5 M, 70.6 B."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.{0 if number >= 100 * size else 1}f} {unit}"
    return f"{number:.0f}"


def count_text(value: float) -> str:
    """A number of things in at most five cells: 950, 1.2k, 45k, 3.1M, 1.2T."""
    if not math.isfinite(value):
        return "n/a"
    size, unit = abs(value), ""
    for unit in ("", "k", "M", "G", "T", "P"):
        if size < 999.5 or unit == "P":
            break
        size /= 1000
    digits = 0 if not unit or size >= 99.95 or abs(size - round(size)) < 0.005 else 1
    return f"{'-' if value < 0 else ''}{size:.{digits}f}{unit}"


def tokens_text(tokens: int) -> str:
    """A context as people say it: 512, 8k, 512k, 1M; of what is no multiple of 1,024 each token."""
    if tokens >= 1024 and tokens % 1024 == 0:
        return f"{tokens >> 20}M" if tokens % (1 << 20) == 0 else f"{tokens >> 10}k"
    return f"{tokens:,}"


def figure(value: float | None, digits: int = 3) -> str:
    """A figure with so many significant digits, without exponents where it is of ordinary size."""
    if value is None or not math.isfinite(value):
        return "n/a"
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(value)))
    if exponent < -3 or exponent > 6:
        mantissa, power = f"{value:.{digits - 1}e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{int(power)}"
    return f"{value:,.{max(0, digits - 1 - exponent)}f}"
