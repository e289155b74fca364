"""The Fit and Fine-tune screens: what they show as answers come, and how they go on; with commands that are quick."""

import json
from pathlib import Path
from typing import Any

import pytest
from chat_model import make_chat_model, write_talks
from sample_forecast import fitting
from sample_proposal import proposal
from seen import opened, press, running, stand_in, until, widths
from textual.widgets import Input

from penstock.app.console.rows import ASCII, UNICODE, plain
from penstock.app.planning import fit
from penstock.app.planning.catalogue import known_model
from penstock.app.recipes.recipe import changes, load_recipe
from penstock.tui.data import processes
from penstock.tui.data.processes import FinetuneRequest, FinetuneState, FitState
from penstock.tui.render.plan import detail_rows, finetune_rows, matrix_rows
from penstock.tui.screens.configure import ConfigureScreen
from penstock.tui.screens.dialogs import MachinePicker
from penstock.tui.screens.finetune import FinetuneScreen, Paths
from penstock.tui.screens.fit import FitScreen

pytestmark = pytest.mark.usefixtures("few_fields")

ASKED = fit.ask(machine="rtx4090-64", models="Qwen2.5-7B,Llama-3.3-70B", contexts="8k,1M")
COST = {"tokens_per_s": 1691.0, "hours": 1.64, "bound_by": "compute", "kwh_at_most": 0.74, "step_s": 155.0, "mfu": 0.5}
COST |= {"written_bytes": 4 * 10**12, "endurance_share": 0.002}
FITTING = {"fits": True, "peak_bytes": {"gpu": 2**34, "ram": 2**36, "nvme": 2**38}} | COST
REFUSED = {"fits": False, "tier": "gpu", "short_bytes": 7 * 2**29, "message": "budgets.gpu: too small"}
REFUSED["changes"] = [
    {"set": ["data.sequence_length=524288"], "text": "a shorter context"},
    {"set": [], "text": "a machine with 26.35 GiB of GPU memory"},
]


def cell(model: str, context: int) -> dict[str, Any]:
    """The 70B does not fit with the long context."""
    known = known_model(model)
    recipe = fit.cell_recipe(ASKED, known, context)
    found = {"model": model, "context": context, "tokens_per_step": 262_144, "recipe": changes(recipe)}
    found |= {"gradient_dtype": recipe.train.gradient_dtype, "stretched": known.is_stretched(context)}
    return found | (REFUSED if (model, context) == ("Llama-3.3-70B", 1 << 20) else FITTING)


CELLS = [cell(model, context) for model in ASKED.models for context in ASKED.contexts]


def state(cells: list[dict[str, Any]], *, done: bool = True) -> FitState:
    return FitState(ASKED.to_json(), {(c["model"], c["context"]): c for c in cells}, done=done)


def test_what_fits_is_told_without_colours() -> None:
    planning, chosen = state(CELLS[1:], done=False), ("Llama-3.3-70B", 8192)
    for width, glyphs in ((80, UNICODE), (40, ASCII), (20, ASCII)):
        assert widths(matrix_rows(planning, chosen, width, 14, glyphs)) == {width}
    assert [line.split() for line in plain(matrix_rows(planning, chosen, 80, 14, UNICODE)).splitlines()[:3]] == [
        ["8k", "1M"],
        ["Qwen2.5-7B", "…", "✓", "1,691", "1.6", "h"],
        ["Llama-3.3-70B", "→", "✓", "1,691", "1.6", "h", "✗", "gpu"],
    ]
    rows = matrix_rows(state(CELLS), chosen, 60, 2, UNICODE)  # scrolled to what is chosen
    assert len(rows) == 2
    assert "Llama-3.3-70B" in plain(rows[1:])


def test_details_say_what_a_cell_costs_or_what_would_fit() -> None:
    text = plain(detail_rows(state(CELLS), ("Qwen2.5-7B", 1 << 20), 60, UNICODE))
    for part in ("1,691 tokens/s", "10M tokens take 1.6 h", "bound by compute", "writes 4.0 TB 0.2%", "kWh 0.74"):
        assert part in text
    assert "at its power limit of 450 W" in " ".join(text.split())
    text = " ".join(plain(detail_rows(state(CELLS), ("Llama-3.3-70B", 1 << 20), 100, UNICODE)).split())
    assert "does not fit: gpu tier too small by 3.5 GiB" in text
    assert "a shorter context (data.sequence_length=524288); or a machine with 26.35 GiB of GPU memory" in text
    assert "planning" in plain(detail_rows(state([], done=False), ("Qwen2.5-7B", 8192), 60, UNICODE))


