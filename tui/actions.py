"""Everything that a key does, once: bindings, footer, help screen and command palette come from this table.

An action `id` of scope `global` is `action_<id>` of the app, of any other scope `action_<id>` of that screen. Where a
screen's `check_action` says no, footer, help and palette leave the action out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from textual.binding import Binding


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a key does."""

    scope: str
    """`global`, or the SCOPE of a screen."""
    id: str
    keys: str
    """Textual's names, the first one is shown; several are separated by commas."""
    label: str
    """One or two words, for the footer and the palette."""
    help: str
    footer: bool = False
    """Whether the footer has room for it; eight a screen at most."""
    acts: bool = False
    """Whether it does more than show: writes files, works on runs, executes recipes. Refused in a read-only window."""

    @property
    def shown_keys(self) -> list[str]:
        """The keys as people write them: ctrl+s as ^s."""
        return [_KEY_NAMES.get(key, key.replace("ctrl+", "^")) for key in self.keys.split(",")]

    @property
    def shown_key(self) -> str:
        return self.shown_keys[0]


_KEY_NAMES = {
    "question_mark": "?",
    "slash": "/",
    "full_stop": ".",
    "comma": ",",
    "left_square_bracket": "[",
    "right_square_bracket": "]",
    "escape": "esc",
    "plus": "+",
    "minus": "-",
}

_acting = partial(Action, acts=True)

