"""The plan server as a process: both answers, the newest request wins, errors are one line, nothing stays behind."""

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_process import PATIENCE_S, REPOSITORY, wait_until

from penstock.app.recipe import from_dict, load_recipe, to_dict

RECIPES = REPOSITORY / "recipes"


class Server:
    """A server process, its answers read by a thread."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "penstock.app.plan_server"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, cwd=REPOSITORY, stdin=pipe, stdout=pipe, text=True)
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        assert self.next() == {"ready": True}

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._answers.put(json.loads(line))

    def send(self, *requests: Any) -> None:
        assert self.process.stdin is not None
        lines = [request if isinstance(request, str) else json.dumps(request) for request in requests]
        self.process.stdin.write("".join(line + "\n" for line in lines))
        self.process.stdin.flush()

    def next(self) -> dict[str, Any]:
        return self._answers.get(timeout=PATIENCE_S)

    def last(self) -> dict[str, Any]:
        """The answer that ends a request."""
        while True:
            answer = self.next()
            if answer.get("done") or "error" in answer:
                return answer

    def close(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(PATIENCE_S)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = Server()
    yield running
    if running.process.poll() is None:
        running.close()


def asked(identity: int, name: str, machine: str | None = None, **sections: dict[str, Any]) -> dict[str, Any]:
    tree = to_dict(load_recipe(RECIPES / name))
    for section, values in sections.items():
        tree[section] |= values
    return {"id": identity, "recipe": tree, "machine": machine, "from_scratch": False}


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize(("name", "machine"), [("text_small.py", None), ("text_small.py", "rtx4090-64")])
def test_a_plan_comes_first_and_its_advice_after(server: Server, name: str, machine: str | None) -> None:
    server.send(asked(1, name, machine))
    first, last = server.next(), server.next()
    assert (first["id"], first["done"], last["id"], last["done"]) == (1, False, 1, True)
    assert first["forecast"]["fits"]
    assert "best_change" not in first["forecast"]
    assert {"best_change", "compute_bound_tokens"} <= last["forecast"].keys()
    assert {name: last["forecast"][name] for name in first["forecast"]} == first["forecast"]
    if machine:
        assert first["forecast"]["machine"]["name"] == machine


def test_a_refusal_comes_first_and_its_changes_after(server: Server) -> None:
    server.send(asked(2, "qwen_1_5b_4gib.py", "rtx4090-64", budgets={"gpu": "1GiB"}))
    first, last = server.next(), server.next()
    assert not first["forecast"]["fits"]
    assert first["forecast"]["refusal"]["changes"] == []
    assert last["forecast"]["refusal"]["changes"]


def test_the_newest_request_ends_the_one_under_way(server: Server) -> None:
    server.send(asked(3, "120b_gh200.py", "rtx4090-64"))  # half a minute of advice
    assert not server.next()["done"]
    busy = children(server.process.pid)
    server.send(asked(4, "text_small.py"))
    answer = server.last()
    assert answer["id"] == 4
    assert answer["forecast"]["recipe"] == "text_small"
    assert busy
    assert all(not Path(f"/proc/{pid}").exists() for pid in busy)


def test_of_several_waiting_requests_the_last_counts(server: Server) -> None:
    server.send(*(asked(number, "text_small.py") for number in range(10, 15)))
    assert server.last()["id"] == 14


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"train": {"steps": 0}}, "train.steps: 0 must be at least 1"),
        ({"train": {"stpes": 3}}, "train.stpes"),
        ({"model": {"path": "/nowhere/at/all", "num_layers": None}}, "/nowhere/at/all"),
        ({"model": {"model_type": "no_such"}}, "no_such"),
        ({"data": {"source": "text", "path": "/nowhere/at/all"}}, "/nowhere/at/all"),
        ({"budgets": {"ram": "300TiB"}, "machine": "rtx4090-64"}, "machine rtx4090-64 has"),
        ({"machine": "gh200-48"}, "did you mean gh200-480"),
    ],
)
def test_what_the_user_has_to_mend_is_an_error(server: Server, change: dict[str, Any], part: str) -> None:
    server.send(asked(20, "text_small.py", **change))
    answer = server.next()
    assert answer["id"] == 20
    assert part in answer["error"]


@pytest.mark.parametrize("line", ["{", "[1]", "null", '{"recipe": {}}'])
def test_what_is_no_request_is_answered(server: Server, line: str) -> None:
    server.send(line)
    assert "not a request" in server.next()["error"]


def test_anything_else_that_goes_wrong_is_one_line(server: Server) -> None:
    server.send({"id": 22, "recipe": 5})
    answer = server.next()
    assert answer["id"] == 22
    assert "\n" not in answer["error"]


def test_a_planner_that_dies_is_told(server: Server) -> None:
    server.send(asked(23, "120b_gh200.py", "rtx4090-64"))
    assert not server.next()["done"]
    for pid in children(server.process.pid):
        os.kill(pid, 9)
    answer = server.last()
    assert answer["id"] == 23
    assert "signal 9" in answer["error"]
    server.send(asked(24, "text_small.py"))
    assert server.last()["forecast"]["fits"]


def test_random_weights_in_place_of_a_folder_that_is_not_there(server: Server) -> None:
    server.send(asked(25, "8b_8k.py", "h100-pcie-512") | {"from_scratch": True})
    answer = server.last()
    assert from_dict(answer["recipe"]).model.path is None
    assert "note" not in answer["forecast"]


def test_nothing_is_computed_in_the_server_itself(server: Server) -> None:
    assert len(os.listdir(f"/proc/{server.process.pid}/task")) <= 2


@pytest.mark.parametrize("how", [pytest.param("closed", marks=pytest.mark.long), "killed"])
def test_no_process_stays_behind(how: str) -> None:
    running = Server()
    running.send(asked(1, "120b_gh200.py", "rtx4090-64"))
    wait_until(lambda: bool(children(running.process.pid)))
    busy = children(running.process.pid)
    if how == "closed":
        assert running.close() == 0
    else:
        running.process.kill()
        running.process.wait(PATIENCE_S)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in busy))
