"""What the validation losses say of a run: the lowest so far, and for how long there has been none lower."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from penstock.storage.files.untrusted import Size, typed


class EarlyEnd(NamedTuple):
    """Why a run ended before its last step."""

    validations: int
    """In a row, the last one included, that found no lower loss."""
    best: float | None
    """The lowest validation loss, nats; None where none was finite."""
    best_step: int | None
    """Step whose weights had it."""

    def words(self, step: int) -> str:
        """What is said of a run that ended after `step`."""
        best = "" if self.best is None else f"; best {self.best:.4g} at step {self.best_step:,}"
        count = f"{self.validations:,} validation{'s' * (self.validations != 1)}"
        return f"ended early after step {step:,}: no gain in {count}{best}"


@dataclass(slots=True)
class Gains:
    """Follows the validation losses of a run; JSON-ready, so that a generation can record it."""

    best: float | None = None
    """The lowest loss so far, nats."""
    best_step: Size | None = None
    """Step whose weights had it."""
    without: Size = 0
    """Validations in a row since then, none of them lower."""
    tokens: Size | None = None
    """Targets that they were measured on: losses of others cannot be compared."""

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

    def take(self, step: int, loss: float, tokens: int) -> bool:
        """Take the loss measured after `step` on so many targets; whether it is the lowest so far. Another number of
        targets than before begins anew."""
        if tokens != self.tokens:
            self.best, self.best_step, self.without, self.tokens = None, None, 0, tokens
        if math.isfinite(loss) and (self.best is None or loss < self.best):
            self.best, self.best_step, self.without = loss, step, 0
            return True
        self.without += 1
        return False

    def exhausted(self, patience: int | None) -> EarlyEnd | None:
        """Why a run of such `train.early_stopping_patience` ends; None: it goes on."""
        if patience is None or self.without < patience:
            return None
        return EarlyEnd(self.without, self.best, self.best_step)
