"""What consoles show: of a run a few lines for a newcomer, a bar on a terminal, every figure right or n/a; of a command
on standard error nothing for five seconds, then what it does, and how far."""

import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_process import wait_until
from rich.console import Console
from samples import cases
from test_export_command import run as run  # the fixture: a run of two steps

import penstock.app.console.working
import penstock.app.launch.progress
from penstock.app.cli.main import main
from penstock.app.console.working import EVERY_S, Working, working
from penstock.app.launch.progress import Display, Eta, StepLanes, plan_line, summary_lines
from penstock.app.runs.speed import WARMUP_STEPS
from penstock.engine import preparing
from penstock.engine.events import Preparing, Span, StepMetrics, ValidationMetrics
from penstock.storage.files.errors import UserError


def metrics(step: int, step_s: float) -> StepMetrics:
    return StepMetrics(step=step, loss=2.5, grad_norm=1.0, lr=1e-3, tokens=100, step_s=step_s, tokens_per_s=1234.5)


def screen(terminal: bool = False) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=100, force_terminal=terminal, color_system=None), out


def test_busy_time_counts_overlaps_once_and_the_eta_leaves_the_warm_up_out() -> None:
    lanes = StepLanes()
    assert lanes.busiest() is None
    of_a = ((0, 0, None), (0, 2, ("a", 1.0)), (1, 3, ("a", 1.0)), (1.5, 2, ("a", 1.0)), (5, 6, ("a", 4 / 6)))
    for lane, (start_s, end_s, busiest) in [*(("a", one) for one in of_a), ("b", (0, 1, ("a", 4 / 6)))]:
        lanes.add(Span(lane, "op", "layers.0", 0, start_s, end_s, 0, 1))
        assert lanes.busiest() == busiest
    eta = Eta(total_steps=100)
    for step in range(1, WARMUP_STEPS + 1):
        assert eta.update(metrics(step, 60.0)) is None
    assert eta.update(metrics(10, 2.0)) == 180.0
    assert eta.update(metrics(11, 4.0)) == 89 * 3.0
    assert eta.update(metrics(100, 2.0)) == 0.0


BLOCKS = (("embed", "ram", "ram", "ram"), ("layers.0", "gpu", "gpu", "gpu"), ("head", "ram", "nvme", "ram"))
PLAN: dict[str, Any] = {
    "blocks": [dict(zip(("name", "weights", "state", "gradient"), block, strict=True)) for block in BLOCKS],
    "bytes_per_step": {"nvme_read": 3 * 2**30, "nvme_write": 2**30}, "layer_chunks": 6,
    "spilled_activations": {"chunks": 0, "bytes": 0}, "saved_graphs": {"chunks": 2, "bytes": 2**20},
}  # fmt: skip

ITEMS = [
    Preparing("tokenizing the data", "begun", 0.0), Preparing("tokenizing the data", "done", 2.0),
    Preparing("pinning 350 GB", "begun", 0.0), Preparing("pinning 350 GB", "progress", 40.0, "88 of 350 GB", 0.25),
    Preparing("pinning 350 GB", "done", 130.5),
]  # fmt: skip


def test_the_plan_in_a_line() -> None:
    places = "plan: weights in gpu and ram, state in gpu and ram and nvme, gradients in gpu and ram; "
    traffic = "each step reads 3.0 GiB from NVMe and writes 1.0 GiB"
    assert plan_line(PLAN) == f"{places}{traffic}; 4 of 6 layer chunks recompute the layer in backward"
    spilled = {"spilled_activations": {"chunks": 2, "bytes": 2**20}}
    assert f"{traffic}, 1.0 MiB of it activations; " in plan_line(PLAN | spilled)


