import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from nvme_state import SPECS, advance

from storage import drives
from storage.nvme import NvmeStore


@pytest.fixture(params=[1, 2], ids=["one drive", "two drives"])
def third_generation(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[NvmeStore]:
    """Generation 3 of a store, in slot 0; one call after the other, so that a number names a place."""
    monkeypatch.setattr(drives, "WRITE_THREADS", 1)
    folders = None if request.param == 1 else [tmp_path / "a", tmp_path / "b"]
    store = NvmeStore.create(tmp_path / "state", SPECS, budget_bytes=None, drives=folders)
    advance(store, 1, 2, 3)
    yield store
    store.close()


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Path]:
    """For many small stores: in memory where there is some, since whoever opens and commits them syncs."""
    shm = Path("/dev/shm")
    folder = (shm if os.access(shm, os.W_OK) else tmp_path) / f"penstock-test-{os.getpid()}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)
