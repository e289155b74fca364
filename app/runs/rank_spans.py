"""Spans of a run's GPUs: spans.jsonl is the first one's, spans.1.jsonl the next one's, each with a clock of its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from penstock.app.runs.directory import spans_name, spans_text
from penstock.app.runs.files import open_append
from penstock.app.runs.log import continue_spans
from penstock.engine.config.values import MOST_GPUS
from penstock.engine.events import Span
from penstock.storage.files.errors import UserError


def gpus_of(run_path: Path) -> int:
    """How many GPUs have left spans."""
    found = (rank for rank in range(1, MOST_GPUS) if not os.path.lexists(run_path / spans_name(rank)))
    return next(found, MOST_GPUS)


def spans_of(run_path: Path, gpu: int) -> Path:
    """The file of a GPU, by number from 0. UserError where there is none of that number."""
    if gpu and gpu >= (count := gpus_of(run_path)):
        has = f"of {count} GPUs, 0 to {count - 1}" if count > 1 else "of one GPU"
        raise UserError(f"--gpu {gpu}: {run_path} has ops {has}")
    return run_path / spans_name(gpu)


class RankSpans:
    """Writes the spans of a rank that is not the first."""

    def __init__(self, run_path: Path, rank: int) -> None:
        self._path = run_path / spans_name(rank)
        self._offsets = continue_spans(run_path, self._path.name)
        self._file: TextIO = os.fdopen(open_append(self._path), "a")

    def add(self, spans: Sequence[Span]) -> None:
        if spans:
            self._file.write(spans_text(spans, *self._offsets))
            self._file.flush()
