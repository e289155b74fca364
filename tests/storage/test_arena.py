import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.storage.arena import MOST_BYTES, PIECE_BYTES, HostArena, cut_pieces, empty_aligned
from penstock.storage.errors import BudgetError


def test_slots_are_page_aligned_and_disjoint() -> None:
    arena = HostArena(1 << 20, budget_bytes=1 << 20)
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
    for numel in (0, 1, 5000):
        tensor = empty_aligned(numel, torch.bfloat16)
        assert (tensor.dtype, tensor.shape) == (torch.bfloat16, (numel,))
        assert numel == 0 or tensor.data_ptr() % 4096 == 0
        assert tensor.fill_(2).sum() == 2 * numel


def test_what_is_too_much_is_named() -> None:
    with pytest.raises(BudgetError, match=r"budgets\.ram.*8,192.*4,096"):
        HostArena(8192, budget_bytes=4096)
    arena = HostArena(8192, budget_bytes=8192)
    arena.slot("first", 1)
    with pytest.raises(BudgetError, match=r"'second'.*4,097.*4,096 of 8,192"):
        arena.slot("second", 4097)
    assert arena.slot("third", 4096).numel() == 4096


def test_memory_is_resident_only_when_touched_and_goes_on_close() -> None:
    process = psutil.Process()
    size = 64 << 20
    before = process.memory_info().rss
    arena = HostArena(size, budget_bytes=size)
    slot = arena.slot("big", size)
    assert process.memory_info().rss - before < size // 4
    slot.fill_(1)
    assert process.memory_info().rss - before > size // 2
    arena.close()
    arena.close()
    assert process.memory_info().rss - before < size // 4
    assert int(slot[0]) == 0  # a view that outlives the arena must not crash the process


class RecordingRegistrar:
    """Notes what would be pinned, and refuses from the `refuse`th call on."""

    def __init__(self, refuse: int | None = None) -> None:
        self.ranges: dict[int, int] = {}
        self.calls: list[tuple[int, int]] = []
        self._refuse = refuse

    def register(self, address: int, nbytes: int) -> int:
        if self._refuse is not None and len(self.calls) >= self._refuse:
            return 2
        self.calls.append((address, nbytes))
        self.ranges[address] = nbytes
        return 0

    def unregister(self, address: int) -> None:
        del self.ranges[address]


pages = st.integers(1, 3 * (PIECE_BYTES // 4096) // 2).map(lambda n: n * 4096)


@given(st.lists(pages, min_size=1, max_size=40))
def test_no_slot_lies_across_two_registrations(sizes: list[int]) -> None:
    pieces = cut_pieces(sizes)
    ends = [offset + nbytes for offset, nbytes in pieces]
    assert [offset for offset, _ in pieces] == [0, *ends[:-1]]
    assert ends[-1] == sum(sizes)  # nothing is skipped, so the budget holds
    start = 0
    for size in sizes:
        inside = [piece for piece in pieces if piece[0] <= start and start + size <= piece[0] + piece[1]]
        assert len(inside) == 1
        start += size
    assert all(nbytes <= PIECE_BYTES or nbytes in sizes for _, nbytes in pieces)


def test_small_slots_share_few_registrations_and_one_too_large_for_any_is_refused() -> None:
    assert len(cut_pieces([PIECE_BYTES // 8] * 17)) == 3
    assert cut_pieces([MOST_BYTES - 4096]) == [(0, MOST_BYTES - 4096)]
    with pytest.raises(BudgetError, match="pins less than 549,755,813,888 at once"):
        cut_pieces([4096, MOST_BYTES])


@pytest.mark.parametrize("populates", [True, False])
def test_pinning_makes_every_slot_resident_and_registers_it(monkeypatch: pytest.MonkeyPatch, populates: bool) -> None:
    if not populates:
        monkeypatch.setattr("penstock.storage.arena._MADV_POPULATE_WRITE", 9999)  # as a kernel before 5.14 answers
    monkeypatch.setattr("penstock.storage.arena.PIECE_BYTES", 16 << 20)
    monkeypatch.setattr("penstock.storage.arena._STEP_BYTES", 6 << 20)
    sizes = [10 << 20, 7 << 20, 1, 25 << 20, 5000]
    arena = HostArena(1 << 30, budget_bytes=1 << 30)
    slots = [arena.slot(f"s{i}", n) for i, n in enumerate(sizes)]
    registrar, told = RecordingRegistrar(), list[tuple[int, int]]()
    before = psutil.Process().memory_info().rss
    arena.pin(registrar, lambda done, total: told.append((done, total)))
    assert psutil.Process().memory_info().rss - before > arena.used_bytes * 0.95
    assert arena.pinned
    assert not any(slot.any() for slot in slots)
    for slot in slots:
        start = slot.data_ptr()
        assert any(at <= start and start + slot.numel() <= at + n for at, n in registrar.ranges.items())
    assert len(registrar.ranges) == 4
    assert told == sorted(told)
    assert told[-1] == (arena.used_bytes, arena.used_bytes)
    with pytest.raises(AssertionError, match="pinned already"):
        arena.slot("late", 1)
    arena.close()
    assert not registrar.ranges
    assert not arena.pinned


def test_what_cannot_be_pinned_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.storage.arena.PIECE_BYTES", 1 << 20)
    arena = HostArena(8 << 20, budget_bytes=8 << 20)
    for i in range(8):
        arena.slot(f"s{i}", 1 << 20)
    registrar = RecordingRegistrar(refuse=3)
    with pytest.raises(BudgetError, match=r"error 2 after 3,145,728 bytes.*ulimit -l"):
        arena.pin(registrar)
    assert len(registrar.calls) == 3
    assert not registrar.ranges
