"""The storage benchmark's bookkeeping at small sizes; its figures come from running it."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from cli_process import PATIENCE_S, started, wait_until

from penstock.app.bench import storage as bench
from penstock.app.bench.raw_io import Fio, OwnLoop, RawFiles, Timed
from penstock.storage.arena import HostArena
from penstock.storage.chunk import ChunkFormat
from penstock.storage.errors import UserError
from penstock.storage.nvme import NvmeStore

CHUNK = 1 << 20
SIZE = 8 * CHUNK


@pytest.fixture
def without_fio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fio, "find", staticmethod(lambda folder: None))


def _folders(tmp_path: Path, count: int) -> list[Path]:
    folders = [tmp_path / f"drive{number}" for number in range(count)]
    for folder in folders:
        folder.mkdir()
    return folders


def test_one_drive(
    tmp_path: Path, without_fio: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The store is read by the reader that a row names."""
    calls: list[str] = []
    for reader in (bench.DirectReader, bench.TensorstoreReader):

        def counted(self, *args, real=reader.read):  # type: ignore[no-untyped-def]
            calls.append(self.name)
            return real(self, *args)

        monkeypatch.setattr(reader, "read", counted)
    (folder,) = _folders(tmp_path, 1)
    figures = bench.bench_storage([folder], json=True, size_bytes=SIZE, part_bytes=CHUNK, rounds=2)
    assert calls.count("direct") == calls.count("tensorstore") == 2 * 8
    assert json.loads(capsys.readouterr().out) == figures
    (case,) = figures["cases"]
    assert case["moved_bytes"] == SIZE
    # Two generations of eight chunk files, each padded by one block.
    assert case["file_bytes_on_drive"] == {str(folder): 2 * 8 * (CHUNK + 4096)}
    expected = {"loop_write", "loop_read", "raw_write", "raw_read", "store_write", "direct_read", "tensorstore_read"}
    assert expected <= set(case["measured"])
    for row in case["measured"].values():
        assert len(row["gbps_rounds"]) == 2
        assert min(row["gbps_rounds"]) <= row["gbps"] <= max(row["gbps_rounds"])
        assert row["cpu_s_per_gb"] >= 0
    assert figures["read_ratio"] == case["ratios"]["direct_read"] > 0
    assert figures["write_ratio"] == case["ratios"]["store_write"] > 0
    assert figures["write_ratio_raw_synced"] > 0
    if not torch.cuda.is_available():
        assert figures["skipped_readers"] == {"kvikio": "no CUDA device"}
    assert list(folder.iterdir()) == []


def test_several_drives_share_evenly(tmp_path: Path, without_fio: None, capsys: pytest.CaptureFixture[str]) -> None:
    folders = _folders(tmp_path, 3)
    figures = bench.bench_storage(folders, size_bytes=15 * CHUNK, part_bytes=CHUNK, rounds=1)
    *single, together = figures["cases"]
    assert [case["drives"] for case in single] == [[str(folder)] for folder in folders]
    assert together["name"] == "all drives"
    assert together["moved_bytes"] == 15 * CHUNK
    assert set(together["file_bytes_on_drive"].values()) == {2 * 5 * (CHUNK + 4096)}
    assert {"raw_write", "raw_read", "store_write", "direct_read"} <= set(figures["sum_of_drives"])
    out, err = capsys.readouterr()
    assert out.startswith(f"all drives: reads {figures['read_ratio']:.2f} of raw direct I/O (")
    assert out.count("\n") == 1
    assert "note: several of the folders lie on one drive" in err
    assert all(list(folder.iterdir()) == [] for folder in folders)


def test_ratios_are_medians_of_pairs() -> None:
    def runs(*speeds: float) -> list[Timed]:
        return [Timed(10**9, 1 / speed, 0.0) for speed in speeds]

    measured = {
        "raw_write": runs(1, 2, 4),
        "raw_write_synced": runs(1, 1, 1),
        "raw_read": runs(2, 2, 2),
        "store_write": runs(1, 1, 3),
        "direct_read": runs(1, 2, 4),
    }
    ratios = bench._ratios(measured, ["direct"])
    assert ratios == pytest.approx({"store_write": 0.75, "store_write_raw_synced": 1.0, "direct_read": 1.0})