ACTIONS: tuple[Action, ...] = (
    Action("global", "help", "question_mark,f1", "Help", "Show every key of this screen.", footer=True),
    Action("global", "command_palette", "ctrl+p", "Palette", "Search all commands.", footer=True),
    Action("global", "back", "escape", "Back", "Leave this screen. Runs keep running."),
    Action("global", "quit", "q,ctrl+q", "Quit", "Close the application. Runs keep running.", footer=True),
    Action("global", "next_theme", "f2", "Theme", "Switch the theme: dark, light, and high-contrast versions of both."),
    Action("home", "open", "enter", "Open", "Open the selected run, or configure the selected recipe.", footer=True),
    Action("home", "search", "slash", "Search", "Filter recipes and runs by any word shown.", footer=True),
    _acting("home", "configure", "c", "Configure", "Configure the recipe, or the run's for a new run.", footer=True),
    Action("home", "mark", "space", "Mark", "Mark the run for comparison.", footer=True),
    Action("home", "compare", "m", "Compare", "Compare the marked runs."),
    Action("home", "timeline", "t", "Timeline", "Show the run's last step, op by op."),
    _acting("home", "resume", "R", "Resume", "Resume a stopped, failed, crashed or paused run."),
    Action("home", "switch", "tab", "Recipes/runs", "Switch between runs and recipes."),
    Action("home", "fit", "f", "What fits", "Show which models this machine can train, and how fast."),
    _acting("home", "finetune", "n", "Fine-tune", "Make a recipe from your own model and data.", footer=True),
    Action("configure", "edit", "enter", "Edit", "Edit the field's value; a choice moves to its next value."),
    Action(
        "configure", "next_choice", "right,space", "Next choice", "Select the next value of a choice, or flip a switch."
    ),
    Action("configure", "previous_choice", "left", "Previous choice", "Select the previous value of a choice."),
    Action("configure", "reset", "backspace,delete", "Reset", "Reset the field to the recipe's value."),
    Action("configure", "reset_all", "U", "Reset all", "Reset every field to the recipe's value; asks first."),
    Action("configure", "browse", "o", "Browse", "Choose the folder or file in a file browser."),
    Action(
        "configure",
        "filter",
        "slash",
        "Filter",
        "Show fields whose name or help has these words.",
        footer=True,
    ),
    Action("configure", "next_section", "right_square_bracket", "Next section", "Go to the next section."),
    Action("configure", "previous_section", "left_square_bracket", "Previous section", "Go to the previous section."),
    Action("configure", "switch", "tab,shift+tab", "Plan", "Switch between the form and the plan.", footer=True),
    Action("configure", "fix", "1,2,3,4,5,6,7,8,9", "Apply fix", "Apply one of the changes that make the recipe fit."),
    Action("configure", "best", "b", "Best fix", "Apply the change that helps most."),
    Action("configure", "machine", "m", "Machine", "Plan for this machine or another.", footer=True),
    Action("configure", "differences", "d", "Changes", "List the fields that differ from the recipe."),
    _acting("configure", "save", "ctrl+s", "Save", "Save the recipe to a file.", footer=True),
    _acting("configure", "launch", "l,ctrl+l", "Launch", "Start this run on this machine; asks first.", footer=True),
    Action("configure", "replan", "f5", "Plan again", "Run the planner again."),
    Action("configure", "back", "escape", "Back", "Leave this screen; asks about unsaved changes."),
    Action("configure", "quit", "q,ctrl+q", "Quit", "Close the application; asks about unsaved changes.", footer=True),
    _acting("fit", "configure", "enter", "Configure", "Save the selected recipe and configure it.", footer=True),
    Action("fit", "machine", "m", "Machine", "Plan for this machine or another.", footer=True),
    Action("fit", "model_up", "up,k", "Model above", "Select the model above."),
    Action("fit", "model_down", "down,j", "Model below", "Select the model below."),
    Action("fit", "context_left", "left,h", "Shorter", "Select a shorter context."),
    Action("fit", "context_right", "right,l", "Longer", "Select a longer context."),
    Action("fit", "replan", "f5", "Plan again", "Plan everything again."),
    _acting("finetune", "look", "f5", "Inspect", "Inspect the model and the data given in the form.", footer=True),
    Action("finetune", "browse", "ctrl+o", "Browse", "Choose the model folder or the data.", footer=True),
    _acting("finetune", "configure", "enter", "Configure", "Save the recipe and configure it.", footer=True),
    Action("run", "freeze", "space", "Freeze", "Freeze the display; the run keeps running.", footer=True),
    Action("run", "log_scale", "y", "Log scale", "Draw the loss on a logarithmic axis."),
    Action("run", "outliers", "o", "Outliers", "Clip outliers off the loss axis, or show the full range."),
    Action("run", "predicted", "p", "Predicted", "Show the planned step beside the real one."),
    Action("run", "filter_log", "slash", "Filter log", "Show log lines that contain a word; !word hides them."),
    Action("run", "timeline", "t", "Timeline", "Inspect any step of this run, op by op.", footer=True),
    _acting(
        "run",
        "save_checkpoint",
        "k",
        "Checkpoint",
        "Save a named checkpoint at the end of this step; asks first.",
        footer=True,
    ),
    _acting(
        "run",
        "pause",
        "P",
        "Pause",
        "Pause the run once its step is committed; asks first.",
        footer=True,
    ),
    _acting("run", "resume", "R", "Resume", "Resume a paused, stopped, failed or crashed run.", footer=True),
    _acting("run", "stop", "S", "Stop", "Stop the run once its step is committed; asks first.", footer=True),
    _acting("run", "export", "e", "Export", "Export the model as a Hugging Face folder; asks first.", footer=True),
    Action("run", "axis", "x", "Axis", "Plot the loss over steps, tokens or time."),
    Action("run", "pane_loss", "1", "Loss", "Focus the loss; again: toggle full screen."),
    Action("run", "pane_lanes", "2", "Lanes", "Focus the lanes; again: toggle full screen."),
    Action("run", "pane_tiers", "3", "Tiers", "Focus tiers and drives; again: toggle full screen."),
    Action("run", "pane_blocks", "4", "Blocks", "Focus the block map; again: toggle full screen."),
    Action("run", "pane_log", "5", "Log", "Focus the log; again: toggle full screen."),
    Action("run", "pane_plan", "6", "Plan", "Focus the planned and the last step; again: toggle full screen."),
    Action("run", "pane_samples", "7", "Samples", "Focus the samples; again: toggle full screen."),
    Action("run", "samples_older", "left_square_bracket", "Older samples", "Show the samples of an earlier step."),
    Action("run", "samples_newer", "right_square_bracket", "Newer samples", "Show the samples of a later step."),
    Action("run", "prompt_next", "n", "Next prompt", "Show the sample for the next prompt."),
    Action("run", "prompt_previous", "N", "Previous prompt", "Show the sample for the previous prompt."),
    Action("run", "zoom_in", "w,plus", "Zoom in", "Zoom in on the lanes, or on the focused loss."),
    Action("run", "zoom_out", "s,minus", "Zoom out", "Zoom out of the lanes, or of the focused loss."),
    Action("run", "pan_left", "a,left", "Pan left", "Move the lanes, or the focused loss, back in time."),
    Action("run", "pan_right", "d,right", "Pan right", "Move the lanes, or the focused loss, forward in time."),
    Action("run", "fit", "f", "Fit", "Reset the zoom and follow the run."),
    Action("run", "lane_up", "up", "Lane up", "Select the lane above, to step through its ops."),
    Action("run", "lane_down", "down", "Lane down", "Select the lane below, to step through its ops."),
    Action("run", "next_span", "full_stop", "Next", "Go to the next op of the lane, or the next step of the loss."),
    Action("run", "previous_span", "comma", "Previous", "Go to the previous op, or the previous step."),
    Action("timeline", "previous_step", "left_square_bracket", "Back", "Show the previous step.", footer=True),
    Action("timeline", "next_step", "right_square_bracket", "Next", "Show the next step.", footer=True),
    Action("timeline", "choose_step", "g", "Go to step", "Go to a step by its number, or to the last one."),
    Action(
        "timeline",
        "search",
        "slash",
        "Find",
        "Find ops by words of their name, block, lane or chunk.",
        footer=True,
    ),
    Action("timeline", "predicted", "p", "Plan", "Show the planned step beneath each lane.", footer=True),
    _acting("timeline", "export", "x", "Export", "Write this step as a trace for ui.perfetto.dev.", footer=True),
    _acting("timeline", "export_run", "X", "Export run", "Write the whole run as a trace for ui.perfetto.dev."),
    Action("timeline", "next_span", "full_stop,n", "Next op", "Select the next op of the lane, or the next match."),
    Action("timeline", "previous_span", "comma,N", "Previous op", "Select the previous op, or the previous match."),
    Action("timeline", "blocker", "b", "Blocker", "Select the op that this one waited for last."),
    Action("timeline", "next_critical", "c", "Critical", "Select the next op on the critical path."),
    Action("timeline", "zoom_in", "w,plus", "Zoom in", "Halve the time span shown."),
    Action("timeline", "zoom_out", "s,minus", "Zoom out", "Double the time span shown."),
    Action("timeline", "pan_left", "a,left", "Earlier", "Move the view back by a quarter."),
    Action("timeline", "pan_right", "d,right", "Later", "Move the view forward by a quarter."),
    Action("timeline", "fit", "f", "Fit", "Show the whole step."),
    Action("timeline", "lane_up", "up", "Lane above", "Select the lane above."),
    Action("timeline", "lane_down", "down", "Lane below", "Select the lane below."),
    Action("compare", "axis", "x", "Axis", "Plot the loss over steps, tokens or time.", footer=True),
    Action("compare", "log_scale", "y", "Log scale", "Draw the loss on a logarithmic axis.", footer=True),
    Action(
        "compare", "outliers", "o", "Outliers", "Clip outliers off the loss axis, or show the full range.", footer=True
    ),
    Action("compare", "differences", "d", "Only changes", "Show the fields that differ, or all fields.", footer=True),
)


