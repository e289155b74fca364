"""What a generation records of how a run computes, for the run that goes on from it: other decisions, other bits; and
whether its state is that of the run's model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch

from penstock.engine.attention.select import measured
from penstock.engine.config import SAMPLED, AdapterConfig, ModelConfig, Recipe
from penstock.engine.events import Observer
from penstock.engine.forecast.request import PlanRequest
from penstock.engine.kernels import changes, is_kernel_record
from penstock.engine.machine.compilers import Compilation
from penstock.engine.plan.plan import Plan
from penstock.engine.plan.problem import PlanOptions
from penstock.engine.runtime.past import is_record
from penstock.engine.runtime.state import state_arrays
from penstock.storage.files.errors import UserError
from penstock.storage.files.units import size_text
from penstock.storage.files.untrusted import is_whole, one_line
from penstock.storage.generations.store import NvmeStore


def require_record(store: NvmeStore) -> None:
    """Raise UserError unless the generation's record is one of `run_meta`, of a session's plan if it has one."""
    meta, kinds = store.meta, {"chunk_tokens": int, "compiled": bool, "optimizer_mode": str}
    kinds |= {field.name: type(field.default) for field in fields(PlanOptions)}
    plan = meta.get("plan", {})
    whole = [meta.get("step"), meta.get("tokens"), plan.get("chunk_tokens", 0)]
    if (
        not all(is_whole(value) and value >= 0 for value in whole)
        or not all(type(meta.get(name)) is kind for name, kind in (("recipe", str), ("cursor", dict)))
        or (plan and {name: type(value) for name, value in plan.items()} != kinds)
        or not isinstance(sizes := meta.get("graph_bytes", {}), dict)
        or not all(is_whole(size) and size > 0 for size in sizes.values())
        or not is_record(meta)
        or ("kernels" in meta and not is_kernel_record(meta["kernels"]))
    ):
        raise UserError(
            f"{store.root / 'manifest.json'}: does not record the run's position, or was written by another version "
            "of Penstock; resume with that version, or from a checkpoint"
        )


def require_same_model(store: NvmeStore, recipe: Recipe) -> None:
    """UserError unless adapter and frozen weights make the model that the store's generation was trained as."""
    before = store.meta.get("fields")
    if not isinstance(before, dict):
        return
    usual = AdapterConfig()
    for name in ("method", "rank", "alpha", "targets"):
        was, now = before.get(f"adapter.{name}", getattr(usual, name)), getattr(recipe.adapter, name)
        if was != now:
            raise UserError(
                f"adapter.{name}: {now} in the recipe, {was} in the run: the state in {store.root} is of that adapter; "
                f"restore adapter.{name}, or begin a new run"
            )
    was, now = before.get("model.train_vision", ModelConfig().train_vision), recipe.model.train_vision
    if was != now:
        raise UserError(
            f"model.train_vision: {now} in the recipe, {was} in the run: {store.root} has a state of other "
            "parameters; restore model.train_vision, or begin a new run from an export"
        )
    was, now = before.get("model.frozen_format", ModelConfig().frozen_format), recipe.model.frozen_format
    if was != now:
        raise UserError(
            f"model.frozen_format: {now} in the recipe, {was} in the run: the frozen weights in {store.root} are "
            "stored so; restore model.frozen_format, or begin a new run"
        )
    beta = before.get("grpo.beta", 0.0)
    if (beta > 0 and before.get("train.objective") in SAMPLED) != recipe.keeps_reference:
        raise UserError(
            f"grpo.beta: {recipe.grpo.beta} in the recipe, {beta} in the run: whether {store.root} keeps the weights "
            "that a run began with is settled then; restore grpo.beta, or begin a new run"
        )


