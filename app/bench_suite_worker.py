"""One case of `penstock bench step --suite` in this process: plan, state, steps, then the kernels alone.

Prints one JSON object as its last line: `status` "done" with the figures, or "skipped" with what the machine lacks.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from app.bench_cases import Case, Shape, case_from_json
from app.bench_figures import kernel_idle, limit_s, median_times, scaled_flops, shares
from app.bench_kernels import attention_rates, matmul_rates
from app.bench_state import open_drawn
from app.trace import write_trace
from engine import attention
from engine.attention_select import measure as measure_attention
from engine.config import BudgetConfig, DataConfig, ModelConfig, StorageConfig, TrainConfig
from engine.data import DataLoader, MicroBatch
from engine.flops import executed_flops, model_flops
from engine.hardware import hfu, mfu, peak_flops
from engine.model import ModelSpec
from engine.plan import FP32, STATE_KINDS, Plan, gib
from engine.prepare import budgets, layouts, make_loader, model_config, model_spec, plan_run, prepare_data
from engine.session import Session, run_identity, run_meta
from engine.state import scratch_arrays
from engine.train import train_step
from storage.errors import BudgetError, UserError
from storage.nvme import NvmeStore
from storage.readers import Readers, select_readers

_NVME_MARGIN = 1.05
"""What the store asks of a drive, over two generations of the state."""
_EVERYTHING = "64TiB"
DTYPE = torch.bfloat16
"""What steps compute in, TrainConfig's default."""


class Skip(Exception):
    """This machine is smaller than the case needs."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What is run for a case: a shape, whole and cut to `layers`, and the cut one's plan."""

    shape: Shape
    spec: ModelSpec
    full_spec: ModelSpec
    full_plan: Plan
    plan: Plan
    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    storage: StorageConfig
    device: torch.device
    readers: Readers

    @property
    def depth(self) -> float:
        """Layers of the whole model over those of the cut one."""
        return len(self.full_spec.attention) / len(self.spec.attention)


# ---------------------------------------------------------------------- what fits


def choose(case: Case, folder: Path) -> Setup:
    """The first shape and depth that the machine holds. Raises Skip saying why none fits."""
    reasons = []
    for shape in case.shapes:
        try:
            return _fit(case, shape, folder)
        except Skip as reason:
            reasons.append(f"{shape.name}: {reason}" if len(case.shapes) > 1 else str(reason))
    raise Skip("; ".join(reasons))


def _fit(case: Case, shape: Shape, folder: Path) -> Setup:
    on_gpu = case.needs_cuda
    if on_gpu and not torch.cuda.is_available():
        raise Skip("needs CUDA, and torch sees no device")
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    data = DataConfig(source="random", sequence_length=case.row_tokens, max_documents=max(4, case.rows))
    train = TrainConfig(
        steps=10**6,
        sequences_per_step=case.rows,
        chunk_tokens=case.chunk_tokens,
        lr=1e-5,
        lr_schedule="constant",
        device="cuda" if on_gpu else "cpu",
        compile="auto" if on_gpu or case.compiled else "off",
    )
    storage = StorageConfig(checkpoint_every=10**9)
    limits = BudgetConfig(gpu=case.gpu, ram=case.ram)
    gpu_bytes, ram_bytes = budgets(limits, device)
    _, full_spec = shape_model(shape, shape.layers, data)
    # A whole model that needs more RAM than there is only limits the cases that measure such a one.
    whole = BudgetConfig(gpu=gpu_bytes, ram=ram_bytes if case.spill_state else _EVERYTHING)
    readers = select_readers("auto", device, [folder])
    full_plan = _plan(full_spec, data, train, whole, storage, device, readers)
    if case.spill_state:
        _require_disk(full_plan, train, folder, whole_state=case.layers is not None)
    reasons = []
    for layers in case.layers or (shape.layers,):
        model, spec = shape_model(shape, layers, data)
        share = layers / shape.layers
        gpu, ram = _scaled_budgets(full_plan, share)
        cut = BudgetConfig(gpu=gpu, ram=ram if case.spill_state and share < 1 else ram_bytes)
        try:
            plan = _plan(spec, data, train, cut, storage, device, readers)
        except Skip as reason:
            reasons.append(str(reason))
            continue
        if not case.spill_state and (lacking := _not_in_ram(plan)):
            reasons.append(f"{layers} layers of {shape.name} need {lacking}, and budgets.ram is {gib(ram_bytes)}")
            continue
        return Setup(shape, spec, full_spec, full_plan, plan, model, data, train, storage, device, readers)
    raise Skip(reasons[-1])


