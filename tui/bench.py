"""What the terminal application costs while it watches a run: its own processor time and memory, measured from outside.

The application runs as users run it, in a pseudo-terminal; the run that it watches is made up (`tui.synthetic`) and
written by another process in real time.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from penstock.storage.files import child
from penstock.storage.files.errors import UserError

WIDTH, HEIGHT = 120, 36
SPANS_PER_S = 300.0
NUM_SPANS, NUM_STEPS = 100_000, 200_000
"""What the run has behind it."""
WARM_UP_S = 30.0
"""History is read and caches fill; not counted."""
SAMPLE_S = 5.0
STARTS = 5
"""First frames of which the middle one is told."""

_WRITE_S = 0.25
_SHOWN_AT_FIRST = b"recipes"
"""What stands in the first frame of `penstock`, and not in what a terminal is asked before."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The application's process at one moment."""

    at_s: float
    """Since its start."""
    cpu_s: float
    rss_bytes: int


@dataclass(frozen=True, slots=True)
class TuiCost:
    """What was measured."""

    minutes: float
    core_share: float
    """Processor seconds per second, of one core, after the warm-up."""
    worst_share: float
    """The same in the worst ten seconds."""
    warm_up_cpu_s: float
    rss_first_bytes: int
    """After the warm-up."""
    rss_last_bytes: int
    rss_most_bytes: int
    rss_slope_bytes_per_hour: float
    """Of a straight line through the samples after the warm-up."""
    output_bytes_per_s: float
    """Written to the terminal."""
    first_frame_s: list[float]
    """From the start of `penstock` to Home on the screen, each of some starts."""
    load: float
    """Of the machine, by its own account, at the end."""


class _Terminal:
    """A program in a pseudo-terminal of WIDTH x HEIGHT, whose output is read and counted."""

    def __init__(self, arguments: list[str], folder: Path) -> None:
        self._leader, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
        self.started_at = time.monotonic()
        self.process = subprocess.Popen(
            child.command("tui.main", *arguments),
            cwd=folder,
            env=child.environment(TERM="xterm-256color", COLORTERM="truecolor", LANG="C.UTF-8"),
            stdin=follower,
            stdout=follower,
            stderr=follower,
            start_new_session=True,
        )
        os.close(follower)
        self.num_bytes = 0

    def read(self, seconds: float) -> bytes:
        """Output of the next `seconds`, or what there is at the program's end. Raises UserError when it has ended."""
        deadline, found = time.monotonic() + seconds, bytearray()
        while (left := deadline - time.monotonic()) > 0:
            if select.select([self._leader], [], [], left)[0]:
                try:
                    data = os.read(self._leader, 1 << 16)
                except OSError:
                    data = b""
                if not data:
                    raise UserError(f"penstock ended by itself with code {self.process.wait()}")
                found += data
        self.num_bytes += len(found)
        return bytes(found)

    def sample(self) -> Sample:
        """Processor time and memory so far, from /proc."""
        folder = Path("/proc") / str(self.process.pid)
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])  # utime and stime: fields 14 and 15 of proc(5), the name being 2
        pages = int((folder / "statm").read_text().split()[1])
        at_s = time.monotonic() - self.started_at
        return Sample(at_s, ticks / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE"))

    def close(self) -> None:
        """End the program as a closed terminal does, then for good."""
        self.process.send_signal(signal.SIGHUP)
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._leader)


def bench_tui(minutes: float = 10.0, *, save: Path | None = None, json_output: bool = False) -> TuiCost:
    """Measure, print, and with `save` write the page that docs/results/tui.md is."""
    if minutes * 60 < 2 * WARM_UP_S:
        raise UserError(f"--minutes {minutes:g}: must be at least {WARM_UP_S / 30:g}, as {WARM_UP_S:g} s are warm-up")
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        root = Path(folder)
        run = root / "runs" / "synthetic"
        with _writer(run):
            first_frames = [_first_frame(root) for _ in range(STARTS)]
            samples, num_bytes = _watch(root, run, minutes)
    cost = summarise(samples, num_bytes, first_frames, minutes)
    if save is not None:
        save.parent.mkdir(parents=True, exist_ok=True)
        save.write_text(page(cost))
    line = (
        f"watching takes {cost.core_share:.1%} of a core and {cost.rss_most_bytes / (1 << 20):.0f} MiB; "
        f"the first frame is there after {statistics.median(cost.first_frame_s):.2f} s"
    )
    print(json.dumps(asdict(cost), indent=1) if json_output else line)
    return cost


