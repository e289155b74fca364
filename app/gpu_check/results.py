"""The results folder: everything so far in gpu-check.json and gpu-check.md, a stage's own in stages/, always whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.storage.disk import atomic_write
from penstock.storage.errors import UserError

VERSION = 1
Rows = Callable[[Mapping[str, Any]], list[str]]
"""Markdown lines of a stage's figures, from its cases by name."""


class Results:
    """What is known, by stage and case; a case is a JSON object with `status` and, where it is not done, `reason`."""

    def __init__(self, folder: Path, head: Mapping[str, Any], stages: Mapping[str, tuple[str, Rows]], *, resume: bool):
        """`head`: what the check is of, kept beside the stages; `stages`: name -> title and rows, in their order.

        With `resume` what the folder holds is gone on with. UserError where it cannot be used.
        """
        self.folder, self._shown = folder, stages
        file = folder / "gpu-check.json"
        try:
            (folder / "stages").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{folder}: cannot be used for results ({error.strerror})") from None
        self.values: dict[str, Any] = {"version": VERSION} | dict(head) | {"stages": {}}
        if resume and file.exists():
            self._go_on(file)
        else:
            for name in stages:
                for old in (folder / "stages").glob(f"{name}.*"):
                    old.unlink()

    def _go_on(self, file: Path) -> None:
        try:
            earlier = json.loads(file.read_text())
            version, self.values["stages"] = earlier["version"], dict(earlier["stages"])
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{file}: is not a gpu-check result; give another folder, or leave --resume out") from None
        if version != VERSION:
            raise UserError(
                f"{file}: written by another version of gpu-check; give another folder, or leave --resume out"
            )
        for _, case in self._cases():
            if case["status"] == "running":
                case |= {"status": "ended", "reason": "gpu-check itself was killed"}

    def status(self, stage: str, case: str) -> str | None:
        """None where nothing is known."""
        status: str | None = self.case(stage, case).get("status")
        return status

    def case(self, stage: str, case: str) -> dict[str, Any]:
        """What is known of a case, a copy."""
        return dict(self.values["stages"].get(stage, {}).get(case, {}))

    def put(self, stage: str, case: str, outcome: Mapping[str, Any]) -> None:
        """Replace what is known of a case, in all files."""
        self.values["stages"].setdefault(stage, {})[case] = dict(outcome)
        self._write([stage])

    def begin(self, names: Mapping[str, Sequence[str]]) -> None:
        """Name cases by stage that are to run, so that a check killed early says what it did not come to."""
        for stage, cases in names.items():
            for case in cases:
                known = self.case(stage, case) | {"status": "not measured", "reason": "not begun"}
                self.values["stages"].setdefault(stage, {})[case] = known
        self._write(list(names))

    def _write(self, stages: Sequence[str]) -> None:
        self.values["not_measured"] = self.not_measured()
        own = self.folder / "stages"
        for stage in stages:
            atomic_write(own / f"{stage}.json", _text(self.values["stages"][stage]))
            atomic_write(own / f"{stage}.md", "\n".join(self._section(stage)) + "\n")
        atomic_write(self.folder / "gpu-check.json", _text(self.values))
        atomic_write(self.folder / "gpu-check.md", self.markdown())

    def _cases(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """stage/case -> what is known of it."""
        for stage, cases in self.values["stages"].items():
            for name, case in cases.items():
                yield f"{stage}/{name}", case

    def not_measured(self) -> dict[str, str]:
        """stage/case -> why, of all that was not done."""
        return {
            name: f"{case['status']}: {case.get('reason') or 'no reason given'}"
            for name, case in self._cases()
            if case["status"] != "done"
        }

    def failed(self) -> list[str]:
        return [name for name, case in self._cases() if case["status"] == "failed"]

    def markdown(self) -> str:
        lines = ["# gpu-check", ""]
        lines += [f"- {name}: {value}" for name, value in self.values.items() if isinstance(value, str)]
        for stage in self._shown:
            if stage in self.values["stages"]:
                lines += ["", *self._section(stage)]
        if left := self.not_measured():
            lines += ["", "## Not measured", ""]
            lines += [f"- {name}: {' '.join(why.split())[:300]}" for name, why in left.items()]
        return "\n".join(lines) + "\n"

    def _section(self, stage: str) -> list[str]:
        title, rows = self._shown[stage]
        cases = self.values["stages"][stage]
        lines = [f"## {stage}: {title}", ""]
        try:
            lines += rows(cases)
        except (KeyError, TypeError, ValueError) as error:  # of a case that ended half-way; the JSON has what it found
            lines += [f"(no table: {type(error).__name__} {error})"]
        return lines


def _text(values: Any) -> str:
    return json.dumps(values, indent=1) + "\n"
