"""gpu-check's order, limits, resuming and last words, with stages that are plain functions."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from cli_process import REPOSITORY, is_running, wait_until

from penstock.app.gpu_check.found import run_telling
from penstock.app.gpu_check.results import Results
from penstock.app.gpu_check.schedule import Case, Check, Ended, Job, Stage
from penstock.storage.errors import UserError


class Bench:
    """Stages of cases that take given seconds of a clock, which moves only then, and what they did."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now = folder, 100.0
        self.begun: list[str] = []
        self.limits: dict[str, float] = {}
        self.said: list[str] = []

    def case(
        self,
        name: str,
        takes_s: float,
        estimate_s: float | None = None,
        outcome: Mapping[str, Any] | Callable[[Job], Mapping[str, Any]] | None = None,
        optional: bool = False,
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


def test_all_runs_in_order_while_there_is_time(bench: Bench) -> None:
    stages = [stage("one", bench.case("a", 5)), stage("two", bench.case("c", 5), bench.case("b", 5))]
    results = bench.run(stages, 100)
    assert bench.begun == ["a", "c", "b"]
    assert results.not_measured() == {}
    assert results.case("two", "b") == {"status": "done", "reason": None, "estimate_s": 5, "took_s": 5, "figure": 5}
    assert bench.said[0] == "one: the one; about 5 s of 100 s left; a (5 s)"
    assert bench.limits["a"] == 30  # twice the estimate, and a little


def test_what_does_not_fit_is_left_out_by_name_and_the_next_is_looked_at(bench: Bench, tmp_path: Path) -> None:
    stages = [stage("one", bench.case("a", 60), bench.case("large", 50), bench.case("small", 10))]
    results = bench.run(stages, 100)
    assert bench.begun == ["a", "small"]
    assert results.not_measured() == {"one/large": "not measured: takes about 50 s, and 40 s were left"}
    assert bench.said[0] == ("one: the one; about 70 s of 100 s left; a (60 s), small (10 s); leaves out large (50 s)")
    assert "- one/large: not measured: takes about 50 s" in (tmp_path / "gpu-check.md").read_text()


def test_optional_cases_leave_later_stages_their_least(bench: Bench, tmp_path: Path) -> None:
    first = stage("one", bench.case("a", 50), bench.case("b", 30, optional=True), bench.case("c", 10, optional=True))
    results = bench.run([first, stage("two", bench.case("d", 30), least_s=35)], 100)
    assert bench.begun == ["a", "c", "d"]
    assert results.not_measured() == {
        "one/b": "not measured: takes about 30 s, and of 50 s left 35 s are for later stages"
    }
    alone = Bench(tmp_path / "alone")
    only = stage("one", alone.case("a", 50), alone.case("b", 30, optional=True))
    alone.run([only], 100)  # nothing comes later
    assert alone.begun == ["a", "b"]


def test_a_case_that_overruns_its_estimate_is_ended_and_costs_the_later_ones(bench: Bench) -> None:
    ended = {"status": "ended", "reason": "not done after 30 s"}
    stages = [stage("one", bench.case("slow", 500, 5, ended), bench.case("b", 75), bench.case("c", 5))]
    results = bench.run(stages, 100)
    assert bench.limits["slow"] == 30
    assert bench.begun == ["slow", "c"]
    assert set(results.not_measured()) == {"one/slow", "one/b"}
    assert results.failed() == []


def test_a_stage_keeps_to_its_cap(bench: Bench) -> None:
    stages = [stage("one", bench.case("a", 20), bench.case("b", 20), cap_s=30), stage("two", bench.case("c", 20))]
    results = bench.run(stages, 100)
    assert bench.begun == ["a", "c"]
    assert bench.limits["a"] == 30
    assert results.not_measured() == {"one/b": "not measured: takes about 20 s, and 10 s were left"}


def test_one_cases_failure_keeps_no_other_from_running(bench: Bench) -> None:
    def breaks(job: Job) -> Mapping[str, Any]:
        job.found({"half": 1})
        raise RuntimeError("the GPU is gone")

    results = bench.run([stage("one", bench.case("a", 5, outcome=breaks), bench.case("b", 5))], 100)
    assert results.failed() == ["one/a"]
    assert results.case("one", "a")["half"] == 1
    assert results.case("one", "a")["reason"] == "RuntimeError: the GPU is gone"
    assert results.status("one", "b") == "done"


def test_estimates_know_what_earlier_stages_found(bench: Bench) -> None:
    rate = stage("rate", bench.case("rate", 1, outcome={"status": "done", "rate": 4.0}))

    def estimate(known: Results) -> float:
        return float(known.case("rate", "rate").get("rate", 1000.0)) * 10

    work = Case(name="work", estimate=estimate, run=bench.case("work", 40).run)
    bench.run([rate, stage("work", work)], 60)
    assert bench.begun == ["rate", "work"]


def test_a_finding_is_on_disk_when_it_has_been_told(bench: Bench, tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def tells(job: Job) -> Mapping[str, Any]:
        job.found({"link": 50})
        for file in ("gpu-check.json", "stages/one.json"):
            seen[file] = json.loads((tmp_path / file).read_text())
        return {"status": "done"}

    bench.run([stage("one", bench.case("a", 5, outcome=tells), bench.case("b", 1))], 100)
    assert seen["stages/one.json"]["a"]["link"] == 50
    whole = seen["gpu-check.json"]
    assert whole["stages"]["one"]["a"]["status"] == "running"
    assert whole["not_measured"] == {"one/a": "running: no reason given", "one/b": "not measured: not begun"}
    assert (tmp_path / "stages" / "one.md").read_text() == "## one: the one\n\na, b\n"


def test_a_resumed_check_runs_what_is_not_done(bench: Bench, tmp_path: Path) -> None:
    outcomes = {
        "good": {"status": "done", "figure": 1},
        "lacking": {"status": "skipped", "reason": "no room"},
        "broken": {"status": "failed", "reason": "a bug"},
        "late": {"status": "ended", "reason": "too long", "part": 7},
    }
    cases = [bench.case(name, 5, outcome=outcome) for name, outcome in outcomes.items()]
    bench.run([stage("one", *cases, bench.case("unreached", 90))], 100)
    before: dict[str, Any] = {}

    def again(job: Job) -> Mapping[str, Any]:
        before.update(job.before)
        return {"status": "done"}

    second = Bench(tmp_path)
    cases = [second.case(name, 5) for name in ("good", "lacking", "broken")]
    cases += [second.case("late", 5, outcome=again), second.case("unreached", 5)]
    results = second.run([stage("one", *cases)], 100, resume=True)
    assert second.begun == ["broken", "late", "unreached"]
    assert before["part"] == 7
    assert results.not_measured() == {"one/lacking": "skipped: no room"}
    assert results.case("one", "good")["figure"] == 1
    assert second.said[0] == "one: 2 of 5 cases are already done"
    third = Bench(tmp_path)
    third.run([stage("one", third.case("good", 5))], 100)
    assert third.begun == ["good"]  # without resume all begins anew


def test_stages_that_are_not_asked_for_keep_their_results(bench: Bench, tmp_path: Path) -> None:
    one, two = stage("one", bench.case("a", 5)), stage("two", bench.case("b", 5))
    bench.run([one, two], 100)
    shown = {each.name: (each.title, lambda cases: list(cases)) for each in (one, two)}
    results = Results(tmp_path, {}, shown, resume=True)
    Check([two], results, 100, bench.said.append, bench.now, lambda: bench.now).run()
    assert bench.begun == ["a", "b"]
    assert "## one" in (tmp_path / "gpu-check.md").read_text()


def test_ended_by_a_signal_the_case_under_way_is_named_and_the_rest_too(bench: Bench, tmp_path: Path) -> None:
    def ends(job: Job) -> Mapping[str, Any]:
        job.found({"half": 1})
        raise Ended("SIGTERM")

    with pytest.raises(Ended):
        bench.run([stage("one", bench.case("a", 5), bench.case("b", 5, outcome=ends), bench.case("c", 5))], 100)
    whole = json.loads((tmp_path / "gpu-check.json").read_text())
    assert whole["not_measured"] == {
        "one/b": "ended: gpu-check itself was ended",
        "one/c": "not measured: not begun",
    }
    assert whole["stages"]["one"]["a"]["figure"] == 5
    assert whole["stages"]["one"]["b"]["half"] == 1


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    for content, reason in (('{"version": 99, "stages": {}}', "by another version"), ("[]", "not a gpu-check result")):
        (tmp_path / "gpu-check.json").write_text(content)
        with pytest.raises(UserError, match=reason):
            Results(tmp_path, {}, {}, resume=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be used for results"):
        Results(tmp_path / "file", {}, {}, resume=False)


# ---------------------------------------------------------------------- processes


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


@pytest.mark.parametrize(
    ("how", "limit_s", "status", "reason"),
    [
        ("well", 60, "done", ""),
        ("fail", 60, "failed", "exit 1: no such card"),
        ("hang", 3, "ended", "not finished after 3 s, so it was stopped"),
    ],
)
def test_a_process_hands_over_what_it_finds(tmp_path: Path, how: str, limit_s: float, status: str, reason: str) -> None:
    found: dict[str, Any] = {}
    outcome = run_telling([sys.executable, "-c", CHILD, how], limit_s, tmp_path / "child.log", found.update)
    assert found == {"first": 1, "second": [2]}
    assert outcome["status"] == status
    assert outcome.get("reason", "") == reason
    assert "working" in (tmp_path / "child.log").read_text()
    assert [file.name for file in tmp_path.iterdir()] == ["child.log"]


PARENT = """
import sys
from functools import partial
from pathlib import Path
from penstock.app.gpu_check.found import run_telling
from penstock.app.gpu_check.results import Results
from penstock.app.gpu_check.schedule import Case, Check, Stage, ended_by_signals
import time
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
    child = "import os\nfrom app.gpu_check.found import tell\ntell({'pid': os.getpid()})\n" + textwrap.dedent(CHILD)
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path), child], env=environment)
    file, case = tmp_path / "gpu-check.json", dict[str, Any]()
    try:
        while "second" not in case:
            assert parent.poll() is None
            time.sleep(0.05)
            if file.exists():
                case = json.loads(file.read_text())["stages"]["one"]["a"]
    finally:
        parent.send_signal(number)
        parent.wait()
    whole = json.loads(file.read_text())
    assert whole["stages"]["one"]["a"]["second"] == [2]
    assert set(whole["not_measured"]) == {"one/a", "one/b"}
    wait_until(lambda: not is_running(case["pid"]))
    results = Results(tmp_path, {}, {"one": ("", lambda cases: [])}, resume=True)
    assert results.status("one", "a") == "ended"
