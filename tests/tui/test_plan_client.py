"""The client of the plan server: the newest request wins, a dead server is started once more and that is said."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import real_runs
from cli_process import json_lines

from penstock.engine.config import Recipe, TrainConfig
from penstock.tui.data import plan_client, processes
from penstock.tui.data.plan_client import PlanClient, PlanState

FAKE = Path(__file__).parents[1] / "support" / "fake_planner.py"
WAIT_S = 60


class Watched(PlanClient):
    """A client that remembers its states."""

    def __init__(self, folder: Path) -> None:
        self.seen: list[PlanState] = []
        self.log = folder / "log"
        super().__init__(folder, lambda: self.seen.append(self.state))

    async def until(self, condition: Callable[[PlanState], bool]) -> PlanState:
        await real_runs.until(lambda: condition(self.state))
        return self.state

    async def done(self, *steps: int) -> PlanState:
        """Once there is a plan, of so many steps if they are given."""
        for asked in steps:
            self.request(recipe(asked), None)
        return await self.until(lambda state: state.phase == "done")

    async def given_up(self) -> str:
        """What is said once no server is started again."""
        return (await self.until(lambda state: "stopped again" in (state.trouble or ""))).trouble or ""

    num_starts = property(lambda self: len(self.log.read_text().splitlines()))
    requests = property(lambda self: json_lines(self.log.with_suffix(".requests")))


@pytest.fixture
async def client(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Watched]:
    how, debounce_s = getattr(request, "param", ("well", 0.0))
    client = Watched(tmp_path)
    monkeypatch.setattr(plan_client, "SERVER", (sys.executable, str(FAKE), how, str(client.log)))
    monkeypatch.setattr(plan_client, "DEBOUNCE_S", debounce_s)
    yield client
    await client.close()


def recipe(steps: int) -> Recipe:
    return Recipe(name="x", train=TrainConfig(steps=steps))


async def test_phases_of_a_plan_and_a_request_that_kills_the_server_is_tried_once_more(client: Watched) -> None:
    client.request(recipe(5), "gh200-480", from_scratch=True)
    state = await client.until(lambda state: state.phase == "done")
    assert [seen.phase for seen in client.seen] == ["starting", "planning", "advising", "done"]
    assert state.forecast == {"fits": True, "recipe": "x", "steps": 5, "best_change": None}
    assert client.requests == [[5, "gh200-480", True]]
    client.request(recipe(666), None)
    assert "exit code 3" in await client.given_up()
    assert [request[0] for request in client.requests[1:]] == [666, 666]
    state = await client.done(5)
    assert (state.trouble, state.error) == (None, None)


@pytest.mark.parametrize("client", [("well", 0.05)], indirect=True)
async def test_the_newest_request_wins_and_the_older_plan_is_stale_meanwhile(client: Watched) -> None:
    await client.done(5)
    for steps in (6, 7, 8):
        client.request(recipe(steps), None)
    assert (client.state.stale, client.state.forecast["steps"]) == (True, 5)
    state = await client.done()
    assert (state.stale, state.forecast["steps"]) == (False, 8)
    assert [request[0] for request in client.requests] == [5, 8]


@pytest.mark.parametrize("client", [("dies once", 0.0)], indirect=True)
async def test_a_server_that_dies_is_started_again_once(client: Watched) -> None:
    state = await client.done(5)
    assert (state.forecast is not None, state.trouble) == (True, None)
    told = [seen.trouble or "" for seen in client.seen]
    assert any("MemoryError: no room" in trouble and "restarting" in trouble for trouble in told)


@pytest.mark.parametrize("client", [("dies", 0.0)], indirect=True)
async def test_a_server_that_dies_twice_is_given_up_until_asked(
    client: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = processes.read_lines

    async def late(stream: asyncio.StreamReader, take: Callable[[bytes], None]) -> None:
        """The reason is reported even if it is read after the end."""
        await asyncio.sleep(0.2 * (take != client._take))
        await read(stream, take)

    monkeypatch.setattr(processes, "read_lines", late)
    client.request(recipe(5), None)
    assert "MemoryError: no room" in await client.given_up()
    assert client.num_starts == 2
    client.retry()
    await client.until(lambda state: state.trouble is None)
    await client.given_up()
    assert client.num_starts == 4


async def test_closing_ends_the_process_a_request_starts_another_and_without_python_there_is_no_plan(
    client: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = PlanClient(tmp_path, lambda: None)
    with monkeypatch.context() as patch:
        patch.setattr(plan_client, "SERVER", ("/nowhere/python",))
        state = await asyncio.wait_for(without.plan(recipe(5), None), WAIT_S)
    assert state is not None
    assert "nowhere" in (state.trouble or "")
    await without.close()
    state = await asyncio.wait_for(client.plan(recipe(5), None), WAIT_S)
    assert state.forecast is not None
    waiting = asyncio.create_task(client.plan(recipe(6), None))
    await asyncio.sleep(0)
    client.forget()
    assert (await waiting, client.state.phase) == (None, "idle")
    process = client._process
    assert process is not None
    await client.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
    await client.close()
    assert await client.plan(recipe(6), None) is not None
    assert client.num_starts == 2
