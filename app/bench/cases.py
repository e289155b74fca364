"""What `penstock bench step --suite` measures: models' shapes, batches and budgets, by name.

Shapes are those of the models' public configs. What a case takes on a machine is estimated from its FLOPs, the rates
measured there and its memory, compiling included (`Case.estimate_s`). A long sequence is measured on one layer: it is
seconds of attention, beside which what happens between two layers is nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from penstock.storage.files.errors import UserError

START_S = 14.0
"""Interpreter, torch, transformers, planning, random tokens."""
COMPILE_S, COMPILE_CORES = 35.0, 8
"""A layer forward and backward, AdamW and the head, nothing cached; with fewer cores it takes longer."""
MEMORY_S_PER_GB = 0.7
"""Paging in from many threads 0.3, registering with CUDA 0.1, drawing and copying state 0.3."""
STEP_EFFICIENCY = 0.85
"""What a step makes of the rates that kernels reach alone."""
CHUNK_RUNS = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """FLOP/s that kernels reach alone on a GPU in bfloat16, attention's over visible pairs."""

    matmul: float
    attention_forward: float
    attention_backward: float

    @staticmethod
    def of_matmul(matmul: float) -> Rates:
        """What to expect of attention where only products were measured: cuDNN and FlashAttention 3 reach more."""
        return Rates(matmul=matmul, attention_forward=0.85 * matmul, attention_backward=0.7 * matmul)


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder-only model, by the fields of its transformers config."""

    name: str
    model_type: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = field(default=False, kw_only=True)
    overrides: dict[str, Any] = field(default_factory=dict, kw_only=True)

    @property
    def layer_params(self) -> int:
        """Weights of one layer's matrices."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def params(self) -> int:
        """Weights of all matrices."""
        return self.layers * self.layer_params + self.vocab * self.hidden * (1 if self.tied else 2)

    def step_flops(self, rows: int, row_tokens: int) -> int:
        """About what a step computes, recomputation of the layers' products included."""
        return self._matmul_flops(rows * row_tokens) + (4 + 10) * self._pairs(rows, row_tokens)

    def step_s(self, rates: Rates, rows: int, row_tokens: int) -> float:
        attention = 4 / rates.attention_forward + 10 / rates.attention_backward
        return self._matmul_flops(rows * row_tokens) / rates.matmul + attention * self._pairs(rows, row_tokens)

    def _matmul_flops(self, tokens: int) -> int:
        return tokens * (8 * self.layers * self.layer_params + 6 * self.vocab * self.hidden)

    def _pairs(self, rows: int, row_tokens: int) -> int:
        """Visible pairs of queries and keys times head width, of all heads and layers."""
        return self.layers * self.heads * self.head_dim * rows * row_tokens * (row_tokens + 1) // 2


def _rope(theta: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}


