import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from cli_process import json_lines
from seen import append, notices, press, running, until
from textual.pilot import Pilot
from textual.widgets import Input

from penstock.app.lanes import LANES
from penstock.tui.screens.timeline import TimelineScreen
from penstock.tui.widgets.lines import LineWidget


@asynccontextmanager
async def timeline(
    run: Path, step: int | None = None, size: tuple[int, int] = (120, 36)
) -> AsyncIterator[tuple[TimelineScreen, Pilot[None]]]:
    async with running(run.parent.parent, size) as (app, pilot):
        screen = TimelineScreen(run, step)
        await app.push_screen(screen)
        await until(pilot, lambda: screen.step is not None or screen.said != "looking for steps")
        if step is not None:
            await at_step(pilot, screen, step)
        yield screen, pilot


async def at_step(pilot: Pilot[None], screen: TimelineScreen, step: int) -> None:
    await until(pilot, lambda: screen.step is not None and screen.step.spans.window.step == step)
    await pilot.pause()


def text_of(screen: TimelineScreen, name: str) -> str:
    pane = screen.query_one(f"#{name}", LineWidget)
    return "\n".join(pane.render_line(y).text.rstrip() for y in range(pane.size.height))


async def answer(pilot: Pilot[None], key: str, text: str) -> None:
    await pilot.press(key)
    await until(pilot, lambda: bool(pilot.app.screen.query(Input)))
    pilot.app.screen.query_one(Input).value = text
    await press(pilot, "enter")


async def test_the_last_step_of_a_real_run(first: Path) -> None:
    async with timeline(first) as (screen, pilot):
        await at_step(pilot, screen, 12)
        assert screen.lane_view.border_title == "first  step 12 of 12"
        assert [part for part in (*LANES, "bound by") if part not in text_of(screen, "lanes")] == []
        assert screen.step.analysis.recorded
        for keys in ([], ["down"] * 4):
            await pilot.press(*keys)
            idle = text_of(screen, "idle")
            assert idle.startswith("critical path")
            assert idle.splitlines()[1].startswith("compute     idle ")
            assert "critical path, in order" in idle
            assert ("d2h         idle" in idle) == bool(keys)


async def test_every_step_can_be_picked(first: Path) -> None:
    async with timeline(first, 3) as (screen, pilot):
        for step in (2, 1):
            await pilot.press("left_square_bracket")
            await at_step(pilot, screen, step)
        await press(pilot, "left_square_bracket")
        assert "steps 1 to 12" in notices(pilot)
        await pilot.press(*["right_square_bracket"] * 3)
        await at_step(pilot, screen, 4)
        await answer(pilot, "g", "9")
        await at_step(pilot, screen, 9)
        await answer(pilot, "g", "90")
        assert "90: the run has steps 1 to 12" in notices(pilot)
        await answer(pilot, "g", "last")
        await at_step(pilot, screen, 12)
        await pilot.press("g")
        await press(pilot, "escape")
        assert screen.step.spans.window.step == 12


async def test_ops_are_selected_and_told(first: Path) -> None:
    async with timeline(first, 5, (160, 50)) as (screen, pilot):
        assert "no op selected" in text_of(screen, "inspector")
        await pilot.press("b")
        assert "select an op first" in notices(pilot)
        await pilot.press("down", "down", "down", "full_stop")
        selected = screen.lane_view.selected
        assert selected.lane == "compute"
        assert selected.op in text_of(screen, "inspector")
        assert "lane     compute" in text_of(screen, "inspector")
        assert str(screen.query_one("#ops").border_title).startswith("ops of compute (")
        assert selected.op in text_of(screen, "ops")
        await pilot.press("n", "comma")
        assert screen.lane_view.selected == selected
        await pilot.press("w", "a", "d", "s", "plus", "minus", "left", "right", "f")
        assert screen.lane_view.mode == "step"


async def test_walking_the_critical_path_and_search(first: Path) -> None:
    async with timeline(first, 7) as (screen, pilot):
        view, rows = screen.step.spans.view, screen.step.analysis.path_rows

        async def selects(key: str, row: int) -> None:
            await pilot.press(key)
            assert screen.lane_view.selected == view.span(row)

        assert len(rows) > 3
        for row in rows[:3]:
            await selects("c", row)
        assert "critical" in text_of(screen, "inspector")
        await selects("b", rows[1])
        await answer(pilot, "slash", "layer_backward layers.1")
        found = [int(row) for row in screen.found]
        assert len(found) > 1
        assert {view.span(row)[1:3] for row in found} == {("layer_backward", "layers.1")}
        assert screen.lane_view.selected == view.span(found[0])
        await selects("n", found[1])
        await selects("N", found[0])
        await answer(pilot, "slash", "no such op")
        assert "no op of this step matches no such op" in notices(pilot)
        await pilot.press("slash")
        await press(pilot, "escape")
        assert screen.found is None


