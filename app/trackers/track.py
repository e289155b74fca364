"""`penstock track`: sends what a run's trackers lack, now."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from penstock.app.runs.directory import require_own
from penstock.app.runs.files import read_last
from penstock.app.trackers.attach import end_sender, listen, start_sender
from penstock.app.trackers.require import require_trackers
from penstock.engine.config.recipe import TRACKERS
from penstock.storage.files.disk import require_writable
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import one_line


def track(run: Path, names: Iterable[str], say: Callable[[str], None]) -> None:
    """Send what is missing of a run to trackers, one after the other; `say` hears of it. UserError for one that is
    none, is not installed or logged in, or did not take all of it; the others have got theirs by then."""
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
        process = start_sender(run.resolve(), name, once=True)
        try:
            problem = listen(process, lambda text, _, name=name: say(f"{name}: {text}"), once=True)  # type: ignore[misc]
        finally:
            end_sender(process)  # where this one is interrupted
        if problem is None:
            say(f"{name}: has all of {run.name}")
        else:
            failed.append(f"{name}: {problem}")
    if failed:
        raise UserError(f"{run}: not everything was sent; {'; '.join(failed)}")
