"""What the lanes do, reported as it happens: a step may take minutes, and its spans do not wait for its end."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict

import torch

from penstock.engine import preparing
from penstock.engine.events import LaneTotals, Observer, Progress, op_text
from penstock.engine.schedule.action import LANES, WORKING
from penstock.engine.session import Session

REPORT_S = 0.25
"""Between two words of progress."""

LOOK_S = 10.0
"""Between two looks at what the drives hold; looking reads the size of every chunk file."""

LOOK_SHARE = 0.01
"""Of the time, at most, that is spent looking."""

CLOSE_S = 5.0
"""How long the end of a run waits for a look."""


class Live:
    """While entered, reports to the observer what a session's lanes do, from a thread that training never waits for. It
    owns the executor's spans: each is counted in `lanes` and reported once."""

    def __init__(self, session: Session, observer: Observer) -> None:
        self._session = session
        self._observer = observer
        self._lanes: dict[str, LaneTotals] = defaultdict(LaneTotals)
        self._reporting = threading.Lock()
        self._end = threading.Event()
        self._failure: Exception | None = None
        self._nvme_bytes = 0
        self._look_at = 0.0
        self._thread = threading.Thread(target=self._work, name="progress", daemon=True)

    def __enter__(self) -> Live:
        self._look()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._end.set()
        self._thread.join(CLOSE_S)  # it may be looking at a drive that does not answer
        if kind is None:
            self.report()
        elif self._failure is None:
            with contextlib.suppress(Exception):
                self._report()

    @property
    def lanes(self) -> dict[str, dict[str, float]]:
        """Lane -> busy_s, bytes of the spans that were reported."""
        lanes = LANES if self._session.ranks.count > 1 else WORKING
        return {lane: {"busy_s": self._lanes[lane].busy_s, "bytes": self._lanes[lane].bytes} for lane in lanes}

    def report(self) -> None:
        """Report what has ended by now: what follows comes after these spans. Raises what the thread has met."""
        if self._failure is not None:
            raise self._failure
        self._report()

    def tier_bytes(self) -> dict[str, int]:
        """gpu, ram, nvme -> the most bytes held so far; of NVMe as of the last look at the drives."""
        return memory_peaks(self._session) | {"nvme": self._nvme_bytes}

    def _report(self) -> None:
        executor = self._session.executor
        with self._reporting:
            spans = executor.take_spans()
            for span in spans:
                self._lanes[span.lane].add(span)
            progress = Progress(spans, *executor.under_way())
            computing = next((op for op in progress.under_way if op.lane == "compute"), None)
            preparing.report(detail=computing and op_text(computing.op, computing.block, computing.chunk))
            self._observer.on_progress(progress)

    def _work(self) -> None:
        while not self._end.wait(REPORT_S):
            try:
                self._report()
                if time.monotonic() >= self._look_at:
                    self._look()
            except Exception as error:
                self._failure = error  # most likely the GPU's, which the training thread meets as well
                return

    def _look(self) -> None:
        """Look up what the drives hold, and put the next look off by what this one took."""
        started = time.monotonic()
        self._nvme_bytes = max(self._nvme_bytes, self._session.store.peak_disk_bytes())
        now = time.monotonic()
        self._look_at = now + max(LOOK_S, (now - started) / LOOK_SHARE)


def memory_peaks(session: Session) -> dict[str, int]:
    """Most bytes of a gpu and of ram held so far; of the gpu what the allocator held, on CPU slots and saved graphs."""
    gpu = session.gpu.arena.used_bytes + session.runtime.layer_ops.graphs_peak_bytes
    if session.device.type == "cuda":
        gpu = torch.cuda.max_memory_allocated(session.device)
    own = session.ram.arena.used_bytes + session.plan.problem.beside_bytes
    shared = 0 if session.ram.shared is None else session.ram.shared.used_bytes
    return {"gpu": gpu, "ram": session.ranks.count * own + shared}
