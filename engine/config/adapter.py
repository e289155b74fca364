"""The adapter section of a recipe."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from penstock.engine.config.values import MOST_SIZE, require, require_most


@dataclass(kw_only=True, slots=True)
class AdapterConfig:
    """Small matrices beside a model that stays as it is: of the base there are weights only, of the adapter full
    state."""

    method: Literal["none", "lora", "dora", "rslora"] = "none"
    """What is trained: none trains the model itself; lora a low-rank sum beside linear modules; dora that and the
    length of each row; rslora is lora with alpha over the square root of the rank."""
    rank: int = 16
    """Rank of the sum; no larger than the least side of a matrix that it stands beside."""
    alpha: float = 32.0
    """The sum counts by this over the rank."""
    targets: list[str] = field(default_factory=lambda: ["all-linear"])
    """Modules that get one, by the end of their names, as ["q_proj", "v_proj"], or whole names with *; all-linear is
    every linear module of the layers, the head not."""
    start: str | None = None
    """Adapter folder to go on from, as peft writes it; none begins with a new adapter, which changes nothing yet."""

    def __post_init__(self) -> None:
        require(self.rank >= 1, f"adapter.rank: {self.rank} must be at least 1")
        require_most("adapter", self, ("rank",), MOST_SIZE)
        require(self.alpha > 0, f"adapter.alpha: {self.alpha} must be above 0")
        require(bool(self.targets), "adapter.targets: the list is empty; name modules, or write all-linear")
        require(
            self.start is None or self.method != "none",
            "adapter.start: an adapter to go on from, but adapter.method is none; set lora, dora or rslora",
        )

    @property
    def is_used(self) -> bool:
        return self.method != "none"
