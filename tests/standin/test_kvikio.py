"""kvikio's reads in compatibility mode, as they are on a card: its threads, its pinned buffers, real copies."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import reader_checks as checks
import small_model
import standin
import tiny
import torch

from penstock.engine.train import train_step
from penstock.storage.tier.readers import KvikioReader, Reader, select_readers

pytest.importorskip("kvikio", exc_type=ImportError)  # `make standin` installs it

CUDA = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def reader() -> Reader:
    return KvikioReader()


@pytest.fixture(autouse=True)
def _filled_by_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the checks read into holds 0xAA: a kernel would not put it there."""
    monkeypatch.setattr(checks, "_out", lambda nbytes, device: torch.full((nbytes,), 0xAA, dtype=torch.uint8).to(CUDA))


@pytest.mark.parametrize("dtype", checks.DTYPES)
@pytest.mark.parametrize("nbytes", checks.SIZES_BYTES)
def test_contents(reader: Reader, tmp_path: Path, nbytes: int, dtype: str) -> None:
    checks.check_contents(reader, "cuda", tmp_path / "a", nbytes, dtype)


@pytest.mark.parametrize("check", [checks.check_any_address, checks.check_threads])
def test_checks(reader: Reader, tmp_path: Path, check: Callable[[Reader, str, Path], None]) -> None:
    check(reader, "cuda", tmp_path / "a")


@pytest.mark.parametrize("name", checks.DAMAGE)
def test_damage(reader: Reader, tmp_path: Path, name: str) -> None:
    checks.check_damage(reader, "cuda", tmp_path / "a", name)


def test_it_is_confirmed_and_chosen(tmp_path: Path) -> None:
    chosen = select_readers("auto", CUDA, [tmp_path])
    assert chosen.warning is None
    assert chosen.device.name == "kvikio"


def test_weights_come_straight_into_their_slots(tmp_path: Path) -> None:
    """A run whose weights live on drives: whole reads, none through a stage in RAM. What an update has just made in a
    stage there is copied from it, and not read."""
    sections = {"m": small_model.model(), "d": tiny.data(sequence_length=512), "t": small_model.training(compile="off")}
    with tiny.session(tmp_path, gpu=tiny.FLOOR, ram=tiny.FLOOR, device=CUDA, **sections) as session:  # type: ignore[arg-type]
        assert {buffer.weights for buffer in session.plan.buffers.values()} == {"nvme"}
        before = standin.counts()
        for _ in range(2):
            train_step(session)
        session.executor.drain()
        spans = session.executor.take_spans()
        actions = {span.op for span in spans}
        made = standin.counts() - before
        assert "read_weights_whole" in actions
        assert "read_weights" not in actions
        copied, updated = (
            Counter((span.block, span.chunk) for span in spans if span.op == op)
            for op in ("load_weights_part", "update")
        )
        assert copied <= updated
        assert made.total("pageable_copy", "refusal") == 0
        # What was read is what the store holds.
        name, buffer = next(iter(session.plan.buffers.items()))
        out = torch.zeros(buffer.part(0)[1], dtype=torch.bfloat16).to(CUDA)
        here = torch.zeros(buffer.part(0)[1], dtype=torch.bfloat16)
        session.store.read(name, "weights", 0, out).result()
        session.store.read(name, "weights", 0, here).result()
        assert here.count_nonzero() > 0
        assert torch.equal(out.cpu(), here)
