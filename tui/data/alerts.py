"""What somebody who watches a run should know at once, and what can be asked of it in its state."""

from __future__ import annotations

from typing import NamedTuple

from penstock.app.runs.early_end import early_end_in
from penstock.storage.files.units import duration_text, figure
from penstock.tui.data.catalog import RESUMABLE
from penstock.tui.data.fields import objects, text, whole
from penstock.tui.data.flow import FULL_SHARE, Tier, tiers
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
NOTHING_MEASURED = "nothing but the loss is measured"


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
        "series": "" if data.metrics.measured_names else NOTHING_MEASURED,
        "timeline": "" if data.exists else f"{words}, so its steps cannot be read",
    }


def why_no_ops(state: str, *, live: bool, behind: bool = False) -> str:
    """Why there are no spans to show; `behind`: not all has been read."""
    if behind:
        return "reading the run's records"
    if live:
        return "no ops yet: they appear here as the first step runs"
    return f"{_WORDS.get(state, _UNKNOWN)}, and no ops were recorded"


Z_ALERT = 5.0
"""Standard deviations above the mean of the steps before from which a value is a spike."""

SPIKE_STEPS = 20

_STALL_S = 30.0


class Alert(NamedTuple):
    """One sentence and how grave it is: a token."""

    text: str
    token: str


def alerts(data: RunData) -> list[Alert]:
    """All that is wrong or unusual now."""
    result = [*_of_state(data), *(Alert(problem, "warn") for problem in data.problems)]
    if data.state != "running":
        return result
    for name, label in (("loss", "loss"), ("grad_norm", "gradient norm")):
        score = data.metrics.z_score(name)
        if score is not None and score > Z_ALERT:
            result.append(
                Alert(f"{label} {figure(data.metrics.last(name))} is {score:.0f} sigma above the last steps", "warn")
            )
    if (leapt := spike(data)) is not None:
        result.append(leapt)
    if data.metrics.rows and data.metrics.last("loss") is None:
        result.append(Alert(f"the loss of step {data.metrics.last_step:,} is not a number", "bad"))
    stalled = stall(data)
    if stalled is not None:
        result.append(stalled)
    return [*result, *(alert for tier in tiers(data) if (alert := _of_tier(tier)) is not None)]


def _of_tier(tier: Tier) -> Alert | None:
    """Nearly full, where the plan did not mean it to be: a plan fills memory to its budget."""
    held, planned = tier.held_bytes, tier.planned_bytes
    if held is None or tier.share is None or tier.share <= FULL_SHARE or (planned is not None and held <= planned):
        return None
    return Alert(f"{tier.name} is {tier.share:.0%} full, more than the plan allows for", "warn")


def _of_state(data: RunData) -> list[Alert]:
    state = data.state
    if state == "failed":
        return [Alert(first_line(data.error) or "the run failed without an error message", "bad")]
    if state == "crashed":
        kept = "" if data.committed_step is None else f"; R resumes from step {data.committed_step:,}"
        return [Alert((first_line(data.error) or "its process is gone") + kept, "bad")]
    if state == "finished" and (ended := early_end_in(data.summary)) is not None:
        return [Alert(ended.words(data.step), "warn")]
    if state == "stale" and data.silent_s is None:
        return [Alert("its last heartbeat lies in the future, and its process is alive: the clock was changed", "warn")]
    if state == "stale":
        return [Alert(f"no heartbeat for {duration_text(data.silent_s)}, but its process is alive", "warn")]
    return []


def spike(data: RunData) -> Alert | None:
    """That the loss of one of the last steps leapt, and what it was trained on."""
    step = whole(data.spike, "step")
    if step is None or not 0 <= data.metrics.last_step - step < SPIKE_STEPS:
        return None
    named = [
        where or f"document {number:,}"
        for one in objects(data.spike, "documents")[:2]
        if (where := text(one, "where")) or (number := whole(one, "document")) is not None
    ]
    more = (whole(data.spike, "num_documents") or 0) - len(named)
    documents = ", ".join(named) + (f" and {more:,} more" if more > 0 else "")
    return Alert(f"the loss spiked in step {step:,}" + (f", trained on {documents}" if named else ""), "warn")


def first_line(words: str | None) -> str:
    """The first line with anything in it; empty where there is none."""
    return next((line for line in (words or "").splitlines() if line.strip()), "")


def stall(data: RunData) -> Alert | None:
    """That no op has finished for long, with the op that has been under way the longest."""
    clock_s = data.clock_s
    view = data.spans.view
    if clock_s is None or not view.num_spans or data.behind:
        return None
    silent_s = clock_s - view.last_end_s
    step_s = data.metrics.recent_step_s() or 0.0
    if silent_s < max(_STALL_S, 2 * step_s):
        return None
    under_way = [(op.start_s, f"{op.lane} {op.op} {op.block}") for op in data.now if op.start_s is not None]
    what = f"; {min(under_way)[1]} under way" if under_way else ""
    return Alert(f"no op has finished for {duration_text(silent_s)}{what}", "warn")