def test_a_line_now_and_then_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(penstock.app.launch.progress, "time", SimpleNamespace(perf_counter=lambda: now))
    console, out = screen()
    display = Display(console, total_steps=90)
    display.message("[a] message with [brackets]")
    for item in ITEMS:
        display.prepare(item)
    for step in range(1, 91):
        now += 50.0 if step == 4 else 1.0
        display.step(metrics(step, 1.0), ("compute", 1.0) if step == 1 else None, 1200.0 if step > 2 else None)
        if step == 40:
            display.validation(ValidationMetrics(step=40, loss=2.25, tokens=10, seconds=1.0, time=0.0))
    display.close()
    assert out.getvalue().splitlines() == [
        "[a] message with [brackets]",
        "  pinning 350 GB                  40.0 s  25%  88 of 350 GB  ...",
        "  pinning 350 GB                 130.5 s",
        "step 1 of 90  loss 2.5000  1,234 tok/s last step  ETA n/a  busiest compute 100%",
        "step 12 of 90  loss 2.5000  1,200 tok/s mean, 1,234 last step  ETA 1m18s",  # 60 s of silence
        "step 30 of 90  loss 2.5000  1,200 tok/s mean, 1,234 last step  ETA 1m00s",
        "step 60 of 90  loss 2.5000  validation 2.2500  1,200 tok/s mean, 1,234 last step  ETA 30s",
    ]
    console, out = screen()
    display = Display(console, total_steps=2)
    measured = {"entropy": 2.0, "kl": 0.01, "rewards/accuracies": 0.5, "rewards/margins": float("nan")}
    display.step(replace(metrics(1, 1.0), measured=measured), None, None)
    found = "loss 2.5000  rewards/margins n/a  accuracies 0.500  kl 0.0100  1,234 tok/s last step  ETA n/a"
    assert out.getvalue().splitlines() == [f"step 1 of 2  {found}"]
    console, out = screen()
    display = Display(console, total_steps=5)
    display.prepare(Preparing("pinning 350 GB", "begun", 0.0))
    for seconds in range(1, 150):
        display.prepare(Preparing("pinning 350 GB", "progress", float(seconds), "in half", seconds / 200))
    display.detail("nothing of it")
    assert out.getvalue().splitlines() == [
        f"  pinning 350 GB                 {at:5.1f} s  {at // 2}%  in half  ..." for at in range(10, 150, 10)
    ]


