"""A plan beside the form that it follows: does it fit, how fast is it, what bounds it, and what would help."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from typing import Any

from rich.cells import cell_len, set_cell_size

from app.plan_view import filled
from storage.units import bytes_text, duration_text, of_text, params_text, percent_text, seconds_text
from tui.glyphs import Glyphs
from tui.render import Row

_PHASES = {"starting": "loading the planner", "planning": "planning", "advising": "trying what would help"}
_TARGETS = ("weights", "state", "gradient")
_TIERS = ("gpu", "ram", "nvme")
_PARTS = 3
"""Largest parts of a tier that have a shade of their own."""
_SIDE_BY_SIDE = 60
"""Cells from which a tier's bar stands beside its figures."""
_FULL = 0.95
"""Of a budget: from here on a tier is shown as nearly full."""


def plan_rows(
    width: int,
    glyphs: Glyphs,
    *,
    forecast: dict[str, Any] | None,
    phase: str = "done",
    stale: bool = False,
    error: str | None = None,
    trouble: str | None = None,
    machine: str = "",
) -> list[Row]:
    """The panel's rows, each of exactly `width` cells. `machine`: what is planned for, where no forecast says it."""
    page = _Page(width, glyphs)
    working = phase in _PHASES and trouble is None
    if trouble is not None:
        page.wrapped(f"{glyphs.cross} {trouble}", "bad")
        if phase == "idle":
            page.wrapped("The form works without it; f5 tries again.", "dim")
        page.gap()
    if error is not None:
        page.line([(f"{glyphs.cross} no plan", "bad bold")])
        page.wrapped(error, "bad", 2)
        page.gap()
    status = f"{_PHASES[phase]}{glyphs.ellipsis}" if working else "older" if stale else ""
    if forecast is None:
        if error is None and trouble is None:
            page.ends([(f"for {machine or 'this machine'}", "text")], [(status, "accent")])
            page.wrapped("Whether it fits, how long a step takes and what bounds it will stand here.", "dim")
        return page.rows
    top = len(page.rows)
    _verdict(page, forecast, status)
    if forecast["fits"]:
        _figures(page, forecast)
        _tiers(page, forecast)
        _lanes(page, forecast)
        _help(page, forecast, phase)
        _blocks(page, forecast)
        _drives(page, forecast)
        _reasons(page, forecast)
    else:
        _refusal(page, forecast, phase)
    if stale:
        page.rows[top:] = [
            [(text, token if text == status else "dim") for text, token in row] for row in page.rows[top:]
        ]
    return page.rows


def summary_row(
    width: int,
    glyphs: Glyphs,
    *,
    forecast: dict[str, Any] | None,
    phase: str = "done",
    stale: bool = False,
    error: str | None = None,
    machine: str = "",
) -> Row:
    """The plan in one row of `width` cells, what matters least cut off."""
    page = _Page(width, glyphs)
    working = f"{_PHASES[phase]}{glyphs.ellipsis}" if phase in ("starting", "planning") else ""
    if error is not None:
        page.line([(f"{glyphs.cross} no plan ", "bad bold"), (" ".join(error.split()), "bad")])
    elif forecast is None:
        page.ends([(f"plan for {machine or 'this machine'}", "dim")], [(working, "accent")])
    else:
        good = forecast["fits"]
        verdict = (
            f"{glyphs.check} fits " if good else f"{glyphs.cross} does not fit ",
            "good bold" if good else "bad bold",
        )
        row: Row = [verdict, (_machine_name(forecast["machine"]), "text")]
        if good:
            figures = f"  {seconds_text(forecast['step_s'])} a step  {forecast['tokens_per_s']:,.0f} tok/s"
            row += [(figures, "accent bold"), (f"  {forecast['bound_by']}-bound", "text")]
            row.append((f"  {duration_text(forecast['run']['seconds'])}", "text"))
        elif known := fixes(forecast):
            row.append((f"  1 {known[0]['text']}", "accent"))
        page.ends([(text, "dim") for text, _ in row] if stale else row, [(f" {working}", "accent")])
    return page.rows[0]


