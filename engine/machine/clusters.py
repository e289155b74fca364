"""Machines of several GPUs, joined by a network: what a node of each kind has, from data sheets.

Sheets, NVIDIA's: memory, its bandwidth and NVLink of H100 SXM (80 GB, 3.35 TB/s, NVLink 4), H200 SXM (141 GB,
4.8 TB/s, NVLink 4) and HGX B200 (180 GB, 8 TB/s, NVLink 5); NVLink is given both ways together, 900 and 1,800 GB/s, of
which a GPU sends half. The network is an assumption: one port of 400 Gbit/s InfiniBand (NDR) for each GPU, as nodes of
these kinds are usually sold (DGX H100, DGX B200). Peaks and what kernels reach of them: architectures.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from penstock.engine.machine.architectures import peak_of
from penstock.engine.machine.presets import GB, GIB, GPU_VISIBLE_SHARE, LINK_SHARE, MEMORY_SHARE, gpu_rates
from penstock.engine.machine.profile import AttentionRate
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import one_line

NETWORK_GBIT_PER_S = 400
"""Of each GPU, each way."""
MOST_NODES, MOST_GPUS_PER_NODE = 4096, 16
DEFAULT = "h100"


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterGpu:
    """A GPU of a node, and its share of what joins it to the others. Rates are what training sees, sustained."""

    gpu: str
    """Its name as the driver reports it."""
    gpu_bytes: int
    matmul_flops: float
    """FLOP/s of matrix products of layer shapes, bfloat16 with float32 sums."""
    attention: tuple[AttentionRate, ...]
    copy_bytes_per_s: float
    """Bytes read plus bytes written per second by passes over its memory."""
    nvlink_bytes_per_s: float
    """What it sends to the other GPUs of its node, and receives at the same time."""
    network_gbit_per_s: float
    """Its port to other nodes, each way, before any share is taken off."""

    @property
    def network_bytes_per_s(self) -> float:
        """What it sends to other nodes, likewise."""
        return self.network_gbit_per_s / 8 * GB * LINK_SHARE


@dataclass(frozen=True, slots=True)
class Cluster:
    """So many nodes with so many GPUs each."""

    nodes: int
    gpus_per_node: int
    gpu: ClusterGpu

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node


def cluster_gpu(
    gpu: str, *, memory: tuple[float, float], nvlink_gb_per_s: float, network_gbit_per_s: float = NETWORK_GBIT_PER_S
) -> ClusterGpu:
    """From raw figures: of its memory GiB and GB/s, of NVLink GB/s one way."""
    peak = peak_of(gpu)
    assert peak is not None, gpu
    gib, gb_per_s = memory
    return ClusterGpu(
        gpu=gpu,
        gpu_bytes=int(gib * GIB * GPU_VISIBLE_SHARE),
        **gpu_rates(gpu, peak),
        copy_bytes_per_s=gb_per_s * GB * MEMORY_SHARE,
        nvlink_bytes_per_s=nvlink_gb_per_s * GB * LINK_SHARE,
        network_gbit_per_s=network_gbit_per_s,
    )


CLUSTER_GPUS: dict[str, ClusterGpu] = {
    "h100": cluster_gpu("NVIDIA H100 80GB HBM3", memory=(80, 3350), nvlink_gb_per_s=450),
    "h200": cluster_gpu("NVIDIA H200", memory=(141, 4800), nvlink_gb_per_s=450),
    "b200": cluster_gpu("NVIDIA B200", memory=(180, 8000), nvlink_gb_per_s=900),
}
"""By the name that `--cluster` takes."""


def parse_cluster(text: str) -> Cluster:
    """The cluster of `NODESxGPUS` or `NODESxGPUSxNAME`, as `2x8` or `4x8xh200`. Raises UserError."""
    written = f"--cluster {one_line(text, 40)}"
    match = re.fullmatch(r"(\d{1,6})x(\d{1,6})(?:x([a-z0-9-]+))?", text.strip().lower())
    if match is None:
        raise UserError(f"{written}: write NODESxGPUS, for example 2x8, or with the GPU's name 2x8xh100")
    nodes, gpus, name = int(match[1]), int(match[2]), match[3] or DEFAULT
    if not 1 <= nodes <= MOST_NODES or not 1 <= gpus <= MOST_GPUS_PER_NODE:
        raise UserError(f"{written}: 1 to {MOST_NODES:,} nodes with 1 to {MOST_GPUS_PER_NODE} GPUs each")
    if name not in CLUSTER_GPUS:
        raise UserError(f"{written}: unknown GPU; known are {', '.join(CLUSTER_GPUS)}")
    return Cluster(nodes, gpus, CLUSTER_GPUS[name])
