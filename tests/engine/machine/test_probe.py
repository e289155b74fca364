"""The probe at tiny sizes: every rate positive, files gone, refusals before anything is written."""

import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import ROUND
from msgspec import structs
from system_calls import failing

from penstock.engine.attention import chunk as attention
from penstock.engine.machine import probe_drives as drives
from penstock.engine.machine.probe import planned_writes, probe
from penstock.engine.machine.probe_compute import Sizes, attention_rates, matmul_flops, optimizer_params_per_s
from penstock.engine.machine.profile import from_json
from penstock.storage.errors import UserError

BLOCK = 1 << 16
SHAPES: dict[str, Any] = {"rows": 32, "heads": 4, "kv_heads": 2, "head_dims": (16, 32), "chunks": (16, 64)}
MEMORY: dict[str, Any] = {"copy_bytes": 1 << 16, "pass_bytes": 1 << 18, "state_numel": 1 << 12}
TINY = Sizes(**SHAPES, **MEMORY, matrices=((48, 32), (32, 48)), earlier_tokens=64, compiled=False)


def test_every_rate_is_positive_and_nothing_stays(folders: list[Path]) -> None:
    told: list[str] = []
    machine = probe(folders, seconds=0.5, sizes=TINY, block_bytes=BLOCK, most_bytes=64 * BLOCK, say=told.append)
    # Loading refuses rates that are no positive numbers.
    assert from_json(json.loads(json.dumps(machine.to_json())), "profile") == machine
    assert [rate.head_dim for rate in machine.attention] == [16, 16, 32, 32]
    assert [rate.chunk_tokens for rate in machine.attention] == [16, 64, 16, 64]
    assert [drive.path for drive in machine.drives] == [str(folder) for folder in folders]
    assert [list(folder.iterdir()) for folder in folders] == [[], []]
    assert all(0 < share <= 1 for share in (machine.duplex_share, machine.drives_share, machine.drive_duplex_share))
    assert machine.cores == len(os.sched_getaffinity(0))
    assert machine.source.startswith("measured 20")
    if not torch.cuda.is_available():
        assert machine.gpu is None
        assert machine.gpu_bytes + machine.ram_bytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert any("at once" in text for text in told)


def test_the_current_folder_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    machine = probe([], seconds=0.5, sizes=TINY, block_bytes=BLOCK, most_bytes=64 * BLOCK)
    assert [drive.path for drive in machine.drives] == [str(tmp_path)]
    assert machine.drives_share == 1.0


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 200), st.sampled_from([4096, 12288, 1 << 16]))
def test_written_bytes_are_counted(tmp_path_factory: pytest.TempPathFactory, blocks: int, block_bytes: int) -> None:
    """Whatever the size of the files: at least one block in each, and no more of them than asked for."""
    folder = tmp_path_factory.getbasetemp()
    before = sorted(folder.iterdir())
    rates = drives.probe_drives([folder], 0.05, block_bytes=block_bytes, most_bytes=blocks * block_bytes)
    assert rates.written_bytes % block_bytes == 0
    assert rates.written_bytes >= 2 * drives._THREADS * block_bytes
    assert sorted(folder.iterdir()) == before


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    found = [tmp_path / name for name in "ab"]
    for folder in found:
        folder.mkdir()
    return found


def test_folders_on_one_disk_share_its_room(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drives, "free_disk", lambda folder: 3000)
    assert [drives._fillable(folders[0], folders[:count]) for count in (1, 2)] == [3000, 1500]


@pytest.mark.parametrize(("count", "more_blocks"), [(1, 0), (2, 11)])
def test_no_more_is_written_to_a_drive_than_allowed(folders: list[Path], count: int, more_blocks: int) -> None:
    """However long it may take: what is measured ends instead."""
    folders = folders[:count]
    most = drives.least_written(count, 4096) + 4096 * more_blocks
    rates = drives.probe_drives(folders, 1.0, block_bytes=4096, most_written=most)
    assert drives.least_written(count, 4096) <= rates.written_bytes // count <= most
    assert all(drive.read_bytes_per_s > 0 for drive in rates.drives)


def test_what_will_be_written_is_known_before(tmp_path: Path) -> None:
    least = drives.least_written(1)
    assert planned_writes([tmp_path], 50) == ([tmp_path], 50 * 2**30)
    assert planned_writes([tmp_path], 50, least) == ([tmp_path], least)
    assert planned_writes([tmp_path], 1) == ([tmp_path], max(least, 2**30))
    with pytest.raises(UserError, match=r"--size 1023MiB: too small to measure with; give at least 1GiB"):
        planned_writes([tmp_path], 50, 1023 * 2**20)


