"""What can go wrong with a drive: a clear message, nothing lost, and it works once the cause is gone.

Errors of the operating system are played by patched system calls, which runs everywhere; where this is root, a full
disk is also a real one, on a small file system of its own.
"""

import errno
import itertools
import mmap
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import closing, contextmanager, suppress
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch
from nvme_state import SPECS, advance, assert_holds, assert_sound, committed_files, content, make, read_all, write_all
from system_calls import before_calls, failing

from penstock.storage.files.errors import UserError
from penstock.storage.generations.store import NvmeStore
from penstock.storage.tier.arena import empty_aligned
from penstock.storage.tier.manifest import ArraySpec


@pytest.mark.parametrize(
    ("call", "first", "code"),
    [("pwritev", 3, errno.EDQUOT), ("pwritev", 6, errno.ENOSPC), ("open", 0, errno.EROFS), ("open", 3, errno.ENOSPC)],
)
def test_a_write_fails(store: NvmeStore, monkeypatch: pytest.MonkeyPatch, code: int, call: str, first: int) -> None:
    with monkeypatch.context() as patch:
        calls = failing(patch, [call], code, first=first)
        with pytest.raises(UserError, match=r"/c\.\d\.0: writing [\d,]+ bytes failed: ") as caught:
            write_all(store, 4)
    assert len(calls) > first
    if code == errno.ENOSPC:
        assert "No space left on device; free some space on this disk" in str(caught.value)
    assert store.generation == 3
    store.verify()  # the committed generation
    if first % 2:  # the run goes on where it failed, or is resumed
        write_all(store, 4)
        store.commit({"step": 4})
        assert_holds(store, 4)
        store.close()
        assert_sound(store.root, 4, generation=4)
    else:
        store.close()
        assert_sound(store.root, 3, generation=3)


@pytest.mark.parametrize(("first", "code"), [(0, errno.EIO), (6, errno.ENOSPC), (7, errno.EIO), (9, errno.EIO)])
def test_a_sync_fails(store: NvmeStore, monkeypatch: pytest.MonkeyPatch, code: int, first: int) -> None:
    """Of 7 chunk files and 3 to 6 folders."""
    write_all(store, 4)
    with monkeypatch.context() as patch:
        failing(patch, ["fsync"], code, first=first, times=1)
        with pytest.raises(UserError, match=rf"{store.root.parent}/.*: syncing failed: {os.strerror(code)}"):
            store.commit({"step": 4})
    # The kernel says it once; the second time it would lie.
    for again in (lambda: store.commit({"step": 4}), lambda: store.write("embed", "master", 0, content(SPECS[2], 4))):
        with pytest.raises(UserError, match="an earlier sync failed"):
            again()
    store.verify()
    store.close()
    assert_sound(store.root, 3, generation=3)


