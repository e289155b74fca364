"""The run screen on real runs, finished, crashed and live: every key, every action, any size."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import real_runs
from textual.css.query import NoMatches
from textual.pilot import Pilot
from textual.widgets import Input

from penstock.app.lanes import LANES
from penstock.app.rows import plain
from penstock.app.rundir import is_live
from penstock.tui.actions import ACTIONS
from penstock.tui.app import PenstockApp
from penstock.tui.data.spans import SpanStore
from penstock.tui.screens.run import PANES, RunScreen
from penstock.tui.screens.timeline import TimelineScreen
from penstock.tui.widgets.kpi_bar import AlertBar, KpiBar
from penstock.tui.widgets.lines import LineWidget
from penstock.tui.widgets.pipeline import PipelineBar


@asynccontextmanager
async def opened(run: Path, size: tuple[int, int] = (120, 36), **more: Any) -> AsyncIterator[tuple[Any, RunScreen]]:
    """The screen on a run, with all that is there read and shown."""
    app, whole = PenstockApp(run.parent.parent, run=run, **more), []
    poll = RunScreen._poll

    def noted(screen: RunScreen) -> Any:
        found = poll(screen)
        whole.extend([screen] * (not screen.data.behind and screen.data.state != "unknown"))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunScreen, "_poll", noted)
        async with app.run_test(size=size) as pilot:
            await real_runs.until(lambda: bool(whole) and not whole[0]._unshown, pilot.pause)
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


def drawn(widget: LineWidget) -> str:
    """What a widget shows, as text."""
    return plain(widget.rows(max(1, widget.size.width), max(1, widget.size.height)))


def kpi(screen: RunScreen) -> str:
    return drawn(screen.query_one(KpiBar))


def alerts(screen: RunScreen) -> str:
    return " | ".join(alert.text for alert in screen.query_one(AlertBar).alerts)


def shown(screen: RunScreen) -> list[str]:
    return [name for name in PANES if screen.pane(name).display and screen.pane(name).region.height > 0]


async def test_a_finished_run(first: Path) -> None:
    loss = json.loads((first / "metrics.jsonl").read_text().splitlines()[-1])["loss"]
    async with opened(first, (140, 36)) as (_, screen):
        assert "finished" in kpi(screen)
        assert "step 12/12" in kpi(screen)
        assert f"loss {loss:.4f}" in kpi(screen)
        assert "MFU n/a" in kpi(screen)
        assert "ETA" not in kpi(screen)
        assert shown(screen) == USUAL
        assert "grad norm" in drawn(screen.loss)
        assert "compute" in drawn(screen.lanes)
        assert "%" in drawn(screen.pane("tiers"))
        assert "weights" in drawn(screen.pane("blocks"))
        assert "bound by" in drawn(screen.pane("plan"))
        assert "finished after step 12" in drawn(screen.log_pane)
        assert alerts(screen) == ""
        offered = [name for name in ("save_checkpoint", "pause", "resume", "stop", "export") if screen.offers(name)]
        assert offered == ["save_checkpoint", "export"]
        assert not screen.query_one(AlertBar).display


@pytest.mark.long
async def test_every_key_of_the_table_does_something_that_does_no_harm(first: Path) -> None:
    before = {path: path.read_bytes() for path in first.glob("*.json*")}
    async with opened(first) as (pilot, screen):
        for action in ACTIONS:
            if action.scope != "run":
                continue
            assert hasattr(screen, f"action_{action.id}"), action.id
            for key in action.keys.split(","):
                await pilot.press(key)
                await pilot.pause()
                while pilot.app.screen is not screen or isinstance(pilot.app.focused, Input):
                    await pilot.press("escape")
                    await pilot.pause()
    assert {path: path.read_bytes() for path in first.glob("*.json*")} == before


async def test_narrow_terminals_drop_panes_in_order(first: Path) -> None:
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
        for size, panes in sizes.items():
            await pilot.resize_terminal(*size)
            await real_runs.until(lambda panes=panes: shown(screen) == panes, pilot.pause)
            assert kpi(screen).startswith("first  ")
            assert "finished" in kpi(screen)
            assert screen.query_one("#pipeline").display == (size[1] >= 16)


async def test_a_number_focuses_its_pane_and_again_gives_it_the_screen(first: Path) -> None:
    async with opened(first) as (pilot, screen):
        await pilot.press("5")
        assert screen.log_pane.has_focus
        assert len(shown(screen)) == len(USUAL)
        await pilot.press("5")
        await real_runs.until(lambda: shown(screen) == ["log"], pilot.pause)
        await pilot.press("4")
        await pilot.pause()
        await pilot.press("5", "5")
        await real_runs.until(lambda: shown(screen) == USUAL, pilot.pause)
        await pilot.resize_terminal(80, 24)
        await real_runs.until(lambda: shown(screen) == ["loss", "lanes"], pilot.pause)
        await pilot.press("3")  # no room for it but alone
        await real_runs.until(lambda: shown(screen) == ["tiers"], pilot.pause)
        await pilot.press("3")
        await real_runs.until(lambda: shown(screen) == ["loss", "lanes"], pilot.pause)


async def test_the_loss_zooms_pans_and_has_a_cursor(screen: RunScreen, pilot: Pilot[None]) -> None:
    await pilot.press("1", "w", "w", "a")
    assert screen.loss.window == (0.6875, 0.9375)
    await pilot.press("d", "s", "s")
    assert screen.loss.window is None
    await pilot.press("comma", "comma", "comma")
    assert screen.loss.cursor == 9
    assert screen.loss.headline().startswith("step 10  loss ")
    await pilot.press("left", "left", "right")
    assert screen.loss.cursor_step() == 9
    await pilot.press("y", "o", "x")
    assert (screen.loss.log_y, screen.loss.clip, screen.loss.x_kind) == (True, False, "tokens")
    await pilot.press("f")
    assert screen.loss.cursor is None
    assert "over tokens, log" in screen.loss.headline()
    await pilot.click("#loss", offset=(30, 4))
    assert screen.loss.cursor is not None


async def test_zoom_and_arrows_are_for_the_lanes_otherwise(screen: RunScreen, pilot: Pilot[None]) -> None:
    low, high = screen.lanes.window
    await pilot.press("2", "w")
    await pilot.pause()
    drawn(screen.lanes)
    assert screen.lanes.window[1] - screen.lanes.window[0] < (high - low) * 0.6
    assert screen.loss.window is None
    await pilot.press("f", "down", "down", "full_stop")
    await pilot.pause()
    lane = screen.lanes.selected.lane
    await pilot.press("up", "full_stop")
    assert screen.lanes.selected.lane != lane
    await pilot.press("p")
    await real_runs.until(lambda: screen.lanes.predicted is not None, pilot.pause)
    assert screen.lanes.show_predicted


async def test_the_log_is_filtered(first: Path) -> None:
    with (first / "log.jsonl").open("a") as file:
        for i in range(60):
            level = "warning" if i % 10 == 0 else "info"
            file.write(json.dumps({"time": 0, "level": level, "text": f"message {i}", "step": i}) + "\n")
    async with opened(first, (120, 50)) as (pilot, screen):
        assert "message 59" in drawn(screen.log_pane)
        await pilot.press("slash", *"warning !message")
        await pilot.pause()
        assert "no line matches" in drawn(screen.log_pane)
        await pilot.press("escape", "slash", *"warning", "enter")
        await pilot.pause()
        lines = drawn(screen.log_pane).split("\n")
        assert [line.split()[-1] for line in lines if "message" in line] == ["0", "10", "20", "30", "40", "50"]
        assert screen.log_pane.has_focus
        assert "filter warning" in screen.log_pane.headline()
        await pilot.press("slash", "escape", "pageup")
        await pilot.pause()
        assert "message 59" not in drawn(screen.log_pane)
        await pilot.press("end")
        assert screen.log_pane.follows


async def test_freezing_holds_the_display_only(screen: RunScreen, pilot: Pilot[None], first: Path) -> None:
    await pilot.press("space")
    shutil.copy(first / "metrics.jsonl", first / "x")
    line = json.loads((first / "x").read_text().splitlines()[-1]) | {"step": 13, "loss": 1.2345}
    with (first / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    await real_runs.until(lambda: screen.data.metrics.rows == 13, pilot.pause)
    assert screen.frozen
    assert "display frozen" in kpi(screen)
    await pilot.press("space")
    await real_runs.until(lambda: "1.2345" in kpi(screen), pilot.pause)
    # What was read while nothing could be shown is shown later.
    screen.frozen = True
    screen.lanes.store = SpanStore(capacity=1)
    screen.redraw_all()
    spans = screen.data.path / "spans.jsonl"
    spans.write_text(spans.read_text() + spans.read_text().splitlines()[-1] + "\n")
    read = screen.data.spans.view.num_spans
    await real_runs.until(lambda: screen.data.spans.view.num_spans > read, pilot.pause)
    assert "no ops were recorded" in drawn(screen.lanes)
    screen.frozen = False
    await real_runs.until(lambda: "last step 12" in drawn(screen.lanes), pilot.pause)


async def test_a_run_that_is_over_shows_its_last_step(first: Path, root: Path) -> None:
    for run, step in ((first, 12), (root / "runs" / "crashed", 12)):
        async with opened(run) as (_, screen):
            assert f"last step {step}, " in drawn(screen.lanes)
            rows = drawn(screen.lanes).splitlines()
            assert all(any(lane in row and "%" in row for row in rows) for lane in LANES)
            pipeline = drawn(screen.query_one(PipelineBar))
            assert f"last step {step}, " in pipeline
            assert "weights" in pipeline
            assert "gradients" in pipeline
    shutil.rmtree(first / "state")
    (first / "spans.jsonl").write_text("")
    async with opened(first) as (_, screen):
        assert "the run has finished, and no ops were recorded" in drawn(screen.lanes)
        assert "no step was recorded" in drawn(screen.query_one(PipelineBar))


async def test_a_key_that_does_nothing_says_why(screen: RunScreen, pilot: Pilot[None]) -> None:
    async def said(*keys: str) -> str:
        pilot.app.clear_notifications()
        await pilot.press(*keys)
        await pilot.pause()
        return " | ".join(note.message for note in pilot.app._notifications)

    assert await said("P") == "the run has finished, so it cannot be paused"
    assert await said("R") == "the run has finished, so it cannot be resumed"
    assert await said("S", "S") == "the run has finished, so it cannot be stopped"  # once, where a key is held down
    assert await said("full_stop") == ""
    assert await said("full_stop") == "this is the last one"
    assert await said("d") == "this is the latest"
    assert await said("2", "f") == "everything is in view already"
    assert await said("w") == ""
    (screen.data.path / "predicted.jsonl").unlink()
    assert "no planned step" in await said("p")
    assert not screen.lanes.show_predicted


async def test_a_screen_that_closes_shows_nothing_and_fails_no_thread(screen: RunScreen, pilot: Pilot[None]) -> None:
    """A pane that is missing is a fault of a screen that is open, and nobody's of one that closes."""

    def show(closing: bool) -> None:
        if closing:
            pilot.app.exit()
        screen.query_one("#nothing")

    seen: list[bool] = []
    screen.start_feed(lambda: True, seen.append, every_s=0.001)
    await real_runs.until(lambda: bool(seen), pilot.pause)
    with pytest.raises(NoMatches):
        await asyncio.to_thread(screen.from_thread, show, False)
    await asyncio.to_thread(screen.from_thread, show, True)
    seen.clear()
    time.sleep(0.05)  # the feed asks for its next turn meanwhile
    await asyncio.sleep(0.05)
    assert not seen


