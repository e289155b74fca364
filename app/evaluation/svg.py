"""The heat maps of needles as a picture: a cell for each length and depth, the better the greener."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from html import escape

from penstock.app.runs.recall_view import RecallMap
from penstock.storage.files.units import tokens_text

_CELL_W, _CELL_H, _LEFT, _TOP, _GAP = 56, 34, 64, 64, 40
_GREY = "#e4e4e4"


def heat_maps(maps: Sequence[RecallMap], heading: str) -> str:
    """An SVG of the maps side by side; a cell that nothing was asked of is grey."""
    panels, x = [], _LEFT
    for result in maps:
        panels.append(_panel(result, x))
        x += result.depths * _CELL_W + _GAP + _LEFT
    width = x - _GAP - _LEFT + 16
    height = _TOP + max(len(result.lengths) for result in maps) * _CELL_H + 40
    head = f'<text x="16" y="24" font-size="16" font-weight="bold">{escape(heading)}</text>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="13" fill="#10202c">'
        f'<rect width="{width}" height="{height}" fill="white"/>{head}{"".join(panels)}</svg>\n'
    )


def _colour(share: float) -> str:
    """From red for nothing to green for all, light enough for dark text."""
    return "#" + "".join(f"{round(255 * part):02x}" for part in colorsys.hls_to_rgb(share / 3, 0.72, 0.55))


def _panel(result: RecallMap, left: int) -> str:
    parts = [f'<text x="{left}" y="{_TOP - 14}">{escape(result.title or "")}: {result.share:.0%} found</text>']
    for row, length in enumerate(result.lengths):
        y = _TOP + row * _CELL_H
        parts.append(f'<text x="{left - 8}" y="{y + 22}" text-anchor="end">{tokens_text(length)}</text>')
        for depth in range(result.depths):
            right, queried = result.right[row][depth], result.queried[row][depth]
            x, said = left + depth * float(_CELL_W), f"{100 * right // queried}%" if queried else "-"
            fill = _colour(right / queried) if queried else _GREY
            parts.append(f'<rect x="{x}" y="{y}" width="{_CELL_W - 2}" height="{_CELL_H - 2}" fill="{fill}"/>')
            parts.append(f'<text x="{x + _CELL_W / 2 - 1}" y="{y + 21}" text-anchor="middle">{said}</text>')
    bottom = _TOP + len(result.lengths) * _CELL_H + 16
    for depth in range(result.depths):
        x, said = left + (depth + 0.5) * _CELL_W, f"{100 * depth // result.depths}%"
        parts.append(f'<text x="{x}" y="{bottom}" text-anchor="middle">{said}</text>')
    return "".join(parts)
