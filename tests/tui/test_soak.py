"""Ten minutes of a run's spans at their rate, in virtual time: what the run screen holds stays bounded.

Nothing sleeps: the writer's clock and the application's are one that the test moves on.
"""

from __future__ import annotations

import gc
import tracemalloc
from functools import partial
from pathlib import Path
from typing import cast

import pytest
import real_runs

from penstock.app.rows import plain
from penstock.app.rundir import RunLock
from penstock.tui.app import PenstockApp
from penstock.tui.data import run_data
from penstock.tui.data.spans import SpanStore
from penstock.tui.screens.run import RunScreen
from penstock.tui.synthetic import Writer

CAPACITY = 20_000
"""Of the store: small, so that it is full many times over."""
SPANS_PER_S = 300.0
MINUTES = 6
LOOK_S = 5
"""Between two looks at the files."""
MIB = 1 << 20


@pytest.mark.long
async def test_minutes_at_rate_hold_no_more_than_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_data, "SpanStore", partial(SpanStore, CAPACITY))
    monkeypatch.setattr(RunScreen, "start_feed", lambda *_, **__: None)
    path, now = tmp_path / "runs" / "synthetic", 1_000_000.0
    writer = Writer(path, spans_per_s=SPANS_PER_S, num_spans=CAPACITY, num_steps=3000)
    writer.begin(now)
    lock = RunLock(path)
    app = PenstockApp(tmp_path, run=path, clock=lambda: now)
    held: list[int] = []
    num_objects: list[int] = []
    try:
        async with app.run_test(size=(120, 36)) as pilot:
            await real_runs.until(lambda: isinstance(app.screen, RunScreen), pilot.pause)
            screen = cast("RunScreen", app.screen)
            num_spans = 0
            tracemalloc.start()
            for minute in range(MINUTES + 1):
                for _ in range(60 // LOOK_S):
                    now += LOOK_S
                    num_spans += writer.advance(LOOK_S, now)
                    while (update := screen._poll()) and (update.changed - {"tick"} or screen.data.behind):
                        screen._show(update)
                        if not screen.data.behind:
                            break
                    if now % 10 == 0:
                        await pilot.pause()  # what was changed is drawn
                gc.collect()
                if minute:  # the first one fills caches
                    held.append(tracemalloc.get_traced_memory()[0])
                    num_objects.append(len(gc.get_objects()))
            assert num_spans > MINUTES * 60 * SPANS_PER_S * 0.8
            assert screen.data.state == "running"
            assert screen.data.step == writer.step
            view = screen.data.spans.view
            assert view.num_spans <= CAPACITY
            assert view.last_end_s > writer.clock_s - 1.0
            assert "compute" in plain(screen.lanes.rows(80, 12))
    finally:
        tracemalloc.stop()
        lock.release()
    print(f"held at the end of each minute, in MiB: {[round(size / MIB, 1) for size in held]}, objects {num_objects}")
    half = MINUTES // 2
    # The store's room is refilled about every minute: halves are compared, not single moments.
    assert max(held[half:]) < max(held[:half]) + 2 * MIB
    assert max(num_objects[half:]) < max(num_objects[:half]) * 1.05
