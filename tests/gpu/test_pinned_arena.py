import pytest
import torch

from penstock.storage.tier.arena import HostArena

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


def test_slots_are_pinned_and_copies_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.storage.tier.arena.PIECE_BYTES", 64 << 20)
    arena = HostArena(1 << 30, budget_bytes=1 << 30)
    arena.slot("first", (64 << 20) - (16 << 20))
    slot = arena.slot("would span two pieces", 32 << 20)
    larger = arena.slot("larger than a piece", 200 << 20)
    arena.pin()
    assert arena.pinned
    assert len(arena._registered) == 3
    assert slot.is_pinned()
    assert larger[-1:].is_pinned()
    slot.copy_(torch.arange(32 << 20, dtype=torch.int32).to(torch.uint8))
    there = slot.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(there.cpu(), slot)
    slot.zero_()
    slot.copy_(there, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(slot, there.cpu())
    arena.close()
    assert not arena.pinned
