"""Steps of real shapes on this machine, each beside what its kernels reach alone: docs/results/step-gpu.md.

A case (parts/cases.py) runs in a process of its own: plan, state, steps, then the kernels alone. What the machine is
too small for is skipped with the reason, what fails is reported; neither stops the others.

A step's window runs from the end of the step before (its `clip`) to the end of its own. Within it the compute lane
visits the layers twice: all of them forward before the head, all of them backward after it. A step of a model cut to
some of its layers is scaled to all of them by these two stretches, gaps between the ops included; the rest of the
window (embedding, head, and what is waited for at either end) counts once.
"""

from __future__ import annotations

import gc
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import typer

from benchmarks.parts.cases import WARM_UP, Case, case_of, cases_of
from benchmarks.parts.cases import small as small_case
from benchmarks.parts.process import call
from benchmarks.parts.session import DTYPE, open_drawn
from benchmarks.parts.setup import Cut, Skip, choose, nvme_bytes
from penstock.app.bench.kernels import attention_of_chunk
from penstock.app.bench.plain import PlainBatch, compiled_steps, plain_steps
from penstock.app.bench.process import require_folders, scratch
from penstock.app.console.working import working
from penstock.app.runs.lanes import LaneTimes, union
from penstock.app.runs.ops import STEP_END
from penstock.app.runs.trace import write_spans
from penstock.engine.attention import chunk as attention
from penstock.engine.clock import clock
from penstock.engine.events import Span
from penstock.engine.forecast.flops import StepFlops, executed_flops, model_flops
from penstock.engine.machine.budgets import free_budgets
from penstock.engine.machine.compilers import layers_compile, optimizer_compiles
from penstock.engine.machine.device import configure, memory_use
from penstock.engine.machine.peaks import peak_flops, utilisation
from penstock.engine.machine.probe_compute import products_of
from penstock.engine.model.spec import ModelSpec
from penstock.engine.session import Session
from penstock.engine.train import train_step
from penstock.storage.files.errors import UserError

ComputeDtype = Literal["bfloat16", "float32"]
_HEAD_ROWS = 4096


def main(names: str, small: bool = False, traces: Path | None = None, folder: Path | None = None) -> None:
    """Run the cases NAME[,NAME...] of parts/cases.py one after another; print a JSON object of each.

    --small tries them with a tiny model and batch, on the CPU where there is no GPU. --traces: a folder for a Perfetto
    trace of one step of each. All else is written below --folder, the current one when none, and removed.
    """
    cases = cases_of(names)
    require_folders(folder, traces)
    failed = False
    for name, case in cases.items():
        if small:
            case = small_case(case, on_gpu=torch.cuda.is_available())
        trace = str(traces.resolve() / f"{name}.trace.json") if traces is not None else None
        with working(name), scratch(folder) as path:
            try:
                row = call(run, asdict(case), path, trace)
            except UserError as error:
                row = {"status": "failed", "reason": str(error)}
        failed |= row["status"] == "failed"
        print(json.dumps({"case": name} | row, indent=2), flush=True)
        print(f"{name}: {_rates(row)}", file=sys.stderr, flush=True)
    if failed:
        raise typer.Exit(1)


def _rates(row: dict[str, Any]) -> str:
    if row["status"] != "done":
        return f"{row['status']}: {row['reason']}"
    plain = row["plain"]["reason"]
    if row["best_plain_ratio"] is not None:
        plain = f"{row['best_plain_ratio']:.2f} x the fastest plain PyTorch ({row['plain']['name']})"
    return f"{row['tokens_per_s']:,.0f} tokens/s, {row['ratio_once']:.2f} x the kernels alone, {plain}"


def run(case: dict[str, Any], folder: str, trace: str | None) -> dict[str, Any]:
    """A case's figures with `status` done, or skipped with what the machine lacks. Raises UserError."""
    try:
        return {"status": "done"} | measure(case_of(case), Path(folder), (trace and Path(trace)) or None)
    except Skip as reason:
        return {"status": "skipped", "reason": str(reason)}


