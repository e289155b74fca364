"""The tiers of a run: what each may hold, was planned to hold, and has held."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.tui.data.fields import number
from penstock.tui.data.run_data import RunData

_TIERS = ("gpu", "ram", "nvme")
FULL_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class Tier:
    """What a tier may hold, was planned to hold and has held; None where unknown."""

    name: str
    budget_bytes: float | None
    planned_bytes: float | None
    held_bytes: float | None

    @property
    def share(self) -> float | None:
        """Most that was held, as a share of the budget; the planned peak while nothing was measured."""
        held = self.planned_bytes if self.held_bytes is None else self.held_bytes
        return held / self.budget_bytes if held is not None and self.budget_bytes else None

    @property
    def planned_share(self) -> float | None:
        return self.planned_bytes / self.budget_bytes if self.planned_bytes and self.budget_bytes else None


def tiers(data: RunData) -> list[Tier]:
    """The tiers of the plan: budget, planned peak, and what was held at most as far as the run says."""
    found = []
    for name in _TIERS:
        held = data.metrics.tier_bytes.get(name)
        if held is None and not data.is_live:
            held = number(data.summary, "tiers", name, "peak_bytes")
        budget = number(data.plan, "tiers", name, "budget_bytes")
        planned = number(data.plan, "tiers", name, "peak_bytes")
        if budget is not None or planned is not None or held is not None:
            found.append(Tier(name, budget, planned, held))
    return found
