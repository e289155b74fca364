"""What the tiers of a run hold, and what flows between them: bytes a second of each direction, and what they are.

Of a run that goes on rates are of the last seconds; of any other of its last whole step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.app.runs.ops import cargo_of, part_of, route_of
from penstock.storage.files.units import seconds_text
from penstock.tui.data.fields import get, number, objects, text
from penstock.tui.data.run_data import RunData
from penstock.tui.data.spans import SpanView

_TIERS = ("gpu", "ram", "nvme")
FULL_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class Tier:
    """What a tier may hold, was planned to hold and has held; None where unknown."""

    name: str
    budget_bytes: float | None
    planned_bytes: float | None
    held_bytes: float | None

    @property
    def share(self) -> float | None:
        """Most that was held, as a share of the budget; the planned peak while nothing was measured."""
        held = self.planned_bytes if self.held_bytes is None else self.held_bytes
        return held / self.budget_bytes if held is not None and self.budget_bytes else None

    @property
    def planned_share(self) -> float | None:
        return self.planned_bytes / self.budget_bytes if self.planned_bytes and self.budget_bytes else None


def tiers(data: RunData) -> list[Tier]:
    """The tiers of the plan: budget, planned peak, and what was held at most as far as the run says."""
    result = []
    for name in _TIERS:
        held = data.metrics.tier_bytes.get(name)
        if held is None and not data.is_live:
            held = number(data.summary, "tiers", name, "peak_bytes")
        budget = number(data.plan, "tiers", name, "budget_bytes")
        planned = number(data.plan, "tiers", name, "peak_bytes")
        if budget is not None or planned is not None or held is not None:
            result.append(Tier(name, budget, planned, held))
    return result


RATE_S = 5.0
_NEWEST_S = 1.0
"""What ended so lately may stand for what is under way: most ops last much less than one looks."""
_MOST_BLOCKS = 2000

Route = tuple[str, str]
_UnderWay = dict[Route | str, tuple[str, str]]
"""By route what moves, by tier what computes there: what, and of which block."""
READ, LOAD, STORE, WRITE, DIRECT = ROUTES = (
    ("nvme", "ram"),
    ("ram", "gpu"),
    ("gpu", "ram"),
    ("ram", "nvme"),
    ("nvme", "gpu"),
)
"""From tier to tier; the last one is a GPU that reads the drive itself."""
_CARGOES = ("weights", "gradients", "optimizer state", "activations", "activation gradients")
"""What matters most to whoever looks for the first time, first."""
_KINDS = {"weights": "weights", "state": "optimizer state", "gradient": "gradients"}


class Window(NamedTuple):
    """The time over which rates are averaged."""

    start_s: float
    end_s: float
    live: bool
    step: int | None
    """The last whole step; None while there was none."""

    @property
    def words(self) -> str:
        """For people: `last 5 s`, `last step 84, 1.91 s`."""
        if self.live:
            return f"last {RATE_S:g} s"
        length = seconds_text(self.end_s - self.start_s)
        return f"last step {self.step}, {length}" if self.step is not None else f"all of {length}"


def rate_window(data: RunData) -> Window | None:
    """The time over which rates of a run are averaged; None while nothing has been measured."""
    view, clock_s = data.spans.view, data.clock_s
    if clock_s is None or not view.num_spans:
        return None
    steps = view.steps
    last = steps[-1] if steps else None
    if data.state == "running":
        start_s = max(clock_s - RATE_S, view.first_start_s)
        window = Window(start_s, clock_s, True, last.step if last else None)
    elif last is not None:
        window = Window(last.start_s, last.end_s, False, last.step)
    else:
        window = Window(view.first_start_s, view.last_end_s, False, None)
    return window if window.end_s > window.start_s else None


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between two tiers."""

    bytes_per_s: float = 0.0
    cargo: tuple[tuple[str, float], ...] = ()
    """What it carried, in this window or since the last step began, and its bytes a second in the window."""
    now: tuple[str, str] = ("", "")
    """What is on the way, and of which block: `weights`, `layers.3`; empty where nothing is, or nobody knows."""


@dataclass(frozen=True, slots=True)
class Node:
    """A tier as a stop on the way."""

    name: str
    tier: Tier | None
    holds: tuple[str, ...] = ()
    """What has its home here, by the plan."""
    doing: str = ""
    """What computes here now: `backward layers.3`."""
    note: str = ""
    """What has to be said of it."""


