"""What would make a plan fit, and what would make it faster: changes of a recipe that were tried, never guessed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from msgspec import structs

from penstock.engine.config import parse_bytes
from penstock.engine.forecast.request import PlanRequest
from penstock.engine.forecast.search import SearchResult
from penstock.engine.machine.profile import Machine
from penstock.engine.plan.plan import gib
from penstock.engine.plan.planner import state_exceeds_disk
from penstock.storage.files.errors import BudgetError, UserError
from penstock.storage.files.units import least_text, size_text

_BFLOAT16 = {"train.gradient_dtype": "bfloat16"}
_ROUNDED = "gradients kept in bfloat16, rounded once after summing"
_TRIES = 12
"""Budgets that are raised after each other until a plan fits."""
MIN_GAIN = 1.02
"""Times as many tokens per second below which a change is not worth a word."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a recipe, or of the machine where no field of a recipe says it."""

    values: Mapping[str, Any]
    """Dotted field -> value, as --set takes it; empty for a change of the machine."""
    text: str

    def to_json(self) -> dict[str, Any]:
        values = {name: "none" if value is None else value for name, value in self.values.items()}
        return {"set": [f"{name}={value}" for name, value in values.items()], "text": self.text}


def fits(task: PlanRequest) -> bool:
    return task.refusal() is None


def fixes(task: PlanRequest, sizes: Mapping[str, int]) -> list[Change]:
    """The smallest changes that make a task fit which does not, each alone, in order of how little they take away.
    `sizes`: tier -> bytes that the machine has; a budget beyond them is a change of the machine."""
    result = [change for change in _single(task) if fits(task.changed(change.values))]
    return result + _budgets(task, sizes)


def nearest(task: PlanRequest, refusal: BudgetError, sizes: Mapping[str, int], least_context: int) -> list[Change]:
    """The least change of the recipe that makes a task fit which was refused, and of the machine: at most one of each.

    The quick part of `fixes`: of the recipe, gradients in bfloat16, fewer sequences in a step, and a context shorter by
    half, a quarter and so on but above `least_context`, in this order; each is tried where its least value fits.
    """
    result = [] if state_exceeds_disk(task.problem(task.chunks[0])) else _nearest_in_recipe(task, least_context)
    return result + _budgets(task, sizes, refusal)


def _nearest_in_recipe(task: PlanRequest, least_context: int) -> list[Change]:
    """At most one."""
    recipe, train = task.recipe, task.recipe.train
    alone = (train.replicas or 1) == 1
    if alone and train.gradient_dtype == "float32" and fits(task.changed(_BFLOAT16)):
        return [Change(_BFLOAT16, _ROUNDED)]
    shorter = _halves(recipe.data.sequence_length, max(2, least_context + 1))
    for name, values, text in (
        ("train.global_batch_size", _halves(train.global_batch_size, 1), "fewer sequences in a step"),
        ("data.sequence_length", shorter, "a shorter context"),
    ):
        least = next((changed for value in values[::-1] if (changed := _changed(task, name, value))), None)
        if least is not None and fits(least):
            return list(_least(task, name, values, text))
    return []


def _single(task: PlanRequest) -> Iterator[Change]:
    """Changes of one field, of each field the least that fits."""
    recipe, train, storage = task.recipe, task.recipe.train, task.recipe.storage
    if train.kv_window != "auto":
        yield Change({"train.kv_window": "auto"}, "let the plan decide whether keys and values stream")
    if train.activation_checkpointing not in ("auto", "full"):
        yield Change({"train.activation_checkpointing": "auto"}, "let the plan decide what is saved for backward")
    if train.gradient_dtype == "float32" and (train.replicas or 1) == 1:
        yield Change(_BFLOAT16, _ROUNDED)
    if storage.keep_last > 1:
        yield Change({"storage.keep_last": 1}, "keep the newest generation only")
    if train.chunk_tokens is not None:
        yield from _least(task, "train.chunk_tokens", _halves(train.chunk_tokens, 16), "shorter chunks")
    yield from _least(
        task, "train.micro_batch_size", _halves(train.micro_batch_size, 1), "fewer sequences in one stream"
    )
    yield from _least(task, "train.global_batch_size", _halves(train.global_batch_size, 1), "fewer sequences in a step")
    yield from _least(task, "data.sequence_length", _halves(recipe.data.sequence_length, 2), "a shorter context")
    size = parse_bytes(storage.part_bytes, "storage.part_bytes")
    sizes = [size_text(n) for n in _halves(size, 8192) if n % 8192 == 0]
    yield from _least(task, "storage.part_bytes", sizes, "smaller chunk files, and so smaller staging buffers")


