"""Saved activations beyond the RAM budget live on NVMe between forward and backward, and change nothing."""

from pathlib import Path
from typing import Any

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from samples import sampled

from penstock.engine.schedule.actions import UNSPILL
from penstock.engine.schedule.ops import Op
from penstock.engine.session import Session
from penstock.engine.train import train_step
from penstock.storage.errors import BudgetError, UserError

LONG: dict[str, Any] = {
    "m": tiny.model(num_layers=6),
    "d": tiny.data(sequence_length=512),
    "t": tiny.training(steps=1, global_batch_size=1, chunk_tokens=128),
}


def trained(session: Session) -> str:
    tiny.steps(session)
    return tiny.digest(session.store)


def saved_bytes(session: Session) -> int:
    """Saved activations of a step, on whatever tier."""
    layers = [i for i, block in enumerate(session.plan.blocks) if block.role == "layer"]
    return sum(session.plan.record_bytes(i, chunk.index) for i in layers for chunk in session.plan.chunks)


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


def test_less_than_the_stages_is_refused_with_the_need(tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match=r"budgets\.ram.*hidden states of the step.*give at least \d+[KMG]iB"):
        tiny.session(tmp_path, **LONG, ram="64KiB")
