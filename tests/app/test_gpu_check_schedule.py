"""gpu-check's order, limits, resuming and last words, with stages that are plain functions."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from cli_process import REPOSITORY, is_running, wait_until

from penstock.app.gpu_check.found import run_telling
from penstock.app.gpu_check.results import Results
from penstock.app.gpu_check.schedule import Case, Check, Job, Stage
from penstock.storage.errors import UserError

Outcome = Mapping[str, Any] | Callable[[Job], Mapping[str, Any]] | None


class Bench:
    """Stages of cases that take given seconds of a clock, which moves only then, and what they did."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now = folder, 100.0
        self.begun: list[str] = []
        self.limits: dict[str, float] = {}
        self.said: list[str] = []

    def case(
        self, name: str, takes_s: float, estimate_s: float = 0.0, outcome: Outcome = None, optional: bool = False
    ) -> Case:
        def run(job: Job) -> Mapping[str, Any]:
            self.begun.append(name)
            self.limits[name] = job.limit_s
            self.now += min(takes_s, job.limit_s)
            if callable(outcome):
                return outcome(job)
            return outcome or {"status": "done", "figure": takes_s}

        return Case(name=name, estimate=lambda known: estimate_s or takes_s, run=run, optional=optional)

    def run(self, stages: Sequence[Stage], limit_s: float, *, resume: bool = False) -> Results:
        shown = {stage.name: (stage.title, lambda cases: [", ".join(cases)]) for stage in stages}
        results = Results(self.folder, {"gpu": "none"}, shown, resume=resume)
        Check(stages, results, limit_s, self.said.append, self.now, lambda: self.now).run()
        return results


def stage(name: str, *cases: Case, **more: float) -> Stage:
    return Stage(name=name, title=f"the {name}", cases=cases, **more)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_what_fits_runs_in_order_and_the_rest_is_left_out_by_name(bench: Bench, tmp_path: Path) -> None:
    """Optional cases leave later stages their least."""
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


def test_a_case_that_overruns_is_ended_and_costs_the_later_ones_and_a_stage_keeps_to_its_cap(bench: Bench) -> None:
    ended = {"status": "ended", "reason": "not done after 30 s"}
    stages = [stage("one", bench.case("slow", 500, 5, ended), bench.case("b", 75), bench.case("c", 5))]
    capped = stage("two", bench.case("d", 20), bench.case("e", 20), cap_s=30)
    results = bench.run([*stages, capped, stage("three", bench.case("f", 20))], 100)
    assert (bench.limits["slow"], bench.limits["d"]) == (30, 30)
    assert bench.begun == ["slow", "c", "d", "f"]
    assert set(results.not_measured()) == {"one/slow", "one/b", "two/e"}
    assert results.not_measured()["two/e"] == "not measured: takes about 20 s, and 10 s were left"
    assert results.failed() == []


def test_one_cases_failure_keeps_no_other_from_running_and_estimates_know_what_was_found(bench: Bench) -> None:
    def breaks(job: Job) -> Mapping[str, Any]:
        job.found({"rate": 4.0})
        raise RuntimeError("the GPU is gone")

    def estimate(known: Results) -> float:
        return float(known.case("one", "a").get("rate", 1000.0)) * 10

    work = Case(name="b", estimate=estimate, run=bench.case("b", 40).run)
    results = bench.run([stage("one", bench.case("a", 5, outcome=breaks)), stage("two", work)], 60)
    assert results.failed() == ["one/a"]
    assert results.case("one", "a")["rate"] == 4.0
    assert results.case("one", "a")["reason"] == "RuntimeError: the GPU is gone"
    assert results.status("two", "b") == "done"


def test_a_resumed_check_runs_what_is_not_done(bench: Bench, tmp_path: Path) -> None:
    outcomes = {
        "good": {"status": "done", "figure": 1},
        "lacking": {"status": "skipped", "reason": "no room"},
        "broken": {"status": "failed", "reason": "a bug"},
        "late": {"status": "ended", "reason": "too long", "part": 7},
    }
    cases = [bench.case(name, 5, outcome=outcome) for name, outcome in outcomes.items()]
    bench.run([stage("one", *cases, bench.case("unreached", 90))], 100)
    second = Bench(tmp_path)
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
if "hang" in sys.argv:
    time.sleep(600)
"""


FAILS = ("fail", 60, "failed", "exit 1: no such card")
HANGS = ("hang", 3, "ended", "not finished after 3 s, so it was stopped")


@pytest.mark.parametrize(("how", "limit_s", "status", "reason"), [("well", 60, "done", ""), FAILS, HANGS])
def test_a_process_hands_over_what_it_finds(tmp_path: Path, how: str, limit_s: float, status: str, reason: str) -> None:
    found: dict[str, Any] = {}
    outcome = run_telling([sys.executable, "-c", CHILD, how], limit_s, tmp_path / "child.log", found.update)
    assert found == {"first": 1, "second": [2]}
    assert (outcome["status"], outcome.get("reason", "")) == (status, reason)
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
            if file.exists():
                whole = json.loads(file.read_text())
                case = whole["stages"]["one"]["a"]
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
