"""The run screen on real runs, finished, crashed and live: every key, every action, any size; and what it holds."""

import asyncio
import gc
import os
import re
import shutil
import time
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
from cli_process import json_lines
from seen import append, drawn, notices, press, running, until
from textual.css.query import NoMatches
from textual.pilot import Pilot
from textual.widgets import Input

from benchmarks.parts.synthetic import Writer
from penstock.app.console.rows import plain
from penstock.app.runs.directory import RunLock, is_live
from penstock.app.runs.lanes import LANES
from penstock.tui.actions import ACTIONS
from penstock.tui.app import PenstockApp
from penstock.tui.data import run_data
from penstock.tui.data.spans import SpanStore
from penstock.tui.screens.run import PANES, RunScreen
from penstock.tui.screens.timeline import TimelineScreen
from penstock.tui.widgets.kpi_bar import AlertBar, KpiBar, PipelineBar


@asynccontextmanager
async def opened(run: Path, size: tuple[int, int] = (120, 36)) -> AsyncIterator[tuple[Any, RunScreen]]:
    """The screen on a run, with all that is there read and shown."""
    app, whole = PenstockApp(run.parent.parent, run=run), []
    poll = RunScreen._poll

    def noted(screen: RunScreen) -> Any:
        found = poll(screen)
        whole.extend([screen] * (not screen.data.behind and screen.data.state != "unknown"))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunScreen, "_poll", noted)
        async with app.run_test(size=size) as pilot:
            await until(pilot, lambda: bool(whole) and not whole[0]._unshown)
            await pilot.pause()
            yield pilot, whole[0]


@pytest.fixture
async def pilot(first: Path) -> AsyncIterator[Pilot[None]]:
    """Of the application with the run screen on `first`."""
    async with opened(first) as (pilot, _):
        yield pilot


@pytest.fixture
def screen(pilot: Pilot[None]) -> RunScreen:
    return cast("RunScreen", pilot.app.screen)


USUAL = [name for name in PANES if name != "samples"]
"""Panes of a run that writes no samples."""


def kpi(screen: RunScreen) -> str:
    return drawn(screen.query_one(KpiBar))


def alerts(screen: RunScreen) -> str:
    return " | ".join(alert.text for alert in screen.query_one(AlertBar).alerts)


def shown(screen: RunScreen) -> list[str]:
    return [name for name in PANES if screen.pane(name).display and screen.pane(name).region.height > 0]


async def test_a_finished_run(first: Path) -> None:
    loss = json_lines(first / "metrics.jsonl")[-1]["loss"]
    async with opened(first, (140, 36)) as (pilot, screen):
        for part in ("finished", "step 12/12", f"loss {loss:.4f}", "MFU n/a"):
            assert part in kpi(screen)
        assert "ETA" not in kpi(screen)
        assert shown(screen) == USUAL
        assert "finished after step 12" in drawn(screen.log_pane)
        assert (alerts(screen), screen.query_one(AlertBar).display) == ("", False)
        offered = [
            name for name in ("save_checkpoint", "pause", "resume", "stop", "export") if screen.check_action(name, ())
        ]
        assert offered == ["save_checkpoint", "export"]

        async def said(*keys: str) -> str:
            pilot.app.clear_notifications()
            await press(pilot, *keys)
            return " | ".join(note.message for note in pilot.app._notifications)

        for keys, what in (("P", "paused"), ("R", "resumed"), ("SS", "stopped")):  # once, where a key is held down
            assert await said(*keys) == f"the run has finished, so it cannot be {what}"
        assert await said("full_stop") == ""
        assert await said("full_stop") == "this is the last one"
        assert await said("d") == "this is the latest"
        assert await said("2", "f") == "everything is in view already"
        assert await said("w") == ""
        (screen.data.path / "predicted.jsonl").unlink()
        assert "no planned step" in await said("p")
        assert not screen.lanes.show_predicted


