"""Runs that live at the same time leave each other the memory that they have planned."""

import fcntl
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import test_limits
import torch
from cli_process import REPOSITORY
from tiny import Silent

from penstock.engine.machine import reservations
from penstock.engine.machine.budgets import Reserved, free_budgets, words
from penstock.engine.machine.limits import GIB
from penstock.engine.machine.reservations import Reservation, reserved
from penstock.engine.preparing import Checklist
from penstock.storage.files.errors import BudgetError
from penstock.storage.files.units import bytes_text

CPU = torch.device("cpu")

PROCESS = """
import json, sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace as Some
from penstock.engine.machine import limits
from penstock.engine.machine.budgets import free_budgets
from penstock.engine.preparing import Checklist
from penstock.engine.machine.reservations import Reservation

limits.ROOT, run, takes = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
observer = Some(on_message=lambda text: print(text, file=sys.stderr), on_prepare=lambda item: None)
with Reservation(run, Some(type="cpu"), observer, Checklist(observer)) as mine:
    free = free_budgets(Some(type="cpu"), others=mine.others)
    mine.reserve(Some(ram=free.ram, gpu=free.gpu, why=free.why))
    print("reserved", flush=True)
    if "hold" in sys.argv:
        sys.stdin.readline()
    peaks = [int(takes * size) for size in (free.ram, free.gpu)]
    mine.settle(Some(tiers={"ram": Some(peak_bytes=peaks[0]), "gpu": Some(peak_bytes=peaks[1])}))
    print(json.dumps({"budget": free.ram + free.gpu, "planned": sum(peaks), "why": free.why}), flush=True)
    sys.stdin.readline()
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A pretended machine of 32 GiB, 20 of them free."""
    return test_limits.machine(tmp_path)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    runtime, temporary = tmp_path / "runtime", tmp_path / "temporary"
    runtime.mkdir()
    temporary.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    return runtime / "penstock", temporary / f"penstock-{os.geteuid()}"


@pytest.fixture
def start(machine: Path, places: object) -> Iterator[Start]:
    """Starts a process that plans `takes` of what it may take on the pretended machine, and lives on."""
    processes: list[subprocess.Popen[str]] = []

    def begin(name: str, *arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PROCESS, str(machine), str(machine / name), *map(str, arguments)]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY / "src")}
        processes.append(subprocess.Popen(command, env=environment, text=True, **pipes))
        return processes[-1]

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


def said(process: subprocess.Popen[str]) -> Any:
    assert process.stdout.readline() == "reserved\n"
    return json.loads(process.stdout.readline())


def reservation(machine: Path, observer: Any = None) -> Reservation:
    observer = observer or Silent()
    return Reservation(machine / "mine", CPU, observer, Checklist(observer))


def plan(ram: int, gpu: int) -> Any:
    return SimpleNamespace(tiers={"ram": SimpleNamespace(peak_bytes=ram), "gpu": SimpleNamespace(peak_bytes=gpu)})


def test_three_at_once_never_plan_more_than_there_is(machine: Path, start: Start) -> None:
    found = [said(process) for process in [start(name, 0.5) for name in "abc"]]
    alone = free_budgets(CPU)
    assert max(each["budget"] for each in found) == alone.gpu + alone.ram
    assert 0 < sum(each["planned"] for each in found) <= 20 * GIB
    assert all(each["planned"] > 0 for each in found)
    last = min(found, key=lambda each: each["budget"])
    assert last["why"]["ram"].count(" reserved") == 2


def test_who_holds_what_is_said_until_its_process_ends(machine: Path, start: Start, places: tuple[Path, Path]) -> None:
    process = start("holder", 1.0)
    planned = said(process)["planned"]
    assert planned > 15 * GIB
    assert [(each.pid, Path(each.run).name) for each in reserved()] == [(process.pid, "holder")]
    # What the process has allocated since is a few megabytes.
    assert planned - GIB // 4 < reserved()[0].ram_bytes <= planned
    observer = Silent()
    name = f"(process {process.pid}) has {bytes_text(reserved()[0].ram_bytes)} reserved"
    refusal = pytest.raises(BudgetError, match=r"too small\. Of ram there is .*holder \(process")
    with refusal as error, reservation(machine) as mine:
        mine.reserve(free_budgets(CPU, others=mine.others))
        raise BudgetError("too small", tier="ram", need_bytes=2, budget_bytes=1)
    assert (error.value.tier, error.value.need_bytes, error.value.budget_bytes) == ("ram", 2, 1)
    assert name in str(error.value)
    with reservation(machine, observer) as mine:
        given = free_budgets(CPU, ram=GIB, gpu=8 * GIB, others=mine.others)
        mine.reserve(given)
        mine.settle(plan(GIB, 8 * GIB))
    (warning,) = observer.messages
    assert warning.startswith("warning: this run plans 9.0 GiB of RAM")
    assert name in warning
    process.kill()
    process.wait()
    assert reserved() == []
    assert any(file.name.startswith("run-") for file in places[0].iterdir())
    with reservation(machine) as mine:
        assert mine.others == []
    assert [file.name for file in places[0].iterdir()] == ["lock"]