def test_the_bar_says_what_is_prepared_and_since_when(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(penstock.app.launch.progress, "time", SimpleNamespace(perf_counter=lambda: now))
    seen = []
    for count in range(len(ITEMS) + 1):
        console, out = screen(terminal=True)
        display = Display(console, total_steps=5)
        for item in ITEMS[:count]:
            display.prepare(item)
        now += 4.0
        display.close()  # draws once more
        bar = out.getvalue().rpartition("step 0/5")[2]
        seen.append(re.sub(r"\x1b\[[?\d;]*[A-Za-z]|\u2501", "", bar).strip())
    assert seen == [
        "preparing", "preparing: tokenizing the data  4 s", "preparing", "preparing: pinning 350 GB  4 s",
        "preparing: pinning 350 GB  44 s  25%  88 of 350 GB", "preparing",
    ]  # fmt: skip


def test_a_terminal_keeps_the_checklist_above_the_bar() -> None:
    console, out = screen(terminal=True)
    display = Display(console, total_steps=5, step=2)
    for item in [*ITEMS, Preparing("planning", "begun", 0.0), Preparing("planning", "done", 0.01)]:
        display.prepare(item)
    display.detail("the first step ended 133 s after the start")
    display.step(metrics(3, 1.0), ("compute", 1.0), None)
    display.message("a message")
    display.close()
    assert re.search(r"step 3/5.*busiest compute 100%", out.getvalue(), re.DOTALL)
    lines = [line.rstrip() for line in re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", out.getvalue()).splitlines()]
    assert [line for line in lines if not re.search("step [23]/5", line) and line] == [
        "  tokenizing the data              2.0 s", "  pinning 350 GB                 130.5 s",
        "the first step ended 133 s after the start", "a message",
    ]  # fmt: skip


def test_summary_shows_every_figure() -> None:
    drive = {"path": "/mnt/a/run", "bytes_read": 7 * 2**30, "bytes_written": 9 * 2**30, "percentage_used": 3}
    summary = {
        "steps": 1500, "tokens": 1_000_000, "first_loss": 8.3, "last_loss": 4.1,
        "validation_loss": {"last": 4.5, "best": 4.4, "best_step": 1200}, "mean_tokens_per_s": 3456.7,
        "mean_model_tflops_per_s": 0.1234, "mean_step_s": 1.25,
        "tiers": {"gpu": {"budget_bytes": 2**30, "peak_bytes": 2**29}, "nvme": {"budget_bytes": 0, "peak_bytes": 0}},
        "lanes": {"h2d": {"busy_s": 5.0, "bytes": 2**31}, "compute": {"busy_s": 15.0, "bytes": 0}}, "drives": [drive],
    }  # fmt: skip
    assert summary_lines(summary, [4.0, 5.0], wall_s=20.0) == [
        "trained to step 1,500, 1,000,000 tokens: loss 8.3000 -> 4.1000 (mean of the last 2: 4.5000), "
        "validation loss 4.5000 (best 4.4000 after step 1,200)",
        "mean 3,457 tokens/s, 1.25 s a step; 0.123 TFLOP/s of the model; compute busy 75%; "
        "peak memory: gpu 512 MiB of 1.0 GiB, nvme 0 of 0 B; 9.0 GiB written to /mnt/a/run, endurance used 3%",
    ]
    first_and_last = {"kl": {"first": 0.0, "last": 0.5}, "rewards/margins": {"first": -1.0, "last": 12.5}}
    more = {"measured": first_and_last, "validation_measured": {"kl": {"first": 1.0, "last": 2.0}}}
    assert summary_lines(summary | more, [4.0, 5.0], wall_s=20.0)[1:-1] == [
        "rewards/margins -1.00 -> 12.5, kl 0 -> 0.500, validation kl 1.00 -> 2.00"
    ]
    chosen = {"forward": ["torch-cudnn", "torch-cuda-flash"], "backward": ["flash-attn-4"]}
    on_gpu = summary | {"attention": {"installed": {"torch-cudnn": None}, "chosen": chosen}}
    by = "; attention by torch-cudnn and torch-cuda-flash forward, flash-attn-4 backward; peak"
    assert by in summary_lines(on_gpu, [], wall_s=20.0)[1]
    on_cpu = summary | {"attention": {"installed": None, "chosen": {"forward": ["torch-cpu-flash"], "backward": []}}}
    assert summary_lines(on_cpu, [], wall_s=20.0) == summary_lines(summary, [], wall_s=20.0)
    unknown = ("first_loss", "validation_loss", "mean_tokens_per_s", "mean_step_s", "mean_model_tflops_per_s")
    summary |= {**dict.fromkeys(unknown), "last_loss": float("nan"), "lanes": {}}
    summary["drives"] = [drive | {"percentage_used": None}]
    assert summary_lines(summary, [], wall_s=0.0) == [
        "trained to step 1,500, 1,000,000 tokens: loss n/a -> n/a",
        "mean n/a tokens/s, n/a a step; n/a TFLOP/s of the model; "
        "peak memory: gpu 512 MiB of 1.0 GiB, nvme 0 of 0 B; 9.0 GiB written to /mnt/a/run",
    ]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time of the module, in `now`. Nothing is shown by itself, and the first line after 5 seconds."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(penstock.app.console.working, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(penstock.engine.preparing, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(penstock.app.console.working, "FIRST_S", 5.0)
    monkeypatch.setattr(penstock.app.console.working, "_TICK_S", 1e6)
    return clock


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_a_line_at_most_every_ten_seconds_also_of_what_works_within(
    clock: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    with Working() as shown:
        for step in range(8):
            with shown.step(f"step {step}"):
                clock.now += 4.0
    # Begun at 8 s, the first after 5, then at 20, the first 10 s later.
    assert lines(capsys) == ["step 2", "step 5"]
    with working("looking"):
        clock.now += 4.9
        preparing.report(0.5, "half of it")
    assert lines(capsys) == [], "one that is quick says nothing"
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


def test_how_far_it_is_comes_by_itself(
    clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(penstock.app.console.working, "_TICK_S", 0.001)
    said: list[str] = []

    def shown() -> bool:
        said.extend(lines(capsys))
        return bool(said)

    with working("exporting"):
        clock.now += 2.0
        preparing.report(0.25, "layers.3")
        clock.now += 4.0  # nothing is told any more: one long block
        wait_until(shown)
    assert said == ["exporting: 25%, layers.3, 6s"]


def test_the_line_on_a_terminal_is_gone_at_the_end(clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with working("checking"):
        pass
    drawn, blank, rest = terminal.getvalue().strip("\r").split("\r")[0], *terminal.getvalue().split("\r")[2:]
    assert drawn.strip() == "checking"
    assert (blank.strip(), len(blank), rest) == ("", len(drawn), "")
    monkeypatch.setattr(penstock.app.console.working, "FIRST_S", 0.0)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("TERM", "dumb")
    with working("checking"):
        pass
    assert terminal.getvalue() == "checking\n", "a dumb one has lines"


COMMANDS = {
    "scrub": "scrub RUN", "checkpoint": "checkpoint RUN kept", "export": "export RUN OUT/hf",
    "export to dcp": "export RUN OUT/dcp --format dcp", "trace": "trace RUN -o OUT/trace.json",
    "sample": "sample RUN --prompt some --tokens 2 --json", "plan": "plan quickstart --machine rtx4090-64 --json",
    "fit": "fit --machine rtx4090-64 --models Llama-3.2-1B --contexts 8k --json",
}  # fmt: skip


@pytest.mark.parametrize("name", cases(COMMANDS, *(COMMANDS.keys() - {"fit", "export to dcp"})))
def test_commands_say_what_they_do_on_standard_error_alone(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    for constant in ("FIRST_S", "EVERY_S"):  # without a terminal each step has its line, however short it is
        monkeypatch.setattr(penstock.app.console.working, constant, 0.0)
    command = COMMANDS[name].replace("RUN", str(run)).replace("OUT", str(tmp_path)).split()
    assert main(command) == 0
    printed = capsys.readouterr()
    begun = next(iter(printed.err.splitlines()))
    assert begun.split()[0] in {"reading", "keeping", "exporting", "writing", "opening", "planning", "planning:"}
    assert begun not in printed.out
    if "--json" in command:
        assert all(json.loads(line) for line in printed.out.splitlines()) if name == "fit" else json.loads(printed.out)
