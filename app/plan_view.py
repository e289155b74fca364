"""A forecast on one screen: does it fit, where everything lives, how long a step takes and why.

Reads the JSON object of a forecast (`penstock plan --json`, plan.json of a run directory). A figure that is not known
reads n/a. Lines are laid out here, not by a table of rich: their number is known before anything is printed, so that
what is of least weight, the reasons, fills what is left of a screen.
"""

from __future__ import annotations

import itertools
import shlex
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from storage.units import bytes_text, duration_text, params_text, percent_text, seconds_text

SCREEN_LINES = 45
BLOCK_ROWS = (9, 6, 3)
"""Most rows of blocks: the first number with which all fits the screen."""
_TARGETS = ("weights", "state", "gradient")
_PARTS = 3
"""Largest parts of a tier that are named."""
_BAR = 16
_Row = tuple[list[str], list[str]]
"""Cells of a row of blocks, and what is saved of them."""


def print_plan(forecast: dict[str, Any], console: Console) -> None:
    """Print the forecast in at most SCREEN_LINES lines, none wider than the console.

    A console narrower than 60 columns wraps as it likes.
    """
    width = max(60, console.width)
    for line in plan_lines(forecast, width, ascii_only=console.options.ascii_only):
        console.print(line, soft_wrap=True, highlight=False)


def plan_lines(forecast: dict[str, Any], width: int, *, ascii_only: bool = False) -> list[Text]:
    """The lines of `print_plan`; reasons that find no room are left out, and the last line then says how many."""
    bars = ("#", ".") if ascii_only else ("█", "░")
    lines: list[Text] = []
    for rows in BLOCK_ROWS:
        lines = _without_reasons(forecast, width, bars, rows)
        if len(lines) <= SCREEN_LINES:
            break
    return lines + _reasons(forecast.get("reasons") or {}, width, SCREEN_LINES - len(lines))


def _without_reasons(forecast: dict[str, Any], width: int, bars: tuple[str, str], block_rows: int) -> list[Text]:
    lines = [*_headline(forecast, width), Text()]
    if forecast["fits"]:
        lines += _times(forecast, width)
    else:
        lines += _refusal(forecast["refusal"], width)
    if forecast.get("tiers"):
        lines += [Text(), *_tiers(forecast["tiers"], width, bars)]
    if forecast["fits"]:
        lines += [Text(), *_blocks(forecast, width, block_rows)]
        lines += [Text(), *_lanes(forecast, bars), Text(), *_run(forecast, width)]
    return lines


# ---------------------------------------------------------------------- sections


def _headline(forecast: dict[str, Any], width: int) -> list[Text]:
    machine, model = forecast["machine"], forecast.get("model")
    verdict = ("fits", "bold green") if forecast["fits"] else ("does not fit", "bold red")
    recipe = forecast.get("recipe", "this run")
    lines = [Text.assemble((recipe, "bold"), " on ", (machine["name"], "bold"), ": ", verdict)]
    if model:
        active = model.get("active_params")
        sparse = f" ({params_text(active)} active a token)" if active and active != model["params"] else ""
        lines += _wrapped(
            f"{model['type']}, {params_text(model['params'])} parameters{sparse}, {model['layers']} layers; "
            f"{forecast['tokens_per_step']:,} tokens a step, context {forecast['context']:,}",
            width,
        )
    gpu = machine.get("gpu") or "no GPU: the gpu tier is ordinary memory"
    lines += _wrapped(f"{gpu}; the machine's figures: {machine['source']}", width, style="dim")
    return lines


def _times(forecast: dict[str, Any], width: int) -> list[Text]:
    bound = forecast["bound_by"]
    share = forecast["lanes"].get(bound, {}).get("share")
    parts = [
        f"{seconds_text(forecast['step_s'])} a step",
        f"{forecast['tokens_per_s']:,.{0 if forecast['tokens_per_s'] >= 10 else 2}f} tokens/s",
        f"bound by {bound}" + (f" ({share:.0%} busy)" if share is not None else ""),
        f"MFU {percent_text(forecast.get('mfu'))}",
        f"HFU {percent_text(forecast.get('hfu'))}",
    ]
    return _packed(parts, "   ", width, style="bold")


