"""Everything that a key does, once: bindings, footer, help screen and command palette come from this table.

An action of scope `global` is a method of the app, of any other scope a method of that screen. Where a screen's
`check_action` says no, footer, help and palette leave the action out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from textual.binding import Binding

FOOTER, ACTS = 1, 2
"""The footer has room for it: eight a screen at most. It does more than show: writes files, works on runs, executes
recipes, and is refused in a read-only window."""


@dataclass(frozen=True, slots=True)
class Action:
    scope: str
    """`global`, or the SCOPE of a screen."""
    group: str
    """What it stands below on the help screen."""
    id: str
    """As Textual calls it: `back` is the method action_back, `zoom(2)` action_zoom with an argument."""
    keys: str
    """Textual's names, the first one is shown; several are separated by commas."""
    label: str
    """One or two words, for the footer and the palette."""
    help: str
    flags: int = 0

    @property
    def name(self) -> str:
        return self.id.partition("(")[0]

    @property
    def footer(self) -> bool:
        return bool(self.flags & FOOTER)

    @property
    def acts(self) -> bool:
        return bool(self.flags & ACTS)

    @property
    def shown_keys(self) -> list[str]:
        """The keys as people write them: ctrl+s as ^s."""
        return [_KEY_NAMES.get(key, key.replace("ctrl+", "^")) for key in self.keys.split(",")]

    @property
    def shown_key(self) -> str:
        return self.shown_keys[0]


_KEY_NAMES = {"question_mark": "?", "slash": "/", "full_stop": ".", "comma": ",", "escape": "esc"}
_KEY_NAMES |= {"left_square_bracket": "[", "right_square_bracket": "]", "plus": "+", "minus": "-"}

