"""What a GPU can do at most, by its data sheet, and what share of it a step used.

Peaks are of bfloat16 tensor cores without sparsity; where a card multiplies at half rate when it accumulates in float32
(GeForce), that rate counts, since training accumulates in float32. Sources, by NVIDIA unless said otherwise:

- H100 (SXM, PCIe, NVL), H200 (SXM, NVL), GH200, L4, L40, L40S, A10, A30: product data sheets, which give the figure
  "with sparsity", twice as high, for all but A10 and A30.
- B200, B300: HGX data sheets, of eight GPUs with sparsity; GB200, GB300: of one Superchip's GPU.
- A100: data sheet. A40, RTX A6000: GA102 based, data sheets. RTX 6000 Ada: Ada white paper, appendix.
- GeForce: white papers of GA102 (3090, 3090 Ti), Ada (4080, 4090) and RTX Blackwell (5080, 5090), tables of "peak BF16
  tensor TFLOPS with FP32 accumulate".

GB10 (DGX Spark) is missing on purpose: only its FP4 rate with sparsity is published. So are laptops' and other variants
that share a name with a faster card, and parts of a GPU (MIG).
"""

from __future__ import annotations

import re

_TERA = 10**12

_PEAKS: tuple[tuple[str, float], ...] = (
    (r"H100( SXM5?)?( \d+GB HBM3)?", 989.5),
    (r"H100 PCIe", 756.5),
    (r"H100 NVL", 835.5),
    (r"H200", 989.5),
    (r"H200 NVL", 835.5),
    (r"GH200( .*)?", 989.5),
    (r"B200|B300( .*)?", 2250),
    (r"GB200|GB300", 2500),
    (r"A100-(SXM4|SXM|PCIE)-\d+GB|A100 80GB PCIe", 312),
    (r"A10", 125),
    (r"A30", 165),
    (r"A40", 149.7),
    (r"L4", 121),
    (r"L40", 181.05),
    (r"L40S", 362.05),
    (r"RTX A6000", 154.8),
    (r"RTX 6000 Ada Generation", 364.2),
    (r"GeForce RTX 3090", 71),
    (r"GeForce RTX 3090 Ti", 80),
    (r"GeForce RTX 4080", 97.5),
    (r"GeForce RTX 4090", 165.2),
    (r"GeForce RTX 5080", 112.6),
    (r"GeForce RTX 5090", 209.5),
)
"""Name as the driver reports it, without the maker's; peak in TFLOP/s."""


def peak_flops(name: str) -> float | None:
    """Dense bfloat16 FLOP/s of the GPU that the driver calls `name`; None where it is not known, never another's."""
    model = re.sub(r"^(NVIDIA|Tesla)\s+", "", name.strip())
    return next((tera * _TERA for pattern, tera in _PEAKS if re.fullmatch(pattern, model)), None)


def utilisation(flops: float, seconds: float, peak: float | None) -> float | None:
    """`flops` over what the GPU could have done: MFU of what the tokens need, HFU of all that was computed."""
    return None if peak is None else flops / (seconds * peak)
