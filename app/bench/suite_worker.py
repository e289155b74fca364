"""One case of `penstock bench step --suite` in this process: plan, state, steps, then the kernels alone."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import transformers

from penstock.app.bench.cases import Case, case_of
from penstock.app.bench.figures import kernel_idle, limit_s, median_times, scaled_flops, shares
from penstock.app.bench.kernels import attention_rates, matmul_rates
from penstock.app.bench.setup import Setup, Skip, choose, nvme_bytes
from penstock.app.bench.state import open_drawn
from penstock.app.bench.suite_plain import plain_step
from penstock.app.runs.ops import STEP_END
from penstock.app.runs.trace import write_spans
from penstock.engine.attention import chunk as attention
from penstock.engine.data.loader import DataLoader, MicroBatch
from penstock.engine.data.prepare import make_loader, prepare_data
from penstock.engine.events import Span
from penstock.engine.forecast.flops import StepFlops, executed_flops, model_flops
from penstock.engine.forecast.problem import LOGITS_BYTES
from penstock.engine.kernels import asked, choose_kernels
from penstock.engine.machine.affinity import place_threads
from penstock.engine.machine.budgets import free_budgets
from penstock.engine.machine.compilers import find_compilation
from penstock.engine.machine.device import configure, memory_use
from penstock.engine.machine.limits import machine_memory
from penstock.engine.machine.peaks import hfu, mfu, peak_flops
from penstock.engine.machine.presets import this_machine
from penstock.engine.machine.probe_compute import GPU_SIZES, matmul_flops
from penstock.engine.model.spec import layouts
from penstock.engine.opening import typical_batch
from penstock.engine.runtime.calibrate import calibrate
from penstock.engine.runtime.compute import Compute
from penstock.engine.runtime.lanes import Lanes
from penstock.engine.session import Session, run_identity, run_meta
from penstock.engine.train import train_step
from penstock.storage.files.errors import UserError
from penstock.storage.generations.store import NvmeStore

DTYPE = torch.bfloat16
"""What steps compute in, TrainConfig's default."""


# ---------------------------------------------------------------------- steps


class WarmUpLoader:
    """A loader whose first `steps` batches are cut into short documents: the same shapes, a fraction of attention."""

    def __init__(self, loader: DataLoader, steps: int, document_tokens: int) -> None:
        self._loader, self._left, self._tokens = loader, steps, document_tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def next_step(self) -> list[MicroBatch]:
        batches = self._loader.next_step()
        if self._left == 0:
            return batches
        self._left -= 1
        return [_shortened(batch, self._tokens) for batch in batches]


def _shortened(batch: MicroBatch, tokens: int) -> MicroBatch:
    total = len(batch.ids)
    positions = torch.arange(total) % tokens
    starts = list(range(0, total, tokens))
    lengths = [min(tokens, total - start) for start in starts]
    return replace(batch, positions=positions, documents=starts, lengths=lengths)


def learnt(case: Case, setup: Setup, compute: Compute, lanes: Lanes, folder: Path) -> Setup:
    """The setup planned once more with what saved graphs take where layers are compiled, as a run calibrates its plan.

    Compiled, a graph is smaller than the eager one that `setup` was planned with, so that more of them fit.
    """
    if not compute.compiled or setup.plan.streamed:
        return setup
    calibration = calibrate(
        setup.plan,
        layouts(setup.spec),
        compute.runner,
        compute.optimizer,
        setup.recipe.train,
        typical_batch(_loader(setup, folder)),
        this_machine(setup.device),
        LOGITS_BYTES[setup.device.type],
        lanes.executor,
    )
    return choose(case, folder, calibration.graph_bytes_per_token)


def _loader(setup: Setup, folder: Path) -> DataLoader:
    corpus = prepare_data(setup.recipe, folder / "data").corpus
    return make_loader(corpus, setup.spec, setup.recipe)