def _halves(value: int, least: int) -> list[int]:
    """value / 2, value / 4, ... down to `least`."""
    result = []
    while value // 2 >= least:
        value //= 2
        result.append(value)
    return result


def _changed(task: PlanRequest, name: str, value: int | str) -> PlanRequest | None:
    """The task with that value; None where the recipe does not allow it."""
    try:
        return task.changed({name: value})
    except UserError:
        return None


def _least(task: PlanRequest, name: str, values: Iterable[int | str], text: str) -> Iterator[Change]:
    """The first of the values that fits."""
    for value in values:
        changed = _changed(task, name, value)
        if changed is not None and fits(changed):
            yield Change({name: value}, text)
            return


def _budgets(task: PlanRequest, sizes: Mapping[str, int], refusal: BudgetError | None = None) -> list[Change]:
    """Budgets that are large enough, each raised to what was missing, if there are; `refusal`: the task's, if known."""
    raised: dict[str, Any] = {}
    for _ in range(_TRIES):
        refusal = refusal if refusal is not None and not raised else task.changed(raised).refusal()
        if refusal is None:
            needed = {name: parse_bytes(size, name) for name, size in raised.items()}
            lacking = {name: size for name, size in needed.items() if size > sizes.get(name.partition(".")[2], 0)}
            needs = ", ".join(f"{gib(size)} of {_NAMES[name.partition('.')[2]]}" for name, size in needed.items())
            return [Change({}, f"a machine with {needs}") if lacking else Change(raised, f"budgets of {needs}")]
        if refusal.tier is None:
            break
        raised[f"budgets.{refusal.tier}"] = least_text(task.sharing(refusal.tier) * refusal.need_bytes)
    return []


_NAMES = {"gpu": "GPU memory", "ram": "RAM", "nvme": "disk"}


def best_change(
    task: PlanRequest, machine: Machine, result: SearchResult, tokens_per_step: int
) -> dict[str, Any] | None:
    """The one change that trains the most tokens per second more, tried by planning with it; None where none helps."""
    now = tokens_per_step / result.best.step_s
    best: tuple[float, dict[str, Any]] | None = None
    for change, other, on in _improvements(task, machine):
        try:
            tried = other.search(on, only=(result.best.chunk_tokens, result.best.choice))
        except BudgetError:
            continue
        scale = other.recipe.train.global_batch_size / task.recipe.train.global_batch_size
        rate = tokens_per_step * scale / tried.best.step_s
        if rate >= now * MIN_GAIN and (best is None or rate > best[0]):
            gains = {"step_s": tried.best.step_s, "tokens_per_s": rate, "gain": rate / now}
            best = rate, change.to_json() | gains
    return None if best is None else best[1]


def _improvements(task: PlanRequest, machine: Machine) -> Iterator[tuple[Change, PlanRequest, Machine]]:
    train, budgets = task.recipe.train, task.budgets
    alone = (train.replicas or 1) == 1
    if alone and train.gradient_dtype == "float32":
        yield Change(_BFLOAT16, "gradients kept in bfloat16"), task.changed(_BFLOAT16), machine
    doubled = {"train.global_batch_size": 2 * train.global_batch_size}
    yield Change(doubled, "twice as many sequences in a step"), task.changed(doubled), machine
    ram = replace(budgets, ram=2 * budgets.ram)
    yield Change({}, f"twice the RAM, {gib(2 * task.ranks * budgets.ram)}"), replace(task, budgets=ram), machine
    gpu = replace(budgets, gpu=2 * budgets.gpu)
    yield Change({}, f"twice the GPU memory, {gib(2 * budgets.gpu)}"), replace(task, budgets=gpu), machine
    drives = structs.replace(machine, drives=machine.drives * 2)
    yield Change({}, f"{len(drives.drives)} drives instead of {len(machine.drives)}"), task, drives