_TABLE: dict[str, list[tuple[str, str, str, str] | tuple[str, str, str, str, int]]] = {
    "global: everywhere": [
        ("help", "question_mark,f1", "Help", "Show every key of this screen.", FOOTER),
        ("command_palette", "ctrl+p", "Palette", "Search all commands.", FOOTER),
        ("back", "escape", "Back", "Leave this screen. Runs keep running."),
        ("quit", "q,ctrl+q", "Quit", "Close the application. Runs keep running.", FOOTER),
        ("next_theme", "f2", "Theme", "Switch the theme: dark, light, and high-contrast versions of both."),
    ],
    "home: open": [
        ("open", "enter", "Open", "Open the selected run, or configure the selected recipe.", FOOTER),
        ("configure", "c", "Configure", "Configure the recipe, or the run's for a new run.", FOOTER | ACTS),
        ("timeline", "t", "Timeline", "Show the run's last step, op by op."),
        ("resume", "R", "Resume", "Resume a stopped, failed, crashed or paused run.", ACTS),
        ("screen('fit')", "f", "What fits", "Show which models this machine can train, and how fast.", ACTS),
        ("screen('finetune')", "n", "Fine-tune", "Make a recipe from your own model and data.", FOOTER | ACTS),
    ],
    "home: lists": [
        ("search", "slash", "Search", "Filter recipes and runs by any word shown.", FOOTER),
        ("switch", "tab", "Recipes/runs", "Switch between runs and recipes."),
        ("mark", "space", "Mark", "Mark the run for comparison.", FOOTER),
        ("compare", "m", "Compare", "Compare the marked runs."),
    ],
    "configure: fields": [
        ("edit", "enter", "Edit", "Edit the field's value; a choice moves to its next value."),
        ("cycle(1)", "right,space", "Next choice", "Select the next value of a choice, or flip a switch."),
        ("cycle(-1)", "left", "Previous choice", "Select the previous value of a choice."),
        ("reset", "backspace,delete", "Reset", "Reset the field to the recipe's value."),
        ("reset_all", "U", "Reset all", "Reset every field to the recipe's value; asks first."),
        ("browse", "o", "Browse", "Choose the folder or file in a file browser."),
        ("filter", "slash", "Filter", "Show fields whose name or help has these words.", FOOTER),
        ("section(1)", "right_square_bracket", "Next section", "Go to the next section."),
        ("section(-1)", "left_square_bracket", "Previous section", "Go to the previous section."),
    ],
    "configure: plan": [
        ("switch", "tab,shift+tab", "Plan", "Switch between the form and the plan.", FOOTER),
        ("fix", "1,2,3,4,5,6,7,8,9", "Apply fix", "Apply one of the changes that make the recipe fit."),
        ("best", "b", "Best fix", "Apply the change that helps most."),
        ("machine", "m", "Machine", "Plan for this machine or another.", FOOTER),
        ("replan", "f5", "Plan again", "Run the planner again."),
    ],
    "configure: recipe": [
        ("differences", "d", "Changes", "List the fields that differ from the recipe."),
        ("save", "ctrl+s", "Save", "Save the recipe to a file.", FOOTER | ACTS),
        ("launch", "l,ctrl+l", "Launch", "Start this run on this machine; asks first.", FOOTER | ACTS),
        ("back", "escape", "Back", "Leave this screen; asks about unsaved changes."),
        ("quit", "q,ctrl+q", "Quit", "Close the application; asks about unsaved changes.", FOOTER),
    ],
    "fit: cells": [
        ("move(-1, 0)", "up,k", "Model above", "Select the model above."),
        ("move(1, 0)", "down,j", "Model below", "Select the model below."),
        ("move(0, -1)", "left,h", "Shorter", "Select a shorter context."),
        ("move(0, 1)", "right,l", "Longer", "Select a longer context."),
        ("configure", "enter", "Configure", "Save the selected recipe and configure it.", FOOTER | ACTS),
    ],
    "fit: plan": [
        ("machine", "m", "Machine", "Plan for this machine or another.", FOOTER),
        ("replan", "f5", "Plan again", "Plan everything again."),
    ],
    "finetune: the form": [
        ("look", "f5", "Inspect", "Inspect the model and the data given in the form.", FOOTER | ACTS),
        ("browse", "ctrl+o", "Browse", "Choose the model folder or the data.", FOOTER),
    ],
    "finetune: the recipe": [
        ("configure", "enter", "Configure", "Save the recipe and configure it.", FOOTER | ACTS),
    ],
    "run: display": [
        ("freeze", "space", "Freeze", "Freeze the display; the run keeps running.", FOOTER),
        ("timeline", "t", "Timeline", "Inspect any step of this run, op by op.", FOOTER),
        ("predicted", "p", "Predicted", "Show the planned step beside the real one."),
        ("log_scale", "y", "Log scale", "Draw the loss on a logarithmic axis."),
        ("outliers", "o", "Outliers", "Clip outliers off the loss axis, or show the full range."),
        ("axis", "x", "Axis", "Plot the loss over steps, tokens or time."),
        ("series(1)", "m", "Next metric", "Plot the next metric that the run measures in place of the loss."),
        ("series(-1)", "M", "Previous metric", "Plot the previous metric, or the loss."),
        ("filter_log", "slash", "Filter log", "Show log lines that contain a word; !word hides them."),
    ],
    "run: the run": [
        ("save_checkpoint", "k", "Checkpoint", "Save a named checkpoint after this step; asks first.", FOOTER | ACTS),
        ("pause", "P", "Pause", "Pause the run once its step is committed; asks first.", FOOTER | ACTS),
        ("resume", "R", "Resume", "Resume a paused, stopped, failed or crashed run.", FOOTER | ACTS),
        ("stop", "S", "Stop", "Stop the run once its step is committed; asks first.", FOOTER | ACTS),
        ("export", "e", "Export", "Export the model as a Hugging Face folder; asks first.", FOOTER | ACTS),
    ],
    "run: panes": [
        ("pane('loss')", "1", "Loss", "Focus the loss; again: toggle full screen."),
        ("pane('lanes')", "2", "Lanes", "Focus the lanes; again: toggle full screen."),
        ("pane('tiers')", "3", "Tiers", "Focus tiers and drives; again: toggle full screen."),
        ("pane('blocks')", "4", "Blocks", "Focus the block map; again: toggle full screen."),
        ("pane('log')", "5", "Log", "Focus the log; again: toggle full screen."),
        ("pane('plan')", "6", "Plan", "Focus the planned and the last step; again: toggle full screen."),
        ("pane('samples')", "7", "Samples", "Focus the samples; again: toggle full screen."),
    ],
    "run: samples": [
        ("samples(-1)", "left_square_bracket", "Older samples", "Show the samples of an earlier step."),
        ("samples(1)", "right_square_bracket", "Newer samples", "Show the samples of a later step."),
        ("prompt(1)", "n", "Next prompt", "Show the sample for the next prompt."),
        ("prompt(-1)", "N", "Previous prompt", "Show the sample for the previous prompt."),
    ],
    "run: zoom and select": [
        ("zoom(0.5)", "w,plus", "Zoom in", "Zoom in on the lanes, or on the focused loss."),
        ("zoom(2)", "s,minus", "Zoom out", "Zoom out of the lanes, or of the focused loss."),
        ("pan(-0.25)", "a,left", "Pan left", "Move the lanes, or the focused loss, back in time."),
        ("pan(0.25)", "d,right", "Pan right", "Move the lanes, or the focused loss, forward in time."),
        ("fit", "f", "Fit", "Reset the zoom and follow the run."),
        ("lane(-1)", "up", "Lane up", "Select the lane above, to step through its ops."),
        ("lane(1)", "down", "Lane down", "Select the lane below, to step through its ops."),
        ("span(1)", "full_stop", "Next", "Go to the next op of the lane, or the next step of the loss."),
        ("span(-1)", "comma", "Previous", "Go to the previous op, or the previous step."),
    ],
    "timeline: steps": [
        ("go(-1)", "left_square_bracket", "Back", "Show the previous step.", FOOTER),
        ("go(1)", "right_square_bracket", "Next", "Show the next step.", FOOTER),
        ("gpu", "v", "Next GPU", "Show the step as the next GPU ran it, in a run on several."),
        ("choose_step", "g", "Go to step", "Go to a step by its number, or to the last one."),
        ("predicted", "p", "Plan", "Show the planned step beneath each lane.", FOOTER),
        ("export", "x", "Export", "Write this step as a trace for ui.perfetto.dev.", FOOTER | ACTS),
        ("export_run", "X", "Export run", "Write the whole run as a trace for ui.perfetto.dev.", ACTS),
    ],
    "timeline: ops": [
        ("search", "slash", "Find", "Find ops by words of their name, block, lane or chunk.", FOOTER),
        ("span(1)", "full_stop,n", "Next op", "Select the next op of the lane, or the next match."),
        ("span(-1)", "comma,N", "Previous op", "Select the previous op, or the previous match."),
        ("blocker", "b", "Blocker", "Select the op that this one waited for last."),
        ("next_critical", "c", "Critical", "Select the next op on the critical path."),
        ("lane(-1)", "up", "Lane above", "Select the lane above."),
        ("lane(1)", "down", "Lane below", "Select the lane below."),
    ],
    "timeline: zoom": [
        ("zoom(0.5)", "w,plus", "Zoom in", "Halve the time span shown."),
        ("zoom(2)", "s,minus", "Zoom out", "Double the time span shown."),
        ("pan(-0.25)", "a,left", "Earlier", "Move the view back by a quarter."),
        ("pan(0.25)", "d,right", "Later", "Move the view forward by a quarter."),
        ("fit", "f", "Fit", "Show the whole step."),
    ],
    "compare: comparison": [
        ("axis", "x", "Axis", "Plot the loss over steps, tokens or time.", FOOTER),
        ("log_scale", "y", "Log scale", "Draw the loss on a logarithmic axis.", FOOTER),
        ("outliers", "o", "Outliers", "Clip outliers off the loss axis, or show the full range.", FOOTER),
        ("series(1)", "m", "Next metric", "Plot the next metric that a run measures in place of the loss."),
        ("series(-1)", "M", "Previous metric", "Plot the previous metric, or the loss."),
        ("differences", "d", "Only changes", "Show the fields that differ, or all fields.", FOOTER),
    ],
}
"""`scope: group` -> id, keys, label, help, flags."""
ACTIONS = tuple(Action(*where.split(": "), *row) for where, rows in _TABLE.items() for row in rows)  # type: ignore[arg-type]