@dataclass(frozen=True, slots=True)
class Flow:
    """The whole way, from the drive to the GPU and back."""

    nodes: dict[str, Node]
    links: dict[Route, Link] = field(default_factory=dict)
    when: str = ""
    live: bool = False


def flow(data: RunData) -> Flow:
    """What flows in a run now, or flowed in its last step."""
    window = rate_window(data)
    under_way = _under_way(data) if data.state == "running" else {}
    nodes = _nodes(data, under_way)
    if window is None:
        return Flow(nodes, dict.fromkeys(ROUTES, Link()), "no step yet" if data.is_live else "no step was recorded")
    when = f"{data.state}: {window.words}" if data.state in ("paused", "stale") else window.words
    return Flow(nodes, _links(data.spans.view, window, under_way), when, window.live)


def _links(view: SpanView, window: Window, under_way: _UnderWay) -> dict[Route, Link]:
    seconds = window.end_s - window.start_s
    moved = view.bytes_by_op(window.start_s, window.end_s)
    steps = view.steps
    since_s = min(window.start_s, steps[-1].start_s) if steps else window.start_s
    named = view.bytes_by_op(since_s, window.end_s) if since_s < window.start_s else moved
    links = {}
    for route in ROUTES:
        names = {cargo_of(op) for op, count in named.items() if count > 0 and route_of(op) == route}
        rates = dict.fromkeys((cargo for cargo in _CARGOES if cargo in names), 0.0)
        for op, count in moved.items():
            if count > 0 and route_of(op) == route:
                rates[cargo_of(op)] += count / seconds
        links[route] = Link(sum(rates.values()), tuple(rates.items()), under_way.get(route, ("", "")))
    return links


def _nodes(data: RunData, under_way: _UnderWay) -> dict[str, Node]:
    known = {tier.name: tier for tier in tiers(data)}
    homes: dict[str, dict[str, None]] = {name: {} for name in ("nvme", "ram", "gpu")}
    for block in objects(data.plan, "blocks")[:_MOST_BLOCKS]:
        for kind, word in _KINDS.items():
            homes.get(text(block, kind) or "", {})[word] = None
    machine = get(data.plan, "machine")
    no_gpu = isinstance(machine, dict) and "gpu" in machine and machine["gpu"] is None
    nodes = {}
    for key, name in (("nvme", "NVMe"), ("ram", "RAM"), ("gpu", "GPU")):
        doing = " ".join(under_way.get(key, ())).rstrip()
        note = "in ordinary memory" if no_gpu and key == "gpu" else ""
        nodes[key] = Node(name, known.get(key), tuple(homes[key]), doing, note)
    return nodes


def _under_way(data: RunData) -> _UnderWay:
    result: _UnderWay = {}
    for lane, op, block in [*(op[:3] for op in data.now), *data.ended_lately(_NEWEST_S)]:
        of_block = "" if block == "all" else block
        if (route := route_of(op)) is not None:
            result.setdefault(route, (cargo_of(op), of_block))
        elif lane in ("compute", "optimizer") and part_of(op):
            result.setdefault("gpu" if lane == "compute" else "ram", (part_of(op), of_block))
    return result


class Marks:
    """How far marks have come on each way: as many cells as bytes have moved, so that what stands still looks still."""

    SPACING = 6
    _CELLS_PER_S = 4.0

    def __init__(self) -> None:
        self._at: dict[Route, float] = dict.fromkeys(ROUTES, 0.0)
        self._seen: dict[Route, float] | None = None

    @property
    def offsets(self) -> dict[Route, int]:
        return {route: int(at) for route, at in self._at.items()}

    def move(self, view: SpanView, now: Flow, *, behind: bool) -> None:
        """Look again; `behind`: what is read now is the past."""
        moved = dict.fromkeys(ROUTES, 0.0)
        for op, count in view.moved_bytes.items():
            if (route := route_of(op)) in moved:
                moved[route] += count
        before, self._seen = self._seen, moved
        fastest = max(link.bytes_per_s for link in now.links.values())
        if before is None or behind or not now.live or fastest <= 0:
            return
        for route in ROUTES:
            cells = max(0, moved[route] - before[route]) / fastest * self._CELLS_PER_S
            self._at[route] = (self._at[route] + min(cells, self.SPACING - 1)) % self.SPACING
