"""`penstock bench plan`: what a plan promised against what the run then took, on this machine.

Every case (`app/bench/plan_cases.py`) is a short real training in a process of its own. Compared are peak bytes of each
tier, and the step's time with the median of all steps but the first, which allocates and compiles.
"""

from __future__ import annotations

import json as json_module
import os
import platform
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from penstock.app.bench.plan_cases import CASES, CUDA_CASES, PlanCase, small
from penstock.app.bench.process import CallFailed, call, markdown_table, require_folders, scratch, show
from penstock.app.console.working import working
from penstock.app.launch.run import run_training
from penstock.app.recipes.recipe import from_dict, to_dict
from penstock.app.runs.directory import RunDir
from penstock.app.runs.files import JsonLines
from penstock.engine.machine.limits import machine_memory
from penstock.storage.files.errors import UserError
from penstock.storage.files.units import seconds_text

PEAK_TOLERANCE = 0.05
STEP_TOLERANCE = 0.15
LIMIT_S = 300.0
"""A case that takes longer is ended and counts as failed."""
TIERS = ("gpu", "ram", "nvme")


def run_case(case: PlanCase, run_dir: Path) -> None:
    """Train a case in a process of its own. UserError of one line: a refusal's own words, or how the process ended."""
    call("penstock.app.bench.plan:train_case", to_dict(case.recipe), str(run_dir), limit_s=LIMIT_S)


def train_case(recipe: dict[str, Any], run_dir: str) -> None:
    with RunDir.create(from_dict(recipe), Path(run_dir)) as run:
        run_training(run, resume=False)


def bench_plan(*, json: bool = False, folder: Path | None = None, cases: Sequence[PlanCase]) -> dict[str, Any]:
    """Run every case and print what was planned beside what was measured, as a table or JSON; the report. A case that
    fails stops no other. Runs are below `folder` (None: the current one) and removed; UserError without it."""
    require_folders(folder)
    rows = []
    for number, case in enumerate(cases, start=1):
        with working(f"case {number} of {len(cases)}: {case.name}"):
            rows.append(row_of(case, folder))
        print(f"{number}/{len(cases)} {progress(rows[-1])}", file=sys.stderr, flush=True)
    report = report_of(rows)
    show(report, table(report), as_json=json)
    return report


def row_of(case: PlanCase, folder: Path | None) -> dict[str, Any]:
    """One case, trained and compared; where it failed, `error` says why in one line."""
    started = time.monotonic()
    row: dict[str, Any] = {"case": case.name, "about": case.about}
    with scratch(folder) as path:
        try:
            run_case(case, Path(path) / "run")
            row |= compare(Path(path) / "run")
        except CallFailed as error:
            row |= {"error": str(error), "output": error.output}
        except UserError as error:
            row["error"] = str(error)
    return row | {"process_s": time.monotonic() - started}


def cases_here() -> Sequence[PlanCase]:
    return CUDA_CASES if torch.cuda.is_available() else CASES


def named_cases(names: str | None, *, tiny: bool = False) -> Sequence[PlanCase]:
    """The cases of NAME[,NAME...], by default this machine's; `tiny`: cut to seconds. UserError for an unknown name."""
    known = {case.name: case for case in (*CASES, *CUDA_CASES, *cases_here())}
    wanted = [case.name for case in cases_here()] if names is None else [name.strip() for name in names.split(",")]
    if unknown := [name for name in wanted if name not in known]:
        raise UserError(f"--case {unknown[0]}: no such case; choose from {', '.join(known)}")
    return [small(known[name]) if tiny else known[name] for name in wanted]


def compare(run_dir: Path) -> dict[str, Any]:
    """Forecast and outcome of a finished run. Raises UserError where a file is missing or holds no step to compare."""
    try:
        forecast = json_module.loads((run_dir / "plan.json").read_text())
        summary = json_module.loads((run_dir / "summary.json").read_text())
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read ({error.strerror}); the run left no such file") from None
    step_times_s = [line["step_s"] for line in JsonLines(run_dir / "metrics.jsonl")]
    if len(step_times_s) < 2:
        raise UserError(f"{run_dir}: {len(step_times_s)} steps; the first does not count, so there is none to compare")
    measured_s = statistics.median(step_times_s[1:])
    planned = {name: forecast["tiers"][name]["peak_bytes"] for name in TIERS}
    if summary["gpu_memory"] is None:  # ordinary memory, where temporaries of an op come from torch's heap
        planned["gpu"] -= forecast["tiers"]["gpu"]["parts"].get("workspace", 0)
    tiers = {name: _pair(planned[name], summary["tiers"][name]["peak_bytes"], PEAK_TOLERANCE) for name in TIERS}
    return {
        "params": forecast["model"]["params"],
        "tokens_per_step": forecast["tokens_per_step"],
        "context": forecast["context"],
        "state": _state(forecast["blocks"]),
        "bound_by": forecast["bound_by"],
        "tiers": tiers,
        "step_s": _pair(forecast["step_s"], measured_s, STEP_TOLERANCE),
        "step_times_s": step_times_s,
    }


