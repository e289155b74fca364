"""Presets: complete, checked by hand against their sheets, and found by name; peaks and architectures by the driver's
names, and utilisation. The probe at tiny sizes: every rate positive, files gone, refused before anything is written."""

import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import ROUND
from msgspec import structs
from packaging.requirements import Requirement
from system_calls import failing

from penstock.engine.attention import chunk as attention
from penstock.engine.attention.flash_attn import FlashAttention2, FlashAttention3, FlashAttention4
from penstock.engine.attention.select import BACKENDS
from penstock.engine.machine import probe_drives as drives
from penstock.engine.machine.architectures import ARCHITECTURES, Architecture, architecture, peak_of
from penstock.engine.machine.peaks import peak_flops, utilisation
from penstock.engine.machine.presets import GENERIC, PRESETS, find_machine, generic_gpu, profile_path, stored_machine
from penstock.engine.machine.probe import planned_writes, probe
from penstock.engine.machine.probe_compute import Sizes, attention_rates, matmul_flops, optimizer_params_per_s
from penstock.engine.machine.profile import VERSION, Machine, from_json
from penstock.storage.files.errors import UserError


@pytest.mark.parametrize("name", PRESETS)
def test_rates_stay_below_the_sheet(name: str) -> None:
    machine = PRESETS[name]
    assert machine.source.startswith("data sheets, not measured")
    peak = peak_flops(machine.gpu)
    if name == "dgx-spark":
        assert peak is None, "no bfloat16 rate is published"
        assert "derived, not published" in machine.source
        peak = 125e12
    assert machine.matmul_flops < peak
    assert {rate.head_dim for rate in machine.attention} == {64, 128}
    for rate in machine.attention:
        # Attention is products and softmax: never faster than the products alone.
        assert max(rate.forward_flops, rate.backward_flops) < machine.matmul_flops
    assert all(0 < share <= 1 for share in (machine.duplex_share, machine.drives_share, machine.drive_duplex_share))
    # A link cannot be faster than the memories at its ends.
    assert machine.h2d_bytes_per_s <= machine.ram_copy_bytes_per_s
    both = (machine.h2d_bytes_per_s + machine.d2h_bytes_per_s) * machine.duplex_share
    assert both <= machine.ram_copy_bytes_per_s * 1.01
    assert machine.optimizer_params_per_s == pytest.approx(machine.ram_copy_bytes_per_s / 30)


def test_a_desktop_by_hand() -> None:
    machine = PRESETS["rtx4090-128"]
    assert (machine.gpu_bytes, machine.ram_bytes) == (25_254_407_700, 137_438_953_472)  # 24 GiB x 0.98
    assert machine.matmul_flops == pytest.approx(158.92e12, rel=1e-4)  # 165.2 x 0.962: see below
    assert machine.h2d_bytes_per_s == pytest.approx(26.775e9)  # 31.5 x 0.85
    assert machine.gpu_copy_bytes_per_s == pytest.approx(856.8e9)  # 1,008 x 0.85
    assert machine.optimizer_params_per_s == pytest.approx(1.632e9)  # 57.6e9 x 0.85 / 30
    assert [drive.endurance_bytes for drive in machine.drives] == [2_400 * 10**12] * 2
    assert machine.nvme_bytes == 7_200 * 10**9
    assert machine.nvme_read_bytes_per_s == pytest.approx(12.03175e9)  # 2 x 7.45 x 0.85 x 0.95
    assert machine.nvme_write_bytes_per_s == pytest.approx(2.584e9)  # 2 x 1.6 x 0.85 x 0.95


