"""Home's lists at any width, and what is known of recipes from their text."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from penstock.app.rows import ASCII, UNICODE, plain
from penstock.storage.units import tokens_text
from penstock.tui.data.catalog import RunEntry
from penstock.tui.data.recipes import read_recipe_entry
from penstock.tui.render.home_table import PADDING, runs_table
from penstock.tui.render.names import distinct

LONG = "llama-3.1-8b-code-mixture-lr1e-5-bs32-seed"


@given(st.lists(st.text("ab-1", min_size=1, max_size=40), max_size=8), st.integers(2, 30))
def test_names_that_differ_look_different(names: list[str], width: int) -> None:
    shown = distinct(names, width, "…")
    for a, b in zip(names, shown, strict=True):
        assert cell_len(b) <= max(width, cell_len(a))
        assert a == b or cell_len(a) > width
    assert len(set(shown)) == len(set(names))


def test_names_are_cut_where_they_are_alike() -> None:
    assert distinct(["run-20260101-120000", "run-20260101-130000"], 12, "…") == ["run-2…120000", "run-2…130000"]
    middle = [f"{'a' * 40}{char}{'b' * 40}" for char in "xy"]
    assert [text.strip("ab") for text in distinct(middle, 12, "…")] == ["…x…", "…y…"]


@given(st.integers(20, 200), st.booleans(), st.booleans())
def test_columns_go_one_by_one_and_the_names_stay(width: int, ascii_only: bool, marked: bool) -> None:
    runs = [
        RunEntry(Path(f"/runs/{LONG}{i}"), "running", 1240, 8000, 2.5, 31_000.0, 720.0, losses=(3.0, 2.0, 2.5))
        for i in (1, 2)
    ]
    table = runs_table(
        runs, ["now", "now"], {runs[0].path} if marked else set(), width, ASCII if ascii_only else UNICODE
    )
    titles = [spec.title for spec in table.columns]
    assert titles[int(marked) : int(marked) + 2] == ["run", "state"]
    names = [plain([cells[int(marked)]]) for cells in table.rows.values()]
    assert len(set(names)) == 2
    assert all(plain([row[int(marked)]]).endswith(("1", "2")) for row in table.rows.values())
    if width >= 75:
        assert {"done", "step", "loss", "mean tok/s", "ETA"} <= set(titles)
        assert sum(spec.width + PADDING for spec in table.columns) <= width
    if width >= 115:
        assert {"progress", "last steps", "updated"} <= set(titles)


def test_contexts_as_people_say_them() -> None:
    assert [tokens_text(n) for n in (512, 1024, 8192, 524_288, 1_048_576, 1000, 5000)] == (
        ["512", "1k", "8k", "512k", "1M", "1,000", "5,000"]
    )


def known(folder: Path, text: str) -> tuple[str, int | None]:
    """Size and context that a recipe's text tells."""
    path = folder / "a.py"
    path.write_text(text)
    entry = read_recipe_entry(path, own=True)
    assert entry.problem is None
    return entry.size_text, entry.context


def test_a_recipes_text_tells_what_it_says_plainly_and_no_more(tmp_path: Path) -> None:
    head = "from penstock import *\n"
    model, data = "model=qwen25('7B', yarn_to=524288)", "data=DataConfig(sequence_length=524288)"
    assert known(tmp_path, f"{head}recipe = Recipe(name='a', {model}, {data})\n") == ("7B", 524_288)
    assert known(tmp_path, f"{head}recipe = Recipe(name='a')\n") == ("", 4096)
    path = "model=ModelConfig(path='models/Qwen3-0.6B')"
    assert known(tmp_path, f"{head}recipe = Recipe(name='a', {path}, data=make())\n") == ("0.6B", None)
    assert known(tmp_path, f"{head}n = 8\nrecipe = Recipe(name='a', data=DataConfig(sequence_length=n))\n") == (
        "",
        None,
    )
    changed = f"{head}recipe = Recipe(name='a', {data})\n"
    for more in ("recipe.data.sequence_length = 8\n", "recipe = recipe\n", "def DataConfig(**_): ...\n"):
        assert known(tmp_path, changed + more)[1] is None
    assert known(tmp_path, f"from mine import *\nrecipe = Recipe(name='a', {data})\n") == ("", None)
    assert known(tmp_path, f"{head}import sys\nsys.exit(3)\n") == ("", None)