@pytest.mark.long
async def test_every_key_of_the_table_does_something_that_does_no_harm(first: Path) -> None:
    before = {path: path.read_bytes() for path in first.glob("*.json*")}
    async with opened(first) as (pilot, screen):
        for key in [key for action in ACTIONS if action.scope == "run" for key in action.keys.split(",")]:
            await press(pilot, key)
            while pilot.app.screen is not screen or isinstance(pilot.app.focused, Input):
                await press(pilot, "escape")
    assert {path: path.read_bytes() for path in first.glob("*.json*")} == before


async def test_narrow_terminals_drop_panes_in_order_and_numbers_focus_or_enlarge_one(first: Path) -> None:
    sizes = {
        (20, 5): ["loss"],
        (80, 20): ["loss", "lanes"],
        (80, 24): ["loss", "lanes"],
        (80, 28): ["loss", "lanes", "log"],
        (120, 24): ["loss", "lanes", "tiers", "blocks"],
        (200, 60): USUAL,
        (80, 60): ["loss", "lanes", "tiers", "blocks", "log"],
    }
    async with opened(first, (20, 5)) as (pilot, screen):
        pipeline = screen.query_one("#pipeline")
        for size, panes in sizes.items():
            await pilot.resize_terminal(*size)
            await until(pilot, lambda panes=panes: shown(screen) == panes)
            await until(pilot, lambda size=size: pipeline.display == (size[1] >= 16))
            if "blocks" in panes:  # though the plan was read while there was no room for them
                await until(pilot, lambda: "no plan yet" not in drawn(screen.pane("blocks")))
            assert kpi(screen).startswith("first  ")
            assert "finished" in kpi(screen)

        async def shows(panes: list[str], *keys: str) -> None:
            await press(pilot, *keys)
            await until(pilot, lambda: shown(screen) == panes)

        await pilot.resize_terminal(120, 36)
        await shows(USUAL, "5")
        assert screen.log_pane.has_focus
        await shows(["log"], "5")
        await press(pilot, "4")
        await shows(USUAL, "5", "5")
        await pilot.resize_terminal(80, 24)
        await shows(["loss", "lanes"])
        await shows(["tiers"], "3")  # no room for it but alone
        await shows(["loss", "lanes"], "3")


async def test_the_loss_and_otherwise_the_lanes_zoom_and_have_a_cursor(screen: RunScreen, pilot: Pilot[None]) -> None:
    loss, lanes = screen.loss, screen.lanes
    await pilot.press("1", "w", "w", "a")
    assert loss.window == (0.6875, 0.9375)
    await pilot.press("d", "s", "s")
    assert loss.window is None
    await pilot.press("comma", "comma", "comma")
    assert loss.cursor == 9
    assert loss.headline().startswith("step 10  loss ")
    await pilot.press("left", "left", "right")
    assert loss.cursor_step() == 9
    await pilot.press("y", "o", "x")
    assert (loss.log_y, loss.clip, loss.x_kind) == (True, False, "tokens")
    await pilot.press("f")
    assert loss.cursor is None
    assert "over tokens, log" in loss.headline()
    await pilot.click("#loss", offset=(30, 4))
    assert loss.cursor is not None
    low, high = lanes.window
    await press(pilot, "2", "w")
    drawn(lanes)
    assert lanes.window[1] - lanes.window[0] < (high - low) * 0.6
    assert loss.window is None
    await press(pilot, "f", "down", "down", "full_stop")
    lane = lanes.selected.lane
    await pilot.press("up", "full_stop")
    assert lanes.selected.lane != lane
    await pilot.press("p")
    await until(pilot, lambda: lanes.predicted is not None)
    assert lanes.show_predicted


