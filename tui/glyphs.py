"""The characters that renderers draw with: Unicode, or ASCII for terminals that have nothing else."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Glyphs:
    """One set of characters, each one cell wide."""

    eighths: str
    """Nine characters from nothing to a full cell, rising from the bottom."""
    braille: bool
    """Whether curves are drawn in dots of 2 x 4 a cell, or with `dot`."""
    bar_full: str
    bar_empty: str
    bar_peak: str
    hline: str
    vline: str
    tick: str
    """Where an axis carries a label."""
    dot: str
    check: str
    cross: str
    arrow: str
    diamond: str
    ellipsis: str
    up: str
    down: str


UNICODE = Glyphs(
    eighths=" ▁▂▃▄▅▆▇█",
    braille=True,
    bar_full="█",
    bar_empty="░",
    bar_peak="▏",
    hline="─",
    vline="│",
    tick="┤",
    dot="●",
    check="✓",
    cross="✗",
    arrow="→",
    diamond="◆",
    ellipsis="…",
    up="▲",
    down="▼",
)

ASCII = Glyphs(
    eighths=" .:-=+*%#",
    braille=False,
    bar_full="#",
    bar_empty=".",
    bar_peak="|",
    hline="-",
    vline="|",
    tick="+",
    dot="*",
    check="v",
    cross="x",
    arrow=">",
    diamond="<",
    ellipsis="~",
    up="^",
    down="v",
)
