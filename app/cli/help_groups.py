"""The groups in which `penstock --help` lists the commands, in its framed form and in the plain one without rich."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
import typer.core

TRAIN = "Train"
LOOK = "Look at data, plans, models and runs"
CONTROL = "Control a run"
KEEP = "Keep and export state"
MACHINE = "Machine"
GROUPS = (TRAIN, LOOK, CONTROL, KEEP, MACHINE)


class GroupedCommands(typer.core.TyperGroup):
    """Commands sorted by the `rich_help_panel` that each was registered with, one of GROUPS."""

    def list_commands(self, ctx: Any) -> list[str]:
        names = super().list_commands(ctx)
        return sorted(names, key=lambda name: GROUPS.index(group_of(self.commands[name])))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Where rich is switched off (TYPER_USE_RICH=0): one section for each group."""
        names = self.list_commands(ctx)
        width = formatter.width - 6 - max(map(len, names))
        for group in GROUPS:
            listed = [name for name in names if group_of(self.commands[name]) == group]
            with formatter.section(group):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(width)) for name in listed])


def help_of(function: Callable[..., None]) -> str:
    """Its docstring, each paragraph in one line: typer keeps line ends in all paragraphs but the first."""
    return "\n\n".join(" ".join(part.split()) for part in str(function.__doc__).split("\n\n"))


def group_of(command: Any) -> str:
    return str(command.rich_help_panel)
