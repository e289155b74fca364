"""A session: a model, its state on all tiers and its lanes, opened from a recipe's parts and ready to step."""

from __future__ import annotations

import gc
import platform
import re
from collections import deque
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine import attention, weights
from engine.affinity import place_threads
from engine.attention import attention_report
from engine.batch import BatchCarrier
from engine.blocks import ModelRunner
from engine.check import check_model
from engine.config import (
    BudgetConfig,
    DataConfig,
    ModelConfig,
    StorageConfig,
    TrainConfig,
    config_digest,
    parse_bytes,
)
from engine.data import DataLoader
from engine.device import configure, resolve_device, why_no_cuda
from engine.events import Observer
from engine.executor import Executor
from engine.failures import explain
from engine.memory import GpuMemory, RamMemory, allocate_gpu, allocate_ram
from engine.model import ModelSpec, initial_constants, initialize
from engine.optimizer import AdamW, can_compile
from engine.plan import Plan
from engine.prepare import (
    LOGITS_BYTES,
    Data,
    compute_dtype,
    layouts,
    make_loader,
    model_config,
    model_spec,
    plan_run,
    prepare_data,
)
from engine.runtime import Runtime, StepData
from engine.schedule import ScheduleBuilder, bytes_per_step
from engine.state import drive_folders, fill_store, load_memory, scratch_arrays, state_arrays, state_folder
from storage.checkpoints import checkpoint_names, delete_checkpoint
from storage.errors import UserError
from storage.nvme import NvmeStore, Traffic
from storage.readers import Readers, select_readers
from storage.safetensors_io import CheckpointReader

CONSTANTS_FILE = "constants.safetensors"
"""Persistent buffers of the model, which are not trained; beside the generations."""

AUTOMATIC = re.compile(r"step-(\d{6,})")
"""Names of the checkpoints that storage.keep_last and storage.keep_every call for."""

IN_FLIGHT = {"nvme_read": 3, "nvme_write": 3}
"""Ops that a disk lane may have under way at once on each drive."""


