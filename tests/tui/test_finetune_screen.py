"""Fine-tune: the form, what it says of a model and data, and how it goes on."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import real_runs
from chat_model import make_chat_model, write_talks
from sample_forecast import fitting
from sample_proposal import proposal
from textual.pilot import Pilot
from textual.widgets import Input

from penstock.app.recipe import load_recipe
from penstock.app.rows import ASCII, UNICODE, plain
from penstock.tui.app import PenstockApp
from penstock.tui.data import finetune_client
from penstock.tui.data.finetune_client import Asked, FinetuneState
from penstock.tui.render.finetune import finetune_rows
from penstock.tui.screens.configure import ConfigureScreen
from penstock.tui.screens.finetune import FinetuneScreen, Paths

FOUND = proposal(plan=fitting())


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the command is given, a line a call; the model `missing` is refused."""
    log, script, answer = tmp_path / "calls", tmp_path / "finetune.py", tmp_path / "answer.json"
    answer.write_text(json.dumps(FOUND))
    script.write_text(
        f"import sys\nopen({str(log)!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')\n"
        "print('tokenizing the data  12 documents', file=sys.stderr, flush=True)\n"
        "if 'missing' in sys.argv:\n    sys.exit('error: model.path: missing does not exist')\n"
        f"print(open({str(answer)!r}).read())\n"
    )
    monkeypatch.setattr(finetune_client, "COMMAND", (sys.executable, str(script)))
    return log


async def until(pilot: Pilot[None], condition: Callable[[], bool]) -> None:
    await real_runs.until(condition, pilot.pause, 120)


async def opened(app: PenstockApp, pilot: Pilot[None]) -> FinetuneScreen:
    """The form, from Home."""
    await pilot.pause()
    await pilot.press("n")
    await until(pilot, lambda: isinstance(app.screen, FinetuneScreen))
    screen = app.screen
    assert isinstance(screen, FinetuneScreen)
    return screen


@pytest.mark.parametrize(("width", "glyphs"), [(80, UNICODE), (40, ASCII)])
def test_the_page_tells_each_state(width: int, glyphs: object) -> None:
    asked = Asked("m", "d")
    states = {
        "Give a model and data above": FinetuneState(),
        "starting": FinetuneState(asked),
        "tokenizing the data": FinetuneState(asked, "tokenizing the data  3 s"),
        "no such model": FinetuneState(asked, "error", None, "no such model"),
        "5 documents, 1,253 tokens": FinetuneState(asked, "", FOUND),
    }
    for words, state in states.items():
        rows = finetune_rows(state, width, glyphs)  # type: ignore[arg-type]
        assert words in " ".join(plain(rows).split())
        assert all(sum(len(text) for text, _ in row) <= width for row in rows)
    page = plain(finetune_rows(states.popitem()[1], 100, UNICODE))
    assert page.index("as training reads them") < page.index("train.lr") < page.index("fits on gh200-480")


def test_the_command_is_given_what_the_form_says() -> None:
    assert Asked("m", "d").arguments() == ["--", "m", "d"]
    words = ["--epochs", "2", "--set", "data.sequence_length=4096", "--", "-m", "d"]
    assert Asked("-m", "d", "2", "4096").arguments() == words


async def test_names_are_completed_where_the_application_works(tmp_path: Path) -> None:
    (tmp_path / "models" / "qwen").mkdir(parents=True)
    (tmp_path / "models" / ".hidden").mkdir()
    (tmp_path / "talks.jsonl").touch()
    files, folders = Paths(tmp_path, folders_only=False), Paths(tmp_path, folders_only=True)
    assert await folders.get_suggestion("mod") == "models/"
    assert await folders.get_suggestion("models/q") == "models/qwen/"
    assert await folders.get_suggestion(f"{tmp_path}/mod") == f"{tmp_path}/models/"
    assert await files.get_suggestion("ta") == "talks.jsonl"
    assert await folders.get_suggestion("ta") is None
    assert await files.get_suggestion("models/x") is None
    assert await files.get_suggestion("nowhere/\0x") is None
    assert await files.get_suggestion("") is None


async def test_from_a_model_and_data_to_a_recipe(place: Path, log: Path) -> None:
    app = PenstockApp(place)
    async with app.run_test(size=(100, 40)) as pilot:
        screen = await opened(app, pilot)
        await pilot.press("enter")
        assert screen.focused is not None
        assert screen.focused.id == "model", "a model is missing"
        await pilot.press(*"m7b", "enter")
        assert screen.focused.id == "data", "data is missing"
        await pilot.press(*"d.jsonl", "tab", *"x2", "enter")
        await until(pilot, lambda: screen.client.state.report is not None)
        assert log.read_text() == "--epochs 2 -- m7b d.jsonl\n"
        assert "configure" in {action.id for action in app.offered(screen)}
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, ConfigureScreen))
        saved = place / "recipes" / "llama_talks.json"
        assert load_recipe(saved).train.lr == 2e-5
        await pilot.press("escape")
        await until(pilot, lambda: app.screen is screen)
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, ConfigureScreen))
        assert not (place / "recipes" / "llama_talks_2.json").exists(), "the same recipe is there"
        await pilot.press("escape")
        saved.write_text('{"name": "mine"}')
        await until(pilot, lambda: app.screen is screen)
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, ConfigureScreen))
        assert saved.read_text() == '{"name": "mine"}', "what is there stays"
        assert (place / "recipes" / "llama_talks_2.json").exists()


async def test_what_is_wrong_is_said_and_mended(place: Path, log: Path) -> None:
    app = PenstockApp(place)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await opened(app, pilot)
        screen.query_one("#model", Input).value = "missing"
        screen.query_one("#data", Input).value = "d"
        await pilot.press("enter")
        await until(pilot, lambda: screen.client.state.trouble is not None)
        assert screen.client.state.trouble == "model.path: missing does not exist"
        assert "configure" not in {action.id for action in app.offered(screen)}
        screen.query_one("#model", Input).value = "found"
        await pilot.press("enter")
        await until(pilot, lambda: screen.client.state.report is not None)
        screen.query_one("#data", Input).value = "another"
        await pilot.pause()
        assert "configure" not in {action.id for action in app.offered(screen)}, "what is shown is of other data"
        await pilot.press("f5")
        await until(pilot, lambda: log.read_text().endswith("-- found another\n"))


@pytest.mark.long
async def test_the_command_itself_answers_the_form(tmp_path: Path) -> None:
    make_chat_model(tmp_path / "tiny-chat")
    write_talks(tmp_path / "talks.jsonl")
    app = PenstockApp(tmp_path)
    async with app.run_test(size=(100, 40)) as pilot:
        screen = await opened(app, pilot)
        await pilot.press(*"tiny-chat", "tab", *"talks.jsonl", "enter")
        await until(pilot, lambda: screen.client.state.done)
        assert screen.client.state.trouble is None
        assert "60 documents, 4,350 tokens" in plain(finetune_rows(screen.client.state, 98, UNICODE))
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, ConfigureScreen))
    recipe = load_recipe(tmp_path / "recipes" / "tiny_chat_talks.json")
    assert (recipe.data.source, recipe.data.sequence_length) == ("messages", 128)
