"""Which device a run takes, why it refuses one, and the settings of the process while it runs."""

import gc
import itertools
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from some_ops import an_op

from penstock.engine.events import StepMetrics
from penstock.engine.machine.device import DeviceSettings, configure, memory_use, resolve_device, too_old
from penstock.engine.model.loss import _block_
from penstock.engine.optim.adamw import PIECE_NUMEL, AdamW, adamw, scalars
from penstock.engine.optim.base import UpdateRange
from penstock.engine.runtime.executor import Executor
from penstock.engine.train import train_step
from penstock.storage.errors import UserError
from penstock.storage.layout import FlatLayout

H100 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]


@pytest.mark.parametrize(
    ("name", "capability", "dtype", "reason"),
    [
        ("NVIDIA H100", (9, 0), "bfloat16", None),
        ("NVIDIA GeForce RTX 4090", (8, 9), "bfloat16", None),
        ("Tesla T4", (7, 5), "float32", None),
        ("Tesla T4", (7, 5), "bfloat16", "Tesla T4 has compute capability 7.5, and bfloat16 needs 8.0"),
        ("Tesla V100", (7, 0), "float32", "built for 7.5 and newer"),
    ],
)
def test_a_gpu_too_old_is_refused(name: str, capability: tuple[int, int], dtype: str, reason: str | None) -> None:
    found = too_old(name, capability, H100, dtype)
    assert found is None if reason is None else reason in str(found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_that_is_not_there_is_explained() -> None:
    with pytest.raises(UserError, match=r"train\.device: .* no CUDA device: .+; use auto or cpu") as caught:
        resolve_device(tiny.training(device="cuda"))
    if torch.version.cuda is None:
        assert f"this torch ({torch.__version__}) is built without CUDA" in str(caught.value)
    assert resolve_device(tiny.training(device="auto")) == torch.device("cpu")


def test_settings_are_undone_in_reverse() -> None:
    class Owner:
        value = 1

    log: list[int] = []
    settings = DeviceSettings()
    settings.set(Owner, "value", 2)
    settings.call(log.append, 10, 20)
    settings.set(Owner, "value", 3)
    assert (Owner.value, log) == (3, [20])
    settings.restore()
    assert (Owner.value, log) == (1, [20, 10])


def test_deterministic_lasts_as_long_as_the_session(tmp_path: Path) -> None:
    def state() -> tuple[bool, bool, bool, bool]:
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
            torch.backends.cudnn.benchmark,
            torch._inductor.config.deterministic,
        )

    before = state()
    with tiny.session(tmp_path, t=tiny.training(deterministic=True)) as session:
        assert state() == (True, False, False, True)
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] in (":4096:8", ":16:8")
        train_step(session)
    assert state() == before
    assert configure(torch.device("cpu"), 1, deterministic=False).message is None
    assert memory_use(torch.device("cpu")) is None


def test_what_is_compiled_beside_other_lanes_is_one_graph_each() -> None:
    """Without torch.compile's fullgraph, which would say so itself."""
    t = tiny.training()
    state = [torch.rand(64) for _ in range(5)]
    update = torch._dynamo.explain(adamw)(*state, scalars(t, t.lr, 1, 0.5, torch.device("cpu")).decayed)
    assert (update.graph_count, update.graph_break_count) == (1, 0)
    rows, labels, weights = torch.rand(2, 8), torch.tensor([1, 5]), torch.ones(2, 1)
    loss = torch._dynamo.explain(_block_)(rows, labels, weights, torch.tensor(0.1), torch.tensor(1e-4))
    assert (loss.graph_count, loss.graph_break_count) == (1, 0)


def test_state_on_the_gpu_is_updated_by_the_same_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit-equal results of the same AdamW object, called by the optimizer lane or by the compute lane."""
    calls: dict[str, set[str]] = {}
    step, digests = AdamW.step, set()
    for gpu in ("1GiB", tiny.FLOOR):
        lanes = calls.setdefault(gpu, set())

        def update(self: AdamW, *args: Any, lanes: set[str] = lanes) -> None:
            lanes.add(threading.current_thread().name)
            step(self, *args)

        monkeypatch.setattr(AdamW, "step", update)
        with tiny.session(tmp_path / gpu, gpu=gpu) as session:
            tiny.steps(session, 2)
            digests.add(tiny.digest(session.store))
    assert calls == {"1GiB": {"compute"}, tiny.FLOOR: {"optimizer"}}
    assert len(digests) == 1


@pytest.mark.long
def test_compiled_runs_are_equal_and_nearly_those_of_eager_ones(tmp_path: Path) -> None:
    losses, digests = [], set()
    for number, how in enumerate(("off", "on", "on")):
        with tiny.session(tmp_path / str(number), t=tiny.training(compile=how, deterministic=True)) as session:
            losses.append([metrics.loss for metrics in tiny.steps(session, 2)])
            digests.add(tiny.digest(session.store))
    assert len(digests) == 2
    assert losses[1] == losses[2] == pytest.approx(losses[0], rel=1e-5)


def test_garbage_is_looked_for_once_a_step(tmp_path: Path) -> None:
    counts: list[int] = []

    class Collections(tiny.Silent):
        def on_step(self, metrics: StepMetrics) -> None:
            counts.append(sum(generation["collections"] for generation in gc.get_stats()))

    tiny.train_run(tmp_path, Collections(), train=tiny.training(steps=3), storage=tiny.storage())
    assert [after - before for before, after in itertools.pairwise(counts)] == [1, 1]
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("missing", [1, 7])
def test_a_dependency_that_nobody_submitted_is_an_error(missing: int) -> None:
    executor = Executor(lambda op: None, torch.device("cpu"))
    executor.submit([an_op(0, "compute"), an_op(2, "h2d", 0)])
    executor.drain()
    executor.submit([an_op(3, "compute", missing)])
    with pytest.raises(AssertionError, match=f"op 3 depends on op {missing}, which was never submitted"):
        executor.wait(3)
    executor.close()


def test_an_update_in_pieces_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    values = scalars(tiny.training(), 1e-2, 3, 0.7, torch.device("cpu"))
    start = [torch.rand(1000, generator=generator) for _ in range(5)]
    results = []
    for piece in (1 << 24, 64, 320):  # whole vectors, as is the real one
        monkeypatch.setitem(PIECE_NUMEL, "cpu", piece)
        master, first, second, gradient, weights = (t.clone() for t in start)
        state = {"master": master, "exp_avg": first, "exp_avg_sq": second}
        where = UpdateRange(FlatLayout((), {}, 1000, 600), 0, 1000)
        AdamW("fused").step(state, gradient, weights, where, values)
        results.append(torch.cat([master, first, second, weights]))
    assert all(torch.equal(results[0], other) for other in results[1:])