def test_a_file_system_without_nameless_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuses(path: object, flags: int, *args: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return real(path, flags, *args)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(os, "open", refuses)
    rates = drives.probe_drives([tmp_path], 0.2, block_bytes=BLOCK, most_bytes=64 * BLOCK)
    assert rates.drives[0].read_bytes_per_s > 0
    assert list(tmp_path.iterdir()) == []


def test_a_run_measures_drives_where_its_folders_will_be(tmp_path: Path) -> None:
    found = drives.with_measured_drives(ROUND, [tmp_path / "run" / "state"], BLOCK)
    assert len(found.drives) == 1
    assert found.nvme_read_bytes_per_s > ROUND.nvme_read_bytes_per_s, "made up in megabytes"
    assert found.nvme_write_bytes_per_s > ROUND.nvme_write_bytes_per_s
    assert 0 < found.drive_duplex_share <= 1
    kept = ("drives", "drives_share", "drive_duplex_share")
    assert structs.replace(found, **{name: getattr(ROUND, name) for name in kept}) == ROUND
    assert list(tmp_path.iterdir()) == []


def test_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drives, "_nameless", lambda folder: pytest.fail("opened a file"))
    (tmp_path / "file").write_text("")
    for names, message in ((["", ""], "listed twice"), (["missing"], "no such folder"), (["file"], "no such folder")):
        with pytest.raises(UserError, match=message):
            probe([tmp_path / name for name in names], seconds=1, sizes=TINY)
    with pytest.raises(UserError, match=r"measuring takes .* bytes of RAM"):
        probe([tmp_path], seconds=1, sizes=dataclasses.replace(TINY, pass_bytes=1 << 50))
    monkeypatch.setattr(drives, "free_disk", lambda folder: 1000)
    with pytest.raises(UserError, match=rf"{tmp_path}: measuring needs .* bytes of disk and 1,000 may be used"):
        probe([tmp_path], seconds=1, sizes=TINY)


def test_a_full_disk_ends_the_other_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, ["pwritev"], errno.ENOSPC)
    start = time.monotonic()
    with pytest.raises(UserError, match="free some space on this disk"):
        drives.probe_drives([tmp_path], 3600, block_bytes=BLOCK, most_bytes=64 * BLOCK)
    assert time.monotonic() - start < 1800
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_after_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    script = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from pathlib import Path; from penstock.engine.machine.probe_drives import probe_drives\n"
        f"say = lambda text: print(text, flush=True)\n"
        f"probe_drives([Path({str(tmp_path)!r})], 600, block_bytes={BLOCK}, most_bytes={64 * BLOCK}, say=say)"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(drives.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command, pipes = [sys.executable, "-c", script], {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as process:
        while "filling" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(number)
        assert process.wait(300) != 0
    assert list(tmp_path.iterdir()) == []


def test_an_update_that_fails_is_raised_where_it_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> float:
        raise ValueError("broken")

    monkeypatch.setattr("penstock.engine.machine.probe_compute._updates_per_s", fails)
    with pytest.raises(ValueError, match="broken"):
        optimizer_params_per_s(torch.device("cpu"), TINY, 0.1)


@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_the_dtype_is_that_which_runs_take(monkeypatch: pytest.MonkeyPatch, has_bfloat16: bool) -> None:
    """Where a CPU has no bfloat16, a product in it takes minutes and says nothing of runs, which take float32."""
    taken = set()
    real_matmul, real_attend = torch.matmul, attention.attend

    def matmul(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        taken.update((left.dtype, right.dtype, out.dtype))
        return real_matmul(left, right, out=out)

    def attend(x: attention.Operands) -> Any:
        taken.update((x.q.dtype, x.k.dtype, x.v.dtype))
        return real_attend(x)

    monkeypatch.setattr("penstock.engine.machine.precision.cpu_has_bfloat16", lambda: has_bfloat16)
    monkeypatch.setattr(torch, "matmul", matmul)
    monkeypatch.setattr(attention, "attend", attend)
    assert matmul_flops(torch.device("cpu"), TINY, 0.01) > 0
    assert taken == {torch.bfloat16 if has_bfloat16 else torch.float32}
    assert len(attention_rates(torch.device("cpu"), TINY, 0.01)) == 4
    assert taken == {torch.bfloat16 if has_bfloat16 else torch.float32}
