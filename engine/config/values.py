"""Sizes in a recipe, and limits of its numbers, beyond which a value can only be a mistake."""

from __future__ import annotations

import dataclasses
import difflib
import numbers
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import one_line

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_LARGEST = 10**18
"""Bytes; a larger size can only be a wrong unit."""


def parse_bytes(text: str | int, where: str) -> int:
    """Bytes named by `text`: an int, or a number with a unit (`512MiB`, `1.5 GiB`, `24GB`).

    Raises UserError naming `where` when the text is not a size, is below one byte or is more than any machine has.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*", str(text))
    unit = _UNITS.get(match.group(2).lower()) if match else None
    size = float(match.group(1)) * unit if match and unit else 0.0
    if size < 1:
        raise UserError(f"{where}: '{text}' is not a size; write for example 512MiB, 24GiB or 1.5TB")
    if size > _LARGEST:
        raise UserError(f"{where}: '{text}' is larger than any machine; write for example 512MiB, 24GiB or 1.5TB")
    return int(size)


@dataclass(frozen=True, slots=True)
class Share:
    """Part of the memory that is free."""

    part: float
    """0 to 1."""

    def __str__(self) -> str:
        return f"{100 * self.part:g}%"


Budget = int | Share | Literal["least"] | None
"""What a recipe says of a tier of memory: bytes, a share of what is free, the least that a plan needs, or nothing."""


def parse_budget(text: str | int | None, where: str) -> Budget:
    """A budget as a recipe gives it: a size (see `parse_bytes`), a share such as `50%`, `least`, or None.

    Raises UserError naming `where`.
    """
    if text is None:
        return None
    if text == "least":
        return "least"
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*%\s*", str(text))
    if match is None:
        try:
            return parse_bytes(text, where)
        except UserError as error:
            raise UserError(f"{error}, 50% of what is free, or least") from None
    share = float(match.group(1)) / 100
    require(0 < share <= 1, f"{where}: {text} of what is free; give more than 0% and at most 100%")
    return Share(share)


def require(ok: bool, message: str) -> None:
    """Raise UserError unless `ok`."""
    if not ok:
        raise UserError(message)


def nearest(word: object, names: Iterable[str]) -> str:
    """'did you mean ...?' for the closest name, or the list of names when nothing is close."""
    names = list(names)
    close = difflib.get_close_matches(str(word), names, n=1, cutoff=0.5)
    return f"did you mean '{close[0]}'?" if close else "valid names: " + ", ".join(names)


_KINDS = (
    ("int", "a whole number", numbers.Real),
    ("float", "a number", numbers.Real),
    ("list", "a list", (list, tuple)),
    ("dict", "a dict", Mapping),
)
"""How the type of a field begins, what it is called, and what such a value is."""


def require_kinds(section: str, config: Any) -> None:
    """Raise UserError naming a field of a section that is compared as a number, or gone through, and is none of that.

    The rest of what a field's type says is read with the recipe.
    """
    for item in dataclasses.fields(config):
        value, kind = getattr(config, item.name), str(item.type)
        for first, words, fine in _KINDS:
            if kind.startswith(first) and not isinstance(value, fine) and not (value is None and "None" in kind):
                raise UserError(f"{section}.{item.name}: {one_line(repr(value))} must be {words}")


MOST_GPUS = 64
"""Of one machine."""
MOST_EXPERTS = 2**16
"""Of a layer."""
MOST_LAYERS = 4096
"""Times what the deepest published models have; a model is built layer by layer, if only on the meta device."""
MOST_SIZE = 2**28
"""Of any width or number of a model: times what the widest vocabulary has."""
MOST_TOKENS = 2**27
"""Of a sequence: a hundred times the longest contexts."""
MOST_STEPS = 10**12
MOST_SEQUENCES = 2**20


def require_counts(section: str, config: object, names: Sequence[str], most: int, least: int = 1) -> None:
    """Raise UserError for a number of the section that is not from `least` to `most`."""
    for name in names:
        value = getattr(config, name)
        require(value is None or value >= least, f"{section}.{name}: {value} must be at least {least}")
        require(value is None or value <= most, f"{section}.{name}: {value} exceeds the maximum of {most:,}")
