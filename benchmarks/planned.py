"""What the recipes would do on machines that one does not own, planned and not measured: docs/results/planned.md.

Four lists of forecasts, each a recipe on a preset: every recipe on every preset, the cases of PUBLISHED with the
batch that was published, long and short contexts with all of a GPU's memory and with 24 GiB of it, and a grid of models
and contexts (the heat map).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.parts.process import require_matplotlib
from penstock.app.bench.process import markdown_table
from penstock.app.planning.fit import STEP_TOKENS
from penstock.app.planning.plan import plan_stages
from penstock.app.planning.spread import spread
from penstock.app.recipes import shipped
from penstock.app.recipes.recipe import load_recipe
from penstock.engine.config import BudgetConfig, DataConfig, Recipe
from penstock.engine.machine.platforms import usable_cpus
from penstock.engine.machine.presets import PRESETS
from penstock.storage.files.errors import UserError
from penstock.storage.files.units import bytes_text, seconds_text, tokens_text

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
ALONE = [name for name, machine in PRESETS.items() if machine.gpus == 1]
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


@dataclass(frozen=True, slots=True)
class Published:
    """One published figure, and what to plan beside it."""

    system: str
    recipe: str
    """Recipe whose model it is, by file name."""
    machine: str
    """The preset nearest to its machine."""
    context: int
    sequences: int
    """Of one step."""
    tokens_per_s: str
    """As published, or its range."""
    hardware: str
    """What it was measured on, with the RAM that was used."""
    source: str
    """A paper, or a file of recorded results."""
    micro_batch: int = 1
    """Sequences of a micro-batch."""


_MEGATRAIN, _PAPER, _FLOW = "MegaTrain", "arXiv 2604.05091", "ml_dataflow"
_LLMQ, _FACTORY, _BENCHMARKS = "LLMQ", "LLaMA-Factory, ZeRO-3 offload", "llmq benchmarks/4090x1.md"
_4090 = "RTX 4090, RAM not stated"
_SXM = "H100 SXM5 of 80 GB"
_GH200 = "GH200 of 96 GB, 480 GB"
_8B, _32B, _H100, _5090 = "8b_8k", "32b_512k", "h100-pcie-512", "rtx5090-192"
_7B, _14B, _RTX = "7b_512k", "14b_workstation", "rtx4090-256"

PUBLISHED = (
    Published(_MEGATRAIN, _7B, "gh200-480", 262_144, 1, "1,110", _GH200, _PAPER),
    Published(_MEGATRAIN, _7B, "gh200-480", 524_288, 1, "602", _GH200, _PAPER),
    Published(_FLOW, _8B, _H100, 8192, 68, "11,280", f"{_SXM}, 65 GB", "h100_8b_short_results.csv"),
    Published(
        _FLOW, _8B, _H100, 524_288, 1, "928 to 1,128", f"{_SXM}, 256 to 356 GB", "h100_8b_extra_long_results.csv"
    ),
    Published(_FLOW, _8B, _H100, 1_048_576, 1, "480 to 506", f"{_SXM}, 464 to 496 GB", "h100_8b_1m_results.csv"),
    Published(_FLOW, _32B, _H100, 8192, 42, "2,430 to 2,594", f"{_SXM}, 256 to 320 GB", "h100_32b_short_results.csv"),
    Published(_FLOW, _32B, _H100, 262_144, 1, "599 to 642", f"{_SXM}, 464 to 496 GB", "h100_32b_long_results.csv"),
    Published(_FLOW, _8B, _5090, 8192, 14, "3,055 to 3,175", "RTX 5090, 64 to 72 GB", "rtx5090_8b_short_results.csv"),
    Published(_FLOW, _8B, _5090, 131_072, 1, "675 to 680", "RTX 5090, 128 to 160 GB", "rtx5090_8b_long_results.csv"),
    Published(_FLOW, _8B, _5090, 262_144, 1, "323", "RTX 5090, 160 GB", "rtx5090_8b_long_results.csv"),
    Published(_FLOW, _8B, "rtx3090-64", 8192, 5, "970 to 986", "RTX 3090, 64 GB", "rtx3090_8b_short_results.csv"),
    Published(_LLMQ, _7B, _RTX, 1024, 512, "2,777", _4090, _BENCHMARKS, micro_batch=16),
    Published(_FACTORY, _7B, _RTX, 1024, 512, "2,523", _4090, _BENCHMARKS, micro_batch=32),
    Published(_LLMQ, _14B, _RTX, 1024, 512, "1,348", _4090, _BENCHMARKS, micro_batch=32),
    Published(_FACTORY, _14B, _RTX, 1024, 520, "1,135", _4090, _BENCHMARKS, micro_batch=20),
)


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


def main(page: Path = Path("docs/results/planned.md")) -> None:
    """Plan everything on all cores, minutes; write the tables into the page, and planned.png beside it."""
    require_matplotlib()
    text, todo = page.read_text(), list(jobs(load_recipes(), ALONE))
    rows = []
    for number, row in enumerate(spread(row_of, todo, usable_cpus()), start=1):
        rows.append(row)
        print(f"{number}/{len(todo)} {_progress(row)}", file=sys.stderr, flush=True)
    draw([row for row in rows if row["kind"] == "grid"], ALONE, page.with_suffix(".png"))
    page.write_text(with_tables(text, rows))
    print(f"{sum(row['fits'] for row in rows)} of {len(rows)} plans fit; written to {page}")


def load_recipes() -> dict[str, Recipe]:
    """File name without ending -> shipped recipe."""
    return {path.stem: load_recipe(path) for path in sorted(shipped.FOLDER.glob("*.py"))}


def jobs(recipes: Mapping[str, Recipe], machines: Sequence[str]) -> Iterator[Job]:
    """Every forecast of the report, in its order. Raises UserError where a recipe is missing that the grid needs."""
    for label, recipe in recipes.items():
        # The recipe's own budgets and drives are those of its machine; elsewhere it may use what is there.
        for machine in machines if recipe.machine else ():
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
                sequences = max(1, STEP_TOKENS // context)
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


def row_of(job: Job) -> dict[str, Any]:
    """What the page has of a job's forecast; where it cannot be planned or does not fit, the reason."""
    row = {
        "kind": job.kind,
        "label": job.label,
        "machine": job.machine,
        "own": job.own,
        "context": job.recipe.data.sequence_length,
        "tokens_per_step": job.recipe.data.sequence_length * job.recipe.train.global_batch_size,
        "published": job.published,
    }
    try:
        return row | figures(forecast(job.recipe, job.machine))
    except UserError as error:
        return row | {"fits": False, "reason": str(error)}


