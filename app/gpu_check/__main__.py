"""`python -m penstock.app.gpu_check`: see `make gpu-check`.

Runs from the repository with whatever interpreter starts it; nothing is installed or fetched. One case's failure does
not keep the others from running.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

LIMIT_S = 560.0
"""The end comes inside ten minutes, the interpreter's start included."""
FAILED, BAD_INPUT = 1, 2
_CUDA = "import sys, torch; torch.cuda.is_available() or sys.exit(1); print(torch.cuda.get_device_name())"


def main(arguments: list[str] | None = None) -> int:
    """Run the stages; 0 where nothing failed, and where there is no CUDA device."""
    parser = argparse.ArgumentParser(prog="python -m penstock.app.gpu_check", description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("gpu-check-results"), help="folder for the results")
    parser.add_argument(
        "--limit-s", type=float, default=LIMIT_S, help="time limit for everything, in seconds; default %(default)s"
    )
    parser.add_argument("--only", help="STAGE[,STAGE]: run only these stages")
    parser.add_argument(
        "--resume", action="store_true", help="continue an earlier check: skip what its results already contain"
    )
    parser.add_argument("--suites", default="gpu", help="NAME[,NAME]: what stage suites measures (bench step --list)")
    parser.add_argument("--scratch", type=Path, help="folder on the drive to use; default the current one")
    chosen = parser.parse_args(arguments)
    started = time.monotonic()
    say = partial(print, flush=True)
    cuda = subprocess.run([sys.executable, "-c", _CUDA], capture_output=True, text=True)
    if cuda.returncode != 0:
        print(f"gpu-check: skipped: torch of {sys.executable} is missing or sees no CUDA device")
        return 0
    # Not before: an interpreter without torch may lack what these import, too.
    from penstock.app.gpu_check.results import Results
    from penstock.app.gpu_check.schedule import Check, Ended, ended_by_signals
    from penstock.app.gpu_check.stages import SHOWN, all_stages
    from penstock.storage.errors import UserError

    try:
        scratch = (chosen.scratch or Path.cwd()).expanduser().resolve()
        if not scratch.is_dir():
            raise UserError(f"--scratch {scratch}: no such folder; create it first")
        stages = all_stages(scratch, chosen.suites)
        names = [stage.name for stage in stages]
        wanted = names if chosen.only is None else [name.strip() for name in chosen.only.split(",")]
        if unknown := [name for name in wanted if name not in names]:
            raise UserError(f"--only {unknown[0]}: no such stage; choose from {', '.join(names)}")
        head = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "gpu": cuda.stdout.strip().splitlines()[-1],
            "command": " ".join(["gpu-check", *(arguments if arguments is not None else sys.argv[1:])]),
        }
        shown = {stage.name: (stage.title, SHOWN[stage.name]) for stage in stages}
        results = Results(chosen.results.resolve(), head, shown, resume=chosen.resume)
        check = Check([stage for stage in stages if stage.name in wanted], results, chosen.limit_s, say, started)
        with ended_by_signals():
            check.run()
    except UserError as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return BAD_INPUT
    except Ended as end:
        say(f"gpu-check: ended by {end}; {results.folder} has what was found")
        return FAILED
    say(results.markdown())
    failed = results.failed()
    took_s = chosen.limit_s - check.left_s
    say(f"gpu-check: {took_s:.0f} s; failed: {', '.join(failed) or 'nothing'}; results in {results.folder}")
    return FAILED if failed else 0


if __name__ == "__main__":
    sys.exit(main())