def shape_model(shape: Shape, layers: int, data: DataConfig) -> tuple[ModelConfig, ModelSpec]:
    """The shape with so many layers."""
    model = ModelConfig(
        model_type=shape.model_type,
        num_layers=layers,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab,
        tie_embeddings=shape.tied,
        overrides=shape.overrides,
    )
    return model, model_spec(model_config(model, data, None), data)


def _plan(
    spec: ModelSpec,
    data: DataConfig,
    train: TrainConfig,
    limits: BudgetConfig,
    storage: StorageConfig,
    device: torch.device,
    readers: Readers,
) -> Plan:
    direct, pinned = readers.device is not None, readers.pinned_bytes(1)
    try:
        return plan_run(spec, data, train, limits, storage, device, device_reads=direct, reader_bytes=pinned)
    except BudgetError as refusal:
        raise Skip(str(refusal)) from None


def _scaled_budgets(full: Plan, share: float) -> tuple[int, int]:
    """Bytes of GPU and RAM that leave a model cut to `share` of its layers in the same position as the whole one.

    What serves one block at a time stays as it is; what the layers hold for themselves shrinks with their number, so
    that the same share of them is resident.
    """
    layer_buffers = {name for block in full.blocks if block.role == "layer" for name in block.buffers}
    compute, waiting = full.problem.compute_bytes, full.problem.gradient_bytes
    sizes = {"weights": compute, "gradient": waiting, "state": len(STATE_KINDS) * FP32}
    on_gpu = full.tiers["gpu"].parts.get("kept activations", 0)
    in_ram = 0
    for name in layer_buffers:
        buffer = full.buffers[name]
        if buffer.state == "gpu":
            on_gpu += buffer.numel * (compute + (1 + len(STATE_KINDS)) * FP32)
        in_ram += sum(buffer.numel * size for kind, size in sizes.items() if getattr(buffer, kind) == "ram")
    in_ram += sum(
        full.record_bytes(index, chunk.index)
        for index, block in enumerate(full.blocks)
        if block.role == "layer"
        for chunk in full.chunks
        if (index, chunk.index) not in full.spilled
    )
    tiers = full.tiers
    return (
        tiers["gpu"].peak_bytes - int(on_gpu * (1 - share)),
        tiers["ram"].peak_bytes - int(in_ram * (1 - share)),
    )


def _not_in_ram(plan: Plan) -> str | None:
    """What a plan put on NVMe for want of RAM."""
    missing = sum(
        buffer.numel * size
        for buffer in plan.buffers.values()
        for kind, size in (("weights", 2), ("gradient", 4), ("state", 12))
        if getattr(buffer, kind) == "nvme"
    )
    missing += plan.spill_bytes
    return f"{gib(plan.tiers['ram'].peak_bytes + missing)} of RAM or more" if missing else None


def _require_disk(plan: Plan, train: TrainConfig, folder: Path, *, whole_state: bool) -> None:
    """Skip unless the drive holds what training keeps there, or only what a benchmark of all layers writes."""
    need, free = nvme_bytes(plan, train, whole_state=whole_state), shutil.disk_usage(folder).free
    if need > free:
        what = "two generations of its state" if whole_state else "state and activations"
        raise Skip(f"needs {gib(need)} of disk for {what}, and {gib(free)} are free")


