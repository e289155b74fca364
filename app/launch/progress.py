"""What a run shows on a console: its plan, progress while it trains and a summary at the end, a line each."""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, RenderableColumn, TextColumn
from rich.table import Column
from rich.text import Text

from penstock.app.console.printing import print_rows, short_path
from penstock.app.console.rows import ASCII, UNICODE
from penstock.app.runs.lanes import WAITS
from penstock.app.runs.measured import by_weight, measured_text
from penstock.app.runs.recall_view import RecallMap, recall_rows
from penstock.app.runs.speed import speed_figure, speed_text
from penstock.engine.events import WARMUP_STEPS, LaneTotals, Preparing, Span, StepMetrics, ValidationMetrics
from penstock.storage.files.units import bytes_text, duration_text, figure, of_text, seconds_text
from penstock.storage.files.untrusted import printable

_ETA_WINDOW = 20
_ITEM_CELLS = 29
"""The names of a checklist's items are about so long: their times stand below one another."""
_LONG_S = 10.0
"""Without a terminal what took longer to prepare is worth a line; so is where it is, as often or at each twentieth."""
_SHORT_S = 0.1
"""On a terminal what took longer to prepare is."""
_QUIET_S = 60.0
"""A run that is not on a terminal shows a sign of life at least this often."""


class StepLanes:
    """How busy each lane was, from spans in about the order of their ends."""

    def __init__(self) -> None:
        self._lanes: dict[str, LaneTotals] = defaultdict(LaneTotals)
        self._first_s, self._last_s = math.inf, -math.inf

    def add(self, span: Span) -> None:
        self._lanes[span.lane].add(span)
        self._first_s, self._last_s = min(self._first_s, span.start_s), max(self._last_s, span.end_s)

    def busiest(self) -> tuple[str, float] | None:
        """The lane busy for the largest share of the time that the spans cover, and that share (0..1)."""
        window_s = self._last_s - self._first_s
        working = [item for item in self._lanes.items() if item[0] != WAITS]
        if window_s <= 0 or not working:
            return None
        lane, totals = max(working, key=lambda item: item[1].busy_s)
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


class Display:
    """Shows a run on a console: a progress bar on a terminal, a line now and then elsewhere. The rest is in its
    files."""

    def __init__(self, console: Console, total_steps: int, step: int = 0) -> None:
        self._console = console
        self._total_steps = total_steps
        self._eta = Eta(total_steps)
        self._line = "preparing"
        self._item: tuple[Preparing, float] | None = None
        """The last word on the item that is being prepared, and when it came by perf_counter."""
        self._line_due_s = _LONG_S
        """When an item that is not done is worth its next line, in seconds since it began."""
        self._validation = ""
        self._reported: tuple[int, float] | None = None
        """Which third of the run the last line of a step was in, and when it was printed."""
        self._progress: Progress | None = None
        if console.is_terminal:
            self._progress = Progress(
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(bar_width=24),
                RenderableColumn(self, table_column=Column(no_wrap=True)),
                console=console,
                refresh_per_second=4,
            )
            self._task = self._progress.add_task("train", total=total_steps, completed=step)
            self._progress.start()

    def message(self, text: str) -> None:
        """Print a line, above the progress bar where there is one."""
        self._console.print(printable(text), markup=False, highlight=False, emoji=False, soft_wrap=True)

    def prepare(self, item: Preparing) -> None:
        """Show an item of the checklist on the bar, then as a line; without a terminal, lines of what takes long."""
        self._item = None if item.state == "done" else (item, time.perf_counter())
        if item.state == "begun":
            self._line_due_s = _LONG_S
        elif item.state == "done":
            if item.seconds >= (_LONG_S if self._progress is None else _SHORT_S):
                self.message(item_line(item))
        elif self._progress is None and item.seconds >= self._line_due_s:
            self._line_due_s = item.seconds + max(_LONG_S, item.seconds / 20)
            self.message("  ".join([item_line(item), *_how_far(item), "..."]))

    def recall(self, maps: Sequence[RecallMap]) -> None:
        """Print the first and the last map, if there are any."""
        if maps:
            glyphs = ASCII if self._console.options.ascii_only else UNICODE
            print_rows(recall_rows(maps[0], maps[-1], glyphs), self._console)

    def detail(self, text: str) -> None:
        """Print a line on a terminal; elsewhere it is not worth one."""
        if self._progress is not None:
            self.message(text)

    def __rich__(self) -> Text:
        """What stands beside the bar, asked for each time that it is drawn."""
        if (word := self._item) is None:
            return Text(self._line)
        item, reported_at = word
        name = f"preparing: {item.name}"
        return Text(
            printable("  ".join([name, f"{item.seconds + time.perf_counter() - reported_at:.0f} s", *_how_far(item)]))
        )

    def validation(self, metrics: ValidationMetrics) -> None:
        """The lines of later steps show it."""
        self._validation = f"  validation {metrics.value:.4f}"

    def step(self, metrics: StepMetrics, busiest: tuple[str, float] | None, mean: float | None) -> None:
        """Show a finished step, the busiest lane in it, and the run's mean tokens/s; of the last one the summary
        tells."""
        eta = duration_text(self._eta.update(metrics))
        lane = f"  busiest {busiest[0]} {busiest[1]:.0%}" if busiest else ""
        speed = speed_text(mean, metrics.tokens_per_s)
        measured = f"  {measured_text(metrics.measured)}".rstrip()
        line = f"loss {metrics.loss:.4f}{measured}{self._validation}  {speed}  ETA {eta}{lane}"
        if self._progress is not None:
            self._line = line
            self._progress.update(self._task, completed=metrics.step)
            return
        third, now = 3 * metrics.step // self._total_steps, time.perf_counter()
        due = self._reported is None or third > self._reported[0] or now - self._reported[1] >= _QUIET_S
        if due and metrics.step < self._total_steps:
            self._reported = (third, now)
            self.message(f"step {metrics.step:,} of {self._total_steps:,}  {line}")

    def abandon(self) -> None:
        """Give the terminal its cursor back without waiting for anything: the process is about to end."""
        if self._progress is not None:
            self._console.file.write("\x1b[?25h\n")
            self._console.file.flush()

    def close(self) -> None:
        """Leave the progress bar as it is; messages still print."""
        if self._progress is not None:
            self._progress.stop()


