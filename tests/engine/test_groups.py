"""A step cut into groups of micro-batches, and saved graphs that leave the GPU: the same gradients, whatever waits
where."""

import gc
from pathlib import Path
from typing import Any

import pytest
import tiny

from penstock.engine.model.layer_graph import SavedTensors
from penstock.engine.train import train_step

MODEL = tiny.model()
DATA = tiny.data()


def training(**changes: Any) -> tiny.TrainConfig:
    settings = {
        "steps": 2,
        "global_batch_size": 3,
        "chunk_tokens": 20,
        "activation_checkpointing": "auto",
        "kv_window": "whole",
    }
    return tiny.training(**settings | changes)


def digest(folder: Path, *, outgrown: bool = False, **options: Any) -> tuple[list[float], list[float], str, Any]:
    """Losses and gradient norms of two steps, what the last generation holds, and the plan."""
    with tiny.session(folder, m=MODEL, d=DATA, **options) as session:
        metrics = tiny.steps(session)
        session.finish()
        plan = session.plan
        assert session.runtime.layer_ops.graphs_bytes == 0
        assert bool(session.runtime.layer_ops.outgrown) == outgrown
        assert session.gpu.arena.used_bytes + plan.tiers["gpu"].parts["workspace"] <= plan.tiers["gpu"].budget_bytes
    return [m.loss for m in metrics], [m.grad_norm for m in metrics], tiny.digest_of(folder), plan


TIERS = {"gpu": ("1GiB", "1GiB"), "ram": (tiny.FLOOR, "1GiB"), "nvme": (tiny.FLOOR, tiny.FLOOR)}


GROUPED = [("gpu", "float32"), pytest.param("ram", "bfloat16", marks=pytest.mark.long), ("nvme", "float32")]


@pytest.mark.parametrize(("tier", "gradient_dtype"), GROUPED)
def test_groups_compute_the_same_bits(tmp_path: Path, tier: str, gradient_dtype: str) -> None:
    """Gradients are summed in the same order in however many groups, on the GPU or by way of RAM."""
    gpu, ram = TIERS[tier]
    options = {"t": training(activation_checkpointing="selective", gradient_dtype=gradient_dtype), "gpu": gpu}
    *expected, _ = digest(tmp_path / "one", ram=ram, **options)
    for group in (1, 2):
        *found, plan = digest(tmp_path / f"groups of {group}", ram=ram, group=group, **options)
        assert plan.num_groups == -(-3 // group)
        assert found == expected
        sums = {buffer.sums for buffer in plan.buffers.values()}
        assert sums == ({"gpu"} if tier == "gpu" else {"ram"})


@pytest.fixture(scope="module")
def stay(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What comes of graphs that stay on the GPU."""
    *found, plan = digest(tmp_path_factory.mktemp("stay"), t=training(activation_checkpointing="none"))
    assert not plan.graphs_aside
    return found


@pytest.mark.parametrize(("tier", "group"), [("ram", 2), ("nvme", 0)])
def test_graphs_that_leave_give_the_gradients_of_graphs_that_stay(
    tmp_path: Path, stay: list[Any], tier: str, group: int
) -> None:
    gpu, ram = TIERS[tier]
    *found, plan = digest(tmp_path / "leave", t=training(), gpu=gpu, ram=ram, group=group, graphs_aside="all")
    layers = {i for i, block in enumerate(plan.blocks) if block.role == "layer"}
    assert plan.graphs_aside == {(i, chunk.index) for i in layers for chunk in plan.places}
    assert plan.spilled == (plan.graphs_aside if tier == "nvme" else set())
    assert found == stay


def test_a_graph_larger_than_its_slot_is_computed_again_and_told(tmp_path: Path, stay: list[Any]) -> None:
    small: dict[str, Any] = {"t": training(), "gpu": tiny.FLOOR, "graphs_aside": "all", "graph_bytes": {"layers.0": 1}}
    *found, plan = digest(tmp_path / "again", outgrown=True, **small)
    assert plan.graphs_aside
    assert found == stay
    with tiny.session(tmp_path / "told", m=MODEL, d=DATA, **small) as session:
        train_step(session)
        (first,) = session.notes
        train_step(session)
        assert session.notes == [first]
    assert "layers.0" in first
    assert "larger than planned" in first


def test_a_kept_graph_goes_with_its_backward(tmp_path: Path) -> None:
    """Not when garbage is looked for: until then there could be another step's graphs beside it."""
    t = training(global_batch_size=1)
    with tiny.session(tmp_path, m=MODEL, d=DATA, t=t, gpu=tiny.FLOOR, graphs_aside="all") as session:
        gc.collect()
        gc.disable()
        try:
            train_step(session)
            held = [found for found in gc.get_objects() if isinstance(found, SavedTensors)]
        finally:
            gc.enable()
    assert not held
