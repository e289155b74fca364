"""`penstock plan`: a recipe's forecast for this machine or another, from its config alone."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.app.console.loading import loading
from penstock.engine.config import Recipe, whole_document_notes
from penstock.storage.files.errors import BudgetError

if TYPE_CHECKING:
    from penstock.engine.forecast.request import PlanRequest
    from penstock.engine.machine.profile import Machine
    from penstock.engine.model.spec import ModelSpec


def plan_stages(
    recipe: Recipe,
    machine: str | None = None,
    *,
    trace: Path | None = None,
    cluster: str | None = None,
    said: Sequence[str] = (),
) -> Iterator[dict[str, Any]]:
    """The forecast twice: without what is found by planning again, then with it: what one change would help most and
    the tokens that make it compute-bound, or changes that would fit.

    `machine`: preset or profile file; None takes the recipe's, or this machine. `trace`: file for the simulated step,
    where the plan fits. `cluster`: nodes x GPUs, as `2x8`, to plan for as well. `said`: lines that begin `notes`.
    """
    from penstock.app.runs.trace import write_spans
    from penstock.engine.data.corpus.prepare import require_text
    from penstock.engine.forecast.advice import best_change, fixes
    from penstock.engine.forecast.cluster import cluster_forecast, require_cluster
    from penstock.engine.forecast.costs import Conditions
    from penstock.engine.forecast.extrapolate import estimate
    from penstock.engine.forecast.report import compute_bound_tokens, forecast, refusal
    from penstock.engine.machine.clusters import parse_cluster

    several = None if cluster is None else parse_cluster(cluster)
    if several is not None:
        require_cluster(recipe, several)
    if not recipe.data.lacks_path:
        require_text(recipe.data)
    on, task = recipe_task(recipe, machine)
    notes = [*said, *(whole_document_notes(recipe) if task.spec.whole_documents else ())]
    result: dict[str, Any] = {"recipe": recipe.name, "notes": notes}
    if several is not None:
        result["cluster"] = cluster_forecast(task.spec, recipe, several, compiled=recipe.train.compile == "on")
    folder = recipe.model.path
    if folder is not None and not Path(folder).expanduser().exists():
        result["note"] = f"shape from the recipe: {folder} is not there"
    started = time.perf_counter()
    try:
        task = task.settled()
        found = task.search(on)
    except BudgetError as error:
        result |= refusal(task, on, error)
        yield result
        sizes = {"gpu": on.gpu_bytes, "ram": on.ram_bytes, "nvme": on.nvme_bytes}
        changes = [change.to_json() for change in fixes(task, sizes)]
        yield result | {"refusal": result["refusal"] | {"changes": changes}}
        return
    result["search_s"] = time.perf_counter() - started
    result |= forecast(task, on, found)
    if trace is not None:
        write_spans(estimate(found.plan, Conditions(on), full=True).spans, f"{recipe.name}, planned", trace)
    yield result
    yield result | {
        "best_change": best_change(task, on, found, result["tokens_per_step"]),
        "compute_bound_tokens": compute_bound_tokens(task, on, found),
    }


def recipe_task(recipe: Recipe, machine: str | None) -> tuple[Machine, PlanRequest]:
    """The machine, and what has to be planned for it."""
    from penstock.engine.forecast.request import PlanRequest
    from penstock.engine.machine.precision import with_compute_dtype
    from penstock.engine.machine.presets import find_machine, this_machine

    name = machine or recipe.machine
    if name:
        on = find_machine(name)
        task = machine_task(recipe, on)
        return on.of_rank(task.ranks), task
    import torch

    from penstock.engine.machine.budgets import run_budgets
    from penstock.engine.machine.platforms import is_shared
    from penstock.engine.machine.reservations import reserved
    from penstock.engine.ranks.count import rank_count, require_replicas, with_replicas

    where = torch.device("cuda" if torch.cuda.is_available() and recipe.train.device != "cpu" else "cpu")
    on = this_machine(where)
    drives = [Path(drive).expanduser() for drive in recipe.storage.drives] or [Path.cwd()]
    budgets = run_budgets(recipe.budgets, where, drives, new=True, others=reserved())
    count = rank_count(recipe).ranks
    recipe = with_replicas(replace(recipe, train=with_compute_dtype(recipe.train, where)), count)
    budgets = budgets.of_rank(count, shares_gpu=is_shared(where) and recipe.budgets.gpu is None)
    spec = _spec(recipe, where.type)
    require_replicas(recipe, spec)
    task = PlanRequest(spec=spec, recipe=recipe, budgets=budgets, device_type=where.type, ranks=count)
    return on.of_rank(count), task.grouped(on)


def machine_task(recipe: Recipe, on: Machine, spec: ModelSpec | None = None) -> PlanRequest:
    """What has to be planned for a machine on which nothing else runs; `spec`: of the model, where it is known."""
    from penstock.engine.forecast.request import PlanRequest
    from penstock.engine.machine.budgets import machine_budgets
    from penstock.engine.machine.precision import with_compute_dtype
    from penstock.engine.ranks.count import require_replicas, usable_count, with_replicas

    device, count = "cpu" if on.gpu is None else "cuda", usable_count(recipe, on.gpus)
    budgets = machine_budgets(recipe.budgets, on).of_rank(
        count, shares_gpu=device == "cpu" and recipe.budgets.gpu is None
    )
    recipe = with_replicas(replace(recipe, train=with_compute_dtype(recipe.train, device)), count)
    if spec is None:
        spec = _spec(recipe, device)
    require_replicas(recipe, spec)
    return PlanRequest(spec=spec, recipe=recipe, budgets=budgets, device_type=device, ranks=count).grouped(on)


def _spec(recipe: Recipe, device: str) -> ModelSpec:
    """What the recipe's model is made of, and what graphs of its layers take on that kind of device."""
    from penstock.app.planning.model_cache import cached_spec

    # A run on a GPU that compiles measures them; where nothing runs they are found.
    compiled = device == "cuda" and recipe.train.compile != "off"
    return cached_spec(recipe, lambda: _take_apart(recipe, compiled), compiled=compiled)


def _take_apart(recipe: Recipe, compiled: bool) -> ModelSpec:
    """What the recipe's model is made of; loads PyTorch and transformers."""
    with loading():
        from penstock.engine.hf.config import model_config, require_overrides
        from penstock.engine.model.anatomy import model_spec
        from penstock.engine.model.graph_size import find_graph_bytes

    require_overrides(recipe, recipe.data.tokenizer_vocab_size)
    config = model_config(recipe, recipe.data.tokenizer_vocab_size)
    spec = model_spec(config, recipe)
    if compiled:
        find_graph_bytes(spec, recipe.train.compute_dtype, compiled=True)
    return spec
