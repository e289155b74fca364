"""Machines that one may not own, from vendors' data sheets, and where this machine's measured profile is kept.

A preset takes the sheets' figures times shares that kernels, links and drives reach in practice. Those of kernels are
published measurements of each architecture (engine/machine/architectures.py): products, and the fastest attention
kernel for the card, installed or not. Those of links, memories and drives are stated once, below.

Sheets: NVIDIA's of every GPU (memory, bandwidth; peaks in machine.peaks), of Grace (LPDDR5X: 384 GB/s at 480 GB) and of
DGX Spark; AMD's of Ryzen (DDR5-5200 with two modules, DDR5-3600 with four; two channels), of Threadripper 7960X (24
cores, four channels of DDR5-5200: 166.4 GB/s) and of EPYC (a socket's 12 channels of DDR5-4800, or 8 of DDR5-4800 or of
DDR4-3200); PCI-SIG's rates of 16 lanes, 31.5 GB/s (PCIe 4) and 63 GB/s (PCIe 5) each way; Samsung's of the drives
below. Power limits are NVIDIA's: of a GeForce "total graphics power", of H100 PCIe and H200 SXM "max thermal design
power", of GH200 that of the whole module (GPU, CPU and memory), of GB10 "TDP" of the chip, CPU included.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import structs

from penstock.engine.machine.architectures import Shares, architecture, peak_of
from penstock.engine.machine.budgets import split_shared
from penstock.engine.machine.limits import free_disk, total_memory
from penstock.engine.machine.platforms import usable_cpus
from penstock.engine.machine.profile import AttentionRate, Drive, Machine, load_machine
from penstock.storage.files.errors import UserError

if TYPE_CHECKING:
    import torch

GIB, GB, TB, TERA = 2**30, 10**9, 10**12, 10**12

OTHER_MATMUL_SHARE = 0.70
"""Of the peak in products of layer shapes, on GPUs of which engine.machine.architectures knows nothing; assumed."""
OTHER_ATTENTION_SHARES = {64: (0.45, 0.38), 128: (0.60, 0.50)}
"""Of the peak by head size, forward and backward; likewise."""
ATTENTION_CHUNK_TOKENS = 4096
LINK_SHARE = 0.85
"""Of a link's raw rate, which packets' headers are part of."""
PCIE_DUPLEX_SHARE = 0.90
"""PCIe has lanes each way; headers keep the sum below both rates alone. Less where RAM, which serves both, limits."""
UNIFIED_DUPLEX_SHARE = 0.50
"""A copy inside one memory leaves nothing of its bandwidth to another."""
MEMORY_SHARE = 0.85
"""Of memory's raw bandwidth, in passes over it."""
GPU_VISIBLE_SHARE = 0.98
"""Of a GPU's memory, which its sheet gives in units of 2^30 bytes: the rest is its driver's."""
DRIVE_SHARE = 0.85
"""Of a drive's sequential rates."""
DRIVE_FILL_SHARE = 0.90
"""Of a drive's capacity that a run may fill."""
DRIVE_DUPLEX_SHARE = 0.70
"""Reads and writes at once; no sheet gives it, assumed."""
DRIVES_SHARE = 0.95
"""Several drives at once, each on lanes of its own; assumed."""
OPTIMIZER_BYTES = 30
"""Read or written by AdamW for each parameter: master and moments both ways, the gradient, the weights."""

_GPU_DEVICES = ("nvidia0", "nvhost-gpu", "dxg")
"""In /dev, one of which a CUDA driver needs: on servers and desktops, on Tegra, on WSL."""
_WARRANTY_DAYS = 5 * 365


def _drive(terabytes: float, read_gb_per_s: float, write_gb_per_s: float, endurance_bytes: int | None = None) -> Drive:
    return Drive(
        path=None,
        size_bytes=int(terabytes * TB * DRIVE_FILL_SHARE),
        read_bytes_per_s=read_gb_per_s * GB * DRIVE_SHARE,
        write_bytes_per_s=write_gb_per_s * GB * DRIVE_SHARE,
        endurance_bytes=endurance_bytes,
    )


