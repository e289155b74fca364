"""The engine against the step in plain words, bit by bit, and that step against plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from plain import plain_training

from penstock.engine.forecast.problem import LOGITS_BYTES
from penstock.engine.machine.device import compute_dtype
from penstock.engine.model.reference import Training
from penstock.engine.model.runner import ModelRunner
from penstock.engine.optim.base import MASTER
from penstock.engine.session import Session

STEPS = 3


def reference(session: Session) -> tuple[Training, list[tuple[float, float]]]:
    """The session's next steps by the reference, and the loss and gradient norm of each."""
    train = session.recipe.train
    runner = ModelRunner(session.spec, device="cpu", dtype=compute_dtype(train))
    training = Training(runner, train, tiny.parameters(session.store, session.spec))
    cursor = session.loader.cursor
    chunk, logits_bytes = session.plan.max_chunk_tokens, LOGITS_BYTES["cpu"]
    results = [training.step(session.loader.next_step(), chunk, logits_bytes) for _ in range(STEPS)]
    session.loader.seek(cursor)
    return training, results


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("dtype", "clip_norm"), [("float32", 0.5), ("float32", None), ("bfloat16", 0.5)])
@pytest.mark.parametrize(("gpu", "ram"), [(tiny.FLOOR, tiny.FLOOR), (1_000_000, 1_500_000)], ids=["least", "mixed"])
def test_the_engine_gives_the_references_bits(
    tmp_path: Path, gpu: str | int, ram: str | int, dtype: str, clip_norm: float | None, tied: bool
) -> None:
    t = tiny.training(micro_batch_size=1, chunk_tokens=20, clip_norm=clip_norm, compute_dtype=dtype)
    with tiny.session(tmp_path, m=tiny.model(tie_embeddings=tied), t=t, gpu=gpu, ram=ram) as session:
        assert len({chunk.micro_batch for chunk in session.plan.chunks}) == 2
        if gpu != tiny.FLOOR:
            assert {buffer.state for buffer in session.plan.buffers.values()} == {"gpu", "ram", "nvme"}
        training, expected = reference(session)
        steps = tiny.steps(session, STEPS)
        weights = tiny.parameters(session.store, session.spec)
    assert [(m.loss, m.grad_norm) for m in steps] == expected
    assert all(norm > 0.5 for _, norm in expected), "nothing to clip"
    masters = training.by_name({buffer: kinds[MASTER] for buffer, kinds in training.state.items()})
    assert weights.keys() == masters.keys()
    for name, weight in weights.items():
        assert torch.equal(weight, masters[name]), name


@pytest.mark.parametrize("policy", [{"chunk_tokens": 7}, {"chunk_tokens": 96, "micro_batch_size": 2}], ids=str)
def test_the_reference_is_plain_pytorch(tmp_path: Path, policy: dict[str, Any]) -> None:
    t = tiny.training(clip_norm=0.5, warmup_steps=2, lr=3e-3, **policy)
    with tiny.session(tmp_path, t=t) as session:
        training, results = reference(session)
        losses, expected, _ = plain_training(session, STEPS)
    assert [loss for loss, _ in results] == pytest.approx(losses, rel=1e-5)
    weights = training.by_name(training.weights)
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        assert (weight - expected[name]).norm() <= 1e-5 * expected[name].norm(), name
