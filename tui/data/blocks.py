"""Which block is where now: from the plan, from the ops that have ended and from those under way.

A block's weights, optimizer state and gradient have a home tier each. Ops move them: weights come to the GPU and lose
their slot to later ones; state is read, updated and written back; a gradient is summed on the GPU, waits at home for
the optimizer and is gone with the update.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.app.runs.ops import READ_STATE, action_of
from penstock.tui.data.fields import number, objects, text, whole

KINDS = ("weights", "state", "gradient")
Kind = Literal["weights", "state", "gradient"]

_OUTER, _TOWER = "embedding and head", "vision tower"
"""Pools of the slots of what is no layer."""
_FROZEN = "frozen "
"""Begins the pools of what is never trained."""
NOWHERE = ""
"""Place of a gradient that does not exist."""

RECENT_S = 0.25
"""Ops that ended so lately still count as under way: many last much less than one looks."""

_MOST_BLOCKS = 2_000
"""More than any model has: of a foreign plan no more are looked at."""

_MOST_SPANS = 20_000
"""Of a batch no more are looked at: they are several steps, and only the last state of each block is wanted."""


@dataclass(slots=True)
class BlockLocation:
    """One block: the home tiers, and where its parts are now."""

    name: str
    home: dict[str, str]
    """Kind -> gpu, ram or nvme; an empty string where the plan does not say."""
    location: dict[str, str] = field(default_factory=dict)
    moving: dict[str, str] = field(default_factory=dict)
    """Kind -> `in` or `out`, towards the GPU or away from it, while it is in flight."""
    num_bytes: float | None = None
    """Of its weights, state and gradient, as the plan counts them."""
    doing: str = ""
    """`forward`, `backward` or `update` while an op works on the block."""


class BlockLocations:
    """Follows the ops of a run. Used by the thread that reads; `snapshot` gives others what they may keep."""

    def __init__(self, plan: Mapping[str, Any]) -> None:
        self._home: dict[str, dict[str, str]] = {}
        self._num_bytes: dict[str, float | None] = {}
        self._block_of: dict[str, str] = {}
        """Buffer -> its block: what is frozen of a block, or kept in float32, has a buffer of its own."""
        self._shown: dict[str, str] = {}
        """Block -> its largest buffer, whose weights are shown for all."""
        self._frozen: dict[str, bool] = {}
        """Block -> whether that is frozen."""
        largest: dict[str, float] = {}
        for buffer in objects(plan, "blocks")[:_MOST_BLOCKS]:
            name, size = text(buffer, "name"), number(buffer, "bytes")
            if not name:
                continue
            block, frozen = text(buffer, "block") or name, buffer.get("frozen") is True
            self._block_of[name] = block
            home = self._home.setdefault(block, dict.fromkeys(KINDS, ""))
            for kind in () if frozen else ("state", "gradient"):
                home[kind] = home[kind] or text(buffer, kind) or ""
            if block not in largest or (size or 0) > largest[block]:
                home["weights"], largest[block], self._frozen[block] = text(buffer, "weights") or "", size or 0, frozen
                self._shown[block] = name
            known = self._num_bytes.get(block, 0.0)
            self._num_bytes[block] = None if size is None or known is None else known + size
        slots = {}
        for kind, pool in itertools.product(("", _FROZEN), ("layer", _OUTER, _TOWER)):
            slots[kind + pool] = whole(plan, "weight_slots", kind + pool) or 0
        self._slots = {pool: max(1, count) for pool, count in slots.items()}
        self._outer_pools = {pool for pool, count in slots.items() if count and not pool.endswith("layer")}
        self._on_gpu: dict[str, OrderedDict[str, None]] = {pool: OrderedDict() for pool in slots}
        """Weights in slots, by pool, oldest first."""
        self._location: dict[str, dict[str, str]] = {kind: {} for kind in KINDS}
        """Kind -> block -> where it is, unless it is at home."""

    def add(self, spans: Sequence[Mapping[str, Any]]) -> None:
        """Follow ops that have ended, in the order in which they did."""
        for span in spans[-_MOST_SPANS:]:
            op, block = span.get("op"), span.get("block")
            if not isinstance(op, str) or not isinstance(block, str):
                continue
            self._follow(op, block)

    def _follow(self, op: str, name: str) -> None:
        block, action = self._block_of.get(name, name), action_of(op)
        if block not in self._home or action is None:
            return
        if (move := action.move) is not None:
            home = self._home[block][move.kind]
            if move.kind == "weights" and move.to == "gpu" and home != "gpu" and self._stands_for(name):
                self._take_slot(block)
            elif move.kind in ("gradient", "state"):
                self._location[move.kind][block] = home if move.to == "home" else move.to
            if op == READ_STATE and self._location["gradient"].get(block) == "nvme":
                self._location["gradient"][block] = "ram"
        elif action.work.sums_gradients and self._home[block]["gradient"]:
            self._location["gradient"][block] = "gpu"
        elif action.phase == "update":
            self._location["gradient"][block] = NOWHERE
            pool = self._on_gpu[self._pool(block)]
            if self._home[block]["weights"] != "gpu" and self._stands_for(name):
                pool.pop(block, None)  # an older version

    def _stands_for(self, buffer: str) -> bool:
        """Whether the weights of a buffer are those shown for its block."""
        return self._shown[self._block_of.get(buffer, buffer)] == buffer

    def _pool(self, block: str) -> str:
        kind = _FROZEN if self._frozen[block] else ""
        outer = kind + (_TOWER if block == "vision" else _OUTER)
        return kind + "layer" if block.startswith("layers.") or outer not in self._outer_pools else outer

    def _take_slot(self, block: str) -> None:
        pool = self._pool(block)
        held = self._on_gpu[pool]
        held.pop(block, None)
        held[block] = None
        while len(held) > self._slots[pool]:
            held.popitem(last=False)

    def snapshot(self, under_way: Iterable[tuple[str, str]] = (), *, live: bool = True) -> list[BlockLocation]:
        """Every block with the ops under way, as (op, block); of a run that is not live everything is at home."""
        blocks = {}
        for name, home in self._home.items():
            location = home | {"gradient": NOWHERE}
            if live:
                location |= {kind: moved[name] for kind, moved in self._location.items() if name in moved}
                if name in self._on_gpu[self._pool(name)]:
                    location["weights"] = "gpu"
            blocks[name] = BlockLocation(name, home, location, num_bytes=self._num_bytes[name])
        for op, name in under_way:
            block = self._block_of.get(name, name)
            if block in blocks:
                _apply(blocks[block], op)
        return list(blocks.values())


def _apply(block: BlockLocation, op: str) -> None:
    action = action_of(op)
    if action is None:
        return
    if action.move is not None:
        block.moving[action.move.kind] = action.move.direction
    elif action.phase == "update":
        block.doing = "update"
    elif action.phase == "backward":
        block.doing = "backward"
        if block.home["gradient"]:
            block.location["gradient"] = "gpu"
    elif action.phase in ("forward", "evaluate"):
        block.doing = block.doing or "forward"
