"""gpu-check: its list and page with small commands that print, fail, hang and crash; its own commands, small."""

import json
import os
import signal
import subprocess
import sys
import time
import venv
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_process import REPOSITORY, is_running, wait_until

from benchmarks import device, gpu_check, smoke
from benchmarks.gpu_check import TESTS, Command, commands, figures, page
from benchmarks.parts.cases import CASES
from benchmarks.parts.process import ENVIRONMENT
from penstock.app.bench.plan import named_cases
from penstock.app.bench.plan_cases import CUDA_CASES
from penstock.engine.forecast.request import PlanRequest
from penstock.engine.machine.budgets import Budgets
from penstock.storage.files.errors import BudgetError

CPU = torch.device("cpu")


def shell(name: str, script: str, limit_s: float = 100, shows: str = "rate") -> Command:
    return Command(name, f"the {name}", ["sh", "-c", script], limit_s, shows)


def check(folder: Path, listed: list[Command], **more: Any) -> tuple[int, dict[str, Any], str]:
    """Exit code, records by name, and the page."""
    code = gpu_check.check(listed, folder / "found", small=True, scratch_in=folder, **more)
    records = json.loads((folder / "found" / "gpu-check.json").read_text())["commands"]
    return code, {record["name"]: record for record in records}, (folder / "found" / "gpu-check.md").read_text()


PRINTS = 'echo note; echo \'{"rate_bytes_per_s": 2e9, "none": null}\'; echo \'{"cases": [{"step_s": [1, 2.5]}]}\''
FAILS = 'echo \'{"rate": 4}\'; echo "RuntimeError: no such card" >&2; exit 3'


def test_what_fails_hangs_crashes_or_is_missing_keeps_nothing_from_running(tmp_path: Path) -> None:
    python = [sys.executable, "-c", "import no_such_package.inside"]
    listed = [
        shell("fails", FAILS),
        shell("hangs", 'echo \'{"rate": 5}\'; trap "" INT; exec sleep 600', 2),
        shell("ends", """trap 'echo "{\\"rate\\": 6}"; exit' INT; sleep 600 & wait""", 2),
        shell("crashes", "kill -SEGV $$"),
        Command("lacks", "a package", python, 100, "rate"),
        shell("skips", 'echo \'{"cases": [{"status": "skipped", "reason": "needs 80 GiB"}]}\''),
        shell("prints", PRINTS, shows="rate_bytes_per_s none step_s"),
    ]
    code, found, text = check(tmp_path, listed)
    assert code == 1
    assert {name: (record["status"], record["reason"]) for name, record in found.items()} == {
        "fails": ("failed", "exit 3: RuntimeError: no such card"),
        "hangs": ("failed", "not finished after 2 s, so it was stopped"),
        "ends": ("failed", "not finished after 2 s, so it was stopped"),
        "crashes": ("failed", "crashed by SIGSEGV"),
        "lacks": ("not measured", f"{sys.executable} has no package no_such_package"),
        "skips": ("not measured", "needs 80 GiB"),
        "prints": ("done", ""),
    }
    assert found["hangs"]["figures"] == {"rate": 5}, "what it had found is kept"
    assert found["ends"]["figures"] == {"rate": 6}, "an interrupt lets it say what it has found"
    assert found["prints"]["figures"]["step_s"] == [1, 2.5]
    assert (
        "| rate_bytes_per_s | 2 GB/s |\n| none | not measured: this machine gives none |\n| step_s | 1 s, 2.5 s |"
        in text
    )
    assert "| rate | 4 |\n\n```\nRuntimeError: no such card\n```" in text
    assert "| rate | not measured: crashed by SIGSEGV |" in text
    assert f"```\nsh -c {PRINTS[:9]}" in text.replace("'echo", "echo")
    assert all(f"- {what}: " in text for what in ("GPU", "torch", "driver", "GPU clock", "date", "command", "took"))
    assert "sizes: small: the figures say nothing about this machine" in text
    assert sorted(file.name for file in tmp_path.iterdir()) == ["found"], "nothing of the scratch folder is left"


