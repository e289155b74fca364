"""`penstock bench step --suite`: steps of real shapes on this machine, each against what its kernels reach alone.

Every case (app/bench/cases.py) runs in a process of its own with a time limit. What the machine is too small for is
skipped with the reason, what fails is reported; neither stops the others.
"""

from __future__ import annotations

import math
import sys
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock.app.bench.cases import GROUPS, SUITES, Case, Rates, cases_of, small
from penstock.app.bench.process import CallFailed, call, nvidia_smi, require_folders, scratch, show
from penstock.app.console.working import Working, working
from penstock.engine.machine.peaks import peak_flops
from penstock.storage.files.errors import UserError


def bench_suites(
    names: str,
    *,
    json: bool = False,
    trace_dir: Path | None = None,
    folder: Path | None = None,
    time_limit_s: float | None = None,
    tiny: bool = False,
) -> dict[str, Any]:
    """Run the cases of `names` (NAME[,NAME...]) one after another; print their rates, or JSON with `json`.

    Everything that a case writes is below `folder` (the current directory when none) and removed, except a Perfetto
    trace of one step of each case in `trace_dir`. With `time_limit_s` no case is begun that would probably end later.
    `tiny`: of each case a small one (cases.small), on the CPU where there is no GPU.
    Returns the report. Raises UserError for an unknown name or a folder that cannot be used.
    """
    cases = cases_of(names)
    started = time.monotonic()
    require_folders(folder, trace_dir)
    with working("looking at this machine"):
        machine = probe(rates=not tiny)
    if tiny:
        cases = [(suite, small(case, on_gpu=machine["gpu"] is not None)) for suite, case in cases]
    report: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine, "cases": []}
    with Working() as shown:
        for number, (suite, case) in enumerate(cases, start=1):
            left_s = math.inf if time_limit_s is None else time_limit_s - (time.monotonic() - started)
            with shown.step(f"case {number} of {len(cases)}: {case.name}"):
                outcome = _outcome(case, machine, folder, trace_dir, left_s)
            report["cases"].append({"suite": suite, "case": case.name} | outcome)
            print(_progress(report["cases"][-1]), file=sys.stderr, flush=True)
    show(report, _line(report["cases"]), as_json=json)
    return report


def list_text() -> str:
    """The suites and their cases, for people."""
    lines = []
    for suite, cases in SUITES.items():
        for case in cases:
            shapes = f"{case.shapes[-1].name} to {case.shapes[0].name}" if len(case.shapes) > 1 else case.shapes[0].name
            depth = "all layers" if case.layers is None else f"{case.layers[0]} layers"
            budget = f", budgets.gpu={case.gpu}" if case.gpu else ""
            lines.append(
                f"{suite:<12}{case.name:<14}{shapes}, {case.rows} x {case.row_tokens:,} tokens, {depth}{budget}"
            )
    groups = [f"{name:<12}{', '.join(cases)}" for name, cases in GROUPS.items()]
    return "\n".join([*lines, *groups])


def probe(*, rates: bool = True) -> dict[str, Any]:
    """What figures depend on: GPU, its peak and driver, what products reach on it (`rates`), versions, cores, RAM."""
    machine: dict[str, Any] = call("penstock.app.bench.suite_worker:machine", rates, what="torch and transformers")
    machine["peak_flops"] = peak_flops(machine["gpu"] or "")
    machine["driver"] = nvidia_smi("driver_version") if machine["gpu"] else None
    return machine


def _outcome(
    case: Case, machine: dict[str, Any], folder: Path | None, trace_dir: Path | None, left_s: float
) -> dict[str, Any]:
    if case.needs_cuda and machine["gpu"] is None:
        return {"status": "skipped", "reason": "needs CUDA, and torch sees no device"}
    matmul = machine["matmul_flops"]
    wanted_s = case.estimate_s(Rates.of_matmul(matmul) if matmul else None, machine["cores"])
    if left_s < wanted_s:
        reason = f"takes about {wanted_s:.0f} s, and {max(0, left_s):.0f} s of the time limit are left"
        return {"status": "skipped", "reason": f"{reason}; name its suite by itself"}
    case_limit_s = max(case.limit_s, 2 * wanted_s) if case.needs_cuda else case.limit_s
    limit_s = min(case_limit_s, left_s)
    trace = trace_dir.resolve() / f"{case.name}.trace.json" if trace_dir is not None else None
    with scratch(folder) as path:
        outcome = run_case(case, Path(path), trace, limit_s)
    if limit_s < case_limit_s and outcome["status"] == "ended":
        reason = f"ended by the time limit after {limit_s:.0f} s; name its suite by itself"
        return outcome | {"status": "skipped", "reason": reason}
    return outcome | {"status": "failed"} if outcome["status"] == "ended" else outcome


def run_case(case: Case, folder: Path, trace: Path | None, limit_s: float) -> dict[str, Any]:
    """What one case's process came to: `status` done, skipped, failed or ended, with `reason` or the figures."""
    started = time.monotonic()
    try:
        outcome: dict[str, Any] = call(
            "penstock.app.bench.suite_worker:run", asdict(case), str(folder), trace and str(trace), limit_s=limit_s
        )
    except CallFailed as error:
        outcome = {"status": "ended" if error.ended else "failed", "reason": f"{error}\n{error.output}".strip()}
    except UserError as error:
        outcome = {"status": "failed", "reason": str(error)}
    return outcome | {"process_s": time.monotonic() - started}


def _progress(row: dict[str, Any]) -> str:
    if row["status"] != "done":
        return f"{row['case']}: {row['status']}: {row['reason'].splitlines()[0]}"
    return f"{row['case']}: {row['tokens_per_s']:,.0f} tokens/s, {row['process_s']:.0f} s for the case"


def _line(rows: list[dict[str, Any]]) -> str:
    """What was measured, a line a case: its rate, its step over its kernels alone and over plain PyTorch's."""
    done = [row for row in rows if row["status"] == "done"]
    return "\n".join([f"{len(done)} of {len(rows)} cases", *(_rates(row) for row in done)])


def _rates(row: dict[str, Any]) -> str:
    plain = row["plain"]["reason"]
    if row["best_plain_ratio"] is not None:
        plain = f"{row['best_plain_ratio']:.2f} x the fastest plain PyTorch ({row['plain']['name']})"
    return f"{row['case']}: {row['tokens_per_s']:,.0f} tokens/s, {row['ratio_once']:.2f} x the kernels alone, {plain}"
