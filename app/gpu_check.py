"""`make gpu-check`: tests/gpu, a profile, the step suites, plans and the storage benchmark, within eight minutes.

Runs from the repository with whatever interpreter starts it; nothing is installed or fetched. One stage's failure does
not keep the others from running.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
LIMIT_S = 470.0
PROBE_S = 20.0
PLAN_S = 90.0
"""Plans against runs: as many cases as end in that time."""
STORAGE_S = 45.0
"""What the last stages take; the suites leave it."""


def main(arguments: list[str] | None = None) -> int:
    """Run all stages; 0 where nothing failed, and where there is no CUDA device."""
    parser = argparse.ArgumentParser(prog="python -m app.gpu_check", description=__doc__)
    parser.add_argument(
        "--results", type=Path, help="folder for step.json, plan.json, storage.json, tests.xml and traces"
    )
    results: Path | None = parser.parse_args(arguments).results
    started = time.monotonic()
    has_cuda = [sys.executable, "-c", "import sys, torch; sys.exit(not torch.cuda.is_available())"]
    if subprocess.run(has_cuda, capture_output=True).returncode != 0:
        print(f"gpu-check: skipped: torch of {sys.executable} is missing or sees no CUDA device")
        return 0
    if results is not None:
        results.mkdir(parents=True, exist_ok=True)
        results = results.resolve()
    codes = {"tests": _tests(results)}
    codes["probe"] = _run(
        [sys.executable, "-m", "app.cli", "probe", str(results or REPOSITORY), "--seconds", str(PROBE_S)]
    )
    left_s = LIMIT_S - PLAN_S - STORAGE_S - (time.monotonic() - started)
    trace = ["--trace-dir", str(results)] if results is not None else []
    suites = ["step", "--suite", "gpu", "--json", "--time-limit", f"{max(0.0, left_s):.0f}", *trace]
    codes["bench step"] = _bench(suites, results and results / "step.json")
    codes["bench plan"] = _bench(["plan", "--json", "--time-limit", str(PLAN_S)], results and results / "plan.json")
    codes["bench storage"] = _bench(
        ["storage", str(results or REPOSITORY), "--json"], results and results / "storage.json"
    )
    failed = [stage for stage, code in codes.items() if code != 0]
    print(f"gpu-check: {time.monotonic() - started:.0f} s; failed: {', '.join(failed) or 'nothing'}")
    return 1 if failed else 0


def _tests(results: Path | None) -> int:
    if importlib.util.find_spec("pytest") is None:
        print("gpu-check: tests/gpu not run: this interpreter has no pytest", flush=True)
        return 0
    report = ["--junitxml", str(results / "tests.xml")] if results is not None else []
    return _run([sys.executable, "-m", "pytest", "tests/gpu", "-p", "no:cacheprovider", *report])


def _bench(arguments: list[str], file: Path | None) -> int:
    """The benchmark's exit code; what it prints is shown, and kept in `file`."""
    command = [sys.executable, "-m", "app.cli", "bench", *arguments]
    if file is None:
        return _run(command)
    with file.open("w") as out:
        code = subprocess.run(command, cwd=REPOSITORY, env=_environment(), stdout=out).returncode
    print(file.read_text(), flush=True)
    return code


def _run(command: list[str]) -> int:
    return subprocess.run(command, cwd=REPOSITORY, env=_environment()).returncode


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(REPOSITORY)}


if __name__ == "__main__":
    sys.exit(main())