def measure(case: Case, folder: Path, trace: Path | None = None) -> dict[str, Any]:
    """Run the case and return its figures. Raises Skip where the machine is too small."""
    setup, session = open_drawn(
        choose(case, folder),
        folder,
        short_steps=WARM_UP if case.short_warm_up else 0,
        document_tokens=2 * case.chunk_tokens,
        calibrated=lambda graph_bytes: choose(case, folder, graph_bytes),
    )
    with session:
        ran = run_steps(case, session, folder)
    if trace is not None:
        step = WARM_UP + case.timed
        ends = {span["step"]: span["end_s"] for span in ran.spans if span["op"] == STEP_END}
        seen = (s for s in ran.spans if s["end_s"] > ends[step - 1] and s["start_s"] < ends[step])
        write_spans((Span(**span) for span in seen), f"step {step}", trace)
    del session
    gc.enable()
    gc.unfreeze()
    _give_back(setup.device)
    plain = plain_step(case, setup, "bfloat16")
    # Products are summed as in the steps; the memory is all that there is.
    settings = configure(setup.device, free_budgets(setup.device).gpu, deterministic=False)
    chunk = min(case.chunk_tokens, case.row_tokens)
    kernels = {
        "attention_tflops": attention_rates(setup.spec, case.row_tokens, chunk, setup.device, DTYPE, case.kernel_s),
        "matmul_tflops": matmul_rates(setup.spec, chunk, setup.device, DTYPE, case.kernel_s),
    }
    settings.restore()
    result = figures(case, setup, ran, kernels) | {"plain": plain}
    return result | {"best_plain_ratio": plain["step_s"] and result["measured"]["step_s"] / plain["step_s"]}


