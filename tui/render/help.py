"""The keys of a screen on as many columns as its width holds: what belongs together under one title."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

from penstock.app.console.rows import Row, exactly
from penstock.tui.actions import Action

_LEAST_CELLS = 34
"""A narrower column would break every sentence."""
_MOST_COLUMNS = 5
_GAP = 3
_MOST_KEY_CELLS = 9
"""Several keys that need more stand below one another."""


class _Entry(NamedTuple):
    """Rows that stay together."""

    rows: list[Row]
    is_title: bool


def help_rows(groups: Mapping[str, Sequence[Action]], width: int) -> list[Row]:
    """Rows of exactly `width` cells, as few as possible."""
    most = max(1, min(_MOST_COLUMNS, (width + _GAP) // (_LEAST_CELLS + _GAP)))
    laid = [_columns(groups, number, (width - _GAP * (number - 1)) // number) for number in range(1, most + 1)]
    columns = min(laid, key=lambda columns: max(map(len, columns)))
    cells = (width - _GAP * (len(columns) - 1)) // len(columns)
    rows: list[Row] = []
    for y in range(max(map(len, columns))):
        row: Row = []
        for column in columns:
            row += [*exactly(column[y] if y < len(column) else [], cells), (" " * _GAP, "text")]
        rows.append(exactly(row[:-1], width))
    return rows


def _columns(groups: Mapping[str, Sequence[Action]], number: int, cells: int) -> list[list[Row]]:
    """The entries in so many columns, in order, the tallest as low as it can be; empty ones are left out."""
    entries = _entries(groups, max(8, cells))
    total = sum(len(entry.rows) for entry in entries)
    height = max(1, total // number)
    while len(columns := _filled(entries, height)) > number:
        height += 1
    return columns


def _filled(entries: Sequence[_Entry], height: int) -> list[list[Row]]:
    """Columns of at most `height` rows where entries allow it; no title is the last of one, no gap the first."""
    columns: list[list[Row]] = [[]]
    for i, entry in enumerate(entries):
        needed = len(entry.rows) + (len(entries[i + 1].rows) if entry.is_title and i + 1 < len(entries) else 0)
        if columns[-1] and len(columns[-1]) + needed > height:
            columns.append([])
        rows = entry.rows[1:] if entry.is_title and not columns[-1] and not entry.rows[0] else entry.rows
        columns[-1] += rows
    return columns


def _entries(groups: Mapping[str, Sequence[Action]], cells: int) -> list[_Entry]:
    keys = max((len(_keys(action)) for found in groups.values() for action in found), default=0)
    keys = min(keys, _MOST_KEY_CELLS)
    entries: list[_Entry] = []
    for title, found in groups.items():
        gap: list[Row] = [[]] if entries else []
        entries.append(_Entry([*gap, [(title, "accent bold")]], is_title=True))
        entries += [_Entry(_action_rows(action, keys, cells), is_title=False) for action in found]
    return entries


def _keys(action: Action) -> str:
    """`q ^q`, and of a row of keys the first and the last."""
    keys = action.shown_keys
    return " ".join(keys) if len(keys) <= 3 else f"{keys[0]} to {keys[-1]}"


def _action_rows(action: Action, key_cells: int, cells: int) -> list[Row]:
    """The keys, and beside them the label and the sentence on as many rows as they need."""
    keys = textwrap.wrap(_keys(action), key_cells, break_on_hyphens=False)
    text = textwrap.wrap(f"{action.label}  {action.help}", max(8, cells - key_cells - 2), break_on_hyphens=False)
    rows: list[Row] = []
    for number, (key, line) in enumerate(zip_longest(keys, text, fillvalue="")):
        head: Row = [(key.ljust(key_cells + 2), "title")]
        label = line[: len(action.label)] if number == 0 else ""
        rows.append([*head, (label, "good bold"), (line[len(label) :], "text")])
    return rows
