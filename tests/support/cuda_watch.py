"""CUDA's rules about memory, held against what a run does: who touches which addresses, and when.

A `Watch` is told of registrations, allocations, copies and accesses, of real ops or of a test's, and keeps a list of
`Violation`. It computes nothing and touches no memory: addresses are numbers here.

What is checked:
- `one registration`, `pinned`: the host range of an asynchronous copy lies inside one registered range.
- `registration`: whole pages, no overlap, below 512 GiB each.
- `plain copy`: equal sizes and dtypes, contiguous on both sides; anything else makes torch take a temporary.
- `order`: two accesses to the same bytes, one of them a write, are ordered by dependencies or by a lane.
- `temporary`: device memory is freed only when no stream but its own may still be using it.
- `direct`: addresses, offsets and sizes of reads straight into device memory are multiples of 4 KiB.

Copies for which a thread waits are counted apart, by the op's action.
"""

from bisect import bisect_right, insort
from dataclasses import dataclass, field, replace

from penstock.engine.schedule.ops import Op

PAGE = 4096
LARGEST_REGISTRATION = 1 << 39
"""One cudaHostRegister of 512 GiB or more is refused."""
IN_ORDER = ("h2d", "compute", "d2h", "optimizer")
"""Lanes whose ops end in the order in which they begin: streams, and threads that carry out one op at a time."""
_TINY = 16
"""Numbers that a stream writes one by one, side by side, count as one access, at the time of the last."""
STREAMS = frozenset({"h2d", "compute", "d2h"})


@dataclass(frozen=True, slots=True)
class Violation:
    rule: str
    where: str
    """The op, or what the main thread did."""
    what: str


@dataclass(slots=True)
class _Access:
    start: int
    end: int
    op: int | None
    """None: by the main thread."""
    stream: str | None
    """The stream it goes through; None: it is over when the call returns."""
    write: bool


@dataclass(slots=True)
class _Area:
    """An allocation, and the accesses that a later one may have to wait for."""

    start: int
    end: int
    stream: str | None
    """Of device memory: the stream for which it was allocated."""
    accesses: list[_Access] = field(default_factory=list)


def _outside(access: _Access, start: int, end: int) -> list[_Access]:
    """What of an access lies before and behind a range."""
    pieces = (access.start, min(access.end, start)), (max(access.start, end), access.end)
    return [replace(access, start=a, end=b) for a, b in pieces if a < b]


