"""The process of another rank of a run, as engine/ranks/processes.py starts it: it trains, and keeps its ops."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.app.runs.rank_spans import RankSpans
from penstock.engine.events import Observer, Progress
from penstock.engine.ranks.processes import live
from penstock.engine.ranks.ranks import PARENT, Ranks, join
from penstock.storage.files import child
from penstock.storage.files.errors import UserError


class _Quiet(Observer):
    """Of all that a rank reports its ops are kept."""

    def __init__(self, run_path: Path, rank: int) -> None:
        self._spans = RankSpans(run_path, rank)

    def on_progress(self, progress: Progress) -> None:
        self._spans.add(progress.spans)


def _train(ranks: Ranks, given: Any) -> None:
    from penstock.engine.train import train

    recipe, run_dir, resume = given
    observer = _Quiet(run_dir, ranks.rank)  # type: ignore[abstract]  # what it does not define does nothing
    train(recipe, run_dir=run_dir, observer=observer, resume=resume, ranks=ranks)


def _evaluate(ranks: Ranks, given: Any) -> None:
    from penstock.app.evaluation.run import serve

    serve(ranks, given)


WORK: dict[str, Callable[[Ranks, Any], None]] = {"train": _train, "eval": _evaluate}
"""What the first rank asks for, with what it says about that."""


def main() -> int:
    """Its exit code: 0, or that of a command, with what is wrong on standard error."""
    child.end_with_parent(int(os.environ[PARENT]))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the first rank stops the run
    live()
    try:
        ranks = join()
        work, given = ranks.hear()
        WORK[work](ranks, given)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # threads that wait for other ranks end here
