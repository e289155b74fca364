"""`penstock bench planned`: what the recipes would do on machines that one does not own, planned and not measured.

Four lists of forecasts, each a recipe on a preset: every recipe on its own machine and on every other preset, the
cases of `app/bench/published.py` with the batch that was published, long and short contexts with all of a GPU's memory
and with 24 GiB of it, and a grid of models and contexts (the heat map, drawn by `app/bench/heatmap.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from penstock.app.bench.heatmap import draw
from penstock.app.bench.process import markdown_row, markdown_table, require_folders, require_matplotlib
from penstock.app.bench.published import PUBLISHED, Published
from penstock.app.planning.fit import STEP_TOKENS
from penstock.app.planning.spread import spread
from penstock.app.recipes import shipped
from penstock.app.recipes.recipe import load_recipe
from penstock.engine.config import BudgetConfig, DataConfig, Recipe
from penstock.engine.machine.platforms import usable_cpus
from penstock.storage.files.errors import UserError
from penstock.storage.files.units import bytes_text, seconds_text

GRID_MODELS = {
    "7B": "7b_512k",
    "14B": "14b_workstation",
    "32B": "32b_512k",
    "70B": "70b_gh200",
    "120B": "120b_gh200",
    "120B MoE": "120b_moe",
}
"""Row of the heat map -> recipe whose model it is."""
GRID_CONTEXTS = tuple(1 << power for power in range(12, 21, 2))
"""4k to 1M tokens."""
GRID_STEP_TOKENS = STEP_TOKENS
"""Tokens of a step of the grid, in as many sequences; one sequence where that is longer."""
SMALL_GPU, SMALL_GPU_MACHINE = "24GiB", "h200-1500"
SMALL_GPU_CASES = (
    ("8b_8k", 8192, 64, 2),
    ("7b_512k", 524_288, 1, 1),
    ("8b_8k", 524_288, 1, 1),
    ("8b_8k", 1_048_576, 1, 1),
    ("32b_512k", 8192, 16, 1),
)
"""(recipe, context, sequences of a step, sequences of a micro-batch) of what is planned with all of a GPU's memory and
with SMALL_GPU of it: the models and contexts that `penstock bench step` measures both ways."""

ForecastFn = Callable[[Recipe, str], dict[str, Any]]
"""The JSON object of a forecast of a recipe on a preset."""


@dataclass(frozen=True, slots=True)
class Job:
    """One forecast to make, and what it is for."""

    kind: str
    """recipe, published, memory or grid."""
    label: str
    recipe: Recipe
    machine: str
    own: bool = False
    """Whether the recipe is written for this machine."""
    published: Published | None = None


def bench_planned(out: Path, *, forecast_fn: ForecastFn | None = None, processes: int | None = None) -> dict[str, Any]:
    """Plan everything, on all cores or in so many `processes`; write planned.md and planned.png into `out`.

    Returns the report. Raises UserError for a missing folder and where matplotlib is not installed, before it begins.
    """
    from penstock.engine.machine.presets import PRESETS

    require_folders(out)
    require_matplotlib("the heat map")
    todo = list(jobs(load_recipes(shipped.FOLDER), list(PRESETS)))
    rows = []
    processes = processes or usable_cpus()
    for number, row in enumerate(_forecasts(todo, forecast_fn or _forecast, processes), start=1):
        rows.append(row)
        print(f"{number}/{len(todo)} {_progress(row)}", file=sys.stderr, flush=True)
    report = report_of(rows)
    draw(report["grid"], list(PRESETS), out / "planned.png")
    (out / "planned.md").write_text(markdown(report))
    print(f"{sum(row['fits'] for row in rows)} of {len(rows)} plans fit; written to {out / 'planned.md'}")
    return report


def load_recipes(folder: Path) -> dict[str, Recipe]:
    """File name without ending -> recipe, of all Python files in `folder`."""
    return {path.stem: load_recipe(path) for path in sorted(folder.glob("*.py"))}


def jobs(recipes: Mapping[str, Recipe], machines: Sequence[str]) -> Iterator[Job]:
    """Every forecast of the report, in its order. Raises UserError where a recipe is missing that the grid needs."""
    for label, recipe in recipes.items():
        # The recipe's own budgets and drives are those of its machine; elsewhere it may use what is there.
        for machine in sorted(machines, key=lambda name: name != recipe.machine):
            own = machine == recipe.machine
            yield Job("recipe", label, recipe if own else unbound(recipe), machine, own)
    for figure in PUBLISHED:
        if figure.recipe in recipes and figure.machine in machines:
            recipe = batched(recipes[figure.recipe], figure.context, figure.sequences, figure.micro_batch)
            yield Job("published", figure.recipe, recipe, figure.machine, published=figure)
    for name, context, sequences, micro_batch in SMALL_GPU_CASES:
        if name in recipes and SMALL_GPU_MACHINE in machines:
            whole = batched(recipes[name], context, sequences, micro_batch)
            for recipe in (whole, replace(whole, budgets=BudgetConfig(gpu=SMALL_GPU))):
                yield Job("memory", name, recipe, SMALL_GPU_MACHINE)
    for label, name in GRID_MODELS.items():
        if name not in recipes:
            raise UserError(f"recipes/{name}.py: missing; the heat map takes the shape of {label} from it")
        for context in GRID_CONTEXTS:
            for machine in machines:
                sequences = max(1, GRID_STEP_TOKENS // context)
                yield Job("grid", label, batched(recipes[name], context, sequences), machine)


def unbound(recipe: Recipe) -> Recipe:
    """The recipe without budgets and folders of its own."""
    return replace(recipe, budgets=BudgetConfig(), storage=replace(recipe.storage, nvme=None))


def batched(recipe: Recipe, context: int, sequences: int, micro_batch: int = 1) -> Recipe:
    """The recipe's model, optimizer and precision with another batch, in micro-batches of so many sequences; everything
    else is the plan's to choose.

    The rotary range is the context: a scaling rule changes no step's time.
    """
    free = unbound(recipe)
    overrides = {name: value for name, value in free.model.overrides.items() if name != "max_position_embeddings"}
    overrides["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
    return replace(
        free,
        model=replace(free.model, path=None, max_position=None, overrides=overrides),
        data=DataConfig(source="random", sequence_length=context),
        train=replace(
            free.train,
            global_batch_size=sequences,
            micro_batch_size=micro_batch,
            chunk_tokens=None,
            activation_checkpointing="auto",
            kv_window="auto",
        ),
    )


def _forecast(recipe: Recipe, machine: str) -> dict[str, Any]:
    """The forecast of a recipe on a preset, or its refusal without looking for what would make it fit."""
    from penstock.app.planning.plan import forecast_or_refusal, recipe_task

    profile, task = recipe_task(recipe, machine)
    return forecast_or_refusal(task, profile)


def row_of(job: Job, forecast_fn: ForecastFn) -> dict[str, Any]:
    """What the report keeps of a job's forecast; where it cannot be planned at all, the reason."""
    row = {
        "kind": job.kind,
        "label": job.label,
        "machine": job.machine,
        "own": job.own,
        "context": job.recipe.data.sequence_length,
        "tokens_per_step": job.recipe.data.sequence_length * job.recipe.train.global_batch_size,
    }
    if job.published is not None:
        figure = job.published
        row |= {"system": figure.system, "published": figure.tokens_per_s}
        row |= {"hardware": figure.hardware, "source": figure.source}
    try:
        return row | figures(forecast_fn(job.recipe, job.machine))
    except UserError as error:
        return row | {"fits": False, "reason": str(error)}


