"""Home's two lists for any width: what matters least goes first, and no two names look the same; and how to begin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.cells import cell_len, set_cell_size

from penstock.app.console.rows import Glyphs, Row
from penstock.app.runs.speed import speed_figure
from penstock.storage.files.units import duration_text, params_text, tokens_text
from penstock.tui.actions import actions
from penstock.tui.data.catalog import RunEntry
from penstock.tui.data.recipes import RecipeEntry
from penstock.tui.render.kpi import STATE_TOKENS
from penstock.tui.render.one_row import bar, sparkline

if TYPE_CHECKING:
    from penstock.app.planning.fits import Fit


_TAIL_SHARES = (0.5, 0.33, 0.67, 0.0, 1.0)
"""How much of what remains of a name is its end: the first at which all names differ is taken."""


def cut_middle(name: str, width: int, ellipsis: str, tail_share: float = 0.5) -> str:
    """The name in at most `width` cells, with `ellipsis` in the place of what is left out."""
    if cell_len(name) <= width:
        return name
    if width < 2:
        return ellipsis[:width]
    tail = round((width - 1) * tail_share)
    head = set_cell_size(name, width - 1 - tail).rstrip(" ")
    end = ""
    for char in reversed(name):
        if cell_len(char + end) > tail:
            break
        end = char + end
    return head + ellipsis + end


def distinct(names: Sequence[str], width: int, ellipsis: str) -> list[str]:
    """The names in at most `width` cells each, or as many as it takes for those that differ to look different."""
    longest = max(map(cell_len, names), default=0)
    for cells in range(max(2, width), longest):
        for share in _TAIL_SHARES:
            cut = [cut_middle(name, cells, ellipsis, share) for name in names]
            if len(set(cut)) == len(set(names)):
                return cut
    return list(names)


PADDING = 2
_LEAST_NAME = 12
_BAR_CELLS = 10
_LEAST_ABOUT = 20
_MOST_NAME_SHARE = 3
"""A name takes a third of the width at most, where it need not have more."""
_UNKNOWN = "?"


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    title: str
    width: int
    right: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    columns: list[ColumnSpec]
    rows: dict[str, list[Row]]
    """Key -> a cell a column."""


@dataclass(frozen=True, slots=True, eq=False)
class _Source:
    """A column before it is known whether there is room for it."""

    title: str
    cells: list[Row]
    keep: int
    """Columns of the least go first; 0 always stays."""
    right: bool = True
    flexible: bool = False
    """Whether it may be cut to `_LEAST_ABOUT`, and takes what is left."""

    @property
    def width(self) -> int:
        return max([cell_len(self.title), *(sum(cell_len(text) for text, _ in cell) for cell in self.cells)])


def runs_table(runs: Sequence[RunEntry], ages: Sequence[str], marked: set[Path], width: int, glyphs: Glyphs) -> Table:
    """A row a run: state, progress, loss and its curve, mean speed, time to the end, last sign of life."""
    infos = [run.info for run in runs]
    tokens = [STATE_TOKENS.get(run.state, "dim") for run in infos]
    shares = [min(1.0, run.step / run.total_steps) if run.total_steps > 0 else None for run in infos]
    done = ["-" if share is None else f"{share:.0%}" for share in shares]
    steps = [f"{run.step:,}/{run.total_steps:,}" if run.total_steps else "-" for run in infos]
    losses = ["-" if run.loss is None else f"{run.loss:.4f}" for run in infos]
    left = ["-" if run.left_s is None else duration_text(run.left_s) for run in runs]
    means = [run.mean_tokens_per_s for run in infos]
    speeds: list[Row] = [[("-", "dim") if mean is None else (speed_figure(mean), "text")] for mean in means]
    bars = [bar(_BAR_CELLS, share, None, glyphs, token) for share, token in zip(shares, tokens, strict=True)]
    sources = [
        _Source("state", [[(run.state, token)] for run, token in zip(infos, tokens, strict=True)], 0, right=False),
        _Source("progress", bars, 3, right=False),
        _Source("done", _texts(done), 8),
        _Source("step", _texts(steps), 6),
        _Source("loss", _texts(losses), 9),
        _Source("last steps", [[(sparkline(run.losses, 10, glyphs.eighths), "ema")] for run in runs], 4, right=False),
        _Source("mean tok/s", speeds, 5),
        _Source("ETA", _texts(left), 7),
        _Source("updated", _texts(ages, "dim"), 2),
    ]
    if marked:
        marks = _texts([glyphs.check if run.path in marked else " " for run in infos], "accent")
        sources.insert(0, _Source("", marks, 0, right=False))
    names, keys = [run.name for run in infos], [str(run.path) for run in infos]
    return _table("run", names, keys, sources, int(bool(marked)), width, glyphs)


def _texts(texts: Sequence[str], token: str = "text") -> list[Row]:
    return [[(text, token)] for text in texts]


def recipes_table(
    recipes: Sequence[RecipeEntry], fits: Mapping[Path, Fit | None], planning: set[Path], width: int, glyphs: Glyphs
) -> Table:
    """A row a recipe: its model's size, its context, whether it fits this machine, what it is.

    `planning`: those whose answer will come.
    """
    stems = [(recipe.name, recipe.own) for recipe in recipes]
    names = [r.path.name if stems.count((r.name, r.own)) > 1 else r.name for r in recipes]
    known = [(recipe, fits.get(recipe.path), recipe.path in planning) for recipe in recipes]
    about = [[(recipe.problem or recipe.title, "bad" if recipe.problem else "text")] for recipe in recipes]
    gpus = _texts([recipe.gpu for recipe in recipes], "dim")
    sources = [
        _Source("size", [[_size(*each, glyphs)] for each in known], 8),
        _Source("context", [[_context(recipe, fit)] for recipe, fit, _ in known], 7),
        _Source("fits here?", [fit_row(fit, coming, glyphs) for _, fit, coming in known], 9, right=False),
        _Source("description", about, 5, right=False, flexible=True),
        _Source("GPU", gpus, 4, right=False, flexible=True),
    ]
    if any(recipe.own for recipe in recipes):
        own = _texts(["own" if recipe.own else "" for recipe in recipes], "accent")
        sources.insert(0, _Source("", own, 0, right=False))
    return _table("recipe", names, [str(recipe.path) for recipe in recipes], sources, 0, width, glyphs)


def _size(recipe: RecipeEntry, fit: Fit | None, planning: bool, glyphs: Glyphs) -> tuple[str, str]:
    if fit is not None and fit.params is not None:
        return params_text(fit.params).replace(" ", ""), "text"
    if recipe.size_text:
        return recipe.size_text, "text"
    return glyphs.ellipsis if planning and fit is None else _UNKNOWN, "dim"


def _context(recipe: RecipeEntry, fit: Fit | None) -> tuple[str, str]:
    tokens = recipe.context if fit is None or fit.context is None else fit.context
    return (_UNKNOWN, "dim") if tokens is None else (tokens_text(tokens), "text")


def fit_row(fit: Fit | None, planning: bool, glyphs: Glyphs) -> Row:
    """Whether the recipe fits this machine, in a word or two."""
    if fit is None:
        return [(glyphs.ellipsis if planning else _UNKNOWN, "dim")]
    if fit.fits is None:
        return [(_UNKNOWN, "dim")]
    return [(f"{glyphs.check} fits", "good")] if fit.fits else [(f"no: {fit.short}", "warn")]


def _table(
    title: str, names: list[str], keys: list[str], sources: list[_Source], at: int, width: int, glyphs: Glyphs
) -> Table:
    """The columns that fit `width` cells, that of the names before column `at`."""
    longest = max(map(cell_len, [title, *names]))
    least = max([len(title), *map(cell_len, distinct(names, min(longest, _LEAST_NAME), glyphs.ellipsis))])
    widths = {source: source.width for source in sources if source.keep == 0}
    available = width - least - PADDING - sum(cells + PADDING for cells in widths.values())
    for source in sorted(sources, key=lambda source: -source.keep):
        needed = min(source.width, _LEAST_ABOUT) if source.flexible else source.width
        if source.keep == 0 or needed + PADDING > available:
            break
        widths[source] = needed
        available -= needed + PADDING
    name_cells = min(longest, least + max(0, available), max(least, width // _MOST_NAME_SHARE))
    available -= name_cells - least
    columns, cells = [], []
    for source in sources:
        if source not in widths:
            continue
        if source.flexible:
            more = min(source.width - widths[source], max(0, available))
            widths[source], available = widths[source] + more, available - more
        columns.append(ColumnSpec(source.title, widths[source], source.right))
        cells.append(source.cells)
    cut = distinct(names, name_cells, glyphs.ellipsis)
    columns.insert(at, ColumnSpec(title, name_cells))
    cells.insert(at, [[(name, "text")] for name in cut])
    return Table(columns, {key: [column[i] for column in cells] for i, key in enumerate(keys)})


_BEGINNINGS = {
    "open": "open the selected recipe; quickstart trains a small model in minutes on any machine",
    "screen('finetune')": "fine-tune a model of yours on your own data",
    "screen('fit')": "see which models this machine can train, and how fast",
    "help": "list all keys",
}
"""Action of Home -> what begins with it."""
_COMMANDS = (
    "In a shell: penstock train quickstart, or penstock finetune MODEL DATA.",
    "Runs appear here as they start.",
)


def welcome_rows(*, read_only: bool) -> list[Row]:
    """The lines, with the keys of the action table; a read-only window starts nothing."""
    result = {action.id: action for action in actions("home")}
    rows: list[Row] = [[("No runs yet.", "title")]]
    if not read_only:
        rows[0].append((" To start one, press", "text"))
        rows += [[(f"  {result[id].shown_key:<7}", "accent"), (words, "text")] for id, words in _BEGINNINGS.items()]
    return [*rows, *([(words, "dim")] for words in _COMMANDS)]
