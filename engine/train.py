"""A training run from a recipe's parts to committed generations, and the export of one to Hugging Face.

`train_step` is the whole of one optimizer step. `Session` holds what it works on.
"""

from __future__ import annotations

import gc
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine import weights
from engine.blocks import ModelRunner
from engine.check import check_model
from engine.config import BudgetConfig, DataConfig, ModelConfig, StorageConfig, TrainConfig, parse_bytes
from engine.data import DataLoader
from engine.events import Observer, Span, StepMetrics
from engine.executor import Executor
from engine.memory import GpuMemory, RamMemory, allocate_gpu, allocate_ram
from engine.model import ModelSpec, initial_constants, initialize
from engine.ops import LANES
from engine.optimizer import AdamW, can_compile
from engine.plan import Plan
from engine.prepare import (
    LOGITS_BYTES,
    Data,
    layouts,
    make_loader,
    model_config,
    model_spec,
    plan_run,
    prepare_data,
    resolve_device,
)
from engine.runtime import Runtime, StepData
from engine.schedule import ScheduleBuilder
from engine.state import fill_store, load_memory, read_parameters, scratch_arrays, state_arrays, state_folder
from storage.errors import UserError
from storage.layout import FlatLayout
from storage.nvme import NvmeStore
from storage.safetensors_io import CheckpointReader

CONSTANTS_FILE = "constants.safetensors"
"""Persistent buffers of the model, which are not trained; beside the generations."""

IN_FLIGHT = {"nvme_read": 3, "nvme_write": 3}
"""Ops that a disk lane may have under way at once."""


@dataclass(slots=True)
class LaneTotals:
    """Work of one lane over a run: seconds in which at least one op was under way, and payload bytes."""

    busy_s: float = 0.0
    bytes: int = 0
    _until: float = field(default=0.0, repr=False)

    def add(self, span: Span) -> None:
        """Count a span; spans that overlap count their common time once."""
        self.busy_s += max(0.0, span.end_s - max(span.start_s, self._until))
        self._until = max(self._until, span.end_s)
        self.bytes += span.bytes


@dataclass(slots=True)
class TrainResult:
    """What a run, or this process's part of it, came to."""

    steps: int
    tokens: int
    first_loss: float | None
    last_loss: float | None
    tokens_per_s: float | None
    """Over all steps of this process but the first, which compiles; over that one if it is the only one."""
    step_s_median: float | None
    tiers: dict[str, dict[str, int]]
    """gpu, ram, nvme -> budget_bytes, peak_bytes."""
    lanes: dict[str, dict[str, float]]
    """lane -> busy_s, bytes."""
    stopped: bool
    """Whether the observer asked to stop before the last step."""


class Session:
    """A model, its state and its lanes, ready to step. Close it, or use it as a context manager."""

    def __init__(
        self,
        *,
        spec: ModelSpec,
        plan: Plan,
        store: NvmeStore,
        loader: DataLoader,
        constants: dict[str, Tensor],
        train: TrainConfig,
        storage: StorageConfig,
        device: torch.device,
    ) -> None:
        self.spec, self.plan, self.store, self.loader, self.config = spec, plan, store, loader, train
        self.storage, self.device = storage, device
        self.layouts = layouts(spec)
        self.step = int(store.meta["step"])
        self.tokens = int(store.meta["tokens"])
        self._next: StepData | None = None
        loader.seek(store.meta["cursor"])
        dtype = torch.bfloat16 if train.compute_dtype == "bfloat16" else torch.float32
        gradient_dtype = torch.bfloat16 if train.gradient_dtype == "bfloat16" else torch.float32
        compiled = train.compile == "on" or (train.compile == "auto" and can_compile(device))
        store.add_scratch(scratch_arrays(plan, train.compute_dtype, train.gradient_dtype))
        self.gpu: GpuMemory = allocate_gpu(plan, device, dtype)
        self.ram: RamMemory = allocate_ram(
            plan, pin=device.type == "cuda", compute_dtype=dtype, gradient_dtype=gradient_dtype
        )
        load_memory(store, plan, self.gpu, self.ram, dtype)
        runner = ModelRunner(spec, device=device, dtype=dtype, compile=compiled, constants=constants)
        self.runtime = Runtime(
            plan,
            self.layouts,
            spec.attention,
            runner,
            AdamW("compiled" if compiled else "eager" if train.compile == "off" else "fused"),
            store,
            self.gpu,
            self.ram,
            train,
            LOGITS_BYTES[device.type],
            self.meta,
        )
        self.builder = ScheduleBuilder(plan)
        self.executor = Executor(self.runtime.perform, device, IN_FLIGHT)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the lanes and free the memory; what was not committed is lost."""
        self.executor.close()
        self.store.close()
        self.ram.arena.close()

    def fetch(self) -> StepData:
        """The batch of the next step, on the compute device."""
        micro_batches = self.loader.next_step()
        return StepData(
            micro_batches=[
                replace(m, **{k: getattr(m, k).to(self.device) for k in ("ids", "labels", "positions")})
                for m in micro_batches
            ],
            num_targets=sum(m.num_targets for m in micro_batches),
            cursor=self.loader.cursor,
        )

    def next_batch(self) -> StepData:
        """The batch of the step about to run, fetched while the step before ran."""
        data, self._next = self._next or self.fetch(), None
        return data

    def prefetch(self) -> None:
        """Fetch the batch after the running step's."""
        if self._next is None and self.step < self.config.steps:
            self._next = self.fetch()

    def commit_due(self, step: int) -> bool:
        """Whether the generation after `step` is committed as the run goes on."""
        return step > 0 and step % self.storage.checkpoint_every == 0

    def meta(self, step: int, data: StepData) -> dict[str, Any]:
        """What a generation records beside the state."""
        return run_meta(step, data.tokens_after, data.cursor)

    def finish(self) -> None:
        """Apply the gradient that still waits, commit the generation, and wait for all of it."""
        if self.builder.waiting:
            self.executor.submit(self.builder.finish(commit=True))
        self.executor.drain()


