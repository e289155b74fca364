"""Ops for tests that need any: of an action of the table, or of a made-up one that only has a lane."""

from functools import cache
from typing import Any

from penstock.engine.schedule.action import Action, Cost, Lane
from penstock.engine.schedule.ops import Op


@cache
def made_up(lane: Lane) -> Action:
    """An action that no table has."""
    return Action(name="noop", lane=lane, says="does nothing", cost=Cost.COPY)


def an_op(number: int, action: Action | Lane, *deps: int, **fields: Any) -> Op:
    """Op `number`; where only its lane is given, of a made-up action."""
    values: dict[str, Any] = {"block": "b", "index": 0, "step": 1, "reads": (), "writes": ()}
    made = action if isinstance(action, Action) else made_up(action)
    return Op(id=number, action=made, deps=deps, **(values | fields))