async def test_the_forecast_beside_the_step(first: Path) -> None:
    async with timeline(first, 5) as (screen, pilot):
        for shown in (True, False):
            await press(pilot, "p")
            assert (" predicted" in text_of(screen, "lanes")) == shown
    plan = json.loads((first / "plan.json").read_text())
    (first / "plan.json").write_text(json.dumps(plan | {"step_s": 1000.0}))
    async with timeline(first, 5) as (screen, pilot):
        assert "some layers" not in text_of(screen, "lanes")
        await press(pilot, "p")
        assert "forecast of some layers only" in text_of(screen, "lanes")
    (first / "predicted.jsonl").unlink()
    async with timeline(first, 5) as (screen, pilot):
        await pilot.press("p")
        assert "no predicted.jsonl" in notices(pilot)


async def test_export_of_a_step_and_of_the_run(first: Path, tmp_path: Path) -> None:
    step, run = tmp_path / "step.json", first.parent.parent / "run.json"
    async with timeline(first, 5) as (screen, pilot):
        await answer(pilot, "x", str(step))
        await until(pilot, step.exists)
        await answer(pilot, "X", "run.json")  # relative to the root
        await until(pilot, run.exists)
        await answer(pilot, "x", str(step))
        await until(pilot, lambda: not isinstance(pilot.app.screen, TimelineScreen))
        await pilot.press("n")  # do not replace
        await answer(pilot, "x", str(tmp_path / "none" / "step.json"))
        await until(pilot, lambda: "cannot be written" in notices(pilot))
        window, view = screen.step.spans.window, screen.step.spans.view
    ops, whole = ([e for e in json.loads(p.read_text())["traceEvents"] if e["ph"] == "X"] for p in (step, run))
    assert len(ops) == len(view.rows_between(window.start_s, window.end_s))
    assert any(event["name"].startswith("clip") for event in ops)
    assert len(whole) == len(json_lines(first / "spans.jsonl"))


async def test_a_live_run_gets_further_steps(first: Path) -> None:
    lines = (first / "spans.jsonl").read_text().splitlines(keepends=True)
    ends = [i for i, line in enumerate(lines) if '"op":"clip"' in line]
    (first / "spans.jsonl").write_text("".join(lines[: ends[3] + 1]) + lines[ends[3] + 1][:30])
    async with timeline(first) as (screen, pilot):
        await at_step(pilot, screen, 4)
        (first / "spans.jsonl").write_text("".join(lines[: ends[7] + 1]))
        await until(pilot, lambda: "of 8" in str(screen.lane_view.border_title))
        await pilot.press("right_square_bracket")
        await at_step(pilot, screen, 5)


async def test_a_run_of_before_claims_nothing(first: Path) -> None:
    lines = json_lines(first / "spans.jsonl")
    (first / "spans.jsonl").unlink()
    append(first / "spans.jsonl", *({k: v for k, v in line.items() if k not in ("id", "waited")} for line in lines))
    async with timeline(first, 5) as (screen, pilot):
        idle = text_of(screen, "idle")
        assert "did not record what its ops waited for" in idle
        assert "waited for" not in idle.replace("what its ops waited for", "")
        assert "in order" not in idle
        await pilot.press("c", "full_stop", "b")
        assert notices(pilot).count("did not record") >= 2


async def test_missing_torn_and_vanishing_runs(first: Path) -> None:
    async with timeline(first.parent / "none") as (screen, pilot):
        await until(pilot, lambda: "gone" in screen.said)
        await press(pilot, "left_square_bracket", "g", "slash", "x", "full_stop", "c", "p", "f", "w")
        assert isinstance(pilot.app.screen, TimelineScreen)
    async with timeline(first, 5) as (screen, pilot):
        first.rename(first.with_name("aside"))  # a step on show outlives its directory
        await until(pilot, lambda: "gone" in screen.said)
        await pilot.press("full_stop", "c", "right_square_bracket", "x")
        assert screen.step is not None
    first.with_name("aside").rename(first)
    for content, said in (("junk\n[1]\n\x00", "no step has finished"), (None, "no ops yet")):
        (first / "spans.jsonl").unlink()
        if content is not None:
            (first / "spans.jsonl").write_text(content)
        async with timeline(first) as (screen, pilot):
            await until(pilot, lambda screen=screen, said=said: said in text_of(screen, "idle"))  # type: ignore[misc]
