"""What a command says on standard error while it works: nothing for five seconds, then what it does, and how far."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from cli_process import wait_until
from samples import cases
from test_export_command import run as run  # the fixture: a run of two steps

import penstock.app.working
from penstock.app.cli import main
from penstock.app.working import EVERY_S, Working, working
from penstock.engine import preparing
from penstock.storage.errors import UserError


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time of the module, in `now`. Nothing is shown by itself, and the first line after 5 seconds."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(penstock.app.working, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(penstock.engine.preparing, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(penstock.app.working, "FIRST_S", 5.0)
    monkeypatch.setattr(penstock.app.working, "_TICK_S", 1e6)
    return clock


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a terminal each step has its line, however short it is."""
    monkeypatch.setattr(penstock.app.working, "FIRST_S", 0.0)
    monkeypatch.setattr(penstock.app.working, "EVERY_S", 0.0)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_a_line_at_most_every_ten_seconds(clock: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    with Working() as shown:
        for step in range(8):
            with shown.step(f"step {step}"):
                clock.now += 4.0
    # Begun at 8 s, the first after 5, then at 20, the first 10 s later.
    assert lines(capsys) == ["step 2", "step 5"]
    with working("looking"):
        clock.now += 4.9
        preparing.tell(0.5, "half of it")
    assert lines(capsys) == [], "one that is quick says nothing"


def test_how_far_it_is_comes_by_itself(
    clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(penstock.app.working, "_TICK_S", 0.001)
    said: list[str] = []

    def shown() -> bool:
        said.extend(lines(capsys))
        return bool(said)

    with working("exporting"):
        clock.now += 2.0
        preparing.tell(0.25, "layers.3")
        clock.now += 4.0  # nothing is told any more: one long block
        wait_until(shown)
    assert said == ["exporting: 25%, layers.3, 6s"]


def test_what_works_within_is_a_step_of_it(clock: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    with working("planning") as outer:
        clock.now += 6.0
        with working("fetching") as inner:
            assert inner is outer
        clock.now += EVERY_S
        with working("checking"), pytest.raises(UserError), working("reading"):
            raise UserError("no such file")
    assert lines(capsys) == ["fetching", "checking"]
    with working("later") as other:
        assert other is not outer


def test_the_line_on_a_terminal_is_gone_at_the_end(clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with working("checking"):
        pass
    drawn, blank, rest = terminal.getvalue().strip("\r").split("\r")[0], *terminal.getvalue().split("\r")[2:]
    assert drawn.strip() == "checking"
    assert (blank.strip(), len(blank), rest) == ("", len(drawn), "")
    monkeypatch.setattr(penstock.app.working, "FIRST_S", 0.0)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("TERM", "dumb")
    with working("checking"):
        pass
    assert terminal.getvalue() == "checking\n", "a dumb one has lines"


MACHINE = ("--machine", "rtx4090-64")
COMMANDS: dict[str, Callable[[str, Path], list[str]]] = {
    "scrub": lambda run, out: ["scrub", run],
    "checkpoint": lambda run, out: ["checkpoint", run, out.name],
    "export": lambda run, out: ["export", run, str(out / "hf")],
    "export to dcp": lambda run, out: ["export", run, str(out / "dcp"), "--format", "dcp"],
    "trace": lambda run, out: ["trace", run, "-o", str(out / "trace.json")],
    "sample": lambda run, out: ["sample", run, "--prompt", "some", "--tokens", "2", "--json"],
    "plan": lambda run, out: ["plan", "quickstart", *MACHINE, "--json"],
    "fit": lambda run, out: ["fit", *MACHINE, "--models", "Llama-3.2-1B", "--contexts", "8k", "--json"],
}


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("name", cases(COMMANDS, *(COMMANDS.keys() - {"fit", "export to dcp"})))
def test_commands_say_what_they_do_on_standard_error_alone(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    command = COMMANDS[name](str(run), tmp_path)
    assert main(command) == 0
    printed = capsys.readouterr()
    begun = next(iter(printed.err.splitlines()))
    assert begun.split()[0] in {"reading", "keeping", "exporting", "writing", "opening", "planning", "planning:"}
    assert begun not in printed.out
    if "--json" in command:
        assert all(json.loads(line) for line in printed.out.splitlines()) if name == "fit" else json.loads(printed.out)
