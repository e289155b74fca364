"""Figures that other systems published for one GPU with offload, and the recipe whose model and batch are the same.

They keep another state than Penstock's 14 bytes a parameter (float32 master weights and moments, bfloat16 weights):

- MegaTrain updates bfloat16 weights in place, with float32 moments; ml_dataflow holds weights, gradients and moments in
  bfloat16, 8 bytes a parameter. Neither keeps a float32 copy of the weights.
- LLMQ holds master weights and moments in bfloat16 as well (its command's `--model-dtype=bf16 --opt-m-dtype=bf16
  --opt-v-dtype=bf16`). The command that it gives for 7B in "BF16" asks for products in e4m3; the rate is that of
  bfloat16: in FP8 it publishes 4,328 tokens/s.
- LLaMA-Factory on DeepSpeed ZeRO-3 with offload keeps float32 master weights and moments in RAM, as Penstock does.
  LLMQ's author measured it, by the difference of its first two steps.

Steps of the last two have 512 sequences of 1,024 tokens (LLaMA-Factory's 14B 520), in micro-batches that are taken over
here; how much RAM the machine had is not said, so the preset with the most is planned.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
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
    """A paper, or a file of recorded results."""
    micro_batch: int = 1
    """Sequences of a micro-batch."""


_MEGATRAIN, _PAPER, _FLOW = "MegaTrain", "arXiv 2604.05091", "ml_dataflow"
_LLMQ, _FACTORY, _BENCHMARKS = "LLMQ", "LLaMA-Factory, ZeRO-3 offload", "llmq benchmarks/4090x1.md"
_4090 = "RTX 4090, RAM not stated"
_SXM = "H100 SXM5 of 80 GB"
_GH200 = "GH200 of 96 GB, 480 GB"
_8B, _32B, _H100, _5090 = "8b_8k", "32b_512k", "h100-pcie-512", "rtx5090-192"
_7B, _14B, _RTX = "7b_512k", "14b_workstation", "rtx4090-256"

PUBLISHED = (
    Published(_MEGATRAIN, _7B, "gh200-480", 262_144, 1, "1,110", _GH200, _PAPER),
    Published(_MEGATRAIN, _7B, "gh200-480", 524_288, 1, "602", _GH200, _PAPER),
    Published(_FLOW, _8B, _H100, 8192, 68, "11,280", f"{_SXM}, 65 GB", "h100_8b_short_results.csv"),
    Published(
        _FLOW, _8B, _H100, 524_288, 1, "928 to 1,128", f"{_SXM}, 256 to 356 GB", "h100_8b_extra_long_results.csv"
    ),
    Published(_FLOW, _8B, _H100, 1_048_576, 1, "480 to 506", f"{_SXM}, 464 to 496 GB", "h100_8b_1m_results.csv"),
    Published(_FLOW, _32B, _H100, 8192, 42, "2,430 to 2,594", f"{_SXM}, 256 to 320 GB", "h100_32b_short_results.csv"),
    Published(_FLOW, _32B, _H100, 262_144, 1, "599 to 642", f"{_SXM}, 464 to 496 GB", "h100_32b_long_results.csv"),
    Published(_FLOW, _8B, _5090, 8192, 14, "3,055 to 3,175", "RTX 5090, 64 to 72 GB", "rtx5090_8b_short_results.csv"),
    Published(_FLOW, _8B, _5090, 131_072, 1, "675 to 680", "RTX 5090, 128 to 160 GB", "rtx5090_8b_long_results.csv"),
    Published(_FLOW, _8B, _5090, 262_144, 1, "323", "RTX 5090, 160 GB", "rtx5090_8b_long_results.csv"),
    Published(_FLOW, _8B, "rtx3090-64", 8192, 5, "970 to 986", "RTX 3090, 64 GB", "rtx3090_8b_short_results.csv"),
    Published(_LLMQ, _7B, _RTX, 1024, 512, "2,777", _4090, _BENCHMARKS, micro_batch=16),
    Published(_FACTORY, _7B, _RTX, 1024, 512, "2,523", _4090, _BENCHMARKS, micro_batch=32),
    Published(_LLMQ, _14B, _RTX, 1024, 512, "1,348", _4090, _BENCHMARKS, micro_batch=32),
    Published(_FACTORY, _14B, _RTX, 1024, 520, "1,135", _4090, _BENCHMARKS, micro_batch=20),
)
