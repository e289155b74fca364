"""Ten minutes of a run's spans at their rate, in virtual time: what the run screen holds stays bounded.

Nothing sleeps: the writer's clock and the application's are one that the test moves on.
"""

import gc
import tracemalloc
from functools import partial
from pathlib import Path

import pytest
from seen import running, until

from penstock.app.rows import plain
from penstock.app.rundir import RunLock
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


@pytest.mark.long
async def test_minutes_at_rate_hold_no_more_than_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_data, "SpanStore", partial(SpanStore, CAPACITY))
    monkeypatch.setattr(RunScreen, "start_feed", lambda *_, **__: None)
    path, now = tmp_path / "runs" / "synthetic", 1_000_000.0
    writer = Writer(path, spans_per_s=SPANS_PER_S, num_spans=CAPACITY, num_steps=3000)
    writer.begin(now)
    lock = RunLock(path)
    held: list[tuple[int, int]] = []
    num_spans = 0
    try:
        async with running(tmp_path, run=path, clock=lambda: now) as (app, pilot):
            await until(pilot, lambda: isinstance(app.screen, RunScreen))
            screen = app.screen
            tracemalloc.start()
            for _ in range(MINUTES + 1):
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
                held.append((tracemalloc.get_traced_memory()[0], len(gc.get_objects())))
            assert num_spans > MINUTES * 60 * SPANS_PER_S * 0.8
            assert (screen.data.state, screen.data.step) == ("running", writer.step)
            assert screen.data.spans.view.num_spans <= CAPACITY
            assert screen.data.spans.view.last_end_s > writer.clock_s - 1.0
            assert "compute" in plain(screen.lanes.rows(80, 12))
    finally:
        tracemalloc.stop()
        lock.release()
    print(f"bytes and objects held at the end of each minute: {held}")
    half = 1 + MINUTES // 2  # the first minute fills caches
    # The store's room is refilled about every minute: halves are compared, not single moments.
    assert max(size for size, _ in held[half:]) < max(size for size, _ in held[1:half]) + (2 << 20)
    assert max(count for _, count in held[half:]) < max(count for _, count in held[1:half]) * 1.05