# Name and type; layers, hidden, intermediate; heads, kv_heads, head_dim; vocab.
QWEN25_7B = Shape("Qwen2.5-7B", "qwen2", 28, 3584, 18944, 28, 4, 128, 152064, overrides=_rope(1e6))
LLAMA3_8B = Shape("Llama-3-8B", "llama", 32, 4096, 14336, 32, 8, 128, 128256, overrides=_rope(5e5))
QWEN3_32B = Shape("Qwen3-32B", "qwen3", 64, 5120, 25600, 64, 8, 128, 151936)
TINY = Shape("tiny", "qwen3", 6, 64, 160, 4, 2, 16, 512)
_UNWINDOWED: dict[str, Any] = {"sliding_window": None}
LADDER = (
    Shape("Llama-3.1-405B", "llama", 126, 16384, 53248, 128, 8, 128, 128256),
    Shape("Mistral-Large-2 (123B)", "mistral", 88, 12288, 28672, 96, 8, 128, 32768, overrides=_UNWINDOWED),
    Shape("Llama-3-70B", "llama", 80, 8192, 28672, 64, 8, 128, 128256),
    QWEN3_32B,
    Shape("Qwen3-14B", "qwen3", 40, 5120, 17408, 40, 8, 128, 151936),
    LLAMA3_8B,
    Shape("Qwen3-4B", "qwen3", 36, 2560, 9728, 32, 8, 128, 151936, tied=True),
    Shape("Qwen3-1.7B", "qwen3", 28, 2048, 6144, 16, 8, 128, 151936, tied=True),
    Shape("Qwen3-0.6B", "qwen3", 28, 1024, 3072, 16, 8, 128, 151936, tied=True),
)
"""What `tiers` chooses from, largest first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One measurement, in a process of its own."""

    name: str
    shapes: tuple[Shape, ...]
    """The model; of several the first whose whole state the machine holds."""
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
    warm_up: int = 2
    """Steps that are not timed: the first compiles the layers, the second the optimizer, which applies its gradient."""
    short_warm_up: bool = False
    """The warm-up's documents are two chunks long, so that it costs little at full length."""
    timed: int = 3
    needs_cuda: bool = True
    compiled: bool = False
    """Compile on the CPU, too; on CUDA it is always done."""
    plain: bool = False
    """Time plain PyTorch, too. Not where a long sequence's logits or the state are larger than the case's budget."""
    kernel_gaps: bool = False
    """Run one more step under the profiler and measure how long no kernel ran."""
    kernel_s: float = 0.5
    """Seconds for which each kernel alone is measured, at least."""
    limit_s: float = 200.0
    """The process is ended after this time, and the case has failed."""

    @property
    def tokens(self) -> int:
        return self.rows * self.row_tokens

    def estimate_s(self, rates: Rates | None, cores: int) -> float:
        """Seconds that the case takes, roughly, with `cores` of the CPU; without rates the steps count nothing.

        Start of the process, compiling, drawing and pinning the state, calibration, steps, kernels alone; the same
        steps in plain PyTorch, and compiling those.
        """
        shape = self.shapes[0] if self.layers is None else replace(self.shapes[0], layers=self.layers[0])
        compile_s = COMPILE_S * max(1.0, COMPILE_CORES / cores) if self.needs_cuda or self.compiled else 0.0
        fixed_s = (
            START_S
            + compile_s * (1 + self.plain)
            + 5 * self.kernel_s
            + MEMORY_S_PER_GB * self._memory_bytes(shape) / 1e9
        )
        if rates is None:
            return fixed_s
        full_s = shape.step_s(rates, self.rows, self.row_tokens) / STEP_EFFICIENCY
        warm_s = full_s
        if self.short_warm_up:
            document = min(2 * self.chunk_tokens, self.row_tokens)
            warm_s = shape.step_s(rates, self.tokens // document, document) / STEP_EFFICIENCY
        steps_s = self.warm_up * warm_s + (self.timed + self.kernel_gaps) * full_s
        if self.plain:
            steps_s += (self.warm_up + self.timed) * full_s
        # Calibration and the kernels alone run a layer's longest chunk several times; it takes twice the mean.
        chunks = max(1, self.tokens // self.chunk_tokens)
        return fixed_s + steps_s + CHUNK_RUNS * 2 * full_s / (chunks * shape.layers)

    def _memory_bytes(self, shape: Shape) -> int:
        """About what a run of `shape` touches of RAM before its first step: state, weights, gradients, boundaries."""
        return 18 * shape.params + 2 * self.tokens * shape.hidden * (shape.layers + 1)


def small(case: Case, *, on_gpu: bool) -> Case:
    """The case with a tiny model and batch: the same code in seconds on any machine, and figures that say nothing."""
    last = case.shapes[-1]
    shape = replace(TINY, model_type=last.model_type, tied=last.tied, overrides=last.overrides)
    chunk_tokens = max(64, 256 * case.chunk_tokens // case.row_tokens)
    case = replace(case, shapes=(shape,), layers=(2,), gpu=None, kernel_s=_CPU.kernel_s, needs_cuda=on_gpu)
    return replace(case, row_tokens=256, rows=min(2, case.rows), chunk_tokens=chunk_tokens)


def case_of(values: dict[str, Any]) -> Case:
    """The case that `dataclasses.asdict` made, through JSON or not, `values` of."""
    return msgspec.convert(values, Case)


_SHORT = Case(
    name="short",
    shapes=(LLAMA3_8B,),
    row_tokens=8192,
    rows=32,
    chunk_tokens=8192,
    layers=(4, 3, 2),
    timed=2,
    plain=True,
    kernel_gaps=True,
)
_LONG_7B = Case(
    name="long-7b",
    shapes=(QWEN25_7B,),
    row_tokens=524_288,
    chunk_tokens=16_384,
    layers=(1,),
    short_warm_up=True,
    timed=1,
)
_LONG_8B = replace(_LONG_7B, name="long-8b", shapes=(LLAMA3_8B,))
_24GB: dict[str, Any] = {"gpu": "24GiB"}

_CPU = Case(
    name="cpu-short",
    shapes=(TINY,),
    row_tokens=48,
    rows=4,
    chunk_tokens=48,
    layers=(2,),
    gpu="64MiB",
    ram="256MiB",
    timed=3,
    needs_cuda=False,
    plain=True,
    kernel_s=0.02,
    limit_s=120,
)

SUITES: dict[str, tuple[Case, ...]] = {
    "short": (_SHORT,),
    "short-24gb": (replace(_SHORT, name="short-24gb", plain=False, kernel_gaps=False, **_24GB),),
    "long": (_LONG_7B, _LONG_8B),
    "long-24gb": (
        replace(_LONG_7B, name="long-24gb-7b", chunk_tokens=8192, **_24GB),
        replace(_LONG_8B, name="long-24gb-8b", chunk_tokens=8192, **_24GB),
    ),
    "long-1m": (
        replace(_LONG_8B, name="long-1m", row_tokens=1 << 20, limit_s=400),
        replace(_LONG_8B, name="long-1m-24gb", row_tokens=1 << 20, chunk_tokens=8192, limit_s=400, **_24GB),
    ),
    "short-32b": (replace(_SHORT, name="short-32b", shapes=(QWEN3_32B,), rows=16, layers=(2,), kernel_gaps=False),),
    "tiers": (
        Case(
            name="tiers",
            shapes=LADDER,
            row_tokens=8192,
            rows=2,
            chunk_tokens=8192,
            layers=(2,),
            spill_state=True,
            timed=1,
            limit_s=300,
        ),
    ),
    "full": (replace(_LONG_7B, name="full", layers=None, spill_state=True, limit_s=3600),),
    "cpu": (
        _CPU,
        replace(_CPU, name="cpu-long", row_tokens=256, rows=1, chunk_tokens=64, short_warm_up=True),
        replace(_CPU, name="cpu-tiers", shapes=(TINY,), plain=False, gpu="2MiB", ram="4MiB", spill_state=True),
    ),
}

GROUPS: dict[str, tuple[str, ...]] = {
    # Cases in order of weight: what a time limit cuts off is the end.
    "gpu": ("long-7b", "short", "long-8b", "short-24gb", "long-24gb-7b", "tiers", "short-32b", "long-24gb-8b"),
}


def cases_of(text: str) -> list[tuple[str, Case]]:
    """(suite, case) of `NAME[,NAME...]`, each once; a name is a group's, a suite's or a case's.

    Raises UserError for a name that does not exist.
    """
    by_case = {case.name: (suite, case) for suite, cases in SUITES.items() for case in cases}
    found: list[tuple[str, Case]] = []
    for name in text.split(","):
        name = name.strip()
        if name in SUITES:
            named = [(name, case) for case in SUITES[name]]
        elif name in GROUPS or name in by_case:
            named = [by_case[case] for case in GROUPS.get(name, (name,))]
        else:
            raise UserError(f"--suite {name}: no such suite; choose from {', '.join([*GROUPS, *SUITES])}")
        found += [each for each in named if each not in found]
    return found
