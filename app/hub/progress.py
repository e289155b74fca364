"""What a download from the hub says, on standard error."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from penstock.app.console.working import say, working
from penstock.app.hub.names import HubName
from penstock.engine import preparing
from penstock.storage.files.units import bytes_text, duration_text


@contextmanager
def fetching(hub: HubName, total: int) -> Iterator[type[Any]]:
    """Tells how far a download of `total` bytes is, and on standard error when it is done; gives a kind of bar that
    shows nothing, by which huggingface_hub counts."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    counts: dict[int, int] = {}
    began = time.monotonic()

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._of_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **(kwargs | {"disable": True}))

        def update(self, n: float | None = 1) -> None:
            if self._of_bytes and total:  # several bars count the same bytes
                counts[id(self)] = counts.get(id(self), 0) + int(n or 0)
                done = min(total, max(counts.values()))
                rate = bytes_text(int(done / max(1e-9, time.monotonic() - began)))
                preparing.report(done / total, f"{bytes_text(done)} of {bytes_text(total)}, {rate}/s")

    if not total:
        yield Bar
        return
    with working(f"fetching {hub}"):
        yield Bar
    say(f"fetched {hub} in {duration_text(time.monotonic() - began)}")