@pytest.fixture
def known_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes seconds to be asked."""
    monkeypatch.setattr(gpu_check, "_LOOK", "print('2.11.0 13.0 Some GPU')")


@pytest.mark.usefixtures("known_torch")
def test_the_whole_has_a_limit_and_what_it_left_out_is_added_later(tmp_path: Path) -> None:
    late = [shell("first", FAILS), shell("long", "exec sleep 600", 500), shell("unreached", PRINTS)]
    begun = time.monotonic()
    code, found, text = check(tmp_path, late, limit_s=5)
    assert time.monotonic() - begun < 100
    assert code == 1
    assert found["long"]["reason"].startswith("stopped after")
    assert found["unreached"]["reason"] == "the 5 s were over"
    assert "| rate | not measured" not in text.split("## unreached")[1], "not begun: there is no table"
    earlier = found["first"]
    late[1] = shell("long", PRINTS)
    _, found, _ = check(tmp_path, late, only="long,unreached")
    assert [record["status"] for record in found.values()] == ["failed", "done", "done"]
    assert found["first"] == earlier
    _, found, _ = check(tmp_path, late)
    assert found["first"]["date"] >= earlier["date"]


PARENT = """
import sys
from pathlib import Path
from benchmarks.gpu_check import Command, check
hangs = "echo '{\\"pid\\":' $$ '}'; exec sleep 600"
listed = [Command(name, "", ["sh", "-c", hangs], 500, "pid") for name in "ab"]
sys.exit(check(listed, Path(sys.argv[1]), small=True, scratch_in=Path(sys.argv[2])))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_check_that_is_ended_leaves_what_was_found_and_no_process(tmp_path: Path, number: signal.Signals) -> None:
    found, log = tmp_path / "found", tmp_path / "found" / "a.log"
    environment = os.environ | ENVIRONMENT
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(found), str(tmp_path)], env=environment)
    try:
        wait_until(lambda: log.exists() and "}" in log.read_text())
        assert "| a |  | not measured: still running when this was written |" in (found / "gpu-check.md").read_text()
    finally:
        parent.send_signal(number)
        code = parent.wait()
    wait_until(lambda: not is_running(figures(log.read_text())["pid"]))
    a, b = json.loads((found / "gpu-check.json").read_text())["commands"]
    assert (b["status"], b["reason"]) == ("not measured", "not begun")
    if number != signal.SIGKILL:
        assert (code, a["reason"]) == (1, "gpu-check was ended")
        assert a["figures"] == figures(log.read_text())


@pytest.mark.usefixtures("known_torch")
def test_tests_are_counted_and_failing_ones_named_with_their_error_when_they_are_interrupted(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import os, pytest, signal\n@pytest.mark.parametrize('n', ['a b', 'FAILED', 'x'])\ndef test_good(n): pass\n"
        "def test_bad(): assert 1 == 2\n@pytest.mark.skip('no kernel')\ndef test_lacking(): pass\n"
        "def test_late(): os.kill(os.getpid(), signal.SIGINT)\ndef test_unreached(): pass\n"
    )
    (tests,) = [command for command in commands(small=True) if command.name == "tests"]
    words = [word for word in tests.command if "tests/gpu" not in word and "--rootdir" not in word]
    once = replace(tests, command=[*words, "--rootdir", str(tmp_path), str(tmp_path)])
    _, found, text = check(tmp_path, [once])
    counts = {"collected": 7, "passed": 3, "failed": 1, "skipped": 1, "error": 0}
    assert found["tests"]["figures"] == counts | {"failing": {"1": "test_some.py::test_bad - assert 1 == 2"}}
    assert "| failing.1 | test_some.py::test_bad - assert 1 == 2 |" in text
    assert found["tests"]["reason"].startswith("exit 2: ")


