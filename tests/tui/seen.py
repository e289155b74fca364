"""What tests of the terminal application press, wait for and see; spans made up for its lanes."""

import json
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import real_runs
from rich.cells import cell_len
from textual.app import App
from textual.pilot import Pilot

from penstock.app.console.rows import UNICODE, Row, plain
from penstock.tui.app import PenstockApp
from penstock.tui.data.spans import SpanStore, SpanView
from penstock.tui.theme import THEMES
from penstock.tui.widgets.lines import LineWidget


class Themed(App[None]):
    """For a widget alone."""

    glyphs = UNICODE

    def on_mount(self) -> None:
        for theme in THEMES:
            self.register_theme(theme)
        self.theme = "penstock-dark"


@asynccontextmanager
async def running(
    root: Path, size: tuple[int, int] = (120, 36), run: Path | None = None, **more: Any
) -> AsyncIterator[tuple[Any, Pilot[None]]]:
    """The application, at home or on a run, and its pilot."""
    app = PenstockApp(root, run, **more)
    async with app.run_test(size=size, notifications=True) as pilot:
        await pilot.pause()
        yield app, pilot


async def opened(pilot: Pilot[Any], kind: type, *keys: str) -> Any:
    """The screen that keys open."""
    await pilot.press(*keys)
    await until(pilot, lambda: isinstance(pilot.app.screen, kind))
    await pilot.pause()
    return pilot.app.screen


async def until(pilot: Pilot[Any], condition: Callable[[], bool]) -> None:
    await real_runs.until(condition, pilot.pause)


async def press(pilot: Pilot[Any], *keys: str) -> None:
    """Keys, and what they lead to is drawn."""
    await pilot.press(*keys)
    await pilot.pause()


def notices(pilot: Pilot[Any]) -> str:
    return "\n".join(f"{note.title} {note.message}" for note in pilot.app._notifications)


def drawn(widget: LineWidget) -> str:
    """What a widget shows, as text."""
    return plain(widget.rows(max(1, widget.size.width), max(1, widget.size.height)))


def widths(rows: Sequence[Row]) -> set[int]:
    """Of rows, in cells."""
    return {sum(cell_len(text) for text, _ in row) for row in rows}


def stand_in(folder: Path, answer: str, refused: str, why: str) -> tuple[str, ...]:
    """A command that notes in `calls` what it is given, and answers at once; it refuses what has that argument."""
    (folder / "answer").write_text(answer + "\n")
    (folder / "command.py").write_text(
        f"import sys\nopen({str(folder / 'calls')!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')\n"
        "print('tokenizing the data  12 documents', file=sys.stderr, flush=True)\n"
        f"if {refused!r} in sys.argv:\n    sys.exit({'error: ' + why!r})\n"
        f"print(open({str(folder / 'answer')!r}).read(), end='', flush=True)\n"
    )
    return sys.executable, str(folder / "command.py")


def append(path: Path, *lines: object) -> None:
    """Objects to a .jsonl file."""
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def span(lane: str, start: float, end: float, **more: Any) -> dict[str, Any]:
    """A line of spans.jsonl."""
    fields = {"lane": lane, "op": "o", "block": "b", "chunk": -1, "start_s": start, "end_s": end, "bytes": 0, "step": 1}
    return fields | more


def view_of(*spans: dict[str, Any]) -> SpanView:
    store = SpanStore(10_000)
    assert store.add(spans) == len(spans)
    return store.view
