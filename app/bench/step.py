"""`penstock bench step`: one optimizer step of Penstock against plain PyTorch, in the same run.

Every case runs in a process of its own, so that its peak resident memory is its own; the cases take turns, so that a
change in the machine's load meets all of them.
"""

from __future__ import annotations

import argparse
import json as json_module
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from storage.errors import UserError

if TYPE_CHECKING:
    from engine.events import Preparing, Progress, Span, StepMetrics, ValidationMetrics, Want

LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 12, 1024, 3072, 16, 8, 64, 8192
ROWS, ROW_TOKENS = 2, 512
LR, BETA1, BETA2, EPS, WEIGHT_DECAY, CLIP_NORM = 1e-4, 0.9, 0.95, 1e-8, 0.1, 1.0
WARMUP_STEPS = 2  # allocation, compilation, first touch of memory

CASES = {
    "plain": "plain PyTorch, everything in memory",
    "ram": "Penstock, everything in memory",
    "nvme": "Penstock, master weights and moments on NVMe",
}
BUDGETS: dict[str, dict[str, dict[str, str]]] = {
    "bfloat16": {"ram": {"gpu": "400MiB", "ram": "8GiB"}, "nvme": {"gpu": "400MiB", "ram": "700MiB"}},
    "float32": {"ram": {"gpu": "800MiB", "ram": "8GiB"}, "nvme": {"gpu": "800MiB", "ram": "1400MiB"}},
}
"""By what is computed in."""


@dataclass(frozen=True)
class CaseResult:
    """One case, all rounds together."""

    step_s: float
    """Median of a step's wall-clock time, warm-up excluded."""
    peak_rss_bytes: int
    """Highest resident set of its processes (VmHWM), Python and libraries included."""
    step_times_s: list[float]


def bench_step(*, json: bool = False, rounds: int = 3, steps: int = 6, folder: Path | None = None) -> dict[str, float]:
    """Run every case `rounds` times, taking turns, `steps` timed steps each; print a table, or JSON with `json`.

    The NVMe case keeps its state below `folder` (the current directory when none) and removes it. Returns ratios
    `ram_ratio`, `nvme_ratio` (step time over plain PyTorch's) and `nvme_rss_ratio` (peak resident memory over it),
    and the figures they come from. Raises UserError when a case fails.
    """
    runs: dict[str, list[dict[str, Any]]] = {case: [] for case in CASES}
    for _ in range(rounds):
        for case in CASES:
            with tempfile.TemporaryDirectory(prefix=".bench-", dir=folder or Path.cwd()) as scratch:
                runs[case].append(_run_case(case, steps, Path(scratch)))
    results = {case: _summarise(outcomes) for case, outcomes in runs.items()}
    plain, ram, nvme = results["plain"], results["ram"], results["nvme"]
    dtype = runs["plain"][0]["dtype"]
    figures = {
        "ram_ratio": ram.step_s / plain.step_s,
        "nvme_ratio": nvme.step_s / plain.step_s,
        "nvme_rss_ratio": nvme.peak_rss_bytes / plain.peak_rss_bytes,
    }
    for case, result in results.items():
        figures[f"{case}_step_s"] = result.step_s
        figures[f"{case}_peak_rss_bytes"] = result.peak_rss_bytes
    print(json_module.dumps(figures, indent=2) if json else _table(results, dtype))
    return figures


def _run_case(case: str, steps: int, scratch: Path) -> dict[str, Any]:
    """The JSON that a worker process prints as its last line."""
    command = [sys.executable, "-m", "app.bench.step", case, "--steps", str(steps), "--scratch", str(scratch)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "USE_HUB_KERNELS": "0"}
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    if process.returncode != 0:
        raise UserError(f"bench case {case} failed (exit {process.returncode}):\n{process.stderr.strip()[-4000:]}")
    outcome: dict[str, Any] = json_module.loads(process.stdout.strip().splitlines()[-1])
    return outcome


def _summarise(outcomes: list[dict[str, Any]]) -> CaseResult:
    times = [seconds for outcome in outcomes for seconds in outcome["step_times_s"][WARMUP_STEPS:]]
    peak = max(outcome["peak_rss_bytes"] for outcome in outcomes)
    return CaseResult(step_s=statistics.median(times), peak_rss_bytes=peak, step_times_s=times)


def _table(results: dict[str, CaseResult], dtype: str) -> str:
    plain = results["plain"]
    lines = [
        f"Qwen3 shape, {LAYERS} layers, hidden {HIDDEN}, vocabulary {VOCAB}, untied; "
        f"{ROWS} x {ROW_TOKENS} tokens, {dtype}",
        f"{'case':<46}{'step s':>9}{'min..max':>16}{'ratio':>8}{'peak RSS MiB':>14}{'ratio':>8}",
    ]
    for case, result in results.items():
        spread = f"{min(result.step_times_s):.2f}..{max(result.step_times_s):.2f}"
        lines.append(
            f"{CASES[case]:<46}{result.step_s:>9.3f}{spread:>16}{result.step_s / plain.step_s:>8.2f}"
            f"{result.peak_rss_bytes / 2**20:>14.0f}{result.peak_rss_bytes / plain.peak_rss_bytes:>8.2f}"
        )
    return "\n".join(lines)