def test_the_page_has_a_row_for_every_figure_and_says_what_was_not_measured() -> None:
    device = {
        "matmul_flops": 670e12,
        "attention": {"forward": {"tflops": {"fa3": 620.0}, "refused": {}}},
        "other": 1,
        "within": False,
    }
    device |= {
        "links": {"h2d_bytes_per_s": 50e9},
        "pinned": "not measured: OSError: no",
        "machine": {"gpu_bytes": 2**31},
    }
    record = {"name": "device", "about": "what", "command": "python", "status": "done", "reason": ""}
    record |= {"shows": "matmul_flops links attention pinned machine reads within", "log": "", "figures": device}
    record |= {"date": "now", "took_s": 3.4, "clock_mhz": 1755}
    skipped = record | {"name": "short", "figures": {}, "reason": "needs 80 GiB", "shows": "mfu", "clock_mhz": None}
    text = page({"GPU": "H200"}, [record, skipped])
    rows = [
        "matmul_flops | 670 TFLOP/s",
        "links.h2d_bytes_per_s | 50 GB/s",
        "attention.forward.tflops.fa3 | 620 TFLOP/s",
    ]
    rows += ["attention.forward.refused | none", "pinned | not measured: OSError: no", "machine.gpu_bytes | 2 GiB"]
    rows += ["reads | not measured: this machine gives none", "mfu | not measured: needs 80 GiB"]
    rows += ["within | False"]
    assert all(f"| {row} |" in text for row in rows), text
    assert "other" not in text
    assert "done; now; took: 3 s; GPU clock while busy: 1755 MHz." in text
    assert "GPU clock while busy: not measured." in text


