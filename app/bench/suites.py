"""`penstock bench step --suite`: steps of real shapes on this machine, each against what its kernels reach alone.

Every case (app/bench_cases.py) runs in a process of its own with a time limit. What the machine is too small for is
skipped with the reason, what fails is reported; neither stops the others.
"""

from __future__ import annotations

import json as json_module
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from app.bench.cases import GROUPS, SUITES, Case, Rates, case_to_json, cases_of
from app.bench.process import environment, run_limited
from app.lanes import LANES
from app.progress import bytes_text
from engine.machine.peaks import peak_flops
from storage.errors import UserError
from storage.untrusted import real_path

_PROBE = """
import json, os, platform, torch, transformers
from engine.machine.probe_compute import GPU_SIZES, matmul_flops
from engine.machine.limits import machine_memory
cuda = torch.cuda.is_available()
properties = torch.cuda.get_device_properties(0) if cuda else None
print(json.dumps({
    "gpu": properties.name if cuda else None,
    "gpu_bytes": properties.total_memory if cuda else None,
    "cuda": torch.version.cuda,
    "torch": torch.__version__,
    "transformers": transformers.__version__,
    "python": platform.python_version(),
    "cores": len(os.sched_getaffinity(0)),
    "ram_bytes": machine_memory(),
    "matmul_flops": matmul_flops(torch.device("cuda"), GPU_SIZES, 0.5) if cuda else None,
}))
"""


def bench_suites(
    names: str,
    *,
    json: bool = False,
    trace_dir: Path | None = None,
    folder: Path | None = None,
    time_limit_s: float | None = None,
) -> dict[str, Any]:
    """Run the cases of `names` (NAME[,NAME...]) one after another; print a table, or JSON with `json`.

    Everything that a case writes is below `folder` (the current directory when none) and removed, except a Perfetto
    trace of one step of each case in `trace_dir`. With `time_limit_s` no case is begun that would probably end later.
    Returns the report. Raises UserError for an unknown name or a folder that cannot be used.
    """
    cases = cases_of(names)
    started = time.monotonic()
    scratch_root = real_path(folder or Path.cwd())
    for path in (scratch_root, trace_dir):
        if path is not None and not path.is_dir():
            raise UserError(f"{path}: no such folder; make it first")
    machine = probe()
    report: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine, "cases": []}
    for suite, case in cases:
        left_s = None if time_limit_s is None else time_limit_s - (time.monotonic() - started)
        outcome = _outcome(case, machine, scratch_root, trace_dir, left_s)
        report["cases"].append({"suite": suite, "case": case.name} | outcome)
        print(_progress(report["cases"][-1]), file=sys.stderr, flush=True)
    print(json_module.dumps(report, indent=2) if json else table(report))
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


def probe() -> dict[str, Any]:
    """What the figures depend on: GPU, its peak and driver, what products reach on it, versions, cores, RAM."""
    found = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, env=environment())
    if found.returncode != 0:
        raise UserError(f"torch and transformers cannot be imported by {sys.executable}:\n{found.stderr[-2000:]}")
    machine: dict[str, Any] = json_module.loads(found.stdout.splitlines()[-1])
    machine["peak_flops"] = peak_flops(machine["gpu"] or "")
    machine["driver"] = _driver() if machine["gpu"] else None
    return machine


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def _outcome(
    case: Case, machine: dict[str, Any], scratch_root: Path, trace_dir: Path | None, left_s: float | None
) -> dict[str, Any]:
    if case.needs_cuda and machine["gpu"] is None:
        return {"status": "skipped", "reason": "needs CUDA, and torch sees no device"}
    matmul = machine["matmul_flops"]
    wanted_s = case.estimate_s(Rates.of_matmul(matmul) if matmul else None, machine["cores"])
    if left_s is not None and left_s < wanted_s:
        reason = f"takes about {wanted_s:.0f} s, and {max(0, left_s):.0f} s of the time limit are left"
        return {"status": "skipped", "reason": f"{reason}; name its suite by itself"}
    limit_s = max(case.limit_s, 2 * wanted_s) if case.needs_cuda else case.limit_s
    cut_short = left_s is not None and left_s < limit_s
    if left_s is not None:
        limit_s = min(limit_s, left_s)
    trace = trace_dir.resolve() / f"{case.name}.trace.json" if trace_dir is not None else None
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=scratch_root) as scratch:
        outcome = run_case(case, Path(scratch), trace, limit_s)
    if cut_short and outcome["status"] == "ended":
        reason = f"ended by the time limit after {limit_s:.0f} s; name its suite by itself"
        return outcome | {"status": "skipped", "reason": reason}
    return outcome | {"status": "failed"} if outcome["status"] == "ended" else outcome


