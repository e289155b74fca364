import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def _nothing_of_this_machine() -> Iterator[None]:
    """Plans rest on assumed rates, not on what this machine's owner has measured, and leave nothing for the owner's
    runs: they are the same everywhere."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR"):
            patch.setenv(name, folder)
        yield