SAMSUNG_990_PRO = _drive(4, 7.45, 1.6, 2400 * TB)
"""4 TB, PCIe 4. Writes at 6.9 GB/s only until its cache is full; a run writes more, so the rate behind it counts."""
SAMSUNG_PM9A3 = _drive(7.68, 6.5, 3.5, int(7.68 * TB) * _WARRANTY_DAYS)
"""7.68 TB U.2, PCIe 4, data centre: one drive write a day for five years."""
SAMSUNG_PM1743 = _drive(15.36, 13.0, 6.6, int(15.36 * TB) * _WARRANTY_DAYS)
"""15.36 TB, PCIe 5, data centre: one drive write a day for five years."""
UNNAMED_4TB = structs.replace(SAMSUNG_990_PRO, endurance_bytes=None)
"""4 TB NVMe whose model its seller leaves open: rates of SAMSUNG_990_PRO assumed, endurance unknown."""

PCIE4, PCIE5 = 31.5, 63.0
"""GB/s each way of 16 lanes."""


def _visible(gib: float) -> int:
    """Bytes that a GPU of `gib` GiB shows."""
    return int(gib * GIB * GPU_VISIBLE_SHARE)


class _Sheet(NamedTuple):
    """What the data sheet of a GPU gives, beside its peak."""

    gpu_bytes: int
    gb_per_s: float
    """Of its memory."""
    link_gb_per_s: float
    """To RAM, each way."""
    power_w: float


_SHEETS = {
    "NVIDIA GH200 480GB": _Sheet(_visible(96), 4000, 450, 1000),
    "NVIDIA H200": _Sheet(_visible(141), 4800, PCIE5, 700),
    "NVIDIA H100 PCIe": _Sheet(_visible(80), 2000, PCIE5, 350),
    "NVIDIA GeForce RTX 3090": _Sheet(_visible(24), 936, PCIE4, 350),
    "NVIDIA GeForce RTX 4090": _Sheet(_visible(24), 1008, PCIE4, 450),
    "NVIDIA GeForce RTX 5090": _Sheet(_visible(32), 1792, PCIE5, 575),
    "NVIDIA GB10": _Sheet(40 * GB, 273, 273 / 2, 140),
}


def attention_rates(peak: float, shares: Shares) -> tuple[AttentionRate, ...]:
    """Rates of attention kernels that reach `shares` of `peak` FLOP/s."""
    return tuple(
        AttentionRate(
            head_dim=head_dim,
            chunk_tokens=ATTENTION_CHUNK_TOKENS,
            forward_flops=peak * forward,
            backward_flops=peak * backward,
        )
        for head_dim, (forward, backward) in shares.items()
    )


def gpu_rates(gpu: str, peak: float) -> dict[str, Any]:
    """Rates of a GPU's kernels, by fields of Machine, where its data sheet gives `peak` FLOP/s; attention's are those
    of the fastest kernel for the card, which a plan assumes to be installed."""
    known = architecture(gpu)
    matmul = OTHER_MATMUL_SHARE if known is None else known.matmul_share
    attention = OTHER_ATTENTION_SHARES if known is None else known.fastest()
    return {"matmul_flops": peak * matmul, "attention": attention_rates(peak, attention)}


_Drives = tuple[Drive, int, str]
"""A drive of a preset, how many of them, and what its note calls them."""

_ONE_990 = (SAMSUNG_990_PRO, 1, "one Samsung 990 PRO of 4 TB, writing past its cache")
_TWO_990 = (SAMSUNG_990_PRO, 2, "two Samsung 990 PRO of 4 TB, writing past their cache")
_TWO_A3 = (SAMSUNG_PM9A3, 2, "two Samsung PM9A3 of 7.68 TB")
_TWO_1743 = (SAMSUNG_PM1743, 2, "two Samsung PM1743 of 15.36 TB")
_FOUR_990 = (SAMSUNG_990_PRO, 4, "four Samsung 990 PRO of 4 TB, writing past their cache")
_EIGHT_1743 = (SAMSUNG_PM1743, 8, "eight Samsung PM1743 of 15.36 TB")
_FOUR_1743 = (SAMSUNG_PM1743, 4, "four Samsung PM1743 of 15.36 TB")
_UNNAMED = (UNNAMED_4TB, 1, "one 4 TB NVMe, its rates and endurance not published")