def _tiers(tiers: dict[str, Any], width: int, bars: tuple[str, str]) -> list[Text]:
    rows = []
    for name, tier in tiers.items():
        peak, budget = tier.get("peak_bytes"), tier.get("budget_bytes")
        share = peak / budget if peak is not None and budget else None
        over = share is not None and share > 1
        used = " of ".join("n/a" if size is None else bytes_text(size) for size in (peak, budget))
        if used.count(used[-4:]) == 2:  # one unit serves both
            used = used.replace(used[-4:], "", 1)
        style = "red" if over else "green" if share is not None and share < 0.9 else "yellow"
        rows.append(([name, percent_text(share, 0), used], share, style, tier.get("parts") or {}))
    lines = []
    for cells, (_, share, style, parts) in zip(_aligned([row[0] for row in rows], "lrr"), rows, strict=True):
        bar = _bar(share, bars)
        prefix = Text.assemble(f"{cells[0]}  ", (bar, style), f"  {cells[1]}  {cells[2]}  ")
        lines += _hanging(prefix, _largest(parts), width)
    return lines


def _largest(parts: dict[str, int]) -> list[str]:
    """The biggest parts of a tier, and the sum of those that are not named."""
    found = sorted(((size, name) for name, size in parts.items() if size), reverse=True)
    named, rest = found[:_PARTS], found[_PARTS:]
    texts = [f"{name} {bytes_text(size)}" for size, name in named]
    if rest:
        texts.append(f"{len(rest)} more {bytes_text(sum(size for size, _ in rest))}")
    return texts


def _blocks(forecast: dict[str, Any], width: int, max_rows: int) -> list[Text]:
    head = (["block", *_TARGETS, "size"], ["saved for backward"])
    rows = [head, *_block_rows(forecast["blocks"], forecast["chunks"], max_rows)]
    lines: list[Text] = []
    for (_, saved), cells in zip(rows, _aligned([cells for cells, _ in rows], "llllr"), strict=True):
        style = "" if lines else "bold"
        lines += _hanging(Text("  ".join(cells) + "  ", style=style), saved, width, style)
    chunk = f"{forecast['chunks']:,} chunks of {forecast['chunk_tokens']:,} tokens"
    parts = [chunk, f"keys and values {forecast['kv_window']}"]
    parts += [f"{what}: {_slots(forecast[key])}" for what, key in _SLOTS.items() if forecast.get(key)]
    return lines + _packed(parts, "; ", width, style="dim")


_SLOTS = {
    "weight slots": "weight_slots",
    "gradient slots": "gradient_slots",
    "state stages": "state_stages",
    "part stages": "part_stages",
    "activation stages": "activation_stages",
}


def _slots(value: Any) -> str:
    if isinstance(value, dict):
        return " + ".join(f"{count} {pool}" for pool, count in value.items() if count) or "0"
    return str(value)


def _block_rows(blocks: Sequence[dict[str, Any]], chunks: int, max_rows: int) -> list[_Row]:
    """Runs of blocks that are treated alike, a row each; where these are too many, rows of like placement wherever
    they lie, then of all layers."""

    def place(block: dict[str, Any]) -> tuple[str, ...]:
        return (_stem(block["name"]), *(block[target] for target in _TARGETS))

    def treatment(block: dict[str, Any]) -> tuple[Any, ...]:
        saved = block.get("saved") or {}
        return (*place(block), tuple(saved.items()), block.get("spilled"), block.get("held"))

    for key in (treatment, place):
        runs = [list(members) for _, members in itertools.groupby(blocks, key=key)]
        if len(runs) <= max_rows:
            return [_block_row(members, chunks) for members in runs]
    for name in (place, lambda block: place(block)[:1]):
        groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for block in blocks:
            groups.setdefault(name(block), []).append(block)
        if len(groups) <= max_rows:
            break
    return [_block_row(members, chunks, scattered=True) for members in groups.values()]


