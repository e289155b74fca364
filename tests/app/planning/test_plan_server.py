"""The plan server as a process: both answers, the newest request wins, errors are one line, nothing stays behind."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_process import PATIENCE_S, REPOSITORY, wait_until
from recipe_texts import tiny_recipe

from penstock.app.recipes.recipe import from_dict, load_recipe, to_dict

NO_BUDGETS = dict.fromkeys(("gpu", "ram", "nvme"))
RECIPE = tiny_recipe(model={"vocab_size": 300}, data={"source": "random", "path": None}, budgets=NO_BUDGETS)


class Server:
    """A server process, its answers read by a thread."""

    def __init__(self) -> None:
        command, pipe = [sys.executable, "-m", "penstock.app.planning.server"], subprocess.PIPE
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
    server = Server()
    yield server
    if server.process.poll() is None:
        server.close()


def asked(identity: int, machine: str | None = None, **sections: dict[str, Any]) -> dict[str, Any]:
    tree = to_dict(RECIPE)
    for section, values in sections.items():
        tree[section] |= values
    return {"id": identity, "recipe": tree, "machine": machine, "from_scratch": False}


def stopped_planner(server: Server, identity: int) -> int:
    """The process that plans a request of that id, which takes seconds, and is stopped now."""
    wait_until(lambda: not children(server.process.pid))
    server.send(asked(identity) | {"recipe": to_dict(load_recipe("text_small"))})
    wait_until(lambda: bool(children(server.process.pid)))
    (pid,) = children(server.process.pid)
    # It gives way once it is sure to end with the server.
    wait_until(lambda: os.getpriority(os.PRIO_PROCESS, pid) > os.getpriority(os.PRIO_PROCESS, server.process.pid))
    os.kill(pid, signal.SIGSTOP)
    return pid


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_plan_or_a_refusal_comes_first_and_its_advice_after(server: Server) -> None:
    server.send(asked(1, "rtx4090-64"))
    first, last = server.next(), server.next()
    assert (first["id"], first["done"], last["id"], last["done"]) == (1, False, 1, True)
    assert first["forecast"]["fits"]
    assert first["forecast"]["machine"]["name"] == "rtx4090-64"
    assert "best_change" not in first["forecast"]
    assert {"best_change", "compute_bound_tokens"} <= last["forecast"].keys()
    assert {name: last["forecast"][name] for name in first["forecast"]} == first["forecast"]
    server.send(asked(2, "rtx4090-64", budgets={"gpu": "16KiB"}))
    first, last = server.next(), server.next()
    assert (first["forecast"]["fits"], first["forecast"]["refusal"]["changes"]) == (False, [])
    assert last["forecast"]["refusal"]["changes"]
    assert len(os.listdir(f"/proc/{server.process.pid}/task")) <= 2, "nothing is computed in the server itself"


def test_the_newest_request_ends_the_one_under_way(server: Server) -> None:
    busy = stopped_planner(server, 3)
    server.send(asked(4))
    answer = server.last()
    assert (answer["id"], answer["forecast"]["recipe"]) == (4, "tiny")
    assert not Path(f"/proc/{busy}").exists()
    server.send(*(asked(number) for number in range(10, 15)))  # of several that wait the last counts
    assert server.last()["id"] == 14


TO_MEND: list[tuple[dict[str, Any], str]] = [
    ({"train": {"steps": 0}}, "train.steps: 0 must be at least 1"), ({"train": {"stpes": 3}}, "train.stpes"),
    ({"model": {"path": "/nowhere/at/all", "num_layers": None}}, "/nowhere/at/all"),
    ({"model": {"model_type": "no_such"}}, "no_such"), ({"machine": "gh200-48"}, "did you mean gh200-480"),
    ({"data": {"source": "text", "path": "/nowhere/at/all"}}, "/nowhere/at/all"),
    ({"budgets": {"ram": "300TiB"}, "machine": "rtx4090-64"}, "machine rtx4090-64 has"),
]  # fmt: skip


def test_what_the_user_has_to_mend_is_no_request_or_goes_wrong_is_answered_in_one_line(server: Server) -> None:
    for change, part in TO_MEND:
        server.send(asked(20, **change))
        answer = server.next()
        assert answer["id"] == 20
        assert part in answer["error"]
    for line in ("{", "[1]", "null", '{"recipe": {}}'):
        server.send(line)
        assert "not a request" in server.next()["error"]
    server.send({"id": 22, "recipe": 5})
    answer = server.next()
    assert answer["id"] == 22
    assert "\n" not in answer["error"]


def test_a_planner_that_dies_is_told(server: Server) -> None:
    os.kill(stopped_planner(server, 23), signal.SIGKILL)
    answer = server.last()
    assert answer["id"] == 23
    assert "signal 9" in answer["error"]
    server.send(asked(25, model={"path": "/nowhere/at/all"}) | {"from_scratch": True})
    answer = server.last()
    assert answer["forecast"]["fits"]
    assert from_dict(answer["recipe"]).model.path is None, "random weights in place of a folder that is not there"
    assert "note" not in answer["forecast"]


@pytest.mark.parametrize("how", ["killed", pytest.param("closed", marks=pytest.mark.long)])
def test_no_process_stays_behind(server: Server, how: str) -> None:
    """The last ones of this server."""
    server = server if server.process.poll() is None else Server()
    busy = stopped_planner(server, 1)
    if how == "closed":
        assert server.close() == 0
    else:
        server.process.kill()
        server.process.wait(PATIENCE_S)
    wait_until(lambda: not Path(f"/proc/{busy}").exists())