async def test_the_log_is_filtered_and_samples_are_shown_step_by_step_and_prompt_by_prompt(first: Path) -> None:
    """Samples: the newest as they come, until one looks at older ones; what a model writes commands no terminal."""
    levels = ["info" if i % 10 else "warning" for i in range(60)]
    lines = [{"time": 0, "level": level, "text": f"message {i}", "step": i} for i, level in enumerate(levels)]
    append(first / "log.jsonl", *lines)

    def write(step: int) -> None:
        texts = (f"first at {step}", f"second at {step} \x1b[31mred\nbelow")
        samples = [{"prompt": f"prompt {n}", "text": t, "tokens": 9, "ended": n == 1} for n, t in enumerate(texts)]
        samples[1]["reward"] = 0.5
        append(first / "samples.jsonl", {"step": step, "samples": samples, "seconds": 1.0, "time": 0.0})

    async with opened(first, (120, 50)) as (pilot, screen):
        log = screen.log_pane
        assert "message 59" in drawn(log)
        await press(pilot, "slash", *"warning !message")
        assert "no line matches" in drawn(log)
        await press(pilot, "escape", "slash", *"warning", "enter")
        found = [line.split()[-1] for line in drawn(log).split("\n") if "message" in line]
        assert found == ["0", "10", "20", "30", "40", "50"]
        assert log.has_focus
        assert "filter warning" in log.headline()
        await press(pilot, "slash", "escape", "pageup")
        assert "message 59" not in drawn(log)
        await pilot.press("end")
        assert log.follows
        assert "samples" not in shown(screen)
        await press(pilot, "1", "n")
        assert "generates no samples" in notices(pilot)
        write(4)
        write(8)
        await until(pilot, lambda: len(screen.data.samples) == 2 and "samples" in shown(screen))
        pane = screen.pane("samples")
        assert re.match(r"step 8  prompt 1 of 2  9 tokens, cut off +1 older: \[", drawn(pane))
        await pilot.press("n")
        text = drawn(pane)
        assert "step 8  reward 0.5  prompt 2 of 2" in text
        assert "ended by the model" in text
        assert text.index("prompt 1\n" if "prompt 1\n" in text else "prompt 1 ") < text.index("second at 8")
        assert "\x1b" not in text
        assert any(line.startswith("below") for line in text.splitlines())
        await pilot.press("left_square_bracket")
        assert "second at 4" in drawn(pane)
        write(12)
        await until(pilot, lambda: len(screen.data.samples) == 3 and not screen._unshown)
        assert "second at 4" in drawn(pane)
        assert "2 newer: ]" in drawn(pane)
        await pilot.press("right_square_bracket", "right_square_bracket", "N")
        assert "first at 12" in drawn(pane)
        write(16)
        await until(pilot, lambda: "first at 16" in drawn(pane))
        await press(pilot, "7", "7")
        assert shown(screen) == ["samples"]
        assert max(len(line) for line in drawn(pane).splitlines()) == pane.size.width
        (first / "new").write_text('{"step": 4}\n[]\n{"step": 5, "samples": [{"text": 7}]}\n')
        (first / "new").replace(first / "samples.jsonl")
        await until(pilot, lambda: len(screen.data.samples) == 1)
        assert "samples.jsonl: 2 lines are damaged" in " ".join(screen.data.problems)


async def test_freezing_holds_the_display_only(screen: RunScreen, pilot: Pilot[None], first: Path) -> None:
    await pilot.press("space")
    append(first / "metrics.jsonl", json_lines(first / "metrics.jsonl")[-1] | {"step": 13, "loss": 1.2345})
    await until(pilot, lambda: screen.data.metrics.rows == 13)
    assert screen.frozen
    assert "display frozen" in kpi(screen)
    await pilot.press("space")
    await until(pilot, lambda: "1.2345" in kpi(screen))
    # What was read while nothing could be shown is shown later.
    screen.frozen = True
    screen.lanes.store = SpanStore(capacity=1)
    screen.redraw_all()
    read = screen.data.spans.view.num_spans
    append(first / "spans.jsonl", json_lines(first / "spans.jsonl")[-1])
    await until(pilot, lambda: screen.data.spans.view.num_spans > read)
    assert "no ops were recorded" in drawn(screen.lanes)
    screen.frozen = False
    await until(pilot, lambda: "last step 12" in drawn(screen.lanes))


async def test_a_screen_that_closes_shows_nothing_and_fails_nothing(screen: RunScreen, pilot: Pilot[None]) -> None:
    """A pane that is missing is a fault of a screen that is open, and nobody's of one that closes."""

    def show(closing: bool) -> None:
        if closing:
            pilot.app.exit()
        screen.query_one("#nothing")

    seen: list[bool] = []
    screen.start_feed(lambda: True, seen.append, every_s=0.001)
    await until(pilot, lambda: bool(seen))
    with pytest.raises(NoMatches):
        screen.unless_closing(show, False)
    screen.unless_closing(show, True)
    seen.clear()
    time.sleep(0.05)  # the feed asks for its next turn meanwhile
    await asyncio.sleep(0.05)
    assert not seen