def _block_row(members: list[dict[str, Any]], chunks: int, scattered: bool = False) -> _Row:
    first, last = members[0]["name"], members[-1]["name"]
    name = first
    if len(members) > 1:
        end = last.rsplit(".", 1)[-1]
        name = f"{len(members)} of {first}-{end}" if scattered else f"{first} - {end}"
    tiers = [_joined(block[target] for block in members) for target in _TARGETS]
    return [name, *tiers, bytes_text(sum(block["bytes"] for block in members))], _saved(members, chunks)


def _saved(members: list[dict[str, Any]], chunks: int) -> list[str]:
    """What backward finds of these blocks' chunks: `attention`, or `everything 3, input 5`; where it lies, unless in
    RAM."""
    total = chunks * len(members)
    counts: dict[str, int] = {}
    for block in members:
        for level, count in (block.get("saved") or {}).items():
            counts[level] = counts.get(level, 0) + count
    found = {level: count for level, count in counts.items() if count}
    if not found:
        return ["-"]
    texts = [level if count == total else f"{level} {_part(count, total)}" for level, count in found.items()]
    for key, where in (("spilled", "on NVMe"), ("held", "on the GPU")):
        if count := sum(block.get(key) or 0 for block in members):
            texts.append(f"{_part(count, total)} {where}")
    return texts


def _part(count: int, total: int) -> str:
    """A share in whole percent; what is little is not nothing, and what is nearly all is not all."""
    if count == total:
        return "all"
    percent = round(100 * count / total)
    return "<1%" if percent == 0 else ">99%" if percent == 100 else f"{percent}%"


def _lanes(forecast: dict[str, Any], bars: tuple[str, str]) -> list[Text]:
    rows = [["lane", "busy", "share", "moved"]]
    for lane, figures in forecast["lanes"].items():
        moved = bytes_text(figures["bytes"]) if figures.get("bytes") else "-"
        rows.append([lane, seconds_text(figures["busy_s"]), percent_text(figures["share"], 0), moved])
    cells = _aligned(rows, "lrrr")
    lines = [Text("  ".join(cells[0]), style="bold")]
    for row, (lane, figures) in zip(cells[1:], forecast["lanes"].items(), strict=True):
        bound = lane == forecast["bound_by"]
        bar = (_bar(figures["share"], bars), "red" if bound else "cyan")
        lines.append(Text.assemble("  ".join(row), "  ", bar, "  bound by this lane" if bound else ""))
    return lines


def _run(forecast: dict[str, Any], width: int) -> list[Text]:
    run = forecast["run"]
    tokens = forecast.get("compute_bound_tokens")
    bound = "n/a" if tokens is None else f"{tokens:,} tokens a step"
    whole = f"whole run: {forecast['steps']:,} steps in {duration_text(run['seconds'])}"
    if run.get("validations"):
        whole += f", {run['validations']:,} validations of {seconds_text(run['validation_s'])} in it"
    lines = _packed([whole, f"compute-bound from: {bound}"], "; ", width)
    for text, alike in itertools.groupby(map(_drive, run["drives"])):
        count = len(list(alike))
        lines += _wrapped(f"{count} drives, each {text.removeprefix('drive: ')}" if count > 1 else text, width)
    if best := forecast.get("best_change"):
        lines += _wrapped(f"helps most: {best['text']}{_gain(best, forecast)}", width, style="bold")
        lines += _settings(best["set"], width)
    return lines


def _drive(drive: dict[str, Any]) -> str:
    written, step = bytes_text(drive["bytes_written"]), bytes_text(drive["bytes_written_per_step"])
    share, endurance = drive.get("endurance_share"), drive.get("endurance_bytes")
    worn = "n/a" if share is None else percent_text(share, 1 if share >= 0.01 else 3)
    of = "" if endurance is None else f" of {bytes_text(endurance)}"
    name = f"drive {drive['path']}" if drive.get("path") else "drive"
    return f"{name}: writes {written} ({step} a step), endurance used {worn}{of}"