def test_folders_and_sizes_that_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "sub").mkdir()
    for folders, message in (
        ([], "at least one folder"),
        ([tmp_path / "missing"], "missing: no such folder"),
        ([tmp_path / "file"], "file: no such folder"),
        ([tmp_path, tmp_path / "sub" / ".."], "given twice"),
    ):
        with pytest.raises(UserError, match=message):
            bench.bench_storage(folders, size_bytes=SIZE, part_bytes=CHUNK)
    with pytest.raises(UserError, match=r"chunk size 1,000: give a multiple of 8,192 bytes"):
        bench.bench_storage([tmp_path], part_bytes=1000)
    with pytest.raises(UserError, match="rounds 0"):
        bench.bench_storage([tmp_path], rounds=0)


def test_little_room_moves_less_and_says_so_and_too_little_is_refused(
    tmp_path: Path, without_fio: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10 * CHUNK))
    with pytest.raises(UserError, match=r"needs 13,841,203 bytes .* and 10,485,760 are free"):
        bench.bench_storage([tmp_path], size_bytes=SIZE, part_bytes=CHUNK)
    assert list(tmp_path.iterdir()) == []
    # Two folders on one disk: 6 chunks each.
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=40 * CHUNK))
    figures = bench.bench_storage(_folders(tmp_path, 2), size_bytes=64 * CHUNK, part_bytes=CHUNK, rounds=1)
    assert [case["moved_bytes"] for case in figures["cases"]] == [6 * CHUNK, 6 * CHUNK, 12 * CHUNK]
    assert "little space is free, so 12.0 MiB are moved per measurement" in capsys.readouterr().err


def test_nothing_is_left_after_a_failure(tmp_path: Path, without_fio: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NvmeStore, "commit", Mock(side_effect=UserError("the disk failed")))
    with pytest.raises(UserError, match="the disk failed"):
        bench.bench_storage([tmp_path], size_bytes=SIZE, part_bytes=CHUNK)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_nothing_is_left_after_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    script = (
        "from pathlib import Path; from penstock.app.bench.storage import bench_storage\n"
        f"bench_storage([Path({str(tmp_path)!r})], size_bytes={SIZE}, part_bytes={CHUNK}, rounds=10**6)"
    )
    process = started(tmp_path, sys.executable, "-c", script, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: any(tmp_path.glob("*/store/*/*/*/c.7.0")))
        process.send_signal(number)
        assert process.wait(PATIENCE_S) != 0
    finally:
        process.kill()
        process.wait()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def raw(tmp_path: Path) -> Iterator[tuple[RawFiles, list[torch.Tensor]]]:
    """Files, and slots that hold their numbers, of which the first one was written."""
    arena = HostArena(32 * CHUNK, budget_bytes=32 * CHUNK)
    files = RawFiles(tmp_path / "raw", 5, ChunkFormat(CHUNK).file_bytes)
    slots = [arena.slot(str(index), files.file_bytes).fill_(index + 1) for index in range(bench.LOOP_THREADS)]
    files.create(slots[0])
    yield files, slots
    arena.close()


def test_own_loop_moves_every_byte(raw: tuple[RawFiles, list[torch.Tensor]]) -> None:
    files, slots = raw
    slots[0].fill_(99)
    written = OwnLoop(slots).run([files], write=True)
    assert written.num_bytes == files.total_bytes == 5 * (CHUNK + 4096)
    assert all(path.stat().st_size == files.file_bytes for path in files.paths())
    assert files.path(0).read_bytes() == bytes([99]) * files.file_bytes
    for path in files.paths():
        path.write_bytes(bytes([7]) * files.file_bytes)
    OwnLoop(slots).run([files], write=False)
    assert set(slots[0].tolist()) == {7}


def test_fio_moves_every_byte(tmp_path: Path, raw: tuple[RawFiles, list[torch.Tensor]]) -> None:
    fio = Fio.find(tmp_path)
    if fio is None:
        pytest.skip("fio is not installed")
    for write in (True, False):
        assert fio.run([raw[0]], write=write).num_bytes == raw[0].total_bytes
    assert set(raw[0].path(4).read_bytes()) != {1}  # overwritten in place by fio
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["raw"]


def test_fio_that_fails_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fio = tmp_path / "fio"
    fio.write_text("#!/bin/sh\necho 'fio: engine not loadable' >&2\nexit 1\n")
    fio.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert Fio.find(tmp_path) is None
    with pytest.raises(UserError, match="engine not loadable"):
        Fio(str(fio), "libaio", "fio-0").run([RawFiles(tmp_path, 1, 4096)], write=False)
