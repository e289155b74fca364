"""Runs a schedule: one thread per lane, in order, each op when its dependencies are met.

On CUDA the lanes h2d, compute and d2h are streams: their threads issue work and wait for other GPU lanes through
events only; host lanes wait for the GPU on the host, and a GPU lane waits on the host for a host lane's op. On CPU
every lane is a host lane. A failing op stops every lane at once; whoever waits gets that op's own exception.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch

from penstock.engine.clock import origin
from penstock.engine.events import Span, UnderWay, op_text
from penstock.engine.runtime.handlers import Skipped
from penstock.engine.schedule.action import LANES
from penstock.engine.schedule.ops import Op, span_of

GPU_LANES = frozenset({"h2d", "compute", "d2h"})

MAX_QUEUED = 4_000
"""Ops beyond which `submit` waits: work for several blocks. Building ops holds the interpreter, which the lanes need to
launch kernels; so a step's ops are built at the rate at which they are used, not all at its start."""

CLOSE_S = 20.0
"""How long `close` waits, after a failure, for lanes and streams that do not end."""

REBASE_S = 10.0
"""Times on the GPU are measured from an event at most about this old: CUDA gives them in float32 milliseconds."""

T = TypeVar("T")

Perform = Callable[[Op], "Future[Any] | Skipped | None"]
"""Carries out an op; a Future means that it goes on in the background and is done when the future is."""


class _Stopped(Exception):
    """Raised inside a lane thread that must end because another lane failed or the executor closes."""


class _Issued(NamedTuple):
    """An op on its way through a stream."""

    op: Op
    waited: tuple[int, ...] | None
    awaited: tuple[tuple[int, float], ...]
    """None: it was skipped, and has no span."""
    first: torch.cuda.Event
    last: torch.cuda.Event


class _Call(NamedTuple):
    """Work on a lane's thread that is no op of a schedule."""

    work: Callable[[], Any]
    done: Future[Any]


@dataclass(slots=True, eq=False)
class _Ticket:
    """Progress of one op that is not done."""

    event: torch.cuda.Event | None = None
    """The op's end on its stream, once it has been issued there."""
    waiters: list[threading.Condition] = field(default_factory=list)
    """Who is to be woken when the op is issued or done."""