@pytest.mark.parametrize("call", ["open", "pwritev", "fsync", "replace", "fsync of the folder"])
def test_the_manifest_cannot_be_written(store: NvmeStore, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    code = errno.ENOSPC if call == "pwritev" else errno.EIO
    write_all(store, 4)
    num_syncs = 7 + len({path.parent for path in committed_files(store)})
    with monkeypatch.context() as patch:
        first = {"fsync": num_syncs, "fsync of the folder": num_syncs + 1}.get(call, 0)
        failing(patch, [call.split()[0]], code, first=first, times=1)
        message = rf"manifest\.json: writing the manifest of generation 4 failed: {os.strerror(code)}"
        with pytest.raises(UserError, match=message):
            store.commit({"step": 4})
    assert store.generation == 3
    if call in ("open", "pwritev"):  # nothing was touched: the space is there again, and the commit goes through
        assert store.commit({"step": 4}) == 4
    elif call != "fsync":
        # Either generation may be the one on disk: nothing more is written to the chunk files of either.
        with pytest.raises(UserError, match="the manifest could not be replaced"):
            store.write("embed", "master", 0, content(SPECS[2], 5))
    store.close()
    step = 3 if call in ("fsync", "replace") else 4
    assert_sound(store.root, step, generation=None if call == "replace" or "folder" in call else step)


@pytest.mark.parametrize("first", [0, 3, 6])
def test_a_read_fails(store: NvmeStore, monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    with monkeypatch.context() as patch:
        failing(patch, ["preadv"], errno.EIO, first=first)
        message = r"/c\.\d\.0: reading [\d,]+ bytes of generation 3 failed: Input/output error; check the disk"
        for found in (store.verify, lambda: assert_holds(store, 3)):
            with pytest.raises(UserError, match=message):
                found()
    assert_holds(store, 3)
    store.verify()


@pytest.mark.parametrize(("most", "aligned"), [(512, False), (4096, True), (8192, False), (12288, True)])
@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_short_calls(store: NvmeStore, monkeypatch: pytest.MonkeyPatch, call: str, aligned: bool, most: int) -> None:
    """The kernel may take or give less than it was asked to; with direct I/O whole blocks."""
    real, shortened = getattr(os, call), 0

    def short(fd: int, views: list[memoryview], offset: int) -> int:
        nonlocal shortened
        shortened += sum(map(len, views)) > most
        return int(real(fd, [views[0][:most]], offset))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, short)
        for spec in store.arrays():
            for part, (start, stop) in enumerate(spec.parts()):
                dtype = getattr(torch, spec.dtype)
                memory = empty_aligned(stop - start, dtype) if aligned else torch.empty(stop - start, dtype=dtype)
                if call == "preadv":
                    store.read(spec.buffer, spec.kind, part, memory).result()
                    assert torch.equal(memory, content(spec, 3)[start:stop])
                else:
                    store.write(spec.buffer, spec.kind, part, memory.copy_(content(spec, 4)[start:stop])).result()
        assert shortened >= 2
        store.verify()
    if call == "pwritev":
        store.commit({"step": 4})
    store.close()
    assert_sound(store.root, 4 if call == "pwritev" else 3)


def test_a_drive_that_takes_nothing(store: NvmeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", lambda fd, views, offset: 0)
        with pytest.raises(UserError, match="the drive accepted no data"):
            write_all(store, 4)
    advance(store, 4)
    assert_holds(store, 4)


def test_spilled_activations_fail(store: NvmeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    data, out = torch.ones(9000, dtype=torch.uint8), torch.zeros(9000, dtype=torch.uint8)
    store.spilled.write("l", data).result()
    for code, call, word, move in (
        (errno.ENOSPC, "pwritev", "spill/k: writing", lambda: store.spilled.write("k", data)),
        (errno.EIO, "preadv", "spill/l: reading", lambda: store.spilled.read("l", out)),
    ):
        with monkeypatch.context() as patch:
            failing(patch, [call], code)
            with pytest.raises(UserError, match=rf"{word} 9,000 bytes of activations failed: {os.strerror(code)}"):
                move().result()
    store.close()
    assert_sound(store.root, 3)


@pytest.mark.parametrize("how", ["renamed", "replaced", "before the commit"])
def test_a_drive_goes_while_the_store_is_open(store: NvmeStore, how: str) -> None:
    drive = store.drives[-1]
    away = drive.with_name("away")
    if how == "before the commit":
        write_all(store, 4)
    drive.rename(away)
    if how == "replaced":
        drive.mkdir()  # what is under a mount point
    if how == "before the commit":
        with pytest.raises(UserError, match=rf"{drive}/.*: (syncing|writing).* failed: No such file"):
            store.commit({"step": 4})
    else:
        lost = rf"{drive}/.*: writing [\d,]+ bytes failed: .*is the drive still mounted\?"
        with pytest.raises(UserError, match=lost):
            write_all(store, 4)
        gone = rf"{drive}/.*\(generation 3\): the file is missing and so is its folder: is the drive"
        for found in (store.verify, lambda: assert_holds(store, 3)):
            with pytest.raises(UserError, match=gone):
                found()
    if how == "renamed" and drive != store.root:  # looking for room
        with pytest.raises(UserError, match=rf"{drive}: .*free space.* No such file or directory; .*mounted"):
            store.checkpoint("kept")
        assert store.disk_bytes() >= 0
    store.close()
    if how == "replaced":
        shutil.rmtree(drive)
    away.rename(drive)
    assert_sound(store.root, 3)


@pytest.mark.parametrize("what", ["checkpoint", "restore", "spill"])
def test_nothing_is_made_where_a_drive_was(store: NvmeStore, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Whenever it goes: before every call that makes a folder or a file."""
    store.checkpoint("kept")
    drive = store.drives[-1]
    away = drive.with_name("away")
    for number in itertools.count():

        def go(count: int, name: str, args: Any, number: int = number) -> None:
            if count == number:
                drive.rename(away)

        with monkeypatch.context() as patch:
            calls = before_calls(patch, ["mkdir", "open", "link"], go)
            with suppress(UserError):
                if what == "checkpoint":
                    store.checkpoint(f"later-{number}")
                elif what == "restore":
                    store.restore("kept")
                else:
                    for each in store.drives:
                        store.spilled.write(f"{number}-{each.name}", torch.zeros(5000, dtype=torch.uint8)).result()
        if len(calls) <= number:
            break
        assert not drive.exists(), calls[number]
        away.rename(drive)
    assert number >= 2


@pytest.mark.parametrize("how", ["renamed", "empty mount point", "unreadable"])
def test_a_drive_is_gone_at_opening(store: NvmeStore, how: str) -> None:
    store.close()
    drive = store.drives[-1]
    away = drive.with_name("away")
    drive.rename(away)
    if how == "empty mount point":
        drive.mkdir()
    elif how == "unreadable":
        drive.write_text("not a folder")
    expected = "part of generation 3.*is it mounted"
    if drive == store.root:
        expected = "no generation was committed here|not a readable manifest|cannot be read"
    for given in (None, store.drives):
        with pytest.raises(UserError, match=rf"{drive}.*({expected})"):
            NvmeStore.open(store.root, drives=given)
    if how == "empty mount point":
        assert list(drive.iterdir()) == []
        drive.rmdir()
    elif how == "unreadable":
        drive.unlink()
    away.rename(drive)
    assert_sound(store.root, 3)


def _try_to_open(root: Path, answers: Any) -> None:
    for attempt in (NvmeStore.open, lambda root: NvmeStore.create(root, SPECS, budget_bytes=None)):
        try:
            attempt(root).close()
            answers.put("opened")
        except UserError as error:
            answers.put(str(error))


def test_two_processes(store: NvmeStore, processes: ForkServerContext) -> None:
    (store.root / "scratch").mkdir()
    answers = processes.Queue()
    child = processes.Process(target=_try_to_open, args=(store.root, answers))
    child.start()
    found = [answers.get(timeout=60), answers.get(timeout=60)]
    child.join()
    assert found == [f"{store.root}: in use by another process; wait until it ends, or stop it"] * 2
    assert (store.root / "scratch").exists()
    advance(store, 4)
    assert_holds(store, 4)
    store.close()
    assert_sound(store.root, 4)


@pytest.fixture(params=["tmpfs", "ext4"])
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of 4 MiB."""
    (tmp_path / "mnt.img").write_bytes(bytes(4 << 20))
    (tmp_path / "mnt").mkdir()
    script = "mkfs.ext4 -q -m 0 -O ^has_journal mnt.img && mount -o loop mnt.img mnt"
    script = "mount -t tmpfs -o size=4M none mnt" if request.param == "tmpfs" else script
    if os.geteuid() != 0 or subprocess.run(["sh", "-c", script], cwd=tmp_path, capture_output=True).returncode != 0:
        pytest.skip("cannot mount here; run the tests as root, with mkfs.ext4 and CAP_SYS_ADMIN, to have this one")
    yield tmp_path / "mnt"
    subprocess.run(["umount", "-l", str(tmp_path / "mnt")], check=True)


def fill_up(filler: Path) -> None:
    """Until not even a file of one byte finds room."""
    filler.mkdir()
    for size in (1 << 16, 1 << 10, 1):
        with suppress(OSError):
            for number in range(10**6):
                with open(filler / f"{size}.{number}", "wb", buffering=0) as file:
                    file.write(bytes(size))
                    os.fsync(file.fileno())


@pytest.mark.parametrize("moment", ["write", "commit", "checkpoint"])
def test_a_full_file_system(small_disk: Path, moment: str) -> None:
    big = ArraySpec("embed", "master", 2048 * 64, "float32", 2048 * 16)  # 4 files of 132 KiB, twice
    store = NvmeStore.create(small_disk / "state", [big], budget_bytes=None)

    def put(step: int) -> None:
        futures = [store.write("embed", "master", part, torch.full((2048 * 16,), float(step))) for part in range(4)]
        wait(futures)
        for future in futures:
            future.result()

    acts = {
        "write": (lambda: put(2), r"c\.\d\.0: writing 135,168 bytes failed: No space left on device"),
        "commit": (lambda: store.commit({"step": 2}), "generation 2 failed: No space left on device; free some space"),
        "checkpoint": (lambda: store.checkpoint("one"), r"checkpoint 'one' needs [\d,]+ bytes|No space left on device"),
    }
    put(1)
    store.commit({"step": 1})
    for before in itertools.takewhile(lambda name: name != moment, acts):
        acts[before][0]()
    fill_up(small_disk / "filler")
    act, message = acts[moment]
    with pytest.raises(UserError, match=message):
        act()
    step = store.generation
    assert step == (2 if moment == "checkpoint" else 1)
    assert (read_all(store, big) == step + (moment == "commit")).all()  # what was written is read
    store.verify()
    shutil.rmtree(small_disk / "filler")
    store.close()
    store = NvmeStore.open(small_disk / "state")
    assert (read_all(store, big) == step).all()
    put(7)
    assert store.commit({"step": 7}) == step + 1
    store.checkpoint("one")
    store.verify()
    store.close()


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """As `ulimit -f` in this process; Python ignores the signal that comes with it."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


@pytest.mark.parametrize("limit", [100, 5000, 9000])
def test_a_limit_on_file_sizes_is_named(tmp_path: Path, workspace: Path, limit: int) -> None:
    """Direct I/O, for which the second source is aligned, calls it an invalid argument."""
    for folder in (tmp_path / "here", workspace / "memory"):
        with closing(make(folder, 1)) as store:
            for source in (torch.zeros(4096), torch.frombuffer(mmap.mmap(-1, 4096 * 4), dtype=torch.float32)):
                with largest_file(limit), pytest.raises(UserError, match=rf"{folder}.*ulimit -f"):
                    store.write("layers.0", "master", 0, source).result()
            with largest_file(limit), pytest.raises(UserError, match=rf"{folder}.*ulimit -f"):
                advance(store, 2)
        assert_sound(folder, 1)


@pytest.mark.skipif(os.geteuid() != 0, reason="a bind mount needs root; run the tests as root to have it")
def test_a_drive_under_two_mount_points_is_one_drive(tmp_path: Path) -> None:
    real, bound = tmp_path / "real", tmp_path / "bound"
    real.mkdir()
    bound.mkdir()
    if subprocess.run(["mount", "--bind", str(real), str(bound)], capture_output=True).returncode != 0:
        pytest.skip("cannot mount here; a container needs CAP_SYS_ADMIN")
    try:
        with pytest.raises(UserError, match="are the same folder; name each drive once"):
            make(tmp_path / "root", drives=[real / "x", bound / "x"])
        make(tmp_path / "root", 1, drives=[real / "x"]).close()
        with closing(NvmeStore.open(tmp_path / "root", drives=[bound / "x"])) as store:
            assert_holds(store, 1)
            advance(store, 2)
    finally:
        subprocess.run(["umount", str(bound)], check=True)
    with closing(NvmeStore.open(tmp_path / "root", drives=[real / "x"])) as store:
        assert_holds(store, 2)
        store.verify()
