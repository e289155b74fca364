"""Runs of a model whose linear modules are one product each, on any placement: the bits of the step in plain words."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from samples import cases

from penstock.engine.forecast.problem import LOGITS_BYTES
from penstock.engine.machine.device import compute_dtype
from penstock.engine.model.reference import Training
from penstock.engine.model.runner import ModelRunner

MODEL = tiny.model(hidden_size=64, intermediate_size=96, head_dim=16, num_layers=2)
"""All its weights are multiples of what a flat buffer aligns to."""
STEPS = 2
PLANS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpu": ({}, {}),
    "ram": ({}, {"gpu": tiny.FLOOR}),
    "nvme": ({}, {"gpu": tiny.FLOOR, "ram": tiny.FLOOR}),
    "input-only": ({"activation_checkpointing": "full"}, {"gpu": tiny.FLOOR}),
    "graphs": ({"activation_checkpointing": "none"}, {}),
    "graphs-that-leave": ({"activation_checkpointing": "auto"}, {"gpu": tiny.FLOOR, "group": 1, "graphs_aside": "all"}),
}


@pytest.mark.parametrize("name", cases(PLANS, "ram", "graphs-that-leave"))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_placement_gives_the_references_bits(tmp_path: Path, name: str, dtype: str) -> None:
    policy, placed = PLANS[name]
    saving = {"activation_checkpointing": "selective"} | policy
    t = tiny.training(steps=STEPS, global_batch_size=2, chunk_tokens=20, compute_dtype=dtype, clip_norm=0.5, **saving)
    with tiny.session(tmp_path, m=MODEL, t=t, **placed) as session:
        assert all(len(groups) == 2 for groups in session.spec.joined)
        runner = ModelRunner(session.spec, device="cpu", dtype=compute_dtype(t))
        plain = Training(runner, t, tiny.parameters(session.store, session.spec))
        cursor, chunk = session.loader.cursor, session.plan.max_chunk_tokens
        expected = [plain.step(session.loader.next_step(), chunk, LOGITS_BYTES["cpu"]) for _ in range(STEPS)]
        session.loader.seek(cursor)
        tiny.delay(session, random.Random(3))
        found = tiny.steps(session)
        assert [(m.loss, m.grad_norm) for m in found] == [pytest.approx(step, rel=1e-6) for step in expected]
        assert session.plan.graphs_aside or name != "graphs-that-leave"
        weights = tiny.parameters(session.store, session.spec)
    masters = plain.by_name({buffer: state["master"] for buffer, state in plain.state.items()})
    for parameter, weight in weights.items():
        assert torch.equal(weight, masters[parameter]), parameter
