"""A forecast (`penstock plan --json`, plan.json) for people: does it fit, where everything lives, how long a step takes
and why. Its rows are printed on one screen or scrolled by the terminal application. What is not known reads n/a."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console

from penstock.app.console.printing import print_rows
from penstock.app.console.rows import ASCII, UNICODE, Glyphs, Page, Row
from penstock.app.planning.block_view import TIERS, block_map, block_table, free_mark, groups, shades
from penstock.app.planning.cluster_view import cluster_rows
from penstock.app.runs.speed import speed_figure
from penstock.storage.files.units import bytes_text, duration_text, of_text, params_text, percent_text, seconds_text

SCREEN_LINES = 45
BLOCK_ROWS = (9, 6, 3)
"""Most rows of blocks: the first number with which all fits the screen."""
_PARTS = 3
"""Largest parts of a tier that have a shade of their own."""
_SIDE_BY_SIDE = 60
"""Cells from which a tier's bar stands beside its figures."""
_FULL = 0.95
"""Of a budget: from here on a tier is shown as nearly full."""
_POOLS = {
    "layer": "layers",
    "frozen layer": "frozen layers",
    "frozen embedding and head": "frozen tables",
    "vision tower": "the vision tower",
    "frozen vision tower": "the frozen part of the vision tower",
    "float32": "parameters kept in float32",
    "edge": "embedding and head",
}
"""Pools of slots whose names in plan.json are not what people read; an older run's has `edge`."""
_SLOTS = {
    "weight slots": "weight_slots",
    "gradient slots": "gradient_slots",
    "state stages": "state_stages",
    "part stages": "part_stages",
    "activation stages": "activation_stages",
}


def print_plan(forecast: dict[str, Any], console: Console) -> None:
    """Print the forecast in at most SCREEN_LINES lines, none wider than the console, if that has 60 columns. Reasons
    that find no room are counted."""
    width = max(60, console.width)
    page = Page(width, ASCII if console.options.ascii_only else UNICODE)
    for rows in BLOCK_ROWS:
        page.rows = []
        _page(page, forecast, table_rows=rows)
        if len(page.rows) <= SCREEN_LINES:
            break
    else:
        if "cluster" in forecast:  # was asked for, and takes more room than blocks leave
            page.rows = []
            _page(page, forecast | {"blocks": []})
    _reasons(page, forecast, SCREEN_LINES - len(page.rows))
    print_rows(page.rows, console)


def plan_rows(
    forecast: dict[str, Any], width: int, glyphs: Glyphs, *, status: str = "", advising: bool = False
) -> list[Row]:
    """All of the forecast for the terminal application, where keys apply what helps; `status` stands at the right of
    the verdict, `advising`: what would help is still being tried."""
    page = Page(width, glyphs)
    _page(page, forecast, keys=True, status=status, advising=advising)
    _reasons(page, forecast)
    return page.rows