class Session:
    """Close it, or use it as a context manager."""

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
        identity: dict[str, Any],
    ) -> None:
        self.spec, self.plan, self.store, self.loader, self.config = spec, plan, store, loader, train
        self.storage, self.device, self._identity = storage, device, identity
        self.layouts = layouts(spec)
        self.step = int(store.meta["step"])
        self.tokens = int(store.meta["tokens"])
        self._next: StepData | None = None
        self._records: dict[int, dict[str, Any]] = {}
        """What the generations of the steps since the last commit would record."""
        self._requested: dict[int, list[str]] = {}
        """Step -> names of checkpoints to make of its generation."""
        self.checkpoints: deque[tuple[str, int, str | None]] = deque()
        """(name, step, why not) of checkpoints asked for, as they are made."""
        loader.seek(store.meta["cursor"])
        self.settings = configure(device, plan.tiers["gpu"].budget_bytes, deterministic=train.deterministic)
        self._carrier = BatchCarrier(plan.chunks, device)
        dtype = compute_dtype(train)
        gradient_dtype = torch.bfloat16 if train.gradient_dtype == "bfloat16" else torch.float32
        compiled = train.compile == "on" or (train.compile == "auto" and can_compile(device))
        store.add_scratch(scratch_arrays(plan, train.compute_dtype, train.gradient_dtype))
        store.reserve_spill(plan.spill_bytes)
        try:
            self.gpu: GpuMemory = allocate_gpu(plan, device, dtype)
        except torch.OutOfMemoryError as error:
            self.settings.restore()
            raise explain(error, None, plan) or error from error
        placement = place_threads(device)
        with nullcontext() if placement is None else placement.near_gpu():  # pinning touches every page
            self.ram: RamMemory = allocate_ram(
                plan, pin=device.type == "cuda", compute_dtype=dtype, gradient_dtype=gradient_dtype
            )
        load_memory(store, plan, self.gpu, self.ram, dtype)
        runner = ModelRunner(spec, device=device, dtype=dtype, compile=compiled, constants=constants)
        self.runtime = Runtime(
            plan,
            self.layouts,
            runner,
            AdamW("compiled" if compiled else "eager" if train.compile == "off" else "fused"),
            store,
            self.gpu,
            self.ram,
            train,
            LOGITS_BYTES[device.type],
            self._commit,
        )
        self.builder = ScheduleBuilder(plan)
        num_drives = len(store.drives)
        in_flight = {lane: count * num_drives for lane, count in IN_FLIGHT.items()}
        on_start = None if placement is None else placement.enter_lane
        self.executor = Executor(self.runtime.perform, device, in_flight, on_start)
        self._traffic = self._traffic_before = store.traffic()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the lanes and free the memory; what was not committed is lost."""
        self.executor.close()
        self.store.close()
        self.ram.arena.close()
        self.settings.restore()

    # ------------------------------------------------------------------ batches

    def fetch(self) -> StepData:
        """The batch of the next step, on the compute device."""
        micro_batches = self.loader.next_step()
        return StepData(
            micro_batches=micro_batches,
            chunks=self._carrier.carry(micro_batches),
            num_targets=sum(m.num_targets for m in micro_batches),
            cursor=self.loader.cursor,
        )

    def next_batch(self) -> StepData:
        """The batch of the step about to run, fetched while the step before ran."""
        data, self._next = self._next or self.fetch(), None
        return data

    def prefetch(self) -> None:
        """Fetch the batch after the running step's, and look for garbage if Python does not by itself.

        Here the lanes have work and the main thread has none.
        """
        if not gc.isenabled():
            gc.collect()
        if self._next is None and self.step < self.config.steps:
            self._next = self.fetch()

    # ------------------------------------------------------------------ generations

    def request_checkpoint(self, name: str) -> None:
        """Make a checkpoint of the step that has just ended, with the commit that this calls for."""
        self._requested.setdefault(self.step, []).append(name)

    def commit_due(self, step: int) -> bool:
        """Whether the generation after `step` is committed as the run goes on."""
        return step > 0 and (step % self.storage.checkpoint_every == 0 or step in self._requested)

    def begin_step(self, data: StepData) -> None:
        """Count a step that is about to run."""
        self.step += 1
        self.tokens += data.num_targets
        self._records[self.step] = run_meta(self.step, self.tokens, data.cursor, self._identity)
        self.runtime.begin(self.step, data)

    def _commit(self, step: int) -> None:
        """Commit the generation of `step` and make the checkpoints due.

        Runs on the lane that writes to NVMe, maybe while the main thread is some steps ahead.
        """
        self.store.commit(self._records[step])
        for old in [other for other in list(self._records) if other <= step]:
            del self._records[old]
        for name in self._requested.pop(step, []):
            self.checkpoints.append((name, step, self._checkpoint(name)))
        every, root = self.storage.keep_every, self.store.root
        kept_for_good = every is not None and step % every == 0
        if step % self.storage.checkpoint_every or not (kept_for_good or self.storage.keep_last > 1):
            return
        error = self._checkpoint(name := automatic_name(step))
        if error is not None:
            self.checkpoints.append((name, step, error))
        steps = sorted(int(match[1]) for name in checkpoint_names(root) if (match := AUTOMATIC.fullmatch(name)))
        for old in steps[: -self.storage.keep_last]:
            if every is None or old % every:
                delete_checkpoint(root, automatic_name(old))

    def _checkpoint(self, name: str) -> str | None:
        """Make a checkpoint; why it could not be made. Training goes on without it."""
        try:
            self.store.checkpoint(name)
        except UserError as error:
            return str(error)
        return None

    def finish(self) -> None:
        """Apply the gradient that still waits, commit the generation, and wait for all of it."""
        if self.builder.waiting:
            self.executor.submit(self.builder.finish(commit=True))
        self.executor.drain()

    # ------------------------------------------------------------------ drives

    def traffic(self) -> dict[Path, Traffic]:
        """Bytes moved to and from each drive since the session was opened and its memory filled."""
        before, now = self._traffic_before, self.store.traffic()
        return {folder: now[folder] - before.get(folder, Traffic()) for folder in now}

    def take_traffic(self) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes read from and written to each drive folder since the last call."""
        before, self._traffic = self._traffic, self.store.traffic()
        moved = {str(folder): now - before.get(folder, Traffic()) for folder, now in self._traffic.items()}
        return {f: t.bytes_read for f, t in moved.items()}, {f: t.bytes_written for f, t in moved.items()}


