"""`penstock --help`: every command in one of five groups, with and without rich, and help for everything."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from cli_process import done, started

import penstock.tui.commands  # noqa: F401  # the commands that the terminal application adds
from penstock.app.cli import cli
from penstock.app.help_groups import GROUPS, group_of

ROOT: Any = typer.main.get_command(cli)
ASCII = {"TERM": "dumb", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "NO_COLOR": "1"}


@pytest.mark.parametrize("environment", [{}, ASCII, {"TYPER_USE_RICH": "0"}], ids=["plain", "ascii", "without rich"])
def test_every_command_is_listed_once_below_its_group(tmp_path: Path, environment: dict[str, str]) -> None:
    process = started(tmp_path, sys.executable, "-P", "-m", "penstock", "--help", **environment)
    group, listed = "", dict[str, str]()
    for line in done(process).stdout.splitlines():
        text = line.strip(" │|╭╮─+-:")
        group = text if text in GROUPS else group
        if group and (words := text.split()) and words[0] in ROOT.commands and line[2:].startswith(words[0]):
            assert words[0] not in listed
            listed[words[0]] = group
    assert listed == {name: group_of(command) for name, command in ROOT.commands.items()}
    assert set(listed.values()) == set(GROUPS)
    assert len(GROUPS) == 5


def commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield name, command
    for word, inner in getattr(command, "commands", {}).items():
        yield from commands(f"{name} {word}", inner)


def test_commands_and_options_have_a_sentence_of_help() -> None:
    for name, command in commands("penstock", ROOT):
        first = command.help.splitlines()[0]
        assert first[0].isupper(), first
        assert first.endswith("."), first
        for param in command.params:
            if param.name not in ("install_completion", "show_completion"):
                assert param.help.endswith("."), f"{name} {param.name}: {param.help}"
