"""What kernels reach on each GPU architecture, from published measurements: products, and attention kernel by kernel.

All are shares of the data sheet's bfloat16 peak (engine/machine/peaks.py), under sustained load; none was measured by
this project. A kernel is called as its backend (engine/attention/select.py).

**Products** take the rate of whole steps of 512 or 1,024 tokens, less the time of elementwise work in them
(`_products`), which a plan counts apart. Sources; ml_dataflow is github.com/als244/ml_dataflow
(`bench/reproduce_results/recorded_data`), MAMF is github.com/stas00/ml-engineering (`compute/accelerator`):
- Hopper 0.624: 32B on an H100 SXM5 (ml_dataflow, h100_32b_short_results.csv); the best short run is 0.803 (MAMF).
- Ada 0.90: Qwen2.5-14B on an RTX 4090, all blocks recomputed (github.com/IST-DASLab/llmq, `benchmarks/4090x1.md`).
- Ampere 0.877, Blackwell 0.921: 8B on RTX 3090 and 5090 (ml_dataflow, rtx3090_8b and rtx5090_8b_short_results.csv).
- Blackwell of data centres: 0.776, a short run's best (B200, MAMF), times what Hopper sustains of its own.
- GB10 0.71: CUTLASS in NVFP4 (forums.developer.nvidia.com, 359960); no bfloat16 rate was found.

**Attention**, TFLOP/s forward and backward:
- Hopper: arXiv 2407.08608 (FlashAttention-3), H100 SXM5, 16k tokens. FlashAttention 4 is as fast as 3 on a GH200
  (pytorch/torchtitan, pull request 4413).
- Blackwell, heads of 128: RTX 5090 forward (gau-nernst, "Writing Speed-of-Light Flash Attention for 5090 in CUDA C++");
  backward over forward from an RTX 5070 Ti (Dao-AILab/flash-attention, issue 1981). Such runs are short: they count
  times 0.921 / 1.07, what products sustain of their short runs (main-horse.github.io, 5090 perf).
- Heads of 64 on Blackwell, and GB10: forward on a GB10 (flash-attention, pull request 2474).
- Ada: no measurement was found that can be right; its tensor cores take Blackwell's instruction at the same half rate.
- Ampere: RTX A5000, flash-attn 2, heads of 64 (github.com/gpu-mode/ring-attention, issue 10).
- Blackwell of data centres: FlashAttention 4 (flash-attention, pull request 2280); 1.3 times cuDNN (arXiv 2603.05451).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.engine.machine.peaks import peak_flops

Shares = Mapping[int, tuple[float, float]]
"""Head size -> (forward, backward)."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """GPUs of one architecture, and what kernels reach on them."""

    name: str
    gpus: str
    """Pattern of their names as the driver reports them, without the maker's."""
    matmul_share: float
    """Of the peak in products of layer shapes."""
    kernels: Mapping[str, Shares]
    """Attention kernel -> shares of the peak by head size."""
    wanted: tuple[str, ...]
    """Of the kernels that do not come with torch the fastest here; one of them is enough."""
    extra: str
    """Of this package, which installs one of `wanted`."""
    peak: float | None = None
    """FLOP/s where engine.machine.peaks has none."""

    def shares(self, kernel: str, head_dim: int) -> tuple[float, float] | None:
        """Forward and backward shares of a kernel at the nearest head size; None where they are not known."""
        known = self.kernels.get(kernel)
        return None if known is None else known[min(known, key=lambda size: abs(size - head_dim))]

    def fastest(self) -> dict[int, tuple[float, float]]:
        """Shares of the fastest kernel by head size, which may be another one forward and backward."""
        sizes = sorted({size for shares in self.kernels.values() for size in shares})
        known = {size: [shares[size] for shares in self.kernels.values() if size in shares] for size in sizes}
        return {size: (max(f for f, _ in pairs), max(b for _, b in pairs)) for size, pairs in known.items()}


_H100, _RTX_5090, _GB10, _A5000, _GB200 = 989.5, 209.5, 125.0, 111.1, 2500.0
"""Peaks in TFLOP/s, of which the measured rates below are shares."""
_SUSTAINED = 0.921 / 1.07
"""Of a short run."""
_TORCH = 186.7 / 190.6
"""torch's copy of flash-attn 2 over flash-attn 2."""
_FLASH_2, _FLASH_4 = 2.5 * 51.43 / 131.34, 2.5 * 49.93 / 165.46
"""A kernel's backward over its forward, in FLOP/s, on a GeForce."""


_8B, _14B, _32B = (59.0e9, 25.23e6), (110.4e9, 41.00e6), (254.3e9, 82.97e6)
"""FLOPs of a token's products forward, again and backward, and bytes that elementwise work on it reads and writes."""
_PASSES = 0.85
"""Of a memory's bandwidth, in passes over it."""