def fixes(forecast: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The changes of a refused recipe that a key can apply, in their order: key 1 is the first."""
    if forecast is None or forecast["fits"]:
        return []
    return [change for change in forecast["refusal"].get("changes") or [] if change["set"]][:9]


def verdict(forecast: dict[str, Any], glyphs: Glyphs) -> tuple[str, str]:
    """Whether it fits: text and token."""
    return (f"{glyphs.check} fits", "good bold") if forecast["fits"] else (f"{glyphs.cross} does not fit", "bad bold")


def machine_name(forecast: dict[str, Any]) -> str:
    """This machine has no name of its own before it is probed."""
    name = forecast["machine"]["name"]
    return "this machine" if name.startswith("generic") else str(name)


def _page(
    page: Page,
    forecast: dict[str, Any],
    *,
    keys: bool = False,
    status: str = "",
    advising: bool = False,
    table_rows: int = 0,
) -> None:
    """All but the reasons. `keys`: of keys that apply a change it is said; `table_rows`: most rows of blocks, else a
    map."""
    _head(page, forecast, status)
    if not forecast["fits"]:
        _refusal(page, forecast, keys, advising)
        cluster_rows(page, forecast)
        return
    _figures(page, forecast)
    if forecast.get("tiers"):
        page.head("memory", "planned peak, of the budget" + _given(forecast))
    for name, tier in (forecast.get("tiers") or {}).items():
        _tier(page, name, tier)
    _lanes(page, forecast)
    _help(page, forecast, keys, advising)
    if forecast.get("blocks"):
        if table_rows:
            block_table(page, forecast, table_rows)
        else:
            block_map(page, forecast)
        _slots(page, forecast)
    _end(page, forecast)
    cluster_rows(page, forecast)


def _given(forecast: dict[str, Any]) -> str:
    """Which budgets the recipe does not give as sizes."""
    given = forecast.get("budgets_given") or {}
    words = [f"budgets.{tier}={text}" for tier, text in given.items() if text == "least" or text.endswith("%")]
    return f" ({', '.join(words)})" if words else ""


# ---------------------------------------------------------------------- parts


def _head(page: Page, forecast: dict[str, Any], status: str) -> None:
    machine, model = forecast["machine"], forecast.get("model")
    recipe = f": {forecast['recipe']}" if forecast.get("recipe") else ""
    row: Row = [verdict(forecast, page.glyphs), (" on ", "dim"), (machine_name(forecast), "text bold")]
    page.ends([*row, (recipe, "text")], [(status, "accent")] if status else [])
    gpu, ranks = machine.get("gpu") or "no GPU: the gpu tier is ordinary memory", forecast.get("ranks", 1)
    if ranks > 1:
        gpu = f"{ranks} x {gpu}" if machine.get("gpu") else f"{ranks} processes; {gpu}"
    page.wrapped(f"{gpu}; the machine's figures: {machine['source']}", "dim")
    if model:
        active = model.get("active_params")
        sparse = f" ({params_text(active)} active a token)" if active and active != model["params"] else ""
        page.wrapped(
            f"{model['type']}, {params_text(model['params'])} parameters{sparse}, {model['layers']} layers; "
            f"{forecast['tokens_per_step']:,} tokens a step, context {forecast['context']:,}",
            "text",
        )
    if frozen := forecast.get("frozen"):
        page.wrapped(
            f"frozen: {params_text(frozen['params'])} of {params_text(forecast['model']['params'])} parameters, "
            f"weights only, {frozen['param_bytes']} bytes each instead of {frozen['trained_param_bytes']}",
            "text",
        )
    for note in (*filter(None, [forecast.get("note")]), *forecast.get("notes", ())):
        page.wrapped(f"{page.glyphs.diamond} {note}", "warn")


def _figures(page: Page, forecast: dict[str, Any]) -> None:
    """The figures that matter, above their units."""
    figures = [
        (seconds_text(forecast.get("step_s")), "a step"),
        (speed_figure(forecast.get("tokens_per_s")), "tokens/s"),
        (duration_text((forecast.get("run") or {}).get("seconds")), f"{forecast['steps']:,} steps"),
        (percent_text(forecast.get("mfu")), "MFU"),
        (percent_text(forecast.get("hfu")), "HFU"),
    ]
    page.head("planned")
    least = max(len(text) for figure in figures for text in figure) + 1
    each = max(2, min(len(figures), page.width // least))
    for start in range(0, len(figures), each):
        shown, available = figures[start : start + each], page.width // each
        page.line([(f"{value:<{available}}", "accent bold") for value, _ in shown])
        page.line([(f"{unit:<{available}}", "dim") for _, unit in shown])


def _tier(page: Page, name: str, tier: dict[str, Any]) -> None:
    peak, budget = tier.get("peak_bytes"), tier.get("budget_bytes")
    share = peak / budget if peak is not None and budget else None
    token = "text" if share is None or share < _FULL else "warn" if share <= 1 else "bad"
    figures = of_text(peak, budget)
    label: Row = [(f"{name:<5}", f"tier.{name} bold"), (f"{percent_text(share, 0):>5} ", f"{token} bold")]
    parts = _largest(tier.get("parts") or {})
    if page.width >= _SIDE_BY_SIDE:
        label.append((f" {figures:<20} ", "text"))
        available = page.width - sum(cell_len(text) for text, _ in label)
        page.line([*label, *_bar(available, peak, budget, parts, name, page.glyphs)])
    else:
        page.line([*label, (f" {figures}", "text")])
        page.line(_bar(page.width, peak, budget, parts, name, page.glyphs))
    marks = shades(page.glyphs)
    named = [f"{marks[index]} {part} {bytes_text(size)}" for index, (part, size) in enumerate(parts)]
    page.items(named, "  ", "dim", indent=5)


def _bar(
    width: int, peak: float | None, budget: float | None, parts: Sequence[tuple[str, int]], name: str, glyphs: Glyphs
) -> Row:
    """The tier's parts in shades, as far as they fill the budget; beyond it, where it does not fit, in red."""
    if not budget or peak is None:
        return [(free_mark(glyphs) * width, "axis")]
    scale = width / max(budget, peak)
    row: Row = []
    ends = list(itertools.accumulate(float(size) for _, size in parts)) or [peak]
    done = 0
    for shade, end in zip(shades(glyphs), ends, strict=False):
        cells = max(round(end * scale), done + (1 if done == 0 else 0))
        row.append((shade * (cells - done), f"tier.{name}"))
        done = cells
    if peak > budget:
        inside = min(width - 1, max(1, round(budget * scale)))
        full, mark = shades(glyphs)[0], glyphs.vline
        return [(full * inside, f"tier.{name}"), (mark, "title"), (full * (width - inside - 1), "bad")]
    return [*row, (free_mark(glyphs) * (width - done), "axis")]


def _largest(parts: dict[str, int]) -> list[tuple[str, int]]:
    """The biggest parts of a tier, and the sum of the others."""
    result = sorted(((size, name) for name, size in parts.items() if size), reverse=True)
    named = [(name, size) for size, name in result[:_PARTS]]
    rest = result[_PARTS:]
    return [*named, (f"{len(rest)} more", sum(size for size, _ in rest))] if rest else named


def _lanes(page: Page, forecast: dict[str, Any]) -> None:
    """How busy each lane is in a step, for how long, and what it moves where there is room to say it."""
    bound = forecast["bound_by"]
    of_each = "of each GPU, " if forecast.get("ranks", 1) > 1 else ""
    page.head("lanes", f"{of_each}bound by {bound}", f"lane.{bound}")
    name = max(map(len, forecast["lanes"]), default=0)
    for lane, figures in forecast["lanes"].items():
        share, moved = figures.get("share"), figures.get("bytes")
        token = "text bold" if lane == bound else "text"
        tail = f" {percent_text(share, 0):>4} {seconds_text(figures.get('busy_s')):>8}"
        if page.width >= _SIDE_BY_SIDE:
            tail += f" {bytes_text(moved) if moved else '-':>9}"
        available = page.width - name - 1 - len(tail)
        bar = _busy(share, available, page.glyphs)
        free = free_mark(page.glyphs) * (available - len(bar))
        page.line([(f"{lane:<{name}} ", token), (bar, f"lane.{lane}"), (free, "axis"), (tail, token)])


def _busy(share: float | None, width: int, glyphs: Glyphs) -> str:
    """A bar in eighths of a cell where the terminal has them."""
    cells = min(1.0, max(0.0, share or 0.0)) * max(0, width)
    if not glyphs.braille:
        return "#" * round(cells)
    eighths = round(cells * 8)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def _help(page: Page, forecast: dict[str, Any], keys: bool, advising: bool) -> None:
    """What one change would bring."""
    if "best_change" not in forecast:
        if advising:
            page.head("helps most")
            page.line([(f"trying{page.glyphs.ellipsis}", "dim")])
        return
    best = forecast["best_change"]
    page.head("helps most", "b applies it" if keys and best and best["set"] else "", "accent")
    if best is None:
        page.wrapped("no single change was found that helps", "dim")
    else:
        page.wrapped(best["text"] + _gain(best, forecast, page.glyphs), "good")
        _settings(page, best["set"], keys)
    tokens = forecast.get("compute_bound_tokens")
    page.wrapped(f"compute-bound from {'n/a' if tokens is None else f'{tokens:,}'} tokens a step", "dim")


def _gain(best: dict[str, Any], forecast: dict[str, Any], glyphs: Glyphs) -> str:
    rate, now, step_s = best.get("tokens_per_s"), forecast.get("tokens_per_s"), best.get("step_s")
    if not rate or not now:
        return ""
    return f" {glyphs.arrow} {seconds_text(step_s)} a step, {speed_figure(rate)} tokens/s ({rate / now - 1:+.0%})"


def _settings(page: Page, settings: Sequence[str], keys: bool) -> None:
    """The fields that a change sets; as ready arguments, values quoted for a shell, where no key applies it."""
    if keys:
        for setting in settings:
            page.line([("  " + setting, "ema")])
    else:
        page.items([f"--set {shlex.quote(item)}" for item in settings], " ", "setting", indent=2)


def _refusal(page: Page, forecast: dict[str, Any], keys: bool, advising: bool) -> None:
    refusal = forecast["refusal"]
    short = refusal.get("short_bytes")
    page.line([])
    if refusal.get("tier"):
        by = "" if short is None else f" by {bytes_text(short)}"
        page.wrapped(f"the {refusal['tier']} tier is too small{by}", "bad bold")
    for name, tier in (forecast.get("tiers") or {}).items():
        if name in TIERS:
            _tier(page, name, tier)
    changes = refusal.get("changes") or []
    page.head("what would fit", "a key applies it" if keys and fixes(forecast) else "", "accent")
    if advising:
        page.line([(f"trying changes one by one{page.glyphs.ellipsis}", "dim")])
    elif not changes:
        page.wrapped("no single change was found that fits", "dim")
    for change in changes:
        if keys and change["set"] and change in fixes(forecast):
            page.line([(f"{fixes(forecast).index(change) + 1} ", "accent bold"), (change["text"], "text")])
        else:
            page.line([("- ", "dim"), (change["text"], "dim" if keys else "text")])
        _settings(page, change["set"], keys)
    page.head("why")
    page.wrapped(refusal["message"], "dim")


def _slots(page: Page, forecast: dict[str, Any]) -> None:
    """How a micro-batch is cut, and through how many buffers it streams."""
    items = [
        f"{forecast['chunks']:,} chunks of {forecast['chunk_tokens']:,} tokens",
        *groups(forecast),
        f"keys and values {forecast['kv_window']}",
        *["experts spread over the GPUs"] * bool(forecast.get("spread_experts")),
    ]
    for what, key in _SLOTS.items():
        if value := forecast.get(key):
            if isinstance(value, dict):
                value = " + ".join(f"{count} for {_POOLS.get(pool, pool)}" for pool, count in value.items() if count)
            items.append(f"{what}: {value or 0}")
    page.items(items, "; ", "dim")


def _end(page: Page, forecast: dict[str, Any]) -> None:
    """What the whole run writes, and its validations and samples."""
    run = forecast.get("run") or {}
    page.head("whole run", f"{forecast['steps']:,} steps in {duration_text(run.get('seconds'))}")
    if made := run.get("generations"):
        every = f"every {made['steps']:,} steps" if made["steps"] > 1 else "before each step"
        of_logps = {"": made["logps_s"], " by the reference model": made["reference_s"]}
        words = [f", {seconds_text(took)} for log-probabilities{by}" for by, took in of_logps.items() if took]
        page.wrapped(
            f"{every} {made['prompts']:,} x {made['completions']:,} completions of up to {made['tokens']:,} tokens are "
            f"sampled: {seconds_text(made['sampling_s'])}{''.join(words)}",
            "text",
        )
    if reference := run.get("reference"):
        took = f"{seconds_text(reference['seconds'])} for the reference model's log-probabilities"
        page.wrapped(f"{took} of {reference['rows']:,} rows included", "text")
    if run.get("validations"):
        page.wrapped(f"{run['validations']:,} validations of {seconds_text(run['validation_s'])} included", "text")
    if samples := run.get("samples"):
        page.wrapped(
            f"samples: {samples['prompts']:,} x {samples['tokens']:,} tokens every {samples['every']:,} steps, about "
            f"{seconds_text(samples['seconds'])} each",
            "text",
        )
    for text, alike in itertools.groupby(map(_drive, run.get("drives") or [])):
        count = len(list(alike))
        page.wrapped(f"{count} drives, each {text.removeprefix('drive: ')}" if count > 1 else text, "text")


def _drive(drive: dict[str, Any]) -> str:
    share, endurance = drive.get("endurance_share"), drive.get("endurance_bytes")
    worn = percent_text(share, 1 if share is None or share >= 0.01 else 3)
    of = "" if endurance is None else f" of {bytes_text(endurance)}"
    name = f"drive {drive['path']}" if drive.get("path") else "drive"
    written, step = bytes_text(drive["bytes_written"]), bytes_text(drive.get("bytes_written_per_step"))
    return f"{name}: writes {written} ({step} a step), endurance used {worn}{of}"


def _reasons(page: Page, forecast: dict[str, Any], available: int = 10_000) -> None:
    """The reasons that fit `available` rows under a heading, whole ones only."""
    reasons = forecast.get("reasons") or {}
    if not reasons or available < 3:
        return
    page.head("why this plan")
    available -= 1
    for index, (choice, text) in enumerate(reasons.items()):
        entry = Page(page.width, page.glyphs)
        entry.wrapped(f"{choice.replace('_', ' ')}: {text}", "dim")
        available -= len(entry.rows)
        if available < (1 if index + 1 < len(reasons) else 0):
            page.line([(f"{len(reasons) - index} more with --json", "dim")])
            return
        page.rows += entry.rows