def actions(scope: str) -> list[Action]:
    """The actions of a screen, and those that every screen has and this one has not made its own."""
    own = [action for action in ACTIONS if action.scope == scope]
    return own + [a for a in ACTIONS if a.scope == "global" and a.id not in {action.id for action in own}]


def grouped(result: Iterable[Action]) -> dict[str, list[Action]]:
    """Title -> the actions below it on the help screen."""
    return {title: list(actions) for title, actions in groupby(result, attrgetter("group"))}


def bindings(scope: str) -> list[Binding]:
    """The bindings of a screen, or of the app for `global`."""
    return [
        Binding(a.keys, a.id, a.label, show=a.footer, key_display=a.shown_key, tooltip=a.help)
        for a in ACTIONS
        if a.scope == scope
    ]


def keys_page() -> str:
    """docs/keys.md: every key of every screen."""
    lines = ["# Keys", ""]
    lines.append("Made from the action table (`tui/actions.py`) by `make screens`; `?` shows the same on every screen.")
    for scope, result in groupby(ACTIONS, attrgetter("scope")):
        lines += ["", f"## {'everywhere' if scope == 'global' else scope}", "| key | action | |", "|---|---|---|"]
        lines += [f"| {' '.join(f'`{key}`' for key in a.shown_keys)} | {a.label} | {a.help} |" for a in result]
    return "\n".join(lines) + "\n"
