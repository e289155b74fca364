"""The engine against the step in plain words, bit by bit, and that step against plain PyTorch."""

import random
from pathlib import Path
from typing import Any, NamedTuple

import adapted
import pytest
import tiny
import torch
from plain import plain_training
from samples import cases

from penstock.engine.config import AdapterConfig
from penstock.engine.forecast.problem import LOGITS_BYTES
from penstock.engine.machine.device import compute_dtype
from penstock.engine.model.reference import Training
from penstock.engine.model.runner import ModelRunner
from penstock.engine.optim.base import MASTER
from penstock.engine.session import Session

WIDE = tiny.model(hidden_size=64, intermediate_size=96, head_dim=16, num_layers=2)
"""All its weights are multiples of what a flat buffer aligns to: linear modules of one input are one product."""
TIED = tiny.model(tie_embeddings=True)
PLAIN: dict[str, Any] = {}
BFLOAT16 = {"compute_dtype": "bfloat16"}
NVME: dict[str, Any] = {"gpu": tiny.FLOOR, "ram": tiny.FLOOR}
MIXED: dict[str, Any] = {"gpu": 1_000_000, "ram": 1_500_000}
SOME_FROZEN: dict[str, Any] = {"gpu": 700_000, "ram": 420_000}
RECORDS: dict[str, Any] = {"gpu": 620_000, "ram": tiny.FLOOR, "gpu_first": "records"}
LEAVING: dict[str, Any] = {"gpu": tiny.FLOOR, "group": 1, "graphs_aside": "all"}
HALVES = {"freeze": ["*embed_tokens*", "*.layers.0.*", "*.mlp.*"]}
"""Half of every layer, and of the lowest blocks everything."""
TOP = {"freeze": ["*embed_tokens*", "*.layers.*"]}
"""All but the head and the norm before it."""


class Case(NamedTuple):
    train: dict[str, Any] = PLAIN
    placed: dict[str, Any] = NVME
    model: Any = tiny.model()
    adapter: AdapterConfig | None = None


CASES = {
    "plain": Case(),
    "some on every tier": Case(placed=MIXED),
    "some on every tier, tied, bfloat16": Case(BFLOAT16, MIXED, TIED),
    "halves frozen, tied, bfloat16": Case(HALVES | BFLOAT16, model=TIED),
    "halves frozen on every tier, recomputed": Case(HALVES | {"activation_checkpointing": "full"}, SOME_FROZEN),
    "halves frozen, graphs leave": Case(HALVES | {"activation_checkpointing": "auto"}, LEAVING),
    "frozen but for the head": Case(TOP),
    "norms frozen, bfloat16": Case({"freeze": ["*norm*"]} | BFLOAT16),
    "lora": Case(adapter=adapted.section("lora")),
    "dora in RAM": Case(placed={"gpu": tiny.FLOOR}, adapter=adapted.section("dora")),
    "lora, graphs leave": Case({"activation_checkpointing": "auto"}, LEAVING, adapter=adapted.section("lora")),
    "dora, recomputed": Case({"activation_checkpointing": "full"}, adapter=adapted.section("dora")),
    "joined in RAM, bfloat16": Case(BFLOAT16, {"gpu": tiny.FLOOR}, WIDE),
    "joined, graphs leave": Case({"activation_checkpointing": "auto"}, LEAVING, WIDE),
    "joined, recomputed": Case({"activation_checkpointing": "full"}, model=WIDE),
    "records on the GPU, not clipped": Case({"clip_norm": None}, RECORDS),
    "joined, graphs, bfloat16": Case({"activation_checkpointing": "none"} | BFLOAT16, {}, WIDE),
}
OFTEN = ("some on every tier, tied, bfloat16", "halves frozen, tied, bfloat16", "joined, graphs leave",
         "joined, graphs, bfloat16", "joined, recomputed", "records on the GPU, not clipped",
         "halves frozen, graphs leave", "frozen but for the head")  # fmt: skip


def reference(session: Session, steps: int) -> tuple[Training, list[tuple[float, float]]]:
    train, cursor = session.recipe.train, session.loader.cursor
    runner = ModelRunner(session.spec, device="cpu", dtype=compute_dtype(train))
    training = Training(runner, train, tiny.parameters(session.store, session.spec))
    chunk, logits_bytes = session.plan.max_chunk_tokens, LOGITS_BYTES["cpu"]
    results = [training.step(session.loader.next_step(), chunk, logits_bytes) for _ in range(steps)]
    session.loader.seek(cursor)
    return training, results


@pytest.mark.parametrize("name", cases(CASES, *OFTEN))
def test_the_engine_gives_the_references_bits(tmp_path: Path, name: str) -> None:
    """Wherever state lives and however lanes are delayed; of what is frozen the weights that there were."""
    case = CASES[name]
    t = tiny.training(**{"micro_batch_size": 1, "chunk_tokens": 20, "clip_norm": 1e-3} | case.train)
    with tiny.session(tmp_path, m=case.model, t=t, adapter=case.adapter, **case.placed) as session:
        spec, plan = session.spec, session.plan
        assert len({chunk.micro_batch for chunk in plan.chunks}) == 2
        assert case.placed is not MIXED or {b.state for b in plan.buffers.values()} == {"gpu", "ram", "nvme"}
        assert case.placed is not LEAVING or plan.graphs_aside
        assert case.placed is not RECORDS or (plan.saved_on_gpu and plan.spilled)
        assert name != "joined, recomputed" or len(plan.recomputed) == 2
        assert case.model is not WIDE or all(len(groups) == 2 for groups in spec.joined)
        held = {array.buffer for array in session.store.arrays() if array.kind == MASTER}
        assert held == spec.buffers.keys() - spec.frozen
        training, expected = reference(session, 2)
        tiny.delay(session, random.Random(name))
        steps = tiny.steps(session, 2)
        used = session.gpu.arena.used_bytes + plan.tiers["gpu"].parts["workspace"]
        assert used <= plan.tiers["gpu"].budget_bytes
        weights = tiny.parameters(session.store, spec)
    assert [(m.loss, m.grad_norm) for m in steps] == [pytest.approx(pair, rel=1e-6) for pair in expected]
    assert all(norm > 1e-3 for _, norm in expected), "nothing to clip"
    masters = training.by_name({buffer: kinds[MASTER] for buffer, kinds in training.state.items()})
    stays = {name: weight.float() for name, weight in training.by_name(training.weights).items()}
    assert weights.keys() == stays.keys() >= masters.keys()
    assert (masters.keys() < stays.keys()) == bool(spec.frozen)
    for parameter, weight in weights.items():
        assert torch.equal(weight, masters.get(parameter, stays[parameter])), parameter


@pytest.mark.parametrize("model", [TIED, WIDE], ids=["tied", "joined"])
@pytest.mark.parametrize("policy", [{"chunk_tokens": 7}, {"chunk_tokens": 96, "micro_batch_size": 2}], ids=str)
def test_the_reference_is_plain_pytorch(tmp_path: Path, policy: dict[str, Any], model: Any) -> None:
    # An epsilon above the rounding of a gradient, which it would else make a whole step of.
    t = tiny.training(clip_norm=0.5, warmup_steps=2, lr=3e-3, eps=1e-5, **policy)
    with tiny.session(tmp_path, m=model, t=t) as session:
        training, results = reference(session, 3)
        losses, expected, _ = plain_training(session, 3)
    assert [loss for loss, _ in results] == pytest.approx(losses, rel=1e-5)
    weights = training.by_name(training.weights)
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        assert (weight - expected[name]).norm() <= 1e-5 * expected[name].norm(), name
