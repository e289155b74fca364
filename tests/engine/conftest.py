"""What many runs of one process have in common is found once: a model taken apart, that it computes what transformers
does, and the best plan, for which drives have as much room at any time. Files are not synced: what a power cut leaves
is the storage tests' business."""

import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from transformers import PretrainedConfig

from penstock.engine import export, opening, session
from penstock.engine.forecast.request import PlanRequest
from penstock.engine.machine import budgets
from penstock.engine.model import anatomy
from penstock.engine.runtime import sources


def _once(find: Callable[..., Any], key_of: Callable[..., object]) -> Callable[..., Any]:
    """`find`, called once for each key; what it raises, and what has no key, every time."""
    found: dict[object, Any] = {}

    def known(first: Any, *rest: Any, **named: Any) -> Any:
        key = key_of(first, *rest, **named)
        if key is None:
            return find(first, *rest, **named)
        if key not in found:
            found[key] = find(first, *rest, **named)
        return found[key]

    return known


def _of_model(config: PretrainedConfig, *rest: Any, **named: Any) -> object:
    """Where an adapter goes on from changes nothing of the model."""
    options = re.sub(r"start='[^']*'", "", repr(rest) + repr(sorted(named.items())))
    return type(config), config.to_json_string(use_diff=False), options


def _of_search(request: PlanRequest, machine: Any, *rest: Any, **named: Any) -> object:
    if named.get("before") is not None or (rest and rest[0] is not None):  # measured times
        return None
    problems = tuple(request.problem(chunk) for chunk in request.chunks)
    return problems, repr(machine), repr(rest), repr(sorted(named.items()))


_check_model = _once(opening.check_model, _of_model)
_search = _once(PlanRequest.search, _of_search)
_take_apart = _once(anatomy.take_apart, _of_model)


@pytest.fixture(autouse=True, scope="module")
def _quick_runs() -> Iterator[None]:
    """Of one module after the other: other folders' tests, which this process may run too, are about the real ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "check_model", _check_model)
        patch.setattr(PlanRequest, "search", _search)
        for module in (anatomy, export, sources):
            patch.setattr(module, "take_apart", _take_apart)
        patch.setattr(budgets, "free_disk", lambda folder: 2**40)
        patch.setattr(os, "fsync", lambda fd: None)
        patch.setattr(session, "give_back_memory", lambda: None)
        yield
