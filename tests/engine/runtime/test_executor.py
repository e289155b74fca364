"""The executor on streams: every op after what it depends on, events used again and again, an end after any failure.
What is compiled or timed before the first step sees what the run sees: settings, threads, cores. No op on a lane of the
GPU asks the GPU for what the host knows."""

import logging
import random
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from some_ops import an_op
from streams_on_cpu import EventOnCpu, StreamOnCpu, current_stream, streams_on_cpu
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from used_up import no_thread

from penstock.engine.optim.adamw import AdamW
from penstock.engine.optim.base import UpdateRange
from penstock.engine.runtime import executor as executors
from penstock.engine.runtime.executor import GPU_LANES, Executor
from penstock.engine.runtime.lanes import RECOMPILE_LIMIT, SWITCH_INTERVAL_S, EagerFallbacks, Lanes
from penstock.engine.schedule.action import LANES
from penstock.engine.schedule.actions import NORM
from penstock.engine.schedule.ops import Op
from penstock.engine.session import Session
from penstock.engine.train import train_step
from penstock.storage.tier.layout import FlatLayout, ParamSpec

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ASKS = {"_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "masked_select", "is_nonzero", "equal", "item"}
"""Operators whose result, or its size, is only known once the device has computed it."""
FROM_HOST = {"lift_fresh"}
"""What torch.tensor(data) calls: on CUDA a copy from pageable memory."""
LONG = [pytest.param(gpu, "gemma3_text", marks=pytest.mark.long) for gpu in (tiny.FLOOR, "1GiB")]


def random_ops(seed: int, count: int, first: int = 0) -> list[Op]:
    """Ops on all lanes, each after a few of those before it."""
    chance = random.Random(seed)
    ops = []
    for number in range(first, first + count):
        reach = range(max(0, number - 30), number)
        deps = tuple(sorted(chance.sample(reach, min(len(reach), chance.randrange(4)))))
        lane: Any = chance.choice(LANES)
        ops.append(an_op(number, lane, *deps, index=number))
    return ops


class Recorder:
    """Performs ops as the runtime does: at once on host lanes, later on a pool, or some time on the lane's stream."""

    def __init__(self) -> None:
        self.done: set[int] = set()
        self.early: list[tuple[int, int]] = []
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(4)

    def perform(self, op: Op) -> Future[None] | None:
        if op.lane in GPU_LANES:
            current_stream().put(lambda: self.run(op))
            return None
        if op.lane.startswith("nvme"):
            return self._pool.submit(self.run, op)
        self.run(op)
        return None

    def run(self, op: Op) -> None:
        with self._lock:
            self.early += [(op.id, dep) for dep in op.deps if dep not in self.done]
            self.done.add(op.id)


@pytest.mark.parametrize(
    ("delay_s", "rebase_s", "queued", "seed"), [(0.0, 10.0, executors.MAX_QUEUED, 0), (1e-3, 0.0, 20, 1)]
)
def test_every_op_comes_after_what_it_depends_on(
    monkeypatch: pytest.MonkeyPatch, delay_s: float, rebase_s: float, queued: int, seed: int
) -> None:
    monkeypatch.setattr(executors, "REBASE_S", rebase_s)
    monkeypatch.setattr(executors, "MAX_QUEUED", queued)
    count, batches = 300, 4
    with streams_on_cpu(delay_s, seed):
        recorder = Recorder()
        executor = Executor(recorder.perform, CUDA, {"nvme_read": 3, "nvme_write": 3})
        for batch in range(batches):
            ops = random_ops(seed, count, first=batch * count)
            executor.submit(ops)
            executor.wait(ops[-1].id)
            assert ops[-1].id in recorder.done
        executor.drain()
        spans = executor.take_spans()
        wall_s = time.perf_counter() - executor.epoch
        executor.close()
        made = EventOnCpu.made
    assert recorder.early == []
    assert len(recorder.done) == len(spans) == batches * count
    assert sorted(span.chunk for span in spans) == list(range(batches * count))
    assert all(-1e-4 <= span.start_s <= span.end_s + 1e-6 <= wall_s + 1e-4 for span in spans)
    on_gpu = sum(span.lane in GPU_LANES for span in spans)
    assert made < 2 * on_gpu, "events are used again"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_spans_clock_leaves_out_what_it_stood_still_for(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    moved_s = 0.0
    real = time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: real() + moved_s)
    with streams_on_cpu():
        executor = Executor(None, torch.device(device))
        moved_s += 500.0  # the preparations
        executor.attach(Recorder().perform)
        for first in (0, 2):
            executor.submit([an_op(first, "compute"), an_op(first + 1, "nvme_read")])
            executor.drain()
            with executor.clock_stopped():
                before_s, _ = executor.under_way()
                moved_s += 500.0
                assert executor.under_way() == (before_s, [])
        spans, (now_s, _) = executor.take_spans(), executor.under_way()
        executor.close()
    assert len(spans) == 4
    assert all(-1e-4 <= span.start_s <= span.end_s <= now_s < 100.0 for span in spans)


def test_a_host_that_wakes_late_does_not_move_the_spans_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The spans' origin is read on both clocks; a host that lost its core in between took it for later than it was."""
    synchronize = EventOnCpu.synchronize

    def late(event: EventOnCpu) -> None:
        synchronize(event)
        time.sleep(0.02)

    with streams_on_cpu():
        with monkeypatch.context() as patch:
            patch.setattr(EventOnCpu, "synchronize", late)
            executor = Executor(Recorder().perform, CUDA)
        executor.submit([an_op(0, "compute")])
        executor.drain()
        (span,) = executor.take_spans()
        wall_s = time.perf_counter() - executor.epoch
        executor.close()
    assert 0 <= span.start_s <= span.end_s <= wall_s + 1e-6


@pytest.mark.parametrize("lane", LANES)
def test_a_failure_on_any_lane_ends_all_of_them(lane: str) -> None:
    with streams_on_cpu(1e-3):
        recorder = Recorder()
        ops = random_ops(1, 300)
        victim = next(op for op in ops[100:] if op.lane == lane)

        def perform(op: Op) -> Any:
            if op is victim:
                raise RuntimeError("CUDA error: broken")
            return recorder.perform(op)

        executor = Executor(perform, CUDA)
        executor.submit(ops)
        with pytest.raises(RuntimeError, match="broken"):
            executor.drain()
        assert executor.failed_op is victim
        executor.close()
    assert recorder.early == []


def test_closing_raises_nothing_when_the_gpu_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that raise, and a lane that hangs in a call: the first failure is what is seen, within the time given."""
    monkeypatch.setattr(executors, "CLOSE_S", 0.5)
    release = threading.Event()
    with streams_on_cpu():

        def perform(op: Op) -> Any:
            if op.lane == "d2h":
                release.wait(600)  # a call into the driver that does not come back
            if op.lane == "compute":
                for stream in StreamOnCpu.all:
                    stream.broken = True
                raise torch.AcceleratorError("CUDA error: the launch failed")

        executor = Executor(perform, CUDA)
        executor.submit([an_op(0, "d2h"), an_op(1, "compute")])
        with pytest.raises(torch.AcceleratorError, match="the launch failed"):
            executor.drain()
        started = time.monotonic()
        executor.close()
        assert time.monotonic() - started < 300
        with pytest.raises(torch.AcceleratorError, match="the launch failed"):
            executor.submit([])
        release.set()


def test_closing_raises_nothing_when_no_op_has_failed() -> None:
    """What ends a run, between two ops or in a call of a lane, is not replaced by what its streams say later."""

    def fails() -> None:
        raise torch.AcceleratorError("CUDA error: the launch failed")

    with streams_on_cpu():
        executor = Executor(lambda op: None, CUDA)
        with pytest.raises(torch.AcceleratorError, match="the launch failed"):
            executor.call("compute", fails)
        for stream in StreamOnCpu.all:
            stream.broken = True
        executor.close()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_spans_tell_what_was_waited_for_and_what_is_under_way(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hold, held, optimizer_waits = threading.Event(), threading.Event(), threading.Event()
    synchronize = EventOnCpu.synchronize

    def watched(event: EventOnCpu) -> None:
        if threading.current_thread().name == "optimizer":
            optimizer_waits.set()
        synchronize(event)

    monkeypatch.setattr(EventOnCpu, "synchronize", watched)

    def wait() -> None:
        held.set()
        assert hold.wait(300)

    def perform(op: Op) -> None:
        if op.id == 1:
            if device == "cuda":
                current_stream().put(wait)
            else:
                wait()

    with streams_on_cpu():
        executor = Executor(perform, torch.device(device))
        executor.submit([an_op(0, "nvme_read")])
        executor.wait(0)
        executor.submit([an_op(1, "compute", 0, index=1), an_op(2, "optimizer", 0, 1), an_op(3, "compute", 1)])
        assert held.wait(300)
        clock_s, now = executor.under_way()
        assert [(op.lane, op.chunk) for op in now] == [("compute", 1)]
        assert 0 <= now[0].start_s <= clock_s + 1e-3
        held_up, behind = executor._tickets[1], executor._tickets[3]
        while not (held_up.waiters if device == "cpu" else optimizer_waits.is_set() and behind.event is not None):
            time.sleep(0.001)  # until the optimizer's lane waits, and on a stream what is behind has been issued
        hold.set()
        executor.drain()
        spans = {span.id: span for span in executor.take_spans()}
        assert executor.under_way()[1] == []
        executor.close()
    assert sorted(spans) == [0, 1, 2, 3]
    assert spans[1].waited == ()
    assert spans[2].waited == (1,)
    assert spans[3].waited == ((1,) if device == "cuda" else ()), "the op before on its own lane: only known to be done"


@pytest.mark.parametrize("lane", [LANES[0], LANES[-1]])
def test_a_lane_that_cannot_start_fails_and_leaves_none_behind(lane: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start, before = threading.Thread.start, set(threading.enumerate())

    def limited(thread: threading.Thread) -> None:
        if thread.name == lane:
            no_thread()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        Executor(lambda op: None, CPU)
    assert set(threading.enumerate()) <= before  # those of other tests may have ended
    monkeypatch.undo()

    def refuse(starting: str) -> None:
        if starting == lane:
            raise OSError("no such CPU")

    executor = Executor(lambda op: None, CPU, on_start=refuse)
    with pytest.raises(OSError, match="no such CPU"):
        executor.call(lane, int)
    executor.close()


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


def times_out() -> None:
    raise TimeoutError("of the work")


def test_a_call_runs_on_its_lane_behind_its_ops() -> None:
    """And behind a failing op it gets that one's failure."""
    done: list[str] = []
    gate = threading.Event()

    def perform(op: Op) -> None:
        assert gate.wait(300)
        done.append(threading.current_thread().name)
        if op.lane == "h2d":
            raise ValueError("the op's own")

    executor = Executor(perform, CPU)
    executor.submit([an_op(0, "d2h")])
    threading.Timer(0.05, gate.set).start()
    assert executor.call("d2h", lambda: (list(done), threading.current_thread().name)) == (["d2h"], "d2h")
    with pytest.raises(KeyError, match="mine"):
        executor.call("d2h", lambda: {}["mine"])
    with pytest.raises(TimeoutError, match="of the work"):  # not that of the wait for it
        executor.call("d2h", times_out)
    assert executor.call("d2h", lambda: 7) == 7, "a lane goes on after a call that failed"
    gate.clear()
    executor.submit([an_op(1, "h2d")])
    threading.Timer(0.05, gate.set).start()
    with pytest.raises(ValueError, match="the op's own"):
        executor.call("h2d", lambda: 1)
    executor.close()


@pytest.mark.long
def test_an_update_leaves_the_interpreter_to_others() -> None:
    """Beside a GPU other lanes launch kernels while it runs; and its bits are those of the update that does not."""
    values = AdamW.scalars(tiny.training(), 1e-2, 3, 0.7, CPU)
    numel, results = 1 << 24, []
    for free_threaded in (False, True):
        generator = torch.Generator().manual_seed(0)
        state = [torch.rand(numel, generator=generator) for _ in range(4)]
        kinds = dict(zip(("master", "exp_avg", "exp_avg_sq"), state, strict=False))
        where = UpdateRange(FlatLayout.build([ParamSpec("all", (numel,), True)]), 0, numel)
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


class Strict(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ASKS | FROM_HOST, f"{name} waits for the device"
        if name in ("index", "index_put_", "_index_put_impl_"):
            indices = [i for i in args[1] if isinstance(i, Tensor)]
            assert all(i.dtype == torch.int64 for i in indices), "a boolean index waits for the device"
        return func(*args, **(kwargs or {}))


def watch_gpu_lanes(session: Session) -> set[str]:
    """Let ops of GPU lanes run in `Strict`; the actions that ran so."""
    perform, seen = session.runtime.perform, set()

    def strict(op: Op) -> Any:
        if op.lane not in GPU_LANES:
            return perform(op)
        seen.add(op.action.name)
        with Strict():
            return perform(op)

    session.executor._perform = strict
    return seen


@pytest.mark.parametrize(("gpu", "model_type"), [(tiny.FLOOR, "qwen3_moe"), *LONG])
def test_no_op_of_a_gpu_lane_waits_for_the_gpu(tmp_path: Path, gpu: str, model_type: str) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    m = tiny.model(model_type=model_type, overrides={"pad_token_id": 3} | (experts if "moe" in model_type else {}))
    with tiny.session(tmp_path, m=m, gpu=gpu) as session:
        seen = watch_gpu_lanes(session)
        tiny.steps(session, 1)
        assert seen >= {"embed_forward", "layer_forward", "head", "layer_backward", "embed_backward", "norm"}
        # What does wait is seen.
        norm, losses = session.runtime.handlers[NORM], session.runtime._block_ops._losses
        session.runtime.handlers[NORM] = lambda op: norm(op) if float(losses[0]) > 0 else None
        with pytest.raises(AssertionError, match="_local_scalar_dense waits for the device"):
            train_step(session)
