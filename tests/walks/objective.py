"""An objective: the engine gives the step's own loss."""

from pathlib import Path

import tiny
import torch

from penstock.engine.forecast.problem import LOGITS_BYTES
from penstock.engine.model.reference import forward_backward, in_buffers
from penstock.engine.model.runner import ModelRunner
from penstock.engine.objectives.base import OBJECTIVES
from penstock.engine.train import train_step


def test_the_engine_gives_the_references_loss(tmp_path: Path) -> None:
    t = tiny.training(objective="hardest", steps=2)
    with tiny.session(tmp_path, t=t) as session:
        runner = ModelRunner(session.spec, device="cpu", dtype=torch.float32)
        weights = in_buffers(session.spec, tiny.parameters(session.store, session.spec))
        gradients = in_buffers(session.spec, {name: torch.zeros_like(weight) for name, weight in weights.items()})
        batch, chunk = session.loader.next_step(), session.plan.max_chunk_tokens
        expected = forward_backward(
            runner, weights, gradients, batch, chunk, LOGITS_BYTES["cpu"], objective=OBJECTIVES["hardest"]
        )
    with tiny.session(tmp_path / "again", t=t) as session:
        assert train_step(session).loss == expected
