"""A kind of block: a layer trains as before without it."""

from pathlib import Path

import pytest
import tiny
from transformers import Qwen3Config

from penstock.engine.self_check import check_model
from penstock.engine.train import train_step


def test_a_layers_mlp_is_a_block_that_trains_as_before(tmp_path: Path) -> None:
    assert check_model(Qwen3Config(), split_layers="mlp").ok
    losses: dict[str | None, list[float]] = {}
    for split in (None, "mlp"):
        with tiny.session(tmp_path / str(split), t=tiny.training(split_layers=split)) as session:
            if split is not None:
                assert "layers.0.mlp" in session.plan.buffers
            losses[split] = [train_step(session).loss for _ in range(3)]
    assert losses["mlp"] == pytest.approx(losses[None], rel=1e-5)