async def test_nothing_is_polled_behind_the_timeline_or_shown_by_a_screen_that_is_closed(
    screen: RunScreen, pilot: Pilot[None], first: Path
) -> None:
    aside = first.rename(first.with_name("aside"))
    await until(pilot, lambda: "is gone" in alerts(screen))
    assert "gone" in kpi(screen)
    assert "step 12" in kpi(screen)
    assert not any(screen.check_action(name, ()) for name in ("export", "resume", "stop", "save_checkpoint"))
    aside.rename(first)
    await until(pilot, lambda: alerts(screen) == "" and "finished" in kpi(screen))
    assert (screen.data.metrics.rows, screen.data.problems) == (12, [])
    await pilot.press("comma", "t")
    await until(pilot, lambda: isinstance(pilot.app.screen, TimelineScreen))
    poll = Mock(return_value=set())
    screen.data.poll = poll  # type: ignore[method-assign]
    for _ in range(20):  # one may have begun before
        poll.reset_mock()
        await pilot.pause(0.25)
        if not poll.called:
            break
    assert not poll.called
    await press(pilot, "escape")
    assert pilot.app.screen is screen
    await pilot.press("escape")
    await until(pilot, lambda: not screen.is_attached)
    seen: list[str] = []
    screen.unless_closing(seen.append, "shown")
    assert seen == []


async def test_directories_that_are_none(tmp_path: Path) -> None:
    empty = tmp_path / "runs" / "empty"
    empty.mkdir(parents=True)
    async with running(tmp_path, run=empty) as (app, pilot):
        await until(pilot, lambda: isinstance(app.screen, RunScreen) and "no recipe.json" in alerts(app.screen))
        for name in PANES:
            drawn(app.screen.pane(name))
        (empty / "metrics.jsonl").write_bytes(os.urandom(3000))
        (empty / "status.json").write_text("[" * 50_000)
        await until(pilot, lambda: "status.json is damaged" in alerts(app.screen))
        assert (app.screen.data.state, app.screen.data.blocks()) == ("unknown", [])


async def test_a_crashed_run_shows_its_last_step_and_may_be_resumed_and_questions_declined(root: Path) -> None:
    run = root / "runs" / "crashed"
    async with opened(run) as (pilot, screen):
        lanes, pipeline = drawn(screen.lanes), drawn(screen.query_one(PipelineBar))
        assert all(any(lane in row and "%" in row for row in lanes.splitlines()) for lane in LANES)
        assert "last step 12, " in lanes
        assert [part in pipeline for part in ("last step 12, ", "weights", "gradients")] == [True] * 3
        assert (screen.data.state, screen.data.step, screen.data.metrics.rows) == ("crashed", 9, 9)
        assert (screen.check_action("resume", ()), screen.check_action("stop", ())) == (True, False)
        assert "process is gone" in alerts(screen)
        assert "R resumes from step" in alerts(screen)
        await press(pilot, "P")  # not offered: nothing asks
        assert pilot.app.screen is screen
        for key in ("R", "k", "e"):
            await pilot.press(key)
            await until(pilot, lambda: pilot.app.screen is not screen)
            await pilot.press("escape")
            await until(pilot, lambda: pilot.app.screen is screen)
        assert not is_live(run)
        await pilot.press("k")
        await until(pilot, lambda: bool(pilot.app.screen.query(Input)))
        pilot.app.screen.query_one(Input).value = "../bad"
        await pilot.press("enter")
        await until(pilot, lambda: any(note.severity == "error" for note in pilot.app._notifications))


