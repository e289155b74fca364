"""Handlers of actions: methods that say with `@handles` which entries of the table they carry out."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from penstock.engine.schedule.actions import Action
from penstock.engine.schedule.ops import Op

Handler = Callable[[Op], Future[Any] | None]
"""Carries out an op; a Future means that it goes on in the background."""
_Method = TypeVar("_Method", bound=Callable[..., Any])
_ATTRIBUTE = "_penstock_actions"


def handles(*actions: Action) -> Callable[[_Method], _Method]:
    def register(method: _Method) -> _Method:
        setattr(method, _ATTRIBUTE, actions)
        return method

    return register


def handlers_of(*owners: object) -> dict[Action, Handler]:
    """Action -> the method of one of `owners` that carries it out; two for one action are a mistake."""
    found: dict[Action, Handler] = {}
    for owner in owners:
        for name, function in vars(type(owner)).items():
            for action in getattr(function, _ATTRIBUTE, ()):
                assert action not in found, f"two handlers of {action.name}"
                found[action] = getattr(owner, name)
    return found
