"""Figures that other systems published for one GPU with offload, and the recipe whose model and batch are the same.

Neither keeps a float32 copy of the weights: MegaTrain updates bfloat16 weights in place, ml_dataflow holds weights,
gradients and moments in bfloat16. Penstock keeps 14 bytes a parameter where ml_dataflow keeps 8.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Published:
    """One published figure, and what to plan beside it."""

    recipe: str
    """Recipe whose model it is, by file name."""
    machine: str
    """The preset nearest to its machine."""
    context: int
    sequences: int
    """Of one step."""
    tokens_per_s: str
    """As published, or its range."""
    hardware: str
    """What it was measured on, with the RAM that was used."""
    source: str
    """A paper, or a file of recorded results."""

    @property
    def system(self) -> str:
        return "MegaTrain" if self.source == _MEGATRAIN else "ml_dataflow"


_MEGATRAIN = "arXiv 2604.05091"
_SXM = "H100 SXM5 of 80 GB, 989 TFLOP/s (the preset's PCIe card: 756)"
_GH200 = "GH200 of 96 GB, 480 GB"
_UNKNOWN = "n/a (fits; context, batch and rate not found)"
_8B, _32B, _H100 = "8b_8k", "32b_512k", "h100-pcie-512"

PUBLISHED = (
    Published("7b_512k", "gh200-480", 262_144, 1, "1,110", _GH200, _MEGATRAIN),
    Published("7b_512k", "gh200-480", 524_288, 1, "602", _GH200, _MEGATRAIN),
    Published("120b_moe", "h200-1500", 8192, 16, _UNKNOWN, "H200 of 141 GB, 1.5 TB", _MEGATRAIN),
    Published(_8B, _H100, 8192, 68, "11,280", f"{_SXM}, 65 GB", "h100_8b_short_results.csv"),
    Published(_8B, _H100, 524_288, 1, "928 to 1,128", f"{_SXM}, 256 to 356 GB", "h100_8b_extra_long_results.csv"),
    Published(_8B, _H100, 1_048_576, 1, "480 to 506", f"{_SXM}, 464 to 496 GB", "h100_8b_1m_results.csv"),
    Published(_32B, _H100, 8192, 42, "2,430 to 2,594", f"{_SXM}, 256 to 320 GB", "h100_32b_short_results.csv"),
    Published(_32B, _H100, 262_144, 1, "599 to 642", f"{_SXM}, 464 to 496 GB", "h100_32b_long_results.csv"),
    Published(_8B, "rtx5090-192", 8192, 14, "3,055 to 3,175", "RTX 5090, 64 to 72 GB", "rtx5090_8b_short_results.csv"),
    Published(_8B, "rtx5090-192", 131_072, 1, "675 to 680", "RTX 5090, 128 to 160 GB", "rtx5090_8b_long_results.csv"),
    Published(_8B, "rtx5090-192", 262_144, 1, "323", "RTX 5090, 160 GB", "rtx5090_8b_long_results.csv"),
    Published(_8B, "rtx3090-64", 8192, 5, "970 to 986", "RTX 3090, 64 GB", "rtx3090_8b_short_results.csv"),
)
