"""What the terminal application costs while it watches a run, measured from outside: docs/results/tui.md.

The application runs as users run it, in a pseudo-terminal; the run that it watches is made up (parts/synthetic.py) and
written by another process in real time.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import pty
import select
import signal
import statistics
import struct
import subprocess
import tempfile
import termios
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path

import psutil

from benchmarks.parts.synthetic import Writer
from penstock.app.bench.process import markdown_table
from penstock.app.runs.directory import RunLock
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
"""First frames of which the middle one is reported."""

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
        self._usage = psutil.Process(self.process.pid)
        self.num_bytes = 0

    def read(self, seconds: float) -> bytes:
        """Output of the next `seconds`, or what there is at the program's end. Raises UserError when it has ended."""
        deadline, result = time.monotonic() + seconds, bytearray()
        while (left := deadline - time.monotonic()) > 0:
            if select.select([self._leader], [], [], left)[0]:
                try:
                    data = os.read(self._leader, 1 << 16)
                except OSError:
                    data = b""
                if not data:
                    raise UserError(f"penstock ended by itself with code {self.process.wait()}")
                result += data
        self.num_bytes += len(result)
        return bytes(result)

    def sample(self) -> Sample:
        times = self._usage.cpu_times()
        at_s = time.monotonic() - self.started_at
        return Sample(at_s, times.user + times.system, self._usage.memory_info().rss)

    def close(self) -> None:
        """End the program as a closed terminal does, then for good."""
        self.process.send_signal(signal.SIGHUP)
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._leader)


def main(minutes: float = 10.0) -> None:
    """Watch a run for --minutes, the first half minute of which is warm-up, and print the page's table."""
    if minutes * 60 < 2 * WARM_UP_S:
        raise UserError(f"--minutes {minutes:g}: must be at least {WARM_UP_S / 30:g}, as {WARM_UP_S:g} s are warm-up")
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        root = Path(folder)
        run = root / "runs" / "synthetic"
        with _written(run):
            first_frames = [_first_frame(root) for _ in range(STARTS)]
            samples, num_bytes = _watch(root, run, minutes)
    print("\n".join(markdown_table(("", f"--minutes {minutes:g}"), figures(samples, num_bytes, first_frames))))


@contextmanager
def _written(run: Path) -> Iterator[None]:
    """A process writes the run meanwhile."""
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=write_run, args=(run, ready), daemon=True)
    process.start()
    try:
        if not ready.wait(120):
            raise UserError("the made-up run could not be written")
        yield
    finally:
        process.kill()
        process.join()


def write_run(run: Path, ready: Event) -> None:
    """The run's past, then its present in real time, until killed."""
    writer = Writer(run, spans_per_s=SPANS_PER_S, num_spans=NUM_SPANS, num_steps=NUM_STEPS)
    writer.begin(time.time())
    lock = RunLock(run)  # held until this process is killed
    assert lock
    ready.set()
    last = time.monotonic()
    while True:
        time.sleep(_WRITE_S)
        now = time.monotonic()
        writer.advance(now - last, time.time())
        last = now


def _first_frame(root: Path) -> float:
    """Seconds from the start of `penstock` to Home on the screen."""
    shown = b""
    with closing(_Terminal([], root)) as terminal:
        while _SHOWN_AT_FIRST not in shown:
            shown += terminal.read(0.005)
            if time.monotonic() - terminal.started_at > 60:
                raise UserError("penstock showed nothing within a minute")
        return time.monotonic() - terminal.started_at


def _watch(root: Path, run: Path, minutes: float) -> tuple[list[Sample], int]:
    """Samples of `penstock watch` over the time, and how many bytes it wrote after the warm-up."""
    with closing(_Terminal(["watch", str(run)], root)) as terminal:
        samples, before = [terminal.sample()], 0
        while samples[-1].at_s < minutes * 60:
            terminal.read(SAMPLE_S)
            samples.append(terminal.sample())
            if samples[-1].at_s <= WARM_UP_S:
                before = terminal.num_bytes
    return samples, terminal.num_bytes - before


def figures(samples: list[Sample], num_bytes: int, first_frames: list[float]) -> list[tuple[str, str]]:
    """The table's rows, of samples that begin at the start; `num_bytes` were written after the warm-up."""
    warm = [sample for sample in samples if sample.at_s > WARM_UP_S]
    first, last = warm[0], warm[-1]
    pairs = list(zip(warm, warm[2:], strict=False)) or [(first, last)]
    slope = statistics.linear_regression([s.at_s for s in warm], [s.rss_bytes for s in warm]).slope
    mib = 1 << 20
    frames = ", ".join(f"{seconds:.2f}" for seconds in sorted(first_frames))
    return [
        ("processor time, share of one core", f"{_share(first, last):.1%}"),
        ("in the worst ten seconds", f"{max(_share(a, b) for a, b in pairs):.1%}"),
        (f"processor time of the first {WARM_UP_S:.0f} s: start, history, first drawing", f"{first.cpu_s:.1f} s"),
        ("resident memory after the warm-up", f"{first.rss_bytes / mib:.0f} MiB"),
        ("at the end", f"{last.rss_bytes / mib:.0f} MiB"),
        ("at most", f"{max(sample.rss_bytes for sample in samples) / mib:.0f} MiB"),
        ("slope of a line through it", f"{slope * 3600 / mib:+.1f} MiB an hour"),
        ("written to the terminal", f"{num_bytes / (last.at_s - first.at_s) / 1024:.1f} KiB/s"),
        ("`penstock` to its first frame", f"{statistics.median(first_frames):.2f} s (of {frames})"),
        ("load average of the machine at the end", f"{os.getloadavg()[0]:.1f}"),
    ]


def _share(a: Sample, b: Sample) -> float:
    return (b.cpu_s - a.cpu_s) / (b.at_s - a.at_s)
