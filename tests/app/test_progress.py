from __future__ import annotations

import io
import re
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

import app.progress
from app.progress import (
    WARMUP_STEPS,
    Display,
    Eta,
    StepLanes,
    activation_lines,
    plan_table,
    print_summary,
    traffic_line,
)
from engine.events import Preparing, Span, StepMetrics


def span(lane: str, start_s: float, end_s: float) -> Span:
    return Span(lane, "op", "layers.0", 0, start_s, end_s, 0, 1)


def metrics(step: int, step_s: float) -> StepMetrics:
    return StepMetrics(step=step, loss=2.5, grad_norm=1.0, lr=1e-3, tokens=100, step_s=step_s, tokens_per_s=1234.5)


def screen(terminal: bool = False) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=100, force_terminal=terminal, color_system=None), out


def busiest(*spans: Span) -> tuple[str, float] | None:
    lanes = StepLanes()
    for item in spans:
        lanes.add(item)
    return lanes.busiest()


def test_busy_time_counts_overlaps_once() -> None:
    spans = [span("a", 0, 2), span("a", 1, 3), span("a", 1.5, 2), span("a", 5, 6), span("b", 0, 1)]
    assert busiest(*spans) == ("a", 4 / 6)
    assert busiest() is None
    assert busiest(span("a", 1, 1)) is None


def test_eta_leaves_the_warm_up_out() -> None:
    eta = Eta(total_steps=100)
    for step in range(1, WARMUP_STEPS + 1):
        assert eta.update(metrics(step, 60.0)) is None
    assert eta.update(metrics(10, 2.0)) == 180.0
    assert eta.update(metrics(11, 4.0)) == 89 * 3.0
    assert eta.update(metrics(100, 2.0)) == 0.0


PLAN: dict[str, Any] = {
    "blocks": [
        {"name": "embed", "weights": "ram", "state": "ram", "gradient": "ram", "bytes": 2**20},
        {"name": "layers.0", "weights": "gpu", "state": "gpu", "gradient": "gpu", "bytes": 2**20},
        {"name": "layers.1", "weights": "gpu", "state": "gpu", "gradient": "gpu", "bytes": 2**20},
        {"name": "layers.2", "weights": "ram", "state": "nvme", "gradient": "ram", "bytes": 2**20},
        {"name": "head", "weights": "ram", "state": "nvme", "gradient": "ram", "bytes": 2**20},
    ],
    "tiers": {},
    "bytes_per_step": {"nvme_read": 3 * 2**30, "nvme_write": 2**30},
    "spilled_activations": {"chunks": 2, "bytes": 2**20},
    "kept_activations": {"chunks": 0, "bytes": 0},
    "held_activations": {"chunks": 0, "bytes": 0},
    "recomputed_blocks": [],
    "kv_window": "whole",
    "layer_chunks": 6,
}


ITEMS = [
    Preparing("tokenizing the data", "begun", 0.0),
    Preparing("tokenizing the data", "done", 2.0),
    Preparing("pinning 350 GB", "begun", 0.0),
    Preparing("pinning 350 GB", "progress", 40.0, "88 of 350 GB", 0.25),
    Preparing("pinning 350 GB", "done", 130.5),
]


def test_what_a_step_costs_the_drives_is_said_before_it_runs() -> None:
    line = "each step reads 3.0 GiB from NVMe and writes 1.0 GiB"
    assert traffic_line(PLAN) == line + ", 1.0 MiB of it activations"
    nothing = {"spilled_activations": {"chunks": 0, "bytes": 0}}
    assert traffic_line(PLAN | nothing) == line
    idle = {"bytes_per_step": {"nvme_read": 0, "nvme_write": 0}}
    assert "nothing passes through NVMe" in traffic_line(PLAN | nothing | idle)


def test_what_backward_finds_saved_is_said() -> None:
    assert activation_lines(PLAN) == []
    some = {"kept_activations": {"chunks": 4, "bytes": 3 * 2**20}, "recomputed_blocks": ["layers.0", "layers.1"]}
    held = {"held_activations": {"chunks": 1, "bytes": 2**20}}
    assert activation_lines(PLAN | some | held | {"kv_window": "streamed"}) == [
        "1.0 MiB of saved activations stay on the GPU, as RAM has no room for them",
        "backward computes nothing again in 4 of 6 layer chunks: 3.0 MiB of GPU memory keep them",
        "backward computes attention again in layers.0 to layers.1: they save their input only",
        "keys and values pass through the GPU chunk by chunk",
    ]


