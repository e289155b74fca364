"""gpu-check: its order, limits, resuming and last words with stages that are plain functions; and its own stages."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_process import REPOSITORY, is_running, wait_until

from penstock.app.bench.cases import TINY, Rates
from penstock.app.gpu_check import smoke, stages, tables
from penstock.app.gpu_check.found import run_telling
from penstock.app.gpu_check.results import Results
from penstock.app.gpu_check.schedule import Case, Check, Job, Stage
from penstock.engine.config import parse_bytes
from penstock.engine.forecast.request import PlanRequest
from penstock.engine.machine.budgets import Budgets
from penstock.engine.machine.presets import generic_gpu
from penstock.storage.errors import UserError

Outcome = Mapping[str, Any] | Callable[[Job], Mapping[str, Any]] | None


class Bench:
    """Stages of cases that take given seconds of a clock, which moves only then, and what they did."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now = folder, 100.0
        self.begun: list[str] = []
        self.limits: dict[str, float] = {}
        self.said: list[str] = []

    def case(self, name: str, takes_s: float, estimate_s: float = 0, outcome: Outcome = None, **more: bool) -> Case:
        def run(job: Job) -> Mapping[str, Any]:
            self.begun.append(name)
            self.limits[name] = job.limit_s
            self.now += min(takes_s, job.limit_s)
            if callable(outcome):
                return outcome(job)
            return outcome or {"status": "done", "figure": takes_s}

        return Case(name=name, estimate=lambda known: estimate_s or takes_s, run=run, **more)

    def run(self, stages: Sequence[Stage], limit_s: float, *, resume: bool = False) -> Results:
        shown = {stage.name: (stage.title, lambda cases: [", ".join(cases)]) for stage in stages}
        results = Results(self.folder, {"gpu": "none"}, shown, resume=resume)
        Check(stages, results, limit_s, self.said.append, self.now, lambda: self.now).run()
        return results


def stage(name: str, *cases: Case, **more: float) -> Stage:
    return Stage(name=name, title=f"the {name}", cases=cases, **more)


def test_what_fits_runs_in_order_and_the_rest_is_left_out_by_name(tmp_path: Path) -> None:
    """Optional cases leave later stages their least."""
    bench = Bench(tmp_path)
    optional = (bench.case("b", 30, optional=True), bench.case("c", 10, optional=True))
    one = stage("one", bench.case("a", 50), *optional, bench.case("large", 45))
    results = bench.run([one, stage("two", bench.case("e", 30), bench.case("d", 5), least_s=35)], 100)
    assert bench.begun == ["a", "c", "e", "d"]
    assert results.not_measured() == {
        "one/b": "not measured: takes about 30 s, and of 50 s left 35 s are for later stages",
        "one/large": "not measured: takes about 45 s, and 40 s were left",
    }
    assert results.case("two", "d") == {"status": "done", "reason": None, "estimate_s": 5, "took_s": 5, "figure": 5}
    runs = "about 60 s of 100 s left; a (50 s), c (10 s)"
    assert bench.said[0] == f"one: the one; {runs}; leaves out b (30 s), large (45 s)"
    assert bench.limits["c"] == 40  # twice the estimate, and a little
    assert "- one/large: not measured: takes about 45 s" in (tmp_path / "gpu-check.md").read_text()
    assert (tmp_path / "stages" / "two.md").read_text() == "## two: the two\n\ne, d\n"


def test_a_case_that_overruns_is_ended_one_that_fails_ends_no_other_and_a_stage_has_a_cap(tmp_path: Path) -> None:
    """What a failed one has found counts for the estimates of those after it."""
    bench, ended = Bench(tmp_path), {"status": "ended", "reason": "not done after 30 s"}
    overrun = stage("one", bench.case("slow", 500, 5, ended), bench.case("b", 75), bench.case("c", 5))
    capped = stage("two", bench.case("d", 20), bench.case("e", 20), cap_s=30)
    results = bench.run([overrun, capped, stage("three", bench.case("f", 20))], 100)
    assert (bench.limits["slow"], bench.limits["d"]) == (30, 30)
    assert bench.begun == ["slow", "c", "d", "f"]
    assert set(results.not_measured()) == {"one/slow", "one/b", "two/e"}
    assert results.not_measured()["two/e"] == "not measured: takes about 20 s, and 10 s were left"
    assert results.failed() == []

    def breaks(job: Job) -> Mapping[str, Any]:
        job.found({"rate": 4.0})
        raise RuntimeError("the GPU is gone")

    def estimate(known: Results) -> float:
        return float(known.case("one", "a").get("rate", 1000.0)) * 10

    work = Case(name="b", estimate=estimate, run=bench.case("b", 40).run)
    results = bench.run([stage("one", bench.case("a", 5, outcome=breaks)), stage("two", work)], 60)
    assert results.failed() == ["one/a"]
    assert {"rate": 4.0, "reason": "RuntimeError: the GPU is gone"}.items() <= results.case("one", "a").items()
    assert results.status("two", "b") == "done"


