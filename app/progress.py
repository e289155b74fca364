"""What the terminal shows of a run: where the blocks live, progress while it trains, a summary at the end."""

from __future__ import annotations

import itertools
import math
import os
import statistics
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column, Table
from rich.text import Text

from engine.events import LaneTotals, Preparing, Span, StepMetrics
from storage.units import bytes_text, duration_text
from storage.untrusted import printable

WARMUP_STEPS = 2
"""Steps of a process that compile and fill caches: no ETA is drawn from them."""

_ETA_WINDOW = 20
_ITEM_CELLS = 29
"""The names of a checklist's items are about so long: their times stand below one another."""
_TARGETS = ("weights", "state", "gradient")


class _SurvivingStream:
    """Standard output that goes nowhere once its reader is gone: a closed pipe or terminal never stops a run."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.encoding = stream.encoding

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            self._give_up()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._give_up()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def _give_up(self) -> None:
        # The text that is still buffered must find an open file too, or the interpreter's exit fails on it.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())
        os.close(null)


def run_console() -> Console:
    """The console on which a run shows itself: standard output, for as long as somebody reads it."""
    return Console(file=cast(TextIO, _SurvivingStream(sys.stdout)))


class StepLanes:
    """How busy each lane was, from spans in about the order of their ends."""

    def __init__(self) -> None:
        self._lanes: dict[str, LaneTotals] = defaultdict(LaneTotals)
        self._first_s, self._last_s = math.inf, -math.inf

    def add(self, span: Span) -> None:
        """Count a span."""
        self._lanes[span.lane].add(span)
        self._first_s, self._last_s = min(self._first_s, span.start_s), max(self._last_s, span.end_s)

    def busiest(self) -> tuple[str, float] | None:
        """The lane busy for the largest share of the time that the spans cover, and that share (0..1)."""
        window_s = self._last_s - self._first_s
        if window_s <= 0:
            return None
        lane, totals = max(self._lanes.items(), key=lambda item: item[1].busy_s)
        return lane, totals.busy_s / window_s


class Eta:
    """Time to the end, from the mean of the last steps without the process's warm-up."""

    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps
        self._seen = 0
        self._recent: deque[float] = deque(maxlen=_ETA_WINDOW)

    def update(self, metrics: StepMetrics) -> float | None:
        """Seconds to the end after this step; none while unknown."""
        self._seen += 1
        if self._seen > WARMUP_STEPS:
            self._recent.append(metrics.step_s)
        remaining = self._total_steps - metrics.step
        if remaining <= 0:
            return 0.0
        return statistics.fmean(self._recent) * remaining if self._recent else None


class _Line(ProgressColumn):
    """What `text` returns, asked for each time that the bar is drawn."""

    def __init__(self, text: Callable[[], str]) -> None:
        super().__init__(Column(no_wrap=True))
        self._text = text

    def render(self, task: Task) -> Text:
        return Text(self._text())


class Display:
    """Shows a run on a console: a progress bar on a terminal, one line per step elsewhere.

    Before the first step each item of the checklist is a line once it is done; on a terminal the bar says what is being
    done, and since when.
    """

    def __init__(self, console: Console, total_steps: int, step: int = 0) -> None:
        self._console = console
        self._total_steps = total_steps
        self._eta = Eta(total_steps)
        self._line = "preparing"
        self._item: tuple[Preparing, float] | None = None
        """The last word on the item that is being prepared, and when it came by perf_counter."""
        self._progress: Progress | None = None
        if console.is_terminal:
            self._progress = Progress(
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(bar_width=24),
                _Line(self._text),
                console=console,
                refresh_per_second=4,
            )
            self._task = self._progress.add_task("train", total=total_steps, completed=step)
            self._progress.start()

    def message(self, text: str) -> None:
        """Print a line, above the progress bar where there is one."""
        self._console.print(printable(text), markup=False, highlight=False, emoji=False, soft_wrap=True)

    def prepare(self, item: Preparing) -> None:
        """Show an item of the checklist."""
        self._item = None if item.state == "done" else (item, time.perf_counter())
        if item.state == "done":
            self.message(item_line(item))

    def _text(self) -> str:
        """What stands beside the bar."""
        if (word := self._item) is None:
            return self._line
        item, told_at = word
        parts = [item.name, f"{item.seconds + time.perf_counter() - told_at:.0f} s"]
        parts += [] if item.fraction is None else [f"{item.fraction:.0%}"]
        parts += [] if item.detail is None else [item.detail]
        return printable("  ".join(parts))

    def plan(self, plan: dict[str, Any]) -> None:
        """Print where the blocks live and what that costs the drives."""
        self._console.print(plan_table(plan))
        self.message(traffic_line(plan))
        for line in activation_lines(plan):
            self.message(line)

    def step(self, metrics: StepMetrics, busiest: tuple[str, float] | None) -> None:
        """Show a finished step and the lane that was busiest in it."""
        eta = duration_text(self._eta.update(metrics))
        lane = f"{busiest[0]} {busiest[1]:.0%}" if busiest else "n/a"
        line = f"loss {metrics.loss:.4f}  {metrics.tokens_per_s:,.0f} tok/s  ETA {eta}  busiest {lane}"
        if self._progress is None:
            self.message(f"step {metrics.step}/{self._total_steps}  {line}")
        else:
            self._line = line
            self._progress.update(self._task, completed=metrics.step)

    def abandon(self) -> None:
        """Give the terminal its cursor back without waiting for anything: the process is about to end."""
        if self._progress is not None:
            self._console.file.write("\x1b[?25h\n")
            self._console.file.flush()

    def close(self) -> None:
        """Leave the progress bar as it is; messages still print."""
        if self._progress is not None:
            self._progress.stop()


