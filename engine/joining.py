"""Opening a run on its other ranks, as its first one (engine/opening.py) has decided."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.engine.attention.select import measured
from penstock.engine.config import Recipe, drive_folders, state_folder
from penstock.engine.data.loading import make_loader, make_validation
from penstock.engine.events import Observer
from penstock.engine.generate.prompts import prepare_prompts
from penstock.engine.hf.constants import CONSTANTS_FILE, read_constants_file
from penstock.engine.kernels import choose_kernels, kernel_query
from penstock.engine.machine.compilers import Compilation
from penstock.engine.machine.device import compute_dtype, resolve_device
from penstock.engine.model.spec import ModelSpec
from penstock.engine.plan.plan import Plan
from penstock.engine.preparing import Checklist
from penstock.engine.ranks.placing import place_rank
from penstock.engine.ranks.ranks import Ranks
from penstock.engine.run_model import describe_run
from penstock.engine.runtime.compute import Compute
from penstock.engine.runtime.lanes import Lanes
from penstock.engine.session import Session
from penstock.engine.vision import Vision
from penstock.storage.generations.store import NvmeStore
from penstock.storage.tier.readers import find_readers


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """What the first rank has found out and decided before a session is made."""

    recipe: Recipe
    spec: ModelSpec
    plan: Plan
    identity: dict[str, Any]
    constants_crc: int | None
    compilation: Compilation
    drives: tuple[dict[str, Path], list[str]]
    """NvmeStore.drives_by_id."""
    kernels: dict[str, Any]


def join_session(ranks: Ranks, recipe: Recipe, *, run_dir: Path, observer: Observer) -> Session:
    """The session of a rank that is not the first, once that has made its decisions, by which `recipe` is a little
    different."""
    device = resolve_device(recipe.train)
    placement = place_rank(device, ranks)
    decided: Decisions = ranks.hear()
    recipe, spec, plan, train = decided.recipe, decided.spec, decided.plan, decided.recipe.train
    prepared = describe_run(recipe, run_dir, Checklist(observer)).data
    root = state_folder(run_dir)
    on_drive = None if placement is None else placement.enter_drive
    drives = drive_folders(run_dir, recipe.storage)
    with contextlib.ExitStack() as undo:
        lanes = Lanes.open(
            device,
            plan.tiers["gpu"].budget_bytes,
            compiled=decided.compilation.layers,
            deterministic=train.deterministic,
            num_drives=len(drives),
            placement=placement,
            ranks=ranks.count,
        )
        undo.callback(lanes.close)
        folders, active = decided.drives
        store = NvmeStore.join(
            root,
            folders,
            active,
            ranks.rank,
            readers=find_readers(recipe.storage.reader, device),
            on_thread_start=on_drive,
        )
        undo.callback(store.close)
        constants = read_constants_file(root / CONSTANTS_FILE, decided.constants_crc, spec.constants)
        compute = Compute.make(spec, train, device, constants, decided.compilation)
        if measured(device):
            query, dtype = kernel_query(spec, plan), compute_dtype(train)
            lanes.executor.call("compute", lambda: choose_kernels(query, device, dtype, decided.kernels))
        session = Session(
            spec=spec,
            plan=plan,
            store=store,
            loader=make_loader(prepared.corpus, spec, recipe),
            compute=compute,
            recipe=recipe,
            device=device,
            identity=decided.identity,
            lanes=lanes,
            validation=make_validation(prepared.corpus, spec, recipe),
            prompts=prepare_prompts(recipe, prepared.tokenizer, spec),
            tokenizer=prepared.tokenizer,
            vision=Vision.find(prepared.corpus, recipe, spec),
            ranks=ranks,
        )
        undo.pop_all()
    return session