async def test_what_is_found_in_haystacks_stands_beside_the_loss_and_runs_without_ops_say_so(first: Path) -> None:
    shutil.rmtree(first / "state")
    (first / "spans.jsonl").write_text("")
    (first / "validation.jsonl").unlink(missing_ok=True)
    for n, right in enumerate((1, 8)):
        recall = {"lengths": [512, 8192], "right": [[right] * 5] * 2, "queried": [[8] * 5] * 2}
        append(first / "validation.jsonl", {"step": 12 * n, "loss": 4.0 - n, "recall": recall})
    async with opened(first, (60, 24)) as (pilot, screen):
        assert "right" not in drawn(screen.loss)
        for size in ((80, 24), (120, 36), (200, 60)):
            await pilot.resize_terminal(*size)
            await until(pilot, lambda: "100% right after step 12" in drawn(screen.loss))
            text = drawn(screen.loss)
            assert ("12% right before training" in text) == (screen.loss.size.height > 4)
            assert re.search(r" 8,192 ( .100){5}", text)
            assert max(len(line) for line in text.splitlines()) == screen.loss.size.width
        assert "the run has finished, and no ops were recorded" in drawn(screen.lanes)
        assert "no step was recorded" in drawn(screen.query_one(PipelineBar))


NAMES = ["rewards/margins", "rewards/accuracies", "rewards/chosen", "kl"]


def measure(run: Path) -> None:
    """Give a run figures beside its loss, in steps and in validations."""
    for name, add in (("metrics", 0.0), ("validation", 100.0)):
        lines = json_lines(run / f"{name}.jsonl")
        (run / f"{name}.jsonl").unlink()
        for line in lines:
            values = (add + line["step"] / 8, 0.75, -2.0, 0.0625)
            append(run / f"{name}.jsonl", line | {"measured": dict(zip(NAMES, values, strict=True))})


async def test_what_a_run_measures_beside_its_loss_is_shown_and_drawn_in_its_place(first: Path) -> None:
    append(first / "validation.jsonl", {"step": 8, "loss": 4.0})
    measure(first)
    newest = "rewards/margins 1.50  rewards/accuracies 0.750  rewards/chosen -2.00   kl 0.0625"
    for size, text in (((80, 24), newest.replace("rewards/ac", "ac").replace("rewards/c", "c")), ((150, 40), newest)):
        async with opened(first, size) as (pilot, screen):
            loss = screen.loss
            assert text in drawn(loss)
            before = drawn(loss)
            assert {len(line) for line in before.splitlines()} == {loss.size.width}
            seen = []
            for _ in NAMES:
                await press(pilot, "m")
                seen.append((loss.series, str(loss.border_title)))
                assert drawn(loss) != before
            assert seen == [(name, f"1 {name}") for name in NAMES]
            await press(pilot, "m")
            assert (loss.series, loss.border_title, drawn(loss)) == (None, "1 loss", before)
            await press(pilot, "M", "M", "M", "M")
            assert loss.headline().startswith("last 1.50, validation 101 @8, over steps")
            await press(pilot, "y")
            assert "only the loss has a logarithmic axis" in notices(pilot)
            await press(pilot, "comma")
            assert loss.headline().startswith("step 12  rewards/margins 1.5000  ema ")


async def test_a_run_that_measures_only_its_loss_offers_nothing_else(first: Path) -> None:
    async with opened(first) as (pilot, screen):
        before = drawn(screen.loss)
        await press(pilot, "m")
        assert "nothing but the loss is measured" in notices(pilot)
        assert "series" not in {action.name for action in pilot.app.offered(screen)}
        assert (screen.loss.series, drawn(screen.loss)) == (None, before)
        append(first / "metrics.jsonl", json_lines(first / "metrics.jsonl")[-1] | {"step": 13, "measured": {"kl": 0.5}})
        await until(pilot, lambda: "kl 0.500" in drawn(screen.loss))
        await press(pilot, "m")
        assert screen.loss.series == "kl"


CAPACITY = 20_000
"""Of the store: small, so that it is full many times over."""
SPANS_PER_S = 300.0
MINUTES = 6
LOOK_S = 5
"""Between two looks at the files."""


@pytest.mark.long
async def test_minutes_at_rate_hold_no_more_than_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans at a run's rate. Nothing sleeps: the writer's clock and the application's are one that is moved on."""
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
                    while (changed := set(screen._poll())) and (changed - {"tick", "now"} or screen.data.behind):
                        screen._show(changed)
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
