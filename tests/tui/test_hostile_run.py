"""A run directory of which every text and every name wants to move the terminal: what is drawn obeys none of it."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from seen import until
from textual._compositor import CompositorUpdate
from textual.screen import Screen

import penstock.tui.app
from penstock.app.cli.main import main
from penstock.app.console.rows import UNICODE
from penstock.tui.app import PenstockApp
from penstock.tui.screens.dialogs import PathPicker

DRAWN_AT_ONCE = True

HERE = Path(__file__).parent
ESCAPES = "\x1b]0;owned\x07\x1b]52;c;b3duZWQ=\x1b\\\x1b[7777X\x9d0;owned\x9c\x9b7777X\u202e\u2066\x08\x7f\x0e"
MARKUP = "[on #010203][@click=app.quit][link=http://x]owned"
PAYLOAD = MARKUP + ESCAPES + "\n"
FORBIDDEN = re.compile("\x1b\\]|\x1b\\[7777|[\x07\x08\x0e\x7f-\x9f\u202a-\u202e\u2066-\u2069]|48;2;1;2;3|\x1b\\\\")
MEASURED = {name: 0.5 for name in (PAYLOAD, ESCAPES, "[on #010203][@click=app.quit]owned", "漢字" * 40)}
KEPT = {"state", "lane", "op", "clip", "weights", "gradient", "level", "source", "model_type"}
"""Fields whose words decide what is shown: with others there would be nothing."""


def poisoned(value: Any, key: str = "") -> Any:
    """Every text with the payload before it; names of drives, which are keys, too."""
    if isinstance(value, str):
        return value if key in KEPT else PAYLOAD + value
    if isinstance(value, list):
        return [poisoned(item, key) for item in value]
    if isinstance(value, dict):
        return {(PAYLOAD + name if "/" in name else name): poisoned(item, name) for name, item in value.items()}
    return value


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with such runs, finished, failed, crashed and of unknown state; their directories' names are no text."""
    for number, state in enumerate(("finished", "failed", "running", MARKUP + ESCAPES)):
        run = tmp_path / "runs" / (f"{number}{MARKUP + ESCAPES}".replace("/", "") + os.fsdecode(b"\xff"))
        shutil.copytree(HERE / "snapshot_run", run)
        for file in run.rglob("*.json"):
            file.write_text(json.dumps(poisoned(json.loads(file.read_text()))))
        for file in run.glob("*.jsonl"):
            objects = [poisoned(json.loads(line)) for line in file.open()]
            if file.name in ("metrics.jsonl", "validation.jsonl"):
                objects = [line | {"measured": MEASURED} for line in objects]
            lines = [json.dumps(line, ensure_ascii=number % 2 == 0) for line in objects]
            file.write_text("\n".join(lines) + "\n")
        status = json.loads((run / "status.json").read_text())
        preparing = [{"name": PAYLOAD, "state": "running", "seconds": 1.0, "detail": PAYLOAD, "fraction": 0.5}]
        status |= {"state": state, "error": PAYLOAD + "why", "preparing": preparing, "host": None}
        (run / "status.json").write_text(json.dumps({name: word for name, word in status.items() if word is not None}))
        (run / "output.log").write_text(PAYLOAD * 3)
        kept = run / "state" / "checkpoints" / f"{ESCAPES}kept"
        kept.mkdir(parents=True)
        (kept / "manifest.json").write_text('{"meta": {"step": 3}}')
    (tmp_path / "recipes").mkdir()
    head = f'"""{MARKUP}\x9b7777X\n\nGPU   {MARKUP}"""\n'
    (tmp_path / "recipes" / f"own{ESCAPES}.py").write_text(f"{head}x = (\n")
    (tmp_path / "recipes" / f"fine{ESCAPES}.py").write_text(head)
    return tmp_path


class RecordedApp(PenstockApp):
    """Keeps what a terminal would have got."""

    CSS_PATH = Path(penstock.tui.app.__file__).with_name("app.tcss")
    drawn = ""

    def _display(self, screen: Screen[Any], renderable: Any) -> None:
        if isinstance(renderable, CompositorUpdate):
            self.drawn += renderable.render_segments(self.console)
        elif renderable is not None:
            self.drawn += "".join(segment.text for segment in self.console.render(renderable))
        super()._display(screen, renderable)


def hostile_runs(root: Path) -> list[Path]:
    return sorted((root / "runs").iterdir())


def picker(folder: Path) -> PathPicker:
    return PathPicker(MARKUP + ESCAPES, "", folder, folders_only=False)


STATES = ("finished", "failed", "crashed", "unknown")
SCREENS: dict[str, Callable[[PenstockApp, list[Path]], Any]] = {
    "home": lambda app, runs: None,
    **{state: lambda app, runs, n=n: app.open("run", runs[n]) for n, state in enumerate(STATES)},
    "timeline": lambda app, runs: app.open("timeline", runs[0]),
    "compare": lambda app, runs: app.open("compare", runs),
    "configure": lambda app, runs: app.open("configure", runs[0] / "recipe.json"),
    "picker": lambda app, runs: app.push_screen(picker(runs[0].parent)),
    "question": lambda app, runs: app.run_worker(app.ask(PAYLOAD, PAYLOAD, "Yes")),
    "notice": lambda app, runs: app.screen.notify(PAYLOAD, title=PAYLOAD),
}
KEYS = {"home": ("down", "down", "down", "tab", "end", "up"), "timeline": ("full_stop", "enter")}
KEYS |= dict.fromkeys([*STATES, "compare"], ("m",))


async def test_nothing_that_is_drawn_is_obeyed(root: Path) -> None:
    app = RecordedApp(root, glyphs=UNICODE)
    async with app.run_test(size=(200, 60), notifications=True) as pilot:
        home = app.screen
        for name, show in SCREENS.items():
            show(app, hostile_runs(root))
            await until(pilot, lambda: "owned" in app.drawn)  # it is shown, as text
            await pilot.press(*KEYS.get(name, ()))
            await pilot.pause(0.2)
            assert app.is_running, name
            assert FORBIDDEN.findall(app.drawn) == [], name
            app.drawn.encode()
            while app.screen is not home:
                app.pop_screen()
            await pilot.pause()
            app.drawn = ""


def test_the_command_line_prints_no_escape(
    root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(root)
    for run in map(str, hostile_runs(root)):
        for words in (["lanes", run], ["lanes", run, "--json"], ["pause", run], ["stop", Path(run).name]):
            main(words)
        for words in (["trace", run, "-o", str(root / "trace.json")], ["checkpoint", run], ["resume", run]):
            main(words)
    (hostile_runs(root)[1] / "recipe.json").write_text(json.dumps({"name": PAYLOAD, PAYLOAD: PAYLOAD}))
    main(["resume", str(hostile_runs(root)[1])])
    assert main(["runs"]) == 0
    output = "".join(capfd.readouterr())
    assert MARKUP.partition("[link")[0] in output, "markup is text"
    assert FORBIDDEN.findall(output) == []