def test_data_centre_machines_by_hand() -> None:
    gh200, h200 = PRESETS["gh200-480"], PRESETS["h200-1500"]
    assert gh200.ram_bytes == 515_396_075_520
    assert gh200.h2d_bytes_per_s == pytest.approx(326.4e9)  # 384 x 0.85, less than C2C's 450
    assert gh200.duplex_share == pytest.approx(0.5)  # 384 for both ways, of 2 x 384
    assert PRESETS["rtx3090-64"].duplex_share == pytest.approx(0.8127, abs=1e-4)  # 51.2 of 2 x 31.5
    assert gh200.matmul_flops == h200.matmul_flops == pytest.approx(664.46e12, rel=1e-4)
    # 989.5 x 0.6715: a token's 254.3e9 FLOPs at 0.624 of the peak take 411.9 us, of which 82.97e6 bytes at 0.85 of
    # 3,350 GB/s are 29.1.
    assert pytest.approx(h200.matmul_flops) == 254.3e9 / (254.3e9 / (0.624 * 989.5e12) - 82.97e6 / (0.85 * 3350e9))
    assert h200.numa_nodes == 2
    assert h200.h2d_bytes_per_s == pytest.approx(53.55e9)  # 63 x 0.85
    assert h200.nvme_read_bytes_per_s == pytest.approx(41.99e9)  # 4 x 13 x 0.85 x 0.95
    assert h200.drives[0].endurance_bytes == 28_032 * 10**12  # 15.36 TB x 1,825
    assert PRESETS["h100-pcie-512"].drives[0].endurance_bytes == 14_016 * 10**12
    spark = PRESETS["dgx-spark"]
    assert spark.gpu_bytes + spark.ram_bytes == 128 * 10**9, "one memory is counted once"
    assert "40 GB count as the GPU's and 88 GB as RAM" in spark.source
    assert spark.h2d_bytes_per_s == pytest.approx(116.025e9)  # 273 / 2 x 0.85


def test_what_each_of_several_gpus_gets_by_hand() -> None:
    machine = PRESETS["4x-rtx4090-256"]
    assert machine.gpus == 4
    assert machine.of_rank(1) is machine
    of_two, of_four = machine.of_rank(2), machine.of_rank(4)
    assert of_two.h2d_bytes_per_s == pytest.approx(26.775e9), "of 16 lanes: RAM gives 87 to each"
    assert of_four.ram_copy_bytes_per_s == pytest.approx(43.52e9)  # 204.8 x 0.85 / 4
    assert of_four.matmul_flops == machine.matmul_flops
    assert of_four.nvme_read_bytes_per_s == pytest.approx(machine.nvme_read_bytes_per_s / 4)
    measured = structs.replace(machine, all_links_bytes_per_s=(60e9, 48e9))  # two cards behind each root complex
    assert measured.of_rank(2).h2d_bytes_per_s == pytest.approx(26.775e9)
    assert (measured.of_rank(4).h2d_bytes_per_s, measured.of_rank(4).d2h_bytes_per_s) == (15e9, 12e9)


def test_finds_a_preset_and_a_profile(tmp_path: Path) -> None:
    assert find_machine("gh200-480") is PRESETS["gh200-480"]
    for machine in (*PRESETS.values(), GENERIC):
        assert from_json(json.loads(json.dumps(machine.to_json())), machine.name) == machine
    assert "assumed" in GENERIC.source
    mine = structs.replace(GENERIC, name="mine", source="measured")
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(mine.to_json()))
    assert find_machine(str(file)) == mine
    file.write_text(json.dumps(mine.to_json() | {"version": VERSION + 1}))
    with pytest.raises(UserError, match=rf"{file}: a profile of version {VERSION + 1}.*penstock probe"):
        find_machine(str(file))
    for name, nearest in (("rtx4090", "rtx4090-64"), ("GH200", "gh200-480"), ("h100-pcie", "h100-pcie-512")):
        with pytest.raises(UserError, match=f"machine '{name}': .*no preset.*did you mean .*{nearest}"):
            find_machine(name)
    with pytest.raises(UserError, match=r"machine '\?\?\?': .*presets are gh200-480, .*dgx-spark"):
        find_machine("???")


@given(st.text(max_size=200))
def test_any_other_content_is_refused(tmp_path_factory: pytest.TempPathFactory, content: str) -> None:
    file = tmp_path_factory.getbasetemp() / "odd.json"
    file.write_text(content)
    with pytest.raises(UserError, match=r"odd\.json"):
        find_machine(str(file))


@given(
    st.sampled_from([field.name for field in structs.fields(Machine) if field.name.endswith(("_s", "_flops"))]),
    st.sampled_from([0, -1.0, float("nan"), float("inf"), "fast", [1.0]]),
)
def test_a_figure_that_is_no_rate_is_refused(name: str, value: object) -> None:
    with pytest.raises(UserError, match=name):
        from_json(GENERIC.to_json() | {name: value}, "profile")


def test_profile_path_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert profile_path() == tmp_path / "penstock/machine.json"
    assert stored_machine() is None
    profile_path().parent.mkdir()
    profile_path().write_text(json.dumps(GENERIC.to_json()))
    assert stored_machine() == GENERIC
    profile_path().write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        stored_machine()
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert profile_path() == tmp_path / ".config/penstock/machine.json"