@pytest.mark.usefixtures("known_torch")
def test_the_clock_is_the_median_while_the_gpu_is_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    lines = "1980, 3\\n1700, 99\\n1755, 100\\n1800, 80\\n[N/A], 90\\n"
    smi.write_text(
        f"#!/bin/sh\ncase $1 in *driver*) echo 580.1;; *max*) echo 1980 MHz;; *) printf '{lines}'; sleep 60;; esac"
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    clocks = tmp_path / "found" / "prints.clocks"
    waits = f"{PRINTS}; until grep -q N/A {clocks}; do sleep 0.1; done"
    _, found, text = check(tmp_path, [shell("prints", waits)])
    assert found["prints"]["clock_mhz"] == 1755
    assert "- GPU: Some GPU\n- torch: 2.11.0, CUDA: 13.0\n" in text
    assert "- driver: 580.1\n- GPU clock: 1980 MHz\n" in text


@pytest.mark.parametrize("small", [False, True])
def test_every_command_of_the_list_names_what_there_is(small: bool) -> None:
    listed = commands(small=small)
    names = [command.name for command in listed]
    assert names[:3] == ["device", "smoke", "tests"]
    assert len(set(names)) == len(names)
    assert 300 < sum(c.limit_s for c in listed[:4]) < 560 or small, "hanging ones leave time for the first real shape"
    shapes = [c.command[c.command.index("shapes") + 1] for c in listed if "shapes" in c.command]
    assert len(shapes) == 8
    assert set(shapes) <= set(CASES)
    plans = [c.command[c.command.index("--case") + 1] for c in listed if "--case" in c.command]
    assert Counter(plans) == Counter(case.name for case in CUDA_CASES)
    assert all(small == ("--small" in c.command) for c in listed if c.name not in ("tests", "storage"))
    assert set(TESTS) == {file.stem.removeprefix("test_") for file in (REPOSITORY / "tests" / "gpu").glob("test_*.py")}
    with pytest.raises(ValueError, match="--case nope: no such case; choose from"):
        named_cases("nope")


@pytest.mark.long
def test_its_own_commands_run_small_without_a_gpu(tmp_path: Path) -> None:
    """All kinds of them but pytest's."""
    kinds = ["device", "smoke", "long-7b", "plan-268m-64k-streamed", "drive", "storage"]
    code, found, text = check(tmp_path, commands(small=True), only=",".join(kinds), limit_s=3000)
    assert {name: record["reason"] for name, record in found.items()} == dict.fromkeys(kinds, "")
    assert code == 0
    left_out = [line for line in text.splitlines() if line.endswith("| not measured: this machine gives none |")]
    assert {line.split(" | ")[0][2:] for line in left_out} == {"mfu", "hfu", "machine.driver, PCIe generation, lanes"}


def test_the_drives_figures_have_the_names_that_its_command_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    device.main(small=True, drive=True)
    (drive,) = figures(capsys.readouterr().out)["drives"]
    (listed,) = [command for command in commands(small=True) if command.name == "drive"]
    assert all(drive[name.removeprefix("drives.1.")] > 0 for name in listed.shows.split())


@pytest.mark.long
def test_the_smoke_agrees_with_plain_pytorch_and_finds_a_wrong_update(tmp_path: Path) -> None:
    setup = smoke.prepare(smoke.SMALL, tmp_path, CPU, "off")
    assert all(smoke.state_bytes(setup.plan).values())
    found = smoke.check(setup, tmp_path)
    assert found["wrong"] == []
    plain = found["plain"]
    assert plain["losses"][0] - plain["losses"][-1] > 0.3
    assert len(found["penstock"]["losses"]) == smoke.STEPS
    wrong = replace(setup.recipe, train=replace(setup.recipe.train, lr=1.1 * smoke.SMALL.lr))
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


@pytest.mark.parametrize("case", [*smoke.SMOKES, smoke.SMALL], ids=lambda case: case.name)
def test_every_smokes_state_lives_in_all_three_tiers_of_a_gpu(case: smoke.Smoke) -> None:
    recipe, spec = smoke.modelled(case, CPU)

    def task(gpu: int, ram: int) -> PlanRequest:
        budgets = Budgets(gpu, ram, None, {})
        return PlanRequest(spec=spec, recipe=recipe, budgets=budgets, device_type="cuda", device_reads=False)

    plan = smoke.placed(task(400 << 30, 400 << 30))
    assert all(smoke.state_bytes(plan).values())
    gpu, ram = plan.tiers["gpu"].budget_bytes, plan.tiers["ram"].budget_bytes
    for less in (task(gpu - 1, ram), task(gpu, ram - 1)):
        with pytest.raises(BudgetError, match="bytes are needed"):
            smoke.placed(less)


def test_bad_words_and_no_gpu_are_refused_with_one_message(tmp_path: Path) -> None:
    """An interpreter that has nothing but itself, too."""
    venv.create(tmp_path / "bare", with_pip=False)
    bare, file = str(tmp_path / "bare" / "bin" / "python"), tmp_path / "file"
    file.write_text("")
    refusals = {(bare, ""): f"{bare} has no typer; give an interpreter that has Penstock's dependencies"}
    here = sys.executable
    refusals |= {(here, "--only smoke,nope"): "--only nope: no such command; choose from device, smoke, tests"}
    refusals |= {(here, f"--scratch {tmp_path}/no"): f"--scratch {tmp_path}/no: no such folder; create it first"}
    if not torch.cuda.is_available():
        refusals |= {(here, ""): f"of {here} sees no CUDA device; run it where there is one"}
    refusals |= {(here, f"--small --results {file}"): f"--results {file}: cannot be used (File exists)"}
    for (python, arguments), message in refusals.items():
        command = ["make", "gpu-check", f"PYTHON={python}", f"RESULTS={tmp_path}/found", f"ARGS={arguments}"]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
        assert "Error" in done.stderr
        assert message in done.stderr
        assert "Traceback" not in done.stderr
        assert not (tmp_path / "found").exists()
