"""Pictures of a screen, one after another, as one SVG that plays them in a loop: each row of the screen is drawn once
for every text that it ever had, and shown while it had it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_STYLE = re.compile(r"\.[\w-]+-(r\d+) \{ ?([^}]*?) ?\}")
_BODY = re.compile(r'(<g transform="[^"]*" clip-path="[^"]*">)(.*)(</g>\s*</svg>)', re.DOTALL)
_PIECE = re.compile(r'<rect [^>]*?y="([\d.]+)"[^>]*/>|<text [^>]*?y="([\d.]+)"[^>]*>.*?</text>', re.DOTALL)
_LINE_PX = 24.4
"""Height of a row in the pictures that Textual exports."""


def film(frames: Sequence[str], frame_s: float) -> str:
    """An SVG that shows each of `frames` for `frame_s` seconds, in a loop; the last where nothing may move.

    The frames are Textual's screenshots of one screen, of one size. Raises ValueError for another picture.
    """
    if not frames:
        raise ValueError("a film needs a picture")
    classes: dict[str, str] = {}
    shown: dict[int, dict[str, list[int]]] = {}
    for number, frame in enumerate(frames):
        for line, content in _rows(frame, classes).items():
            shown.setdefault(line, {}).setdefault(content, []).append(number)
    patterns: dict[tuple[int, ...], str] = {}
    groups = []
    for line in sorted(shown):
        for content, when in shown[line].items():
            if len(when) == len(frames):
                groups.append(f"<g>{content}</g>")
                continue
            name = patterns.setdefault(tuple(when), f"k{len(patterns)}")
            last = " last" if when[-1] == len(frames) - 1 else ""
            groups.append(f'<g class="film {name}{last}">{content}</g>')
    head, begin, end = _around(frames[-1], len(frames) * frame_s, len(frames), classes, patterns)
    return head + begin + '<g class="film-matrix">\n' + "\n".join(groups) + "\n</g>" + end


def _rows(frame: str, classes: dict[str, str]) -> dict[int, str]:
    """What is drawn in each row of a picture, its styles named by `classes`, which grows: style -> name."""
    names = {f"{old}": classes.setdefault(style, f"c{len(classes)}") for old, style in _STYLE.findall(frame)}
    body = _BODY.search(frame)
    if body is None:
        raise ValueError("this is no picture of Textual's")
    rows: dict[int, list[str]] = {}
    for piece in _PIECE.finditer(body[2]):
        text = re.sub(r' clip-path="[^"]*"', "", piece[0])
        text = re.sub(r'class="[\w-]+-(r\d+)"', lambda result: f'class="{names[result[1]]}"', text)
        # A rectangle begins at the top of its row, a text stands on its ground line.
        line = int(float(piece[1]) / _LINE_PX) if piece[1] else int((float(piece[2]) - 1) / _LINE_PX)
        rows.setdefault(line, []).append(text)
    return {line: "".join(pieces) for line, pieces in rows.items()}


def _around(
    frame: str, seconds: float, count: int, classes: dict[str, str], patterns: dict[tuple[int, ...], str]
) -> tuple[str, str, str]:
    """What stands before the rows: window and styles; the group that moves them to their place; what closes both."""
    body = _BODY.search(frame)
    assert body is not None
    style = "\n".join(f".{name} {{ {text} }}" for text, name in classes.items())
    style += "\n.film { visibility: hidden } .last { visibility: visible }\n"
    for when, name in patterns.items():
        marks = [f"{n / count:.3%} {{ visibility: {_state(n in when)} }}" for n in range(count) if _turns(n, when)]
        style += f"@keyframes {name} {{ {' '.join(marks)} }}\n"
        style += f".{name} {{ animation: {name} {seconds:g}s step-end infinite }}\n"
    style += "@media (prefers-reduced-motion: reduce) { .film { animation: none } }\n"
    head = _STYLE.sub("", frame[: body.start()])
    head = head.replace("</style>", f"{style}</style>", 1)
    head = re.sub(r'<clipPath id="[\w-]+-line-\d+">.*?</clipPath>\s*', "", head, flags=re.DOTALL)
    own = re.search(r"\.([\w-]+)-matrix", frame)
    assert own is not None
    return head.replace(own[1], "film"), body[1].replace(own[1], "film"), body[3]


def _turns(number: int, when: tuple[int, ...]) -> bool:
    """Whether a row appears or goes with this frame; the first says how it begins."""
    return number == 0 or (number in when) != (number - 1 in when)


def _state(visible: bool) -> str:
    return "visible" if visible else "hidden"