@contextmanager
def _writer(run: Path) -> Iterator[None]:
    process = subprocess.Popen(
        child.command("tui.bench", str(run)), env=child.environment(), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        if process.stdout.readline() != "ready\n":
            raise UserError("the made-up run could not be written")
        yield
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def write_run(run: Path) -> None:
    """The writer's process: the run's past, then its present in real time, until killed."""
    from penstock.app.runs.directory import RunLock
    from penstock.tui.synthetic import Writer

    writer = Writer(run, spans_per_s=SPANS_PER_S, num_spans=NUM_SPANS, num_steps=NUM_STEPS)
    writer.begin(time.time())
    lock = RunLock(run)  # held until this process is killed
    assert lock
    print("ready", flush=True)
    last = time.monotonic()
    while True:
        time.sleep(_WRITE_S)
        now = time.monotonic()
        writer.advance(now - last, time.time())
        last = now


def _first_frame(root: Path) -> float:
    shown = b""
    with closing(_Terminal([], root)) as terminal:
        while _SHOWN_AT_FIRST not in shown:
            shown += terminal.read(0.005)
            if time.monotonic() - terminal.started_at > 60:
                raise UserError("penstock showed nothing within a minute")
        return time.monotonic() - terminal.started_at


def _watch(root: Path, run: Path, minutes: float) -> tuple[list[Sample], int]:
    """Samples of `penstock watch` over the time, and what it wrote after the warm-up."""
    with closing(_Terminal(["watch", str(run)], root)) as terminal:
        samples, before = [terminal.sample()], 0
        while samples[-1].at_s < minutes * 60:
            terminal.read(SAMPLE_S)
            samples.append(terminal.sample())
            if samples[-1].at_s <= WARM_UP_S:
                before = terminal.num_bytes
    return samples, terminal.num_bytes - before


def summarise(samples: list[Sample], num_bytes: int, first_frames: list[float], minutes: float) -> TuiCost:
    """The figures of samples that begin at the start; `num_bytes` were written after the warm-up."""
    warm = [sample for sample in samples if sample.at_s > WARM_UP_S]
    first, last = warm[0], warm[-1]
    pairs = list(zip(warm, warm[2:], strict=False)) or [(first, last)]
    slope = statistics.linear_regression([s.at_s for s in warm], [s.rss_bytes for s in warm]).slope
    return TuiCost(
        minutes=minutes,
        core_share=_share(first, last),
        worst_share=max(_share(a, b) for a, b in pairs),
        warm_up_cpu_s=first.cpu_s,
        rss_first_bytes=first.rss_bytes,
        rss_last_bytes=last.rss_bytes,
        rss_most_bytes=max(sample.rss_bytes for sample in samples),
        rss_slope_bytes_per_hour=slope * 3600,
        output_bytes_per_s=num_bytes / (last.at_s - first.at_s),
        first_frame_s=first_frames,
        load=os.getloadavg()[0],
    )


def _share(a: Sample, b: Sample) -> float:
    return (b.cpu_s - a.cpu_s) / (b.at_s - a.at_s)


def page(cost: TuiCost) -> str:
    mib = 1 << 20
    frames = ", ".join(f"{seconds:.2f}" for seconds in sorted(cost.first_frame_s))
    rows = [
        ("processor time, share of one core", f"{cost.core_share:.1%}"),
        ("in the worst ten seconds", f"{cost.worst_share:.1%}"),
        (
            f"processor time of the first {WARM_UP_S:.0f} s: start, history, first drawing",
            f"{cost.warm_up_cpu_s:.1f} s",
        ),
        ("resident memory after the warm-up", f"{cost.rss_first_bytes / mib:.0f} MiB"),
        ("at the end", f"{cost.rss_last_bytes / mib:.0f} MiB"),
        ("at most", f"{cost.rss_most_bytes / mib:.0f} MiB"),
        ("slope of a line through it", f"{cost.rss_slope_bytes_per_hour / mib:+.1f} MiB an hour"),
        ("written to the terminal", f"{cost.output_bytes_per_s / 1024:.1f} KiB/s"),
        ("`penstock` to its first frame", f"{statistics.median(cost.first_frame_s):.2f} s (of {frames})"),
    ]
    lines = [
        "# What watching costs",
        "",
        f"`penstock bench tui --minutes {cost.minutes:g}`: the application on its run screen, in a pseudo-terminal of",
        f"{WIDTH}x{HEIGHT}, watching a made-up run with {NUM_STEPS:,} steps and {NUM_SPANS:,} spans behind it. Another",
        f"process adds about {SPANS_PER_S:.0f} spans and one step a second. Files are looked at ten times a second.",
        "Processor time and memory are the kernel's figures for the application's process, after a warm-up of",
        f"{WARM_UP_S:.0f} s. Load average of the machine at the end: {cost.load:.1f} on {os.cpu_count()} cores.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in rows),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    write_run(Path(sys.argv[1]))
