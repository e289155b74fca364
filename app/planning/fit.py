"""`penstock fit`: which published models this machine can train, at which contexts, how fast and at what cost.

Each cell is what `penstock plan` says of the cell's recipe with nothing else running. Cells are planned by a process
per core; nothing of it needs PyTorch.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.app.console.loading import uncollected
from penstock.app.planning.catalogue import KnownModel, known_model, matching
from penstock.app.planning.spread import spread
from penstock.engine.config import (
    MOST_STEPS,
    MOST_TOKENS,
    PREFERENCES,
    SAMPLED,
    AfterConfig,
    BudgetConfig,
    DataConfig,
    GrpoConfig,
    Recipe,
    StorageConfig,
    TrainConfig,
    nearest,
)
from penstock.engine.machine.platforms import usable_cpus
from penstock.engine.machine.profile import Machine
from penstock.storage.files.errors import BudgetError, UserError
from penstock.storage.files.units import tokens_text
from penstock.storage.files.untrusted import open_regular, real_path

if TYPE_CHECKING:
    from penstock.engine.forecast.request import PlanRequest

STEP_TOKENS = 262_144
"""Tokens of a step, in as many sequences; one sequence where that is longer."""
CONTEXTS = (8_192, 65_536, 524_288, 1_048_576)
TOKENS = 10_000_000
_CHECKPOINT_EVERY = 25
"""Steps, as in the shipped recipes."""
TEXT_BYTES_PER_TOKEN = 4
"""Of English text, about, with vocabularies of 100,000 entries and more."""
_SAMPLE_BYTES = 1 << 22
_REWARD = "rewards.py:reward"
"""Stands for a reward function of the user's, which no plan needs."""
_BINARY = {"": 1, "k": 1024, "m": 1024**2}
"""Of contexts."""
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_LEAST_CONTEXT = 1024
"""Below which a shorter context is no advice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What is asked."""

    machine: Machine
    machine_name: str
    """Preset or profile file, as a recipe's `machine` takes it; empty for this machine."""
    models: tuple[str, ...]
    contexts: tuple[int, ...]
    """Ascending."""
    tokens: int
    """To train on."""
    data: str | None = None
    """The file that they are in."""
    source: str = ""
    """How their number came about, in words; empty where it was given."""
    objective: str = "next_token"
    """train.objective."""
    gpus: int = 1

    @property
    def num_cells(self) -> int:
        return len(self.models) * len(self.contexts)

    def to_json(self) -> dict[str, Any]:
        from penstock.engine.machine.budgets import machine_budgets

        machine = self.machine
        budgets = machine_budgets(BudgetConfig(), machine)
        return {
            "budgets": {"gpu": budgets.gpu, "ram": budgets.ram},
            "machine": {"name": self.machine_name, "title": machine.name, "source": machine.source},
            "power_w": machine.power_w,
            "models": list(self.models),
            "contexts": list(self.contexts),
            "step_tokens": STEP_TOKENS,
            "tokens": self.tokens,
            "tokens_from": self.source,
            "objective": self.objective,
            "gpus": self.gpus,
        }


def ask(
    *,
    machine: str | None = None,
    models: str | None = None,
    contexts: str | None = None,
    tokens: str | None = None,
    data: Path | None = None,
    objective: str = "next_token",
    gpus: int | None = None,
) -> Question:
    """The question that a command's options make. Raises UserError for what they cannot mean."""
    from penstock.engine.machine.presets import find_machine, machine_here

    if tokens is not None and data is not None:
        raise UserError("--tokens and --data: both set the number of tokens; give only one")
    lengths = CONTEXTS if contexts is None else context_sizes(contexts, "--contexts")
    number = TOKENS if tokens is None else parse_count(tokens, "--tokens", _DECIMAL, MOST_STEPS)
    source = ""
    if data is not None:
        number, source = count_tokens(data)
    on = find_machine(machine) if machine else machine_here(Path.cwd())
    return Question(
        machine=on,
        machine_name=machine or "",
        models=tuple(matching(models)),
        contexts=lengths,
        tokens=number,
        data=None if data is None else str(data),
        source=source,
        objective=known_objective(objective),
        gpus=gpus or on.gpus,
    )