class Watch:
    """Keeps `violations`. Ops begin and end one at a time, in the order in which they were submitted."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self.copies = 0
        """Asynchronous copies between host and device."""
        self.synchronous: set[str] = set()
        """Actions with a copy for which their thread waits."""
        self.actions: set[str] = set()
        """Actions carried out."""
        self._registered: list[tuple[int, int]] = []
        self._starts: list[int] = []
        self._areas: dict[int, _Area] = {}
        self._ops: dict[int, Op] = {}
        self._clocks: dict[int, tuple[int, ...]] = {}
        """Op -> of each in-order lane the last op that is over when it begins."""
        self._last: dict[str, int] = {}
        self._op: Op | None = None
        self._awaited: list[int] = []
        """Ops that the main thread has waited for, the last ones."""

    @property
    def current(self) -> str:
        """Whose work is under way: an action's, or the main thread's."""
        return "main thread" if self._op is None else self._op.action.name

    def report(self, rule: str, what: str) -> None:
        self.violations.append(Violation(rule, self._describe(self._op), what))

    def rules(self) -> set[str]:
        """The rules that were broken."""
        return {violation.rule for violation in self.violations}

    # ------------------------------------------------------------------ ops

    def begin(self, op: Op) -> None:
        self._op = self._ops[op.id] = op
        self.actions.add(op.action.name)
        clock = [-1] * len(IN_ORDER)
        earlier = [dep for dep in op.deps if dep in self._ops]
        if op.lane in IN_ORDER and op.lane in self._last:
            earlier.append(self._last[op.lane])
        for other in earlier:
            for at, known in enumerate(self._clocks[other]):
                if known > clock[at]:
                    clock[at] = known
            lane = self._ops[other].lane
            if lane in IN_ORDER and other > clock[at := IN_ORDER.index(lane)]:
                clock[at] = other
        self._clocks[op.id] = tuple(clock)
        self._last[op.lane] = op.id

    def end(self) -> None:
        self._op = None

    def wait(self, op_id: int) -> None:
        """The main thread has waited for an op, and so for all that comes before it."""
        self._awaited = [*self._awaited[-1:], op_id]

    def settle(self, stream: str | None = None) -> None:
        """Somebody has waited for what was put on a stream that is no lane's (None: on all of them)."""
        for area in self._areas.values():
            for access in area.accesses:
                adrift = access.op is None or access.stream not in STREAMS
                if adrift and stream in (None, access.stream):
                    access.stream = None

    def ordered(self, first: int, then: int) -> bool:
        """Whether op `first` is over when op `then` begins, whatever the lanes' speeds."""
        lane = self._ops[first].lane
        if lane in IN_ORDER:
            return self._clocks[then][IN_ORDER.index(lane)] >= first
        seen, left = set(), [then]
        while left:
            op = left.pop()
            deps = self._ops[op].deps
            if first in deps:
                return True
            before = [id for id in (*deps, *self._clocks[op]) if id > first and id in self._ops and id not in seen]
            seen.update(before)
            left += before
        return False

    def _over(self, access: _Access, stream: str | None) -> bool:
        """Whether an access is over when the current op, or the main thread, does something through a stream."""
        if stream is not None and access.stream == stream:
            return True
        if access.stream is not None and (access.op is None or access.stream not in STREAMS):
            return False  # nobody has waited for that stream
        if access.op is None:
            return True
        if self._op is None:
            return any(access.op == done or self.ordered(access.op, done) for done in self._awaited)
        if access.op == self._op.id:
            return True
        return self._same_queue(access) or access.op in self._op.deps or self.ordered(access.op, self._op.id)

    # ------------------------------------------------------------------ memory

    def register(self, start: int, nbytes: int) -> int:
        """cudaHostRegister, or an allocation of pinned memory; 0, as it succeeds."""
        if nbytes >= LARGEST_REGISTRATION:
            self.report("registration", f"{nbytes:,} bytes in one call; below {LARGEST_REGISTRATION:,} are possible")
        if start % PAGE or nbytes % PAGE:
            self.report("registration", f"{nbytes:,} bytes at {start:#x} are not whole pages")
        at = bisect_right(self._registered, (start, nbytes))
        for other, size in self._registered[max(0, at - 1) : at + 1]:
            if other < start + nbytes and start < other + size:
                self.report("registration", f"{nbytes:,} bytes at {start:#x} are registered twice")
        insort(self._registered, (start, nbytes))
        return 0

    def unregister(self, start: int) -> None:
        self._registered = [(other, size) for other, size in self._registered if other != start]

    def require_pinned(self, start: int, nbytes: int) -> bool:
        """Whether memory begins in a registration; a violation unless it also ends there."""
        at = bisect_right(self._registered, (start, LARGEST_REGISTRATION * 2)) - 1
        inside = at >= 0 and start < sum(self._registered[at])
        if not inside:
            self.report("pinned", f"an asynchronous copy with {nbytes:,} bytes of pageable memory at {start:#x}")
        elif start + nbytes > (border := sum(self._registered[at])):
            what = f"{nbytes:,} bytes at {start:#x} cross the end of a registration at {border:#x}"
            self.report("one registration", what)
        return inside

    def allocate(self, start: int, nbytes: int, stream: str | None = None) -> None:
        """`stream`: of device memory, the one for which it was allocated; None: host memory."""
        assert start not in self._areas, "memory that is in use is given out"
        insort(self._starts, start)
        self._areas[start] = _Area(start, start + nbytes, stream)

    def free(self, start: int) -> None:
        """The last tensor in an area is gone; on the device its stream may use it for something else at once."""
        area = self._areas.pop(start)
        self._starts.remove(start)
        for access in area.accesses:
            if access.stream is None or access.stream == area.stream:
                continue
            # Waiting in a stream is no help: the host gives the memory out without waiting.
            if (self._op is not None and self._op.lane in STREAMS) or not self._over(access, None):
                freed = f"{area.end - area.start:,} bytes of stream {area.stream} are freed"
                self.report("temporary", f"{freed} while {self._who(access)} may use them on stream {access.stream}")

    def _describe(self, op: Op | None) -> str:
        return "main thread" if op is None else f"{op.action.name} {op.block} {op.index}"

    def touch(self, start: int, end: int, *, write: bool, stream: str | None) -> None:
        """The current op, or the main thread, reads or writes bytes, through a stream or at once."""
        if start == end:
            return
        at = bisect_right(self._starts, start) - 1
        area = self._areas[self._starts[at]] if at >= 0 else None
        assert area is not None, f"nothing was allocated at {start:#x}"
        assert end <= area.end, f"{start:#x} to {end:#x} is outside of what was allocated"
        op = None if self._op is None else self._op.id
        left: list[_Access] = []
        for access in area.accesses:
            if access.end <= start or end <= access.start:
                left.append(access)
            elif write or access.write:
                if not self._over(access, stream):
                    verbs = "written" if write else "read", "written" if access.write else "read"
                    what = f"{end - start:,} bytes are {verbs[0]} that {self._who(access)} may still have {verbs[1]}"
                    self.report("order", what)
                if not write:
                    left.append(access)  # else who comes after this write comes after that access
                elif self._queued(access):
                    left += _outside(access, start, end)
                else:
                    rest = access if access.op is None else replace(access, op=op, stream=stream)
                    left += _outside(rest, start, end)
            elif (access.start, access.end) != (start, end) or not self._same_queue(access):
                left.append(access)  # else this read is over later than that one
        if end - start <= _TINY:
            for access in [a for a in left if a.end - a.start <= PAGE and (a.end == start or end == a.start)]:
                if write and access.write and self._same_queue(access):
                    start, end = min(start, access.start), max(end, access.end)
                    left.remove(access)
        left.append(_Access(start, end, op, stream, write))
        area.accesses = left

    def _who(self, access: _Access) -> str:
        return self._describe(None if access.op is None else self._ops[access.op])

    def _queued(self, access: _Access) -> bool:
        return access.op is not None and self._ops[access.op].lane in IN_ORDER

    def _same_queue(self, access: _Access) -> bool:
        return self._queued(access) and self._op is not None and self._ops[access.op].lane == self._op.lane

    # ------------------------------------------------------------------ copies and reads

    def copied(
        self, host: tuple[int, int], device: tuple[int, int], *, to_device: bool, stream: str, plain: bool, waits: bool
    ) -> None:
        """A copy between host and device: (start, bytes) of each side. `waits`: its thread waits for it."""
        if not plain:
            self.report("plain copy", f"{host[1]:,} bytes of host memory need a temporary on their way")
        known = True
        if waits:
            self.synchronous.add(self.current)
        else:
            self.copies += 1
            known = self.require_pinned(*host)
        over = None if waits else stream
        if known:
            self.touch(host[0], sum(host), write=not to_device, stream=over)
        self.touch(device[0], sum(device), write=to_device, stream=over)

    def read_direct(self, start: int, nbytes: int, offset: int) -> None:
        """A read of a file straight into device memory (GPUDirect) or into host memory (direct I/O)."""
        values = {"address": start, "size": nbytes, "file offset": offset}
        bad = [f"{name} {value:,}" for name, value in values.items() if value % PAGE]
        if bad:
            self.report("direct", f"a direct read of {nbytes:,} bytes at {start:#x}: not at 4 KiB: {', '.join(bad)}")