def automatic_name(step: int) -> str:
    """Name of the checkpoint that is kept of a step without being asked for by name."""
    return f"step-{step:06}"


def run_identity(model: ModelConfig, data: DataConfig, train: TrainConfig) -> dict[str, Any]:
    """What a generation records of where it comes from, beside its step.

    Initialisation and the order of the data are functions of the seeds, and training itself draws no random numbers:
    seeds and data cursor are the whole random state.
    """
    return {
        "recipe": config_digest(model, data, train),
        "rng": {"train.seed": train.seed, "data.seed": data.seed},
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }


def run_meta(step: int, tokens: int, cursor: dict[str, Any], identity: dict[str, Any]) -> dict[str, Any]:
    """The manifest's record of a run at the end of `step`."""
    return {"step": step, "tokens": tokens, "cursor": cursor, **identity}


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
    checkpoint: str | None = None,
) -> Session:
    """Prepare data, plan and state of a run: everything up to the first step.

    With `checkpoint` a resumed run goes back to that checkpoint's generation.
    """
    device = resolve_device(train)
    if train.compile == "auto" and not can_compile(device):
        observer.on_message("no compiler for torch.compile: layers run eagerly, AdamW through torch's fused kernel")
    prepared = prepare_data(model, data, run_dir / "data")
    config = model_config(model, data, prepared.tokenizer.vocab_size if prepared.tokenizer else None)
    spec = model_spec(config, data)
    loader = make_loader(prepared.corpus, spec, data, train)
    _describe(observer, spec, prepared, loader, device)
    drives = drive_folders(run_dir, storage)
    readers = select_readers(storage.reader, device, drives)
    if readers.warning:
        observer.on_message(readers.warning)
    plan = plan_run(
        spec,
        data,
        train,
        budgets,
        storage,
        device,
        device_reads=readers.device is not None,
        reader_bytes=readers.pinned_bytes(len(drives)),
    )
    _refuse_unless_exact(spec, plan, observer)
    nvme_budget = None if budgets.nvme is None else parse_bytes(budgets.nvme, "budgets.nvme")
    identity = run_identity(model, data, train)
    root = state_folder(run_dir)
    if resume and (root / "manifest.json").exists():
        store = NvmeStore.open(root, budget_bytes=nvme_budget, drives=drives, readers=readers)
        try:
            _require_same_state(store, plan)
            if checkpoint is not None:
                store.restore(checkpoint)
        except BaseException:
            store.close()
            raise
        if store.meta["recipe"] != identity["recipe"]:
            observer.on_message(
                f"generation {store.generation} was trained with another model, data or train section of the recipe; "
                "going on with the present one"
            )
    else:
        store = _new_state(root, drives, readers, spec, plan, model, train, loader, nvme_budget, identity)
    for warning in store.warnings:
        observer.on_message(warning)
    choose_kernels(spec, plan, device, compute_dtype(train))
    kernels = [kernel for kernel in attention_report() if kernel["device"] != "cpu"]  # those are the self-check's
    for line in sorted({f"attention {kernel['direction']}: {kernel['chosen']}" for kernel in kernels}):
        observer.on_message(line)
    observer.on_plan(plan.to_json() | {"bytes_per_step": bytes_per_step(plan), "attention": kernels})
    session = Session(
        spec=spec,
        plan=plan,
        store=store,
        loader=loader,
        constants=load_file(root / CONSTANTS_FILE),
        train=train,
        storage=storage,
        device=device,
        identity=identity,
    )
    if session.settings.message is not None:
        observer.on_message(session.settings.message)
    return session