def _state(blocks: Sequence[Mapping[str, Any]]) -> str:
    """Where the state lives, or frozen weights: `ram`, or `gpu 20%, nvme 80%` of its bytes."""
    total = sum(block["bytes"] for block in blocks)
    shares = {tier: sum(b["bytes"] for b in blocks if (b["state"] or b["weights"]) == tier) / total for tier in TIERS}
    return ", ".join(tier if share == 1 else f"{tier} {share:.0%}" for tier, share in shares.items() if share)


def _pair(planned: float, measured: float, tolerance: float) -> dict[str, Any]:
    """Both figures, measured over planned (None where nothing was planned), and whether that is near enough to 1."""
    ratio = measured / planned if planned else None
    within = abs(ratio - 1) <= tolerance if ratio is not None else measured == 0
    return {"planned": planned, "measured": measured, "ratio": ratio, "within": within}


def report_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The rows, how many kept their promise, and the largest deviations."""
    done = [row for row in rows if "error" not in row]

    def deviations(pairs: Sequence[Mapping[str, Any]]) -> list[float]:
        return [abs(pair["ratio"] - 1) for pair in pairs if pair["ratio"] is not None]

    steps = deviations([row["step_s"] for row in done])

    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": _machine(),
        "peak_tolerance": PEAK_TOLERANCE,
        "step_tolerance": STEP_TOLERANCE,
        "cases": list(rows),
        "failed": len(rows) - len(done),
        "peaks_within": sum(all(tier["within"] for tier in row["tiers"].values()) for row in done),
        "steps_within": sum(row["step_s"]["within"] for row in done),
        "worst_peak": {name: max(deviations([row["tiers"][name] for row in done]), default=None) for name in TIERS},
        "median_step": statistics.median(steps) if steps else None,
        "worst_step": max(steps, default=None),
    }


def _machine() -> dict[str, Any]:
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cores": len(os.sched_getaffinity(0)),
        "ram_bytes": machine_memory(),
        "python": platform.python_version(),
        "torch": version("torch"),
    }


# ---------------------------------------------------------------------- for people


def _ratio(pair: Mapping[str, Any]) -> str:
    if pair["ratio"] is None:
        return "-" if pair["within"] else "n/a!"
    return f"{pair['ratio']:.3f}" + ("" if pair["within"] else "!")


def progress(row: Mapping[str, Any]) -> str:
    if "error" in row:
        return f"{row['case']}: failed: {row['error']}"
    peaks = ", ".join(f"{name} {_ratio(row['tiers'][name])}" for name in TIERS)
    step = row["step_s"]
    return (
        f"{row['case']}: measured over planned: {peaks}, step {_ratio(step)} "
        f"({seconds_text(step['measured'])}); {row['process_s']:.0f} s for the case"
    )


def _verdict(report: Mapping[str, Any]) -> list[str]:
    total = len(report["cases"])
    peaks = ", ".join(f"{name} {_share(worst)}" for name, worst in report["worst_peak"].items())
    return [
        f"peaks of all tiers within {report['peak_tolerance']:.0%}: {report['peaks_within']} of {total}; "
        f"largest deviation {peaks}",
        f"step time within {report['step_tolerance']:.0%}: {report['steps_within']} of {total}; "
        f"median deviation {_share(report['median_step'])}, largest {_share(report['worst_step'])}",
    ]


def _share(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.1%}"


_COLUMNS: tuple[str, ...] = ("case", "what", "parameters", "context, tokens a step", "state")
_COLUMNS += ("GPU peak", "RAM peak", "NVMe peak", "step", "bound by")


def table(report: Mapping[str, Any]) -> str:
    """Markdown: a row for every case, then how many kept their promise."""
    lines = markdown_table(_COLUMNS, map(_cells, report["cases"]))
    return "\n".join([*lines, "", *(f"- {line}" for line in _verdict(report))])


def _cells(row: Mapping[str, Any]) -> list[str]:
    if "error" in row:
        return [row["case"], row["about"], f"failed: {row['error']}", *[""] * (len(_COLUMNS) - 3)]
    cells = [row["case"], row["about"], f"{row['params'] / 1e6:.1f}M"]
    cells += [f"{row['context']:,}, {row['tokens_per_step']:,}", row["state"]]
    for name in TIERS:
        pair = row["tiers"][name]
        cells.append(_ratio(pair) if pair["planned"] else "-")
    step = row["step_s"]
    cells.append(f"{seconds_text(step['measured'])} of {seconds_text(step['planned'])}: {_ratio(step)}")
    return [*cells, row["bound_by"]]
