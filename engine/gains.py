"""What the validations say of a run: the lowest loss or the highest reward so far, and for how long there has been none
better."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from penstock.storage.files.untrusted import Size, typed


class EarlyEnd(NamedTuple):
    """Why a run ended before its last step."""

    validations: int
    """In a row, the last one included, that found none better."""
    best: float | None
    """The lowest validation loss, nats, or the highest mean reward; None where none was finite."""
    best_step: int | None
    """Step whose weights had it."""

    def words(self, step: int) -> str:
        """What is said of a run that ended after `step`."""
        best = "" if self.best is None else f"; best {self.best:.4g} at step {self.best_step:,}"
        count = f"{self.validations:,} validation{'s' * (self.validations != 1)}"
        return f"ended early after step {step:,}: no gain in {count}{best}"


@dataclass(slots=True)
class Gains:
    """Follows the validation losses or rewards of a run; JSON-ready, so that a generation can record it."""

    best: float | None = None
    """The lowest loss so far, nats, or the highest reward."""
    best_step: Size | None = None
    """Step whose weights had it."""
    without: Size = 0
    """Validations in a row since then, none of them better."""
    tokens: Size | None = None
    """Targets or prompts that they were measured on: what is measured on others cannot be compared."""

    @classmethod
    def of(cls, record: Any) -> Gains:
        """What a generation's record has; a new one where it has none, or nothing that `to_json` writes."""
        try:
            result = typed(record, cls)
        except ValueError:
            return cls()
        sound = result.best is None or math.isfinite(result.best)
        return result if sound and (result.best is None) == (result.best_step is None) else cls()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def take(self, step: int, value: float, tokens: int, *, rises: bool = False) -> bool:
        """Take what was measured after `step` on so many targets or prompts; whether it is the lowest so far, or the
        highest where it `rises`. Another number of them than before begins anew."""
        if tokens != self.tokens:
            self.best, self.best_step, self.without, self.tokens = None, None, 0, tokens
        best = self.best
        if math.isfinite(value) and (best is None or (value > best if rises else value < best)):
            self.best, self.best_step, self.without = value, step, 0
            return True
        self.without += 1
        return False

    def exhausted(self, patience: int | None) -> EarlyEnd | None:
        """Why a run of such `train.early_stopping_patience` ends; None: it goes on."""
        if patience is None or self.without < patience:
            return None
        return EarlyEnd(self.without, self.best, self.best_step)