def _products(of_step: float, peak: float, model: tuple[float, float], gb_per_s: float) -> float:
    """Share of `peak` TFLOP/s that products reach in a step which reaches `of_step`, on a GPU with that memory."""
    flops, nbytes = model
    step_s = flops / (of_step * peak * 1e12)
    return flops / (step_s - nbytes / (_PASSES * gb_per_s * 1e9)) / (peak * 1e12)


def _short(tflops: float, peak: float, backward: float = _FLASH_2) -> tuple[float, float]:
    """Shares of a kernel of which a short forward run is known, and its backward over its forward."""
    share = tflops / peak * _SUSTAINED
    return share, share * backward


_HOPPER = _products(0.624, _H100, _32B, 3350)
_HOPPER_3: Shares = {64: (473 / _H100, 474 / _H100), 128: (616 / _H100, 561 / _H100)}
_HOPPER_2: Shares = {64: (299 / _H100, 291 / _H100), 128: (335 / _H100, 322 / _H100)}
_GB10_TORCH, _GB10_4 = _short(87.6, _GB10), _short(94.5, _GB10, _FLASH_4)
_FORWARD, _BACKWARD = _short(190.6, _RTX_5090)
_MMA_SYNC: dict[str, Shares] = {
    "torch-cudnn": {64: _GB10_TORCH, 128: (_short(203.6, _RTX_5090)[0], _BACKWARD)},
    "flash-attn-2": {64: _short(87.6 / _TORCH, _GB10), 128: (_FORWARD, _BACKWARD)},
    "torch-cuda-flash": {64: _GB10_TORCH, 128: _short(186.7, _RTX_5090)},
}
_AMPERE = (81.9 / _A5000, 77.4 / _A5000)
_GB200_4 = (1418 / _GB200, 1209 / _GB200)

_HOPPER_KERNELS: dict[str, Shares] = {
    "flash-attn-3": _HOPPER_3,
    "flash-attn-4": _HOPPER_3,
    "torch-cudnn": {64: (388 / _H100, 433 / _H100), 128: (539 / _H100, 516 / _H100)},
    "flash-attn-2": _HOPPER_2,
    "torch-cuda-flash": _HOPPER_2,
}
_B200_KERNELS: dict[str, Shares] = {
    "flash-attn-4": {128: _GB200_4},
    "torch-cudnn": {128: (_GB200_4[0] / 1.3, _GB200_4[1] / 1.3)},
}
_AMPERE_KERNELS: dict[str, Shares] = {
    "flash-attn-2": {64: _AMPERE, 128: _AMPERE},
    "torch-cuda-flash": {size: (_AMPERE[0] * _TORCH, _AMPERE[1] * _TORCH) for size in (64, 128)},
}
_RTX_50_KERNELS = _MMA_SYNC | {
    "flash-attn-4": {64: _GB10_4, 128: _short(190.6 * 51.43 / 49.93, _RTX_5090, _FLASH_4)},
}
_GB10_KERNELS = {
    kernel: {size: rates for size in (64, 128)}
    for kernel, rates in (("flash-attn-4", _GB10_4), ("torch-cudnn", _GB10_TORCH), ("torch-cuda-flash", _GB10_TORCH))
}
_FA2, _FA4 = ("flash-attn-2",), ("flash-attn-4",)
_RTX_40, _RTX_30 = _products(0.90, 165.2, _14B, 1008), _products(0.877, 71.0, _8B, 936)
_RTX_50 = _products(0.921, 209.5, _8B, 1792)
_B200 = 0.776 * _HOPPER / 0.803

ARCHITECTURES = (
    Architecture("Hopper", r"(H100|H200|GH200)\b.*", _HOPPER, _HOPPER_KERNELS, ("flash-attn-3", *_FA4), "flash4"),
    Architecture("data-centre Blackwell", r"(B200|B300|GB200|GB300)\b.*", _B200, _B200_KERNELS, _FA4, "flash4"),
    Architecture("Ada", r"GeForce RTX 40\d\d\b.*", _RTX_40, _MMA_SYNC, _FA2, "flash2"),
    Architecture("Ampere", r"GeForce RTX 30\d\d\b.*", _RTX_30, _AMPERE_KERNELS, _FA2, "flash2"),
    Architecture("Blackwell", r"GeForce RTX 50\d\d\b.*", _RTX_50, _RTX_50_KERNELS, _FA2, "flash2"),
    Architecture("GB10", "GB10", 0.71, _GB10_KERNELS, _FA4, "flash4", peak=1000e12 / 2 / 4),
)
"""GB10's peak is derived: 1 PFLOP/s FP4 with sparsity, halved for dense, a quarter for bfloat16."""


def architecture(gpu: str | None) -> Architecture | None:
    """The architecture of the GPU that the driver calls `gpu`; None where nothing is known of it."""
    model = re.sub(r"^NVIDIA\s+", "", (gpu or "").strip())
    return next((result for result in ARCHITECTURES if re.fullmatch(result.gpus, model)), None)


def peak_of(gpu: str) -> float | None:
    """FLOP/s by the data sheet, or derived from it; None where neither is known."""
    result = architecture(gpu)
    return peak_flops(gpu) or (None if result is None else result.peak)