def require_same_state(store: NvmeStore, plan: Plan) -> None:
    """UserError unless the store holds what the plan wants."""
    _require_same_frozen(store, plan)
    wanted = {(a.buffer, a.kind): a for a in state_arrays(plan)}
    held = {(a.buffer, a.kind): a for a in store.arrays()}
    if wanted.keys() != held.keys() or any(wanted[key].numel != held[key].numel for key in wanted):
        raise UserError(f"{store.root}: holds the state of another model than the recipe's; restore the recipe's model")
    if wanted != held:
        part_bytes = max(a.part_numel * 4 for a in held.values())
        raise UserError(
            f"storage.part_bytes: the state in {store.root} is cut into parts of up to {size_text(part_bytes)}, which "
            f"a resumed run cannot change; restore storage.part_bytes={size_text(part_bytes)}"
        )


def _require_same_frozen(store: NvmeStore, plan: Plan) -> None:
    """UserError where the parameters that the store holds as frozen are others than the plan's."""
    wanted, held = ({a.buffer: a for a in arrays if a.fixed} for arrays in (state_arrays(plan), store.arrays()))
    if {name: a.numel for name, a in wanted.items()} != {name: a.numel for name, a in held.items()}:
        fields = store.meta.get("fields")
        was = fields.get("train.freeze", []) if isinstance(fields, dict) else []
        raise UserError(
            f"train.freeze: the run in {store.root} began with {one_line(json.dumps(was))}, so that other parameters "
            "are trained there, which a resumed run cannot change; restore it, or start a new run from an export"
        )
    for name in held.keys() & wanted.keys():
        if held[name].dtype != wanted[name].dtype:
            raise UserError(
                f"train.compute_dtype: the weights in {store.root} that are not trained are kept in "
                f"{held[name].dtype}, which a resumed run cannot change; set train.compute_dtype={held[name].dtype}"
            )


class Recorded(NamedTuple):
    """What a run had decided when it last committed: other decisions could give other bits."""

    choice: tuple[int, PlanOptions]
    """Chunk length, and what the search chose."""
    compiled: bool
    optimizer_mode: str
    graph_bytes: dict[str, int] | None
    """PlanRequest.graph_bytes: compiled, a saved graph and one that is recomputed are other programs."""

    def lacking(self, can: Compilation) -> list[str]:
        """What was compiled and cannot be now, in words."""
        result = ["layers compiled, now eager"] if self.compiled and not can.layers else []
        if self.optimizer_mode == "compiled" and not can.optimizer:
            result.append("optimizer compiled, now fused")
        return result


def recorded_of(store: NvmeStore, task: PlanRequest) -> Recorded | None:
    """What the store's generation records; None where the present recipe does not allow it."""
    recorded = dict(store.meta.get("plan", {}))
    if (chunk := recorded.pop("chunk_tokens", None)) not in task.chunks:
        return None
    compiled, mode = recorded.pop("compiled"), recorded.pop("optimizer_mode")
    return Recorded((chunk, PlanOptions(**recorded)), compiled, mode, store.meta.get("graph_bytes"))


def recorded_kernels(
    store: NvmeStore, device: torch.device, recorded: Recorded | None, compilation: Compilation, observer: Observer
) -> dict[str, Any] | None:
    """What the store's generation records of its kernels, unless they are to be chosen anew; says what has changed."""
    kernels: dict[str, Any] | None = store.meta.get("kernels")
    others = [] if kernels is None else changes(kernels, device)
    lacking = [] if recorded is None else recorded.lacking(compilation)
    if others or lacking:
        report_changed(observer, store, [*others, *lacking], anew=bool(others) and measured(device))
    return None if others else kernels


def report_changed(observer: Observer, store: NvmeStore, what: Sequence[str], *, anew: bool) -> None:
    """Say what makes results others; `anew`: kernels as well."""
    chosen = "kernels are chosen anew, and " if anew else ""
    observer.on_message(
        f"since generation {store.generation} what computes has changed ({'; '.join(what)}): {chosen}from here on "
        "results may differ from those of an uninterrupted run by rounding"
    )