def choose_kernels(spec: ModelSpec, plan: Plan, device: torch.device, dtype: torch.dtype) -> None:
    """Measure the attention kernels of the model's layers at the plan's chunks, while GPU memory is still free.

    Nothing happens on CPU, where there is one kernel.
    """
    if device.type != "cuda":
        return
    for shape in {shape for shape in spec.attention if shape is not None}:
        attention.measure(
            device,
            dtype,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            qk_dim=shape.qk_dim,
            v_dim=shape.v_dim,
            chunk=plan.max_chunk_tokens,
            total=min(plan.window_tokens, shape.chunk or plan.window_tokens),
            window=shape.window,
        )
    torch.cuda.empty_cache()


def _describe(observer: Observer, spec: ModelSpec, data: Data, loader: DataLoader, device: torch.device) -> None:
    corpus = data.corpus.info
    if device.type == "cpu":
        broken = torch.version.cuda is not None and not torch.cuda.is_available()  # for a GPU, and none is found
        reason = f" ({why_no_cuda()})" if broken else ""
        observer.on_message(f"no GPU{reason}: computing on CPU, and the gpu tier is ordinary memory")
    observer.on_message(
        f"model: {spec.model_type}, {spec.num_params:,} parameters, {len(spec.attention)} layers, {device}"
    )
    split = f", {loader.num_split_documents:,} longer than the context and split" if loader.num_split_documents else ""
    observer.on_message(f"data: {corpus.num_documents:,} documents, {corpus.num_tokens:,} tokens{split}")


def _refuse_unless_exact(spec: ModelSpec, plan: Plan, observer: Observer) -> None:
    """The self-check: a model is trained only if its streamed gradients are those of transformers."""
    result = check_model(spec.config, pieces=plan.streamed)
    if not result.ok:
        raise UserError(f"self-check of model type {result.model_type} failed, so it is not trained: {result.reason}")
    observer.on_message(f"self-check: gradients equal transformers' own (relative error {result.max_rel_error:.1e})")


def _require_same_state(store: NvmeStore, plan: Plan) -> None:
    """UserError unless the store holds what the plan wants."""
    wanted = {(a.buffer, a.kind): a for a in state_arrays(plan)}
    held = {(a.buffer, a.kind): a for a in store.arrays()}
    if wanted.keys() != held.keys() or any(wanted[key].numel != held[key].numel for key in wanted):
        raise UserError(f"{store.root}: holds the state of another model than the recipe's; restore the recipe's model")
    if wanted != held:
        part_bytes = max(a.part_numel * 4 for a in held.values())
        raise UserError(
            f"storage.chunk_bytes: the state in {store.root} is cut into chunks of up to {part_bytes:,} bytes, which a "
            "resumed run cannot change; restore the value that the run was made with"
        )


def _new_state(
    root: Path,
    drives: list[Path],
    readers: Readers,
    spec: ModelSpec,
    plan: Plan,
    model: ModelConfig,
    train: TrainConfig,
    loader: DataLoader,
    nvme_budget: int | None,
    identity: dict[str, Any],
) -> NvmeStore:
    """A store whose first generation is the imported or initialised model."""
    store = NvmeStore.create(root, state_arrays(plan), budget_bytes=nvme_budget, drives=drives, readers=readers)
    try:
        constants: dict[str, Tensor] = {}
        if model.path is not None:
            reader = CheckpointReader(Path(model.path).expanduser())
            constants = weights.read_constants(reader, spec)
            buffers: Iterable[tuple[str, dict[str, Tensor]]] = weights.import_blocks(reader, spec)
        else:
            constants = initial_constants(spec)
            buffers = ((name, initialize(spec, name, train.seed)) for name in spec.buffers)
        save_file(constants, root / CONSTANTS_FILE)
        fill_store(store, buffers, layouts(spec), run_meta(0, 0, loader.cursor, identity))
    except BaseException:
        store.close()
        raise
    return store
