"""The process of another rank of a run, as engine/ranks/processes.py starts it: it trains, and reports to nobody."""

from __future__ import annotations

import os
import signal
import sys
import traceback

from penstock.engine.events import Observer
from penstock.engine.ranks.processes import live
from penstock.engine.ranks.ranks import PARENT, join
from penstock.storage.files import child
from penstock.storage.files.errors import UserError


class _Quiet(Observer):
    """Nobody listens to this rank."""


def main() -> int:
    """Its exit code: 0, or that of a command, with what is wrong on standard error."""
    child.end_with_parent(int(os.environ[PARENT]))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the first rank stops the run
    live()
    from penstock.engine.train import train

    try:
        ranks = join()
        recipe, run_dir, resume = ranks.hear()
        train(recipe, run_dir=run_dir, observer=_Quiet(), resume=resume, ranks=ranks)  # type: ignore[abstract]
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
