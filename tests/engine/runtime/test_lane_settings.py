"""What is compiled or timed before the first step sees what the run sees: settings, threads, cores."""

import logging
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from some_ops import an_op

from penstock.engine.optim.adamw import AdamW, scalars
from penstock.engine.optim.base import UpdateRange
from penstock.engine.runtime.executor import Executor
from penstock.engine.runtime.lanes import RECOMPILE_LIMIT, SWITCH_INTERVAL_S, EagerFallbacks, Lanes
from penstock.engine.schedule.actions import LANES
from penstock.engine.schedule.ops import Op
from penstock.storage.layout import FlatLayout

CPU = torch.device("cpu")


def seen() -> dict[str, Any]:
    """What a thread sees of torch's settings, which since torch 2.12 are a thread's own."""
    return {
        "recompile_limit": torch._dynamo.config.recompile_limit,
        "deterministic": torch._inductor.config.deterministic,
        "backward with its forward": torch._functorch.config.force_non_lazy_backward_lowering,
        "one break a layer": torch._dynamo.config.nested_graph_breaks,
        "deterministic kernels": torch.are_deterministic_algorithms_enabled(),
        # Else autograd has a thread of its own on a GPU, with settings, cores and a workspace of its own.
        "a backward where it is asked for": not torch.autograd.is_multithreading_enabled(),
    }


def test_every_lane_sees_the_settings_of_the_run() -> None:
    before, interval_s = seen(), sys.getswitchinterval()
    lanes = Lanes.open(CPU, 1 << 30, compiled=True, deterministic=True)
    try:
        wanted = dict.fromkeys(before, True) | {"recompile_limit": RECOMPILE_LIMIT}
        assert {lane: lanes.executor.call(lane, seen) for lane in LANES} == dict.fromkeys(LANES, wanted)
        assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S)
    finally:
        lanes.close()
    assert seen() == before
    assert sys.getswitchinterval() == pytest.approx(interval_s)


def test_a_call_runs_on_its_lane_behind_its_ops() -> None:
    """And behind a failing op it gets that one's failure."""
    done: list[str] = []
    gate = threading.Event()

    def perform(op: Op) -> None:
        assert gate.wait(300)
        done.append(threading.current_thread().name)

    executor = Executor(perform, CPU)
    executor.submit([an_op(0, "d2h")])
    threading.Timer(0.05, gate.set).start()
    assert executor.call("d2h", lambda: (list(done), threading.current_thread().name)) == (["d2h"], "d2h")
    with pytest.raises(KeyError, match="mine"):
        executor.call("d2h", lambda: {}["mine"])
    assert executor.call("d2h", lambda: 7) == 7, "a lane goes on after a call that failed"
    executor.close()

    def failing(op: Op) -> None:
        assert gate.wait(300)
        raise ValueError("the op's own")

    gate.clear()
    executor = Executor(failing, CPU)
    executor.submit([an_op(0, "h2d")])
    threading.Timer(0.05, gate.set).start()
    with pytest.raises(ValueError, match="the op's own"):
        executor.call("h2d", lambda: 1)
    executor.close()


@pytest.mark.long
def test_an_update_leaves_the_interpreter_to_others() -> None:
    """Beside a GPU other lanes launch kernels while it runs; and its bits are those of the update that does not."""
    values = scalars(tiny.training(), 1e-2, 3, 0.7, CPU)
    numel, results = 1 << 24, []
    for free_threaded in (False, True):
        generator = torch.Generator().manual_seed(0)
        state = [torch.rand(numel, generator=generator) for _ in range(4)]
        kinds = dict(zip(("master", "exp_avg", "exp_avg_sq"), state, strict=False))
        where = UpdateRange(FlatLayout((), {}, numel, numel), 0, numel)
        weights = torch.empty(numel, dtype=torch.bfloat16)
        adamw = AdamW("compiled", free_threaded=free_threaded)

        def update(adamw: AdamW = adamw, args: Any = (kinds, state[3], weights, where, values)) -> None:
            adamw.step(*args)

        update()  # compiles
        results.append([tensor.clone() for tensor in (*state, weights)])
        assert _gives_way(update, 500 if free_threaded else 10) == free_threaded
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def _gives_way(work: Any, calls: int) -> bool:
    """Whether in one of so many calls of `work` another thread gets the interpreter in the middle half of the call.

    Counted in the caller's own processor time, which stands still where it waits for a busy machine.
    """
    clock, end = time.pthread_getcpuclockid(threading.get_ident()), threading.Event()
    turns: list[float] = []

    def other() -> None:
        while not end.wait(2e-4):
            turns.append(time.clock_gettime(clock))

    thread = threading.Thread(target=other)
    thread.start()
    try:
        for _ in range(calls):
            began = time.thread_time()
            work()
            quarter_s = (time.thread_time() - began) / 4
            if any(began + quarter_s <= turn <= began + 3 * quarter_s for turn in turns):
                return True
            turns.clear()
        return False
    finally:
        end.set()
        thread.join()


def test_layers_that_fell_back_to_eager_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    fallbacks = EagerFallbacks()
    fallbacks.begin()
    try:
        with torch._dynamo.config.patch(recompile_limit=2, automatic_dynamic_shapes=False):

            @torch.compile(backend="eager", dynamic=False)
            def layer(x: torch.Tensor) -> torch.Tensor:
                return x + 1

            for tokens in range(2, 8):
                layer(torch.zeros(tokens))
        (message,) = fallbacks.take()
        assert "'layer'" in message
        assert "after compiling it 2 times: it runs eagerly" in message
        logging.getLogger("torch._dynamo.convert_frame").warning("something else")
        assert fallbacks.take() == []
    finally:
        fallbacks.end()
        torch._dynamo.reset()


@pytest.mark.long
def test_a_run_of_few_steps_is_not_compiled(tmp_path: Path) -> None:
    observer = tiny.Silent()
    t = tiny.training(steps=1, compile="auto", calibrate=True)
    tiny.train_run(tmp_path, observer, model=tiny.model(num_layers=1), train=t)
    assert [line for line in observer.messages if line.startswith("layers are not compiled: 1 steps of about")]
