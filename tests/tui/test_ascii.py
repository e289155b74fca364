"""Without Unicode nothing else is drawn, by any screen, dialog or notification."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

from textual.pilot import Pilot

from app.rows import ASCII
from tui.app import PenstockApp


def drawn(app: PenstockApp) -> str:
    """All characters of the picture."""
    texts = re.findall(r"<text[^>]*>([^<]*)<", app.export_screenshot())
    return html.unescape("".join(texts)).replace("\N{NO-BREAK SPACE}", " ")


async def shows_ascii_alone(pilot: Pilot[Any], what: str) -> None:
    await pilot.pause(0.5)
    assert isinstance(pilot.app, PenstockApp)
    text = drawn(pilot.app)
    assert text.strip(), what
    assert text.isascii(), (what, sorted({letter for letter in text if not letter.isascii()}))


async def test_every_screen_and_dialog(root: Path) -> None:
    app = PenstockApp(root, glyphs=ASCII)
    run = root / "runs/first"
    async with app.run_test(size=(100, 20), notifications=True) as pilot:
        await shows_ascii_alone(pilot, "home")
        await pilot.press("slash", "r")
        await shows_ascii_alone(pilot, "search")
        await pilot.press("escape")
        app.notify("a word", severity="error")
        await shows_ascii_alone(pilot, "notification")
        app.open_run(run)
        await pilot.pause(0.5)
        await shows_ascii_alone(pilot, "run")
        for key, what in (("e", "a question for text"), ("question_mark", "help"), ("ctrl+p", "palette")):
            await pilot.press(key)
            await shows_ascii_alone(pilot, what)
            await pilot.press("escape")
        app.run_worker(app.ask("title", "text"))
        await shows_ascii_alone(pilot, "a question")
        await pilot.press("escape", "t")
        await pilot.pause(0.5)
        await shows_ascii_alone(pilot, "timeline")
        await pilot.press("escape", "escape")
        app.open_compare([run, root / "runs/second"])
        await shows_ascii_alone(pilot, "compare")
        await pilot.press("escape")
        app.open_configure(root / "recipes/tiny.py")
        await shows_ascii_alone(pilot, "configure")
        for keys, what in (("m", "machines"), ("d", "changes")):
            await pilot.press(keys)
            await shows_ascii_alone(pilot, what)
            await pilot.press("escape")
        await pilot.press("slash", *"model.path", "enter", "o")
        await shows_ascii_alone(pilot, "folders")
        await pilot.press("escape", "enter", "a")
        await shows_ascii_alone(pilot, "a field under edit")
