"""Errors that say that the process has something no more of, as Python, torch and the system really word them."""

import os
import threading
from collections.abc import Callable

import pytest
import torch
from used_up import SHORTAGES

from penstock.storage.errors import used_up


@pytest.mark.parametrize("name", SHORTAGES)
def test_what_is_used_up_is_a_message(name: str) -> None:
    cause, message = SHORTAGES[name]
    with pytest.raises((MemoryError, OSError, RuntimeError)) as caught:
        cause()
    found = used_up(caught.value)
    assert found is not None
    assert message in str(found)


@pytest.mark.parametrize(
    "cause",
    [lambda: os.stat("/no/such/file"), lambda: torch.ones(2) + torch.ones(3), lambda: threading.Lock().release()],
)
def test_other_errors_are_none(cause: Callable[[], object]) -> None:
    with pytest.raises((OSError, RuntimeError)) as caught:
        cause()
    assert used_up(caught.value) is None
