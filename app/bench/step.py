"""`penstock bench step`: one optimizer step of Penstock against plain PyTorch and against its kernels, in the same run.

Every case has a process of its own, for its peak resident memory; they take turns, so that a change in load meets all.
Penstock's memory is what the plain case that it is compared with took.
"""

from __future__ import annotations

import itertools
import re
import statistics
import time
from pathlib import Path
from typing import Any, Literal

import torch

from penstock.app.bench.kernels import step_kernels
from penstock.app.bench.plain import PlainBatch, compiled_steps, plain_steps
from penstock.app.bench.process import call, resident_bytes, scratch, show
from penstock.app.console.working import Working
from penstock.engine.config import BudgetConfig, DataConfig, ModelConfig, Recipe, StorageConfig, TrainConfig
from penstock.engine.events import Observer, StepMetrics
from penstock.engine.hf.config import model_config
from penstock.engine.machine.compilers import layers_compile, optimizer_compiles
from penstock.engine.machine.precision import usual_dtype
from penstock.engine.model.anatomy import model_spec
from penstock.engine.train import train
from penstock.storage.files.errors import UserError

LAYERS, HIDDEN, VOCAB = 12, 1024, 8192
MAX_CHUNK_TOKENS = 1024
WARMUP_STEPS = 2  # allocation, compilation, first touch of memory

PLAIN = ("plain", "eager", "compiled")
WORDS = {
    "plain": "plain PyTorch, gradient checkpointing",
    "eager": "plain PyTorch, every activation kept",
    "compiled": "plain PyTorch, every activation kept, compiled",
    "ram": "Penstock in RAM, memory of the fastest plain one",
    "ram_plain": "Penstock in RAM, memory of the checkpointed one",
    "nvme": "Penstock, state on NVMe, half the fastest one's memory",
    "kernels": "the kernels alone",
}
"""Every case, in the order in which they take turns. Where this machine has no compilers, `compiled` is left out."""

MIB = 1 << 20
PROCESS_BYTES = 700 * MIB
"""Resident memory of a Penstock process beyond what its budgets hold: libraries, compiled code."""
GPU_BYTES = {"bfloat16": 400 * MIB, "float32": 800 * MIB}
"""The least budgets.gpu: a block's slots and work at `MAX_CHUNK_TOKENS`, by what is computed in."""
GRAPH_BYTES = {"bfloat16": 26 * 1024, "float32": 52 * 1024}
"""Of a token and layer: what forward saves where nothing is recomputed, as in the plain cases without checkpointing."""


def parse_batch(text: str) -> tuple[int, int]:
    """(rows, tokens of a row) of ROWSxTOKENS. Raises UserError."""
    result = re.fullmatch(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})", text, re.ASCII)
    if result is None or int(result[2]) < 2:
        raise UserError(f"--batch {text}: write ROWSxTOKENS, as in 2x512; a row has at least 2 tokens")
    return int(result[1]), int(result[2])


def bench_step(
    *,
    json: bool = False,
    rounds: int = 3,
    steps: int = 6,
    folder: Path | None = None,
    batch: tuple[int, int] = (2, 512),
) -> dict[str, Any]:
    """Run every case `rounds` times, taking turns, `steps` timed steps each; print a table, or JSON with `json`.

    batch: rows, and tokens of each. `folder` (None: the current one): where state on NVMe is. Returns for every case
    CASE_step_s, CASE_step_range_s and CASE_peak_rss_bytes (`kernels` has no peak), `kernels_parts_s`, and what `ratios`
    does. UserError when a case fails.
    """
    cases = [case for case in WORDS if case != "compiled" or _compiles()]
    runs: dict[str, list[dict[str, Any]]] = {case: [] for case in cases}
    turns = list(enumerate(cases * rounds, start=1))
    with Working() as shown:
        for number, case in turns:
            memory = None if case in (*PLAIN, "kernels") else _memory_bytes(case, runs)
            with shown.step(f"measurement {number} of {len(turns)}: {WORDS[case]}"), scratch(folder) as path:
                runs[case].append(_run_case(case, steps, path, batch, memory))
    figures: dict[str, Any] = {"dtype": runs["plain"][0]["dtype"], "batch": list(batch)}
    for case, outcomes in runs.items():
        times = _timed(outcomes)
        figures[f"{case}_step_s"] = statistics.median(times)
        figures[f"{case}_step_range_s"] = [min(times), max(times)]
        if case != "kernels":
            figures[f"{case}_peak_rss_bytes"] = max(outcome["peak_rss_bytes"] for outcome in outcomes)
    parts = [part for outcome in runs["kernels"] for part in outcome["parts_s"][WARMUP_STEPS:]]
    figures["kernels_parts_s"] = {name: statistics.median(part[name] for part in parts) for name in parts[0]}
    figures |= ratios(figures)
    show(figures, _table(figures), as_json=json)
    return figures


