"""Training on CUDA: lanes as streams give what the same steps give on CPU, on any tiers, however they are delayed."""

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from engine.ops import Op
from engine.train import Session, train_step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

TIERS = [("1GiB", "1GiB"), (tiny.FLOOR, "1GiB"), (tiny.FLOOR, tiny.FLOOR), (1_100_000, 750_000)]
CUDA = torch.device("cuda")


def steps(session: Session, count: int) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of `count` steps, then the commit."""
    metrics = [train_step(session) for _ in range(count)]
    session.finish()
    return [m.loss for m in metrics], [m.grad_norm for m in metrics]


@pytest.fixture(autouse=True)
def _plain_matmuls() -> Any:
    """Full float32 products: TF32 would hide what is being compared."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize(("gpu", "ram"), TIERS)
def test_float32_steps_are_those_of_the_cpu(tmp_path: Path, gpu: str | int, ram: str | int) -> None:
    with tiny.session(tmp_path / "cpu", gpu=gpu, ram=ram) as session:
        losses, norms = steps(session, 4)
    with tiny.session(tmp_path / "cuda", gpu=gpu, ram=ram, device=CUDA) as session:
        cuda_losses, cuda_norms = steps(session, 4)
        assert session.ram.arena.pinned
    assert cuda_losses == pytest.approx(losses, rel=1e-4)
    assert cuda_norms == pytest.approx(norms, rel=1e-3)


def delayed(perform: Callable[[Op], Any], chance: random.Random) -> Callable[[Op], Any]:
    """`perform` with idle time in front of ops: on the host for host lanes, on the stream for GPU lanes."""

    def run(op: Op) -> Any:
        if chance.random() < 0.2:
            if op.lane in ("h2d", "compute", "d2h"):
                torch.cuda._sleep(int(chance.random() * 5_000_000))
            else:
                time.sleep(chance.random() * 2e-3)
        return perform(op)

    return run


@pytest.mark.parametrize(("gpu", "ram"), TIERS)
def test_delays_on_streams_and_hosts_change_nothing(tmp_path: Path, gpu: str | int, ram: str | int) -> None:
    """Not to the bit: without deterministic kernels a gradient may differ in its last one."""
    results = []
    for seed in range(10):
        with tiny.session(tmp_path / "run", gpu=gpu, ram=ram, device=CUDA) as session:
            if seed:
                session.executor._perform = delayed(session.runtime.perform, random.Random(seed))
            metrics = [train_step(session) for _ in range(2)]
            results.append([m.loss for m in metrics] + [m.grad_norm for m in metrics])
    for other in results[1:]:
        assert other == pytest.approx(results[0], rel=1e-5)


def test_bfloat16_trains_on_streams(tmp_path: Path) -> None:
    t = tiny.training(compute_dtype="bfloat16", steps=8, lr=3e-2)
    with tiny.session(tmp_path, t=t, gpu=tiny.FLOOR, ram="1GiB", device=CUDA) as session:
        losses, _ = steps(session, 8)
        spans = session.executor.take_spans()
    assert losses[-1] < losses[0]
    assert {span.lane for span in spans} >= {"h2d", "compute", "d2h", "optimizer"}
    assert all(span.end_s >= span.start_s for span in spans)
