import psutil
import pytest
import torch

from storage.arena import HostArena, empty_aligned
from storage.errors import BudgetError


def test_slots_are_page_aligned_and_disjoint() -> None:
    arena = HostArena(1 << 20, budget_bytes=1 << 20, pin=False)
    sizes = [1, 4095, 4096, 4097, 10000]
    slots = [arena.slot(f"s{i}", n) for i, n in enumerate(sizes)]
    assert [s.numel() for s in slots] == sizes
    assert all(s.dtype == torch.uint8 and s.data_ptr() % 4096 == 0 for s in slots)
    for i, slot in enumerate(slots):
        slot.fill_(i + 1)
    assert [int(s.min()) for s in slots] == [int(s.max()) for s in slots] == [1, 2, 3, 4, 5]
    assert arena.used_bytes == 4096 * (1 + 1 + 1 + 2 + 3)
    assert arena.slots == {f"s{i}": n for i, n in enumerate(sizes)}
    assert not arena.pinned


def test_capacity_over_budget_names_both() -> None:
    with pytest.raises(BudgetError, match=r"budgets\.ram.*8,192.*4,096"):
        HostArena(8192, budget_bytes=4096, pin=False)


def test_full_arena_names_the_slot() -> None:
    arena = HostArena(8192, budget_bytes=8192, pin=False)
    arena.slot("first", 1)
    with pytest.raises(BudgetError, match=r"'second'.*4,097.*4,096 of 8,192"):
        arena.slot("second", 4097)
    assert arena.slot("third", 4096).numel() == 4096


def test_memory_is_resident_only_when_touched_and_goes_on_close() -> None:
    process = psutil.Process()
    size = 256 << 20
    before = process.memory_info().rss
    arena = HostArena(size, budget_bytes=size, pin=False)
    slot = arena.slot("big", size)
    assert process.memory_info().rss - before < size // 4
    slot.fill_(1)
    assert process.memory_info().rss - before > size // 2
    arena.close()
    arena.close()
    assert process.memory_info().rss - before < size // 4
    assert int(slot[0]) == 0  # a view that outlives the arena must not crash the process


@pytest.mark.parametrize("numel", [0, 1, 5000])
def test_aligned_tensors_outlive_their_maker(numel: int) -> None:
    tensor = empty_aligned(numel, torch.bfloat16)
    assert (tensor.dtype, tensor.shape) == (torch.bfloat16, (numel,))
    assert numel == 0 or tensor.data_ptr() % 4096 == 0
    tensor.fill_(2)
    assert tensor.sum() == 2 * numel
