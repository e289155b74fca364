"""`penstock track`: sends what a run's trackers lack, now."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from pathlib import Path

from penstock.app.runs.directory import require_own
from penstock.app.runs.files import read_last
from penstock.app.trackers.attach import end_sender, start_sender, words
from penstock.app.trackers.require import require_trackers
from penstock.engine.config.recipe import TRACKERS
from penstock.storage.files.disk import require_writable
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import one_line


def track(run: Path, names: Iterable[str]) -> Iterator[str]:
    """Send what is missing of a run to trackers, one after the other; what is to be said, as it comes.

    Raises UserError for a tracker that is none, is not installed or logged in, or did not take all of it; the others
    have got theirs by then.
    """
    names = list(names)
    if not names:
        raise UserError(f"{run}: its recipe names no trackers; choose one with --to {'|'.join(TRACKERS)}")
    for name in names:
        if name not in TRACKERS:
            raise UserError(f"--to {one_line(name, 40)}: is not a tracker; choose from {', '.join(TRACKERS)}")
    require_trackers(names)
    if read_last(run / "metrics.jsonl") is None:
        raise UserError(f"{run}: has no step yet, so there is nothing to send")
    require_own(run)
    require_writable(run)
    failed = []
    for name in names:
        problem = yield from _send(run, name)
        if problem:
            failed.append(f"{name}: {problem}")
    if failed:
        raise UserError(f"{run}: not everything was sent; {'; '.join(failed)}")


def _send(run: Path, name: str) -> Generator[str, None, str]:
    """Send to one; what went wrong, "" for nothing."""
    process = start_sender(run.resolve(), name, once=True)
    problem, done = "", False
    try:
        for word in words(process):
            if "at" in word:
                yield f"{name}: {one_line(word['at'])}"
            elif "remark" in word:
                yield f"{name}: {one_line(word['remark'])}"
            elif "error" in word:
                problem = one_line(word["error"])
            done = done or "done" in word
        code = process.wait()
    finally:
        end_sender(process)  # where this one is interrupted
    if done:
        yield f"{name}: has all of {run.name}"
        return ""
    return problem or f"its process ended with {code}"