def ratios(figures: dict[str, Any]) -> dict[str, Any]:
    """`best_plain`, the fastest plain case, and what Penstock takes over it and over others.

    `*_ratio` are step times: `ram`, `nvme` and `ram_plain` over the checkpointed plain one's, `best_plain` (in RAM) and
    `nvme_best_plain` over the fastest one's, `kernels` over the kernels alone. `*_rss_ratio` are peak resident memory
    over the fastest plain one's, `ram_plain` over the checkpointed one's.
    """
    best = min((case for case in PLAIN if f"{case}_step_s" in figures), key=lambda case: figures[f"{case}_step_s"])

    def over(case: str, other: str, what: str = "step_s") -> float:
        return float(figures[f"{case}_{what}"] / figures[f"{other}_{what}"])

    return {
        "best_plain": best,
        **{f"{case}_ratio": over(case, "plain") for case in ("ram", "ram_plain", "nvme")},
        "best_plain_ratio": over("ram", best),
        "nvme_best_plain_ratio": over("nvme", best),
        "kernels_ratio": over("ram", "kernels"),
        "ram_rss_ratio": over("ram", best, "peak_rss_bytes"),
        "nvme_rss_ratio": over("nvme", best, "peak_rss_bytes"),
        "ram_plain_rss_ratio": over("ram_plain", "plain", "peak_rss_bytes"),
    }


def _table(figures: dict[str, Any]) -> str:
    rows, tokens = figures["batch"]
    best = figures["best_plain"]
    lines = [
        f"{rows} x {tokens} tokens, {figures['dtype']}; ratios to the fastest plain case ({best}) and to the kernels",
        f"{'case':<58}{'step s':>8}{'fastest':>9}{'kernels':>9}{'peak MiB':>10}{'fastest':>9}",
    ]
    for case, words in WORDS.items():
        if f"{case}_step_s" not in figures:
            continue
        step_s = figures[f"{case}_step_s"]
        line = f"{words:<58}{step_s:>8.2f}{step_s / figures[f'{best}_step_s']:>9.2f}"
        line += f"{step_s / figures['kernels_step_s']:>9.2f}"
        if case != "kernels":
            peak = figures[f"{case}_peak_rss_bytes"]
            line += f"{peak / MIB:>10,.0f}{peak / figures[f'{best}_peak_rss_bytes']:>9.2f}"
        lines.append(line)
    return "\n".join(lines)


def _timed(outcomes: list[dict[str, Any]]) -> list[float]:
    return [seconds for outcome in outcomes for seconds in outcome["step_times_s"][WARMUP_STEPS:]]


def _memory_bytes(case: str, runs: dict[str, list[dict[str, Any]]]) -> int:
    """Resident memory that a Penstock case may take: the least so far of the plain one that it is compared with."""
    fastest = min((name for name in PLAIN if runs.get(name)), key=lambda name: statistics.median(_timed(runs[name])))
    like = "plain" if case == "ram_plain" else fastest
    least = min(int(outcome["peak_rss_bytes"]) for outcome in runs[like])
    return least // 2 if case == "nvme" else least


def budgets(case: str, memory_bytes: int, dtype: Literal["bfloat16", "float32"], tokens: int) -> BudgetConfig:
    """Budgets within which a process of `case` takes at most `memory_bytes`: on the GPU the least, with state in RAM
    also the graphs of all layers, a byte of which saves more time than one of the state; the rest is RAM."""
    left = max(0, memory_bytes - PROCESS_BYTES)
    gpu = GPU_BYTES[dtype]
    if case != "nvme":
        gpu += tokens * LAYERS * GRAPH_BYTES[dtype]
    return BudgetConfig(gpu=f"{gpu // MIB}MiB", ram=f"{max(1, (left - gpu) // MIB)}MiB")


