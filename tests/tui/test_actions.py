"""The action table: every action has a handler, and keys, footer, help and palette all come from it."""

import importlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from seen import press, until, widths
from textual.pilot import Pilot
from textual.widgets import OptionList

from penstock.tui.actions import ACTIONS, GROUPS, actions, bindings, grouped, keys_page
from penstock.tui.app import PenstockApp
from penstock.tui.render.help import help_rows
from penstock.tui.screens.help import HelpScreen

SCREENS = [scope for scope in dict.fromkeys(action.scope for action in ACTIONS) if scope != "global"]


def screen_class(scope: str) -> Any:
    return getattr(importlib.import_module(f"tui.screens.{scope}"), f"{scope.capitalize()}Screen")


@pytest.mark.parametrize("scope", ["global", *SCREENS])
def test_every_action_has_a_handler_and_every_binding_is_an_action(scope: str) -> None:
    owner = PenstockApp if scope == "global" else screen_class(scope)
    ids = [action.id for action in ACTIONS if action.scope == scope]
    assert [name for name in ids if not hasattr(owner, f"action_{name}")] == []
    assert [binding.action for binding in bindings(scope)] == ids
    assert [binding.action if hasattr(binding, "action") else binding[1] for binding in owner.BINDINGS] == ids


@pytest.mark.parametrize("scope", SCREENS)
def test_keys_are_distinct_the_footer_is_short_and_help_tells_all_in_as_many_columns_as_fit(scope: str) -> None:
    found = actions(scope)
    keys = [key for action in found for key in action.keys.split(",")]
    assert len(keys) == len(set(keys))
    for never in ({"resume", "export"}, {"freeze", "save_checkpoint", "stop"}):  # of a live run, of one that has ended
        assert sum(action.footer for action in found if scope != "run" or action.id not in never) <= 8
    groups = grouped(found)
    assert sorted(action.id for each in groups.values() for action in each) == sorted(action.id for action in found)
    assert {id for ids in GROUPS[scope].values() for id in ids.split()} == {a.id for a in ACTIONS if a.scope == scope}
    heights = []
    for width in (30, 74, 114, 194):
        rows = help_rows(groups, width)
        assert widths(rows) == {width}
        told: dict[str, list[str]] = {"good bold": [], "text": [], "accent bold": []}
        for text, token in (piece for row in rows for piece in row if piece[1] in told):
            told[token].append(text)
        assert len("".join(told["good bold"])) == sum(len(action.label) for action in found)
        assert Counter(" ".join(told["text"]).split()) == Counter(w for action in found for w in action.help.split())
        assert sorted(told["accent bold"]) == sorted(groups)
        heights.append(len(rows))
    assert heights == sorted(heights, reverse=True)
    assert heights[-1] < heights[0] / 3


async def test_help_and_palette_of_a_screen_offer_what_it_can_do(app: PenstockApp, pilot: Pilot[None]) -> None:
    await pilot.pause()
    offered = app.offered(app.screen)
    assert {"open", "search", "mark", "quit"} <= {action.id for action in offered}
    commands = {command.title for command in app.get_system_commands(app.screen)}
    assert {f"{action.label} ({action.shown_key})" for action in offered if action.id != "command_palette"} <= commands
    await pilot.press("question_mark")
    assert isinstance(app.screen, HelpScreen)
    await pilot.press("escape")
    assert not isinstance(app.screen, HelpScreen)
    await press(pilot, "tab")  # recipes cannot be marked
    assert "mark" not in {action.id for action in app.offered(app.screen)}


async def test_a_palette_command_does_what_its_key_does(app: PenstockApp, pilot: Pilot[None]) -> None:
    before = app.theme
    await pilot.press("ctrl+p", *"theme (f2)")
    await until(pilot, lambda: app.screen.query_one(OptionList).option_count == 1)
    await pilot.press("enter")
    await until(pilot, lambda: app.theme != before)


def test_the_page_of_keys_is_the_tables() -> None:
    page = Path(__file__).parents[2] / "docs" / "keys.md"
    assert page.read_text() == keys_page(), "make screens writes it anew"
