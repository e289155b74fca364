"""The adapter section of a recipe."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from penstock.engine.config.values import MOST_SIZE, require, require_counts, require_kinds


@dataclass(kw_only=True, slots=True)
class AdapterConfig:
    """Train small adapter matrices beside a frozen base model. The base needs weights only, without optimizer state."""

    method: Literal["none", "lora", "dora", "rslora"] = "none"
    """Kind of adapter. none trains the model itself. lora adds a low-rank product to linear modules. dora also trains
    the magnitude of each row. rslora is lora scaled by alpha over the square root of the rank."""
    rank: int = 16
    """Rank of the adapter matrices. It must not exceed the smaller side of any matrix they are added to."""
    alpha: float = 32.0
    """Scale of the adapter: its output is multiplied by alpha / rank."""
    targets: list[str] = field(default_factory=lambda: ["all-linear"])
    """Modules that get an adapter, by the end of their names, for example ["q_proj", "v_proj"], or by whole names with
    *. all-linear means every linear module of the layers, without the head."""
    start: str | None = None
    """Adapter folder, as peft writes it, to continue training from. none starts with a new adapter."""

    def __post_init__(self) -> None:
        require_kinds("adapter", self)
        require_counts("adapter", self, ("rank",), MOST_SIZE)
        require(self.alpha > 0, f"adapter.alpha: {self.alpha} must be above 0")
        require(bool(self.targets), "adapter.targets: the list is empty; name modules, or write all-linear")

    @property
    def is_used(self) -> bool:
        return self.method != "none"
