"""Opening a run: data, plan, state and calibration, up to the first step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.engine.attention.select import attention_report, measured
from penstock.engine.config import (
    SAMPLED,
    Recipe,
    Share,
    StorageConfig,
    TrainConfig,
    changed_fields,
    drive_folders,
    parse_bytes,
    state_folder,
    whole_document_notes,
)
from penstock.engine.data.completions import CompletionLoader
from penstock.engine.data.corpus.prepare import Data
from penstock.engine.data.loader import DataLoader
from penstock.engine.data.loading import make_loader, make_validation
from penstock.engine.events import Observer
from penstock.engine.forecast.costs import Calibration, Conditions
from penstock.engine.forecast.report import forecast, predict
from penstock.engine.forecast.request import PlanRequest
from penstock.engine.forecast.search import SearchResult
from penstock.engine.generate.prompts import prepare_prompts
from penstock.engine.hf import weights
from penstock.engine.hf.adapter_folder import Start
from penstock.engine.hf.config import require_overrides
from penstock.engine.hf.constants import CONSTANTS_FILE, read_constants_file, write_constants
from penstock.engine.hf.quantised import open_checkpoint
from penstock.engine.hf.stored import require_stored, with_scales
from penstock.engine.image_check import check_images
from penstock.engine.joining import Decisions
from penstock.engine.kernels import KernelQuery, choose_kernels, kernel_query, kernel_record, report_kernels
from penstock.engine.machine.budgets import run_budgets
from penstock.engine.machine.compilers import Compilation, find_compilation
from penstock.engine.machine.device import compute_dtype, resolve_device, why_no_cuda
from penstock.engine.machine.platforms import is_shared, remarks
from penstock.engine.machine.precision import with_compute_dtype
from penstock.engine.machine.presets import this_machine
from penstock.engine.machine.probe_drives import with_measured_drives
from penstock.engine.machine.profile import Machine
from penstock.engine.machine.reservations import Reservation
from penstock.engine.model.adapter_values import with_adapter
from penstock.engine.model.anatomy import Initializer, initial_constants
from penstock.engine.model.spec import ModelSpec
from penstock.engine.model.stored import FORMATS
from penstock.engine.model.tokens import MicroBatch
from penstock.engine.plan.plan import Plan
from penstock.engine.plan.problem import NO_VISION
from penstock.engine.preparing import Checklist
from penstock.engine.ranks.count import require_replicas
from penstock.engine.ranks.placing import place_rank
from penstock.engine.ranks.ranks import ALONE, Ranks
from penstock.engine.record import (
    recorded_kernels,
    recorded_of,
    report_changed,
    require_record,
    require_same_model,
    require_same_state,
)
from penstock.engine.rewards.rewards import Rewards
from penstock.engine.run_files import with_saved_inputs
from penstock.engine.run_model import adapter_start, describe_run, remarks_on_model
from penstock.engine.runtime.compute import Compute
from penstock.engine.runtime.failures import explain
from penstock.engine.runtime.lanes import Lanes
from penstock.engine.runtime.state import fill_store, state_arrays
from penstock.engine.runtime.tuning import Tuning
from penstock.engine.self_check import check_model
from penstock.engine.session import Session, run_identity, run_meta
from penstock.engine.uploads import Uploads
from penstock.engine.vision import Vision
from penstock.storage.files.errors import UserError
from penstock.storage.files.units import bytes_text
from penstock.storage.files.untrusted import one_line
from penstock.storage.generations.store import NvmeStore
from penstock.storage.tier.readers import Readers, find_readers

_NO_PROFILE = "no profile of this machine"
_LOOKED_AT = 5
"""Batches of which `typical_batch` takes the middle one."""


def open_session(
    recipe: Recipe,
    *,
    run_dir: Path,
    observer: Observer,
    resume: bool,
    checkpoint: str | None = None,
    ranks: Ranks = ALONE,
) -> Session:
    """Prepare data, plan and state of a run up to the first step; with `checkpoint` a resumed run goes back to that.
    `ranks`: this process is the first of them."""
    device = resolve_device(recipe.train)
    recipe = replace(recipe, train=with_compute_dtype(recipe.train, device))
    train, budgets = recipe.train, recipe.budgets
    compilation = find_compilation(train, device, observer.on_message)
    checklist = Checklist(observer)
    uploads: Uploads | None = None
    if recipe.storage.offsite is not None:
        with checklist.step(f"looking at {one_line(recipe.storage.offsite, 200)}"):
            uploads = Uploads.begin(recipe, run_dir, recipe.storage.offsite, resume=resume)
    given, recipe = recipe, with_saved_inputs(recipe, run_dir)
    prepared, spec, new_rows = describe_run(recipe, run_dir, checklist)
    require_replicas(recipe, spec)
    start = None if resume else adapter_start(recipe, spec, observer)
    if not resume:
        require_overrides(recipe, prepared.tokenizer.vocab_size if prepared.tokenizer else None)
        if recipe.model.frozen_format == "stored":
            require_stored(_layout(recipe, spec, new_rows))
        for remark in remarks_on_model(recipe, prepared.tokenizer, spec, new_rows):
            observer.on_message(remark)
    loader = make_loader(prepared.corpus, spec, recipe)
    validation = make_validation(prepared.corpus, spec, recipe)
    vision = Vision.find(prepared.corpus, recipe, spec)
    _describe(observer, recipe, spec, prepared, loader, device)
    prompts = prepare_prompts(recipe, prepared.tokenizer, spec)
    if prompts is not None:
        observer.on_message(prompts.describe(), detail=True)
    if isinstance(loader, CompletionLoader) and loader.held_out:
        observer.on_message(
            f"validation: every {train.validate_every:,} steps, rewards of {recipe.grpo.num_validated:,} completions "
            f"of each of {len(loader.held_out):,} prompts held out",
            detail=True,
        )
    if validation is not None:
        observer.on_message(
            f"validation: every {train.validate_every:,} steps, on {validation.num_targets:,} tokens of "
            f"{validation.num_documents:,} documents held out",
            detail=True,
        )
    drives, placement = drive_folders(run_dir, recipe.storage), place_rank(device, ranks)
    root = state_folder(run_dir)
    going_on = resume and (root / "manifest.json").exists()
    machine = this_machine(device)
    measures_drives = train.calibrate and machine.is_assumed
    if machine.is_assumed and not measures_drives:
        observer.on_message(
            "no profile of this machine: drives and links are planned at assumed rates (penstock probe)", detail=True
        )
    batch = typical_batch(loader)
    own = batch if recipe.train.sharded else batch[: len(batch) // ranks.count]
    documents, filled = [m.documents for m in own], [m.filled for m in own]
    identity = run_identity(given)
    with contextlib.ExitStack() as undo:
        rewards: Rewards | None = None
        if recipe.train.objective in SAMPLED:
            with checklist.step("opening the reward functions"):
                rewards = undo.enter_context(Rewards(recipe.grpo, run_dir))
        reservation = undo.enter_context(Reservation(run_dir, device, observer, checklist))
        whole = run_budgets(budgets, device, drives, new=not going_on, others=reservation.others)
        limits = whole.of_rank(ranks.count, shares_gpu=is_shared(device) and budgets.gpu is None)
        task = PlanRequest(
            spec=spec,
            recipe=recipe,
            budgets=limits,
            device_type=device.type,
            ranks=ranks.count,
            prompt_tokens=None if prompts is None else tuple(map(len, prompts.ids)),
            vision=NO_VISION if vision is None else vision.space,
            longest_prompt=loader.longest_prompt if isinstance(loader, CompletionLoader) else None,
            reference_rows=loader.num_rows + (0 if validation is None else validation.num_rows),
        )
        reservation.reserve(whole)
        task = task.grouped(machine, documents, filled)
        spec, recipe, train = task.spec, task.recipe, task.recipe.train
        least = task.settled().budgets
        reservation.reserve(least.of_all(ranks.count))  # other processes may plan with the rest
        on_drive = None if placement is None else placement.enter_drive
        if measures_drives:
            with checklist.step("measuring the drives"):
                machine = _measured_or_assumed(machine, drives, recipe.storage, observer)
        machine = machine.of_rank(ranks.count)
        # Before any memory of the run's, and before anything is compiled or timed.
        with checklist.step("opening lanes and drives"):
            lanes = Lanes.open(
                device,
                least.gpu,
                compiled=compilation.layers,
                deterministic=train.deterministic,
                num_drives=len(drives),
                placement=placement,
                ranks=ranks.count,
            )
            undo.callback(lanes.close)
            readers = _readers(recipe.storage, device, drives, on_drive)
        if readers.warning:
            observer.on_message(readers.warning)
        task = replace(
            task, device_reads=readers.device is not None, reader_bytes=readers.pinned_bytes(len(drives))
        ).settled()
        reservation.reserve(task.budgets.of_all(ranks.count))
        for tier, budget in zip(("gpu", "ram"), budgets.given(), strict=False):
            if budget == "least" or isinstance(budget, Share):
                size = bytes_text(getattr(task.budgets, tier))
                observer.on_message(f"budgets.{tier}={budget}: {size} ({task.budgets.why[tier]})")
        with checklist.step("searching a plan"):
            result = task.search(machine, documents=documents, filled=filled, rough=train.calibrate)
        with checklist.step("self-check"):
            _refuse_unless_exact(spec, recipe, result.plan, observer, device)
            if vision is not None:
                check_images(spec.config, pieces=result.plan.streamed)
        nvme_budget = None if budgets.nvme is None else parse_bytes(budgets.nvme, "budgets.nvme")
        recorded, kernels = None, None
        if going_on:
            with checklist.step("opening the last generation"):
                store = NvmeStore.open(
                    root, budget_bytes=nvme_budget, drives=drives, readers=readers, on_thread_start=on_drive
                )
                undo.callback(store.close)
                require_record(store)
                require_same_model(store, recipe)
                require_same_state(store, result.plan)
                if checkpoint is not None:
                    store.restore(checkpoint)
                    require_record(store)
            if store.meta["recipe"] != identity["recipe"]:
                observer.on_message(_changed(store, identity))
            recorded = recorded_of(store, task)
            kernels = recorded_kernels(store, device, recorded, compilation, observer)
        else:
            with checklist.step("writing the first generation"):
                store = NvmeStore.create(
                    root,
                    state_arrays(result.plan),
                    budget_bytes=nvme_budget,
                    drives=drives,
                    readers=readers,
                    on_thread_start=on_drive,
                )
                undo.callback(store.close)
                if new_rows is not None:
                    observer.on_message(new_rows.describe(len(recipe.model.added_tokens)))
                _fill_new(store, spec, recipe, loader, identity, new_rows, start, observer)
        for warning in store.warnings:
            observer.on_message(warning)
        if uploads is not None:
            undo.callback(uploads.close, began=False)
            uploads.attach(store)
        if recorded is not None:
            task = replace(task, graph_bytes=recorded.graph_bytes)
            result = task.search(machine, documents=documents, filled=filled, only=recorded.choice)
            compilation = Compilation(
                layers=compilation.layers and recorded.compiled,
                optimizer=compilation.optimizer and recorded.optimizer_mode == "compiled",
            )
        with checklist.step("preparing the layers"):
            constants_crc = store.meta.get("constants")
            constants = read_constants_file(root / CONSTANTS_FILE, constants_crc, spec.constants)
            compute = Compute.make(spec, train, device, constants, compilation)
        wanted = kernel_query(spec, result.plan)
        with checklist.step("choosing kernels", when=measured(device)):
            lost = _choose_kernels(wanted, lanes, device, train, result.plan, kernels)
        if lost:
            report_changed(observer, store, lost, anew=True)
        calibration = None
        if train.calibrate:
            fixed = recorded is not None or train.deterministic
            steps_left = train.steps - int(store.meta["step"])
            tuning = Tuning(task, machine, own, lanes, checklist, observer)
            compute, calibration = tuning.run(result, compute, None if fixed else steps_left)
            if task.graph_bytes is None:
                task = replace(task, graph_bytes=calibration.graph_bytes_per_token)
            known = (result.best.chunk_tokens, result.best.choice)
            with checklist.step("planning with these times"):
                only = known if fixed else None
                result = task.search(machine, calibration, documents, filled, known=known, only=only, before=result)
            if (others := kernel_query(spec, result.plan)) != wanted:
                with checklist.step("choosing kernels", when=measured(device)):
                    _choose_kernels(others, lanes, device, train, result.plan, None)
        reservation.settle(result.plan, ranks.count)
        _report_plan(observer, task, machine, result, calibration, batch, device)
        kernels = kernel_record(device)
        identity |= {"kernels": kernels, "graph_bytes": dict(task.graph_bytes or {})}
        identity |= {} if constants_crc is None else {"constants": constants_crc}
        compilation = Compilation(layers=compute.runner.compiled, optimizer=compute.optimizer.mode == "compiled")
        ranks.tell(
            Decisions(
                recipe=recipe,
                spec=spec,
                plan=result.plan,
                identity=identity,
                constants_crc=constants_crc,
                compilation=compilation,
                drives=store.drives_by_id,
                kernels=kernels,
            )
        )
        session = Session(
            spec=spec,
            plan=result.plan,
            store=store,
            loader=loader,
            compute=compute,
            recipe=recipe,
            device=device,
            identity=identity,
            lanes=lanes,
            validation=validation,
            prompts=prompts,
            tokenizer=prepared.tokenizer,
            checklist=checklist,
            reservation=reservation,
            uploads=uploads,
            vision=vision,
            rewards=rewards,
            ranks=ranks,
        )
        reservation.allocated()
        undo.pop_all()
    for message in (session.settings.message, session.ram.arena.remark):
        if message is not None:
            observer.on_message(message)
    return session


def _changed(store: NvmeStore, identity: dict[str, Any]) -> str:
    """What is to be said of a generation that was trained with another recipe."""
    before, changed = store.meta.get("fields"), "its model, data or train section is another"
    if isinstance(before, dict):
        changed = changed_fields(before, identity["fields"])
    return f"since generation {store.generation} the recipe has changed: {changed}; going on with the present one"


def _measured_or_assumed(
    machine: Machine, drives: Sequence[Path], storage: StorageConfig, observer: Observer
) -> Machine:
    """The machine with its drives' rates, or, where they cannot be measured, as it is assumed."""
    try:
        machine = with_measured_drives(machine, drives, parse_bytes(storage.part_bytes, "storage.part_bytes"))
    except UserError as error:
        observer.on_message(f"{_NO_PROFILE}: drives are planned at assumed rates, as {error}", detail=True)
        return machine
    read, write = (rate / 1e9 for rate in (machine.nvme_read_bytes_per_s, machine.nvme_write_bytes_per_s))
    rates = f"reads at {read:.2g} GB/s, writes at {write:.2g} GB/s"
    observer.on_message(f"{_NO_PROFILE}: {rates}, as timed briefly (penstock probe)", detail=True)
    return machine