def run_case(case: Case, scratch: Path, trace: Path | None, limit_s: float) -> dict[str, Any]:
    """What one case's process came to: `status` done, skipped, failed or ended, with `reason` or the figures."""
    command = [sys.executable, "-m", "app.bench.suite_worker", case_to_json(case), "--scratch", str(scratch)]
    if trace is not None:
        command += ["--trace", str(trace)]
    started = time.monotonic()
    with (scratch / "stdout").open("w+") as out, (scratch / "stderr").open("w+") as err:
        code = run_limited(command, limit_s, stdout=out, stderr=err)
        took = {"process_s": time.monotonic() - started}
        out.seek(0)
        err.seek(0)
        lines, errors = out.read().strip().splitlines(), err.read().strip()[-4000:]
    if code is None:
        return {
            "status": "ended",
            "reason": f"not done after {limit_s:.0f} s, so it was ended\n{errors}".strip(),
        } | took
    if code != 0 or not lines:
        return {"status": "failed", "reason": f"exit {code}\n{errors}".strip()} | took
    outcome: dict[str, Any] = json_module.loads(lines[-1])
    return outcome | took


def _progress(row: dict[str, Any]) -> str:
    if row["status"] != "done":
        return f"{row['case']}: {row['status']}: {row['reason'].splitlines()[0]}"
    return f"{row['case']}: {row['tokens_per_s']:,.0f} tokens/s, {row['process_s']:.0f} s for the case"


def _percent(share: float | None) -> str:
    return "n/a" if share is None else f"{share:.1%}"


def table(report: dict[str, Any]) -> str:
    """The report for people."""
    machine = report["machine"]
    peak = machine["peak_flops"]
    where = machine["gpu"] or "no GPU"
    lines = [
        f"{where}, {machine['cores']} cores, {bytes_text(machine['ram_bytes'])} RAM, torch {machine['torch']}, "
        f"driver {machine['driver'] or 'n/a'}, bf16 peak {'n/a' if peak is None else f'{peak / 1e12:.1f} TFLOP/s'}, "
        f"{report['date'][:10]}",
        f"{'case':<15}{'model':<24}{'context':>9}{'tokens/s':>10}{'step s':>9}{'MFU':>8}{'HFU':>8}"
        f"{'ratio':>7}{'I/O':>7}{'idle':>7}{'gaps':>7}  of",
    ]
    done = [row for row in report["cases"] if row["status"] == "done"]
    for row in done:
        lines.append(
            f"{row['case']:<15}{row['model']:<24}{row['row_tokens']:>9,}{row['tokens_per_s']:>10,.0f}"
            f"{row['step_s']:>9.2f}{_percent(row['mfu']):>8}{_percent(row['hfu']):>8}{row['ratio']:>7.2f}"
            f"{_percent(row['exposed_io']):>7}{_percent(row['compute_idle']):>7}{_percent(row['kernel_idle']):>7}"
            f"  {row['label']}"
        )
    for row in done:
        lines += ["", *_details(row)]
    rest = [row for row in report["cases"] if row["status"] != "done"]
    lines += ["", *(f"{row['case']}: {row['status']}: {row['reason']}" for row in rest)] if rest else []
    lines += ["", *_LEGEND]
    return "\n".join(lines)


_LEGEND = (
    "ratio: the step over its FLOPs at the rates that the kernels reached alone. I/O: share of the measured steps in",
    "which something moved and nothing computed. idle: share in which the compute lane had no op. gaps: share in which",
    "no kernel ran, by the profiler, in a step of its own.",
)


def _details(row: dict[str, Any]) -> Sequence[str]:
    measured, attention, matmul = row["measured"], row["attention_tflops"], row["matmul_tflops"]
    tiers = ", ".join(
        f"{name} {bytes_text(tier['peak_bytes'])}"
        + (
            f" (planned {bytes_text(tier['planned_bytes'])}, budget {bytes_text(tier['budget_bytes'])})"
            if "budget_bytes" in tier
            else ""
        )
        for name, tier in row["tiers"].items()
    )
    if (lost := row["tiers"]["gpu"].get("fragmentation_bytes")) is not None:
        tiers += f"; {bytes_text(lost)} of the GPU's lost to fragmentation"
    busy = ", ".join(f"{lane} {row['busy'][lane]:.1%}" for lane in LANES)
    once, whole = row["attention_executed_over_once"], row["whole_model"]
    return (
        f"{row['case']}: {measured['layers']} of {row['layers']} layers measured, {measured['step_s']:.3f} s a step "
        f"({measured['layers_s']:.3f} s at the layers), ratio {measured['ratio']:.2f}; scaled and "
        f"with nothing computed twice {row['ratio_once']:.2f}",
        f"  busy: {busy}",
        f"  peak: {tiers}; K/V window {row['plan']['kv_window']}",
        f"  alone, TFLOP/s: attention forward {attention['forward']:.3g}, backward {attention['backward']:.3g}; "
        f"matmul of a layer {matmul['layer']:.3g}, of the head {matmul['head']:.3g}",
        f"  attention by {attention['kernels']['forward']} and {attention['kernels']['backward']}; computed over once: "
        f"forward {once['forward']:.3f}, backward {once['backward']:.3f}",
        f"  the whole model takes gpu {bytes_text(whole['gpu_bytes'])}, ram {bytes_text(whole['ram_bytes'])}, "
        f"nvme {bytes_text(whole['nvme_bytes'])}",
    )