def _run_case(case: str, steps: int, folder: str, batch: tuple[int, int], memory_bytes: int | None) -> dict[str, Any]:
    """What `measure` returns in a process of its own."""
    work = "penstock.app.bench.step:measure"
    outcome: dict[str, Any] = call(work, case, steps, folder, batch, memory_bytes, what=f"bench case {case}")
    return outcome


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _dtype() -> Literal["bfloat16", "float32"]:
    """What both compute in: bfloat16, on a device without its instructions float32."""
    return usual_dtype(_device())


def _compiles() -> bool:
    """Whether this machine compiles layers and AdamW: by itself, a run of so few steps would do without."""
    return layers_compile(_device()).ok and optimizer_compiles().ok


def _plain_times(case: str, steps: int, batch: tuple[int, int]) -> list[float]:
    recipe = _recipe(steps, batch, BudgetConfig())
    torch.manual_seed(0)
    batches = ([PlainBatch(torch.randint(0, VOCAB, batch))] for _ in range(steps))
    given = (model_config(recipe, None), batches, recipe.train, _device())
    result = compiled_steps(*given) if case == "compiled" else plain_steps(*given, checkpointing=case == "plain")
    return [seconds for _, _, seconds in result]


def _kernel_parts(steps: int, batch: tuple[int, int]) -> list[dict[str, float]]:
    recipe = _recipe(steps, batch, BudgetConfig())
    spec = model_spec(model_config(recipe, None), recipe)
    return [step_kernels(spec, *batch, _device(), recipe.train, compiled=_compiles()) for _ in range(steps)]


class _StepClock(Observer):
    """Keeps when steps ended, by perf_counter, and when it was made."""

    def __init__(self) -> None:
        self.ended_s = [time.perf_counter()]

    def on_step(self, metrics: StepMetrics) -> None:
        self.ended_s.append(time.perf_counter())


def _recipe(steps: int, batch: tuple[int, int], budgets: BudgetConfig) -> Recipe:
    dtype = _dtype()
    rows, row_tokens = batch
    return Recipe(
        name="bench",
        model=ModelConfig(
            model_type="qwen3",
            num_layers=LAYERS,
            hidden_size=HIDDEN,
            intermediate_size=3072,
            num_heads=16,
            num_kv_heads=8,
            head_dim=64,
            vocab_size=VOCAB,
        ),
        data=DataConfig(source="random", sequence_length=row_tokens),
        train=TrainConfig(
            steps=steps,
            global_batch_size=rows,
            micro_batch_size=rows,
            chunk_tokens=min(rows * row_tokens, MAX_CHUNK_TOKENS),
            lr=1e-4,
            lr_schedule="constant",
            compute_dtype=dtype,
            compile="on" if _compiles() else "off",  # as in a run of many steps
            gradient_dtype=dtype,  # what plain PyTorch's backward leaves; ours is summed in float32 before
        ),
        budgets=budgets,
        storage=StorageConfig(checkpoint_every=steps, part_bytes="16MiB"),
    )


def _penstock_times(steps: int, scratch: Path, batch: tuple[int, int], budgets: BudgetConfig) -> list[float]:
    clock = _StepClock()  # type: ignore[abstract]  # what it does not define does nothing
    train(_recipe(steps, batch, budgets), run_dir=scratch, observer=clock, resume=False)
    return [end - start for start, end in itertools.pairwise(clock.ended_s)]


def measure(case: str, steps: int, folder: str, batch: list[int], memory_bytes: int | None) -> dict[str, Any]:
    """One case in this process: its step times after the warm-up's, and its peak memory."""
    steps += WARMUP_STEPS
    rows, row_tokens = batch
    outcome: dict[str, Any] = {"dtype": _dtype()}
    if case == "kernels":
        outcome["parts_s"] = _kernel_parts(steps, (rows, row_tokens))
        outcome["step_times_s"] = [sum(parts.values()) for parts in outcome["parts_s"]]
    elif memory_bytes is None:
        outcome["step_times_s"] = _plain_times(case, steps, (rows, row_tokens))
    else:
        given = budgets(case, memory_bytes, _dtype(), rows * row_tokens)
        outcome["step_times_s"] = _penstock_times(steps, Path(folder), (rows, row_tokens), given)
    return outcome | {"peak_rss_bytes": resident_bytes("VmHWM")}
