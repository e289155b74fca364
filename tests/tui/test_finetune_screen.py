"""Fine-tune: the form, what it says of a model and data, and how it goes on."""

import json
from pathlib import Path

import pytest
from chat_model import make_chat_model, write_talks
from sample_forecast import fitting
from sample_proposal import proposal
from seen import opened, running, stand_in, until, widths
from textual.widgets import Input

from penstock.app.recipe import load_recipe
from penstock.app.rows import ASCII, UNICODE, plain
from penstock.tui.data import finetune_client
from penstock.tui.data.finetune_client import Asked, FinetuneState
from penstock.tui.render.finetune import finetune_rows
from penstock.tui.screens.configure import ConfigureScreen
from penstock.tui.screens.finetune import FinetuneScreen, Paths

FOUND = proposal(plan=fitting())


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the command is given, a line a call; the model `missing` is refused."""
    command = stand_in(tmp_path, json.dumps(FOUND), "missing", "model.path: missing does not exist")
    monkeypatch.setattr(finetune_client, "COMMAND", command)
    return tmp_path / "calls"


def test_the_page_tells_each_state() -> None:
    asked = Asked("m", "d")
    states = {
        "Give a model and data above": FinetuneState(),
        "starting": FinetuneState(asked),
        "tokenizing the data": FinetuneState(asked, "tokenizing the data  3 s"),
        "no such model": FinetuneState(asked, "error", None, "no such model"),
        "5 documents, 1,253 tokens": FinetuneState(asked, "", FOUND),
    }
    for words, state in states.items():
        for width, glyphs in ((80, UNICODE), (40, ASCII)):
            rows = finetune_rows(state, width, glyphs)
            assert words in " ".join(plain(rows).split())
            assert max(widths(rows)) <= width
    page = plain(finetune_rows(states.popitem()[1], 100, UNICODE))
    assert page.index("as training reads them") < page.index("train.lr") < page.index("fits on gh200-480")
    assert asked.arguments() == ["--", "m", "d"]
    words = ["--epochs", "2", "--set", "data.sequence_length=4096", "--", "-m", "d"]
    assert Asked("-m", "d", "2", "4096").arguments() == words


async def test_names_are_completed_where_the_application_works(tmp_path: Path) -> None:
    (tmp_path / "models" / "qwen").mkdir(parents=True)
    (tmp_path / "models" / ".hidden").mkdir()
    (tmp_path / "talks.jsonl").touch()
    files, folders = Paths(tmp_path, folders_only=False), Paths(tmp_path, folders_only=True)
    named = {"mod": "models/", "models/q": "models/qwen/", f"{tmp_path}/mod": f"{tmp_path}/models/", "ta": None}
    assert {text: await folders.get_suggestion(text) for text in named} == named
    named = {"ta": "talks.jsonl", "models/x": None, "nowhere/\0x": None, "": None}
    assert {text: await files.get_suggestion(text) for text in named} == named


async def test_from_a_model_and_data_to_a_recipe(place: Path, log: Path) -> None:
    saved, second = place / "recipes" / "llama_talks.json", place / "recipes" / "llama_talks_2.json"
    async with running(place, (100, 40)) as (app, pilot):
        screen = await opened(pilot, FinetuneScreen, "n")
        await pilot.press("enter")
        assert screen.focused.id == "model", "a model is missing"
        await pilot.press(*"m7b", "enter")
        assert screen.focused.id == "data", "data is missing"
        await pilot.press(*"d.jsonl", "tab", *"x2", "enter")
        await until(pilot, lambda: screen.client.state.report is not None)
        assert log.read_text() == "--epochs 2 -- m7b d.jsonl\n"
        assert "configure" in {action.id for action in app.offered(screen)}
        await opened(pilot, ConfigureScreen, "enter")
        assert load_recipe(saved).train.lr == 2e-5
        await opened(pilot, FinetuneScreen, "escape")
        await opened(pilot, ConfigureScreen, "enter")
        assert not second.exists(), "the same recipe is there"
        await opened(pilot, FinetuneScreen, "escape")
        saved.write_text('{"name": "mine"}')
        await opened(pilot, ConfigureScreen, "enter")
        assert saved.read_text() == '{"name": "mine"}', "what is there stays"
        assert second.exists()


async def test_what_is_wrong_is_said_and_mended(place: Path, log: Path) -> None:
    async with running(place, (80, 24)) as (app, pilot):
        screen = await opened(pilot, FinetuneScreen, "n")
        model, data = screen.query_one("#model", Input), screen.query_one("#data", Input)

        def offers() -> bool:
            return "configure" in {action.id for action in app.offered(screen)}

        model.value, data.value = "missing", "d"
        await pilot.press("enter")
        await until(pilot, lambda: screen.client.state.trouble is not None)
        assert screen.client.state.trouble == "model.path: missing does not exist"
        assert not offers()
        model.value = "found"
        await pilot.press("enter")
        await until(pilot, lambda: screen.client.state.report is not None)
        data.value = "another"
        await pilot.pause()
        assert not offers(), "what is shown is of other data"
        await pilot.press("f5")
        await until(pilot, lambda: log.read_text().endswith("-- found another\n"))


@pytest.mark.long
async def test_the_command_itself_answers_the_form(tmp_path: Path) -> None:
    make_chat_model(tmp_path / "tiny-chat")
    write_talks(tmp_path / "talks.jsonl")
    async with running(tmp_path, (100, 40)) as (_, pilot):
        screen = await opened(pilot, FinetuneScreen, "n")
        await pilot.press(*"tiny-chat", "tab", *"talks.jsonl", "enter")
        await until(pilot, lambda: screen.client.state.done)
        assert screen.client.state.trouble is None
        assert "60 documents, 4,350 tokens" in plain(finetune_rows(screen.client.state, 98, UNICODE))
        await opened(pilot, ConfigureScreen, "enter")
    recipe = load_recipe(tmp_path / "recipes" / "tiny_chat_talks.json")
    assert (recipe.data.source, recipe.data.sequence_length) == ("messages", 128)
