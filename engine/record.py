"""What a generation records of how a run computes, for the run that goes on from it: other decisions, other bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch

from penstock.engine.attention.select import measured
from penstock.engine.events import Observer
from penstock.engine.forecast.request import PlanRequest
from penstock.engine.kernels import changes, is_kernel_record
from penstock.engine.machine.compilers import Compilation
from penstock.engine.plan.problem import PlanOptions
from penstock.engine.runtime.past import is_record
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import is_whole
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