def test_a_resumed_check_runs_what_is_not_done(tmp_path: Path) -> None:
    bench, second = Bench(tmp_path), Bench(tmp_path)
    outcomes = {
        "good": {"status": "done", "figure": 1}, "lacking": {"status": "skipped", "reason": "no room"},
        "broken": {"status": "failed", "reason": "a bug"}, "late": {"status": "ended", "reason": "too long", "part": 7},
    }  # fmt: skip
    cases = [bench.case(name, 5, outcome=outcome) for name, outcome in outcomes.items()]
    bench.run([stage("one", *cases, bench.case("unreached", 90))], 100)
    cases = [second.case(name, 5) for name in ("good", "lacking", "broken", "unreached")]
    late = second.case("late", 5, outcome=lambda job: {"status": "done", "before": job.before["part"]})
    results = second.run([stage("one", *cases, late)], 100, resume=True)
    assert second.begun == ["broken", "unreached", "late"]
    assert results.case("one", "late")["before"] == 7
    assert results.not_measured() == {"one/lacking": "skipped: no room"}
    assert results.case("one", "good")["figure"] == 1
    assert second.said[0] == "one: 2 of 5 cases are already done"
    second.run([stage("one", second.case("good", 5))], 100)
    assert second.begun[-1] == "good"  # without resume all begins anew


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    for content, reason in (('{"version": 99, "stages": {}}', "by another version"), ("[]", "not a gpu-check result")):
        (tmp_path / "gpu-check.json").write_text(content)
        with pytest.raises(UserError, match=reason):
            Results(tmp_path, {}, {}, resume=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be used for results"):
        Results(tmp_path / "file", {}, {}, resume=False)


CHILD = """
import sys, time
from penstock.app.gpu_check.found import tell
tell({"first": 1})
print("working")
tell({"second": [2]})
if "fail" in sys.argv:
    sys.exit("no such card")
if "raise" in sys.argv:
    error = OSError("no space left")
    error.add_note("in op update layers.3[0], step 1, lane optimizer")
    raise error
if "hang" in sys.argv:
    time.sleep(600)
"""
FAILS = ("fail", 600, "failed", "exit 1: no such card")
RAISES = ("raise", 600, "failed", "exit 1: OSError: no space left")
HANGS = ("hang", 3, "ended", "not finished after {} s, so it was stopped")


@pytest.mark.parametrize(("how", "limit_s", "status", "reason"), [("well", 600, "done", ""), FAILS, RAISES, HANGS])
def test_a_process_hands_over_what_it_finds(tmp_path: Path, how: str, limit_s: float, status: str, reason: str) -> None:
    found: dict[str, Any] = {}
    outcome = run_telling([sys.executable, "-c", CHILD, how], limit_s, tmp_path / "child.log", found.update)
    while how == "hang" and "second" not in found and limit_s < 600:  # a loaded machine takes longer to begin
        limit_s *= 5
        outcome = run_telling([sys.executable, "-c", CHILD, how], limit_s, tmp_path / "child.log", found.update)
    assert found == {"first": 1, "second": [2]}
    assert (outcome["status"], outcome.get("reason", "")) == (status, reason.format(limit_s))
    assert "working" in (tmp_path / "child.log").read_text()
    assert [file.name for file in tmp_path.iterdir()] == ["child.log"]


PARENT = """
import sys, time
from pathlib import Path
from penstock.app.gpu_check.found import run_telling
from penstock.app.gpu_check.results import Results
from penstock.app.gpu_check.schedule import Case, Check, Stage, ended_by_signals
folder, child = Path(sys.argv[1]), sys.argv[2]
def run(job):
    return run_telling([sys.executable, "-c", child, "hang"], job.limit_s, folder / "child.log", job.found)
stages = [Stage(name="one", title="", cases=[Case(name=n, estimate=lambda known: 100, run=run) for n in "ab"])]
results = Results(folder, {}, {"one": ("", lambda cases: [])}, resume=False)
with ended_by_signals():
    Check(stages, results, 1000, print, time.monotonic()).run()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_check_that_is_killed_leaves_all_that_was_found_and_no_process(
    tmp_path: Path, number: signal.Signals
) -> None:
    child = f"import os\nfrom app.gpu_check.found import tell\ntell({{'pid': os.getpid()}})\n{CHILD}"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path), child], env=environment)
    file, case = tmp_path / "gpu-check.json", dict[str, Any]()
    try:
        while "second" not in case:
            assert parent.poll() is None
            time.sleep(0.05)
            whole = json.loads(file.read_text()) if file.exists() else {}
            case = whole["stages"]["one"]["a"] if whole else {}
        assert whole["not_measured"] == {"one/a": "running: no reason given", "one/b": "not measured: not begun"}
    finally:
        parent.send_signal(number)
        parent.wait()
    whole = json.loads(file.read_text())
    assert whole["stages"]["one"]["a"]["second"] == [2]
    assert set(whole["not_measured"]) == {"one/a", "one/b"}
    if number == signal.SIGTERM:
        assert whole["not_measured"]["one/a"] == "ended: gpu-check itself was ended"
    wait_until(lambda: not is_running(case["pid"]))
    results = Results(tmp_path, {}, {"one": ("", lambda cases: [])}, resume=True)
    assert results.status("one", "a") == "ended"


CPU = torch.device("cpu")
H200: dict[str, Any] = {
    "status": "done",
    "machine": {"gpu": "NVIDIA H200", "cores": 16},
    "matmul_flops": 670e12,
    "attention": {
        "forward": {"chosen": "torch-cudnn", "tflops": {"torch-cudnn": 620.0, "flash": 380.0}, "refused": {}},
        "backward": {"chosen": "torch-cudnn", "tflops": {"torch-cudnn": 510.0}, "refused": {"fa3": "is not installed"}},
    },
}


def known(folder: Path, device: dict[str, Any] | None = None, gpu: str = "Some GPU") -> Results:
    """Results of a card of that name, of which `device` was found."""
    results = Results(folder, {"gpu": gpu}, {"device": ("what", lambda cases: [])}, resume=False)
    if device is not None:
        results.put("device", "device", device)
    return results


def test_ten_minutes_of_an_h200_hold_what_matters_most_by_measured_rates_or_the_data_sheets(tmp_path: Path) -> None:
    measured = Rates(matmul=670e12, attention_forward=620e12, attention_backward=510e12)
    assert stages.rates(known(tmp_path, H200)) == measured
    products_only = {"status": "ended", "matmul_flops": 100e12, "attention": {"error": "RuntimeError"}}
    assert stages.rates(known(tmp_path, products_only)) == Rates.of_matmul(100e12)
    assert stages.rates(known(tmp_path, gpu="NVIDIA H200")) == Rates.of_matmul(0.67 * 989.5e12)
    assert stages.rates(known(tmp_path)) is None
    results = known(tmp_path, H200)
    found = stages.all_stages(tmp_path)
    assert list(stages.SHOWN) == [stage.name for stage in found]
    assert [case.name for case in found[2].cases if not case.optional] == ["long-7b", "short", "long-8b"]
    must = [case for stage in found[:3] for case in stage.cases if stage is not found[2] or not case.optional]
    assert 350 < sum(case.estimate(results) for case in must) < 560 - 50
    slow = H200 | {"attention": {"forward": {"tflops": {"fa2": 380.0}}, "backward": {"tflops": {"fa2": 300.0}}}}
    case = found[2].cases[0]
    assert case.name == "long-7b"
    assert case.estimate(known(tmp_path, slow)) > case.estimate(results) + 10
    with pytest.raises(UserError, match="--suite nope: no such suite"):
        stages.all_stages(tmp_path, "nope")


def test_tables_show_what_was_found_and_what_was_not() -> None:
    device = "\n".join(tables.device({"device": H200 | {"links": {"h2d_bytes_per_s": 50e9}, "estimate_s": 20.0}}))
    assert "| bf16 products | 670 TFLOP/s |" in device
    assert "| links: h2d_bytes_per_s | 50.0 GB/s |" in device
    assert "| attention backward: fa3 | refused: is not installed |" in device
    trace = "def bad():\nE   assert 1 == 2\ntest_a.py:3: AssertionError"
    tests = {
        "tests/gpu/test_a.py::good": {"outcome": "passed", "seconds": 1, "text": ""},
        "tests/gpu/test_a.py::bad": {"outcome": "failed", "seconds": 1, "text": trace},
        "tests/gpu/test_a.py::lacking": {"outcome": "skipped", "seconds": 0, "text": "no kernel"},
        "tests/gpu/test_a.py::late": {"outcome": "not run"},
    }
    text = "\n".join(tables.tests({"tests": {"status": "ended", "reason": "late", "tests": tests, "took_s": 90.0}}))
    assert "1 passed, 1 failed, 1 skipped, 1 not run" in text
    assert "| test_a.py::bad | failed | assert 1 == 2 |" in text
    assert not re.search("good|lacking", text)
    late = {"status": "not measured", "reason": "takes about 100 s, and 3 s were left", "estimate_s": 100.0}
    for table in (tables.suites({"a": late}), tables.plans({"a": late}), tables.drives({"probe": late})):
        assert "not measured: takes about 100 s" in table[2]


TINY_SMOKE = smoke.Smoke(
    shape=replace(TINY, layers=3, hidden=128, intermediate=384, vocab=1024, head_dim=32), rows=2, row_tokens=128,
    chunk_tokens=64, gpu="6MiB", ram="9MiB", lr=3e-3, part="64KiB",
)  # fmt: skip


@pytest.mark.long
def test_the_smoke_agrees_with_plain_pytorch_and_finds_a_wrong_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smoke, "STEPS", 4)
    found = smoke.check(TINY_SMOKE, tmp_path, CPU, "off")
    assert found["wrong"] == []
    plain = found["plain"]
    assert plain["losses"][0] - plain["losses"][-1] > 0.3
    assert len(found["penstock"]["losses"]) == 4
    setup = smoke.prepare(TINY_SMOKE, tmp_path, CPU, "off")
    assert all(smoke.state_bytes(setup).values())
    wrong = replace(setup.recipe, train=replace(setup.recipe.train, lr=1.1 * TINY_SMOKE.lr))
    (tmp_path / "wrong").mkdir()
    assert smoke.compare(smoke.penstock(replace(setup, recipe=wrong), tmp_path / "wrong"), plain)


def test_what_the_smoke_calls_wrong() -> None:
    right = {"losses": [7.0, 6.5, 6.0], "grad_norms": [1.0, 2.0, 3.0], "steps_s": [1.0, 1.0, 1.0]}
    assert smoke.compare(right, right) == []
    apart = right | {"losses": [7.0, 6.53, 6.0]}
    assert smoke.compare(apart, right) == ["step 2: loss 6.53000 and 6.50000, 3.0% of the fall apart"]
    norms = right | {"grad_norms": [1.0, 2.0, 3.3]}
    assert smoke.compare(norms, right) == ["step 3: gradient norm 3.30000 and 3.00000, 10.0% apart"]
    assert "does not fall" in smoke.compare(right, right | {"losses": [7.0, 7.0, 7.0]})[0]
    nothing = right | {"losses": [7.0, float("nan"), 6.0]}
    assert smoke.compare(nothing, right) == ["a loss or a gradient norm is not finite"]


@pytest.mark.long
@pytest.mark.parametrize("smoke_case", smoke.SMOKES, ids=lambda case: case.shape.name)
def test_every_smokes_state_lives_in_all_three_tiers_of_a_gpu(smoke_case: smoke.Smoke, tmp_path: Path) -> None:
    setup = smoke.prepare(replace(smoke_case, gpu="400GiB", ram="400GiB"), tmp_path, CPU)
    budgets = Budgets(parse_bytes(smoke_case.gpu, "gpu"), parse_bytes(smoke_case.ram, "ram"), None, {})
    task = PlanRequest(spec=setup.spec, recipe=setup.recipe, budgets=budgets, device_type="cuda", device_reads=False)
    plan = task.search(generic_gpu("NVIDIA H200")).plan
    assert {buffer.state for buffer in plan.buffers.values()} == {"gpu", "ram", "nvme"}


def gpu_check(python: str, results: Path) -> subprocess.CompletedProcess[str]:
    command = ["make", "gpu-check", f"PYTHON={python}", f"RESULTS={results}"]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_no_gpu_is_said_and_is_no_failure(tmp_path: Path) -> None:
    done = gpu_check(sys.executable, tmp_path / "results")
    assert done.returncode == 0, done.stderr
    assert "gpu-check: skipped: torch of" in done.stdout
    assert not (tmp_path / "results").exists()


def test_an_interpreter_without_torch_is_said_too(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    done = gpu_check(str(tmp_path / "bare" / "bin" / "python"), tmp_path / "results")
    assert done.returncode == 0, done.stderr
    assert "is missing or sees no CUDA device" in done.stdout