def forecast(recipe: Recipe, machine: str) -> dict[str, Any]:
    """The JSON object of a forecast, or of its refusal without looking for what would make it fit."""
    return next(plan_stages(recipe, machine))


def figures(forecast: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a forecast that the page shows."""
    if not forecast["fits"]:
        refusal = forecast["refusal"]
        short = refusal.get("short_bytes")
        by = "" if short is None else f" short by {bytes_text(short)}"
        return {"fits": False, "reason": f"{refusal['tier']}{by}"}
    return {
        "fits": True,
        **{name: forecast[name] for name in ("step_s", "tokens_per_s", "bound_by", "mfu")},
        "peak_bytes": {name: tier["peak_bytes"] for name, tier in forecast["tiers"].items()},
        "written_bytes_per_step": sum(drive["bytes_written_per_step"] for drive in forecast["run"]["drives"]),
    }


def _progress(row: Mapping[str, Any]) -> str:
    what = f"{row['label']}, {row['context']:,} tokens on {row['machine']}"
    return f"{what}: {row['tokens_per_s']:,.0f} tokens/s" if row["fits"] else f"{what}: {row['reason']}"


# ---------------------------------------------------------------------- the page


def with_tables(text: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """The page with new rows between its marks, `<!-- rows: KIND -->` and `<!-- end -->`; the words are its own."""
    recipes, published, memory = ([row for row in rows if row["kind"] == kind] for kind in KINDS)
    mine = [row for row in recipes if row["own"]]
    own = [(row["label"], f"{row['context']:,}, {row['tokens_per_step']:,}", *_cells(row)) for row in mine]
    tables = {
        "own": markdown_table(("recipe", "context, tokens a step", *_COLUMNS), own),
        "elsewhere": _elsewhere(recipes),
        "published": markdown_table(_PUBLISHED_COLUMNS, map(_published_cells, published)),
        "memory": markdown_table(_MEMORY_COLUMNS, map(_memory_cells, memory[::2], memory[1::2])),
    }
    for name, lines in tables.items():
        begin, end = f"<!-- rows: {name} -->\n", "<!-- end -->"
        before, mark, after = text.partition(begin)
        if not mark:
            raise UserError(f"the page has no line {begin.strip()}")
        text = before + begin + "\n".join([*lines, end]) + after.partition(end)[2]
    return text


KINDS = ("recipe", "published", "memory")
_COLUMNS = ("machine", "step", "tokens/s", "bound by", "MFU", "GPU", "RAM", "NVMe", "written per step")
_PUBLISHED_COLUMNS: tuple[str, ...] = ("case", "preset", "Penstock, planned tokens/s", "bound by", "published tokens/s")
_PUBLISHED_COLUMNS += ("by", "on", "source")
_MEMORY_COLUMNS = ("case", "all of it, tokens/s", f"{SMALL_GPU}, tokens/s", "share")


def _elsewhere(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Tokens/s of every recipe on all machines."""
    rates: dict[str, dict[str, str]] = {}
    for row in rows:
        rates.setdefault(row["label"], {})[row["machine"]] = _rate(row) if row["fits"] else "-"
    machines = sorted({row["machine"] for row in rows})
    return markdown_table(("recipe", *machines), [(name, *map(result.get, machines)) for name, result in rates.items()])


def _memory_cells(whole: Mapping[str, Any], part: Mapping[str, Any]) -> tuple[str, ...]:
    """What all of the memory reaches beside what a part of it does."""
    both = whole["fits"] and part["fits"]
    share = f"{part['tokens_per_s'] / whole['tokens_per_s']:.2f}" if both else "n/a"
    return _case(whole), _rate(whole), _rate(part), share


def _published_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    figure, bound_by = row["published"], row["bound_by"] if row["fits"] else "-"
    theirs = (figure.tokens_per_s, figure.system, figure.hardware, figure.source)
    return _case(row), row["machine"], _rate(row), bound_by, *theirs


def _case(row: Mapping[str, Any]) -> str:
    return f"{row['label']}: {row['tokens_per_step'] // row['context']} x {row['context']:,}"


def _rate(row: Mapping[str, Any]) -> str:
    if not row["fits"]:
        return f"does not fit ({row['reason']})"
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


LETTERS = {"compute": "C", "h2d": "H", "d2h": "D", "optimizer": "O", "nvme_read": "R", "nvme_write": "W"}
"""Lane -> how a cell names what bounds it."""
_GREY = "#e4e4e4"


def short_rate(tokens_per_s: float) -> str:
    """Two or three figures: 0.42, 9.3, 928, 1.1k, 12k."""
    if tokens_per_s >= 999.5:
        thousands = tokens_per_s / 1000
        return f"{thousands:.0f}k" if thousands >= 9.95 else f"{thousands:.1f}k"
    if tokens_per_s >= 9.95:
        return f"{tokens_per_s:.0f}"
    return f"{tokens_per_s:.1f}" if tokens_per_s >= 0.95 else f"{tokens_per_s:.2f}"


def draw(grid: Sequence[Mapping[str, Any]], machines: Sequence[str], file: Path) -> None:
    """Write the PNG. Rows of `grid` have label, context, machine, fits, tokens_per_s, bound_by."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    labels = list(dict.fromkeys(row["label"] for row in grid))
    contexts = sorted({row["context"] for row in grid})
    rates = [row["tokens_per_s"] for row in grid if row["fits"]] or [1.0]
    norm = LogNorm(min(rates), max(max(rates), 1.01 * min(rates)))
    # The light part of the map, so that dark text can be read on every cell.
    colours = colormaps["YlGnBu"]
    lines = math.ceil(len(machines) / 2)
    width, height = 1.5 + 0.95 * len(contexts), 1.0 + 0.5 * len(labels)
    figure = Figure(figsize=(2 * width, lines * height + 0.6), dpi=110, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(lines, 2, squeeze=False).flat)
    for axis in axes[len(machines) :]:
        axis.set_axis_off()
    for axis, machine in zip(axes, machines, strict=False):
        for row in grid:
            if row["machine"] != machine:
                continue
            x, y = contexts.index(row["context"]), labels.index(row["label"])
            face = colours(0.62 * norm(row["tokens_per_s"])) if row["fits"] else _GREY
            axis.add_patch(Rectangle((x, y), 1, 1, facecolor=face, edgecolor="white", linewidth=2))
            if row["fits"]:
                text = f"{short_rate(row['tokens_per_s'])} {LETTERS.get(row['bound_by'], '?')}"
                axis.text(x + 0.5, y + 0.52, text, ha="center", va="center", fontsize=11, color="#10202c")
        axis.set_xlim(0, len(contexts))
        axis.set_ylim(len(labels), 0)
        axis.set_xticks([i + 0.5 for i in range(len(contexts))], [tokens_text(c) for c in contexts])
        axis.set_yticks([i + 0.5 for i in range(len(labels))], labels)
        axis.tick_params(length=0, labelsize=11)
        for side in axis.spines.values():
            side.set_visible(False)
        axis.set_title(machine, fontsize=13, fontweight="bold", loc="left")
    legend = ", ".join(f"{letter} {lane}" for lane, letter in LETTERS.items())
    figure.suptitle(f"Planned tokens/s by model and context, not measured\nBound by: {legend}. Grey: does not fit")
    figure.savefig(file, metadata={"Software": None})
