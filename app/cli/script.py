"""A recipe file that is run as a script."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

_POLL_S = 0.05


def run_recipe(path: str, *, kill_after: int | None = None) -> None:
    """`penstock train` for the recipe file at `path`, its `__file__`; takes the same options. Ends the process.

    With `kill_after` the training process is killed by SIGKILL once that step has ended, and the run then resumed.
    """
    # Python has put the script's folder first; a recipe named like a package must not be imported in its place.
    if sys.path and Path(sys.path[0] or ".").resolve() == Path(path).resolve().parent:
        del sys.path[0]
    from penstock.app.cli.main import main

    arguments = ["train", path, *sys.argv[1:]]
    if kill_after is None or "--help" in arguments or "--fields" in arguments:
        sys.exit(main(arguments))
    if not any(argument.split("=")[0] == "--run-dir" for argument in arguments):
        arguments += ["--run-dir", str(_run_path(path))]
    code, run = train_killed(arguments, kill_after)
    sys.exit(code if run is None else main(["resume", str(run)]))


def _run_path(path: str) -> Path:
    from penstock.app.recipes.recipe import load_recipe
    from penstock.app.runs.directory import fresh_path

    return fresh_path(Path("runs"), load_recipe(path).name)


def train_killed(arguments: list[str], kill_after: int) -> tuple[int, Path | None]:
    """Run `penstock` with the arguments of a `train` that names its --run-dir, and kill it once a step has ended. Its
    exit code, and the run that was killed; None where it had ended before."""
    from penstock.app.runs.files import read_last, whole
    from penstock.storage.files import child

    at = next(i for i, argument in enumerate(arguments) if argument.split("=")[0] == "--run-dir")
    run = Path(arguments[at].partition("=")[2] or arguments[at + 1])
    if (run / "metrics.jsonl").exists():  # of another run, which is refused
        return subprocess.call(child.command("app.cli.main", *arguments), env=child.environment()), None
    process = subprocess.Popen(child.command("app.cli.main", *arguments), env=child.environment())
    while process.poll() is None:
        with suppress(KeyboardInterrupt):  # the training process has it as well, and ends by itself
            time.sleep(_POLL_S)
        step = whole((read_last(run / "metrics.jsonl") or {}).get("step")) or 0
        if step >= kill_after and process.poll() is None:
            process.kill()
            process.wait()
            print(
                f"killed after step {step} (SIGKILL: nothing was saved, no handler ran); resuming the run", flush=True
            )
            return process.returncode, run
    return process.returncode, None