def nvme_bytes(plan: Plan, train: TrainConfig, *, whole_state: bool = True) -> int:
    """Bytes on drives of a run of `plan`: two generations of the state (all, or what lives there), and scratch."""
    held = [b for b in plan.buffers.values() if whole_state or b.state == "nvme"]
    state = sum(buffer.numel for buffer in held) * len(STATE_KINDS) * FP32
    sizes = {"bfloat16": 2, "float32": 4}
    scratch = sum(a.numel * sizes[a.dtype] for a in scratch_arrays(plan, train.compute_dtype, train.gradient_dtype))
    return int(2 * state * _NVME_MARGIN) + scratch + plan.spill_bytes


# ---------------------------------------------------------------------- steps


class WarmUpLoader:
    """A loader whose first `steps` batches are cut into short documents: the same shapes, a fraction of attention."""

    def __init__(self, loader: DataLoader, steps: int, document_tokens: int) -> None:
        self._loader, self._left, self._tokens = loader, steps, document_tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def next_step(self) -> list[MicroBatch]:
        """See DataLoader.next_step."""
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
    return replace(batch, positions=positions, documents=starts, lengths=lengths, max_position=int(positions.max()))


def open_case(setup: Setup, folder: Path, *, short_steps: int = 0, document_tokens: int = 0) -> Session:
    """A session on drawn state with random tokens; the first `short_steps` batches have documents of that length."""
    corpus = prepare_data(setup.model, setup.data, folder / "data").corpus
    loader = make_loader(corpus, setup.spec, setup.data, setup.train)
    identity = run_identity(setup.model, setup.data, setup.train)
    meta = run_meta(0, 0, loader.cursor, identity)
    store = open_drawn(folder / "state", setup.plan, layouts(setup.spec), meta, setup.readers)
    try:
        return Session(
            spec=setup.spec,
            plan=setup.plan,
            store=cast(NvmeStore, store),
            loader=cast(DataLoader, WarmUpLoader(loader, short_steps, document_tokens)),
            constants={},
            train=setup.train,
            storage=setup.storage,
            device=setup.device,
            identity=identity,
        )
    except BaseException:
        store.close()
        raise


@dataclass(slots=True)
class Ran:
    """What the steps left behind."""

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
        if number == 1:
            gc.freeze()
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


def _profiled(step: Callable[[], Any], file: Path) -> float:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(file))
    return kernel_idle(json.loads(file.read_text())["traceEvents"])


def _tiers(session: Session) -> dict[str, dict[str, int]]:
    plan = session.plan
    found = {
        "gpu": {"budget_bytes": plan.tiers["gpu"].budget_bytes, "peak_bytes": session.gpu.arena.used_bytes},
        "ram": {
            "budget_bytes": plan.tiers["ram"].budget_bytes,
            "peak_bytes": session.ram.arena.used_bytes + plan.problem.reader_bytes,
        },
        "nvme": {"peak_bytes": session.store.disk_bytes()},
    }
    if session.device.type == "cuda":
        found["gpu"]["peak_bytes"] = torch.cuda.max_memory_allocated(session.device)
        found["gpu"]["reserved_bytes"] = torch.cuda.max_memory_reserved(session.device)
    return found


# ---------------------------------------------------------------------- figures


def measure(case: Case, folder: Path, trace: Path | None) -> dict[str, Any]:
    """Run the case and return its figures. Raises Skip where the machine is too small."""
    setup = choose(case, folder)
    chunk = min(case.chunk_tokens, case.row_tokens)
    _choose_kernels(setup, case.row_tokens, chunk)
    short_steps = case.warm_up if case.short_warm_up else 0
    session = open_case(setup, folder, short_steps=short_steps, document_tokens=2 * case.chunk_tokens)
    try:
        ran = run_steps(case, session, folder)
    finally:
        session.close()
    if trace is not None:
        _write_step_trace(ran.spans, case.warm_up + case.timed, folder / case.name, trace)
    del session
    gc.unfreeze()
    gc.collect()
    if setup.device.type == "cuda":
        torch.cuda.empty_cache()
    kernels = {
        "attention_tflops": attention_rates(setup.spec, case.row_tokens, chunk, setup.device, DTYPE, case.kernel_s),
        "matmul_tflops": matmul_rates(setup.spec, chunk, setup.device, DTYPE, case.kernel_s),
    }
    return figures(case, setup, ran, kernels)