def fixes(forecast: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The changes of a refused recipe that a key can apply, in their order: key 1 is the first."""
    if forecast is None or forecast["fits"]:
        return []
    return [change for change in forecast["refusal"].get("changes") or [] if change["set"]][:9]


class _Page:
    """Rows being made, each `width` cells."""

    def __init__(self, width: int, glyphs: Glyphs) -> None:
        self.width, self.glyphs = width, glyphs
        self.rows: list[Row] = []

    def line(self, row: Row) -> None:
        """One row, cut or filled."""
        out: Row = []
        left = self.width
        for text, token in row:
            cells = cell_len(text)
            if cells > left:
                text = set_cell_size(text, left - 1) + self.glyphs.ellipsis if left > 1 else set_cell_size(text, left)
                cells = left
            if text:
                out.append((text, token))
            left -= cells
        if left > 0:
            out.append((" " * left, "text"))
        self.rows.append(out)

    def ends(self, left: Row, right: Row) -> None:
        """One row with something at either end; the right one goes where there is no room for both."""
        used = sum(cell_len(text) for text, _ in (*left, *right))
        self.line([*left, (" " * (self.width - used), "text"), *right] if used < self.width else left)

    def gap(self) -> None:
        """An empty row, never two."""
        if self.rows and any(text.strip() for text, _ in self.rows[-1]):
            self.line([])

    def head(self, title: str, note: str = "", token: str = "dim") -> None:
        """The title of a part, with a rule behind it."""
        self.gap()
        rule = self.width - cell_len(title) - cell_len(note) - (2 if note else 1)
        self.line(
            [(title + " ", "title"), (self.glyphs.hline * max(1, rule), "axis"), (f" {note}" if note else "", token)]
        )

    def wrapped(self, text: str, token: str, indent: int = 0, most: int = 1000) -> None:
        """Whole words on at most `most` rows."""
        pad = " " * indent
        lines = textwrap.wrap(" ".join(text.split()), max(1, self.width - indent), break_on_hyphens=False)
        if len(lines) > most:
            lines[most - 1 :] = [
                set_cell_size(lines[most - 1], self.width - indent - 1).rstrip() + self.glyphs.ellipsis
            ]
        for line in lines:
            self.line([(pad + line, token)])


# ---------------------------------------------------------------------- parts


def _verdict(page: _Page, forecast: dict[str, Any], status: str) -> None:
    glyphs, machine, model = page.glyphs, forecast["machine"], forecast.get("model")
    good = forecast["fits"]
    verdict = (f"{glyphs.check} fits", "good bold") if good else (f"{glyphs.cross} does not fit", "bad bold")
    page.ends([verdict, (" on ", "dim"), (_machine_name(machine), "bold")], [(status, "accent")])
    page.wrapped(
        f"{machine.get('gpu') or 'no GPU: the gpu tier is ordinary memory'}; {machine['source']}", "dim", most=2
    )
    if model:
        page.wrapped(
            f"{model['type']} {params_text(model['params'])}, {model['layers']} layers; "
            f"{forecast['tokens_per_step']:,} tokens a step, context {forecast['context']:,}",
            "text",
        )
    if forecast.get("note"):
        page.wrapped(f"{glyphs.diamond} {forecast['note']}", "warn")


def _machine_name(machine: dict[str, Any]) -> str:
    """This machine has no name of its own before it is probed."""
    return "this machine" if machine["name"].startswith("generic") else str(machine["name"])


def _figures(page: _Page, forecast: dict[str, Any]) -> None:
    """The four figures that matter, large ones above their units."""
    rate = forecast.get("tokens_per_s")
    figures = [
        (seconds_text(forecast.get("step_s")), "a step"),
        ("n/a" if rate is None else f"{rate:,.0f}" if rate >= 10 else f"{rate:.2f}", "tokens/s"),
        (duration_text((forecast.get("run") or {}).get("seconds")), f"{forecast['steps']:,} steps"),
        (percent_text(forecast.get("mfu"), 1), "MFU"),
    ]
    page.gap()
    least = max(len(text) for figure in figures for text in figure) + 1
    each = 4 if page.width // 4 >= least else 2
    for start in range(0, 4, each):
        shown, room = figures[start : start + each], page.width // each
        page.line([(f"{value:<{room}}", "accent bold") for value, _ in shown])
        page.line([(f"{unit:<{room}}", "dim") for _, unit in shown])


def _tiers(page: _Page, forecast: dict[str, Any]) -> None:
    if not forecast.get("tiers"):
        return
    page.head("memory", "of its budget")
    for name, tier in forecast["tiers"].items():
        _tier(page, name, tier)


def _tier(page: _Page, name: str, tier: dict[str, Any]) -> None:
    peak, budget = tier.get("peak_bytes"), tier.get("budget_bytes")
    share = peak / budget if peak is not None and budget else None
    figures = of_text(peak, budget)
    percent = percent_text(share, 0)
    token = "text" if share is None or share < _FULL else "warn" if share <= 1 else "bad"
    label: Row = [(f"{name:<5}", f"tier.{name} bold"), (f"{percent:>5} ", f"{token} bold"), (f" {figures}", "text")]
    parts = _largest(tier.get("parts") or {})
    if page.width >= _SIDE_BY_SIDE:
        label[-1] = (f" {figures:<20} ", "text")
        room = page.width - sum(cell_len(text) for text, _ in label)
        page.line([*label, *_bar(room, peak, budget, parts, name, page.glyphs)])
    else:
        page.line(label)
        page.line(_bar(page.width, peak, budget, parts, name, page.glyphs))
    shades = _shades(page.glyphs)
    texts = [
        f"{shades[min(index, len(shades) - 1)]} {part} {bytes_text(size)}" for index, (part, size) in enumerate(parts)
    ]
    for line in filled(texts, "  ", page.width - 5):
        page.line([("     " + line, "dim")])


def _shades(glyphs: Glyphs) -> str:
    return "█▓▒░" if glyphs.braille else "#=+-"


def _bar(
    width: int, peak: float | None, budget: float | None, parts: Sequence[tuple[str, int]], name: str, glyphs: Glyphs
) -> Row:
    """The tier's parts in shades, as far as they fill the budget; beyond it, where it does not fit, in red."""
    free = "·" if glyphs.braille else "."
    if not budget or peak is None:
        return [(free * width, "axis")]
    scale = width / max(budget, peak)
    row: Row = []
    ends = list(itertools.accumulate(float(size) for _, size in parts)) or [peak]
    done = 0
    for shade, end in zip(_shades(glyphs), ends, strict=False):
        cells = max(round(end * scale), done + (1 if done == 0 else 0))
        row.append((shade * (cells - done), f"tier.{name}"))
        done = cells
    if peak > budget:
        inside = min(width - 1, max(1, round(budget * scale)))
        full, mark = _shades(glyphs)[0], glyphs.vline
        return [(full * inside, f"tier.{name}"), (mark, "title"), (full * (width - inside - 1), "bad")]
    return [*row, (free * (width - done), "axis")]


def _largest(parts: dict[str, int]) -> list[tuple[str, int]]:
    """The biggest parts of a tier, and the sum of the others."""
    found = sorted(((size, name) for name, size in parts.items() if size), reverse=True)
    named = [(name, size) for size, name in found[:_PARTS]]
    rest = found[_PARTS:]
    return [*named, (f"{len(rest)} more", sum(size for size, _ in rest))] if rest else named


def _lanes(page: _Page, forecast: dict[str, Any]) -> None:
    bound = forecast["bound_by"]
    page.head("lanes", f"bound by {bound}", f"lane.{bound}")
    name = max(map(len, forecast["lanes"]), default=0)
    wide = page.width >= _SIDE_BY_SIDE
    for lane, figures in forecast["lanes"].items():
        share, moved = figures.get("share"), figures.get("bytes")
        weight = " bold" if lane == bound else ""
        tail = f" {percent_text(share, 0):>4} {seconds_text(figures.get('busy_s')):>8}"
        if wide:
            tail += f" {bytes_text(moved) if moved else '-':>9}"
        room = page.width - name - 1 - len(tail)
        bar = _busy(share, room, page.glyphs)
        free = "·" if page.glyphs.braille else "."
        page.line(
            [
                (f"{lane:<{name}} ", f"text{weight}"),
                (bar, f"lane.{lane}"),
                (free * (room - len(bar)), "axis"),
                (tail, f"text{weight}"),
            ]
        )


def _busy(share: float | None, width: int, glyphs: Glyphs) -> str:
    """A bar in eighths of a cell where the terminal has them."""
    cells = min(1.0, max(0.0, share or 0.0)) * max(0, width)
    if not glyphs.braille:
        return "#" * round(cells)
    eighths = round(cells * 8)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def _help(page: _Page, forecast: dict[str, Any], phase: str) -> None:
    """What one change would bring."""
    if "best_change" not in forecast:
        if phase == "advising":
            page.head("helps most")
            page.line([(f"trying{page.glyphs.ellipsis}", "dim")])
        return
    best = forecast["best_change"]
    page.head("helps most", "b applies it" if best and best["set"] else "", "accent")
    if best is None:
        page.wrapped("no single change was found that helps", "dim")
    else:
        page.wrapped(best["text"] + _gain(best, forecast, page.glyphs), "good")
        _settings(page, best["set"], 2)
    tokens = forecast.get("compute_bound_tokens")
    page.wrapped(f"compute-bound from {'n/a' if tokens is None else f'{tokens:,}'} tokens a step", "dim")


def _gain(best: dict[str, Any], forecast: dict[str, Any], glyphs: Glyphs) -> str:
    rate, now = best.get("tokens_per_s"), forecast.get("tokens_per_s")
    return f" {glyphs.arrow} {rate:,.0f} tokens/s ({rate / now - 1:+.0%})" if rate and now else ""


def _refusal(page: _Page, forecast: dict[str, Any], phase: str) -> None:
    refusal = forecast["refusal"]
    short = refusal.get("short_bytes")
    page.gap()
    by = "" if short is None else f" by {bytes_text(short)}"
    if refusal.get("tier"):
        page.wrapped(f"the {refusal['tier']} tier is too small{by}", "bad bold")
    for name, tier in (forecast.get("tiers") or {}).items():
        if name in _TIERS:
            _tier(page, name, tier)
    changes = refusal.get("changes") or []
    page.head("what would fit", "a key applies it" if fixes(forecast) else "", "accent")
    if phase == "advising":
        page.line([(f"trying changes one by one{page.glyphs.ellipsis}", "dim")])
    elif not changes:
        page.wrapped("no single change was found to fit", "dim")
    for change in changes:
        if change["set"] and change in fixes(forecast):
            key = fixes(forecast).index(change) + 1
            page.line([(f"{key} ", "accent bold"), (change["text"], "text")])
        else:
            page.line([("- ", "dim"), (change["text"], "dim")])
        _settings(page, change["set"], 2)
    page.head("why")
    page.wrapped(refusal["message"], "dim")


def _settings(page: _Page, settings: Sequence[str], indent: int) -> None:
    for setting in settings:
        page.line([(" " * indent + setting, "ema")])


def _blocks(page: _Page, forecast: dict[str, Any]) -> None:
    """One cell a block, the first at the left: in which tier its weights, state and gradient live."""
    blocks = forecast.get("blocks") or []
    if not blocks:
        return
    legend = "  ".join(f"{mark} {tier}" for tier, mark in zip(_TIERS, _marks(page.glyphs), strict=True))
    page.head("blocks", legend)
    for target in _TARGETS:
        cells = min(len(blocks), page.width - 10)
        row: Row = [(f"{target:<10}", "dim")]
        places = [str(blocks[index * len(blocks) // cells][target]) for index in range(cells)]
        for tier, run in itertools.groupby(places):
            mark = _marks(page.glyphs)[_TIERS.index(tier)] if tier in _TIERS else "?"
            row.append((mark * len(list(run)), f"tier.{tier}"))
        page.line(row)
    page.wrapped(
        f"{forecast['chunks']:,} chunks of {forecast['chunk_tokens']:,} tokens; keys and values "
        f"{forecast['kv_window']}{_saved(blocks)}",
        "dim",
    )


def _marks(glyphs: Glyphs) -> str:
    """The tiers' marks: told apart without colours."""
    return "█▒░" if glyphs.braille else "grn"


def _saved(blocks: Sequence[dict[str, Any]]) -> str:
    counts: dict[str, int] = {}
    for block in blocks:
        for level, count in (block.get("saved") or {}).items():
            counts[level] = counts.get(level, 0) + count
    total = sum(counts.values())
    found = [f"{level} {count / total:.0%}" for level, count in counts.items() if count]
    return f"; saved for backward: {', '.join(found)}" if found else ""


def _drives(page: _Page, forecast: dict[str, Any]) -> None:
    drives = (forecast.get("run") or {}).get("drives") or []
    if not drives:
        return
    page.head("drives by the end")
    for text, alike in itertools.groupby(map(_drive, drives)):
        count = len(list(alike))
        page.wrapped(f"{count} drives, each {text}" if count > 1 else text, "text")


def _drive(drive: dict[str, Any]) -> str:
    share, endurance = drive.get("endurance_share"), drive.get("endurance_bytes")
    worn = percent_text(share, 1 if share is None or share >= 0.01 else 3)
    of = "" if endurance is None else f" of {bytes_text(endurance)}"
    name = f"{drive['path']}: " if drive.get("path") else ""
    return f"{name}{bytes_text(drive['bytes_written'])} written, endurance used {worn}{of}"


def _reasons(page: _Page, forecast: dict[str, Any]) -> None:
    reasons = forecast.get("reasons") or {}
    if reasons:
        page.head("why this plan")
        for choice, text in reasons.items():
            page.wrapped(f"{choice.replace('_', ' ')}: {text}", "dim")


# ---------------------------------------------------------------------- texts