def open_case(
    setup: Setup, folder: Path, *, case: Case | None = None, short_steps: int = 0, document_tokens: int = 0
) -> tuple[Setup, Session]:
    """A session on drawn state with random tokens; the first `short_steps` batches have documents of that length.

    The setup returned is the one that it runs: planned once more for `case`, where one is given (see `learnt`).
    """
    compiled = find_compilation(setup.recipe.train, setup.device, lambda message: print(message, file=sys.stderr))
    with contextlib.ExitStack() as undo:
        lanes = Lanes.open(
            setup.device,
            setup.plan.tiers["gpu"].budget_bytes,
            compiled=compiled.layers,
            placement=place_threads(setup.device),
        )
        undo.callback(lanes.close)
        what = asked(setup.spec, setup.plan)
        lanes.executor.call("compute", lambda: choose_kernels(what, setup.device, DTYPE))
        compute = Compute.make(setup.spec, setup.recipe.train, setup.device, {}, compiled)
        if case is not None:
            eager, setup = setup, learnt(case, setup, compute, lanes, folder)
            if len(setup.spec.attention) != len(eager.spec.attention):
                compute = Compute.make(setup.spec, setup.recipe.train, setup.device, {}, compiled)
        loader = _loader(setup, folder)
        identity = run_identity(setup.recipe)
        meta = run_meta(0, 0, loader.cursor, identity)
        store = open_drawn(folder / "state", setup.plan, layouts(setup.spec), meta, setup.readers)
        undo.callback(store.close)
        session = Session(
            spec=setup.spec,
            plan=setup.plan,
            store=cast(NvmeStore, store),
            loader=cast(DataLoader, WarmUpLoader(loader, short_steps, document_tokens)),
            compute=compute,
            recipe=setup.recipe,
            device=setup.device,
            identity=identity,
            lanes=lanes,
        )
        undo.pop_all()
    return setup, session


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
    for number in range(1, case.warm_up + case.timed + 1):
        if number == case.warm_up + 1:
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
        idle = _profiled(lambda: train_step(session), folder / "kernels.json")
    session.executor.drain()
    spans += [span._asdict() for span in session.executor.take_spans()]
    return Ran(spans, tokens, lengths, losses, counted, tiers, idle)


def _profiled(step: Callable[[], Any], file: Path) -> float | None:
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
    try:
        return kernel_idle(json.loads(file.read_text())["traceEvents"])
    except UserError as error:
        print(error, file=sys.stderr)
        return None


def _tiers(session: Session) -> dict[str, dict[str, int]]:
    plan = session.plan
    found = {
        name: {"budget_bytes": plan.tiers[name].budget_bytes, "planned_bytes": plan.tiers[name].peak_bytes}
        for name in ("gpu", "ram")
    }
    found["gpu"]["peak_bytes"] = session.gpu.arena.used_bytes
    found["ram"]["peak_bytes"] = session.ram.arena.used_bytes + plan.problem.beside_bytes
    found["nvme"] = {"peak_bytes": session.store.disk_bytes()}
    if (used := memory_use(session.device)) is not None:
        found["gpu"] |= used | {"peak_bytes": used["reserved_bytes"]}
    return found


# ---------------------------------------------------------------------- figures


def measure(case: Case, folder: Path, trace: Path | None) -> dict[str, Any]:
    """Run the case and return its figures. Raises Skip where the machine is too small."""
    eager = choose(case, folder)
    chunk = min(case.chunk_tokens, case.row_tokens)
    short_steps = case.warm_up if case.short_warm_up else 0
    setup, session = open_case(eager, folder, case=case, short_steps=short_steps, document_tokens=2 * case.chunk_tokens)
    try:
        ran = run_steps(case, session, folder)
    finally:
        session.close()
    if trace is not None:
        _write_step_trace(ran.spans, case.warm_up + case.timed, case.name, trace)
    del session
    gc.enable()
    gc.unfreeze()
    _give_back(setup.device)
    plain = plain_step(case, setup, "bfloat16")
    # Products are summed as in the steps; the memory is all that there is.
    settings = configure(setup.device, free_budgets(setup.device).gpu, deterministic=False)
    kernels = {
        "attention_tflops": attention_rates(setup.spec, case.row_tokens, chunk, setup.device, DTYPE, case.kernel_s),
        "matmul_tflops": matmul_rates(setup.spec, chunk, setup.device, DTYPE, case.kernel_s),
    }
    settings.restore()
    found = figures(case, setup, ran, kernels)
    found["plain"] = plain
    found["best_plain_ratio"] = plain["step_s"] and found["measured"]["step_s"] / plain["step_s"]
    found["plan"]["kept_chunks_uncalibrated"] = len(eager.plan.saved_graphs)
    return found


