"""Colours: four themes, and the style of every token that renderers use.

The lanes' colours are those of Okabe and Ito (Color Universal Design, 2008), which people with any common colour
vision tell apart; nothing is shown by colour alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from rich.style import Style
from rich.text import Text
from textual.theme import Theme

_COLOURS = {
    "text": ("#d7dce2", "#1f2933"),
    "dim": ("#7f8a99", "#66717e"),
    "good": ("#3fbf7f", "#0b7a4b"),
    "warn": ("#e6a817", "#8a5a00"),
    "bad": ("#ff6b5e", "#b3261e"),
    "accent": ("#5cc8ff", "#0b6fa4"),
    "axis": ("#5b6675", "#98a2ad"),
    "raw": ("#4f6f86", "#9fbccd"),
    "ema": ("#5cc8ff", "#0b5f8f"),
    "validation": ("#f0a35e", "#b35c00"),
    "checkpoint": ("#9aa5b1", "#66717e"),
    "lane.nvme_read": ("#56b4e9", "#0072b2"),
    "lane.h2d": ("#009e73", "#00795a"),
    "lane.compute": ("#e69f00", "#a86f00"),
    "lane.d2h": ("#cc79a7", "#a8457c"),
    "lane.optimizer": ("#f0e442", "#7a7000"),
    "lane.nvme_write": ("#d55e00", "#b34a00"),
    "lane.other": ("#9aa5b1", "#66717e"),
    "part.forward": ("#a8cff5", "#2f6fb0"),
    "part.backward": ("#f2b8a6", "#a34a2c"),
    "part.update": ("#cfe07a", "#5f6c00"),
    "part.validation": ("#c9bdf2", "#6a55b0"),
    "part.samples": ("#8fd9c8", "#1f7a68"),
    "predicted": ("#8a7fd1", "#5b4fb0"),
    "title": ("#e8edf3", "#101820"),
}
"""Token -> its colour on a dark background and on a light one."""
_SERIES = ("nvme_read", "compute", "h2d", "d2h", "optimizer", "nvme_write")
_SAME = {"stall": "bad", "critical": "bad", "flight": "lane.optimizer"}
_SAME |= {"tier.gpu": "lane.compute", "tier.ram": "lane.h2d", "tier.nvme": "lane.nvme_read"}
_SAME |= {f"series.{number}": f"lane.{lane}" for number, lane in enumerate(_SERIES)}
_COLOURS |= {token: _COLOURS[other] for token, other in _SAME.items()}
_BOLD = {"bold", "title", "ema", "critical", "accent"}


def _colours(dark: bool) -> dict[str, str]:
    return {token: pair[0 if dark else 1] for token, pair in _COLOURS.items()}


def _theme(name: str, *, dark: bool, background: str, surface: str, panel: str) -> Theme:
    colours = _colours(dark)
    return Theme(
        name=name,
        primary=colours["accent"],
        secondary=colours["lane.h2d"],
        accent=colours["warn"],
        warning=colours["warn"],
        error=colours["bad"],
        success=colours["good"],
        foreground=colours["text"],
        background=background,
        surface=surface,
        panel=panel,
        dark=dark,
        variables={
            "footer-key-foreground": colours["accent"],
            "border": colours["axis"],
            "border-blurred": colours["axis"],
        },
    )


THEMES: tuple[Theme, ...] = (
    _theme("penstock-dark", dark=True, background="#11151a", surface="#161b22", panel="#1d242d"),
    _theme("penstock-light", dark=False, background="#fbfbf9", surface="#f1f2ef", panel="#e6e8e4"),
    _theme("penstock-black", dark=True, background="#000000", surface="#000000", panel="#101010"),
    _theme("penstock-white", dark=False, background="#ffffff", surface="#ffffff", panel="#eeeeee"),
)


@lru_cache(maxsize=256)
def style(token: str, dark: bool) -> Style:
    """The style of a token; `token reverse` and `token bold` add to it; an unknown token is plain text.

    `box.LANE` is a label on the lane's colour, `box.TOKEN` on another token's; `line.LANE` a line on it; `token line`
    underlines; `token chosen` stands on the ground of `selected`.
    """
    name, *extras = token.split()
    colours = _colours(dark)
    chosen = "#2b3947" if dark else "#d5e3ee"
    if name == "selected":
        return Style(color=colours["title"], bgcolor=chosen)
    line = True if "line" in extras else None
    if name.startswith(("box.", "line.")):
        kind, _, on = name.partition(".")
        ground = colours.get(f"lane.{on}") or colours.get(on, colours["lane.other"])
        label = ("#101418" if dark else "#ffffff") if kind == "box" else colours["title"]
        return Style(color=label, bgcolor=ground, bold="bold" in extras or None, underline=line)
    bold = name in _BOLD or "bold" in extras
    return Style(
        color=colours.get(name, colours["text"]),
        bgcolor=chosen if "chosen" in extras else None,
        bold=bold or None,
        reverse="reverse" in extras or None,
        underline=line,
    )


def styled(row: Iterable[tuple[str, str]], dark: bool, **more: Any) -> Text:
    """A row as Textual's own widgets take it; `more` of Rich's text."""
    return Text.assemble(*((text, style(token, dark)) for text, token in row), **more)
