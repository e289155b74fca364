"""What stops a run says what failed and where, and leaves the last generation as it was. The guard stops a run in time,
names the op, and costs nothing between two looks."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from some_ops import an_op

from penstock.engine.machine.limits import GIB, FreeMemory
from penstock.engine.plan.plan import Plan
from penstock.engine.runtime.failures import DivergedError, describe, explain, first_not_finite
from penstock.engine.runtime.guard import INTERVAL_S, MemoryGuard, hard_reserve
from penstock.engine.runtime.runtime import Runtime
from penstock.engine.runtime.views import hidden_slots
from penstock.engine.schedule.actions import ACTIONS, LAYER_FORWARD, LOAD_WEIGHTS_PART, NORM
from penstock.engine.schedule.ops import WHOLE, Op
from penstock.engine.train import train_step
from penstock.storage.files.errors import UserError

NAN = float("nan")
OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total of 23.5")
LOST = torch.AcceleratorError("CUDA error: unspecified launch failure\nCUDA kernel errors might be reported later")
CUBLAS = RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(handle, ...)`")
OP = an_op(7, LAYER_FORWARD, block="layers.3", index=1, step=5)


@pytest.mark.parametrize(("action", "block", "index", "message"), [
    ("embed_forward", "embed", 2, r"the output of embed\[2\]"),
    ("layer_forward", "layers.1", 4, r"the output of layers.1\[4\] \(micro-batch 1, tokens 16 to 32\)"),
    ("head", "head", 3, r"the gradient of the input of head\[3\]"),
    ("layer_backward", "layers.2", 1, r"the gradient of the input of layers.2\[1\]"),
])  # fmt: skip
def test_a_kernel_that_returns_nan_is_named(tmp_path: Path, action: str, block: str, index: int, message: str) -> None:
    """NaN in one element of one op's result, which then spreads; clip names where it came up."""
    with tiny.session(tmp_path) as session:
        tiny.steps(session, 1)
        before = tiny.digest(session.store)
        method = session.runtime.handlers[ACTIONS[action]]

        def poisoned(op: Op) -> None:
            method(op)
            if (op.block, op.index) == (block, index):
                hidden_slots(session.plan, session.gpu, torch.float32)[op.slots["out"]][3, 5] = NAN

        session.runtime.handlers[ACTIONS[action]] = poisoned
        with pytest.raises(DivergedError, match=rf"step 2: {message}.* is not finite"):
            train_step(session)
    assert tiny.digest_of(tmp_path) == before


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    with tiny.session(tmp_path_factory.mktemp("run")) as session:
        return session.plan


def test_the_first_in_the_order_of_the_passes_is_named(plan: Plan) -> None:
    def name(**places: Any) -> str | None:
        parts = {
            "losses": torch.zeros(len(plan.chunks)),
            "squares": torch.zeros(len(plan.buffers)),
            "marks": torch.zeros(2, len(plan.blocks), len(plan.chunks)),
        }
        for part, found_at in places.items():
            for place in found_at if isinstance(found_at[0], tuple) else [found_at]:
                parts[part][place] = NAN if isinstance(found_at[0], tuple) else float("inf")
        found = first_not_finite(plan, **parts)
        return found and found.split(" (")[0]

    assert name() is None
    assert name(squares=(1,)) == "the gradient of layers.0"
    assert name(squares=(1,), marks=(1, 2, 0)) == "the gradient of the input of layers.1[0]"
    assert name(losses=(2,), marks=(1, 2, 0)) == "the loss of head[2]"
    assert name(losses=(2,), marks=(0, 3, 1)) == "the output of layers.2[1]"
    backward = ((1, 1, 0), (1, 2, 1), (1, 2, 4))
    assert name(marks=((0, 1, 3), (0, 2, 0), *backward)) == "the output of layers.0[3]"
    assert name(marks=backward) == "the gradient of the input of layers.1[4]"


def fail_in(monkeypatch: pytest.MonkeyPatch, action: str, step: int, error: Exception) -> None:
    """Let the ops of an action raise `error` in a step, as torch does from inside a kernel call."""
    perform = Runtime.perform

    def failing(self: Runtime, op: Op) -> Any:
        if op.action.name == action and op.step == step and op.index == 1:
            raise error
        return perform(self, op)

    monkeypatch.setattr(Runtime, "perform", failing)


def run(folder: Path, observer: tiny.Silent, *, resume: bool = False) -> None:
    sections = {"model": tiny.model(num_layers=1), "train": tiny.training()}
    tiny.train_run(folder, observer, resume=resume, storage=tiny.storage(checkpoint_every=2), **sections)


