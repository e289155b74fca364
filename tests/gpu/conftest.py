import os
from collections.abc import Iterator

import pytest

# cuBLAS reads it at the process's first product, which another test may make before a deterministic run does.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

EMULATED = "COMPUTES_LIBRARY" in os.environ
"""The GPU is tests/standin's, which computes, and takes as much time as a CPU needs for that."""


@pytest.fixture(scope="session")
def emulated() -> bool:
    return EMULATED


@pytest.fixture
def time_passes() -> None:
    if EMULATED:
        pytest.skip("measures time, which says nothing of the emulated GPU")


@pytest.fixture(autouse=True)
def ordered() -> Iterator[None]:
    """No two accesses of the same bytes are left unordered, where the emulated GPU sees that."""
    if not EMULATED:
        yield
        return
    from computes import emulator

    with emulator.races() as found:
        yield
    assert found == []


@pytest.fixture(scope="module")
def kernels() -> Iterator[None]:
    """All packages of attention kernels where the GPU is emulated, else those that are installed."""
    if not EMULATED:
        yield
        return
    from computes import emulator

    from penstock.engine.attention import flash_attn

    flash_attn._module.cache_clear()
    with emulator.packages():
        yield
    flash_attn._module.cache_clear()
