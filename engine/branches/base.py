"""The branches that there are: train.split_layers -> a part of a layer that is streamed as a block of its own.

In the layer a stand-in takes the part's place: it notes what the layer hands to it and returns zeros; the branch's
block adds the part's output. That is exact where the layer only adds it to the rest; else the self-check finds other
gradients.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from penstock.engine.config import nearest
from penstock.storage.files.errors import UserError


class Sent(NamedTuple):
    """A tensor [tokens, width] that a layer hands to its branch."""

    width: int
    dtype: Literal["compute", "int32", "float32"] = "compute"
    """As it travels from block to block; float32 becomes the compute dtype again, int32 int64."""

    @property
    def has_gradient(self) -> bool:
        return self.dtype != "int32"

    def nbytes(self, compute_bytes: int) -> int:
        """Bytes of a token."""
        return self.width * (compute_bytes if self.dtype == "compute" else 4)


@dataclass(frozen=True, slots=True)
class Branch:
    """An entry of `BRANCHES`."""

    says: str
    """What it is, for people: `a layer's experts`."""
    implementation: str
    """Module with `find` (a decoder layer -> the name in it of the part, or None) and `sent` (hidden size, experts a
    token -> the `Sent` that the layer calls it with, in order)."""

    def find(self, layer: Any) -> str | None:
        name: str | None = importlib.import_module(self.implementation).find(layer)
        return name

    def sent(self, hidden_size: int, experts_per_token: int) -> tuple[Sent, ...]:
        return tuple(importlib.import_module(self.implementation).sent(hidden_size, experts_per_token))


BRANCHES = {
    "experts": Branch("a layer's experts", "penstock.engine.branches.experts"),
}


def find_branch(name: str) -> Branch:
    """The entry of train.split_layers. Raises UserError with the nearest name for an unknown one."""
    if name not in BRANCHES:
        raise UserError(f"train.split_layers: '{name}' is unknown; {nearest(name, BRANCHES)}")
    return BRANCHES[name]
