import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
from nvme_state import make

from penstock.storage.generations.store import NvmeStore
from penstock.storage.tier import drives


@pytest.fixture(scope="session")
def processes() -> ForkServerContext:
    """Children forked from a clean process that has the imports: forking this one would inherit torch's threads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["penstock.storage.generations.store", "nvme_state"])
    return context


ONE, TWO = pytest.param(False, id="one drive", marks=pytest.mark.long), pytest.param(True, id="two drives")


@pytest.fixture(params=[ONE, TWO])
def store(
    tmp_path: Path, workspace: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[NvmeStore]:
    """Generation 3 of a store, or the module's `GENERATION`; one call after the other, so that a number names a place.

    One drive is a folder on disk; two are in memory where there is some: each sync of a disk takes its time.
    """
    monkeypatch.setattr(drives, "WRITE_THREADS", 1)
    base, folders = (workspace, [workspace / "a", workspace / "b"]) if request.param else (tmp_path, None)
    generation = getattr(request.module, "GENERATION", 3)
    store = make(base / "state", *range(1, generation + 1), drives=folders)
    yield store
    store.close()


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """In memory for a module that says so."""
    if not getattr(request.module, "IN_MEMORY", False):
        return tmp_path
    folder: Path = request.getfixturevalue("workspace")
    return folder


@pytest.fixture
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """For many small stores: in memory where there is some, since whoever opens and commits them syncs."""
    shm = Path("/dev/shm")
    place = shm if os.access(shm, os.W_OK) else tmp_path_factory.getbasetemp()
    folder = Path(tempfile.mkdtemp(prefix="penstock-test-", dir=place))
    yield folder
    shutil.rmtree(folder)