def _how_far(item: Preparing) -> list[str]:
    """Percent and words of where an item is, as far as they are known."""
    share = [] if item.fraction is None else [f"{item.fraction:.0%}"]
    return share + ([] if item.detail is None else [item.detail])


def item_line(item: Preparing) -> str:
    """What a run says of an item of its checklist, and of the seconds since it began."""
    return f"  {item.name:<{_ITEM_CELLS}} {item.seconds:6.1f} s"


def plan_line(plan: dict[str, Any]) -> str:
    """Where a run's parts live, what a step moves, and what backward recomputes, as planned."""
    parts = []
    for name, target in (("weights", "weights"), ("state", "state"), ("gradients", "gradient")):
        used = {block[target] for block in plan["blocks"]}
        parts.append(f"{name} in {' and '.join(tier for tier in ('gpu', 'ram', 'nvme') if tier in used)}")
    moved, spilled, chunks = plan["bytes_per_step"], plan["spilled_activations"], plan["layer_chunks"]
    read, written = bytes_text(moved["nvme_read"]), bytes_text(moved["nvme_write"])
    traffic = f"each step reads {read} from NVMe and writes {written}"
    traffic += f", {bytes_text(spilled['bytes'])} of it activations" if spilled["bytes"] else ""
    recompute = chunks - plan["saved_graphs"]["chunks"]
    recomputed = f"{recompute:,} of {chunks:,} layer chunks recompute the layer in backward"
    if offloaded := plan.get("offloaded_graphs", {}).get("chunks"):
        recomputed += f", the graphs of {offloaded:,} are moved off the GPU until then"
    if (groups := plan.get("groups", 1)) > 1:
        recomputed = f"in each of {groups:,} groups of {plan['group_tokens']:,} tokens {recomputed}"
    return f"plan: {', '.join(parts)}; {traffic}; {recomputed}"


def summary_lines(summary: dict[str, Any], last_losses: Sequence[float], wall_s: float) -> list[str]:
    """summary.json in two lines, and one of what else was measured; `wall_s` is the time over which the lanes' busy
    seconds were counted."""
    losses = f"loss {_number(summary['first_loss'])} -> {_number(summary['last_loss'])}"
    if len(last_losses) > 1:
        losses += f" (mean of the last {len(last_losses)}: {statistics.fmean(last_losses):.4f})"
    if (measured := summary.get("validation_loss")) is not None:
        losses += f", validation loss {_number(measured['last'])}"
        losses += f" (best {_number(measured['best'])} after step {measured['best_step']:,})"
    speed, step_s = summary["mean_tokens_per_s"], summary["mean_step_s"]
    parts = [f"mean {speed_figure(speed)} tokens/s, {seconds_text(step_s)} a step"]
    parts.append(f"{_number(summary['mean_model_tflops_per_s'], '.3g')} TFLOP/s of the model")
    if wall_s > 0 and summary["lanes"]:
        lane, figures = max(summary["lanes"].items(), key=lambda lane: lane[1]["busy_s"])
        parts.append(f"{lane} busy {figures['busy_s'] / wall_s:.0%}")
    attention = summary.get("attention") or {}
    if attention.get("installed"):  # null without a GPU, where there is one kernel
        parts.append("attention by " + ", ".join(f"{' and '.join(v)} {k}" for k, v in attention["chosen"].items() if v))
    if tiers := summary["tiers"].items():  # on several machines there are none
        parts.append(
            "peak memory: " + ", ".join(f"{name} {of_text(t['peak_bytes'], t['budget_bytes'])}" for name, t in tiers)
        )
    for drive in summary["drives"]:
        used = "" if drive["percentage_used"] is None else f", endurance used {drive['percentage_used']:.0f}%"
        parts.append(f"{bytes_text(drive['bytes_written'])} written to {short_path(drive['path'])}{used}")
    more = [
        f"{where}{name} {figure(known[name]['first'])} -> {figure(known[name]['last'])}"
        for where, known in (("", summary.get("measured", {})), ("validation ", summary.get("validation_measured", {})))
        for name in by_weight(known)
    ]
    head = f"trained to step {summary['steps']:,}, {summary['tokens']:,} tokens: {losses}"
    return [head, *([", ".join(more)] if more else []), "; ".join(parts)]


def _number(value: float | None, form: str = ".4f") -> str:
    return "n/a" if value is None or not math.isfinite(value) else format(value, form)
