"""Runs a schedule: one thread per lane, in order, each op when its dependencies are met.

On CUDA the lanes h2d, compute and d2h are streams: their threads issue work and wait for other GPU lanes through
events only; host lanes wait for the GPU on the host, and a GPU lane waits on the host for a host lane's op. On CPU
every lane is a host lane. A failing op stops every lane at once; whoever waits gets that op's own exception.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any

import torch

from engine.events import Span
from engine.ops import LANES, Op

GPU_LANES = frozenset({"h2d", "compute", "d2h"})

MAX_QUEUED = 20_000
"""Ops beyond which `submit` waits: some 20 MB of them, and work for seconds."""

Perform = Callable[[Op], "Future[Any] | None"]
"""Carries out an op; a Future means that it goes on in the background and is done when the future is."""


class _Stopped(Exception):
    """Raised inside a lane thread that must end because another lane failed or the executor closes."""


class _Ticket:
    """Progress of one op."""

    __slots__ = ("done", "event", "issued")

    def __init__(self) -> None:
        self.issued = False
        self.done = False
        self.event: torch.cuda.Event | None = None


class Executor:
    """Lanes that carry out ops handed over with `submit`.

    Parameters
    ----------
    perform:
        Carries out one op, on the op's lane thread (and, on CUDA, inside the lane's stream).
    device:
        Where `compute` runs; CUDA makes the GPU lanes asynchronous.
    in_flight:
        Ops of a lane that may be in progress at once when `perform` returns futures.
    """

    def __init__(self, perform: Perform, device: torch.device, in_flight: Mapping[str, int] | None = None) -> None:
        self._perform = perform
        self._device = device
        self._in_flight = dict(in_flight or {})
        self._change = threading.Condition()
        self._queues: dict[str, deque[Op]] = {lane: deque() for lane in LANES}
        self._tickets: dict[int, _Ticket] = {}
        self._busy: dict[str, int] = dict.fromkeys(LANES, 0)
        self._failure: BaseException | None = None
        self._closing = False
        self._spans: list[Span] = []
        self._on_gpu: dict[str, deque[tuple[Op, torch.cuda.Event, torch.cuda.Event]]] = {
            lane: deque() for lane in GPU_LANES
        }
        """Issued ops of each stream, oldest first, with their start and end."""
        self.epoch = time.perf_counter()
        """perf_counter at which the spans' clock reads 0."""
        self._cuda = device.type == "cuda"
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._base_event: torch.cuda.Event | None = None
        if self._cuda:
            self._streams = {lane: torch.cuda.Stream(device) for lane in GPU_LANES}
            torch.cuda.synchronize(device)
            self._base_event = torch.cuda.Event(enable_timing=True)
            self._base_event.record(torch.cuda.current_stream(device))
            self._base_event.synchronize()
            self.epoch = time.perf_counter()
        self._threads = [threading.Thread(target=self._run, args=(lane,), name=lane, daemon=True) for lane in LANES]
        for thread in self._threads:
            thread.start()

    # ------------------------------------------------------------------ the main thread's side

    def submit(self, ops: Iterable[Op]) -> None:
        """Queue ops; ids must increase from call to call. Raises the failure of a lane, if there was one.

        Waits while MAX_QUEUED ops are queued already: a step over millions of tokens has hundreds of thousands.
        """
        with self._change:
            while self._failure is None and len(self._tickets) >= MAX_QUEUED:
                self._change.wait(0.01)
                self._retire_gpu_ops()  # nobody else does once all that is queued has been issued
            self._raise_failure()
            for op in ops:
                self._tickets[op.id] = _Ticket()
                self._queues[op.lane].append(op)
            self._change.notify_all()

    def wait(self, op_id: int) -> None:
        """Block until op `op_id` is done. Raises the first failure of any lane."""
        with self._change:
            self._change.wait_for(lambda: self._failure is not None or self._is_done(op_id))
            self._raise_failure()

    def drain(self) -> None:
        """Block until everything submitted is done. Raises the first failure of any lane."""
        with self._change:
            self._change.wait_for(lambda: self._failure is not None or all(t.event for t in self._tickets.values()))
            self._raise_failure()
        for stream in self._streams.values():
            stream.synchronize()
        with self._change:
            self._retire_gpu_ops()

    def take_spans(self) -> list[Span]:
        """Spans of the ops that finished since the last call."""
        with self._change:
            self._retire_gpu_ops()
            spans, self._spans = self._spans, []
        return spans

    def close(self) -> None:
        """End the lanes; ops in progress finish, queued ones are dropped."""
        with self._change:
            self._closing = True
            self._change.notify_all()
        for thread in self._threads:
            thread.join()
        with self._change:
            self._change.wait_for(lambda: not any(self._busy.values()))
        for stream in self._streams.values():
            stream.synchronize()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _is_done(self, op_id: int) -> bool:
        ticket = self._tickets.get(op_id)
        return ticket is None or ticket.done

    # ------------------------------------------------------------------ a lane's side

    def _run(self, lane: str) -> None:
        try:
            stream = self._streams.get(lane)
            if stream is None:
                self._loop(lane)
            else:
                with torch.cuda.stream(stream):
                    self._loop(lane)
        except _Stopped:
            pass

    def _loop(self, lane: str) -> None:
        queue = self._queues[lane]
        limit = self._in_flight.get(lane, 1)
        while True:
            with self._change:
                self._wait_on_lane(lambda: bool(queue) and self._busy[lane] < limit)
                op = queue.popleft()
                self._busy[lane] += 1
            try:
                self._await_dependencies(op)
                self._carry_out(op)
            except _Stopped:
                self._settle(op, None)
                raise
            except BaseException as error:
                self._settle(op, error)
                return

    def _wait_on_lane(self, ready: Callable[[], bool]) -> None:
        """Wait, holding the lock, until `ready`; raises _Stopped when the run is over."""
        self._change.wait_for(lambda: self._failure is not None or self._closing or ready())
        if self._failure is not None or self._closing:
            raise _Stopped

    def _await_dependencies(self, op: Op) -> None:
        on_gpu = self._cuda and op.lane in GPU_LANES
        events: list[torch.cuda.Event] = []
        with self._change:
            for dep in op.deps:
                ticket = self._tickets.get(dep)
                if ticket is None or ticket.done:
                    continue
                # An issued GPU op is known by its event; any other op only by being done.
                self._wait_on_lane(lambda t=ticket: t.done or t.event is not None)  # type: ignore[misc]
                if ticket.event is not None and not ticket.done:
                    events.append(ticket.event)
        for event in events:
            if on_gpu:
                torch.cuda.current_stream(self._device).wait_event(event)
            else:
                event.synchronize()

    def _carry_out(self, op: Op) -> None:
        if self._cuda and op.lane in GPU_LANES:
            first = torch.cuda.Event(enable_timing=True)
            last = torch.cuda.Event(enable_timing=True)
            first.record()
            result = self._perform(op)
            assert result is None, f"{op.action}: work of a GPU lane is ordered by its stream"
            last.record()
            with self._change:
                self._tickets[op.id].event = last
                self._on_gpu[op.lane].append((op, first, last))
                self._busy[op.lane] -= 1
                self._retire_gpu_ops()
                self._change.notify_all()
            return
        start = time.perf_counter()
        result = self._perform(op)
        if result is None:
            self._finish(op, start)
        else:
            result.add_done_callback(lambda future: self._finish(op, start, future))

    def _retire_gpu_ops(self) -> None:
        """Turn GPU ops whose end has passed into spans and forget their tickets; called with the lock held."""
        for issued in self._on_gpu.values():
            while issued and issued[0][2].query():
                op, first, last = issued.popleft()
                assert self._base_event is not None
                start_s, end_s = (self._base_event.elapsed_time(event) / 1e3 for event in (first, last))
                self._spans.append(_span(op, start_s, end_s))
                del self._tickets[op.id]

    def _finish(self, op: Op, start: float, future: Future[Any] | None = None) -> None:
        error = future.exception() if future is not None else None
        if error is None:
            end = time.perf_counter()
            with self._change:
                self._spans.append(_span(op, start - self.epoch, end - self.epoch))
        self._settle(op, error)

    def _settle(self, op: Op, error: BaseException | None) -> None:
        with self._change:
            if error is not None and self._failure is None:
                error.add_note(
                    f"in op {op.action} of block {op.block}, index {op.index}, step {op.step}, lane {op.lane}"
                )
                self._failure = error
            ticket = self._tickets.get(op.id)
            if ticket is not None and self._failure is None:
                ticket.done = True
                del self._tickets[op.id]
            self._busy[op.lane] -= 1
            self._change.notify_all()


def _span(op: Op, start_s: float, end_s: float) -> Span:
    return Span(op.lane, op.action, op.block, op.index, start_s, end_s, op.nbytes, op.step)
