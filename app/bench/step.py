"""`penstock bench step`: one optimizer step of Penstock against plain PyTorch, in the same run.

Every case runs in a process of its own, so that its peak resident memory is its own; the cases take turns, so that a
change in the machine's load meets all of them.
"""

from __future__ import annotations

import itertools
import statistics
import time
from pathlib import Path
from typing import Any, Literal

import torch

from penstock.app.bench.plain import PlainBatch, plain_steps
from penstock.app.bench.process import call, resident_bytes, scratch, show
from penstock.engine.config import BudgetConfig, DataConfig, ModelConfig, Recipe, StorageConfig, TrainConfig
from penstock.engine.events import Observer, StepMetrics, Want
from penstock.engine.hf.config import model_config
from penstock.engine.machine.compilers import layers_compile, optimizer_compiles
from penstock.engine.machine.precision import with_compute_dtype
from penstock.engine.train import train

ROWS, ROW_TOKENS, VOCAB = 2, 512, 8192
WARMUP_STEPS = 2  # allocation, compilation, first touch of memory

CASES = ("plain", "ram", "nvme")
"""Plain PyTorch, and Penstock, with everything in memory; Penstock with master weights and moments on NVMe."""
BUDGETS: dict[str, dict[str, dict[str, str]]] = {
    "bfloat16": {"ram": {"gpu": "400MiB", "ram": "8GiB"}, "nvme": {"gpu": "400MiB", "ram": "700MiB"}},
    "float32": {"ram": {"gpu": "800MiB", "ram": "8GiB"}, "nvme": {"gpu": "800MiB", "ram": "1400MiB"}},
}
"""By what is computed in."""


def bench_step(*, json: bool = False, rounds: int = 3, steps: int = 6, folder: Path | None = None) -> dict[str, Any]:
    """Run every case `rounds` times, taking turns, `steps` timed steps each; print the ratios, or JSON with `json`.

    The NVMe case keeps its state below `folder` (the current directory when none) and removes it. Returns ratios
    `ram_ratio`, `nvme_ratio` (step time over plain PyTorch's) and `nvme_rss_ratio` (peak resident memory over it),
    and the figures they come from. Raises UserError when a case fails.
    """
    runs: dict[str, list[dict[str, Any]]] = {case: [] for case in CASES}
    for _ in range(rounds):
        for case in CASES:
            with scratch(folder) as path:
                runs[case].append(_run_case(case, steps, path))
    figures: dict[str, Any] = {"dtype": runs["plain"][0]["dtype"]}
    for case, outcomes in runs.items():
        times = [seconds for outcome in outcomes for seconds in outcome["step_times_s"][WARMUP_STEPS:]]
        figures[f"{case}_step_s"] = statistics.median(times)
        figures[f"{case}_step_range_s"] = [min(times), max(times)]
        figures[f"{case}_peak_rss_bytes"] = max(outcome["peak_rss_bytes"] for outcome in outcomes)
    for case in ("ram", "nvme"):
        figures[f"{case}_ratio"] = figures[f"{case}_step_s"] / figures["plain_step_s"]
    figures["nvme_rss_ratio"] = figures["nvme_peak_rss_bytes"] / figures["plain_peak_rss_bytes"]
    line = (
        f"a step of {figures['plain_step_s']:.2f} s in plain PyTorch ({figures['dtype']}) takes Penstock "
        f"{figures['ram_ratio']:.2f} x its time in RAM, and {figures['nvme_ratio']:.2f} x its time at "
        f"{figures['nvme_rss_ratio']:.2f} x its peak memory with the state on NVMe"
    )
    show(figures, line, as_json=json)
    return figures


def _run_case(case: str, steps: int, folder: str) -> dict[str, Any]:
    """What `measure` returns in a process of its own."""
    outcome: dict[str, Any] = call("penstock.app.bench.step:measure", case, steps, folder, what=f"bench case {case}")
    return outcome


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _dtype() -> Literal["bfloat16", "float32"]:
    """What both compute in: bfloat16, on a CPU without its instructions float32."""
    decided = with_compute_dtype(TrainConfig(steps=1, compute_dtype="auto"), _device().type).compute_dtype
    assert decided != "auto"
    return decided


def _compiles() -> bool:
    """Whether this machine compiles layers and AdamW: by itself, a run of so few steps would do without."""
    return layers_compile(_device()).ok and optimizer_compiles().ok


def _plain_times(steps: int) -> list[float]:
    recipe = _recipe("ram", steps)
    torch.manual_seed(0)
    batches = ([PlainBatch(torch.randint(0, VOCAB, (ROWS, ROW_TOKENS)))] for _ in range(steps))
    found = plain_steps(model_config(recipe, None), batches, recipe.train, _device())
    return [seconds for _, _, seconds in found]


class _StepClock(Observer):
    """Keeps when steps ended, by perf_counter, and when it was made."""

    def __init__(self) -> None:
        self.ended_s = [time.perf_counter()]

    def on_step(self, metrics: StepMetrics) -> None:
        self.ended_s.append(time.perf_counter())

    def checkpoint_requests(self) -> list[str]:
        return []

    def wanted(self) -> Want:
        return "run"


def _recipe(case: str, steps: int) -> Recipe:
    dtype = _dtype()
    return Recipe(
        name="bench",
        model=ModelConfig(
            model_type="qwen3",
            num_layers=12,
            hidden_size=1024,
            intermediate_size=3072,
            num_heads=16,
            num_kv_heads=8,
            head_dim=64,
            vocab_size=VOCAB,
        ),
        data=DataConfig(source="random", sequence_length=ROW_TOKENS),
        train=TrainConfig(
            steps=steps,
            global_batch_size=ROWS,
            micro_batch_size=ROWS,
            chunk_tokens=ROWS * ROW_TOKENS,
            lr=1e-4,
            lr_schedule="constant",
            beta1=0.9,
            beta2=0.95,
            eps=1e-8,
            weight_decay=0.1,
            clip_norm=1.0,
            compute_dtype=dtype,
            compile="on" if _compiles() else "off",  # as in a run of many steps
            gradient_dtype=dtype,  # what plain PyTorch's backward leaves; ours is summed in float32 before
        ),
        budgets=BudgetConfig(**BUDGETS[dtype][case]),
        storage=StorageConfig(checkpoint_every=steps, part_bytes="16MiB"),
    )


def _penstock_times(case: str, steps: int, scratch: Path) -> list[float]:
    clock = _StepClock()  # type: ignore[abstract]  # what it does not define does nothing
    train(_recipe(case, steps), run_dir=scratch, observer=clock, resume=False)
    return [end - start for start, end in itertools.pairwise(clock.ended_s)]


def measure(case: str, steps: int, folder: str) -> dict[str, Any]:
    """One case in this process: its step times after the warm-up's, and its peak memory."""
    steps += WARMUP_STEPS
    times = _plain_times(steps) if case == "plain" else _penstock_times(case, steps, Path(folder))
    return {"dtype": _dtype(), "step_times_s": times, "peak_rss_bytes": resident_bytes("VmHWM")}
