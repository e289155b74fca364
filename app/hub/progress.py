"""What a download from the hub says, on standard error."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from typing import Any

from penstock.app.console.working import working
from penstock.app.hub.names import HubName
from penstock.engine import preparing
from penstock.storage.files.units import bytes_text, duration_text
from penstock.storage.files.untrusted import printable


def say(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)


class Fetching:
    """Tells how far a download is, and on standard error when it is done."""

    def __init__(self, hub: HubName, total: int) -> None:
        self._hub, self._total = hub, total
        self._counts: dict[int, int] = {}
        self._began = time.monotonic()
        self._shown = ExitStack()

    def __enter__(self) -> Fetching:
        if self._total:
            self._shown.enter_context(working(f"fetching {self._hub}"))
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._shown.close()
        if self._total and kind is None:
            say(f"fetched {self._hub} in {duration_text(time.monotonic() - self._began)}")

    def count(self, bar: int, num_bytes: int) -> None:
        """A bar of huggingface_hub's has got on; it has several for the same bytes."""
        self._counts[bar] = self._counts.get(bar, 0) + num_bytes
        if self._total:
            done = min(self._total, max(self._counts.values()))
            rate = done / max(1e-9, time.monotonic() - self._began)
            words = f"{bytes_text(done)} of {bytes_text(self._total)}, {bytes_text(int(rate))}/s"
            preparing.report(done / self._total, words)

    def bar_class(self) -> type[Any]:
        """A bar for huggingface_hub that shows nothing itself."""
        from tqdm import tqdm  # type: ignore[import-untyped]

        fetching = self

        class Bar(tqdm):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                self._of_bytes = kwargs.get("unit") == "B"
                super().__init__(*args, **(kwargs | {"disable": True}))

            def update(self, n: float | None = 1) -> None:
                if self._of_bytes:
                    fetching.count(id(self), int(n or 0))

        return Bar