def test_plan_table_joins_layers_that_live_alike() -> None:
    console, out = screen()
    console.print(plan_table(PLAN))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.getvalue().splitlines() if "│" in line]
    assert rows == [
        ["embed", "ram", "ram", "ram", "1.0 MiB"],
        ["layers.0 - 1", "gpu", "gpu", "gpu", "2.0 MiB"],
        ["layers.2", "ram", "nvme", "ram", "1.0 MiB"],
        ["head", "ram", "nvme", "ram", "1.0 MiB"],
    ]


def test_plain_lines_without_a_terminal() -> None:
    console, out = screen()
    display = Display(console, total_steps=5)
    display.plan(PLAN)
    display.message("[a] message with [brackets]")
    display.step(metrics(1, 1.0), ("compute", 1.0))
    display.step(metrics(2, 1.0), None)
    display.close()
    assert out.getvalue().splitlines()[-3:] == [
        "[a] message with [brackets]",
        "step 1/5  loss 2.5000  1,234 tok/s  ETA n/a  busiest compute 100%",
        "step 2/5  loss 2.5000  1,234 tok/s  ETA n/a  busiest n/a",
    ]


def test_progress_bar_on_a_terminal() -> None:
    console, out = screen(terminal=True)
    display = Display(console, total_steps=5, step=2)
    display.plan(PLAN)
    display.step(metrics(3, 1.0), ("compute", 1.0))
    display.message("a message")
    display.close()
    assert "step 3/5" in out.getvalue()
    assert "busiest compute 100%" in out.getvalue()
    assert "a message" in out.getvalue()


def test_each_item_of_the_checklist_is_a_line_once_it_is_done() -> None:
    console, out = screen()
    display = Display(console, total_steps=5)
    for item in ITEMS:
        display.prepare(item)
    display.close()
    assert out.getvalue().splitlines() == [
        "  tokenizing the data              2.0 s",
        "  pinning 350 GB                 130.5 s",
    ]


def test_the_bar_says_what_is_prepared_and_since_when(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(app.progress, "time", SimpleNamespace(perf_counter=lambda: now))
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
        "preparing",
        "tokenizing the data  4 s",
        "preparing",
        "pinning 350 GB  4 s",
        "pinning 350 GB  44 s  25%  88 of 350 GB",
        "preparing",
    ]


def test_summary_shows_every_figure() -> None:
    summary = {
        "steps": 1500,
        "tokens": 1_000_000,
        "first_loss": 8.3,
        "last_loss": 4.1,
        "tokens_per_s": 3456.7,
        "model_tflops_per_s": 0.1234,
        "step_s_median": 1.25,
        "tiers": {"gpu": {"budget_bytes": 2**30, "peak_bytes": 2**29}, "nvme": {"budget_bytes": 0, "peak_bytes": 0}},
        "lanes": {"h2d": {"busy_s": 5.0, "bytes": 2**31}, "compute": {"busy_s": 15.0, "bytes": 0}},
        "drives": [
            {
                "path": "/mnt/a/run",
                "bytes_read": 7 * 2**30,
                "bytes_written": 9 * 2**30,
                "bytes_written_per_step": 6 * 2**20,
                "percentage_used": 3,
            }
        ],
    }
    console, out = screen()
    print_summary(console, summary, [4.0, 5.0], wall_s=20.0)
    for part in (
        "1,500, 1,000,000",
        "8.3000 -> 4.1000 nats",
        "mean of last 2",
        "4.5000 nats",
        "3,457 tokens/s",
        "1.25 s",
        "0.123 TFLOP/s",
        "2.0 GiB",
        "5.0 s",
        "25%",
        "75%",
        "512 MiB",
        "50%",
        "/mnt/a/run",
        "7.0 GiB",
        "9.0 GiB",
        "6.0 MiB",
        "3%",
    ):
        assert part in out.getvalue()
    nothing = {"first_loss": None, "last_loss": float("nan"), "tokens_per_s": None, "step_s_median": None}
    console, out = screen()
    print_summary(console, summary | nothing, [], wall_s=0.0)
    assert "n/a -> n/a nats" in out.getvalue()
