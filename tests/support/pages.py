"""What stands on the pages for users."""

import re
from functools import cache
from typing import Any

import typer

import penstock.tui.commands  # noqa: F401  # the commands that the terminal application adds
from penstock.app.cli import cli


@cache
def root() -> Any:
    return typer.main.get_command(cli)


def require_command(page: str, line: str) -> None:
    """Fails unless what stands behind `penstock` is a command, with all of its options."""
    command = root()
    for word in line.split():
        if word[0].isalpha() and hasattr(command, "commands"):
            assert word in command.commands, f"{page}: penstock {line}"
            command = command.commands[word]
    options = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*", line):
        assert option in options, f"{page}: penstock {line}"