def _preset(
    name: str,
    gpu: str,
    drives: _Drives,
    ram: tuple[int, float],
    cores: int,
    note: str,
    numa_nodes: int = 1,
    duplex_share: float | None = None,
    gpus: int = 1,
) -> Machine:
    """A machine from raw figures of data sheets; `ram`: bytes and GB/s, which bound a link, alone or both ways."""
    peak, sheet, (ram_bytes, ram_gb_per_s), (drive, count, words) = peak_of(gpu), _SHEETS[gpu], ram, drives
    assert peak is not None, gpu
    link = min(sheet.link_gb_per_s, ram_gb_per_s)
    return Machine(
        name=name,
        source=f"data sheets, not measured; {note}; {words}",
        gpu=gpu,
        gpu_bytes=sheet.gpu_bytes,
        ram_bytes=ram_bytes,
        cores=cores,
        numa_nodes=numa_nodes,
        **gpu_rates(gpu, peak),
        h2d_bytes_per_s=link * GB * LINK_SHARE,
        d2h_bytes_per_s=link * GB * LINK_SHARE,
        duplex_share=duplex_share or min(PCIE_DUPLEX_SHARE, ram_gb_per_s / (2 * link)),
        gpu_copy_bytes_per_s=sheet.gb_per_s * GB * MEMORY_SHARE,
        ram_copy_bytes_per_s=ram_gb_per_s * GB * MEMORY_SHARE,
        drives=(drive,) * count,
        drives_share=DRIVES_SHARE if count > 1 else 1.0,
        drive_duplex_share=DRIVE_DUPLEX_SHARE,
        optimizer_params_per_s=ram_gb_per_s * GB * MEMORY_SHARE / OPTIMIZER_BYTES,
        gpus=gpus,
        power_w=sheet.power_w,
    )


_C2C = "NVLink-C2C carries more than the LPDDR5X behind it"
_OWN_SOCKET = "RAM at the rate of the GPU's own socket; PCIe 5"
_THREADRIPPER = "Threadripper, four channels of DDR5-5200"
_EIGHT = "EPYC, eight channels of DDR4-3200; 16 lanes for each GPU"
_TWO_SOCKETS = "two EPYC, sixteen channels of DDR4-3200; 16 lanes for each GPU"
_HGX = "two sockets, sixteen channels of DDR5-4800; 16 lanes for each GPU"
_SPARK = (
    "bfloat16 rate derived, not published: 1 PFLOP/s FP4 with sparsity, halved for dense, a quarter for bfloat16; one "
    "memory of 128 GB, of which 40 GB count as the GPU's and 88 GB as RAM, and a copy between them reads and writes it"
)
_PRESETS = (
    _preset("gh200-480", "NVIDIA GH200 480GB", _TWO_1743, (480 * GIB, 384), 72, _C2C),
    _preset("h200-1500", "NVIDIA H200", _FOUR_1743, (1536 * GIB, 460.8), 192, _OWN_SOCKET, numa_nodes=2),
    _preset("h100-pcie-512", "NVIDIA H100 PCIe", _TWO_A3, (512 * GIB, 307.2), 32, "eight channels of DDR5-4800"),
    _preset("rtx4090-64", "NVIDIA GeForce RTX 4090", _ONE_990, (64 * GIB, 83.2), 16, "DDR5-5200, two modules"),
    _preset("rtx4090-128", "NVIDIA GeForce RTX 4090", _TWO_990, (128 * GIB, 57.6), 16, "DDR5-3600, four modules"),
    _preset("rtx4090-256", "NVIDIA GeForce RTX 4090", _TWO_990, (256 * GIB, 166.4), 24, _THREADRIPPER),
    _preset("rtx5090-192", "NVIDIA GeForce RTX 5090", _TWO_990, (192 * GIB, 57.6), 16, "DDR5-3600, four modules"),
    _preset("rtx3090-64", "NVIDIA GeForce RTX 3090", _ONE_990, (64 * GIB, 51.2), 16, "DDR4-3200, two channels"),
    _preset("dgx-spark", "NVIDIA GB10", _UNNAMED, (88 * GB, 273), 20, _SPARK, duplex_share=UNIFIED_DUPLEX_SHARE),
    _preset("2x-rtx3090-256", "NVIDIA GeForce RTX 3090", _TWO_990, (256 * GIB, 204.8), 32, _EIGHT, gpus=2),
    _preset("4x-rtx4090-256", "NVIDIA GeForce RTX 4090", _TWO_990, (256 * GIB, 204.8), 64, _EIGHT, gpus=4),
    _preset("8x-rtx4090-1000", "NVIDIA GeForce RTX 4090", _FOUR_990, (1024 * GIB, 409.6), 96, _TWO_SOCKETS, 2, gpus=8),
    _preset("8x-h200-2000", "NVIDIA H200", _EIGHT_1743, (2048 * GIB, 614.4), 192, _HGX, 2, gpus=8),
)
PRESETS: dict[str, Machine] = {machine.name: machine for machine in _PRESETS}
"""By name."""

