"""Sizes in a recipe, and limits of its numbers: beyond them is a slip."""

from __future__ import annotations

import re
from collections.abc import Sequence

from penstock.storage.errors import UserError

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_LARGEST = 10**18
"""Bytes; what is larger is a slip of the unit."""


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
        raise UserError(f"{where}: '{text}' is more than any machine has; write for example 512MiB, 24GiB or 1.5TB")
    return int(size)


def require(ok: bool, message: str) -> None:
    """Raise UserError unless `ok`."""
    if not ok:
        raise UserError(message)


MOST_LAYERS = 4096
"""Times what the deepest published models have; a model is built layer by layer, if only on the meta device."""
MOST_SIZE = 2**28
"""Of any width or number of a model: times what the widest vocabulary has."""
MOST_TOKENS = 2**27
"""Of a sequence: a hundred times the longest contexts."""
MOST_STEPS = 10**12
MOST_SEQUENCES = 2**20


def require_most(section: str, config: object, names: Sequence[str], most: int) -> None:
    """Raise UserError for a number of the section beyond `most`: a slip, whose plan would take for ever."""
    for name in names:
        value = getattr(config, name)
        require(value is None or value <= most, f"{section}.{name}: {value} is a slip of the pen; the most is {most:,}")