async def test_a_thread_may_report_to_a_screen_that_is_closed(screen: RunScreen, pilot: Pilot[None]) -> None:
    await pilot.press("escape")
    await real_runs.until(lambda: not screen.is_attached, pilot.pause)
    seen: list[str] = []
    await asyncio.to_thread(screen.from_thread, seen.append, "shown")
    await asyncio.to_thread(screen.penstock.from_thread, seen.append, "told")
    assert seen == ["told"]


async def test_nothing_is_polled_behind_the_timeline(screen: RunScreen, pilot: Pilot[None]) -> None:
    await pilot.press("comma", "t")
    await real_runs.until(lambda: isinstance(pilot.app.screen, TimelineScreen), pilot.pause)
    polls: list[int] = []
    screen.data.poll = lambda: polls.append(1) or set()  # type: ignore[method-assign,func-returns-value]
    for _ in range(20):  # one may have begun before
        polls.clear()
        await pilot.pause(0.25)
        if not polls:
            break
    assert polls == []
    await pilot.press("escape")
    await pilot.pause()
    assert pilot.app.screen is screen


async def test_directories_that_are_none(tmp_path: Path, first: Path) -> None:
    empty = tmp_path / "runs" / "empty"
    empty.mkdir(parents=True)
    app = PenstockApp(tmp_path, run=empty)
    async with app.run_test(size=(120, 36)) as pilot:
        await real_runs.until(lambda: isinstance(app.screen, RunScreen), pilot.pause)
        screen = cast("RunScreen", app.screen)
        await real_runs.until(lambda: "no recipe.json" in alerts(screen), pilot.pause)
        for name in PANES:
            drawn(screen.pane(name))
        (empty / "metrics.jsonl").write_bytes(os.urandom(3000))
        (empty / "status.json").write_text("[" * 50_000)
        await real_runs.until(lambda: "status.json is damaged" in alerts(screen), pilot.pause)


