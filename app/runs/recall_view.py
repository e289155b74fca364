"""What a model finds in haystacks (engine/data/needles), by length and depth: a heat map on console and screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

from penstock.app.console.rows import Glyphs, Row, exactly
from penstock.storage.files.untrusted import is_whole

_LABEL, _CELL, _TITLE = 7, 5, 32
_MOST = 64
"""Lengths, and depths, of a map."""
CHANCE = 0.1
"""Share of right answers by guessing: an answer is one of ten digits."""


class RecallMap(NamedTuple):
    """Answers after one step, by the length of the haystack and the depth of what was asked in it."""

    step: int
    lengths: tuple[int, ...]
    right: tuple[tuple[int, ...], ...]
    """[length][depth]"""
    queried: tuple[tuple[int, ...], ...]
    title: str | None = None
    """What stands above it; None: the step."""

    @property
    def share(self) -> float:
        return sum(map(sum, self.right)) / sum(map(sum, self.queried))

    @property
    def depths(self) -> int:
        return len(self.queried[0])


def recall_of(line: Mapping[str, Any]) -> RecallMap | None:
    """What a line of validation.jsonl has; None where it has none, or no map."""
    result, step = line.get("recall"), line.get("step")
    if not isinstance(result, dict) or not is_whole(step):
        return None
    lengths, right, queried = result.get("lengths"), result.get("right"), result.get("queried")
    if not (_counts(lengths) and isinstance(right, list) and isinstance(queried, list)):
        return None
    rows = [*right, *queried]
    whole = len(right) == len(queried) == len(lengths) and all(map(_counts, rows)) and len(set(map(len, rows))) == 1
    if not whole or not sum(map(sum, queried)):
        return None
    if any(r > a for many, all_ in zip(right, queried, strict=True) for r, a in zip(many, all_, strict=True)):
        return None
    return RecallMap(step, tuple(lengths), tuple(map(tuple, right)), tuple(map(tuple, queried)))


def _counts(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and 0 < len(values) <= _MOST and all(is_whole(v) and v >= 0 for v in values)


def map_width(result: RecallMap) -> int:
    """Cells that `map_rows` needs."""
    return max(_TITLE, _label(result) + _CELL * result.depths)


def _label(result: RecallMap) -> int:
    return max(_LABEL, *(len(f"{length:,}") + 1 for length in result.lengths))


def map_rows(result: RecallMap, glyphs: Glyphs) -> list[Row]:
    """A title, the depths, and a row of percents for each length; the block before a number rises with it."""
    when = result.title or ("before training" if result.step == 0 else f"after step {result.step:,}")
    label = _label(result)
    bands = (f"{100 * depth // result.depths}%".rjust(_CELL) for depth in range(result.depths))
    rows: list[Row] = [
        [(f"{result.share:.0%} right ", "title"), (when, "dim")],
        [("tokens".rjust(label - 1), "dim"), (" " + "".join(bands), "dim")],
    ]
    for length, right, queried in zip(result.lengths, result.right, result.queried, strict=True):
        cells = (_cell(*pair, glyphs) for pair in zip(right, queried, strict=True))
        rows.append([(f"{length:,}".rjust(label - 1) + " ", "text"), *cells])
    return [exactly(row, map_width(result)) for row in rows]


def _cell(right: int, queried: int, glyphs: Glyphs) -> tuple[str, str]:
    if not queried:
        return "-".rjust(_CELL), "dim"
    share = right / queried
    token = "good" if share >= 0.9 else "warn" if share >= 0.5 else "bad"
    return f" {glyphs.eighths[int(share * 8)]}{right * 100 // queried:>3}", token


def recall_rows(first: RecallMap, last: RecallMap, glyphs: Glyphs) -> list[Row]:
    """The maps of two steps side by side, or one of the same step, below what they show."""
    head = "correct answers on unseen contexts, in percent, by context length and depth of the fact; "
    rows: list[Row] = [[(f"{head}guessing gives {CHANCE:.0%}", "text")]]
    maps: Sequence[list[Row]] = [map_rows(result, glyphs) for result in dict.fromkeys((first, last))]
    for index in range(max(map(len, maps))):
        pieces = [one[index] if index < len(one) else [] for one in maps]
        rows.append([piece for row in pieces for piece in [("  ", "text"), *row]])
    return rows
