"""What Home says where there is no run yet: how to begin."""

from __future__ import annotations

from penstock.app.console.rows import Row
from penstock.tui.actions import actions

_BEGINNINGS = {
    "open": "open the selected recipe; quickstart trains a small model in minutes on any machine",
    "finetune": "fine-tune a model of yours on your own data",
    "fit": "see which models this machine can train, and how fast",
    "help": "list all keys",
}
"""Action of Home -> what begins with it."""
_COMMANDS = (
    "In a shell: penstock train quickstart, or penstock finetune MODEL DATA.",
    "Runs appear here as they start.",
)


def welcome_rows(*, read_only: bool) -> list[Row]:
    """The lines, with the keys of the action table; a read-only window starts nothing."""
    found = {action.id: action for action in actions("home")}
    rows: list[Row] = [[("No runs yet.", "title")]]
    if not read_only:
        rows[0].append((" To start one, press", "text"))
        rows += [[(f"  {found[id].shown_key:<7}", "accent"), (words, "text")] for id, words in _BEGINNINGS.items()]
    return [*rows, *([(words, "dim")] for words in _COMMANDS)]