def test_what_the_gpu_raises_is_explained_and_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, rest = tiny.Silent(), tiny.Silent()
    run(tmp_path / "whole", whole)
    with monkeypatch.context() as patch:
        fail_in(patch, "layer_forward", 4, LOST)
        with pytest.raises(UserError) as caught:
            run(tmp_path / "failed", tiny.Silent())
    words = ("unspecified launch failure", "Xid", "on another one", "[1] (micro-batch 0, tokens 16 to 32) of step 4")
    for part in ("the GPU failed in op layer_forward layers.0", *words):
        assert part in str(caught.value)
    intact = re.search(r"Generation \d+ \(step (\d)\) is intact: fix the cause, then resume", str(caught.value))
    step = int(intact[1])  # step 2's commit may have been on its way, or dropped
    assert step in (0, 2)
    run(tmp_path / "failed", rest, resume=True)
    assert [m.loss for m in rest.metrics] == [m.loss for m in whole.metrics][step:]


def test_a_bug_is_not_taken_for_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path / "good", tiny.Silent())  # its self-check is remembered
    fail_in(monkeypatch, "layer_forward", 1, RuntimeError("shapes do not match"))
    with pytest.raises(RuntimeError, match="shapes do not match") as caught:
        run(tmp_path / "bad", tiny.Silent())
    assert not isinstance(caught.value, UserError)
    assert any(entry.name == "failing" for entry in caught.traceback), "with its own traceback"
    assert "lane" in caught.value.__notes__[0]


def test_an_op_is_described_by_its_tokens(plan: Plan) -> None:
    part = an_op(0, LOAD_WEIGHTS_PART, block="layers.1", index=3, step=7)
    assert describe(part, plan) == "load_weights_part layers.1[3] of step 7"
    norm = an_op(0, NORM, block="layers.1", index=WHOLE, step=7)
    assert describe(norm, plan) == "norm layers.1 of step 7"
    assert "what surrounds the ops" in str(explain(LOST, None, plan))
    said = "the GPU failed in op norm layers.1 of step 7.*CUBLAS_STATUS_EXECUTION_FAILED"
    assert re.search(said, str(explain(CUBLAS, norm, plan)))
    said = str(explain(OUT_OF_MEMORY, an_op(0, LAYER_FORWARD, block="layers.1", index=1, step=7), plan))
    for part in ("budgets.gpu", "2.50 GiB", "layer_forward layers.1[1]", "budget of 1,073,741,824"):
        assert part in said
    assert explain(ValueError("CUDA error"), None, plan) is None


def test_a_failure_on_the_way_out_of_an_op_does_not_hold_up_the_end(tmp_path: Path) -> None:
    """Several lanes fail at once; `close` returns and the first failure is what is raised."""
    with tiny.session(tmp_path, ram=tiny.FLOOR) as session:

        def broken(op: Op) -> None:
            raise CUBLAS if op.lane == "compute" else LOST

        tiny.before_ops(session, broken)
        with pytest.raises(RuntimeError, match="CUDA error"):
            train_step(session)
        session.executor.close()
        assert session.executor.failed_op is not None


class Memory:
    def __init__(self, free_bytes: int = 8 * GIB) -> None:
        self.free_bytes = free_bytes
        self.now = 100.0
        self.reads = 0

    def read(self) -> FreeMemory:
        self.reads += 1
        return FreeMemory(self.free_bytes, 16 * GIB, "this machine's memory")

    def guard(self, plan: Plan) -> MemoryGuard:
        return MemoryGuard(plan, 3 * GIB, read=self.read, clock=lambda: self.now)


def test_stops_below_the_reserve(plan: Plan) -> None:
    memory = Memory()
    guard = memory.guard(plan)
    guard.check(OP)
    memory.free_bytes = hard_reserve(16 * GIB) - 1
    guard.check(OP)  # too soon to look again
    memory.now += INTERVAL_S
    with pytest.raises(UserError) as caught:
        guard.check(OP)
    free, takes = f"{memory.free_bytes:,} bytes are free", f"The plan takes {3 * GIB:,} bytes"
    for part in ("op layer_forward layers.3[1]", "of step 5", free, takes, "this machine's memory"):
        assert part in str(caught.value)


@given(st.lists(st.floats(0, 0.2), max_size=50))
def test_looks_once_in_an_interval(plan: Plan, waits: list[float]) -> None:
    memory = Memory()
    guard = memory.guard(plan)
    for wait in waits:
        memory.now += wait
        guard.check(OP)
    assert memory.reads <= sum(waits) / INTERVAL_S + 1


def test_many_threads_look_once(plan: Plan) -> None:
    memory, start = Memory(), threading.Barrier(8)
    guard = memory.guard(plan)

    def lane(_: int) -> None:
        start.wait()
        for _ in range(100):
            guard.check(OP)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lane, range(8)))
    assert memory.reads == 1


def test_reads_this_machine_and_reserves_by_hand(plan: Plan) -> None:
    MemoryGuard(plan, GIB).check(OP)
    for total, reserve in ((1, 1 / 8), (16, 1 / 2), (128, 1.28), (1536, 4)):
        assert hard_reserve(total * GIB) == pytest.approx(reserve * GIB, abs=1)
