"""What the ops in a run's spans are, from the engine's table of actions, for whoever reads runs."""

from __future__ import annotations

from functools import lru_cache

from penstock.engine.events import location_text as location_text
from penstock.engine.events import op_text as op_text
from penstock.engine.schedule import actions as a
from penstock.engine.schedule.action import Action
from penstock.engine.schedule.actions import ACTIONS

STEP_END = a.CLIP.name
"""The op with whose end a step ends: loss and gradient norm are known."""
BETWEEN_STEPS = {a.EVALUATE.name: "validating", a.CHOOSE.name: "writing samples"}
"""The ops with which a validation, and each token of samples, end, and what was done then: between a step's end and the
next one's first op."""
READ_STATE = a.READ_STATE.name


def action_of(op: str) -> Action | None:
    """The entry of the table for an op of a span; None for one that it does not know."""
    return ACTIONS.get(op)


PARTS = ("forward", "backward", "update", "validation", "samples")
"""The parts of a step, in the order of a legend."""


@lru_cache(maxsize=4096)
def part_of(op: str) -> str:
    """The part of a step whose work an op is, one of PARTS; empty where its name does not tell."""
    result = action_of(op)
    return "" if result is None else result.part


@lru_cache(maxsize=4096)
def route_of(op: str) -> tuple[str, str] | None:
    """From which tier to which (`nvme`, `ram`, `gpu`) an op moves bytes; None for what moves none."""
    result = action_of(op)
    return None if result is None else result.route


@lru_cache(maxsize=4096)
def cargo_of(op: str) -> str:
    """What an op moves, for people: `weights`; empty for what moves nothing."""
    result = action_of(op)
    return "" if result is None else result.cargo
