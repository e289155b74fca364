"""What a run has reported, read from its directory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from penstock.app.runs.directory import find_run, read_info, read_recipe
from penstock.app.runs.files import JsonLines, read_object
from penstock.app.runs.measured import measured_of
from penstock.engine.config import Recipe
from penstock.engine.events import SampleMetrics, Spike, StepMetrics, ValidationMetrics
from penstock.storage.files.untrusted import typed

_Line = TypeVar("_Line")


class Run:
    """A run by its directory or its name below runs/, running or over; nothing is written. Lines that are damaged, or
    lack what is asked for, are left out."""

    def __init__(self, run: str | Path) -> None:
        """Raises UserError where there is no such run."""
        self.path = find_run(str(run)).resolve()

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def recipe(self) -> Recipe:
        """The recipe that it was last trained with. UserError where it cannot be read."""
        return read_recipe(self.path)

    @property
    def state(self) -> str:
        """preparing, running, paused, finished, stopped, failed; crashed or stale where no process stands behind it."""
        return read_info(self.path).state

    @property
    def step(self) -> int:
        """The last step that has ended."""
        return read_info(self.path).step

    def summary(self) -> dict[str, Any] | None:
        """summary.json, as its process left it; None before a process of it has ended."""
        return read_object(self.path / "summary.json")

    def metrics(self) -> Iterator[StepMetrics]:
        """What is known of each step so far, in order."""
        return self._lines("metrics.jsonl", StepMetrics)

    def validations(self) -> Iterator[ValidationMetrics]:
        """The validation losses so far, in order."""
        return self._lines("validation.jsonl", ValidationMetrics)

    def samples(self) -> Iterator[SampleMetrics]:
        """What the model wrote so far, in order; texts beyond what a line may hold are cut."""
        return self._lines("samples.jsonl", SampleMetrics)

    def spikes(self) -> Iterator[Spike]:
        """The steps whose loss leapt, in order, with the documents that they were trained on."""
        return self._lines("spikes.jsonl", Spike)

    def _lines(self, name: str, kind: type[_Line]) -> Iterator[_Line]:
        types = {field.name: field.type for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
        for line in JsonLines(self.path / name).steps():
            # What is not finite is null in JSON.
            known = {key: value for key, value in line.items() if key in types}
            known |= {key: math.nan for key, value in known.items() if value is None and types[key] == "float"}
            if "measured" in types:
                known["measured"] = measured_of(line)
            try:
                yield typed(known, kind)
            except ValueError:
                continue