def _forecasts(todo: Sequence[Job], forecast_fn: ForecastFn, processes: int) -> Iterator[dict[str, Any]]:
    """The rows in order, made by so many processes."""
    return spread(partial(row_of, forecast_fn=forecast_fn), todo, processes)


def figures(forecast: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a forecast that the report shows."""
    if not forecast["fits"]:
        refusal = forecast["refusal"]
        short = refusal.get("short_bytes")
        by = "" if short is None else f" short by {bytes_text(short)}"
        return {"fits": False, "reason": f"{refusal['tier']}{by}"}
    drives = forecast["run"]["drives"]
    return {
        "fits": True,
        **{name: forecast[name] for name in ("step_s", "tokens_per_s", "bound_by", "mfu", "hfu", "chunk_tokens")},
        "peak_bytes": {name: tier["peak_bytes"] for name, tier in forecast["tiers"].items()},
        "written_bytes_per_step": sum(drive["bytes_written_per_step"] for drive in drives),
    }


def report_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "grid_step_tokens": GRID_STEP_TOKENS,
        "recipes": [row for row in rows if row["kind"] == "recipe"],
        "published": [row for row in rows if row["kind"] == "published"],
        "memory": [row for row in rows if row["kind"] == "memory"],
        "grid": [row for row in rows if row["kind"] == "grid"],
    }


def _progress(row: Mapping[str, Any]) -> str:
    what = f"{row['label']}, {row['context']:,} tokens on {row['machine']}"
    return f"{what}: {row['tokens_per_s']:,.0f} tokens/s" if row["fits"] else f"{what}: {row['reason']}"


# ---------------------------------------------------------------------- planned.md

_COLUMNS = ("machine", "step", "tokens/s", "bound by", "MFU", "GPU", "RAM", "NVMe", "written per step")
_INTRO = """# What the recipes would do on other machines

**Planned from data sheets, not measured.** {date}. How plans compare with runs is in [planning.md](planning.md).

```
penstock bench planned
```
made this page and the heat map. Sizes are binary; NVMe holds two generations of the state, and the last good one where
it fits. "Written per step" is what a step writes to all drives together.
"""
_ELSEWHERE = """## Tokens/s on every machine

"-" does not fit. `penstock plan RECIPE --machine NAME` shows the whole plan, or what is missing.
"""
_GRID = """
## Models and contexts

![tokens/s by model, context and machine](planned.png)

Tokens/s of a step of {step_tokens:,} tokens (of one sequence where that is longer), all parameters trained. The letter
is what bounds the step: C compute, H host to GPU, D GPU to host, O optimizer, R NVMe reads, W NVMe writes. Grey: does
not fit.
"""
_PUBLISHED = """
## Compared with published figures

Penstock's are **planned, not measured**, with float32 master weights and moments (14 bytes a parameter); theirs are as
published, with bfloat16 weights updated in place (MegaTrain), everything in bfloat16 (ml_dataflow), master weights and
moments in bfloat16 (LLMQ), or float32 master weights and moments in RAM (LLaMA-Factory on DeepSpeed ZeRO-3). A plan
that is faster than a measurement proves nothing until it is measured, too.

| case | preset | Penstock, planned tokens/s | bound by | published tokens/s | by | on | source |
|---|---|---|---|---|---|---|---|
"""
_SOURCES = """
MegaTrain's tokens/s are tokens over step time of its long-context table. ml_dataflow's are the rows that its author
recorded (github.com/als244/ml_dataflow, `bench/reproduce_results/recorded_data`), with flash-attn's slower
deterministic backward; its H100 has 989 TFLOP/s, the preset's PCIe card 756. LLMQ's and LLaMA-Factory's are from
github.com/IST-DASLab/llmq, on a machine whose RAM is not stated; they are planned with 256 GB.
"""
_MEMORY = """## With {gpu} of the GPU's memory

On {machine}. Where all of the memory fits the graphs of a group of micro-batches, nothing is recomputed
([groups.md](../decisions/groups.md)).
"""


def markdown(report: Mapping[str, Any]) -> str:
    lines = [_INTRO.format(date=report["date"]), *_own_machines(report["recipes"])]
    lines += [_ELSEWHERE, *_elsewhere(report["recipes"]), ""]
    lines.append(_GRID.format(step_tokens=report["grid_step_tokens"]).strip() + "\n")
    lines.append(_PUBLISHED.strip())
    lines += [_published_row(row) for row in report["published"]]
    lines.append(_SOURCES)
    if report["memory"]:
        lines += [
            _MEMORY.format(gpu=SMALL_GPU.replace("GiB", " GiB"), machine=SMALL_GPU_MACHINE),
            *_memory(report["memory"]),
        ]
    return "\n".join(lines).rstrip() + "\n"


def _elsewhere(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Tokens/s of every recipe that is written for a machine, on all machines."""
    rates: dict[str, dict[str, str]] = {}
    for row in rows:
        rates.setdefault(row["label"], {})[row["machine"]] = _rate(row) if row["fits"] else "-"
    machines = sorted({row["machine"] for row in rows})
    own = [row["label"] for row in rows if row["own"]]
    return markdown_table(("recipe", *machines), [(label, *map(rates[label].get, machines)) for label in own])


def _memory(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What all of the memory reaches beside what a part of it does; `rows` alternate between the two."""
    found = []
    for whole, part in zip(rows[::2], rows[1::2], strict=True):
        rates = [_rate(row) if row["fits"] else f"does not fit ({row['reason']})" for row in (whole, part)]
        both = whole["fits"] and part["fits"]
        share = f"{part['tokens_per_s'] / whole['tokens_per_s']:.2f}" if both else "n/a"
        found.append((_case(whole), *rates, share))
    return markdown_table(("case", "all of it, tokens/s", f"{SMALL_GPU}, tokens/s", "share"), found)


def _case(row: Mapping[str, Any]) -> str:
    return f"{row['label']}: {row['tokens_per_step'] // row['context']} x {row['context']:,}"


def _own_machines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Every recipe on the machine that it is written for."""
    found = [
        (row["label"], f"{row['context']:,}, {row['tokens_per_step']:,}", *_cells(row)) for row in rows if row["own"]
    ]
    table = markdown_table(("recipe", "context, tokens a step", *_COLUMNS), found)
    return ["## Each on its own machine", "", *table, ""]


def _rate(row: Mapping[str, Any]) -> str:
    return f"{row['tokens_per_s']:,.{0 if row['tokens_per_s'] >= 10 else 2}f}"


def _cells(row: Mapping[str, Any]) -> list[str]:
    name = f"**{row['machine']}**" if row["own"] else row["machine"]
    if not row["fits"]:
        return [name, f"does not fit: {row['reason']}", *[""] * (len(_COLUMNS) - 2)]
    peak = row["peak_bytes"]
    mfu = "n/a" if row["mfu"] is None else f"{row['mfu']:.1%}"
    cells = [name, seconds_text(row["step_s"]), _rate(row), row["bound_by"], mfu]
    cells += [bytes_text(peak[tier]) if tier in peak else "n/a" for tier in ("gpu", "ram", "nvme")]
    return [*cells, bytes_text(row["written_bytes_per_step"])]


def _published_row(row: Mapping[str, Any]) -> str:
    ours = [_rate(row), row["bound_by"]] if row["fits"] else [f"does not fit ({row['reason']})", "-"]
    cells = [_case(row), row["machine"], *ours, row["published"], row["system"], row["hardware"], row["source"]]
    return markdown_row(cells)
