"""What `penstock fit` found, for people: a row a cell, printed as it comes, and below it what the figures mean. Wide
consoles show memory, drives and efficiency too; what is not known reads n/a."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from penstock.app.console.rows import ASCII, UNICODE, Glyphs
from penstock.app.runs.speed import speed_figure
from penstock.storage.files.units import bytes_text, percent_text, seconds_text

TB = 10**12
_NAME = 15
_CONTEXT = 10
"""With a mark where it is stretched."""


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    width: int
    text: Callable[[Mapping[str, Any]], str]
    left: bool = False


def hours_text(hours: float) -> str:
    return f"{hours:,.{2 if hours < 0.095 else 1 if hours < 99.95 else 0}f} h"


def written_text(cell: Mapping[str, Any]) -> str:
    """What is written to all drives, and of a drive's endurance where that is known."""
    share = cell["endurance_share"]
    written = cell["written_bytes"] / TB
    text = f"{written:,.{2 if written < 0.995 else 1 if written < 99.95 else 0}f} TB"
    return text if share is None else f"{text} {'<0.1%' if share < 0.0005 else percent_text(share)}"


def energy_text(cell: Mapping[str, Any]) -> str:
    energy = cell["kwh_at_most"]
    return "n/a" if energy is None else f"{energy:,.{2 if energy < 0.995 else 1 if energy < 99.95 else 0}f}"


def refusal_text(cell: Mapping[str, Any]) -> str:
    """What is short."""
    return f"{cell['tier']} tier too small by {bytes_text(cell['short_bytes'])}"


def changes_text(cell: Mapping[str, Any]) -> str:
    """What would make it fit, where that was looked for; empty elsewhere."""
    if "changes" not in cell:
        return ""
    words = [" ".join([change["text"], *(f"({setting})" for setting in change["set"])]) for change in cell["changes"]]
    return "would fit: " + "; or ".join(words) if words else "no single change was found that makes it fit"


def count_text(tokens: int) -> str:
    """A number of tokens as people say it: 10M, 3.2B."""
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if tokens >= size:
            return f"{tokens / size:.3g}{unit}"
    return str(tokens)


_COLUMNS = (
    # The gap before it is part of a column's width.
    _Column("tokens/s", 9, lambda cell: speed_figure(cell["tokens_per_s"])),
    _Column("takes", 9, lambda cell: hours_text(cell["hours"])),
    _Column("  bound by", 12, lambda cell: f"  {cell['bound_by']}", left=True),
    _Column("writes", 14, lambda cell: written_text(cell)),
    _Column("kWh", 6, lambda cell: energy_text(cell)),
)
_MORE = (
    _Column("a step", 9, lambda cell: seconds_text(cell["step_s"])),
    _Column("MFU", 7, lambda cell: percent_text(cell["mfu"])),
    _Column("GPU", 10, lambda cell: bytes_text(cell["peak_bytes"].get("gpu"))),
    _Column("RAM", 10, lambda cell: bytes_text(cell["peak_bytes"].get("ram"))),
    _Column("NVMe", 10, lambda cell: bytes_text(cell["peak_bytes"].get("nvme"))),
)
"""Further columns, as far as the console's width allows."""


def print_fit(question: Mapping[str, Any], cells: Iterable[dict[str, Any]], console: Console) -> None:
    """Print the head, each cell as it comes, and what the figures mean."""
    glyphs = ASCII if console.options.ascii_only else UNICODE
    width = max(80, console.width)
    columns = _fitting(width)
    for line in head_lines(question):
        console.print(line, highlight=False, markup=False)
    console.print()
    titles = [f"  {'model':<{_NAME}}{'context':>{_CONTEXT}} ", *(_placed(c, c.title) for c in columns)]
    _print(console, "".join(titles), "bold")
    seen: list[dict[str, Any]] = []
    for cell in cells:
        _cell(console, cell, columns, glyphs, first=not seen or seen[-1]["model"] != cell["model"])
        seen.append(cell)
    console.print()
    for line in notes(question, seen):
        console.print(line, style="dim", highlight=False, markup=False)


def head_lines(question: Mapping[str, Any]) -> list[str]:
    """What was asked."""
    machine, tokens = question["machine"], question["tokens"]
    name = machine["name"] or "this machine"
    title = "" if machine["title"] in (name, "generic", "generic-gpu") else f" ({machine['title']})"
    from_file = f" ({question['tokens_from']})" if question["tokens_from"] else ""
    batch, sizes = question["step_tokens"], question["budgets"]
    what = "all parameters"
    if (objective := question.get("objective", "next_token")) != "next_token":
        what += f", train.objective={objective}"
    memory = f"{bytes_text(sizes['gpu'])} of GPU memory and {bytes_text(sizes['ram'])} of RAM"
    return [
        f"What {name}{title} can train ({what}) on {count_text(tokens)} tokens{from_file}",
        f"planned, with nothing else running, within {memory}; rates: {machine['source']}",
        f"a step is {batch:,} tokens in sequences of the context length, or one sequence if that is longer",
    ]


def notes(question: Mapping[str, Any], cells: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """What the figures mean, of those that are there."""
    result = list(cells)
    takes = "tokens divided by tokens/s"
    if question.get("objective", "next_token") != "next_token":
        takes = "all steps, with passes of the reference model and the sampling of completions of half a context"
    yield f"takes: {takes}. writes: to all drives together" + (
        ", and the share of their rated endurance"
        if any(cell.get("endurance_share") is not None for cell in result)
        else "; their endurance is not known"
    )
    power = question["power_w"]
    if power is None:
        yield "kWh: n/a, as the power limit of the GPU's board is not known"
    else:
        yield f"kWh: at most; only the GPU's board, at its power limit of {power:,.0f} W all the time"
    models = list(dict.fromkeys(cell["model"] for cell in result if cell["gradient_dtype"] == "bfloat16"))
    if models:
        yield f"gradients are stored in bfloat16, as in the recipes of these models: {', '.join(models)}"
    if any(cell["stretched"] for cell in result):
        yield "context*: longer than the model's own context, extended by YaRN"
    if question["machine"]["source"].startswith("assumed"):
        yield "assumed rates; `penstock probe` measures them in a minute"


def _fitting(width: int) -> list[_Column]:
    """The columns for which there is room."""
    columns = list(_COLUMNS)
    left = width - len("v ") - _NAME - _CONTEXT - 1 - sum(column.width for column in columns)
    for column in _MORE:
        if (left := left - column.width) >= 0:
            columns.append(column)
    return columns


def _placed(column: _Column, text: str) -> str:
    return f"{text:{'<' if column.left else '>'}{column.width}}"


def _cell(
    console: Console, cell: Mapping[str, Any], columns: Iterable[_Column], glyphs: Glyphs, *, first: bool
) -> None:
    mark = glyphs.check if cell["fits"] else glyphs.cross
    name = cell["model"] if first else ""
    context = f"{cell['context']:,}{'*' if cell['stretched'] else ' '}"
    start = f"{mark} {name:<{_NAME}}{context:>{_CONTEXT + 1}}"
    if cell["fits"]:
        _print(console, start + "".join(_placed(c, c.text(cell)) for c in columns), "")
        return
    _print(console, f"{start}  does not fit: {refusal_text(cell)}", "red")
    if "changes" in cell:
        text = Text(changes_text(cell), style="dim")
        for line in text.wrap(console, max(40, console.width - 6)):
            console.print(Text("      ") + line, highlight=False, soft_wrap=True)


def _print(console: Console, text: str, style: str) -> None:
    console.print(text.rstrip(), style=style, highlight=False, markup=False, soft_wrap=True)