def _device_type() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _dtype() -> Literal["bfloat16", "float32"]:
    """What both compute in: bfloat16, on a CPU without its instructions float32."""
    from engine.config import TrainConfig
    from engine.machine.precision import with_compute_dtype

    decided = with_compute_dtype(TrainConfig(steps=1, compute_dtype="auto"), _device_type()).compute_dtype
    assert decided != "auto"
    return decided


def _compiles() -> bool:
    """Whether this machine compiles layers and AdamW: by itself, a run of so few steps would do without."""
    import torch

    from engine.machine.compilers import layers_compile, optimizer_compiles

    return layers_compile(torch.device(_device_type())).ok and optimizer_compiles().ok


def _plain_times(steps: int) -> list[float]:
    import torch
    from transformers import AutoConfig

    from app.bench.plain import plain_step_times

    config = AutoConfig.for_model(
        "qwen3",
        num_hidden_layers=LAYERS,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        vocab_size=VOCAB,
        max_position_embeddings=ROW_TOKENS,
        tie_word_embeddings=False,
    )
    return plain_step_times(
        config,
        rows=ROWS,
        row_tokens=ROW_TOKENS,
        steps=steps,
        device=torch.device(_device_type()),
        dtype=getattr(torch, _dtype()),
        lr=LR,
        betas=(BETA1, BETA2),
        eps=EPS,
        weight_decay=WEIGHT_DECAY,
        clip_norm=CLIP_NORM,
    )


class _StepClock:
    """Observer that keeps the wall-clock time between the ends of consecutive steps."""

    def __init__(self) -> None:
        self.times_s: list[float] = []
        self._last = time.perf_counter()

    def on_prepare(self, item: Preparing) -> None:
        pass

    def on_plan(self, plan: dict[str, Any], predicted: list[Span]) -> None:
        print(json_module.dumps(plan), file=sys.stderr)
        self._last = time.perf_counter()

    def on_progress(self, progress: Progress) -> None:
        pass

    def on_step(self, metrics: StepMetrics) -> None:
        now = time.perf_counter()
        self.times_s.append(now - self._last)
        self._last = now

    def on_validation(self, metrics: ValidationMetrics) -> None:
        pass

    def on_message(self, text: str, *, detail: bool = False) -> None:
        print(text, file=sys.stderr)

    def checkpoint_requests(self) -> list[str]:
        return []

    def on_checkpoint(self, name: str, step: int, error: str | None) -> None:
        pass

    def wanted(self) -> Want:
        return "run"

    def on_pause(self, paused: bool) -> None:
        pass


def _penstock_times(case: str, steps: int, scratch: Path) -> list[float]:
    from engine.config import BudgetConfig, DataConfig, ModelConfig, Recipe, StorageConfig, TrainConfig
    from engine.train import train

    clock, dtype = _StepClock(), _dtype()
    recipe = Recipe(
        name="bench",
        model=ModelConfig(
            model_type="qwen3",
            num_layers=LAYERS,
            hidden_size=HIDDEN,
            intermediate_size=INTERMEDIATE,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            vocab_size=VOCAB,
        ),
        data=DataConfig(source="random", sequence_length=ROW_TOKENS),
        train=TrainConfig(
            steps=steps,
            global_batch_size=ROWS,
            micro_batch_size=ROWS,
            chunk_tokens=ROWS * ROW_TOKENS,
            lr=LR,
            lr_schedule="constant",
            beta1=BETA1,
            beta2=BETA2,
            eps=EPS,
            weight_decay=WEIGHT_DECAY,
            clip_norm=CLIP_NORM,
            compute_dtype=dtype,
            compile="on" if _compiles() else "off",  # as in a run of many steps
            gradient_dtype=dtype,  # what plain PyTorch's backward leaves; ours is summed in float32 before
        ),
        budgets=BudgetConfig(**BUDGETS[dtype][case]),
        storage=StorageConfig(checkpoint_every=steps, part_bytes="16MiB"),
    )
    train(recipe, run_dir=scratch, observer=clock, resume=False)
    return clock.times_s


def _peak_rss_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def _worker() -> None:
    """Run one case in this process and print its step times and peak memory as JSON."""
    parser = argparse.ArgumentParser(prog="python -m app.bench.step", description=_worker.__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    arguments = parser.parse_args()
    steps = arguments.steps + WARMUP_STEPS
    plain = arguments.case == "plain"
    times = _plain_times(steps) if plain else _penstock_times(arguments.case, steps, arguments.scratch)
    print(json_module.dumps({"dtype": _dtype(), "step_times_s": times, "peak_rss_bytes": _peak_rss_bytes()}))


if __name__ == "__main__":
    _worker()
