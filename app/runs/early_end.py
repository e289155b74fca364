"""Runs that ended before their last step, as their validation loss fell no more (train.early_stopping_patience)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.app.runs.files import number, read_object, whole
from penstock.engine.gains import EarlyEnd


def early_end_in(summary: dict[str, Any]) -> EarlyEnd | None:
    """Why a run ended early, as its summary.json says; None where it did not."""
    result = summary.get("ended_early")
    if not isinstance(result, dict) or (validations := whole(result.get("validations"))) is None:
        return None
    best, step = number(result.get("best")), whole(result.get("best_step"))
    if best is None or step is None:
        best = step = None
    return EarlyEnd(validations, best, step)


def nothing_left(path: Path, step: int, patience: int | None) -> str | None:
    """Why a finished run of such `train.early_stopping_patience` has nothing to go on with, though steps are left."""
    ended = early_end_in(read_object(path / "summary.json") or {})
    if ended is None or patience is None or ended.validations < patience:
        return None
    return (
        f"{path}: {ended.words(step)}; to continue it, raise train.early_stopping_patience={patience} or set it to none"
    )