GENERIC = Machine(
    name="generic",
    source="assumed: a modest machine of 2 cores without a GPU; run `penstock probe` for this machine's own rates",
    gpu=None,
    gpu_bytes=5 * GIB,
    ram_bytes=11 * GIB,
    cores=2,
    numa_nodes=1,
    matmul_flops=2e11,
    attention=tuple(
        AttentionRate(head_dim=head_dim, chunk_tokens=1024, forward_flops=8e10, backward_flops=1e11)
        for head_dim in OTHER_ATTENTION_SHARES
    ),
    h2d_bytes_per_s=8e9,
    d2h_bytes_per_s=8e9,
    duplex_share=0.7,
    gpu_copy_bytes_per_s=2.5e10,
    ram_copy_bytes_per_s=2.5e10,
    drives=(Drive(path=None, size_bytes=200 * GB, read_bytes_per_s=2e9, write_bytes_per_s=1e9),),
    drives_share=1.0,
    drive_duplex_share=DRIVE_DUPLEX_SHARE,
    optimizer_params_per_s=8e8,
)
"""Where nothing was measured and no preset is named: 16 GiB, which both tiers share."""


def generic_gpu(name: str) -> Machine:
    """Assumed rates of a machine whose GPU the driver calls `name`: its peak's shares, or those of 100 TFLOP/s."""
    peak = peak_of(name) or 100 * TERA
    return structs.replace(
        GENERIC,
        name="generic-gpu",
        source=f"assumed: {name} behind PCIe 4; run `penstock probe` for this machine's own rates",
        gpu=name,
        **gpu_rates(name, peak),
        h2d_bytes_per_s=PCIE4 * GB * LINK_SHARE,
        d2h_bytes_per_s=PCIE4 * GB * LINK_SHARE,
        duplex_share=PCIE_DUPLEX_SHARE,
        gpu_copy_bytes_per_s=TERA * MEMORY_SHARE,
    )


def find_machine(name_or_path: str) -> Machine:
    """The preset of that name, or the machine of a profile file. UserError with near names, or for a broken file."""
    if name_or_path in PRESETS:
        return PRESETS[name_or_path]
    path = Path(name_or_path).expanduser()
    if path.is_file():
        return load_machine(path)
    near = difflib.get_close_matches(name_or_path.lower(), PRESETS, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"presets are {', '.join(PRESETS)}"
    raise UserError(f"machine '{name_or_path}': there is no preset or profile file of that name; {hint}")


def machine_here(folder: Path) -> Machine:
    """This machine, without PyTorch where it was probed or has no GPU; else the drive is `folder`'s. UserError."""
    stored = stored_machine()
    if stored is not None:
        return stored
    gpu, (gpu_bytes, ram_bytes) = None, split_shared(total_memory())
    if any(os.path.exists(f"/dev/{name}") for name in _GPU_DEVICES):
        import torch

        from penstock.engine.machine.probe import memories

        gpu, gpu_bytes, ram_bytes = memories(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    assumed = GENERIC if gpu is None else generic_gpu(gpu)
    drive = structs.replace(assumed.drives[0], size_bytes=free_disk(folder))
    return structs.replace(assumed, gpu_bytes=gpu_bytes, ram_bytes=ram_bytes, cores=usable_cpus(), drives=(drive,))


def profile_path() -> Path:
    """Where `penstock probe` keeps this machine's profile: below XDG_CONFIG_HOME, else ~/.config."""
    folder = os.environ.get("XDG_CONFIG_HOME", "")
    # The XDG specification has relative paths ignored.
    base = Path(folder) if os.path.isabs(folder) else Path.home() / ".config"
    return base / "penstock" / "machine.json"


def stored_machine() -> Machine | None:
    """This machine's profile; None where it was never probed. Raises UserError for a broken profile."""
    path = profile_path()
    return load_machine(path) if path.exists() else None


def this_machine(device: torch.device) -> Machine:
    """The stored profile of this machine, or assumed rates where it was never probed with that device."""
    import torch

    stored = stored_machine()
    if stored is not None and (stored.gpu is not None) == (device.type == "cuda"):
        return stored
    return GENERIC if device.type == "cpu" else generic_gpu(torch.cuda.get_device_name(device))
