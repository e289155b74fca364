"""Every operation with one of its system calls failing, whichever it is: an error that names a path, nothing lost."""

import errno
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from nvme_state import SPECS, advance, assert_holds
from powercut import CHANGING
from samples import samples

from storage import drives as drives_module
from storage.checkpoints import delete_checkpoint, list_checkpoints
from storage.errors import UserError
from storage.nvme import NvmeStore

MOMENTS = samples(4, 10)
"""Calls of each operation that are made to fail, chosen at random; all of them were tried, which takes minutes."""


@contextmanager
def failing_call(number: int, code: int) -> Iterator[list[str]]:
    """Call `number` (from 0) of those that change the disk fails with `code`; gives the names of the calls made."""
    calls: list[str] = []
    patch = pytest.MonkeyPatch()

    def patched(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "open" and not args[1] & (os.O_CREAT | os.O_TRUNC):
                return real(*args, **kwargs)
            calls.append(name)
            if len(calls) == number + 1:
                raise OSError(code, os.strerror(code), args[0] if isinstance(args[0], str) else None)
            return real(*args, **kwargs)

        return call

    for name in CHANGING:
        patch.setattr(os, name, patched(name))
    try:
        yield calls
    finally:
        patch.undo()


def _create(root: Path) -> None:
    NvmeStore.create(root / "new", SPECS, budget_bytes=None, drives=[root / "new", root / "new2"]).close()


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
    def refuse(source: Any, target: Any) -> None:
        raise OSError(errno.EPERM, "no links")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "link", refuse)
        _checkpoint(root)


def _restore(root: Path) -> None:
    with closing(NvmeStore.open(root)) as store:
        store.restore("one")


def _delete(root: Path) -> None:
    delete_checkpoint(root, "one")


def _error_of(act: Callable[[Path], None], root: Path) -> UserError | None:
    try:
        act(root)
    except UserError as error:
        return error
    return None


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
    with closing(NvmeStore.create(base, SPECS, budget_bytes=None, drives=[base, base / "b"])) as store:
        advance(store, 1)
        store.checkpoint("one")
        advance(store, 2, 3)
    shutil.copytree(base, root)
    with failing_call(-1, 0) as calls:
        act(root)
    count, rng, errors = len(calls), random.Random(operation), 0
    assert count >= 7
    for number in sorted(rng.sample(range(count), min(count, MOMENTS))):
        shutil.rmtree(root)
        shutil.copytree(base, root)
        with failing_call(number, rng.choice([errno.EIO, errno.ENOSPC])) as calls:
            error = _error_of(act, root)
        errors += error is not None
        assert error is None or str(root) in str(error), (number, calls[number], error)
        with closing(NvmeStore.open(root)) as store:
            step = store.meta["step"]
            assert step in steps
            assert_holds(store, step)
            store.verify()
            for info in list_checkpoints(root):
                with closing(NvmeStore.open(root / "checkpoints" / info.name)) as kept:
                    assert_holds(kept, info.meta["step"])
            advance(store, 8, 9)
            assert_holds(store, 9)
        if operation != "delete":
            assert "one" in [info.name for info in list_checkpoints(root)]
        if operation == "create":
            _create(root)
    assert errors >= MOMENTS // 3
