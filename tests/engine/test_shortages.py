"""No memory, threads or open files left in the middle of a step: one message with op and generation, nothing lost."""

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from used_up import SHORTAGES, no_thread

from penstock.engine.runtime.executor import Executor
from penstock.engine.runtime.runtime import Runtime
from penstock.engine.schedule.actions import LANES
from penstock.engine.schedule.ops import Op
from penstock.storage.errors import UserError


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> str:
    return trained(tmp_path_factory.mktemp("straight"), tiny.Silent())


def trained(folder: Path, observer: tiny.Silent, *, resume: bool = False) -> str:
    train = tiny.training(steps=3, global_batch_size=1, chunk_tokens=24)
    tiny.train_run(folder, observer, resume=resume, train=train)
    return tiny.digest_of(folder)


@pytest.mark.parametrize(("name", "moment"), [(name, 60 + 90 * i) for i, name in enumerate(SHORTAGES)])
def test_a_step_in_which_something_is_used_up(tmp_path: Path, straight: str, name: str, moment: int) -> None:
    cause, message = SHORTAGES[name]
    perform, lock, seen = Runtime.perform, threading.Lock(), 0

    def short(self: Runtime, op: Op) -> Any:
        nonlocal seen
        with lock:
            seen += 1
            if seen == moment:
                cause()
        return perform(self, op)

    observer = tiny.Silent()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runtime, "perform", short)
        with pytest.raises(UserError, match=rf"in op \w+ \S+ .*: {message}") as caught:
            trained(tmp_path, observer)
    intact = re.search(r"Generation \d+ \(step \d\) is intact: fix the cause, then resume", str(caught.value))
    assert (intact is not None) == bool(observer.metrics), "a run without a step has nothing to resume from"
    assert trained(tmp_path, tiny.Silent(), resume=True) == straight


@pytest.mark.parametrize("lane", [LANES[0], LANES[-1]])
def test_a_lane_whose_thread_cannot_be_started_leaves_none_behind(lane: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start, before = threading.Thread.start, threading.active_count()

    def limited(thread: threading.Thread) -> None:
        if thread.name == lane:
            no_thread()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        Executor(lambda op: None, torch.device("cpu"))
    assert threading.active_count() == before
