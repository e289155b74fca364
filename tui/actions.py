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
    Action("global", "back", "escape", "Back", "Leave this screen; a run goes on whatever you do here."),
    Action("global", "quit", "q,ctrl+q", "Quit", "Close the application; runs go on.", footer=True),
    Action("global", "next_theme", "f2", "Theme", "Dark, light, and their high-contrast versions."),
    Action("home", "open", "enter", "Open", "Watch the run, or configure the recipe, under the cursor.", footer=True),
    Action("home", "search", "slash", "Search", "Filter recipes and runs by any word they show.", footer=True),
    _acting("home", "configure", "c", "Configure", "Configure the recipe, or the run's as a new run.", footer=True),
    Action("home", "mark", "space", "Mark", "Mark the run for comparing.", footer=True),
    Action("home", "compare", "m", "Compare", "Compare the marked runs."),
    Action("home", "timeline", "t", "Timeline", "The last step of the run, op by op."),
    _acting("home", "resume", "R", "Resume", "Go on with a stopped, failed, crashed or paused run."),
    Action("home", "switch", "tab", "Recipes/runs", "Go to the other list."),
    Action("home", "fit", "f", "What fits", "Which models this machine can train, and how fast."),
    _acting("home", "finetune", "n", "Fine-tune", "A new recipe from a model and data of your own.", footer=True),
    Action("configure", "edit", "enter", "Edit", "Type the field's value; a choice goes to its next one."),
    Action("configure", "next_choice", "right,space", "Next choice", "The next value of a choice or a switch."),
    Action("configure", "previous_choice", "left", "Previous choice", "The value before of a choice or a switch."),
    Action("configure", "reset", "backspace,delete", "Reset", "The field as the recipe had it."),
    Action("configure", "reset_all", "U", "Reset all", "Every field as the recipe had it, after a question."),
    Action("configure", "browse", "o", "Browse", "Pick the folder or file that the field names."),
    Action("configure", "filter", "slash", "Filter", "Show fields whose name or help has these words.", footer=True),
    Action("configure", "next_section", "right_square_bracket", "Next part", "The next part of the recipe."),
    Action("configure", "previous_section", "left_square_bracket", "Previous part", "The part before."),
    Action("configure", "switch", "tab,shift+tab", "Plan", "Go to the plan, or back to the form.", footer=True),
    Action("configure", "fix", "1,2,3,4,5,6,7,8,9", "Apply fix", "Take a change that makes the recipe fit."),
    Action("configure", "best", "b", "Helps most", "Take the change that helps most."),
    Action("configure", "machine", "m", "Machine", "Plan for this machine or another.", footer=True),
    Action("configure", "differences", "d", "Changes", "What is not as the recipe had it."),
    _acting("configure", "save", "ctrl+s", "Save", "Write the recipe to a file of your own.", footer=True),
    _acting("configure", "launch", "l,ctrl+l", "Launch", "Start this run here, after a question.", footer=True),
    Action("configure", "replan", "f5", "Plan again", "Ask the planner once more."),
    Action("configure", "back", "escape", "Back", "Leave; unsaved changes are asked about."),
    Action(
        "configure", "quit", "q,ctrl+q", "Quit", "Close the application; unsaved changes are asked about.", footer=True
    ),
    _acting("fit", "configure", "enter", "Configure", "Save the cell's recipe and configure it.", footer=True),
    Action("fit", "machine", "m", "Machine", "Plan for this machine or another.", footer=True),
    Action("fit", "model_up", "up,k", "Model above", "The cell above."),
    Action("fit", "model_down", "down,j", "Model below", "The cell below."),
    Action("fit", "context_left", "left,h", "Shorter", "The cell of a shorter context."),
    Action("fit", "context_right", "right,l", "Longer", "The cell of a longer context."),
    Action("fit", "replan", "f5", "Plan again", "Plan every cell once more."),
    _acting("finetune", "look", "f5", "Look", "Look at the model and the data that the form names.", footer=True),
    Action("finetune", "browse", "ctrl+o", "Browse", "Pick the model's folder, or the data.", footer=True),
    _acting("finetune", "configure", "enter", "Configure", "Save the recipe and go on to configure it.", footer=True),
    Action("run", "freeze", "space", "Freeze", "Hold the display; the run goes on.", footer=True),
    Action("run", "log_scale", "y", "Log scale", "Draw the loss on a logarithmic axis."),
    Action("run", "outliers", "o", "Outliers", "Clip the loss axis to what is usual, or show all of it."),
    Action("run", "predicted", "p", "Predicted", "Show the planned step beside the real one."),
    Action("run", "filter_log", "slash", "Filter log", "Show log lines with a word; ! before it: without it."),
    Action("run", "timeline", "t", "Timeline", "Any step of this run, op by op.", footer=True),
    _acting(
        "run",
        "save_checkpoint",
        "k",
        "Checkpoint",
        "Keep the next step's state under a name, after a question.",
        footer=True,
    ),
    _acting(
        "run",
        "pause",
        "P",
        "Pause",
        "Hold the run at the end of its step, committed, after a question.",
        footer=True,
    ),
    _acting("run", "resume", "R", "Resume", "Go on with a paused, stopped, failed or crashed run.", footer=True),
    _acting(
        "run", "stop", "S", "Stop", "End the run at the end of its step, committed, after a question.", footer=True
    ),
    _acting("run", "export", "e", "Export", "Write a Hugging Face folder, after a question.", footer=True),
    Action("run", "axis", "x", "Axis", "Loss over steps, tokens or time."),
    Action("run", "pane_loss", "1", "Loss", "Go to the loss; again: it alone, and back."),
    Action("run", "pane_lanes", "2", "Lanes", "Go to the lanes; again: they alone, and back."),
    Action("run", "pane_tiers", "3", "Tiers", "Go to tiers and drives; again: they alone, and back."),
    Action("run", "pane_blocks", "4", "Blocks", "Go to the block map; again: it alone, and back."),
    Action("run", "pane_log", "5", "Log", "Go to the log; again: it alone, and back."),
    Action("run", "pane_plan", "6", "Plan", "Go to the planned step beside the last one; again: it alone, and back."),
    Action("run", "pane_samples", "7", "Samples", "Go to what the model writes; again: it alone, and back."),
    Action("run", "samples_older", "left_square_bracket", "Older samples", "Of the step before that has samples."),
    Action("run", "samples_newer", "right_square_bracket", "Newer samples", "Of the next step that has samples."),
    Action("run", "prompt_next", "n", "Next prompt", "What the model wrote behind the next prompt."),
    Action("run", "prompt_previous", "N", "Prompt before", "What the model wrote behind the prompt before."),
    Action("run", "zoom_in", "w,plus", "Zoom in", "Of the lanes, or of the loss where it has the focus."),
    Action("run", "zoom_out", "s,minus", "Zoom out", "Of the lanes, or of the loss where it has the focus."),
    Action("run", "pan_left", "a,left", "Pan left", "Of the lanes, or of the loss where it has the focus."),
    Action("run", "pan_right", "d,right", "Pan right", "Of the lanes, or of the loss where it has the focus."),
    Action("run", "fit", "f", "Fit", "No zoom: follow the run."),
    Action("run", "lane_up", "up", "Lane up", "The lane above, to look at its ops one by one."),
    Action("run", "lane_down", "down", "Lane down", "The lane below, to look at its ops one by one."),
    Action("run", "next_span", "full_stop", "Next", "The next op of the lane, or the next step of the loss."),
    Action("run", "previous_span", "comma", "Previous", "The op before, or the step before."),
    Action("timeline", "previous_step", "left_square_bracket", "Back", "Show the step before.", footer=True),
    Action("timeline", "next_step", "right_square_bracket", "Next", "Show the next step.", footer=True),
    Action("timeline", "choose_step", "g", "Go to step", "Show the step of a number, or the last one."),
    Action("timeline", "search", "slash", "Find", "List ops by any words of op, block, lane or chunk.", footer=True),
    Action("timeline", "predicted", "p", "Plan", "Show the planned step beneath each lane.", footer=True),
    _acting("timeline", "export", "x", "Export", "Write this step as a trace for ui.perfetto.dev.", footer=True),
    _acting("timeline", "export_run", "X", "Export run", "Write the whole run as a trace for ui.perfetto.dev."),
    Action("timeline", "next_span", "full_stop,n", "Next op", "Select the next op of the lane, or the next one found."),
    Action("timeline", "previous_span", "comma,N", "Op before", "Select the op before, or the one found before."),
    Action("timeline", "blocker", "b", "Blocker", "Select the op after which this one could begin."),
    Action("timeline", "next_critical", "c", "Critical", "Select the next op of the critical path."),
    Action("timeline", "zoom_in", "w,plus", "Zoom in", "Show half as long a time."),
    Action("timeline", "zoom_out", "s,minus", "Zoom out", "Show twice as long a time."),
    Action("timeline", "pan_left", "a,left", "Back in time", "Move what is in view by a quarter."),
    Action("timeline", "pan_right", "d,right", "On in time", "Move what is in view by a quarter."),
    Action("timeline", "fit", "f", "Fit", "Show the whole step."),
    Action("timeline", "lane_up", "up", "Lane above", "Select the lane above."),
    Action("timeline", "lane_down", "down", "Lane below", "Select the lane below."),
    Action("compare", "axis", "x", "Axis", "Loss over steps, tokens or time.", footer=True),
    Action("compare", "log_scale", "y", "Log scale", "Draw the loss on a logarithmic axis.", footer=True),
    Action(
        "compare", "outliers", "o", "Outliers", "Clip the loss axis to what is usual, or show all of it.", footer=True
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
        "what is shown": "freeze timeline predicted log_scale outliers axis filter_log",
        "panes": "pane_loss pane_lanes pane_tiers pane_blocks pane_log pane_plan pane_samples",
        "samples": "samples_older samples_newer prompt_next prompt_previous",
        "closer": "zoom_in zoom_out pan_left pan_right fit lane_up lane_down next_span previous_span",
    },
    "timeline": {
        "steps": "previous_step next_step choose_step predicted export export_run",
        "ops": "search next_span previous_span blocker next_critical lane_up lane_down",
        "closer": "zoom_in zoom_out pan_left pan_right fit",
    },
    "compare": {"what is compared": "axis log_scale outliers differences"},
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