def _choose_kernels(setup: Setup, row_tokens: int, chunk_tokens: int) -> None:
    """Measure attention's kernels before the steps: documents of the warm-up are too short for some of them."""
    for shape in {shape for shape in setup.spec.attention if shape is not None}:
        measure_attention(
            setup.device,
            DTYPE,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            qk_dim=shape.qk_dim,
            v_dim=shape.v_dim,
            chunk=chunk_tokens,
            total=row_tokens,
            window=shape.window,
        )


def figures(case: Case, setup: Setup, ran: Ran, kernels: dict[str, Any]) -> dict[str, Any]:
    """All figures of a case; times and shares are of the timed steps, their median where one is given."""
    first = case.warm_up + 1
    last = case.warm_up + case.timed
    times, all_s = median_times(ran.spans, range(first, last + 1))
    depth = setup.depth
    executed = executed_flops(setup.spec, setup.plan, ran.lengths)
    step_s = times.scaled(depth)
    needed = model_flops(setup.full_spec, ran.lengths)
    whole = scaled_flops(executed, depth)
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
        "flops": {
            "model": needed,
            "executed": whole.total,
            "layer_matmul": whole.layer_matmul,
            "head_matmul": whole.head_matmul,
            "attention_forward": whole.attention_forward,
            "attention_backward": whole.attention_backward,
        },
        "attention_executed_over_once": _over_once(setup, ran),
        **shares(ran.spans, first, last),
        "kernel_idle": ran.kernel_idle,
        "tiers": ran.tiers,
        "whole_model": _whole(setup),
        "plan": {
            "resident": sorted(name for name, buffer in plan.buffers.items() if buffer.state == "gpu"),
            "recomputed_layers": len(plan.recomputed),
            "kept_chunks": len(plan.kept),
            "kv_window": "streamed" if plan.streamed else "whole",
            "gpu_parts": plan.tiers["gpu"].parts,
        },
        **kernels,
        "attention_report": attention.attention_report(),
    }


def _over_once(setup: Setup, ran: Ran) -> dict[str, float]:
    """Attention that kernels computed over one forward and one backward of all visible pairs."""
    once = executed_flops(setup.spec, replace(setup.plan, recomputed=frozenset()), ran.lengths)
    return {
        "forward": ran.attention["forward"] / once.attention_forward,
        "backward": ran.attention["backward"] / once.attention_backward,
    }


def _whole(setup: Setup) -> dict[str, int]:
    """What training the whole model takes of each tier."""
    plan = setup.full_plan
    return {
        "gpu_bytes": plan.tiers["gpu"].peak_bytes,
        "ram_bytes": plan.tiers["ram"].peak_bytes,
        "nvme_bytes": nvme_bytes(plan, setup.train),
    }


def _write_step_trace(spans: Sequence[dict[str, Any]], step: int, folder: Path, out: Path) -> None:
    """A Perfetto trace of what was under way in one step's window."""
    ends = {span["step"]: span["end_s"] for span in spans if span["op"] == "clip"}
    inside = [s for s in spans if s["end_s"] > ends[step - 1] and s["start_s"] < ends[step]]
    folder.mkdir()
    (folder / "spans.jsonl").write_text("".join(json.dumps(span) + "\n" for span in inside))
    write_trace(folder, out)


def main() -> None:
    """Run one case in this process."""
    parser = argparse.ArgumentParser(prog="python -m app.bench_suite_worker", description=main.__doc__)
    parser.add_argument("case", type=case_from_json)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--trace", type=Path)
    arguments = parser.parse_args()
    try:
        outcome = {"status": "done"} | measure(arguments.case, arguments.scratch, arguments.trace)
    except Skip as reason:
        outcome = {"status": "skipped", "reason": str(reason)}
    except UserError as error:
        outcome = {"status": "failed", "reason": str(error)}
    print(json.dumps(outcome))


if __name__ == "__main__":
    main()
