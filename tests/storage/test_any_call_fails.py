"""Every operation with one of its system calls failing, whichever it is: an error that names a path, nothing lost."""

import errno
import random
import shutil
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from nvme_state import advance, assert_holds, assert_whole, make
from samples import samples
from system_calls import CHANGING, failing, said_by

from storage import drives as drives_module
from storage.checkpoints import delete_checkpoint, list_checkpoints
from storage.nvme import NvmeStore

MOMENTS = samples(4, 10)
"""Calls of each operation that are made to fail, chosen at random; all of them were tried, which takes minutes."""


def _create(root: Path) -> None:
    make(root / "new", drives=[root / "new", root / "new2"]).close()


def _move(root: Path) -> None:
    with closing(NvmeStore.open(root, drives=[root / "b", root / "c"])) as store:
        advance(store, 4, 5)


def _commit(root: Path) -> None:
    with closing(NvmeStore.open(root)) as store:
        advance(store, 4)


def _checkpoint(root: Path) -> None:
    with closing(NvmeStore.open(root)) as store:
        store.checkpoint("three")


def _copy(root: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        failing(patch, ["link"], errno.EPERM)
        _checkpoint(root)


def _restore(root: Path) -> None:
    with closing(NvmeStore.open(root)) as store:
        store.restore("one")


def _delete(root: Path) -> None:
    delete_checkpoint(root, "one")


OPERATIONS: dict[str, tuple[Callable[[Path], None], set[int]]] = {
    "create": (_create, {3}),
    "commit": (_commit, {3, 4}),
    "change of drives": (_move, {3, 4, 5}),
    "checkpoint": (_checkpoint, {3}),
    "checkpoint by copies": (_copy, {3}),
    "restore": (_restore, {3, 1}),
    "delete": (_delete, {3}),
}
"""The operation, and the steps that may be committed afterwards."""


@pytest.mark.sampled
@pytest.mark.parametrize("operation", OPERATIONS)
def test_any_call_fails(workspace: Path, monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    monkeypatch.setattr(drives_module, "WRITE_THREADS", 1)
    act, steps = OPERATIONS[operation]
    base, root = workspace / "base", workspace / "state"
    with closing(make(base, 1, drives=[base, base / "b"])) as store:
        store.checkpoint("one")
        advance(store, 2, 3)
    shutil.copytree(base, root)
    with monkeypatch.context() as patch:
        calls = failing(patch, CHANGING, 0, times=0)
        act(root)
    count, rng, errors = len(calls), random.Random(operation), 0
    assert count >= 7
    for number in sorted(rng.sample(range(count), min(count, MOMENTS))):
        shutil.rmtree(root)
        shutil.copytree(base, root)
        with monkeypatch.context() as patch:
            calls = failing(patch, CHANGING, rng.choice([errno.EIO, errno.ENOSPC]), first=number, times=1)
            said = said_by(partial(act, root))
        errors += said is not None
        assert said is None or str(root) in said, (number, calls[number], said)
        with closing(NvmeStore.open(root)) as store:
            step = store.meta["step"]
            assert step in steps
            assert_holds(store, step)
            store.verify()
            for info in list_checkpoints(root):
                assert_whole(root / "checkpoints" / info.name, info.meta["step"])
            advance(store, 8, 9)
            assert_holds(store, 9)
        if operation != "delete":
            assert "one" in [info.name for info in list_checkpoints(root)]
        if operation == "create":
            _create(root)
    assert errors >= MOMENTS // 3
