"""The validation loss on CUDA: that of the CPU, no bit of training changed, no compute op that waits for the GPU."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from penstock.engine.session import Session
from penstock.engine.train import train_step
from penstock.engine.validation import due, validate

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

CUDA = torch.device("cuda")
HELD_OUT = tiny.data(validation_documents=7)
PLANS: list[tuple[dict[str, Any], str | int, str | int]] = [
    ({}, "1GiB", "1GiB"),
    ({}, tiny.FLOOR, tiny.FLOOR),
    ({"activation_checkpointing": "none"}, "1GiB", "1GiB"),
    ({"kv_window": "streamed", "chunk_tokens": 7}, tiny.FLOOR, tiny.FLOOR),
]


def run(session: Session) -> tuple[str, list[float]]:
    """The end's digest, and the validation losses that were due."""
    losses = []
    while session.step < session.recipe.train.steps:
        train_step(session)
        if due(session):
            losses.append(validate(session).loss)
    session.finish()
    return tiny.digest(session.store), losses


@pytest.mark.parametrize(("policy", "gpu", "ram"), PLANS, ids=str)
def test_it_is_the_loss_of_the_cpu_and_changes_no_bit(
    tmp_path: Path, policy: dict[str, Any], gpu: str | int, ram: str | int
) -> None:
    budgets: dict[str, Any] = {"gpu": gpu, "ram": ram, "d": HELD_OUT}
    settings: dict[str, Any] = {"deterministic": True} | policy
    scored = tiny.training(validate_every=2, validation_sequences=6, **settings)
    with tiny.session(tmp_path / "cpu", t=scored, **budgets) as session:
        _, expected = run(session)
    with tiny.session(tmp_path / "off", t=tiny.training(**settings), device=CUDA, **budgets) as session:
        digest, none = run(session)
    with tiny.session(tmp_path / "on", t=scored, device=CUDA, **budgets) as session:
        found = run(session)
    assert none == []
    assert found[0] == digest
    assert found[1] == pytest.approx(expected, rel=1e-4)


def test_no_compute_op_waits_for_the_gpu(tmp_path: Path) -> None:
    """As in test_gpu_training; one pass, as the tokens of a second would be fetched meanwhile."""
    t = tiny.training(steps=9, validate_every=1)
    with tiny.session(tmp_path, t=t, d=HELD_OUT, gpu=tiny.FLOOR, device=CUDA) as session:
        train_step(session)
        validate(session)
        tiny.refuse_waits(session)
        validate(session)
