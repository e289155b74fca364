"""The action table: every action has a handler, and keys, footer, help and palette all come from it."""

from __future__ import annotations

import importlib
from collections import Counter
from pathlib import Path

import pytest
import real_runs
from rich.cells import cell_len
from textual.pilot import Pilot
from textual.widgets import OptionList

from penstock.app.rows import plain
from penstock.tui.actions import ACTIONS, GROUPS, actions, bindings, grouped, keys_page
from penstock.tui.app import PenstockApp
from penstock.tui.render.help import help_rows
from penstock.tui.screens.base import PenstockScreen
from penstock.tui.screens.help import HelpScreen

SCREENS = {"home": "HomeScreen", "configure": "ConfigureScreen", "run": "RunScreen", "timeline": "TimelineScreen"}
SCREENS |= {"compare": "CompareScreen", "fit": "FitScreen", "finetune": "FinetuneScreen"}


def screen_class(scope: str) -> type[PenstockScreen]:
    found = getattr(importlib.import_module(f"tui.screens.{scope}"), SCREENS[scope])
    assert issubclass(found, PenstockScreen)
    return found


def test_every_scope_is_a_screen() -> None:
    assert {action.scope for action in ACTIONS} == {"global", *SCREENS}


@pytest.mark.parametrize("scope", ["global", *SCREENS])
def test_every_action_has_a_handler_and_every_binding_is_an_action(scope: str) -> None:
    owner = PenstockApp if scope == "global" else screen_class(scope)
    for action in ACTIONS:
        if action.scope == scope:
            assert hasattr(owner, f"action_{action.id}"), f"{owner.__name__}.action_{action.id}"
    assert [binding.action for binding in bindings(scope)] == [a.id for a in ACTIONS if a.scope == scope]
    own = [binding.action if hasattr(binding, "action") else binding[1] for binding in owner.BINDINGS]
    assert own == [a.id for a in ACTIONS if a.scope == scope]


@pytest.mark.parametrize("scope", SCREENS)
def test_a_screens_keys_are_distinct_and_its_footer_short(scope: str) -> None:
    found = actions(scope)
    keys = [key for action in found for key in action.keys.split(",")]
    assert len(keys) == len(set(keys))
    for never in ({"resume", "export"}, {"freeze", "save_checkpoint", "stop"}):  # of a live run, of one that has ended
        assert sum(action.footer for action in found if scope != "run" or action.id not in never) <= 8


@pytest.mark.parametrize("scope", SCREENS)
def test_help_tells_every_action_in_as_many_columns_as_fit(scope: str) -> None:
    found = actions(scope)
    groups = grouped(found)
    assert sorted(action.id for each in groups.values() for action in each) == sorted(action.id for action in found)
    assert {id for ids in GROUPS[scope].values() for id in ids.split()} == {a.id for a in ACTIONS if a.scope == scope}
    heights = []
    for width in (30, 74, 114, 194):
        rows = help_rows(groups, width)
        assert {cell_len(line) for line in plain(rows).splitlines()} == {width}
        labels = "".join(text for row in rows for text, token in row if token == "good bold")
        assert len(labels) == sum(len(action.label) for action in found)
        shown = " ".join(text for row in rows for text, token in row if token == "text").split()
        assert Counter(shown) == Counter(word for action in found for word in action.help.split())
        titles = [text for row in rows for text, token in row if token == "accent bold"]
        assert sorted(titles) == sorted(groups)
        heights.append(len(rows))
    assert heights == sorted(heights, reverse=True)
    assert heights[-1] < heights[0] / 3


async def test_help_and_palette_of_a_screen_offer_what_it_can_do(app: PenstockApp, pilot: Pilot[None]) -> None:
    await pilot.pause()
    offered = {action.id for action in app.offered(app.screen)}
    assert {"open", "search", "mark", "quit"} <= offered
    commands = [command.title for command in app.get_system_commands(app.screen)]
    for action in app.offered(app.screen):
        if action.id != "command_palette":
            assert f"{action.label} ({action.shown_key})" in commands
    await pilot.press("question_mark")
    assert isinstance(app.screen, HelpScreen)
    await pilot.press("escape")
    assert not isinstance(app.screen, HelpScreen)
    await pilot.press("tab")  # recipes cannot be marked
    await pilot.pause()
    assert "mark" not in {action.id for action in app.offered(app.screen)}


async def test_a_palette_command_does_what_its_key_does(app: PenstockApp, pilot: Pilot[None]) -> None:
    before = app.theme
    await pilot.press("ctrl+p")
    await pilot.press(*"theme (f2)")
    await real_runs.until(lambda: app.screen.query_one(OptionList).option_count == 1, pilot.pause)
    await pilot.press("enter")
    await real_runs.until(lambda: app.theme != before, pilot.pause)


def test_the_page_of_keys_is_the_tables() -> None:
    page = Path(__file__).parents[2] / "docs" / "keys.md"
    assert page.read_text() == keys_page(), "make screens writes it anew"
