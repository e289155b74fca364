"""Screens of any size; without Unicode nothing else is drawn, by any screen, dialog or notification."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from samples import samples
from seen import running, until
from textual.app import App
from textual.geometry import Region
from textual.pilot import Pilot

from penstock.app.console.rows import ASCII, UNICODE, Glyphs
from penstock.tui.app import PenstockApp
from penstock.tui.widgets.form import Fields
from penstock.tui.widgets.lines import LineWidget


def drawn(app: App[Any]) -> str:
    """All characters of the screen on show."""
    return "\n".join(strip.text for strip in app.screen._compositor.render_strips())


SCREENS: dict[str, tuple[Callable[[PenstockApp, Path], None], tuple[str, ...]]] = {
    "home": (lambda app, runs: None, ("tab", "down")),
    "run": (lambda app, runs: app.open("run", runs / "first"), ("p", "w", "f", "full_stop", *"112233445566")),
    "timeline": (lambda app, runs: app.open("timeline", runs / "first"), ("c", "p", "w", "f", "full_stop")),
    "compare": (
        lambda app, runs: app.open("compare", [runs / "first", runs / "second", runs / "gone"]),
        ("x", "y", "d"),
    ),
}
"""How each is opened, and keys that change what it shows."""


@pytest.mark.sampled
@pytest.mark.parametrize("glyphs", [UNICODE, pytest.param(ASCII, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "name", ["home", "run", *(pytest.param(name, marks=pytest.mark.long) for name in ("timeline", "compare"))]
)
async def test_any_size(root: Path, monkeypatch: pytest.MonkeyPatch, name: str, glyphs: Glyphs) -> None:
    if glyphs is ASCII:
        monkeypatch.setenv("NO_COLOR", "1")
    show, keys = SCREENS[name]
    async with running(root, glyphs=glyphs) as (app, pilot):
        show(app, root / "runs")
        await until(pilot, lambda: "first" in drawn(app))
        for size in ((20, 5), (200, 60), (1, 1), (80, 24), (100, 20), (60, 50))[: samples(3, 6)]:
            await pilot.resize_terminal(*size)
            await pilot.press(*keys, "f2")
            await until(pilot, lambda size=size: app.screen.size == size)
            for pane in app.screen.query(LineWidget):
                if pane.display and pane.size.width:
                    lines = [pane.render_line(y) for y in range(pane.size.height)]
                    assert {line.cell_length for line in lines} <= {pane.size.width}
                    assert glyphs is UNICODE or all(line.text.isascii() for line in lines)


async def shows_ascii_alone(pilot: Pilot[Any], what: str) -> None:
    texts = [""]

    def is_at_rest() -> bool:
        texts.append(drawn(pilot.app))
        return bool(texts[-1].strip()) and texts[-1] == texts[-2]

    await until(pilot, is_at_rest)
    assert texts[-1].isascii(), (what, sorted({letter for letter in texts[-1] if not letter.isascii()}))


async def test_every_screen_and_dialog(root: Path) -> None:
    run = root / "runs/first"
    async with running(root, (100, 20), glyphs=ASCII) as (app, pilot):

        async def dialogs(**keys: str) -> None:
            for what, key in keys.items():
                await pilot.press(key)
                await shows_ascii_alone(pilot, what)
                await pilot.press("escape")

        await shows_ascii_alone(pilot, "home")
        await pilot.press("slash", "r")
        await shows_ascii_alone(pilot, "search")
        await pilot.press("escape")
        app.notify("a word", severity="error")
        await shows_ascii_alone(pilot, "notification")
        app.open("run", run)
        await shows_ascii_alone(pilot, "run")
        await dialogs(a_question_for_text="e", help="question_mark", palette="ctrl+p")
        app.run_worker(app.ask("title", "text"))
        await shows_ascii_alone(pilot, "a question")
        await pilot.press("escape")
        await dialogs(timeline="t")
        await pilot.press("escape")
        app.open("compare", [run, root / "runs/second"])
        await shows_ascii_alone(pilot, "compare")
        await pilot.press("escape")
        app.open("configure", root / "recipes/tiny.py")
        await shows_ascii_alone(pilot, "configure")
        assert all(row.text.isascii() for row in app.screen.query_one(Fields).render_lines(Region(0, 0, 80, 100)))
        await dialogs(machines="m", changes="d")
        await pilot.press("slash", *"model.path", "enter")
        await dialogs(folders="o")
        await pilot.press("enter", "a")
        await shows_ascii_alone(pilot, "a field under edit")
