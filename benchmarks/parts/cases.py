"""What `shapes` measures: models' shapes, batches and budgets, by name.

Shapes are those of the models' public configs. A long sequence is measured on one layer: it is seconds of attention,
beside which what happens between two layers is nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec

from penstock.engine.config import ModelConfig
from penstock.storage.files.errors import UserError


def shape(
    model_type: str,
    layers: int,
    hidden: int,
    intermediate: int,
    heads: tuple[int, int],
    head_dim: int,
    vocab: int,
    **more: Any,
) -> ModelConfig:
    """`heads`: those of queries, and of keys and values."""
    return ModelConfig(
        model_type=model_type,
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        vocab_size=vocab,
        **more,
    )


def _rope(theta: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}


QWEN25_7B = shape("qwen2", 28, 3584, 18944, (28, 4), 128, 152064, overrides=_rope(1e6))
LLAMA3_8B = shape("llama", 32, 4096, 14336, (32, 8), 128, 128256, overrides=_rope(5e5))
QWEN3_32B = shape("qwen3", 64, 5120, 25600, (64, 8), 128, 151936)
QWEN3_600M = shape("qwen3", 28, 1024, 3072, (16, 8), 128, 151936, tie_embeddings=True)
TINY = shape("qwen3", 6, 64, 160, (4, 2), 16, 512)
_UNWINDOWED: dict[str, Any] = {"sliding_window": None}
LADDER = {
    "Llama-3.1-405B": shape("llama", 126, 16384, 53248, (128, 8), 128, 128256),
    "Mistral-Large-2 (123B)": shape("mistral", 88, 12288, 28672, (96, 8), 128, 32768, overrides=_UNWINDOWED),
    "Llama-3-70B": shape("llama", 80, 8192, 28672, (64, 8), 128, 128256),
    "Qwen3-32B": QWEN3_32B,
    "Qwen3-14B": shape("qwen3", 40, 5120, 17408, (40, 8), 128, 151936),
    "Llama-3-8B": LLAMA3_8B,
    "Qwen3-4B": shape("qwen3", 36, 2560, 9728, (32, 8), 128, 151936, tie_embeddings=True),
    "Qwen3-1.7B": shape("qwen3", 28, 2048, 6144, (16, 8), 128, 151936, tie_embeddings=True),
    "Qwen3-0.6B": QWEN3_600M,
}
"""What `tiers` chooses from, largest first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One measurement, in a process of its own."""

    shapes: dict[str, ModelConfig]
    """The model by its name; of several the first whose whole state the machine holds."""
    row_tokens: int
    """Tokens of one sequence."""
    rows: int = 1
    """Sequences in a step, each a micro-batch."""
    chunk_tokens: int
    layers: tuple[int, ...] | None = None
    """Depths to cut the model to, in order of preference; None measures all layers."""
    gpu: str | None = None
    """budgets.gpu; None takes the default share of what is free."""
    ram: str | None = None
    """budgets.ram; None takes the default share of what is free."""
    spill_state: bool = False
    """State may live on NVMe; else a machine whose RAM does not hold the cut model skips the case."""
    short_warm_up: bool = False
    """The warm-up's documents are two chunks long, so that it costs little at full length."""
    timed: int = 3
    """Steps that are timed, after WARM_UP others."""
    needs_cuda: bool = True
    compiled: bool = False
    """Compile on the CPU, too; on CUDA it is always done."""
    plain: bool = False
    """Time plain PyTorch, too. Not where a long sequence's logits or the state are larger than the case's budget."""
    kernel_gaps: bool = False
    """Run one more step under the profiler and measure how long no kernel ran."""
    kernel_s: float = 0.5
    """Seconds for which each kernel alone is measured, at least."""


WARM_UP = 2
"""The first step compiles the layers, the second the optimizer, which applies its gradient."""


def small(case: Case, *, on_gpu: bool) -> Case:
    """The case with a tiny model and batch: the same code in seconds on any machine, and figures that say nothing."""
    last = [*case.shapes.values()][-1]
    tiny = replace(TINY, model_type=last.model_type, tie_embeddings=last.tie_embeddings, overrides=last.overrides)
    chunk_tokens = max(64, 256 * case.chunk_tokens // case.row_tokens)
    case = replace(case, shapes={"tiny": tiny}, layers=(2,), gpu=None, kernel_s=0.02, needs_cuda=on_gpu)
    return replace(case, row_tokens=256, rows=min(2, case.rows), chunk_tokens=chunk_tokens)


def case_of(values: dict[str, Any]) -> Case:
    """The case that `dataclasses.asdict` made, through JSON or not, `values` of."""
    return msgspec.convert(values, Case)


_SHORT = Case(
    shapes={"Llama-3-8B": LLAMA3_8B},
    row_tokens=8192,
    rows=32,
    chunk_tokens=8192,
    layers=(4, 3, 2),
    timed=2,
    plain=True,
    kernel_gaps=True,
)
_LONG_7B = Case(
    shapes={"Qwen2.5-7B": QWEN25_7B},
    row_tokens=524_288,
    chunk_tokens=16_384,
    layers=(1,),
    short_warm_up=True,
    timed=1,
)
_LONG_8B = replace(_LONG_7B, shapes={"Llama-3-8B": LLAMA3_8B})
_LONG_1M = replace(_LONG_8B, row_tokens=1 << 20)
_LONG_24GB: dict[str, Any] = {"gpu": "24GiB", "chunk_tokens": 8192}
_TIERS = Case(shapes=LADDER, row_tokens=8192, rows=2, chunk_tokens=8192, layers=(2,), spill_state=True, timed=1)
_CPU = Case(
    shapes={"tiny": TINY},
    row_tokens=48,
    rows=4,
    chunk_tokens=48,
    layers=(2,),
    gpu="64MiB",
    ram="256MiB",
    needs_cuda=False,
    plain=True,
    kernel_s=0.02,
)

CASES = {
    "short": _SHORT,
    "short-24gb": replace(_SHORT, plain=False, kernel_gaps=False, gpu="24GiB"),
    "short-32b": replace(_SHORT, shapes={"Qwen3-32B": QWEN3_32B}, rows=16, layers=(2,), kernel_gaps=False),
    "long-7b": _LONG_7B,
    "long-8b": _LONG_8B,
    "long-24gb-7b": replace(_LONG_7B, **_LONG_24GB),
    "long-24gb-8b": replace(_LONG_8B, **_LONG_24GB),
    "long-1m": _LONG_1M,
    "long-1m-24gb": replace(_LONG_1M, **_LONG_24GB),
    "tiers": _TIERS,
    "full": replace(_LONG_7B, layers=None, spill_state=True),
    "cpu-short": _CPU,
    "cpu-long": replace(_CPU, row_tokens=256, rows=1, chunk_tokens=64, short_warm_up=True),
    "cpu-tiers": replace(_CPU, plain=False, gpu="2MiB", ram="4MiB", spill_state=True),
}


def cases_of(text: str) -> dict[str, Case]:
    """Those of `NAME[,NAME...]`. Raises UserError for a name that does not exist."""
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in CASES]:
        raise UserError(f"{unknown[0]}: no such case; choose from {', '.join(CASES)}")
    return {name: CASES[name] for name in names}