def _readers(
    storage: StorageConfig, device: torch.device, drives: Sequence[Path], on_drive: Callable[[], None] | None
) -> Readers:
    """The readers of a run, confirmed in memory of the run's own allocator, a part at a time as it will read."""
    readers = find_readers(storage.reader, device)
    if readers.device is None or readers.device is readers.host:
        return readers
    part = torch.empty(parse_bytes(storage.part_bytes, "storage.part_bytes"), dtype=torch.uint8, device=device)
    return readers.confirm(part, drives, on_drive)


def _choose_kernels(
    what: KernelQuery,
    lanes: Lanes,
    device: torch.device,
    train: TrainConfig,
    plan: Plan,
    recorded: dict[str, Any] | None,
) -> list[str]:
    """As engine/kernels.py's, on the lane that computes."""
    try:
        return lanes.executor.call("compute", lambda: choose_kernels(what, device, compute_dtype(train), recorded))
    except torch.OutOfMemoryError as error:
        raise explain(error, None, plan) or error from error


def _report_plan(
    observer: Observer,
    task: PlanRequest,
    machine: Machine,
    result: SearchResult,
    calibration: Calibration | None,
    batch: Sequence[MicroBatch],
    device: torch.device,
) -> None:
    """Kernels, and the forecast of the plan that was found."""
    kernels = [kernel for kernel in attention_report() if kernel["device"] != "cpu"]  # those are the self-check's
    for line in sorted({f"attention {kernel['direction']}: {kernel['chosen']}" for kernel in kernels}):
        observer.on_message(line, detail=True)
    own = batch[: result.plan.problem.micro_batches]
    documents, filled = [m.documents for m in own], [m.filled for m in own]
    if device.type == "cuda":
        report_kernels(observer, device, machine, result.plan, documents, filled)
    simulation = predict(result.plan, Conditions(machine, calibration, documents, filled))
    predicted = forecast(task, machine, result, calibration, batch, simulation)
    measured = None if calibration is None else calibration.to_json()
    observer.on_plan(predicted | {"attention": kernels, "calibration": measured}, simulation.spans)