def run_meta(step: int, tokens: int, cursor: dict[str, Any]) -> dict[str, Any]:
    """The manifest's record of a run at the end of `step`. Training draws no random numbers after initialisation."""
    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    return {"step": step, "tokens": tokens, "cursor": cursor, "versions": versions}


def train_step(session: Session) -> StepMetrics:
    """One optimizer step: fetch, forward and backward, then loss and gradient norm.

    The step's update is applied block by block under the next step's forward, or by `Session.finish`.
    """
    started = time.perf_counter()
    data = session.next_batch()
    session.step += 1
    session.tokens += data.num_targets
    data.tokens_after = session.tokens
    step = session.step
    session.runtime.begin(step, data)
    ops = session.builder.step(step, commit_previous=session.commit_due(step - 1))
    session.executor.submit(ops)
    session.prefetch()
    session.executor.wait(ops[-1].id)  # the one synchronisation point: loss and gradient norm are known
    step_s = time.perf_counter() - started
    return StepMetrics(
        step=step,
        loss=data.loss,
        grad_norm=data.grad_norm,
        lr=session.runtime.learning_rate(step),
        tokens=data.num_targets,
        step_s=step_s,
        tokens_per_s=data.num_targets / step_s,
    )


def train(
    *,
    model: ModelConfig,
    data: DataConfig,
    train: TrainConfig,
    budgets: BudgetConfig,
    storage: StorageConfig,
    run_dir: Path,
    observer: Observer,
    resume: bool,
) -> TrainResult:
    """Train as the recipe says, from the run directory's last generation if `resume`, and commit the end.

    Raises UserError for everything that the user can mend, before the first step where it can be known then.
    """
    session = open_session(
        model=model,
        data=data,
        train=train,
        budgets=budgets,
        storage=storage,
        run_dir=run_dir,
        observer=observer,
        resume=resume,
    )
    with session:
        result = _run(session, observer)
        result.tiers = _tiers(session, budgets)
    return result


def open_session(
    *,
    model: ModelConfig,
    data: DataConfig,
    train: TrainConfig,
    budgets: BudgetConfig,
    storage: StorageConfig,
    run_dir: Path,
    observer: Observer,
    resume: bool,
) -> Session:
    """Prepare data, plan and state of a run: everything up to the first step."""
    device = resolve_device(train)
    if train.compile == "auto" and not can_compile(device):
        observer.on_message("no compiler for torch.compile: layers run eagerly, AdamW through torch's fused kernel")
    prepared = prepare_data(model, data, run_dir / "data")
    config = model_config(model, data, prepared.tokenizer.vocab_size if prepared.tokenizer else None)
    spec = model_spec(config, data)
    loader = make_loader(prepared.corpus, spec, data, train)
    _describe(observer, spec, prepared, loader, device)
    plan = plan_run(spec, data, train, budgets, storage, device)
    _refuse_unless_exact(spec, observer)
    nvme_budget = None if budgets.nvme is None else parse_bytes(budgets.nvme, "budgets.nvme")
    folder = state_folder(run_dir, storage.nvme)
    store, constants = _open_state(folder, spec, plan, model, train, loader, nvme_budget, resume)
    observer.on_plan(plan.to_json())
    return Session(
        spec=spec,
        plan=plan,
        store=store,
        loader=loader,
        constants=constants,
        train=train,
        storage=storage,
        device=device,
    )


def _describe(observer: Observer, spec: ModelSpec, data: Data, loader: DataLoader, device: torch.device) -> None:
    corpus = data.corpus.info
    if device.type == "cpu":
        observer.on_message("no GPU: computing on CPU, and the gpu tier is ordinary memory")
    observer.on_message(
        f"model: {spec.model_type}, {spec.num_params:,} parameters, {len(spec.attention)} layers, {device}"
    )
    split = f", {loader.num_split_documents:,} longer than the context and split" if loader.num_split_documents else ""
    observer.on_message(f"data: {corpus.num_documents:,} documents, {corpus.num_tokens:,} tokens{split}")