def _gain(best: dict[str, Any], forecast: dict[str, Any]) -> str:
    if best.get("tokens_per_s") is None or best.get("step_s") is None:
        return ""
    gain = best["tokens_per_s"] / forecast["tokens_per_s"] - 1
    return f": {seconds_text(best['step_s'])} a step, {best['tokens_per_s']:,.0f} tokens/s ({gain:+.0%})"


def _refusal(refusal: dict[str, Any], width: int) -> list[Text]:
    short = refusal.get("short_bytes")
    by = "" if short is None else f" by {bytes_text(short)}"
    lines = [Text(f"the {refusal['tier']} tier is too small{by}", style="bold red")]
    lines += _wrapped(refusal["message"], width)
    changes = refusal.get("changes") or []
    lines += [Text(), Text("each of these makes it fit (tried):" if changes else "no single change was found to fit")]
    for change in changes:
        lines += [*_wrapped(change["text"], width, "  "), *_settings(change["set"], width)]
    return lines


def _reasons(reasons: dict[str, str], width: int, room: int) -> list[Text]:
    """The reasons that fit `room` lines under a heading, whole ones only."""
    if not reasons or room < 3:
        return []
    groups = [_wrapped(f"{choice}: {text}", width, "  ") for choice, text in reasons.items()]
    lines = [Text(), Text("why", style="bold")]
    for index, group in enumerate(groups):
        left = room - len(lines) - len(group)
        if left < (1 if index + 1 < len(groups) else 0):
            lines.append(Text(f"  {len(groups) - index} more with --json", style="dim"))
            break
        lines += group
    return lines if len(lines) <= room else []


# ---------------------------------------------------------------------- texts


def _stem(name: str) -> str:
    return name.rsplit(".", 1)[0]


def _joined(values: Iterable[str]) -> str:
    return "/".join(dict.fromkeys(values))


def _settings(settings: Sequence[str], width: int) -> list[Text]:
    """Ready arguments; a value with blanks or shell characters is quoted."""
    return [
        Text("    " + line, style="cyan")
        for line in filled([f"--set {shlex.quote(item)}" for item in settings], " ", width - 4)
    ]


def _bar(share: float | None, bars: tuple[str, str]) -> str:
    filled = 0 if share is None else min(_BAR, max(round(share * _BAR), int(share > 0)))
    return bars[0] * filled + bars[1] * (_BAR - filled)


def _aligned(rows: Sequence[Sequence[str]], sides: str) -> list[list[str]]:
    """Cells padded to their columns' widths; `sides` is l or r for each column."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(sides))]
    return [
        [
            cell.ljust(width) if side == "l" else cell.rjust(width)
            for cell, width, side in zip(row, widths, sides, strict=True)
        ]
        for row in rows
    ]


def _wrapped(text: str, width: int, indent: str = "", style: str = "") -> list[Text]:
    lines = textwrap.wrap(
        " ".join(text.split()), width, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False
    )
    return [Text(line, style=style) for line in lines]


def _hanging(prefix: Text, items: Sequence[str], width: int, style: str = "") -> list[Text]:
    """The items behind `prefix`, wrapped between them in the column where they start; below it where room is short."""
    room = width - len(prefix)
    if max(map(len, items), default=0) + 1 > room:
        prefix.rstrip()
        return [prefix, *_wrapped(", ".join(items), width, "    ")]
    *before, last = filled(items, ", ", room - 1) or [""]
    pieces = [*(piece + "," for piece in before), last]
    first = prefix + Text(pieces[0], style=style)
    first.rstrip()
    return [first, *(Text(" " * len(prefix) + piece) for piece in pieces[1:])]


def filled(items: Sequence[str], separator: str, width: int) -> list[str]:
    """Whole items on as few lines as they need."""
    lines: list[str] = []
    for item in items:
        if lines and len(lines[-1]) + len(separator) + len(item) <= width:
            lines[-1] += separator + item
        else:
            lines.append(item)
    return lines


def _packed(items: Sequence[str], separator: str, width: int, style: str = "") -> list[Text]:
    return [Text(line, style=style) for line in filled(items, separator, width)]