GROUPS: dict[str, dict[str, str]] = {
    "home": {"open": "open configure timeline resume fit finetune", "lists": "search switch mark compare"},
    "configure": {
        "fields": "edit next_choice previous_choice reset reset_all browse filter next_section previous_section",
        "plan": "switch fix best machine replan",
        "recipe": "differences save launch back quit",
    },
    "finetune": {"the form": "look browse", "the recipe": "configure"},
    "fit": {"cells": "model_up model_down context_left context_right configure", "plan": "machine replan"},
    "run": {
        "the run": "save_checkpoint pause resume stop export",
        "display": "freeze timeline predicted log_scale outliers axis filter_log",
        "panes": "pane_loss pane_lanes pane_tiers pane_blocks pane_log pane_plan pane_samples",
        "samples": "samples_older samples_newer prompt_next prompt_previous",
        "zoom and select": "zoom_in zoom_out pan_left pan_right fit lane_up lane_down next_span previous_span",
    },
    "timeline": {
        "steps": "previous_step next_step choose_step predicted export export_run",
        "ops": "search next_span previous_span blocker next_critical lane_up lane_down",
        "zoom": "zoom_in zoom_out pan_left pan_right fit",
    },
    "compare": {"comparison": "axis log_scale outliers differences"},
}
"""Scope -> title -> actions that belong together on the help screen."""
_EVERYWHERE = "everywhere"


def grouped(found: Sequence[Action]) -> dict[str, list[Action]]:
    """Title -> the actions below it: the screen's own groups, then what works everywhere."""
    groups: dict[str, list[Action]] = {}
    for action in found:
        titles = (title for title, ids in GROUPS.get(action.scope, {}).items() if action.id in ids.split())
        groups.setdefault(next(titles, _EVERYWHERE), []).append(action)
    order = [title for titles in GROUPS.values() for title in titles]
    return dict(sorted(groups.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))


def actions(scope: str) -> list[Action]:
    """The actions of a screen, and those that every screen has and this one has not made its own."""
    own = {action.id for action in ACTIONS if action.scope == scope}
    return [a for a in ACTIONS if a.scope == scope or (a.scope == "global" and a.id not in own)]


def bindings(scope: str) -> list[Binding]:
    """The bindings of a screen, or of the app for `global`."""
    return [
        Binding(
            action.keys,
            action.id,
            action.label,
            show=action.footer,
            key_display=action.shown_key,
            tooltip=action.help,
        )
        for action in ACTIONS
        if action.scope == scope
    ]


def keys_page() -> str:
    """docs/keys.md: every key of every screen."""
    lines = [
        "# Keys",
        "",
        "Made from the action table (`tui/actions.py`) by `make screens`; `?` shows the same on every screen.",
    ]
    for scope in dict.fromkeys(action.scope for action in ACTIONS):
        lines += ["", f"## {'everywhere' if scope == 'global' else scope}", "| key | action | |", "|---|---|---|"]
        for action in ACTIONS:
            if action.scope == scope:
                keys = " ".join(f"`{key}`" for key in action.shown_keys)
                lines.append(f"| {keys} | {action.label} | {action.help} |")
    return "\n".join(lines) + "\n"