def _refuse_unless_exact(spec: ModelSpec, observer: Observer) -> None:
    """The self-check: a model is trained only if its streamed gradients are those of transformers."""
    result = check_model(spec.config)
    if not result.ok:
        raise UserError(f"self-check of model type {result.model_type} failed, so it is not trained: {result.reason}")
    observer.on_message(f"self-check: gradients equal transformers' own (relative error {result.max_rel_error:.1e})")


def _open_state(
    folder: Path,
    spec: ModelSpec,
    plan: Plan,
    model: ModelConfig,
    train: TrainConfig,
    loader: DataLoader,
    nvme_budget: int | None,
    resume: bool,
) -> tuple[NvmeStore, dict[str, Tensor]]:
    """The store with at least one committed generation, and the model's constants."""
    constants_file = folder / CONSTANTS_FILE
    if resume and (folder / "manifest.json").exists():
        store = NvmeStore.open(folder, budget_bytes=nvme_budget)
    else:
        store = NvmeStore.create(folder, state_arrays(plan), budget_bytes=nvme_budget)
        constants: dict[str, Tensor] = {}
        if model.path is not None:
            reader = CheckpointReader(Path(model.path).expanduser())
            constants = weights.read_constants(reader, spec)
            buffers: Iterable[tuple[str, dict[str, Tensor]]] = weights.import_blocks(reader, spec)
        else:
            constants = initial_constants(spec)
            buffers = ((name, initialize(spec, name, train.seed)) for name in spec.buffers)
        save_file(constants, constants_file)
        fill_store(store, buffers, layouts(spec), run_meta(0, 0, loader.cursor))
    return store, load_file(constants_file)


def _run(session: Session, observer: Observer) -> TrainResult:
    """Step until the recipe's last step or until the observer asks to stop; then commit."""
    lanes: dict[str, LaneTotals] = defaultdict(LaneTotals)
    steps: list[StepMetrics] = []
    stopped = False
    while session.step < session.config.steps and not stopped:
        metrics = train_step(session)
        spans = session.executor.take_spans()
        for span in spans:
            lanes[span.lane].add(span)
        observer.on_step(metrics, spans)
        steps.append(metrics)
        if len(steps) == 1:
            gc.freeze()  # everything long-lived exists now: later collections need not look at it
        stopped = observer.should_stop() and session.step < session.config.steps
    session.finish()
    observer.on_spans(tail := session.executor.take_spans())
    for span in tail:
        lanes[span.lane].add(span)
    gc.unfreeze()
    timed = steps[1:] or steps
    return TrainResult(
        steps=session.step,
        tokens=sum(m.tokens for m in steps),
        first_loss=steps[0].loss if steps else None,
        last_loss=steps[-1].loss if steps else None,
        tokens_per_s=sum(m.tokens for m in timed) / sum(m.step_s for m in timed) if timed else None,
        step_s_median=statistics.median(m.step_s for m in steps) if steps else None,
        tiers={},
        lanes={lane: {"busy_s": lanes[lane].busy_s, "bytes": lanes[lane].bytes} for lane in LANES},
        stopped=stopped,
    )


def _tiers(session: Session, budgets: BudgetConfig) -> dict[str, dict[str, int]]:
    """Budget and peak of each tier. On CPU the gpu tier is what was carved; on CUDA what the allocator really held."""
    plan, store = session.plan, session.store
    gpu_peak = session.gpu.arena.used_bytes
    if session.device.type == "cuda":
        gpu_peak = torch.cuda.max_memory_allocated(session.device)
    nvme_peak = store.disk_bytes()
    nvme_budget = nvme_peak if budgets.nvme is None else parse_bytes(budgets.nvme, "budgets.nvme")
    return {
        "gpu": {"budget_bytes": plan.tiers["gpu"].budget_bytes, "peak_bytes": gpu_peak},
        "ram": {"budget_bytes": plan.tiers["ram"].budget_bytes, "peak_bytes": session.ram.arena.used_bytes},
        "nvme": {"budget_bytes": nvme_budget, "peak_bytes": nvme_peak},
    }


def export(
    run_dir: Path,
    *,
    model: ModelConfig,
    data: DataConfig,
    train: TrainConfig,
    storage: StorageConfig,
    out_dir: Path,
) -> None:
    """Write the last committed generation of a run as a Hugging Face folder, one block in memory at a time.

    Raises UserError when the run has no generation yet or `out_dir` cannot be written.
    """
    store = NvmeStore.open(state_folder(run_dir, storage.nvme))
    try:
        prepared = prepare_data(model, data, run_dir / "data")
        config = model_config(model, data, prepared.tokenizer.vocab_size if prepared.tokenizer else None)
        spec = ModelSpec.from_config(config)
        flat: dict[str, FlatLayout] = layouts(spec)
        weights.export_folder(
            out_dir,
            spec,
            lambda name: read_parameters(store, name, flat[name]),
            constants=load_file(store.root / CONSTANTS_FILE),
            origin=Path(model.path).expanduser() if model.path is not None else None,
            tokenizer=prepared.tokenizer,
            dtype=train.compute_dtype,
        )
    finally:
        store.close()