PEAKS: dict[float, tuple[str, ...]] = {
    989.5: ("NVIDIA H100 80GB HBM3", "NVIDIA GH200 480GB", "NVIDIA H200"),
    756.5: ("NVIDIA H100 PCIe",),
    835.5: ("NVIDIA H100 NVL",),
    2250.0: ("NVIDIA B200",),
    312.0: ("NVIDIA A100-SXM4-80GB",),
    362.05: ("NVIDIA L40S",),
    71.0: ("NVIDIA GeForce RTX 3090",),
    80.0: ("NVIDIA GeForce RTX 3090 Ti",),
}
UNKNOWN = ("", "NVIDIA GB10", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A100-SXM4-40GB MIG 1g.5gb")
UNKNOWN += ("NVIDIA H100 80GB HBM2e", "AMD Instinct MI300X")
"""They get no other's figure."""


def test_peaks_by_name_and_utilisation_by_hand() -> None:
    for tera, names in PEAKS.items():
        assert [peak_flops(name) for name in names] == pytest.approx([tera * 1e12] * len(names)), names
    assert [name for name in UNKNOWN if peak_flops(name) is not None] == []
    assert peak_of("NVIDIA GB10") == 125e12, "a derived one counts for plans only"
    assert peak_of("NVIDIA H200") == 989.5e12
    assert peak_of("AMD Instinct MI300X") is None
    # 6 TFLOP in 2 s are 3 TFLOP/s, 30 % of 10; 8 TFLOP, recomputation included, are 40 %.
    assert utilisation(6e12, 2.0, 1e13) == pytest.approx(0.3)
    assert utilisation(8e12, 2.0, None) is None


PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"
BY_NAME = {found.name: found for found in ARCHITECTURES}
PACKAGES = {kernel.name for kernel in (FlashAttention2(), FlashAttention3(), FlashAttention4())}


def test_architectures_by_the_driver_s_name() -> None:
    for name, gpus in {
        "Hopper": ("NVIDIA H100 80GB HBM3", "NVIDIA GH200 480GB"),
        "data-centre Blackwell": ("NVIDIA B200",),
        "Ada": ("NVIDIA GeForce RTX 4090",),
        "Ampere": ("NVIDIA GeForce RTX 3090",),
        "Blackwell": ("NVIDIA GeForce RTX 5090",),
        "GB10": ("NVIDIA GB10",),
    }.items():
        assert [architecture(gpu).name for gpu in gpus] == [name] * len(gpus)
    for gpu in ("NVIDIA GB100", "NVIDIA A100-SXM4-80GB", None):
        assert architecture(gpu) is None


@pytest.mark.parametrize("found", ARCHITECTURES, ids=lambda found: found.name)
def test_kernels_are_backends_and_what_to_install_is_an_extra(found: Architecture) -> None:
    assert set(found.kernels) <= {backend.name for backend in BACKENDS}
    assert set(found.wanted) <= PACKAGES & set(found.kernels)
    extras = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    (package,) = extras[found.extra]
    brought = Requirement(package).name
    assert any(brought == kernel.removesuffix("-2") for kernel in found.wanted)
    for shares in found.kernels.values():
        assert all(0 < share < 1 for both in shares.values() for share in both)


def test_shares_by_hand() -> None:
    hopper, ada, ampere, blackwell = (BY_NAME[name] for name in ("Hopper", "Ada", "Ampere", "Blackwell"))
    assert hopper.fastest() == {64: (473 / 989.5, 474 / 989.5), 128: (616 / 989.5, 561 / 989.5)}
    assert hopper.shares("torch-cudnn", 128) == (539 / 989.5, 516 / 989.5)
    assert hopper.shares("torch-cudnn", 80) == hopper.shares("torch-cudnn", 64), "the nearest"
    assert hopper.shares("torch-cpu-flash", 128) is None
    # cuDNN's forward 203.6 of 209.5 x 0.861; flash-attn's backward 190.6 of 209.5 x 0.861 x 2.5 x 51.43 / 131.34.
    assert ada.fastest()[128] == pytest.approx((0.8365, 0.7666), abs=1e-4)
    # FlashAttention 4 is faster forward only: 94.5 of 125 x 0.861 at heads of 64.
    assert blackwell.fastest()[64] == pytest.approx((0.6507, 0.6028), abs=1e-4)
    assert ampere.fastest() == {64: (81.9 / 111.1, 77.4 / 111.1), 128: (81.9 / 111.1, 77.4 / 111.1)}
    known, unknown = generic_gpu("NVIDIA GeForce RTX 4090"), generic_gpu("NVIDIA L40S")
    assert known.attention == PRESETS["rtx4090-128"].attention
    assert known.matmul_flops == PRESETS["rtx4090-128"].matmul_flops
    assert unknown.matmul_flops == pytest.approx(0.70 * 362.05e12), "an unknown card keeps assumed shares"
    assert [rate.forward_flops for rate in unknown.attention] == pytest.approx([0.45 * 362.05e12, 0.60 * 362.05e12])
    assert unknown.drives == GENERIC.drives


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


@pytest.mark.parametrize(("count", "more_blocks"), [(1, 0), (2, 11)])
def test_no_more_is_written_to_a_drive_than_allowed(folders: list[Path], count: int, more_blocks: int) -> None:
    """However long it may take: what is measured ends instead."""
    folders = folders[:count]
    most = drives.least_written(count, 4096) + 4096 * more_blocks
    rates = drives.probe_drives(folders, 1.0, block_bytes=4096, most_written=most)
    assert drives.least_written(count, 4096) <= rates.written_bytes // count <= most
    assert all(drive.read_bytes_per_s > 0 for drive in rates.drives)


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
    assert 0 < found.drive_duplex_share <= found.drives_share == 1
    kept = ("drives", "drives_share", "drive_duplex_share")
    assert structs.replace(found, **{name: getattr(ROUND, name) for name in kept}) == ROUND
    assert list(tmp_path.iterdir()) == []


def test_refused_before_anything_is_written(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drives, "_nameless", lambda folder: pytest.fail("opened a file"))
    folder, least = folders[0], drives.least_written(1)
    (folder / "file").write_text("")
    for names, message in ((["", ""], "listed twice"), (["missing"], "no such folder"), (["file"], "no such folder")):
        with pytest.raises(UserError, match=message):
            probe([folder / name for name in names], seconds=1, sizes=TINY)
    with pytest.raises(UserError, match=r"measuring takes .* bytes of RAM"):
        probe([folder], seconds=1, sizes=dataclasses.replace(TINY, pass_bytes=1 << 50))
    monkeypatch.chdir(folder)
    assert planned_writes([folder], 50) == planned_writes([], 50) == ([folder], 50 * 2**30)
    assert planned_writes([folder], 50, least) == ([folder], least)
    assert planned_writes([folder], 1) == ([folder], max(least, 2**30))
    with pytest.raises(UserError, match=r"--size 1023MiB: too small to measure with; give at least 1GiB"):
        planned_writes([folder], 50, 1023 * 2**20)
    monkeypatch.setattr(drives, "free_disk", lambda folder: 3000)
    assert [drives._fillable(folder, folders[:count]) for count in (1, 2)] == [3000, 1500], "of one disk"
    with pytest.raises(UserError, match=rf"{folder}: measuring needs .* bytes of disk and 3,000 may be used"):
        probe([folder], seconds=1, sizes=TINY)


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
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command, pipes = [sys.executable, "-c", script], {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as process:
        while "filling" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(number)
        assert process.wait(300) != 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_the_dtype_is_that_which_runs_take(monkeypatch: pytest.MonkeyPatch, has_bfloat16: bool) -> None:
    """Where a CPU has no bfloat16, a product in it takes minutes and says nothing of runs, which take float32."""
    taken, expected = set(), {torch.bfloat16 if has_bfloat16 else torch.float32}
    real_matmul, real_attend = torch.mm, attention.attend

    def matmul(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        taken.update((left.dtype, right.dtype, out.dtype))
        return real_matmul(left, right, out=out)

    def attend(x: attention.Operands) -> Any:
        taken.update((x.q.dtype, x.k.dtype, x.v.dtype))
        return real_attend(x)

    monkeypatch.setattr("penstock.engine.machine.precision.cpu_has_bfloat16", lambda: has_bfloat16)
    monkeypatch.setattr(torch, "mm", matmul)
    monkeypatch.setattr(attention, "attend", attend)
    assert matmul_flops(torch.device("cpu"), TINY, 0.01) > 0
    assert taken == expected
    assert len(attention_rates(torch.device("cpu"), TINY, 0.01)) == 4
    assert taken == expected
    monkeypatch.setattr("penstock.engine.machine.probe_compute._updates_per_s", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # raised where the update is awaited
        optimizer_params_per_s(torch.device("cpu"), TINY, 0.1)
