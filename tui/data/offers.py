"""What can be asked of a run in its state, and why the rest cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.tui.data.run_data import RunData

_WORDS = {
    "preparing": "the run is still being prepared",
    "running": "the run is running",
    "paused": "the run is paused",
    "finished": "the run has finished",
    "stopped": "the run was stopped",
    "failed": "the run has failed",
    "crashed": "the run's process is gone",
    "stale": "the run's process does not answer",
    "gone": "the run's directory is gone",
}
_UNKNOWN = "the run's state is not known yet"


RESUMABLE = ("paused", "stopped", "failed", "crashed")


def refusals(data: RunData) -> dict[str, str]:
    """Action -> why it is not offered now; empty where it is. Only actions that depend on the run's state."""
    state, begun = data.state, data.step > 0
    committed = data.committed_step is not None
    words = _WORDS.get(state, _UNKNOWN)
    can_save = begun and state in ("running", "paused", "stopped", "finished", "crashed")
    can_export = data.exists and begun and (state in ("running", "paused") or committed)
    nothing_yet = words if begun or not data.exists else "no step has finished yet"
    return {
        "save_checkpoint": "" if can_save else f"{nothing_yet}, so there is nothing to save",
        "pause": "" if state == "running" else f"{words}, so it cannot be paused",
        "resume": "" if state in RESUMABLE else f"{words}, so it cannot be resumed",
        "stop": "" if data.is_live else f"{words}, so it cannot be stopped",
        "export": "" if can_export else f"{nothing_yet}, so there is no committed state to export",
        "timeline": "" if data.exists else f"{words}, so its steps cannot be read",
    }


def why_no_ops(state: str, *, live: bool, behind: bool = False) -> str:
    """Why there are no spans to show; `behind`: not all has been read."""
    if behind:
        return "reading the run's records"
    if live:
        return "no ops yet: they appear here as the first step runs"
    return f"{_WORDS.get(state, _UNKNOWN)}, and no ops were recorded"
