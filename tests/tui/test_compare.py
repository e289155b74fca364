"""Compare against real runs, and against what is none."""

import shutil
from pathlib import Path

from seen import append, notices, until, widths
from textual.pilot import Pilot

from penstock.app.console.rows import ASCII, plain
from penstock.tui.app import PenstockApp
from penstock.tui.data.compare import MOST_RUNS, config_rows, figure_rows, read_new
from penstock.tui.data.run_data import RunData
from penstock.tui.render.table import table_rows
from penstock.tui.screens.compare import CompareScreen
from penstock.tui.widgets.lines import LineWidget

NEW = {"step": 13, "loss": 2.5, "step_s": 1.0, "tokens": 10}
"""A line of metrics.jsonl."""


def read(*paths: Path) -> list[RunData]:
    runs = [RunData(path, figures_only=True) for path in paths]
    for run in runs:
        read_new(run)
    return runs


def figures_of(*runs: RunData) -> dict[str, list[str]]:
    return {row[0]: row[1:] for row in figure_rows(list(runs))}


def test_figures_and_differing_fields_of_real_runs_and_whether_anything_is_new(root: Path) -> None:
    runs = read(root / "runs/first", root / "runs/second")
    figures = figures_of(*runs)
    assert (figures["steps"], figures["state"]) == (["12", "8"], ["finished", "finished"])
    assert figures["tokens"][0] == f"{sum(runs[0].metrics.column('tokens')):,.0f}"
    assert all(" s" in text for text in figures["step, mean"])
    assert all("KiB" in text or "MiB" in text for text in figures["gpu peak"])
    different = {row[0]: row[1:] for row in config_rows(runs, all_fields=False)}
    assert different == {"train.lr": ["0.01", "0.003"], "train.steps": ["12", "8"]}
    assert {row[0] for row in config_rows(runs, all_fields=True)} > {"train.lr", "name", "data.source"}
    run = RunData(root / "runs/first", figures_only=True)
    assert (read_new(run), read_new(run)) == (True, False)
    append(run.path / "metrics.jsonl", NEW)
    append(run.path / "validation.jsonl", {"step": 13, "loss": 3.25}, {"step": "x"})
    assert read_new(run)
    assert (figures_of(run)["loss, last"], figures_of(run)["validation, last"]) == (["2.5000"], ["3.2500"])


def test_runs_that_are_none_have_no_figures(tmp_path: Path, root: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "recipe.json").write_text("[" * 50_000)
    (tmp_path / "odd" / "summary.json").write_text('{"tiers": {"gpu": 3, "ram": {"peak_bytes": "x"}}}')
    (tmp_path / "odd" / "metrics.jsonl").write_text('{"step": 1}\n{}\n[]\n{"step": 2, "loss": "x"}\n')
    runs = read(tmp_path / "empty", tmp_path / "odd", tmp_path / "nowhere", root / "runs/first")
    figures = figures_of(*runs)
    assert figures["state"][2] == "vanished"
    assert figures["loss, last"][:3] == figures["gpu peak"][:3] == ["n/a"] * 3
    assert config_rows(runs, all_fields=False)[0][1:4] == ["n/a"] * 3


def test_a_table_fills_its_width_whatever_that_is() -> None:
    head = [("", "dim"), ("A", "text"), ("B", "text")]
    body = [["train.lr", "0.01", "0.003"], ["model.path", "/a/very/long/path/to/somewhere", "none"]]
    for width in (1, 2, 10, 24, 40, 100):
        assert widths(table_rows(head, body, width, ASCII.ellipsis)) == {width}
    wide = plain(table_rows(head, body, 60, ASCII.ellipsis))
    assert [part in wide for part in ("/a/very/long/path/to/", "none")] == [True, True]


async def test_what_runs_measure_beside_their_loss_is_compared(
    app: PenstockApp, pilot: Pilot[None], root: Path
) -> None:
    first, second = root / "runs/first", root / "runs/second"
    append(first / "metrics.jsonl", NEW | {"measured": {"kl": 0.5, "rewards/margins": 0.25}})
    append(second / "metrics.jsonl", NEW | {"measured": {"rewards/margins": None}})
    append(second / "validation.jsonl", {"step": 13, "loss": 3.25, "measured": {"kl": 2.0}})
    found = figures_of(*read(first, second))
    assert {name: found.get(name) for name in ("rewards/margins, last", "kl, last", "kl, validation")} == {
        "rewards/margins, last": ["0.250", "n/a"], "kl, last": ["0.500", "n/a"], "kl, validation": ["n/a", "2.00"],
    }  # fmt: skip
    app.open("compare", [first, second])
    await until(pilot, lambda: isinstance(app.screen, CompareScreen) and bool(app.screen.tables["config"]))
    screen = app.screen
    assert isinstance(screen, CompareScreen)
    loss = screen.query_one("#loss", LineWidget)
    titles = []
    for key in ("m", "m", "m", "M"):
        await pilot.press(key)
        titles.append(str(loss.border_title).partition(",")[0])
    assert titles == ["rewards/margins", "kl", "loss", "kl"]
    rows = plain(loss.rows(80, 16))
    assert ("A" in rows, "B" in rows) == (True, False), "only one measures it in its steps"


async def test_axes_scales_and_all_fields_and_a_live_runs_new_steps_and_a_vanished_run(
    app: PenstockApp, pilot: Pilot[None], root: Path
) -> None:
    app.open("compare", [root / "runs/first", root / "runs/second"])
    await until(pilot, lambda: isinstance(app.screen, CompareScreen) and bool(app.screen.tables["config"]))
    screen = app.screen
    assert isinstance(screen, CompareScreen)
    loss = screen.query_one("#loss", LineWidget)
    over_steps = plain(loss.rows(80, 16))
    assert [part in over_steps for part in ("step", "A", "B")] == [True] * 3
    for axis in ("tokens", "time"):
        await pilot.press("x")
        assert axis in plain(loss.rows(80, 16))
    await pilot.press("x", "y")
    assert "logarithmic" in str(loss.border_title)
    await pilot.press("y", "o")
    assert screen.clip is False
    assert [row[0] for row in screen.tables["config"]] == ["train.steps", "train.lr"]
    await pilot.press("d")
    assert len(screen.tables["config"]) > 20
    append(root / "runs/first/metrics.jsonl", NEW)
    shutil.rmtree(root / "runs/second")

    def found() -> bool:
        rows = {row[0]: row[1:] for row in screen.tables["figures"]}
        return bool(rows) and (rows["steps"][0], rows["state"][1]) == ("13", "vanished")

    await until(pilot, found)
    app.open("compare", [root / "runs/first"] * (MOST_RUNS + 2))  # more than there are letters
    await until(pilot, lambda: "2 marked ones are left out" in notices(pilot))
    await until(pilot, lambda: [len(row) for row in app.screen.tables["figures"][:1]] == [MOST_RUNS + 1])  # type: ignore[attr-defined]
