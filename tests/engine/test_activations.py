"""Saved activations beyond the RAM budget live on NVMe between forward and backward, and change nothing. A step cut
into groups of micro-batches, and saved graphs that leave the GPU: the same gradients, whatever waits where."""

import gc
from pathlib import Path
from typing import Any

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from samples import sampled

from penstock.engine.model.layer_graph import SavedTensors
from penstock.engine.schedule.actions import UNSPILL
from penstock.engine.schedule.ops import Op
from penstock.engine.session import Session
from penstock.engine.train import train_step
from penstock.storage.files.errors import BudgetError, UserError

LONG: dict[str, Any] = {"m": tiny.model(num_layers=6), "d": tiny.data(sequence_length=512)}
LONG["t"] = tiny.training(steps=1, global_batch_size=1, chunk_tokens=128)
TIERS = {"gpu": ("1GiB", "1GiB"), "ram": (tiny.FLOOR, "1GiB"), "nvme": (tiny.FLOOR, tiny.FLOOR)}
GROUPED = [("gpu", "float32"), pytest.param("ram", "bfloat16", marks=pytest.mark.long), ("nvme", "float32")]


def trained(session: Session) -> str:
    tiny.steps(session)
    return tiny.digest(session.store)


def saved_bytes(session: Session) -> int:
    """Saved activations of a step, on whatever tier."""
    layers = [i for i, block in enumerate(session.plan.blocks) if block.saved_inputs]
    return sum(session.plan.saved_bytes(i, chunk.index) for i in layers for chunk in session.plan.chunks)


def spill_files(session: Session) -> list[Path]:
    return [path for path in (session.store.root / "scratch").rglob("*") if path.is_file() and "spill" in path.parts]


def test_activations_of_four_times_the_ram_budget(tmp_path: Path) -> None:
    with tiny.session(tmp_path / "roomy", **LONG, gpu=tiny.FLOOR) as session:
        saved = saved_bytes(session)
        assert not session.plan.spilled
        expected = trained(session)
    budget = saved // 4
    with tiny.session(tmp_path / "tight", **LONG, gpu=tiny.FLOOR, ram=budget) as session:
        assert session.plan.spill_bytes > saved // 2
        assert trained(session) == expected
        assert session.ram.arena.used_bytes <= budget
        spans = session.executor.take_spans()
        assert spill_files(session) == []
    written = sum(span.bytes for span in spans if span.op.startswith("spill_"))
    read = sum(span.bytes for span in spans if span.op.startswith("unspill_"))
    payload = sum(span.bytes for span in spans if span.op.startswith(("spill_saved", "spill_kv")))
    assert written > payload > 0
    assert read <= written, "what is still on the GPU is not read back"
    with pytest.raises(BudgetError, match=r"budgets\.ram.*hidden states of the step.*give at least \d+[KMG]iB"):
        tiny.session(tmp_path / "least", **LONG, ram="64KiB")


@sampled(1, 15)
@given(st.floats(0.0, 1.0), st.integers(1, 4), st.integers(1, 2), st.sampled_from([16, 33, 64]), st.booleans())
def test_any_share_of_activations_on_nvme_changes_no_bit(
    tmp_path_factory: pytest.TempPathFactory, share: float, layers: int, sequences: int, chunk: int, device_reads: bool
) -> None:
    t = tiny.training(steps=1, global_batch_size=sequences, chunk_tokens=chunk)
    settings_: dict[str, Any] = {"m": tiny.model(num_layers=layers), "t": t, "gpu": tiny.FLOOR}
    settings_["d"] = tiny.data(sequence_length=96)
    folder = tmp_path_factory.mktemp("spill")
    with tiny.session(folder / "roomy", **settings_) as session:
        expected = trained(session)
    with tiny.session(folder / "floor", **settings_, ram=tiny.FLOOR, device_reads=device_reads) as session:
        floor, everything = session.plan.tiers["ram"].peak_bytes, saved_bytes(session)
        assert trained(session) == expected
    ram = floor + int(share * everything)
    with tiny.session(folder / "some", **settings_, ram=ram, device_reads=device_reads) as session:
        assert trained(session) == expected
        assert session.ram.arena.used_bytes <= ram


def test_a_damaged_activation_stops_the_run_by_name(tmp_path: Path) -> None:
    with tiny.session(tmp_path, **LONG, gpu=tiny.FLOOR, ram=tiny.FLOOR) as session:

        def damaging(op: Op) -> None:
            if op.action is UNSPILL["kv"] and op.block == "layers.3" and op.index == 2:
                (path,) = (p for p in spill_files(session) if "kv.layers.3.2" in p.name)
                content = bytearray(path.read_bytes())
                content[5] ^= 4
                path.write_bytes(content)

        tiny.before_ops(session, damaging)
        with pytest.raises(UserError, match=r"kv\.layers\.3\.2"):
            train_step(session)


def training(**changes: Any) -> tiny.TrainConfig:
    settings = {"steps": 2, "global_batch_size": 3, "chunk_tokens": 20, "activation_checkpointing": "auto"}
    return tiny.training(**settings | changes)


def digest(folder: Path, *, outgrown: bool = False, **options: Any) -> tuple[list[float], list[float], str, Any]:
    """Losses and gradient norms of two steps, what the last generation holds, and the plan."""
    with tiny.session(folder, **options) as session:
        metrics = tiny.steps(session)
        session.finish()
        plan = session.plan
        assert session.runtime.layer_ops.graphs_bytes == 0
        assert bool(session.runtime.layer_ops.outgrown) == outgrown == len(session.notes)
        assert all("layers.0" in note and "larger than planned" in note for note in session.notes), "and said once"
        assert session.gpu.arena.used_bytes + plan.tiers["gpu"].parts["workspace"] <= plan.tiers["gpu"].budget_bytes
    return [m.loss for m in metrics], [m.grad_norm for m in metrics], tiny.digest_of(folder), plan


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
    assert not plan.offloaded_graphs
    return found


@pytest.mark.parametrize(("tier", "group"), [("ram", 2), ("nvme", 0)])
def test_graphs_that_leave_give_the_same_gradients(tmp_path: Path, stay: list[Any], tier: str, group: int) -> None:
    gpu, ram = TIERS[tier]
    *found, plan = digest(tmp_path / "leave", t=training(), gpu=gpu, ram=ram, group=group, offloaded_graphs="all")
    layers = {i for i, block in enumerate(plan.blocks) if block.saved_inputs}
    assert plan.offloaded_graphs == {(i, chunk.index) for i in layers for chunk in plan.group_chunks}
    assert plan.spilled == (plan.offloaded_graphs if tier == "nvme" else set())
    assert found == stay


def test_a_graph_larger_than_its_slot_is_computed_again_and_told(tmp_path: Path, stay: list[Any]) -> None:
    small: dict[str, Any] = {"gpu": tiny.FLOOR, "offloaded_graphs": "all", "graph_bytes": {"layers.0": 1}}
    *found, plan = digest(tmp_path, outgrown=True, t=training(), **small)
    assert plan.offloaded_graphs
    assert found == stay


def test_a_kept_graph_goes_with_its_backward(tmp_path: Path) -> None:
    """Not when garbage is looked for: until then there could be another step's graphs beside it."""
    t = training(global_batch_size=1)
    with tiny.session(tmp_path, t=t, gpu=tiny.FLOOR, offloaded_graphs="all") as session:
        gc.collect()
        gc.disable()
        try:
            train_step(session)
            held = [found for found in gc.get_objects() if isinstance(found, SavedTensors)]
        finally:
            gc.enable()
    assert not held
