"""Every place where the engine or the storage waits for the GPU, or keeps what the GPU still uses, and what for.

docs/waits.md is made of it. tests/emulated/test_waits.py takes each away in turn: a scenario must notice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "waits.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A wait in the sources."""

    name: str
    file: str
    code: str
    """The lines that wait, once in the file, or the whole condition of a rule."""
    without: str = "pass"
    """What takes their place where the wait is taken away."""
    orders: str
    scenario: str
    """Of tests/emulated/scenarios.py: gives another result without the wait."""


WAITS = [
    Wait(
        name="a GPU lane's op behind what it depends on",
        file="engine/runtime/executor.py",
        code="torch.cuda.current_stream(self._device).wait_event(ticket.event)",
        orders="An op of a stream begins when the ops of other streams that it depends on have ended.",
        scenario="ops",
    ),
    Wait(
        name="a host lane's op behind the GPU",
        file="engine/runtime/executor.py",
        code="        for event in events:\n            event.synchronize()\n",
        without="",
        orders="The optimizer and the drive's lanes begin when the copies that bring what they read have ended.",
        scenario="ops",
    ),
    Wait(
        name="the main thread behind an op",
        file="engine/runtime/executor.py",
        code="        if event is not None:\n            event.synchronize()",
        without="        del event",
        orders="Loss, norm and hits are read when the op that copies them to the host has ended.",
        scenario="ops",
    ),
    Wait(
        name="the main thread behind all ops",
        file="engine/runtime/executor.py",
        code="        for stream in self._streams.values():\n            stream.synchronize()\n        with",
        without="        with",
        orders="Whoever drains the lanes may read and free memory that they used.",
        scenario="drain",
    ),
    Wait(
        name="an op is forgotten when it has ended",
        file="engine/runtime/executor.py",
        code="while issued and issued[0].last.query():",
        without="while issued:",
        orders="An op that is forgotten counts as done: nothing waits for it any more, and its events are used again.",
        scenario="ops",
    ),
    Wait(
        name="what was prepared is over before ops begin",
        file="engine/runtime/executor.py",
        code="        if self._cuda:\n            torch.cuda.synchronize(self._device)\n",
        without="",
        orders="What the main thread's stream zeroed and filled is whole when lanes use it, in ops and in calls.",
        scenario="begin",
    ),
    Wait(
        name="lanes end before their memory goes",
        file="engine/runtime/executor.py",
        code="                while not stream.query() and not self._given_up(deadline):",
        without="                while False:",
        orders="Memory of a session that is closed is unpinned and freed when no copy uses it any more.",
        scenario="close",
    ),
    Wait(
        name="a batch is complete before any op",
        file="engine/runtime/batch.py",
        code="self._stream.synchronize()",
        orders="A step's tokens are there before ops read them, and the pinned buffer is free for the next step's.",
        scenario="resident",
    ),
    Wait(
        name="the optimizer's scalars are there",
        file="engine/optim/lr.py",
        code="wait_for_copies(device)\n    return there",
        without="return there",
        orders="Updates on any stream read their own step's scalars, whose pinned memory is another's afterwards.",
        scenario="scalars",
    ),
    Wait(
        name="what a step reports is on the host",
        file="engine/runtime/block_ops.py",
        code="wait_for_copies(self._device)",
        orders="Losses and norms are read from pinned memory when the copy has written them.",
        scenario="resident",
    ),
    Wait(
        name="a stage of the state's first read is free again",
        file="engine/runtime/state.py",
        code="wait_for_copies(self._device)  # the stage is another part's next",
        orders="The next part is read into a pinned stage when the copy of the part before has left it.",
        scenario="resume",
    ),
    Wait(
        name="a stage of frozen weights is free again",
        file="engine/runtime/state.py",
        code="            target.copy_(rows, non_blocking=True)\n            wait_for_copies(self._device)",
        without="            target.copy_(rows, non_blocking=True)",
        orders="The same for weights that are never trained.",
        scenario="resume",
    ),
    Wait(
        name="a pinned piece is free before it is filled again",
        file="storage/tier/arena.py",
        code="over.synchronize()",
        orders="Where RAM is not pinned, copies go through two pinned pieces, each of which waits for its last copy.",
        scenario="unpinned",
    ),
    Wait(
        name="the probe's zeros come before the data",
        file="storage/tier/readers.py",
        code="torch.cuda.synchronize(out.device)  # the zeros must not arrive after the data",
        orders="kvikio writes on no stream of ours: what was there before must be over.",
        scenario="choose",
    ),
]

CALLS = re.compile(r"\.synchronize\(|wait_event\(|wait_stream\(|wait_for_copies\(|\.query\(\)|record_stream\(")
"""What waits, or asks whether something is over."""
TIMING = {
    "engine/clock.py": "measures, and is what wait_for_copies is",
    "engine/machine/probe_compute.py": "measures",
}
"""Files whose waits only make a measurement end, and why."""
ELSEWHERE = {
    "engine/runtime/executor.py": [
        "if issued and issued[0].first.query() and not issued[0].last.query():",  # display: what is under way
    ],
}
"""Lines that order nothing."""


def calls() -> Iterator[tuple[str, str]]:
    """(file, line) of everything in the engine and the storage that waits."""
    for folder in ("engine", "storage"):
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            file = str(path.relative_to(REPOSITORY))
            for line in path.read_text().splitlines():
                text = line.strip()
                code = not text.startswith(("def ", "#", '"""'))
                if code and CALLS.search(text) and file not in TIMING and text not in ELSEWHERE.get(file, []):
                    yield file, text


def page() -> str:
    """docs/waits.md."""
    lines = [
        "# Where Penstock waits for the GPU",
        "",
        "Everything else is ordered by its stream. `tests/emulated/test_waits.py` removes each of these in turn on the",
        "emulated GPU; a scenario must fail.",
    ]
    for file in dict.fromkeys(wait.file for wait in WAITS):
        lines += ["", f"`{file}`:", *(f"- {wait.orders}" for wait in WAITS if wait.file == file)]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    PAGE.write_text(page())