async def test_a_run_that_vanishes_is_said_to_be_gone(screen: RunScreen, pilot: Pilot[None], first: Path) -> None:
    shutil.rmtree(first)
    await real_runs.until(lambda: "is gone" in alerts(screen), pilot.pause)
    assert "gone" in kpi(screen)
    assert "step 12" in kpi(screen)
    assert not any(screen.offers(name) for name in ("export", "resume", "stop", "save_checkpoint"))


async def test_a_crashed_run_may_be_resumed_and_questions_declined(root: Path) -> None:
    run = root / "runs" / "crashed"
    async with opened(run) as (pilot, screen):
        assert screen.offers("resume")
        assert not screen.offers("stop")
        assert "process is gone" in alerts(screen)
        await pilot.press("P")  # not offered: nothing asks
        await pilot.pause()
        assert pilot.app.screen is screen
        for key in ("R", "k", "e"):
            await pilot.press(key)
            await real_runs.until(lambda: pilot.app.screen is not screen, pilot.pause)
            await pilot.press("escape")
            await real_runs.until(lambda: pilot.app.screen is screen, pilot.pause)
        assert not is_live(run)
        await pilot.press("k")
        await real_runs.until(lambda: bool(pilot.app.screen.query(Input)), pilot.pause)
        pilot.app.screen.query_one(Input).value = "../bad"
        await pilot.press("enter")
        notes = pilot.app._notifications
        await real_runs.until(lambda: any(note.severity == "error" for note in notes), pilot.pause)


