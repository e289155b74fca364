"""The storage benchmark's bookkeeping at small sizes; its figures come from running it."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cli_process import PATIENCE_S, REPOSITORY, default_signals, wait_until

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


def test_one_drive(tmp_path: Path, without_fio: None, capsys: pytest.CaptureFixture[str]) -> None:
    (folder,) = _folders(tmp_path, 1)
    figures = bench.bench_storage([folder], json=True, size_bytes=SIZE, part_bytes=CHUNK, rounds=2)
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


def test_store_is_read_by_the_named_reader(
    tmp_path: Path, without_fio: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[str] = []
    for reader in (bench.DirectReader, bench.TensorstoreReader):
        real = reader.read

        def counted(self, *args, real=real):  # type: ignore[no-untyped-def]
            calls.append(self.name)
            return real(self, *args)

        monkeypatch.setattr(reader, "read", counted)
    bench.bench_storage(_folders(tmp_path, 1), size_bytes=SIZE, part_bytes=CHUNK, rounds=3)
    assert calls.count("direct") == calls.count("tensorstore") == 3 * 8


def test_ratios_are_medians_of_pairs() -> None:
    def runs(*speeds: float) -> list[Timed]:
        return [Timed(10**9, 1 / speed, 0.0) for speed in speeds]

    ratios = bench._ratios(
        {
            "raw_write": runs(1, 2, 4),
            "raw_write_synced": runs(1, 1, 1),
            "raw_read": runs(2, 2, 2),
            "store_write": runs(1, 1, 3),
            "direct_read": runs(1, 2, 4),
        },
        ["direct"],
    )
    assert ratios == pytest.approx({"store_write": 0.75, "store_write_raw_synced": 1.0, "direct_read": 1.0})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda tmp: [], "at least one folder"),
        (lambda tmp: [tmp / "missing"], "missing: no such folder"),
        (lambda tmp: [tmp / "file"], "file: no such folder"),
        (lambda tmp: [tmp, tmp / "sub" / ".."], "given twice"),
    ],
)
def test_bad_folders(tmp_path: Path, make, message: str) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "file").write_text("x")
    (tmp_path / "sub").mkdir()
    with pytest.raises(UserError, match=message):
        bench.bench_storage(make(tmp_path), size_bytes=SIZE, part_bytes=CHUNK)


def test_bad_sizes(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"chunk size 1,000: give a multiple of 8,192 bytes"):
        bench.bench_storage([tmp_path], part_bytes=1000)
    with pytest.raises(UserError, match="rounds 0"):
        bench.bench_storage([tmp_path], rounds=0)


def _free(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=free))


def test_little_room_moves_less_and_says_so(
    tmp_path: Path, without_fio: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _free(monkeypatch, 40 * CHUNK)  # two folders on one disk: 6 chunks each
    figures = bench.bench_storage(_folders(tmp_path, 2), size_bytes=64 * CHUNK, part_bytes=CHUNK, rounds=1)
    assert [case["moved_bytes"] for case in figures["cases"]] == [6 * CHUNK, 6 * CHUNK, 12 * CHUNK]
    assert "little space is free, so 12.0 MiB are moved per measurement" in capsys.readouterr().err


def test_too_little_room_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _free(monkeypatch, 10 * CHUNK)
    with pytest.raises(UserError, match=r"needs 13,841,203 bytes .* and 10,485,760 are free"):
        bench.bench_storage([tmp_path], size_bytes=SIZE, part_bytes=CHUNK)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_after_a_failure(tmp_path: Path, without_fio: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: NvmeStore, meta: object) -> int:
        raise UserError("the disk failed")

    monkeypatch.setattr(NvmeStore, "commit", fail)
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
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", script]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, preexec_fn=default_signals)
    try:
        wait_until(lambda: any(tmp_path.glob("*/store/*/*/*/c.7.0")))
        process.send_signal(number)
        assert process.wait(PATIENCE_S) != 0
    finally:
        process.kill()
        process.wait()
    assert list(tmp_path.iterdir()) == []


def _raw(folder: Path, arena: HostArena) -> tuple[RawFiles, list[torch.Tensor]]:
    files = RawFiles(folder / "raw", 5, ChunkFormat(CHUNK).file_bytes)
    slots = [arena.slot(str(index), files.file_bytes).fill_(index + 1) for index in range(bench.LOOP_THREADS)]
    files.create(slots[0])
    return files, slots


def test_own_loop_moves_every_byte(tmp_path: Path) -> None:
    arena = HostArena(32 * CHUNK, budget_bytes=32 * CHUNK)
    files, slots = _raw(tmp_path, arena)
    slots[0].fill_(99)
    written = OwnLoop(slots).run([files], write=True)
    assert written.num_bytes == files.total_bytes == 5 * (CHUNK + 4096)
    assert all(path.stat().st_size == files.file_bytes for path in files.paths())
    assert files.path(0).read_bytes() == bytes([99]) * files.file_bytes
    for path in files.paths():
        path.write_bytes(bytes([7]) * files.file_bytes)
    OwnLoop(slots).run([files], write=False)
    assert set(slots[0].tolist()) == {7}
    arena.close()


def test_fio_moves_every_byte(tmp_path: Path) -> None:
    arena = HostArena(32 * CHUNK, budget_bytes=32 * CHUNK)
    files, _ = _raw(tmp_path, arena)
    fio = Fio.find(tmp_path)
    if fio is None:
        pytest.skip("fio is not installed")
    for write in (True, False):
        assert fio.run([files], write=write).num_bytes == files.total_bytes
    assert set(files.path(4).read_bytes()) != {1}  # overwritten in place by fio
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["raw"]
    arena.close()


def test_fio_that_fails_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "fio").write_text("#!/bin/sh\necho 'fio: engine not loadable' >&2\nexit 1\n")
    (tools / "fio").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    assert Fio.find(tmp_path) is None
    with pytest.raises(UserError, match="engine not loadable"):
        Fio(str(tools / "fio"), "libaio", "fio-0").run([RawFiles(tmp_path, 1, 4096)], write=False)