def test_who_plans_at_the_same_time_is_waited_for_by_name(
    machine: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder: Any = start("holder", 1.0, "hold")
    assert holder.stdout.readline() == "reserved\n"
    observer = Silent()
    monkeypatch.setattr(reservations, "WAIT_S", 0.0)
    with reservation(machine, observer) as mine:
        assert [other.pid for other in mine.others] == [holder.pid], "it goes on, with all of that reserved"
    name = f"{machine / 'holder'} (process {holder.pid})"
    assert {item.name for item in observer.prepared} == {f"waiting for {name} to plan its memory"}
    assert observer.messages == [f"{name} is still planning its memory; continuing with what it has not reserved"]
    holder.stdin.write("\n")
    holder.stdin.flush()
    monkeypatch.setattr(reservations, "WAIT_S", 300.0)
    observer = Silent()
    with reservation(machine, observer) as mine:
        assert [other.pid for other in mine.others] == [holder.pid]
    assert observer.messages == []


def test_a_settled_plan_gives_the_rest_back_and_a_release_all(machine: Path, start: Start) -> None:
    with reservation(machine) as mine:
        mine.reserve(free_budgets(CPU))
        mine.settle(plan(GIB, GIB))
        assert reserved() == [], "one's own is not another's"
        other = said(start("other", 1.0))
        alone = free_budgets(CPU)
        taken = alone.gpu + alone.ram - other["budget"]
        assert 2 * GIB - GIB // 4 < taken <= 2 * GIB
        assert f"mine (process {os.getpid()}) has 2.0 GiB reserved" in other["why"]["gpu"]


def test_a_folder_that_is_not_this_users_alone_is_not_used(machine: Path, places: tuple[Path, Path]) -> None:
    first, second = places
    (machine / "elsewhere").mkdir(mode=0o700)
    first.symlink_to(machine / "elsewhere")
    observer = Silent()
    with reservation(machine, observer) as mine:
        mine.reserve(free_budgets(CPU))
        assert len(list(second.iterdir())) == 2
    assert second.stat().st_mode & 0o777 == 0o700
    second.chmod(0o755)
    with reservation(machine, observer) as mine:
        mine.reserve(free_budgets(CPU))
        mine.settle(plan(GIB, GIB))
        mine.allocated()
    (told,) = observer.messages
    assert str(first) in told
    assert f"{second}: other users can access it" in told
    assert list((machine / "elsewhere").iterdir()) == []
    assert [file.name for file in second.iterdir()] == ["lock"]


def test_what_is_no_record_is_left_out(machine: Path, places: tuple[Path, Path]) -> None:
    places[0].mkdir(mode=0o700)
    os.mkfifo(places[0] / "run-pipe")
    (places[0] / "run-link").symlink_to("/dev/zero")
    (places[0] / "run-folder").mkdir()
    good = {"run": "/x\x1b[2J", "pid": 1, "base_bytes": 2**62, "ram_bytes": 7, "gpu_bytes": {"one": 5}}
    bad: list[Any] = [{}, [], 1, good | {"pid": "1"}, good | {"ram_bytes": -1}, good | {"gpu_bytes": {"one": 1.5}}]
    contents = [json.dumps(each).encode() for each in [good, *bad]] + [b"", b"[" * 8000, b"\xff" * 9000]
    with ExitStack() as held:
        for number, content in enumerate(contents):
            file = held.enter_context((places[0] / f"run-{number}").open("wb", buffering=0))
            file.write(content)
            fcntl.flock(file, fcntl.LOCK_EX)
        assert reserved() == [Reserved("/x\x1b[2J", 1, 7, {"one": 5})]
        assert words(reserved(), "one") == "/x�[2J (process 1) has 5 B reserved"
        with reservation(machine) as mine:
            assert mine.others == reserved()


@pytest.mark.parametrize("integrated", [False, True])
def test_a_gpus_memory_is_reserved_until_it_is_allocated(
    machine: Path, places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, integrated: bool
) -> None:
    """The driver's answers, as there may be no GPU here."""
    properties = SimpleNamespace(uuid="GPU-1", is_integrated=integrated)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 * GIB, 24 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    cuda, observer = torch.device("cuda", 0), Silent()
    seen = []
    with Reservation(machine / "mine", cuda, observer, Checklist(observer)) as mine:
        mine.reserve(free_budgets(cuda))
        for call in (lambda: mine.settle(plan(GIB, 5 * GIB)), mine.allocated):
            call()
            record = next(file for file in places[0].iterdir() if file.name.startswith("run-"))
            values = json.loads(record.read_bytes())
            seen.append((values["ram_bytes"], values["gpu_bytes"]))
    assert seen == ([(6 * GIB, {})] * 2 if integrated else [(GIB, {"GPU-1": 5 * GIB}), (GIB, {"GPU-1": 0})])
    others = [Reserved("/runs/x", 1, GIB, {"GPU-1": 5 * GIB}), Reserved("/runs/y", 2, 0, {"GPU-2": 5 * GIB})]
    free = free_budgets(cuda, others=others)
    if not integrated:
        assert free.gpu == 15 * GIB - 768 * 2**20
        assert "20.0 GiB free, of which /runs/x (process 1) has 5.0 GiB reserved, 4.0 GiB of 24.0" in free.why["gpu"]
        assert free.ram == 19 * GIB - int(2.56 * GIB)
