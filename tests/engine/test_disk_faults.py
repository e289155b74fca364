"""A disk that fails in the middle of training: one clear message, nothing lost, and the same bits once it is mended."""

import errno
import os
import random
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import tiny
from samples import cases, samples

from penstock.engine.events import StepMetrics
from penstock.engine.schedule.ops import Op
from penstock.engine.session import Session
from penstock.storage.errors import UserError
from penstock.storage.nvme import NvmeStore

STEPS = 3
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
    training = tiny.training(steps=STEPS, global_batch_size=1, chunk_tokens=24)
    storage = tiny.storage(checkpoint_every=1)
    return tiny.session(folder, t=training, s=storage, gpu=gpu, ram=ram, drives=[folder / "drive"])


def strike_at(session: Session, countdown: int, strike: Callable[[], None]) -> None:
    """Call `strike` when the `countdown`th op from now begins."""
    lock = threading.Lock()

    def watched(op: Op) -> None:
        nonlocal countdown
        with lock:
            countdown -= 1
            if countdown == 0:
                strike()

    tiny.before_ops(session, watched)


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
    for moment in range(MOMENTS):
        folder = tmp_path / str(moment)
        with pytest.MonkeyPatch.context() as patch, open_run(folder, *placement) as session:
            drive = folder / "drive"
            strike_at(session, chance.randrange(1, 400), lambda patch=patch, drive=drive: fault(patch, drive))  # type: ignore[misc]
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


def test_the_message_names_file_and_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Filling(tiny.Silent):
        def on_step(self, metrics: StepMetrics) -> None:
            super().on_step(metrics)
            if metrics.step == 3:
                FAULTS["disk full"][0](monkeypatch, tmp_path)

    with pytest.raises(UserError, match=rf"{tmp_path}/state/.*No space left on device.*Generation \d \(step [12]\) is"):
        tiny.train_run(tmp_path, Filling(), budgets=tiny.BudgetConfig(gpu="600KiB", ram="1MiB"))


def test_short_transfers_change_nothing(tmp_path: Path, straight: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write, write_views, read = os.pwrite, os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: write(fd, data[:4096], offset))
    monkeypatch.setattr(os, "pwritev", lambda fd, views, offset: write_views(fd, [views[0][:4096]], offset))
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: read(fd, [views[0][:4096]], offset))
    with open_run(tmp_path, tiny.FLOOR, tiny.FLOOR) as session:
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
        strike_at(session, moment, lambda: fill(ballast))
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


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[7] ^= 64
    path.write_bytes(content)


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (_flip, "checksum mismatch"),
    (lambda path: os.truncate(path, path.stat().st_size - 4096), "has .* bytes instead of"),
    (lambda path: path.unlink(), "missing"),
]


def test_a_damaged_chunk_is_named_with_its_generation(tmp_path: Path, straight: str) -> None:
    with open_run(tmp_path, tiny.FLOOR, tiny.FLOOR) as session:
        tiny.steps(session, 2)
        generation = session.store.generation
    with closing(NvmeStore.open(tmp_path / "state")) as store:
        array = store._arrays["layers.1", "exp_avg"]
        path = array.committed(0)[1]
    whole = path.read_bytes()
    for damage, message in DAMAGES:
        damage(path)
        with (
            open_run(tmp_path, tiny.FLOOR, tiny.FLOOR) as session,
            pytest.raises(UserError, match=rf"{path} \(generation {generation}\): .*{message}"),
        ):
            tiny.steps(session)
        path.write_bytes(whole)
    with open_run(tmp_path, tiny.FLOOR, tiny.FLOOR) as session:
        tiny.steps(session)
        assert tiny.digest(session.store) == straight