async def test_what_is_found_in_haystacks_stands_beside_the_loss(first: Path, root: Path) -> None:
    run = root / "runs" / "needles"
    shutil.copytree(first, run)
    maps = [{"lengths": [512, 8192], "right": [[n] * 5] * 2, "asked": [[8] * 5] * 2} for n in (1, 8)]
    lines = ({"step": 12 * n, "loss": 4.0 - n, "recall": recall} for n, recall in enumerate(maps))
    (run / "validation.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    async with opened(run, (60, 24)) as (pilot, screen):
        assert "right" not in drawn(screen.loss)
        for size in ((80, 24), (120, 36), (200, 60)):
            await pilot.resize_terminal(*size)
            await pilot.pause()
            text = drawn(screen.loss)
            assert "100% right after step 12" in text
            assert ("12% right before training" in text) == (screen.loss.size.height > 4)
            assert re.search(r" 8,192 ( .100){5}", text)
            assert max(len(line) for line in text.splitlines()) == screen.loss.size.width


async def test_samples_are_shown_step_by_step_and_prompt_by_prompt(first: Path, root: Path) -> None:
    """The newest ones as they come, until one looks at older ones; what a model writes commands no terminal."""
    run = root / "runs" / "sampled"
    shutil.copytree(first, run)

    def write(step: int, *texts: str) -> None:
        samples = [{"prompt": f"prompt {n}", "text": t, "tokens": 9, "ended": n == 1} for n, t in enumerate(texts)]
        with (run / "samples.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "samples": samples, "seconds": 1.0, "time": 0.0}) + "\n")

    async with opened(run, (120, 48)) as (pilot, screen):
        assert "samples" not in shown(screen)
        await pilot.press("n")
        assert any("generates no samples" in note.message for note in pilot.app._notifications)
        for step in (4, 8):
            write(step, f"first at {step}", f"second at {step} \x1b[31mred\nbelow")
        await real_runs.until(lambda: len(screen.data.samples) == 2 and "samples" in shown(screen), pilot.pause)
        pane = screen.pane("samples")
        assert re.match(r"step 8  prompt 1 of 2  9 tokens, cut off +1 older: \[", drawn(pane))
        await pilot.press("n")
        text = drawn(pane)
        assert "ended by the model" in text
        assert text.index("prompt 1\n" if "prompt 1\n" in text else "prompt 1 ") < text.index("second at 8")
        assert "\x1b" not in text
        assert any(line.startswith("below") for line in text.splitlines())
        await pilot.press("left_square_bracket")
        assert "second at 4" in drawn(pane)
        write(12, "first at 12", "second at 12")
        await real_runs.until(lambda: len(screen.data.samples) == 3 and not screen._unshown, pilot.pause)
        assert "second at 4" in drawn(pane)
        assert "2 newer: ]" in drawn(pane)
        await pilot.press("right_square_bracket", "right_square_bracket", "N")
        assert "first at 12" in drawn(pane)
        write(16, "first at 16", "second at 16")
        await real_runs.until(lambda: "first at 16" in drawn(pane), pilot.pause)
        await pilot.press("7", "7")
        await pilot.pause()
        assert shown(screen) == ["samples"]
        assert max(len(line) for line in drawn(pane).splitlines()) == pane.size.width
    (run / "samples.jsonl").write_text('{"step": 4}\n[]\n{"step": 5, "samples": [{"text": 7}]}\n')
    async with opened(run, (120, 48)) as (pilot, screen):
        await real_runs.until(lambda: len(screen.data.samples) == 1, pilot.pause)
        assert "samples.jsonl: 2 lines are damaged" in " ".join(screen.data.problems)
