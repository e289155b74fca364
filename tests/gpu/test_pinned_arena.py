import pytest
import torch

from storage.arena import HostArena

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


def test_slots_are_pinned_and_copies_are_right() -> None:
    # Over one registration piece of 1 GiB, with a slot that spans two of them.
    arena = HostArena((1 << 30) + (64 << 20), budget_bytes=2 << 30, pin=True)
    assert arena.pinned
    arena.slot("first", (1 << 30) - (16 << 20))
    slot = arena.slot("spans two pieces", 32 << 20)
    assert slot.is_pinned()
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
