"""What gpu-check runs, in order of worth: device, smoke, suites, tests, plans, drives.

Estimates hold everything that a case takes: its process, imports, compiling, paging in and pinning.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from penstock.app.bench import plan as bench_plan
from penstock.app.bench.cases import COMPILE_CORES, COMPILE_S, MEMORY_S_PER_GB, START_S, Rates, cases_of
from penstock.app.bench.cases import Case as SuiteCase
from penstock.app.bench.plan_cases import CUDA_CASES, PlanCase
from penstock.app.bench.process import REPOSITORY, command_of, scratch
from penstock.app.bench.suites import run_case
from penstock.app.gpu_check import tables
from penstock.app.gpu_check.found import run_telling
from penstock.app.gpu_check.results import Results, Rows
from penstock.app.gpu_check.schedule import Case, Job, Stage
from penstock.engine.machine.peaks import peak_flops
from penstock.storage import child

SUITES = "gpu"
FIRST = ("long-7b", "short", "long-8b")
"""What the suites measure whatever is left for later stages."""
TESTS = ("pinned_arena", "gpu_training", "gpu_readers", "gpu_attention", "gpu_validation", "gpu_bench")
"""Files of tests/gpu, test_*.py, most telling first; others follow."""
TESTS_CAP_S, PLANS_CAP_S, DRIVES_CAP_S = 110.0, 90.0, 60.0
TESTS_LEAST_S, PLANS_LEAST_S, DRIVES_LEAST_S = 60.0, 40.0, 35.0
PROBE_S = 12.0
STORAGE_BYTES = "1GiB"


def all_stages(folder: Path, suites: str = SUITES) -> tuple[Stage, ...]:
    """Every stage in its order. Scratch files go below `folder`. Raises UserError for an unknown suite."""
    measured = [case for _, case in cases_of(suites)]
    return (
        Stage(
            name="device",
            title="what this machine is and what works on it",
            cases=(Case(name="device", estimate=lambda known: 20.0, run=partial(_part, "device", "device:look", [])),),
        ),
        Stage(
            name="smoke",
            title="six steps through all three tiers against plain PyTorch",
            cases=(Case(name="smoke", estimate=_smoke_s, run=partial(_smoke, folder)),),
        ),
        Stage(
            name="suites",
            title="steps of real shapes against what their kernels reach alone",
            cases=tuple(
                Case(
                    name=case.name,
                    estimate=partial(_suite_s, case),
                    run=partial(_suite, case, folder),
                    optional=case.name not in FIRST,
                )
                for case in measured
            ),
        ),
        Stage(
            name="tests",
            title="tests/gpu",
            cases=(Case(name="tests", estimate=lambda known: TESTS_LEAST_S, run=_tests),),
            cap_s=TESTS_CAP_S,
            least_s=TESTS_LEAST_S,
        ),
        Stage(
            name="plans",
            title="plans against runs",
            cases=tuple(
                Case(name=case.name, estimate=partial(_plan_s, case), run=partial(_plan, case, folder))
                for case in CUDA_CASES
            ),
            cap_s=PLANS_CAP_S,
            least_s=PLANS_LEAST_S,
        ),
        Stage(
            name="drives",
            title="this folder's drive, and the NVMe tier against it",
            cases=(
                Case(
                    name="probe",
                    estimate=lambda known: 2 * PROBE_S + 5,
                    run=partial(_part, "drives", "device:drive", [str(folder), PROBE_S]),
                ),
                Case(name="storage", estimate=lambda known: 30.0, run=partial(_storage, folder)),
            ),
            cap_s=DRIVES_CAP_S,
            least_s=DRIVES_LEAST_S,
        ),
    )


SHOWN: Mapping[str, Rows] = {
    "device": tables.device,
    "smoke": tables.smoke,
    "suites": tables.suites,
    "tests": tables.tests,
    "plans": tables.plans,
    "drives": tables.drives,
}
"""How each stage's figures are shown."""


# ---------------------------------------------------------------------- what is known by then


def cores(known: Results) -> int:
    """Of the CPU; as many as compiling needs where stage `device` has not said."""
    machine = known.case("device", "device").get("machine") or {}
    return int(machine.get("cores", COMPILE_CORES))


