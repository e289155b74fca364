"""CUDA's streams and events as threads and queues, so that the executor's use of them runs without a GPU.

A stream carries out in order what was put on it, some time later; an event is done when its stream has come to its last
record. As on CUDA, waiting for an event means its record at the time of the call, and times are float32 milliseconds.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

_local = threading.local()


class Record:
    """One recording of an event."""

    at_s = 0.0

    def __init__(self) -> None:
        self.done = threading.Event()

    def finish(self) -> None:
        self.at_s = time.perf_counter()
        self.done.set()


class StreamOnCpu:
    """torch.cuda.Stream."""

    chance = random.Random(0)
    delay_s = 0.0
    all: list[StreamOnCpu] = []  # noqa: RUF012

    def __init__(self, device: Any = None) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._last = Record()
        self._last.finish()
        self.broken = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        StreamOnCpu.all.append(self)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            if self.delay_s and self.chance.random() < 0.2:
                time.sleep(self.chance.random() * self.delay_s)
            work()

    def put(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def record(self) -> Record:
        record = self._last = Record()
        self.put(record.finish)
        return record

    def wait_event(self, event: EventOnCpu) -> None:
        record = event._record
        self.put(lambda: None if record is None else (record.done.wait(300), None)[1])

    def query(self, patience_s: float = 0.01) -> bool:
        if self.broken:
            raise torch.AcceleratorError("CUDA error: unspecified launch failure")
        return self.record().done.wait(patience_s)

    def synchronize(self) -> None:
        self.query(300)


class EventOnCpu:
    """torch.cuda.Event."""

    made = 0

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        assert blocking, "who waits for this event would spin on a core"
        EventOnCpu.made += 1
        self._record: Record | None = None

    def record(self, stream: StreamOnCpu | None = None) -> None:
        self._record = (stream or current_stream()).record()

    def query(self) -> bool:
        return self._record is None or self._record.done.is_set()

    def synchronize(self) -> None:
        assert self._record is not None, "an event that was never recorded is waited for"
        assert self._record.done.wait(300), "deadlock"

    def elapsed_time(self, end: EventOnCpu) -> float:
        assert self._record.done.is_set()
        assert end._record.done.is_set(), "the time of an event that has not happened"
        return float(np.float32((end._record.at_s - self._record.at_s) * 1e3))


def current_stream(device: Any = None) -> StreamOnCpu:
    if not hasattr(_local, "streams"):
        _local.streams = [StreamOnCpu()]
    stream: StreamOnCpu = _local.streams[-1]
    return stream


@contextmanager
def _stream(stream: StreamOnCpu) -> Iterator[None]:
    current_stream()
    _local.streams.append(stream)
    try:
        yield
    finally:
        _local.streams.pop()


@contextmanager
def streams_on_cpu(delay_s: float = 0.0, seed: int = 0) -> Iterator[None]:
    """Inside the block torch.cuda's streams and events are these; work on a stream is delayed now and then."""
    StreamOnCpu.delay_s, StreamOnCpu.chance, EventOnCpu.made = delay_s, random.Random(seed), 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Stream", StreamOnCpu)
        patch.setattr(torch.cuda, "Event", EventOnCpu)
        patch.setattr(torch.cuda, "stream", _stream)
        patch.setattr(torch.cuda, "current_stream", current_stream)
        patch.setattr(torch.cuda, "synchronize", lambda device=None: None)
        try:
            yield
        finally:
            for stream in StreamOnCpu.all:
                stream._work.put(None)
            StreamOnCpu.all.clear()
            _local.__dict__.clear()
