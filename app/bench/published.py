"""Figures that other systems published for one GPU with offload, and the recipe whose model and batch are the same.

Neither keeps a float32 copy of the weights: MegaTrain updates bfloat16 weights in place, ml_dataflow holds weights,
gradients and moments in bfloat16. Penstock keeps 14 bytes a parameter where ml_dataflow keeps 8.

MegaTrain: arXiv 2604.05091, long-context table, read in three independent transcriptions; tokens/s is tokens over step
time, since its TFLOP/s count causal attention as full. Its rows up to 128k tokens are left out: they exceed the GPU's
peak if their attention is over the whole context. ml_dataflow: github.com/als244/ml_dataflow,
bench/reproduce_results/recorded_data, recorded by its author.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """One published figure, and what to plan beside it."""

    system: str
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


_MEGATRAIN = "arXiv 2604.05091"
_CSV = "{}_results.csv"
_SXM = "H100 SXM5 of 80 GB, 989 TFLOP/s (the preset's PCIe card: 756)"

PUBLISHED: tuple[Published, ...] = (
    Published(
        system="MegaTrain",
        recipe="7b_512k",
        machine="gh200-480",
        context=262_144,
        sequences=1,
        tokens_per_s="1,110",
        hardware="GH200 of 96 GB, 480 GB",
        source=_MEGATRAIN,
    ),
    Published(
        system="MegaTrain",
        recipe="7b_512k",
        machine="gh200-480",
        context=524_288,
        sequences=1,
        tokens_per_s="602",
        hardware="GH200 of 96 GB, 480 GB",
        source=_MEGATRAIN,
    ),
    Published(
        system="MegaTrain",
        recipe="120b_moe",
        machine="h200-1500",
        context=8192,
        sequences=16,
        tokens_per_s="n/a (fits; context, batch and rate not found)",
        hardware="H200 of 141 GB, 1.5 TB",
        source=_MEGATRAIN,
    ),
    *(
        Published(
            system="ml_dataflow",
            recipe=recipe,
            machine=machine,
            context=context,
            sequences=sequences,
            tokens_per_s=rate,
            hardware=hardware,
            source=_CSV.format(file),
        )
        for recipe, machine, context, sequences, rate, hardware, file in (
            ("8b_8k", "h100-pcie-512", 8192, 68, "11,280", f"{_SXM}, 65 GB", "h100_8b_short"),
            (
                "8b_8k",
                "h100-pcie-512",
                524_288,
                1,
                "928 to 1,128",
                f"{_SXM}, 256 to 356 GB",
                "h100_8b_extra_long",
            ),
            ("8b_8k", "h100-pcie-512", 1_048_576, 1, "480 to 506", f"{_SXM}, 464 to 496 GB", "h100_8b_1m"),
            (
                "32b_512k",
                "h100-pcie-512",
                8192,
                42,
                "2,430 to 2,594",
                f"{_SXM}, 256 to 320 GB",
                "h100_32b_short",
            ),
            (
                "32b_512k",
                "h100-pcie-512",
                262_144,
                1,
                "599 to 642",
                f"{_SXM}, 464 to 496 GB",
                "h100_32b_long",
            ),
            (
                "8b_8k",
                "rtx5090-192",
                8192,
                14,
                "3,055 to 3,175",
                "RTX 5090, 64 to 72 GB",
                "rtx5090_8b_short",
            ),
            (
                "8b_8k",
                "rtx5090-192",
                131_072,
                1,
                "675 to 680",
                "RTX 5090, 128 to 160 GB",
                "rtx5090_8b_long",
            ),
            ("8b_8k", "rtx5090-192", 262_144, 1, "323", "RTX 5090, 160 GB", "rtx5090_8b_long"),
            ("8b_8k", "rtx3090-64", 8192, 5, "970 to 986", "RTX 3090, 64 GB", "rtx3090_8b_short"),
        )
    ),
)