def _give_back(device: torch.device) -> None:
    """Free what this process holds of the GPU without using it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def figures(case: Case, setup: Setup, ran: Ran, kernels: dict[str, Any]) -> dict[str, Any]:
    """All figures of a case; times and shares are of the timed steps, their median where one is given."""
    first = case.warm_up + 1
    last = case.warm_up + case.timed
    times, all_s = median_times(ran.spans, range(first, last + 1))
    depth = setup.depth
    executed = executed_flops(setup.spec, setup.plan, ran.lengths)
    step_s = times.scaled(depth)
    needed = model_flops(setup.full_spec, ran.lengths)
    once = _once(setup, ran)
    whole, whole_once = scaled_flops(executed, depth), scaled_flops(once, depth)
    peak = peak_flops(torch.cuda.get_device_name(setup.device)) if setup.device.type == "cuda" else None
    layers, all_layers = len(setup.spec.attention), len(setup.full_spec.attention)
    plan = setup.plan
    return {
        "model": setup.shape.name,
        "parameters": setup.full_spec.num_params,
        "layers": all_layers,
        "label": f"scaled from {layers} layers" if depth != 1 else "all layers",
        "row_tokens": case.row_tokens,
        "chunk_tokens": plan.max_chunk_tokens,
        "tokens": ran.tokens,
        "step_s": step_s,
        "tokens_per_s": ran.tokens / step_s,
        "mfu": mfu(needed, step_s, peak),
        "hfu": hfu(whole.total, step_s, peak),
        "ratio": step_s / limit_s(whole, kernels),
        "limit_s": limit_s(whole, kernels),
        "ratio_once": step_s / limit_s(whole_once, kernels),
        "measured": {
            "layers": layers,
            "step_s": times.step_s,
            "steps_s": all_s,
            "tokens_per_s": ran.tokens / times.step_s,
            "layers_s": times.layers_s,
            "edges_s": times.edges_s,
            "ratio": times.step_s / limit_s(executed, kernels),
            "losses": ran.losses,
        },
        "flops": {"model": needed, "executed": whole.total} | asdict(whole),
        "attention_executed_over_once": {
            "forward": ran.attention["forward"] / once.attention_forward,
            "backward": ran.attention["backward"] / once.attention_backward,
        },
        **shares(ran.spans, first, last),
        "kernel_idle": ran.kernel_idle,
        "tiers": ran.tiers,
        "whole_model": {
            "gpu_bytes": setup.full_plan.tiers["gpu"].peak_bytes,
            "ram_bytes": setup.full_plan.tiers["ram"].peak_bytes,
            "nvme_bytes": nvme_bytes(setup.full_plan, setup.recipe.train),
        },
        "plan": {
            "resident": sorted(name for name, buffer in plan.buffers.items() if buffer.state == "gpu"),
            "recomputed_layers": len(plan.recomputed),
            "kept_chunks": len(plan.saved_graphs),
            "kv_window": "streamed" if plan.streamed else "whole",
            "gpu_parts": plan.tiers["gpu"].parts,
        },
        **kernels,
        "attention_report": attention.attention_report(),
    }


def _once(setup: Setup, ran: Ran) -> StepFlops:
    """FLOPs of a step that computes nothing twice."""
    plan = setup.plan
    everything = frozenset(
        (i, c.index) for i, block in enumerate(plan.blocks) if block.saved_inputs for c in plan.chunks
    )
    once = replace(plan, recomputed=frozenset(), streamed=False, saved_graphs=everything)
    return executed_flops(setup.spec, once, ran.lengths)


def _write_step_trace(spans: Sequence[dict[str, Any]], step: int, name: str, out: Path) -> None:
    """A Perfetto trace of what was under way in one step's window."""
    ends = {span["step"]: span["end_s"] for span in spans if span["op"] == STEP_END}
    write_spans((Span(**s) for s in spans if s["end_s"] > ends[step - 1] and s["start_s"] < ends[step]), name, out)


def run(case: dict[str, Any], folder: str, trace: str | None) -> dict[str, Any]:
    """A case's figures with `status` done, or skipped with what the machine lacks. Raises UserError."""
    try:
        return {"status": "done"} | measure(case_of(case), Path(folder), None if trace is None else Path(trace))
    except Skip as reason:
        return {"status": "skipped", "reason": str(reason)}


def machine(rates: bool) -> dict[str, Any]:
    """What figures depend on: GPU, what products reach on it where `rates` are asked for, versions, cores, RAM."""
    cuda = torch.cuda.is_available()
    properties = torch.cuda.get_device_properties(0) if cuda else None
    return {
        "gpu": properties.name if properties else None,
        "gpu_bytes": properties.total_memory if properties else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "ram_bytes": machine_memory(),
        "matmul_flops": matmul_flops(torch.device("cuda"), GPU_SIZES, 0.5) if cuda and rates else None,
    }