def known_objective(name: str) -> str:
    """`name`, a value of train.objective. Raises UserError with the nearest for an unknown one."""
    from penstock.engine.objectives.base import OBJECTIVES

    if name not in OBJECTIVES:
        raise UserError(f"--objective: '{name}' is unknown; {nearest(name, OBJECTIVES)}")
    return name


def context_sizes(text: str, option: str) -> tuple[int, ...]:
    """Contexts such as 8k,64k, ascending, each of at least 2 tokens. Raises UserError naming the option."""
    result = {parse_count(one, option, _BINARY, MOST_TOKENS): one for one in text.split(",")}
    if (least := min(result)) < 2:
        raise UserError(f"{option} {result[least]}: a context needs at least 2 tokens")
    return tuple(sorted(result))


def parse_count(text: str, option: str, suffixes: dict[str, int], most: int) -> int:
    """A number of things such as 10M, at least one. Raises UserError naming the option."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]?)\s*", text)
    unit = suffixes.get(match.group(2).lower()) if match else None
    number = round(float(match.group(1)) * unit) if match and unit else 0
    if not 1 <= number <= most:
        raise UserError(f"{option} {text}: not a number from 1 to {most:,}; write for example 8192, 64k or 10M")
    return number


def count_tokens(path: Path) -> tuple[int, str]:
    """About how many tokens a file has, and how that was found; of a .jsonl file its first 4 MiB say which share is in
    `text` fields. Raises UserError where it cannot be read."""
    try:
        with open(open_regular(real_path(path)), "rb") as file:
            size, head = os.fstat(file.fileno()).st_size, file.read(_SAMPLE_BYTES)
    except OSError as error:
        raise UserError(f"--data {path}: cannot be read ({error.strerror}); give a file") from None
    share = _text_share(head, str(path)) if path.suffix == ".jsonl" else 1.0
    tokens = round(size * share / TEXT_BYTES_PER_TOKEN)
    if tokens < 1:
        raise UserError(f"--data {path}: contains no text")
    what = "text fields" if path.suffix == ".jsonl" else "text"
    return tokens, f"{path.name}, estimated at {TEXT_BYTES_PER_TOKEN} bytes of its {what} a token"


def _text_share(head: bytes, where: str) -> float:
    """Bytes of `text` fields over all bytes, of the whole lines at the start of a JSONL file. Raises UserError."""
    import json

    lines = head.splitlines(keepends=True)
    if len(lines) > 1 and len(head) == _SAMPLE_BYTES:
        lines.pop()
    text = 0
    for number, line in enumerate(lines, start=1):
        try:
            result = json.loads(line)["text"] if line.strip() else ""
            text += len(result.encode())
        except (ValueError, TypeError, KeyError, AttributeError):
            raise UserError(f'--data {where}: line {number} is not a JSON object with a "text"') from None
    return text / max(1, sum(map(len, lines)))


# ---------------------------------------------------------------------- the cells


def cells(question: Question) -> Iterator[dict[str, Any]]:
    """The cells, model by model and context by context, each as soon as it and those before it are planned."""
    todo = [(question, model, context) for model in question.models for context in question.contexts]
    yield from spread(_planned, todo, usable_cpus())


def cell_recipe(question: Question, model: KnownModel, context: int) -> Recipe:
    """What is planned in a cell, and what trains it. The model's folder is looked for below models/."""
    sequences, multiple = max(1, STEP_TOKENS // context), question.gpus
    objective, grpo, data = question.objective, GrpoConfig(), DataConfig(source="jsonl", path=question.data)
    if objective in SAMPLED:
        multiple = math.lcm(multiple, grpo.num_generations)
        grpo = GrpoConfig(reward=[_REWARD], max_completion_length=context // 2)
        data = DataConfig(source="prompts", path=question.data)
    elif objective in PREFERENCES:
        source: Any = "unpaired_preference" if objective == "kto" else "preference"
        data = DataConfig(source=source, path=question.data, packing="best_fit")
    sequences = -(-sequences // multiple) * multiple
    steps = -(-question.tokens // (sequences * context))
    return Recipe(
        name=f"{model.name}-{tokens_text(context).replace(',', '')}".lower(),
        machine=question.machine_name,
        model=model.reaching(context),
        data=replace(data, sequence_length=context),
        grpo=grpo,
        train=TrainConfig(
            steps=steps,
            objective=objective,
            global_batch_size=sequences,
            lr=1e-5,
            warmup_steps=min(10, steps),
            gradient_dtype=model.gradient_dtype if question.gpus == 1 else "float32",
            gpus=question.gpus if max(question.gpus, question.machine.gpus) > 1 else None,
        ),
        storage=StorageConfig(checkpoint_every=_CHECKPOINT_EVERY),
        after=AfterConfig(export=True),
    )


def _planned(todo: tuple[Question, str, int]) -> dict[str, Any]:
    with uncollected():
        return plan_cell(*todo)


def plan_cell(question: Question, name: str, context: int) -> dict[str, Any]:
    """One cell: the figures of its forecast, or why it does not fit."""
    from penstock.app.planning.plan import machine_task
    from penstock.app.recipes.recipe import changes
    from penstock.engine.forecast.flops import active_params
    from penstock.engine.forecast.report import forecast

    model, on = known_model(name), question.machine.of_rank(question.gpus)
    recipe = cell_recipe(question, model, context)
    task = machine_task(recipe, question.machine, model.spec)
    cell = {
        "model": name,
        "context": context,
        "params": model.spec.num_params,
        "active_params": active_params(model.spec),
        "tokens_per_step": context * recipe.train.global_batch_size,
        "gradient_dtype": recipe.train.gradient_dtype,
        "stretched": model.is_stretched(context),
        "recipe": changes(recipe),
    }
    try:
        result = task.search(on)
    except BudgetError as error:
        return cell | {"fits": False} | _refusal(question, model, task, error)
    return cell | {"fits": True} | _figures(question, forecast(task, on, result))


def _figures(question: Question, forecast: dict[str, Any]) -> dict[str, Any]:
    """What training on all tokens takes: time, bytes written to all drives with commits, the endurance used of the one
    that wears most, and energy, the GPU's board always at its power limit. None: not known."""
    hours = question.tokens / forecast["tokens_per_s"] / 3600
    if question.objective != "next_token":  # passes of the reference model, and sampling, count as well
        hours = forecast["run"]["seconds"] / 3600
    drives = forecast["run"]["drives"]
    shares = [drive["endurance_share"] for drive in drives if drive["endurance_share"] is not None]
    power = question.machine.power_w
    return {
        **{name: forecast[name] for name in ("step_s", "tokens_per_s", "bound_by", "mfu", "chunk_tokens", "steps")},
        "hours": hours,
        "written_bytes": sum(drive["bytes_written"] for drive in drives),
        "endurance_share": max(shares, default=None),
        "kwh_at_most": None if power is None else question.gpus * power * hours / 1000,
        "peak_bytes": {tier: result["peak_bytes"] for tier, result in forecast["tiers"].items()},
    }


def _refusal(question: Question, model: KnownModel, task: PlanRequest, error: BudgetError) -> dict[str, Any]:
    """What is short; of a model's first context that does not fit, `changes` that would each make it fit."""
    from penstock.app.planning.plan import machine_task
    from penstock.engine.forecast import advice

    short = task.sharing(error.tier) * (error.need_bytes - error.budget_bytes)
    result = {"tier": error.tier, "short_bytes": short, "message": str(error)}
    context = task.recipe.data.sequence_length
    shorter = max((length for length in question.contexts if length < context), default=None)
    if shorter is not None:
        before = machine_task(cell_recipe(question, model, shorter), question.machine, model.spec)
        if not advice.fits(before):
            return result
    sizes = {"gpu": task.budgets.gpu, "ram": task.ranks * task.budgets.ram, "nvme": task.budgets.nvme or 0}
    changes = advice.nearest(task, error, sizes, shorter or _LEAST_CONTEXT - 1)
    return result | {"changes": [change.to_json() for change in changes]}
