"""Everything that a key does, once: bindings, footer, help screen and command palette come from this table.

An action `id` of scope `global` is `action_<id>` of the app, of any other scope `action_<id>` of that screen. Where a
screen's `check_action` says no, footer, help and palette leave the action out.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    """One sentence."""
    footer: bool = False
    """Whether the footer has room for it; eight a screen at most."""

    @property
    def shown_keys(self) -> list[str]:
        """The keys as people write them: ctrl+s as ^s."""
        return [_KEY_NAMES.get(key, key.replace("ctrl+", "^")) for key in self.keys.split(",")]

    @property
    def shown_key(self) -> str:
        """The first of them."""
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

ACTIONS: tuple[Action, ...] = (
    Action("global", "help", "question_mark,f1", "Help", "Show every key of this screen.", footer=True),
    Action("global", "command_palette", "ctrl+p", "Palette", "Search all commands.", footer=True),
    Action("global", "back", "escape", "Back", "Leave this screen; a run goes on whatever you do here."),
    Action("global", "quit", "q,ctrl+q", "Quit", "Close the application; runs go on.", footer=True),
    Action("global", "next_theme", "f2", "Theme", "Dark, light, and their high-contrast versions."),
    # ------------------------------------------------------------------ home
    Action("home", "open", "enter", "Open", "Watch the run, or configure the recipe, under the cursor.", footer=True),
    Action("home", "search", "slash", "Search", "Filter recipes and runs by any word they show.", footer=True),
    Action("home", "configure", "c", "Configure", "Configure the recipe, or the run's as a new run.", footer=True),
    Action("home", "mark", "space", "Mark", "Mark the run for comparing.", footer=True),
    Action("home", "compare", "m", "Compare", "Compare the marked runs.", footer=True),
    Action("home", "timeline", "t", "Timeline", "The last step of the run, op by op."),
    Action("home", "resume", "R", "Resume", "Go on with a stopped, failed, crashed or paused run."),
    Action("home", "switch", "tab", "Recipes/runs", "Go to the other list."),
    # ------------------------------------------------------------------ configure
    Action("configure", "launch", "l,ctrl+l", "Launch", "Start this run here, after a question.", footer=True),
    Action("configure", "save", "ctrl+s", "Save as", "Write the recipe to a file of your own.", footer=True),
    Action("configure", "machine", "m", "Machine", "Plan for this machine or another.", footer=True),
    # ------------------------------------------------------------------ run
    Action("run", "freeze", "space", "Freeze", "Hold the display; the run goes on.", footer=True),
    Action("run", "log_scale", "y", "Log scale", "Draw the loss on a logarithmic axis.", footer=True),
    Action("run", "outliers", "o", "Outliers", "Clip the loss axis to what is usual, or show all of it."),
    Action("run", "predicted", "p", "Predicted", "Show the planned step beside the real one.", footer=True),
    Action("run", "filter_log", "slash", "Filter log", "Show log lines with a word; ! before it: without it."),
    Action("run", "timeline", "t", "Timeline", "Any step of this run, op by op.", footer=True),
    Action("run", "save_checkpoint", "k", "Checkpoint", "Keep the next step's state under a name, after a question."),
    Action("run", "pause", "P", "Pause", "Hold the run at the end of its step, committed, after a question."),
    Action("run", "resume", "R", "Resume", "Go on with a paused, stopped, failed or crashed run."),
    Action("run", "stop", "S", "Stop", "End the run at the end of its step, committed, after a question."),
    Action("run", "export", "e", "Export", "Write a Hugging Face folder, after a question."),
    Action("run", "axis", "x", "Axis", "Loss over steps, tokens or time."),
    Action("run", "pane_loss", "1", "Loss", "Go to the loss; again: it alone, and back."),
    Action("run", "pane_lanes", "2", "Lanes", "Go to the lanes; again: they alone, and back."),
    Action("run", "pane_tiers", "3", "Tiers", "Go to tiers and drives; again: they alone, and back."),
    Action("run", "pane_blocks", "4", "Blocks", "Go to the block map; again: it alone, and back."),
    Action("run", "pane_log", "5", "Log", "Go to the log; again: it alone, and back."),
    Action("run", "pane_plan", "6", "Plan", "Go to the planned step beside the last one; again: it alone, and back."),
    Action("run", "zoom_in", "w,plus", "Zoom in", "Of the lanes, or of the loss where it has the focus."),
    Action("run", "zoom_out", "s,minus", "Zoom out", "Of the lanes, or of the loss where it has the focus."),
    Action("run", "pan_left", "a", "Pan left", "Of the lanes, or of the loss where it has the focus."),
    Action("run", "pan_right", "d", "Pan right", "Of the lanes, or of the loss where it has the focus."),
    Action("run", "fit", "f", "Fit", "No zoom: follow the run."),
    Action("run", "next_span", "full_stop", "Next", "The next op of the lane, or the next step of the loss."),
    Action("run", "previous_span", "comma", "Previous", "The op before, or the step before."),
    # ------------------------------------------------------------------ compare
    Action("compare", "axis", "x", "Axis", "Loss over steps, tokens or time.", footer=True),
    Action("compare", "log_scale", "y", "Log scale", "Draw the loss on a logarithmic axis.", footer=True),
    Action(
        "compare", "outliers", "o", "Outliers", "Clip the loss axis to what is usual, or show all of it.", footer=True
    ),
    Action("compare", "differences", "d", "Only changes", "Show the fields that differ, or all fields.", footer=True),
)


def actions(scope: str) -> list[Action]:
    """The actions of a screen, and those that every screen has."""
    return [action for action in ACTIONS if action.scope in (scope, "global")]


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