def rates(known: Results) -> Rates | None:
    """What kernels reach on this card: measured by stage `device`, else two thirds of its data sheet's peak."""
    found = known.case("device", "device")
    matmul = found.get("matmul_flops")
    if not isinstance(matmul, int | float):
        peak = peak_flops(str((found.get("machine") or {}).get("gpu", known.values.get("gpu", ""))))
        return None if peak is None else Rates.of_matmul(0.67 * peak)
    guess = Rates.of_matmul(matmul)
    attention = found.get("attention") or {}

    def best(direction: str, otherwise: float) -> float:
        values = (attention.get(direction) or {}).get("tflops") or {}
        return max(values.values()) * 1e12 if values else otherwise

    return Rates(
        matmul=matmul,
        attention_forward=best("forward", guess.attention_forward),
        attention_backward=best("backward", guess.attention_backward),
    )


def _compile_s(known: Results) -> float:
    return COMPILE_S * max(1.0, COMPILE_CORES / cores(known))


def _smoke_s(known: Results) -> float:
    # 1.5B parameters in 12 and 15 GiB; plain PyTorch beside it takes a process's start no more.
    return START_S + _compile_s(known) + MEMORY_S_PER_GB * 27 + 10


def _suite_s(case: SuiteCase, known: Results) -> float:
    return case.estimate_s(rates(known), cores(known))


def _plan_s(case: PlanCase, known: Results) -> float:
    compiled = case.train.get("compile") != "off" and "compile" in case.train
    return START_S + (0.3 * _compile_s(known) if compiled else 0.0) + 6


# ---------------------------------------------------------------------- running


def _log(job: Job, name: str) -> Path:
    return job.results.folder / "stages" / f"{name}.log"


def _part(name: str, work: str, arguments: Sequence[Any], job: Job) -> dict[str, Any]:
    """`work`, module:function of this package, in a process of its own that logs as `name`."""
    return run_telling(command_of(f"app.gpu_check.{work}", *arguments), job.limit_s, _log(job, name), job.found)


def _smoke(folder: Path, job: Job) -> dict[str, Any]:
    with scratch(folder) as path:
        return _part("smoke", "smoke:smoke", [path], job)


def _suite(case: SuiteCase, folder: Path, job: Job) -> dict[str, Any]:
    trace = job.results.folder / "stages" / f"{case.name}.trace.json"
    with scratch(folder) as path:
        return run_case(case, Path(path), trace, job.limit_s)


def _tests(job: Job) -> dict[str, Any]:
    """tests/gpu but what has passed before; `tests` holds every test's outcome, of those not run too."""
    if importlib.util.find_spec("pytest") is None:
        return {"status": "skipped", "reason": "this interpreter has no pytest"}
    known: dict[str, Any] = dict(job.before.get("tests", {}))
    passed = [name for name, test in known.items() if test["outcome"] == "passed"]
    found = sorted(Path(REPOSITORY, "tests", "gpu").glob("test_*.py"))
    names = [f"test_{name}.py" for name in TESTS]
    files = sorted(found, key=lambda file: names.index(file.name) if file.name in names else len(names))
    command = [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-p",
        "penstock.app.gpu_check.plugin",
        "-q",
    ]
    command += ["-o", "addopts=", "--rootdir", str(REPOSITORY), *(str(file) for file in files)]
    command += [f"--deselect={name}" for name in passed]

    def ended(tests: Mapping[str, Any]) -> None:
        known.update(tests)
        job.found({"tests": known})

    outcome = run_telling(command, job.limit_s, _log(job, "tests"), ended)
    broken = [name for name, test in known.items() if test["outcome"] == "failed"]
    if broken and outcome["status"] == "failed":
        outcome["reason"] = f"{len(broken)} of {len(known)} tests fail: {', '.join(n.split('::')[-1] for n in broken)}"
    if left := [name for name, test in known.items() if test["outcome"] == "not run"]:
        names_left = ", ".join(name.split("::")[-1] for name in left)
        outcome["reason"] = f"{outcome.get('reason') or 'pytest ended early'}; not run: {names_left}"
    return outcome


def _plan(case: PlanCase, folder: Path, job: Job) -> dict[str, Any]:
    row = bench_plan.row_of(case, folder, lambda each, run_dir: bench_plan.run_case(each, run_dir, job.limit_s))
    if "error" in row:
        return row | {"status": "ended" if row.get("ended") else "failed", "reason": row["error"]}
    return row | {"status": "done"}


def _storage(folder: Path, job: Job) -> dict[str, Any]:
    command = child.command("app.cli", "bench", "storage", str(folder), "--json", "--size", STORAGE_BYTES)
    log = _log(job, "storage")
    outcome = run_telling([*command, "--rounds", "1"], job.limit_s, log, job.found)
    if outcome["status"] == "done":
        text = log.read_text()
        outcome["figures"] = json.loads(text[text.index("{") :])
    return outcome
