"""What is told of a download from the hub: a bar on a terminal, elsewhere a line now and then, on standard error."""

from __future__ import annotations

import sys
import time
from typing import Any

from penstock.app.hub_names import HubName
from penstock.storage.units import bytes_text, duration_text
from penstock.storage.untrusted import printable

_LINE_S = 10.0
"""Between two lines of progress where there is no terminal."""


def say(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)


class Fetching:
    """What is told of a download: a bar on a terminal, elsewhere a line now and then, on standard error."""

    def __init__(self, hub: HubName, total: int) -> None:
        self._hub, self._total = hub, total
        self._counts: dict[int, int] = {}
        self._began = self._told = time.monotonic()
        self._progress: Any = None

    def __enter__(self) -> Fetching:
        if self._total and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

            columns = (BarColumn(bar_width=24), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
            self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._progress.add_task("fetching", total=self._total)
            self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if self._progress is not None:
            self._progress.stop()
        if self._total and kind is None:
            say(f"fetched {self._hub} in {duration_text(time.monotonic() - self._began)}")

    def count(self, bar: int, num_bytes: int) -> None:
        """A bar of huggingface_hub's has got on; it has several for the same bytes."""
        self._counts[bar] = self._counts.get(bar, 0) + num_bytes
        done = min(self._total, max(self._counts.values()))
        if self._progress is not None:
            self._progress.update(self._task, completed=done)
        elif self._total and time.monotonic() - self._told >= _LINE_S:
            self._told = time.monotonic()
            say(f"fetching {self._hub}: {bytes_text(done)} of {bytes_text(self._total)}")

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