def _give_back(device: torch.device) -> None:
    """Free what this process holds of the GPU without using it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# ---------------------------------------------------------------------- steps


@dataclass(slots=True)
class Ran:
    spans: list[dict[str, Any]]
    tokens: int
    """Trained tokens of one timed step."""
    lengths: list[int]
    """Tokens of each document of a timed step."""
    losses: list[float]
    attention: dict[str, float]
    """FLOPs that attention kernels computed in the timed steps, each."""
    tiers: dict[str, dict[str, int]]
    kernel_idle: float | None


def run_steps(case: Case, session: Session, folder: Path) -> Ran:
    """Warm-up, timed steps and, where the case asks for it, one step under the profiler."""
    spans: list[dict[str, Any]] = []
    losses = []
    tokens = 0
    for number in range(1, WARM_UP + case.timed + 1):
        if number == WARM_UP + 1:
            attention.COUNTS.reset()
        metrics = train_step(session)
        losses.append(metrics.loss)
        tokens = metrics.tokens
        spans += [span._asdict() for span in session.executor.take_spans()]
        if number == 1:  # as train() does
            gc.freeze()
            gc.disable()
    counted = {
        "forward": attention.COUNTS.forward_flops / case.timed,
        "backward": attention.COUNTS.backward_flops / case.timed,
    }
    lengths = [n for batch in session.runtime.data(session.step).micro_batches for n in batch.lengths]
    tiers = _tiers(session)
    idle = None
    if case.kernel_gaps and session.device.type == "cuda":
        idle = profiled(lambda: train_step(session), folder / "kernels.json")
    session.executor.drain()
    spans += [span._asdict() for span in session.executor.take_spans()]
    return Ran(spans, tokens, lengths, losses, counted, tiers, idle)


def _tiers(session: Session) -> dict[str, dict[str, int]]:
    plan = session.plan
    result = {
        name: {"budget_bytes": plan.tiers[name].budget_bytes, "planned_bytes": plan.tiers[name].peak_bytes}
        for name in ("gpu", "ram")
    }
    result["gpu"]["peak_bytes"] = session.gpu.arena.used_bytes
    result["ram"]["peak_bytes"] = session.ram.arena.used_bytes + plan.problem.beside_bytes
    result["nvme"] = {"peak_bytes": session.store.disk_bytes()}
    if (used := memory_use(session.device)) is not None:
        result["gpu"] |= used | {"peak_bytes": used["reserved_bytes"]}
    return result


def profiled(step: Callable[[], Any], file: Path) -> float | None:
    """The share of a step without a kernel; None where the profiler does not work here."""
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    try:
        profiler.start()
    except RuntimeError as error:
        print(f"no profiler: {error}", file=sys.stderr)
        return None
    step()
    torch.cuda.synchronize()
    profiler.stop()
    profiler.export_chrome_trace(str(file))
    return kernel_idle(json.loads(file.read_text())["traceEvents"])


def kernel_idle(events: Sequence[dict[str, Any]]) -> float | None:
    """Share of the time between the first and the last kernel in which none ran, on the stream with the most work;
    None where there is no kernel.

    `events`: those of a profiler's Chrome trace, with ts and dur in microseconds.
    """
    streams: dict[Any, list[tuple[float, float]]] = {}
    for event in events:
        if event.get("cat") == "kernel":
            start = float(event["ts"])
            streams.setdefault(event["args"]["stream"], []).append((start, start + float(event["dur"])))
    if not streams:
        return None
    unions = [union(*np.array(intervals).T) for intervals in streams.values()]
    busy, start, end = max((float((ends - starts).sum()), starts[0], ends[-1]) for starts, ends in unions)
    return 1 - busy / float(end - start)


# ---------------------------------------------------------------------- what it is compared with


def plain_step(case: Case, setup: Cut, dtype: ComputeDtype) -> dict[str, Any]:
    """`name` of the plain PyTorch that fits the case's budget and `step_s`, the median of its timed steps: the cut
    model, the same batch, the same GPU memory.

    The one that keeps every activation is tried first, compiled where this machine has the compilers and the case
    compiles, then the one that checkpoints every layer. Both values are None, with the `reason`, where none is timed:
    whatever fails in plain PyTorch costs no figure of the case's own.
    """
    if not case.plain:
        return {"name": None, "step_s": None, "reason": "plain PyTorch not tried"}
    compiles = (case.needs_cuda or case.compiled) and layers_compile(setup.device).ok and optimizer_compiles().ok
    reason = ""
    for name in ("compiled" if compiles else "eager", "plain"):
        settings = configure(setup.device, setup.plan.tiers["gpu"].budget_bytes, deterministic=False)
        try:
            return {"name": name, "step_s": _plain_s(name, case, setup, dtype), "reason": ""}
        except Exception as error:
            first, _, _ = str(error).partition("\n")
            how = "does not fit" if isinstance(error, torch.OutOfMemoryError) else f"failed: {type(error).__name__}"
            reason = f"plain PyTorch {how}: {first}"
        finally:
            settings.restore()
            _give_back(setup.device)
    return {"name": None, "step_s": None, "reason": reason}


def _plain_s(name: str, case: Case, setup: Cut, dtype: ComputeDtype) -> float:
    def batches() -> Iterator[list[PlainBatch]]:
        while True:
            rows = torch.randint(0, setup.spec.vocab_size, (case.rows, case.row_tokens))
            yield [PlainBatch(row) for row in rows]

    given = (setup.spec.config, batches(), replace(setup.recipe.train, compute_dtype=dtype), setup.device)
    steps = compiled_steps(*given) if name == "compiled" else plain_steps(*given, checkpointing=name == "plain")
    times = [seconds for _, _, seconds in itertools.islice(steps, WARM_UP + case.timed)]
    return statistics.median_low(times[WARM_UP:])


def matmul_rates(
    spec: ModelSpec, chunk_tokens: int, device: torch.device, dtype: torch.dtype, seconds: float
) -> dict[str, float]:
    """TFLOP/s of the products of one layer's matrices and of the head's with a chunk: forward and both gradients."""
    shapes = {
        "layer": [p.shape for p in spec.params_of(spec.blocks[1]) if len(p.shape) == 2],
        "head": [(spec.vocab_size, spec.hidden_size)],
    }
    rows = {"layer": chunk_tokens, "head": min(chunk_tokens, _HEAD_ROWS)}
    rates = {}
    for name, matrices in shapes.items():
        total_s = flops = 0.0
        for matrix in matrices:
            for product in products_of(matrix, rows[name], device, dtype):
                total_s += clock(product, device, seconds / (3 * len(matrices)))
                flops += 2 * rows[name] * matrix[0] * matrix[1]
        rates[name] = flops / total_s / 1e12
    return rates


def attention_rates(
    spec: ModelSpec, row_tokens: int, chunk_tokens: int, device: torch.device, dtype: torch.dtype, seconds: float
) -> dict[str, Any]:
    """TFLOP/s, forward and backward, of the kernels that the engine takes for a sequence cut into chunks.

    Time grows linearly from a sequence's first chunk to its last, so the two ends stand for all: their FLOPs over their
    time is the rate of the whole. Counted as in attention.chunk.COUNTS: two products of a visible pair forward, five
    backward.
    """
    shape = next(shape for shape in spec.attention if shape is not None)
    tokens = min(chunk_tokens, row_tokens)
    flops, times, names = {"forward": 0.0, "backward": 0.0}, {"forward": 0.0, "backward": 0.0}, dict[str, str]()
    for start in sorted({0, (row_tokens - 1) // tokens * tokens}):
        end = min(start + tokens, row_tokens)
        of_chunk = attention_of_chunk(shape, start, end, device, dtype, seconds)
        for direction, (pairs, seconds_once, name) in of_chunk.items():
            per_pair = (1, 1) if direction == "forward" else (3, 2)
            flops[direction] += 2 * shape.heads * (per_pair[0] * shape.qk_dim + per_pair[1] * shape.v_dim) * pairs
            times[direction] += seconds_once
            names[direction] = name
    rates: dict[str, Any] = {direction: flops[direction] / times[direction] / 1e12 for direction in flops}
    return rates | {"kernels": names}


# ---------------------------------------------------------------------- figures


@dataclass(frozen=True, slots=True)
class StepTimes:
    step_s: float
    layers_s: float
    """The stretches in which the compute lane was at the layers."""

    def scaled(self, ratio: float) -> float:
        """Seconds of a step with `ratio` times as many layers."""
        return self.layers_s * ratio + self.step_s - self.layers_s


def step_times(spans: Sequence[dict[str, Any]], step: int) -> StepTimes:
    """Times of `step`, of which the spans hold all, and the end of the step before."""
    ends = {span["step"]: span["end_s"] for span in spans if span["op"] == STEP_END}
    # Updates of the step before carry its number, whatever step's window they run in; compute ops carry their own.
    own = [s for s in spans if s["lane"] == "compute" and s["step"] == step]
    turn = min(span["start_s"] for span in own if span["op"] == "head")
    layers_s = 0.0
    for there in (lambda at: at < turn, lambda at: at >= turn):
        stretch = [s for s in own if s["block"].startswith("layers.") and there(s["start_s"])]
        layers_s += max(s["end_s"] for s in stretch) - min(s["start_s"] for s in stretch)
    return StepTimes(ends[step] - ends[step - 1], layers_s)


def scaled_flops(flops: StepFlops, ratio: float) -> StepFlops:
    """The same for `ratio` times as many layers of the same kind."""
    layer, forward, backward = (
        round(part * ratio) for part in (flops.layer_matmul, flops.attention_forward, flops.attention_backward)
    )
    return StepFlops(layer, flops.head_matmul, forward, backward)


def limit_s(flops: StepFlops, kernels: dict[str, Any]) -> float:
    """Seconds that these FLOPs take at the rates that the kernels reached alone."""
    matmul, attended = kernels["matmul_tflops"], kernels["attention_tflops"]
    parts = (
        (flops.layer_matmul, matmul["layer"]),
        (flops.head_matmul, matmul["head"]),
        (flops.attention_forward, attended["forward"]),
        (flops.attention_backward, attended["backward"]),
    )
    return sum(flop / (rate * 1e12) for flop, rate in parts)


def figures(case: Case, setup: Cut, ran: Ran, kernels: dict[str, Any]) -> dict[str, Any]:
    """All figures of a case; shares are of the timed steps, times of the median one."""
    first, last = WARM_UP + 1, WARM_UP + case.timed
    steps = [step_times(ran.spans, step) for step in range(first, last + 1)]
    times = sorted(steps, key=lambda each: each.step_s)[(len(steps) - 1) // 2]
    depth, plan = setup.depth, setup.plan
    step_s = times.scaled(depth)
    layers = {(i, c.index) for i, block in enumerate(plan.blocks) if block.saved_inputs for c in plan.chunks}
    nothing_twice = replace(plan, recomputed=frozenset(), streamed=False, saved_graphs=frozenset(layers))
    once = executed_flops(setup.spec, nothing_twice, ran.lengths)
    whole = scaled_flops(executed_flops(setup.spec, plan, ran.lengths), depth)
    peak = peak_flops(torch.cuda.get_device_name(setup.device)) if setup.device.type == "cuda" else None
    lanes = LaneTimes(map(Span.of, ran.spans)).shares(first, last)
    return {
        "model": setup.name,
        "label": f"scaled from {len(setup.spec.attention)} layers" if depth != 1 else "all layers",
        "tokens": ran.tokens,
        "step_s": step_s,
        "tokens_per_s": ran.tokens / step_s,
        "mfu": utilisation(model_flops(setup.full_spec, ran.lengths), step_s, peak),
        "hfu": utilisation(whole.total, step_s, peak),
        "ratio": step_s / limit_s(whole, kernels),
        "ratio_once": step_s / limit_s(scaled_flops(once, depth), kernels),
        "measured": {
            "layers": len(setup.spec.attention),
            "step_s": times.step_s,
            "steps_s": [each.step_s for each in steps],
            "layers_s": times.layers_s,
            "losses": ran.losses,
        },
        "attention_executed_over_once": {
            "forward": ran.attention["forward"] / once.attention_forward,
            "backward": ran.attention["backward"] / once.attention_backward,
        },
        "busy": lanes.busy,
        "exposed_io": lanes.exposed_io,
        "compute_idle": 1 - lanes.busy["compute"],
        "kernel_idle": ran.kernel_idle,
        "tiers": ran.tiers,
        "whole_model": {
            "gpu_bytes": setup.full_plan.tiers["gpu"].peak_bytes,
            "ram_bytes": setup.full_plan.tiers["ram"].peak_bytes,
            "nvme_bytes": nvme_bytes(setup.full_plan),
        },
        "saved_graphs": len(plan.saved_graphs),
        **kernels,
    }
