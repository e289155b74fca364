import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from nvme_state import SPECS, advance

from storage import drives
from storage.nvme import NvmeStore


@pytest.fixture(params=[1, 2], ids=["one drive", "two drives"])
def third_generation(
    tmp_path: Path, workspace: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[NvmeStore]:
    """Generation 3 of a store, in slot 0; one call after the other, so that a number names a place.

    One drive is a folder on disk; two are in memory where there is some, which is faster.
    """
    monkeypatch.setattr(drives, "WRITE_THREADS", 1)
    base, folders = (tmp_path, None) if request.param == 1 else (workspace, [workspace / "a", workspace / "b"])
    store = NvmeStore.create(base / "state", SPECS, budget_bytes=None, drives=folders)
    advance(store, 1, 2, 3)
    yield store
    store.close()


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Path]:
    """For many small stores: in memory where there is some, since whoever opens and commits them syncs."""
    shm = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="penstock-test-", dir=shm if os.access(shm, os.W_OK) else tmp_path))
    yield folder
    shutil.rmtree(folder)
