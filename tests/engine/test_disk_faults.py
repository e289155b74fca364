"""A disk that fails in the middle of training, and no memory, threads or open files left: one clear message, nothing
lost, and the same bits once it is mended."""

import errno
import os
import random
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import tiny
from samples import cases, samples
from used_up import SHORTAGES

from penstock.engine.runtime.runtime import Runtime
from penstock.engine.schedule.ops import Op
from penstock.engine.session import Session
from penstock.storage.errors import UserError

TRAINING = tiny.training(steps=3, global_batch_size=1, chunk_tokens=24)
MOMENTS = samples(1, 4)
"""Random moments at which each fault is tried, on each of two placements."""

PLACEMENTS = {"nvme": (tiny.FLOOR, tiny.FLOOR), "mixed": (1_100_000, 1_000_000)}

Patch = Callable[[pytest.MonkeyPatch, Path], None]


def failing(code: int, *functions: str) -> Patch:
    """From now on the system calls behind os.FUNCTION fail with `code`."""

    def fail(*args: Any) -> int:
        raise OSError(code, os.strerror(code))

    def strike(patch: pytest.MonkeyPatch, drive: Path) -> None:
        for function in functions:
            patch.setattr(os, function, fail)

    return strike


def drive_goes(patch: pytest.MonkeyPatch, drive: Path) -> None:
    """The drive's folder is not there any more, as after an unmount or a pulled plug."""
    drive.rename(drive.with_name("unmounted"))


FAULTS: dict[str, tuple[Patch, str]] = {
    "disk full": (failing(errno.ENOSPC, "pwritev", "pwrite"), "No space left on device.*free some"),
    "write error": (failing(errno.EIO, "pwritev", "pwrite"), "Input/output error"),
    "read error": (failing(errno.EIO, "preadv"), "reading .*Input/output error"),
    "sync error": (failing(errno.EIO, "fsync"), "Input/output error"),
    "drive gone": (drive_goes, "No such file or directory|missing|is it mounted"),
}


def open_run(folder: Path, gpu: str | int, ram: str | int) -> Session:
    return tiny.session(
        folder, t=TRAINING, s=tiny.storage(checkpoint_every=1), gpu=gpu, ram=ram, drives=[folder / "drive"]
    )


def at_op(countdown: int, strike: Callable[[], None]) -> Callable[[Op], None]:
    """What is called as each op begins, and calls `strike` at the `countdown`th."""
    lock = threading.Lock()

    def watched(op: Op) -> None:
        nonlocal countdown
        with lock:
            countdown -= 1
            if countdown == 0:
                strike()

    return watched


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("straight")
    with open_run(folder, tiny.FLOOR, tiny.FLOOR) as session:
        tiny.steps(session)
        return tiny.digest(session.store)


CASES = [(name, placement) for name in FAULTS for placement in PLACEMENTS]


@pytest.mark.sampled
@pytest.mark.parametrize("case", cases(CASES, *CASES[0::4], *CASES[3::4]), ids=" ".join)
def test_a_failing_disk_loses_nothing(tmp_path: Path, straight: str, case: tuple[str, str]) -> None:
    (fault, message), placement = FAULTS[case[0]], PLACEMENTS[case[1]]
    chance = random.Random(" ".join(case))
    for number in range(MOMENTS):
        folder = tmp_path / str(number)
        with pytest.MonkeyPatch.context() as patch, open_run(folder, *placement) as session:
            drive = folder / "drive"
            moment = chance.randrange(1, 400)
            tiny.before_ops(session, at_op(moment, lambda patch=patch, drive=drive: fault(patch, drive)))  # type: ignore[misc]
            with pytest.raises(UserError, match=message) as failure:
                tiny.steps(session)
            before = session.store.generation
        assert str(folder) in str(failure.value), "the message names the file"
        if (folder / "unmounted").exists():
            with pytest.raises(UserError, match=rf"generation {before}.*mounted|mounted.*generation {before}"):
                open_run(folder, *placement)
            (folder / "unmounted").rename(folder / "drive")
        with open_run(folder, *placement) as session:
            assert session.store.generation >= before
            tiny.steps(session)
            assert tiny.digest(session.store) == straight


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own."""
    (folder := tmp_path / "drive").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root; the patched faults run anywhere")
@pytest.mark.parametrize("moment", [30, 200])
def test_a_disk_that_really_fills_up(tmp_path: Path, small_disk: Path, straight: str, moment: int) -> None:
    """Something else takes the last byte in the middle of a step, when activations and new slots still need room."""
    ballast = small_disk / "ballast"
    with open_run(tmp_path, tiny.FLOOR, tiny.FLOOR) as session:
        tiny.before_ops(session, at_op(moment, lambda: fill(ballast)))
        with pytest.raises(UserError, match=rf"{small_disk}.*No space left on device"):
            tiny.steps(session)
    ballast.unlink()
    with open_run(tmp_path, tiny.FLOOR, tiny.FLOOR) as session:
        tiny.steps(session)
        assert tiny.digest(session.store) == straight


def fill(path: Path) -> None:
    """Write to `path` until the disk is full."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    with suppress(OSError):
        while True:
            os.write(fd, bytes(1 << 16))
    os.close(fd)
    assert shutil.disk_usage(path).free == 0


def trained(folder: Path, observer: tiny.Silent, *, resume: bool = False) -> str:
    tiny.train_run(folder, observer, resume=resume, train=TRAINING)
    return tiny.digest_of(folder)


@pytest.mark.parametrize(("name", "moment"), [(name, 60 + 90 * i) for i, name in enumerate(SHORTAGES)])
def test_a_step_in_which_something_is_used_up(tmp_path: Path, straight: str, name: str, moment: int) -> None:
    cause, message = SHORTAGES[name]
    perform, watch = Runtime.perform, at_op(moment, cause)

    def short(self: Runtime, op: Op) -> Any:
        watch(op)
        return perform(self, op)

    observer = tiny.Silent()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runtime, "perform", short)
        with pytest.raises(UserError, match=rf"in op \w+ \S+ .*: {message}") as caught:
            trained(tmp_path, observer)
    intact = re.search(r"Generation \d+ \(step \d\) is intact: fix the cause, then resume", str(caught.value))
    assert (intact is not None) == bool(observer.metrics), "a run without a step has nothing to resume from"
    assert trained(tmp_path, tiny.Silent(), resume=True) == straight
