"""What an action is: one thing that a lane can be asked to do. The table of all of them is schedule/actions.py."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from penstock.engine.plan.activations import GRADIENT_OF
from penstock.engine.plan.problem import Tier
from penstock.engine.schedule import resources as r

Lane = Literal["nvme_read", "h2d", "compute", "d2h", "optimizer", "nvme_write", "ranks"]
WORKING: tuple[Lane, ...] = ("nvme_read", "h2d", "compute", "d2h", "optimizer", "nvme_write")
WAITS: Lane = "ranks"
"""It does no work of its own: it waits for other ranks, where there are any."""
LANES: tuple[Lane, ...] = (*WORKING, WAITS)


class Cost(Enum):
    """Which function of engine/forecast/costs.py says how long an op takes."""

    BLOCK = "block"
    """By FLOPs and bytes of the block on the op's chunk (`Action.work`)."""
    BUFFER = "buffer"
    """By the bytes of a whole buffer on the compute device."""
    DEQUANTISE = "dequantise"
    """By those of a buffer as it is stored and as it is computed with."""
    COPY = "copy"
    UPDATE = "update"
    ADD = "add"
    """By the bytes of a part of every rank's gradient."""
    SIGNAL = "signal"
    REPORT = "report"
    READ = "read"
    READ_TO_DEVICE = "read_to_device"
    WRITE = "write"
    COMMIT = "commit"


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What a compute op does to a chunk of a block, in units of the block's own figures."""

    matmul: int = 0
    """Times the forward FLOPs of all matrix products."""
    projection: int = 0
    """Times those of queries, keys and values."""
    gradients: int = 0
    """Times those of all matrix products by weights that are trained."""
    projection_gradients: int = 0
    """Times those of queries, keys and values, as far as their weights are trained."""
    recompute: bool = False
    """And those that backward's graph needs once more, where the graph was not saved."""
    pairs: tuple[int, int] | None = None
    """FLOPs per visible pair and element of q.k and of p.v; None: the op attends to nothing."""
    one_chunk_of_keys: bool = False
    """The pairs are those of a single chunk of keys, which the slot KEYS names."""
    sums_gradients: bool = False
    """Adds the block's gradients to their float32 sums."""
    fresh_gradients: bool = False
    """The first of them are put in the place of the sums, which need not be zeroed before."""
    looks_up: bool = False
    """Takes rows of its weights instead of multiplying by them."""
    logits: bool = False
    """Passes the logits of its tokens through memory."""


Skips = Literal["", "load", "gradient", "update", "commit"]
"""When an op on a group of experts is left out: nothing is sent to the group now; nothing was in this step; there is
nothing to apply that is needed now; the state is what the last generation holds."""
Phase = Literal["", "forward", "recompute", "backward", "evaluate", "generate", "update"]
StepPart = Literal["", "forward", "backward", "update", "validation", "samples"]
"""What people call the parts of a step."""
_PART_OF: dict[Phase, StepPart] = {
    "forward": "forward",
    "recompute": "backward",
    "backward": "backward",
    "evaluate": "validation",
    "generate": "samples",
    "update": "update",
}


@dataclass(frozen=True, slots=True)
class Move:
    """What an action moves, as seen from the compute device."""

    kind: Literal["weights", "state", "gradient"]
    direction: Literal["in", "out"]
    to: Literal["gpu", "ram", "home"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Action:
    """One entry of the table; compared by identity."""

    name: str
    lane: Lane
    says: str
    """What it does, for people: `runs a layer forward`."""
    cost: Cost
    reads: tuple[str, ...] = ()
    """Spaces (engine/schedule/resources.py) of what it may read."""
    writes: tuple[str, ...] = ()
    """Spaces of what it may write, whatever was there before."""
    adds: tuple[str, ...] = ()
    """Spaces of what it may change: read and written."""
    phase: Phase = ""
    skips: Skips = ""
    """When it is left out; empty: never."""
    work: Work = Work()
    measured_as: str | None = None
    """Name of the action whose measured time stands for this one's."""
    kind: str = ""
    """Which activation a copy, a spill or an unspill is about: x, dy, saved, kv, dkv or graph."""
    move: Move | None = None

    @property
    def shown_on(self) -> Lane:
        """The lane that people see it on: what holds up a lane until another rank is done does no work of that lane."""
        return WAITS if self.cost is Cost.SIGNAL else self.lane

    @property
    def part(self) -> StepPart:
        """The part of a step whose work it is; empty where that depends on the op, as weights are read for several."""
        if self.phase or self.kind in _GRADIENT_KINDS:
            return _PART_OF.get(self.phase, "backward")
        touched = {*self.reads, *self.writes, *self.adds}
        if touched & _OF_UPDATE or r.NVME_WEIGHTS in self.writes:
            return "update"
        return "backward" if touched & _GRADIENTS else ""

    @property
    def route(self) -> tuple[Tier, Tier] | None:
        """From which tier to which it moves bytes; None for what moves none."""
        if not self.cargo:
            return None
        if self.lane == "nvme_write":
            return "ram", "nvme"
        if self.lane == "d2h":
            return "gpu", "ram"
        target: Tier = "gpu" if any(space.startswith("gpu.") for space in self.writes) else "ram"
        return "nvme" if self.lane == "nvme_read" else "ram", target

    @property
    def result(self) -> str | None:
        """Where it leaves what a pass is there to find; None for what finds nothing."""
        return next((space for space in self.writes if space in _RESULTS), None)

    @property
    def cargo(self) -> str:
        """What it moves, for people; empty for what moves nothing."""
        if self.move is not None:
            return _CARGO[self.move.kind]
        if r.RAM_SAMPLE_KV in (*self.reads, *self.writes):
            return "activations"
        if self.kind and (self.reads or self.adds):  # else it only removes a file
            return "activation gradients" if self.kind in _GRADIENT_KINDS else "activations"
        return _CARGO["state"] if r.NVME_STATE in self.writes else ""


_GRADIENT_KINDS = (*GRADIENT_OF.values(), "dkv", "dq", "drecurrent")
_RESULTS = (r.GPU_LOSSES, r.GPU_EVALUATIONS, r.GPU_LOGITS)
_GRADIENTS = {r.GPU_GRADIENT, r.RAM_GRADIENT, r.RAM_RING, r.NVME_GRADIENT}
_OF_UPDATE = {r.GPU_STATE, r.RAM_STATE, r.RAM_STATE_STAGE, r.NVME_STATE, r.GENERATION}
_CARGO = {"weights": "weights", "state": "optimizer state", "gradient": "gradients"}