def item_line(item: Preparing) -> str:
    """What a run says of an item of its checklist that is done."""
    return f"  {item.name:<{_ITEM_CELLS}} {item.seconds:6.1f} s"


def plan_table(plan: dict[str, Any]) -> Table:
    """Which block lives where; runs of layers that live alike share a row."""
    table = Table(title="Where the blocks live", title_justify="left", header_style="bold")
    for name in ("block", *_TARGETS, "size"):
        table.add_column(name, justify="right" if name == "size" else "left")
    groups = itertools.groupby(plan["blocks"], key=lambda block: (_stem(block["name"]), *(block[k] for k in _TARGETS)))
    for (_, *tiers), members in groups:
        blocks = list(members)
        first, last = blocks[0]["name"], blocks[-1]["name"]
        name = first if len(blocks) == 1 else f"{first} - {last.rsplit('.', 1)[-1]}"
        table.add_row(name, *map(str, tiers), bytes_text(sum(block["bytes"] for block in blocks)))
    return table


def traffic_line(plan: dict[str, Any]) -> str:
    """What a step reads from NVMe and writes to it, as planned."""
    moved, spilled = plan["bytes_per_step"], plan["spilled_activations"]
    if not moved["nvme_read"] + moved["nvme_write"]:
        return "nothing passes through NVMe but committed generations"
    line = f"each step reads {bytes_text(moved['nvme_read'])} from NVMe and writes {bytes_text(moved['nvme_write'])}"
    return f"{line}, {bytes_text(spilled['bytes'])} of it activations" if spilled["bytes"] else line


def activation_lines(plan: dict[str, Any]) -> list[str]:
    """What backward finds saved where that is not attention output everywhere; whether keys and values are streamed."""
    lines = []
    kept, again, held = plan["kept_activations"], plan["recomputed_blocks"], plan["held_activations"]
    if held["chunks"]:
        lines.append(f"{bytes_text(held['bytes'])} of saved activations stay on the GPU, as RAM has no room for them")
    if kept["chunks"]:
        share = f"{kept['chunks']:,} of {plan['layer_chunks']:,} layer chunks"
        lines.append(f"backward computes nothing again in {share}: {bytes_text(kept['bytes'])} of GPU memory keep them")
    if again:
        names = again[0] if len(again) == 1 else f"{again[0]} to {again[-1]}"
        lines.append(f"backward computes attention again in {names}: they save their input only")
    if plan["kv_window"] == "streamed":
        lines.append("keys and values pass through the GPU chunk by chunk")
    return lines


def _stem(name: str) -> str:
    return name.rsplit(".", 1)[0]


def print_summary(console: Console, summary: dict[str, Any], last_losses: Sequence[float], wall_s: float) -> None:
    """Print summary.json's figures; `wall_s` is the time over which the lanes' busy seconds were counted."""
    head = Table(title="Summary", title_justify="left", show_header=False)
    head.add_column(style="bold")
    head.add_column()
    head.add_row("steps, trained tokens", f"{summary['steps']:,}, {summary['tokens']:,}")
    head.add_row("loss, first and last", f"{_number(summary['first_loss'])} -> {_number(summary['last_loss'])} nats")
    if len(last_losses) > 1:
        head.add_row(f"loss, mean of last {len(last_losses)}", f"{statistics.fmean(last_losses):.4f} nats")
    if (measured := summary.get("validation_loss")) is not None:
        best = f"best {_number(measured['best'])} after step {measured['best_step']:,}"
        head.add_row("validation loss", f"{_number(measured['last'])} nats, {best}")
    speed, step_s = summary["tokens_per_s"], summary["step_s_median"]
    head.add_row("speed", f"{_number(speed, ',.0f')} tokens/s, median step {_number(step_s, '.2f')} s")
    head.add_row("model FLOPs", f"{_number(summary['model_tflops_per_s'], '.3g')} TFLOP/s, recomputing not counted")
    console.print(head)

    lanes = Table(header_style="bold")
    for name in ("lane", "moved", "busy", "busy share"):
        lanes.add_column(name, justify="left" if name == "lane" else "right")
    for lane, figures in summary["lanes"].items():
        share = f"{figures['busy_s'] / wall_s:.0%}" if wall_s > 0 else "n/a"
        moved = bytes_text(figures["bytes"]) if figures["bytes"] else "-"
        lanes.add_row(lane, moved, f"{figures['busy_s']:.1f} s", share)
    console.print(lanes)

    tiers = Table(header_style="bold")
    for name in ("tier", "peak", "budget", "used"):
        tiers.add_column(name, justify="left" if name == "tier" else "right")
    for tier, figures in summary["tiers"].items():
        peak, budget = figures["peak_bytes"], figures["budget_bytes"]
        tiers.add_row(tier, bytes_text(peak), bytes_text(budget), f"{peak / budget:.0%}" if budget else "n/a")
    console.print(tiers)

    for drive in summary["drives"]:
        console.print(printable(_drive_line(drive)), markup=False, highlight=False, emoji=False, soft_wrap=True)


def _drive_line(drive: dict[str, Any]) -> str:
    """What a run moved to and from one drive, and how worn the drive is."""
    path = min(drive["path"], os.path.relpath(drive["path"]), key=len)
    per_step, used = drive["bytes_written_per_step"], drive["percentage_used"]
    step = "" if per_step is None else f" ({bytes_text(per_step)} a step)"
    worn = "n/a" if used is None else f"{used:.0f}%"
    moved = f"read {bytes_text(drive['bytes_read'])}, written {bytes_text(drive['bytes_written'])}{step}"
    return f"drive {path}: {moved}, endurance used {worn}"


def _number(value: float | None, form: str = ".4f") -> str:
    return "n/a" if value is None or not math.isfinite(value) else format(value, form)
