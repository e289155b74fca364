from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import settings

# Three workers and their children on two cores: threads of their own would wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest test begins first: at the end the other workers would wait for it."""
    items.sort(key=lambda item: "test_story" not in item.nodeid)


@pytest.fixture(autouse=True, scope="session")
def _nothing_of_this_machine() -> Iterator[None]:
    """Plans rest on assumed rates, not on what this machine's owner has measured, and leave nothing for the owner's
    runs: they are the same everywhere."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR"):
            patch.setenv(name, folder)
        yield
