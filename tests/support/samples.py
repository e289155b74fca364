"""How many examples tests look at: a few in `make test`, all of them in `make test-all`."""

import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import settings

_ALL = os.environ.get("ALL_SAMPLES") == "1"


def samples(few: int, many: int) -> int:
    """How many to look at; for a test that bears the mark `sampled`."""
    return many if _ALL else few


def cases(every: Iterable[Any], *few: Any) -> list[Any]:
    """What `parametrize` takes: of `every` case, `make test` sees those of `few`."""
    every = list(every)
    assert set(few) < set(every), few
    return [pytest.param(case, marks=() if case in few else pytest.mark.long) for case in every]


def sampled(few: int, many: int, **more: Any) -> Callable[[Any], Any]:
    """The mark, and hypothesis' settings with so many examples; `more` of them."""

    def decorate(test: Any) -> Any:
        return pytest.mark.sampled(settings(**more, max_examples=samples(few, many))(test))

    return decorate