def typical_batch(loader: DataLoader) -> list[MicroBatch]:
    """Of the next few steps' batches the one whose attention is of middling work; the loader stays where it is."""
    batches = loader.look_ahead(_LOOKED_AT)
    batches.sort(key=lambda batch: sum(n * n for m in batch for n in m.lengths))
    return batches[len(batches) // 2]


def _describe(
    observer: Observer, recipe: Recipe, spec: ModelSpec, data: Data, loader: DataLoader, device: torch.device
) -> None:
    corpus = data.corpus.info
    if device.type == "cpu":
        for_gpus = torch.version.cuda is not None or torch.version.hip is not None
        broken = for_gpus and not torch.cuda.is_available()
        reason = f" ({why_no_cuda()})" if broken else ""
        observer.on_message(f"no GPU{reason}: computing on CPU, and the gpu tier is ordinary memory", detail=not broken)
    trained = f" of which {spec.num_trained:,} are trained," if spec.num_trained < spec.num_params else ""
    observer.on_message(
        f"model: {spec.model_type}, {spec.num_params:,} parameters,{trained} {len(spec.attention)} layers, {device}"
    )
    for remark in remarks(device):
        observer.on_message(remark)
    observer.on_message(f"data: {corpus.words()}{loader.report.words()}")
    for note in (*data.corpus.notes, *(whole_document_notes(recipe) if spec.whole_documents else ())):
        observer.on_message(note)


def _refuse_unless_exact(spec: ModelSpec, recipe: Recipe, plan: Plan, observer: Observer, device: torch.device) -> None:
    """The self-check: a model is trained only if its streamed gradients are those of transformers."""
    result = check_model(
        spec.config,
        pieces=plan.streamed,
        shards=2 if plan.problem.sharded else 1,
        router_aux_loss=recipe.train.router_aux_loss,
        adapter=spec.adapter,
        split_layers=recipe.train.split_layers,
        expert_groups=recipe.train.expert_groups,
        frozen_format=next((b.format for b in spec.buffers.values() if b.format and spec.adapter), "compute"),
        device=device,
    )
    if not result.ok:
        raise UserError(f"self-check of model type {result.model_type} failed, so it is not trained: {result.reason}")
    observer.on_message(
        f"self-check: gradients equal transformers' own (relative error {result.max_rel_error:.1e})", detail=True
    )


def _fill_new(
    store: NvmeStore,
    spec: ModelSpec,
    recipe: Recipe,
    loader: DataLoader,
    identity: dict[str, Any],
    new_rows: weights.NewRows | None,
    start: Start | None,
    observer: Observer,
) -> None:
    """Commit the imported or initialised model as the first generation."""
    constants, buffers = first_values(spec, recipe, new_rows, start)
    crc = write_constants(store.root / CONSTANTS_FILE, constants)
    meta = run_meta(0, 0, loader.cursor, identity | {"constants": crc})
    error = fill_store(store, buffers, spec.buffers, meta)
    if recipe.model.frozen_format != "compute":
        layouts = [buffer.stored for buffer in spec.buffers.values() if buffer.stored]
        matrices, form = sum(len(layout.quantised) for layout in layouts), layouts[0].format
        how = f"quantised in blocks of {FORMATS[form].block} values; the largest relative error of one is {error:.2%}"
        if recipe.model.frozen_format == "stored":
            how = f"kept as {form}, to the bit"
        observer.on_message(f"model.frozen_format={recipe.model.frozen_format}: {matrices:,} frozen matrices are {how}")


def _layout(recipe: Recipe, spec: ModelSpec, new_rows: weights.NewRows | None) -> weights.CheckpointLayout:
    """Of the recipe's model folder."""
    reader = open_checkpoint(Path(recipe.model.path or "").expanduser())
    return weights.CheckpointLayout(spec, reader, None if new_rows is None else new_rows.stored)


def first_values(
    spec: ModelSpec, recipe: Recipe, new_rows: weights.NewRows | None, start: Start | None
) -> tuple[dict[str, Tensor], Iterable[tuple[str, dict[str, Tensor]]]]:
    """The imported or initialised model: its constants, and one after the other its buffers' parameters in float32."""
    if recipe.model.path is not None:
        layout = _layout(recipe, spec, new_rows)
        constants = layout.read_constants()
        buffers: Iterable[tuple[str, dict[str, Tensor]]] = with_scales(
            layout, weights.import_blocks(layout, new_rows, recipe.train.seed)
        )
    else:
        constants = initial_constants(spec)
        buffers = Initializer(spec, recipe.train.seed, recipe.model.embedding_std).buffers()
    if spec.adapter is not None:
        values, dtype = None if start is None else start.values(), compute_dtype(recipe.train)
        buffers = with_adapter(spec, buffers, seed=recipe.train.seed, dtype=dtype, start=values)
    return constants, buffers
