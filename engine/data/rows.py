"""A row of a source, and what becomes of one that is none."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from penstock.storage.files.errors import UserError


class Row(NamedTuple):
    """An object of a source, its fields by name; None where the file has no value."""

    where: str
    """`file:line`, or `file:row 7` where lines mean nothing; counted from 1."""
    fields: dict[str, Any]


class RowError(UserError):
    """One row, line or sample that cannot be used; `data.bad_rows` says what becomes of it."""


class TurnsError(RowError):
    """A conversation whose template does not tell the tokens of its turns."""


class BadRows:
    """Refuses the first bad row, or counts all of them.

    Attributes: `count`, and `first`, what was wrong with the first one (empty where there was none).
    """

    def __init__(self, mode: Literal["refuse", "skip"] = "refuse") -> None:
        self.mode = mode
        self.count, self.first = 0, ""

    def add(self, error: RowError) -> None:
        """One more. Raises UserError where none is accepted."""
        if self.mode == "refuse":
            message = f"{error}; or set data.bad_rows=skip to skip such rows"
            raise (TurnsError if isinstance(error, TurnsError) else UserError)(message) from error
        self.first = self.first or str(error)
        self.count += 1

    def add_many(self, count: int, first: str) -> None:
        """Bad rows that were counted elsewhere."""
        self.first = self.first or first
        self.count += count

    def take(self) -> tuple[int, str]:
        """Count and first so far, which begin anew."""
        taken = self.count, self.first
        self.count, self.first = 0, ""
        return taken