class Executor:
    """Lanes that carry out ops handed over with `submit`, under the settings of torch that their maker sees."""

    def __init__(
        self,
        perform: Perform | None,
        device: torch.device,
        in_flight: Mapping[str, int] | None = None,
        on_start: Callable[[str], None] | None = None,
    ) -> None:
        """`perform` carries out an op on its lane's thread, on CUDA inside the lane's stream; None: `attach` gives it.

        `in_flight`: ops of a lane that may be in progress at once where that returns futures. `on_start` is called
        with its lane at the start of each thread.
        """
        self._perform = perform
        self._on_start = on_start
        self._device = device
        self._in_flight = dict(in_flight or {})
        self._lock = threading.Lock()
        self._wake: dict[str, threading.Condition] = {lane: threading.Condition(self._lock) for lane in LANES}
        self._main = threading.Condition(self._lock)
        """Where the main thread waits; a lane waits at its own. An op that is done wakes those who wait for it only."""
        self._queues: dict[str, deque[Op | _Call]] = {lane: deque() for lane in LANES}
        self._tickets: dict[int, _Ticket] = {}
        self._last_id = -1
        self._missing: set[int] = set()
        """Ids below the last one that were never handed over."""
        self._busy: dict[str, int] = dict.fromkeys(LANES, 0)
        self._failure: BaseException | None = None
        self.failed_op: Op | None = None
        """The op in which the first failure came up."""
        self._closing = False
        self._spans: list[Span] = []
        self._noted = threading.local()
        """Of each lane's thread: the ranks that its op waits for, and seconds."""
        self._on_host: dict[int, tuple[Op, float]] = {}
        """Ops of host lanes that are being carried out, with their start by perf_counter."""
        self._on_gpu: dict[str, deque[_Issued]] = {lane: deque() for lane in GPU_LANES}
        """Issued ops of each stream, oldest first."""
        self._free_events: list[torch.cuda.Event] = []
        self.epoch = time.perf_counter()
        """perf_counter at which the spans' clock reads 0; later by all the time for which it stood still."""
        self._stopped_at: float | None = None
        """perf_counter at which the clock was stopped; None while it runs."""
        self._base_s = 0.0
        """When `_base_event` was passed, by the spans' clock."""
        self._cuda = device.type == "cuda"
        self._streams: dict[str, torch.cuda.Stream] = {}
        if self._cuda:
            self._streams = {lane: torch.cuda.Stream(device) for lane in GPU_LANES}
            self._base_event, self.epoch = origin(device, self._new_event)
        contexts = {lane: contextvars.copy_context() for lane in LANES}
        self._threads = [
            threading.Thread(target=contexts[lane].run, args=(self._run, lane), name=lane, daemon=True)
            for lane in LANES
        ]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------ the main thread's side

    def attach(self, perform: Perform) -> None:
        """What carries out ops from now on; the spans' clock begins here, whatever was prepared until now."""
        self._await_preparation()
        self._perform = perform
        with self._lock:
            self._leave_out(self.epoch)

    def _await_preparation(self) -> None:
        """What the calling thread has given the device is over then: the lanes' streams come after no other."""
        if self._cuda:
            torch.cuda.synchronize(self._device)

    @contextmanager
    def clock_stopped(self) -> Iterator[None]:
        """While entered, the spans' clock stands still. No op may be under way, and none may be submitted."""
        with self._lock:
            assert not self._tickets, "ops are under way"
            since_s = self._stopped_at = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._leave_out(since_s)
                self._stopped_at = None

    def _leave_out(self, since_s: float) -> None:
        """Take the time from `since_s`, by perf_counter, until now out of the spans' clock."""
        seconds = time.perf_counter() - since_s
        self.epoch += seconds
        self._base_s -= seconds

    def call(self, lane: str, work: Callable[[], T]) -> T:
        """Run `work` on a lane's thread (on CUDA: inside its stream) behind what is queued there, and behind what the
        calling thread has given the device; its result. What it raises is raised here, and the lane goes on."""
        done: Future[T] = Future()
        self._await_preparation()
        with self._lock:
            self._raise_failure()
            assert not self._closing, "the executor is closed"
            self._queues[lane].append(_Call(work, done))
            self._wake[lane].notify()
        while not wait([done], timeout=1.0).done:
            with self._lock:
                self._raise_failure()  # it may never be reached
        return done.result()

    def submit(self, ops: Iterable[Op]) -> None:
        """Queue ops, whose ids increase from call to call; waits while MAX_QUEUED are. Raises the failure of a lane."""
        with self._lock:
            while self._failure is None and len(self._tickets) >= MAX_QUEUED:
                self._main.wait(0.01)
                self._retire_gpu_ops()  # nobody else does once all that is queued has been issued
            self._raise_failure()
            lanes = set()
            for op in ops:
                assert op.id > self._last_id, f"op {op.id} comes after op {self._last_id}"
                self._missing.update(range(self._last_id + 1, op.id))
                self._last_id = op.id
                self._tickets[op.id] = _Ticket()
                self._queues[op.lane].append(op)
                lanes.add(op.lane)
            for lane in lanes:
                self._wake[lane].notify()

    def wait(self, op_id: int) -> None:
        """Block until op `op_id` is done. Raises the first failure of any lane."""
        with self._lock:
            ticket = self._tickets.get(op_id)
            if ticket is not None:
                self._await_issue(op_id, ticket, self._main, lambda: self._failure is not None)
            self._raise_failure()
            event = None if ticket is None else ticket.event
        if event is not None:
            event.synchronize()

    def drain(self) -> None:
        """Block until everything submitted is done. Raises the first failure of any lane."""
        while True:
            with self._lock:
                self._raise_failure()
                last = max((op_id for op_id, ticket in self._tickets.items() if ticket.event is None), default=None)
            if last is None:
                break
            self.wait(last)
        for stream in self._streams.values():
            stream.synchronize()
        with self._lock:
            self._retire_gpu_ops()

    def take_spans(self) -> list[Span]:
        """Spans of the ops that finished since the last call. Any thread may call this."""
        with self._lock:
            self._retire_gpu_ops()
            spans, self._spans = self._spans, []
        return spans

    def under_way(self) -> tuple[float, list[UnderWay]]:
        """The spans' clock now, and the ops that are being carried out. Any thread may call this."""
        with self._lock:
            result = [_under_way(op, start - self.epoch) for op, start in self._on_host.values()]
            for issued in self._on_gpu.values():
                if issued and issued[0].first.query() and not issued[0].last.query():
                    result.append(_under_way(issued[0].op, self._gpu_time(issued[0].first)))
            return (self._stopped_at or time.perf_counter()) - self.epoch, result

    def close(self) -> None:
        """End the lanes; ops in progress finish, queued ones are dropped. Nothing is raised, and after a failure what
        does not end within CLOSE_S is left behind: a GPU that is gone may never answer."""
        with self._lock:
            self._closing = True
            self._wake_all()
        deadline = time.monotonic() + CLOSE_S
        for thread in self._threads:
            while thread.is_alive() and not self._given_up(deadline):
                thread.join(0.1)
        with self._lock:
            while any(self._busy.values()) and not self._given_up(deadline):
                self._main.wait(0.1)
        for stream in self._streams.values():
            with contextlib.suppress(RuntimeError):  # that of a stream which has failed is no news
                while not stream.query() and not self._given_up(deadline):
                    time.sleep(0.001)

    def _given_up(self, deadline: float) -> bool:
        return self._failure is not None and time.monotonic() > deadline

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _wake_all(self) -> None:
        for condition in (*self._wake.values(), self._main):
            condition.notify_all()

    def _await_issue(
        self, op_id: int, ticket: _Ticket, condition: threading.Condition, over: Callable[[], bool]
    ) -> None:
        """Wait, holding the lock, until an op is done or has an event on its stream, or the run is `over`."""
        while op_id in self._tickets and ticket.event is None and not over():
            ticket.waiters.append(condition)
            condition.wait()

    # ------------------------------------------------------------------ a lane's side

    def _run(self, lane: str) -> None:
        try:
            if self._on_start is not None:
                self._on_start(lane)
        except BaseException as error:
            with self._lock:
                self._failure = self._failure or error
                self._wake_all()
            return
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
        queue, wake = self._queues[lane], self._wake[lane]
        limit = self._in_flight.get(lane, 1)
        while True:
            with self._lock:
                while not (queue and self._busy[lane] < limit) and not self._over():
                    wake.wait()
                if self._over():
                    raise _Stopped
                op = queue.popleft()
                self._busy[lane] += 1
            if isinstance(op, _Call):
                self._answer(lane, op)
                continue
            try:
                waited = self._await_dependencies(op)
                self._carry_out(op, waited)
            except _Stopped:
                self._settle(op, None)
                raise
            except BaseException as error:
                self._settle(op, error)
                return

    def _answer(self, lane: str, call: _Call) -> None:
        try:
            result = call.work()
        except BaseException as error:
            call.done.set_exception(error)
        else:
            call.done.set_result(result)
        with self._lock:
            self._busy[lane] -= 1
            if self._closing:
                self._main.notify()

    def _over(self) -> bool:
        return self._failure is not None or self._closing

    def _await_dependencies(self, op: Op) -> tuple[int, ...]:
        """Return once `op` may run: on a stream what it waits for is ordered before it, elsewhere that is done. Its
        ids, of what was not done at first."""
        on_gpu = self._cuda and op.lane in GPU_LANES
        events: list[torch.cuda.Event] = []
        with self._lock:
            waited = tuple(dep for dep in op.deps if dep in self._tickets)
            for dep in op.deps:
                ticket = self._tickets.get(dep)
                if ticket is None:
                    # Done and forgotten, unless nobody ever heard of it.
                    known = dep < op.id and dep not in self._missing
                    if not known:
                        raise AssertionError(f"op {op.id} depends on op {dep}, which was never submitted")
                    continue
                self._await_issue(dep, ticket, self._wake[op.lane], self._over)
                if self._over():
                    raise _Stopped
                if dep not in self._tickets:
                    continue
                assert ticket.event is not None, f"op {dep} has neither ended nor an event"
                if on_gpu:
                    # Under the lock, so that the event cannot be given to another op before.
                    torch.cuda.current_stream(self._device).wait_event(ticket.event)
                else:
                    events.append(ticket.event)
        # An event that has passed meanwhile may be another op's by now: that one is waited for as well.
        for event in events:
            event.synchronize()
        if not on_gpu:
            with self._lock:
                self._on_host[op.id] = op, time.perf_counter()
        return waited

    def _carry_out(self, op: Op, waited: tuple[int, ...]) -> None:
        assert self._perform is not None, "no perform attached"
        if self._cuda and op.lane in GPU_LANES:
            with self._lock:
                first, last = self._event(), self._event()
            first.record()
            self._noted.waits = []
            result = self._perform(op)
            skipped = isinstance(result, Skipped)
            assert result is None or skipped, f"{op.action.name}: work of a GPU lane is ordered by its stream"
            last.record()
            with self._lock:
                ticket = self._tickets[op.id]
                ticket.event = last
                self._on_gpu[op.lane].append(
                    _Issued(op, None if skipped else waited, tuple(self._noted.waits), first, last)
                )
                self._retire_gpu_ops(op.lane)
                self._leave(op, ticket)
            return
        start = self._on_host[op.id][1]
        self._noted.waits = []
        result = self._perform(op)
        awaited = tuple(self._noted.waits)
        if isinstance(result, Skipped):
            self._settle(op, None)
        elif result is None:
            self._finish(op, start, waited, awaited)
        else:
            result.add_done_callback(lambda future: self._finish(op, start, waited, awaited, future))

    def note_wait(self, rank: int, seconds: float) -> None:
        """The op that the calling lane carries out has waited for another rank."""
        self._noted.waits.append((rank, seconds))

    def _event(self) -> torch.cuda.Event:
        return self._free_events.pop() if self._free_events else self._new_event()

    def _new_event(self) -> torch.cuda.Event:
        # Blocking: who waits for it sleeps; else each waiting lane would spin on a core of the others.
        return torch.cuda.Event(enable_timing=True, blocking=True)

    def _retire_gpu_ops(self, *lanes: str) -> None:
        """Turn GPU ops whose end has passed into spans and forget their tickets; called with the lock held."""
        for lane in lanes or GPU_LANES:
            issued = self._on_gpu[lane]
            while issued and issued[0].last.query():
                op, waited, awaited, first, last = issued.popleft()
                start_s, end_s = self._gpu_time(first), self._gpu_time(last)
                if waited is not None:
                    self._spans.append(span_of(op, start_s, end_s, waited, awaited))
                del self._tickets[op.id]
                if end_s - self._base_s > REBASE_S:
                    last, self._base_event, self._base_s = self._base_event, last, end_s
                self._free_events += [first, last]

    def _gpu_time(self, event: torch.cuda.Event) -> float:
        """When a passed event was passed, by the spans' clock."""
        return self._base_s + float(self._base_event.elapsed_time(event)) / 1e3

    def _finish(
        self,
        op: Op,
        start: float,
        waited: tuple[int, ...],
        awaited: tuple[tuple[int, float], ...],
        future: Future[Any] | None = None,
    ) -> None:
        error = future.exception() if future is not None else None
        if error is None:
            end = time.perf_counter()
            with self._lock:
                self._spans.append(span_of(op, start - self.epoch, end - self.epoch, waited, awaited))
        self._settle(op, error)

    def _settle(self, op: Op, error: BaseException | None) -> None:
        """An op of a host lane is done, or an op of any lane has failed or is given up."""
        with self._lock:
            self._on_host.pop(op.id, None)
            if error is not None and self._failure is None:
                error.add_note(f"in op {op_text(op.action.name, op.block, op.index)}, step {op.step}, lane {op.lane}")
                self._failure, self.failed_op = error, op
            if self._failure is None:
                ticket = self._tickets.pop(op.id, None)
            else:
                ticket = None
                self._wake_all()
            self._leave(op, ticket)

    def _leave(self, op: Op, ticket: _Ticket | None) -> None:
        """The op no longer takes its lane; whoever waits for it goes on."""
        self._busy[op.lane] -= 1
        self._wake[op.lane].notify()
        if self._closing:
            self._main.notify()
        if ticket is not None:
            for condition in ticket.waiters:
                condition.notify()


def _under_way(op: Op, start_s: float) -> UnderWay:
    return UnderWay(op.action.shown_on, op.action.name, op.block, op.index, op.step, start_s)
