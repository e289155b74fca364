"""What can be asked of a run in its state, and why the rest cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.tui.data.run_data import RunData

_WORDS = {
    "preparing": "the run is still being prepared",
    "running": "the run is going on",
    "paused": "the run is paused",
    "finished": "the run has finished",
    "stopped": "the run was stopped",
    "failed": "the run has failed",
    "crashed": "the run's process is gone",
    "stale": "the run's process does not answer",
    "gone": "the run's directory is gone",
}
"""A state in words."""


RESUMABLE = ("paused", "stopped", "failed", "crashed")
"""States from which a run can go on."""


def refusals(data: RunData) -> dict[str, str]:
    """Action -> why it is not offered now; empty where it is. Only actions that depend on the run's state."""
    state, begun = data.state, data.step > 0
    committed = data.committed_step is not None
    words = _WORDS.get(state, "nothing is known of the run yet")
    can_save = begun and state in ("running", "paused", "stopped", "finished", "crashed")
    can_export = data.exists and begun and (state in ("running", "paused") or committed)
    nothing_yet = words if begun or not data.exists else "no step has been made yet"
    return {
        "save_checkpoint": "" if can_save else f"{nothing_yet}: there is nothing to keep",
        "pause": "" if state == "running" else f"{words}: nothing can be paused",
        "resume": "" if state in RESUMABLE else f"{words}: nothing can be resumed",
        "stop": "" if data.is_live else f"{words}: there is nothing to stop",
        "export": "" if can_export else f"{nothing_yet}: no committed state can be exported",
        "timeline": "" if data.exists else f"{words}: its steps cannot be read",
    }


def why_no_ops(state: str, *, live: bool, behind: bool = False) -> str:
    """Why there are no spans to show; `behind`: not all has been read."""
    if behind:
        return "reading what the run has recorded"
    if live:
        return "no spans yet: the first step's ops show here as they end"
    return f"{_WORDS.get(state, 'nothing is known of the run yet')}, and no op of a step was recorded"