@pytest.fixture
def fit_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the command is given, a line a call."""
    lines = "\n".join(map(json.dumps, [ASKED.to_json(), *CELLS]))
    command = stand_in(tmp_path, lines, "dgx-spark", "no such machine here")
    monkeypatch.setattr(processes, "FIT_COMMAND", command)
    return tmp_path / "calls"


async def test_from_home_to_a_cells_recipe_and_why_nothing_is_planned(place: Path, fit_log: Path) -> None:
    async with running(place, (80, 24)) as (_, pilot):
        screen = await opened(pilot, FitScreen, "f")
        await until(pilot, lambda: screen.client.state.done)
        assert screen.chosen == ("Qwen2.5-7B", 8192)
        await pilot.press("down", "down", "right", "right")
        assert screen.chosen == ("Llama-3.3-70B", 1 << 20)
        await opened(pilot, MachinePicker, "m")
        await pilot.press(*"rtx4090-64", "enter")
        await until(pilot, lambda: fit_log.read_text() == "\n--machine rtx4090-64\n" and screen.client.state.done)
        assert (await opened(pilot, ConfigureScreen, "left", "enter")).machine_name == "rtx4090-64"
        saved = place / "recipes" / "llama_3_3_70b_8k_rtx4090_64.json"
        assert load_recipe(saved) == fit.cell_recipe(ASKED, known_model("Llama-3.3-70B"), 8192)
        mine = saved.read_text().replace('"steps": ', '"steps": 1')
        saved.write_text(mine)
        await opened(pilot, FitScreen, "escape")
        await opened(pilot, ConfigureScreen, "enter")
        assert saved.read_text() == mine, "what is there stays"
        screen = await opened(pilot, FitScreen, "escape")
        await opened(pilot, MachinePicker, "m")
        await pilot.press(*"dgx-spark", "enter")
        await until(pilot, lambda: "no such machine here" in plain(screen._detail(98, 10, UNICODE)))
        await press(pilot, "enter")
        assert pilot.app.screen is screen, "there is nothing to open"


FOUND = proposal(plan=fitting())


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the command is given, a line a call; the model `missing` is refused."""
    command = stand_in(tmp_path, json.dumps(FOUND), "missing", "model.path: missing does not exist")
    monkeypatch.setattr(processes, "FINETUNE_COMMAND", command)
    return tmp_path / "calls"


def test_the_page_tells_each_state() -> None:
    asked = FinetuneRequest("m", "d")
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
    assert FinetuneRequest("-m", "d", "2", "4096").arguments() == words


async def test_names_are_completed_where_the_application_works(tmp_path: Path) -> None:
    (tmp_path / "models" / "qwen").mkdir(parents=True)
    (tmp_path / "models" / ".hidden").mkdir()
    (tmp_path / "talks.jsonl").touch()
    files, folders = Paths(tmp_path, folders_only=False), Paths(tmp_path, folders_only=True)
    named = {"mod": "models/", "models/q": "models/qwen/", f"{tmp_path}/mod": f"{tmp_path}/models/", "ta": None}
    assert {text: await folders.get_suggestion(text) for text in named} == named
    named = {"ta": "talks.jsonl", "models/x": None, "nowhere/\0x": None, "": None}
    assert {text: await files.get_suggestion(text) for text in named} == named


async def test_what_is_wrong_is_said_and_a_model_and_data_become_a_recipe(place: Path, log: Path) -> None:
    saved, second = place / "recipes" / "llama_talks.json", place / "recipes" / "llama_talks_2.json"
    async with running(place, (80, 24)) as (app, pilot):
        screen = await opened(pilot, FinetuneScreen, "n")

        def offers() -> bool:
            return "configure" in {action.id for action in app.offered(screen)}

        await pilot.press("enter")
        assert screen.focused.id == "model", "a model is missing"
        await pilot.press(*"missing", "enter")
        assert screen.focused.id == "data", "data is missing"
        await pilot.press(*"another", "tab", *"x2", "enter")
        await until(pilot, lambda: screen.client.state.trouble is not None)
        assert screen.client.state.trouble == "model.path: missing does not exist"
        assert not offers()
        screen.query_one("#model", Input).value = "m7b"
        await pilot.press("enter")
        await until(pilot, lambda: screen.client.state.report is not None)
        assert offers()
        screen.query_one("#data", Input).value = "d.jsonl"
        await pilot.pause()
        assert not offers(), "what is shown is of other data"
        await pilot.press("f5")
        await until(pilot, lambda: log.read_text().endswith("--epochs 2 -- m7b d.jsonl\n"))
        await until(pilot, offers)
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
