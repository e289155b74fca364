"""Handlers of actions: methods that say with `@handles` which entries of the table they carry out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from penstock.engine.schedule.action import Action
from penstock.engine.schedule.ops import Op


class Skipped:
    """What an op comes to that is left out."""


SKIPPED = Skipped()
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
    result: dict[Action, Handler] = {}
    for owner in owners:
        for name, function in vars(type(owner)).items():
            for action in getattr(function, _ATTRIBUTE, ()):
                assert action not in result, f"two handlers of {action.name}"
                result[action] = getattr(owner, name)
    return result


def gather(futures: Sequence[Future[Any]]) -> Future[None]:
    """A future that is done when all of `futures` are, with the first exception among them."""
    result: Future[None] = Future()
    waiting = iter(futures)

    def go_on(_: Future[Any] | None = None) -> None:
        for future in waiting:
            if not future.done():
                future.add_done_callback(go_on)
                return
        error = next((error for future in futures if (error := future.exception()) is not None), None)
        if error is None:
            result.set_result(None)
        else:
            result.set_exception(error)

    go_on()
    return result
