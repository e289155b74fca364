"""Chunk files and who reads them, how arrays lie in them, and the memory that they are read into."""

import errno
import itertools
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import reader_checks as checks
import torch
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st
from streams_on_cpu import streams_on_cpu

from penstock.storage.files.crc import checksum
from penstock.storage.files.errors import BudgetError, UserError
from penstock.storage.tier import chunk, readers
from penstock.storage.tier.arena import MOST_BYTES, PIECE_BYTES, HostArena, cut_pieces, empty_aligned
from penstock.storage.tier.layout import ALIGN_NUMEL, FlatLayout, ParamSpec, part_ranges
from penstock.storage.tier.readers import DirectReader, Reader, Readers, TensorstoreReader, find_readers, select_readers

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PART = torch.empty(checks.PART_BYTES, dtype=torch.uint8)


class Buffered(DirectReader):
    """Through the page cache, as where a file system has no direct I/O."""

    def read(self, path: Path, out: torch.Tensor, form: chunk.ChunkFormat, expected: int | None) -> None:
        chunk.read_chunk(path, out.numpy(), form, direct=False, expected=expected)


@pytest.fixture(params=[DirectReader, Buffered, TensorstoreReader])
def reader(request: pytest.FixtureRequest) -> Reader:
    made: Reader = request.param()
    return made


def test_contents_and_damage(reader: Reader, tmp_path: Path) -> None:
    for nbytes, dtype in itertools.product(checks.SIZES_BYTES, checks.DTYPES):
        checks.check_contents(reader, "cpu", tmp_path / f"{nbytes} {dtype}", nbytes, dtype)
    for name in checks.DAMAGE:
        checks.check_damage(reader, "cpu", tmp_path / name, name)


@pytest.mark.parametrize("check", checks.CHECKS)
def test_checks(reader: Reader, tmp_path: Path, check: Callable[[Reader, str, Path], None]) -> None:
    check(reader, "cpu", tmp_path / "a")


def test_choices_on_cpu(tmp_path: Path) -> None:
    for choice, name in {"auto": "direct", "direct": "direct", "tensorstore": "tensorstore"}.items():
        chosen = select_readers(choice, CPU, [tmp_path])
        assert chosen.host.name == name
        assert chosen.device is chosen.host  # the gpu tier is ordinary memory
        assert chosen.warning is None
    kvikio = select_readers("kvikio", CPU, [tmp_path])
    assert (kvikio.host.name, kvikio.device) == ("direct", kvikio.host)
    assert kvikio.warning is not None
    assert "CPU" in kvikio.warning
    with pytest.raises(UserError, match=r"storage\.reader: 'fast' is not one of auto, kvikio, direct, tensorstore"):
        select_readers("fast", CPU, [tmp_path])


def test_reads_on_cuda_that_pass_through_host_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are asked for, and where there is no kvikio."""
    chosen = select_readers("direct", CUDA, [tmp_path])
    assert (chosen.host.name, chosen.device, chosen.warning) == ("direct", None, None)
    for found in (find_readers("auto", CPU), find_readers("direct", CUDA)):  # nothing is to be confirmed
        assert found.confirm(torch.empty(0, dtype=torch.uint8), [tmp_path / "readonly"]) is found
    monkeypatch.setitem(sys.modules, "kvikio", None)
    for choice in ("auto", "kvikio"):
        chosen = select_readers(choice, CUDA, [tmp_path])
        assert (chosen.host.name, chosen.device) == ("direct", None)
        assert chosen.warning is not None
        assert "pip install 'penstock[gpu]'" in chosen.warning
        assert "\n" not in chosen.warning


class StandIn:
    """Stands where kvikio would; may fail for what is not small, or put two pieces of a file in each other's place."""

    name = "kvikio"

    def __init__(self, most: int = 1 << 40, error: Exception | None = None, *, swaps: bool = False) -> None:
        self.most, self.error, self.swaps = most, error or OSError(errno.ENOMEM, "cannot map so much"), swaps
        self.sizes: list[int] = []
        self.threads: list[int] = []

    def read(self, path: Path, out: torch.Tensor, form: chunk.ChunkFormat, expected: int | None) -> None:
        self.sizes.append(out.numel())
        self.threads.append(threading.get_ident())
        if out.numel() > self.most:
            raise self.error
        DirectReader().read(path, out, form, expected)
        if self.swaps:
            out.copy_(out.roll(out.numel() // 2))


WITHOUT_LIBCUDA = RuntimeError("libcuda.so.1: cannot open shared object file\nmore")


@pytest.mark.parametrize(
    ("reader", "reason"),
    [(StandIn(), None), (StandIn(0, WITHOUT_LIBCUDA), "libcuda.so.1"), (StandIn(swaps=True), "different bytes")],
)
def test_kvikio_is_probed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: StandIn, reason: str | None) -> None:
    real_empty = torch.empty  # memory "on the GPU" is host memory
    monkeypatch.setattr(torch, "empty", lambda *args, device=None, **kwargs: real_empty(*args, **kwargs))
    monkeypatch.setattr(readers, "KvikioReader", lambda: reader)
    chosen = select_readers("auto", CUDA, [tmp_path / "drive" / "run", tmp_path])  # it needs no folder of the run
    assert (chosen.host.name, chosen.device) == ("direct", None if reason else reader)
    assert (chosen.warning is None) == (reason is None)
    assert (reason or "") in (chosen.warning or "")
    assert "\n" not in (chosen.warning or "")
    assert list(tmp_path.iterdir()) == []


def test_no_memory_of_the_device_is_taken_before_the_run_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator is configured after planning, and the plan asks which readers there are."""
    reader = StandIn(0)
    monkeypatch.setattr(readers, "KvikioReader", lambda: reader)
    for name in ("empty", "zeros", "full", "tensor", "arange"):
        monkeypatch.setattr(torch, name, lambda *args, **kwargs: pytest.fail("allocates"))
    found = find_readers("auto", CUDA)
    assert (found.host.name, found.warning, found.device) == ("direct", None, reader)


@pytest.mark.parametrize("size", [1, 4095, 4 << 20, (4 << 20) + 3])
def test_a_reader_is_confirmed_in_the_runs_memory_at_its_size(tmp_path: Path, size: int) -> None:
    reader = StandIn(size)
    begun: list[int] = []
    memory = torch.full((size + 64,), 0xAA, dtype=torch.uint8)
    found = Readers(DirectReader(), reader)
    drives = [tmp_path / "a", tmp_path / "b" / "not yet"]
    assert found.confirm(memory[32:-32], drives, lambda: begun.append(threading.get_ident())) is found
    assert reader.sizes == [size, size]
    assert set(reader.threads) == set(begun) != {threading.get_ident()}
    assert set(memory[:32].tolist() + memory[-32:].tolist()) == {0xAA}
    reader.most -= 1  # of the size of a part it cannot read
    confirmed = found.confirm(memory, [tmp_path])
    assert (confirmed.host, confirmed.device, confirmed.pinned_bytes(4)) == (found.host, None, 0)
    said = "kvikio is not used; reads to the GPU go through host memory (direct): cannot map so much"
    assert confirmed.warning == said
    assert list(tmp_path.iterdir()) == []


@given(st.binary(max_size=5000), st.integers(0, 20000) | st.integers((1 << 20) - 1, (2 << 20) + 1))
def test_zeros_need_not_exist(data: bytes, num_zeros: int) -> None:
    assert checksum(memoryview(b"123456789")) == 0xE3069283  # the check value of CRC-32C in the catalogues
    assert checksum(memoryview(data), num_zeros) == crc32c(data + bytes(num_zeros))


@given(st.lists(st.binary(max_size=2000), max_size=5), st.integers(0, 9000))
def test_a_checksum_of_pieces(pieces: list[bytes], num_zeros: int) -> None:
    found = 0
    for piece in pieces:
        found = checksum(memoryview(piece), before=found)
    assert found == crc32c(b"".join(pieces))
    assert checksum(memoryview(b""), num_zeros, found) == crc32c(b"".join(pieces) + bytes(num_zeros))


UGLY = [1, 2, 4091, 4092, 4093, 4095, 4096, 4097, 8191, 8192, 12288, 65536 + 4096]


@pytest.mark.parametrize("direct", [False, True])
def test_round_trip(tmp_path: Path, direct: bool) -> None:
    assert isinstance(chunk.supports_direct(tmp_path), bool)
    assert os.listdir(tmp_path) == []
    for size, spare in itertools.product(UGLY, (0, 1, 4096, 100_000)):
        form = chunk.ChunkFormat(size + spare)
        data, out = (empty_aligned(size, torch.uint8).numpy() for _ in range(2))
        path = tmp_path / f"{size}-{spare}"
        for seed in (1, 2):  # the second write overwrites in place
            data[:] = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
            chunk.write_chunk(path, data, form, direct=direct)
            chunk.read_chunk(path, out, form, direct=direct)
            assert np.array_equal(out, data)
            raw = path.read_bytes()
            assert len(raw) == form.file_bytes == -(-len(raw) // 4096) * 4096
            assert raw[:size] == data.tobytes()
            assert not any(raw[size:-4])
            assert int.from_bytes(raw[-4:], "little") == crc32c(raw[:-4])


@settings(max_examples=30, deadline=None)
@given(position=st.integers(0, 8191), bit=st.integers(0, 7))
def test_any_flipped_payload_bit_is_found(tmp_path_factory: pytest.TempPathFactory, position: int, bit: int) -> None:
    path = tmp_path_factory.mktemp("flip") / "c"
    form = chunk.ChunkFormat(8192)
    data, out = (empty_aligned(8192, torch.uint8).numpy() for _ in range(2))
    chunk.write_chunk(path, data, form, direct=True)
    raw = bytearray(path.read_bytes())
    raw[position] ^= 1 << bit
    path.write_bytes(raw)
    with pytest.raises(chunk.ChunkError, match="checksum"):
        chunk.read_chunk(path, out, form, direct=True)


shapes = st.lists(st.integers(1, 70), min_size=0, max_size=3).map(tuple)


@given(st.lists(st.tuples(shapes, st.booleans()), min_size=1, max_size=8))
def test_every_param_has_its_own_aligned_range(items: list[tuple[tuple[int, ...], bool]]) -> None:
    params = [ParamSpec(f"p{i}", shape, decay) for i, (shape, decay) in enumerate(items)]
    layout = FlatLayout.build(params)
    matrices = [param for param in params if len(param.shape) > 1]
    assert list(layout.params) == [*matrices, *(param for param in params if param not in matrices)]
    assert layout.numel % ALIGN_NUMEL == 0
    bounds = [0, *(bound for run in layout.decay_runs for bound in run[:2]), layout.numel]
    assert bounds[::2] == bounds[1::2]
    assert all(a[2] is not b[2] for a, b in itertools.pairwise(layout.decay_runs))
    end = 0
    for param in layout.params:
        start = layout.offsets[param.name]
        assert start % ALIGN_NUMEL == 0
        assert start >= end
        end = start + param.numel
        assert [decays for a, b, decays in layout.decay_runs if a <= start < end <= b] == [param.decay]
    assert end <= layout.numel < end + ALIGN_NUMEL


def test_views_write_through_and_leave_padding_alone() -> None:
    scalar = FlatLayout.build([ParamSpec("scale", (), False)])
    assert scalar.views(torch.zeros(2048))["scale"].shape == ()
    layout = FlatLayout.build([ParamSpec("norm", (3,), False), ParamSpec("w", (5, 7), True)])
    flat = torch.zeros(layout.numel, dtype=torch.bfloat16)
    for view in layout.views(flat).values():
        view.fill_(1)
    assert {n: tuple(v.shape) for n, v in layout.views(flat).items()} == {"w": (5, 7), "norm": (3,)}
    assert flat.sum() == 38
    assert flat[:35].all()
    assert flat[2048:2051].all()
    assert layout.decay_runs == ((0, 2048, True), (2048, 4096, False))
    with pytest.raises(AssertionError, match="twice"):
        FlatLayout.build([ParamSpec("a", (1,), True), ParamSpec("a", (2,), True)])


@given(st.integers(1, 10**7), st.integers(1, 600))
def test_parts_cover_the_buffer_evenly(numel: int, part_blocks: int) -> None:
    limit = part_blocks * ALIGN_NUMEL
    parts = part_ranges(numel, limit)
    assert parts[0][0] == 0
    assert parts[-1][1] == numel
    assert all(a[1] == b[0] for a, b in itertools.pairwise(parts))
    lengths = [stop - start for start, stop in parts]
    assert max(lengths) <= limit
    assert len(parts) <= -(-numel // limit)
    assert len(set(lengths[:-1])) <= 1
    assert all(start % ALIGN_NUMEL == 0 for start, _ in parts)
    # Files are as long as the longest part: the space lost is under one alignment unit per part.
    assert lengths[0] * len(parts) - numel < len(parts) * ALIGN_NUMEL


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
    with pytest.raises(BudgetError, match=r"budgets\.ram.*8,192.*4,096"):
        HostArena(8192, budget_bytes=4096)
    arena = HostArena(8192, budget_bytes=8192)
    arena.slot("first", 1)
    with pytest.raises(BudgetError, match=r"'second'.*4,097.*4,096 of 8,192"):
        arena.slot("second", 4097)
    assert arena.slot("third", 4096).numel() == 4096


def test_memory_is_resident_only_when_touched_and_goes_on_close() -> None:
    process, size = psutil.Process(), 64 << 20
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

    def __init__(self, refuse: int = 1 << 40) -> None:
        self.ranges, self.calls, self.refuse = dict[int, int](), list[int](), refuse

    def register(self, address: int, nbytes: int) -> int:
        if len(self.calls) >= self.refuse:
            return 2
        self.calls.append(address)
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


@pytest.mark.parametrize("populates", [True, False])
def test_pinning_makes_every_slot_resident_and_registers_it(monkeypatch: pytest.MonkeyPatch, populates: bool) -> None:
    if not populates:
        monkeypatch.setattr("penstock.storage.tier.arena._MADV_POPULATE_WRITE", 9999)  # as a kernel before 5.14 answers
    monkeypatch.setattr("penstock.storage.tier.arena.PIECE_BYTES", 16 << 20)
    monkeypatch.setattr("penstock.storage.tier.arena._STEP_BYTES", 6 << 20)
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
    """Small slots share few registrations, and one too large for any is refused."""
    assert len(cut_pieces([PIECE_BYTES // 8] * 17)) == 3
    assert cut_pieces([MOST_BYTES - 4096]) == [(0, MOST_BYTES - 4096)]
    with pytest.raises(BudgetError, match="pins less than 549,755,813,888 at once"):
        cut_pieces([4096, MOST_BYTES])
    monkeypatch.setattr("penstock.storage.tier.arena.PIECE_BYTES", 1 << 20)
    arena = HostArena(8 << 20, budget_bytes=8 << 20)
    for i in range(8):
        arena.slot(f"s{i}", 1 << 20)
    registrar = RecordingRegistrar(refuse=3)
    with pytest.raises(BudgetError, match=r"cannot pin even 4.0 MiB of RAM \(cudaHostRegister error 2; .*GPU"):
        arena.pin(registrar)  # nor is there anything else here that pins
    assert len(registrar.calls) == 3
    assert not registrar.ranges


@pytest.mark.parametrize("nbytes", [4, 8188, 8192, 8196, 16384, 5 * 8192 + 12, 1 << 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_cannot_be_pinned_is_copied_in_pieces(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, nbytes: int
) -> None:
    """Every byte and no other, both ways, twice; the pages are there, and the run is told."""
    monkeypatch.setattr("penstock.storage.tier.arena.RING_PIECE_BYTES", 8192)
    monkeypatch.setattr("penstock.storage.tier.arena.pinned_empty", empty_aligned)
    arena, told = HostArena(1 << 20, budget_bytes=1 << 20), list[tuple[int, int]]()
    slot, other = (arena.slot(name, 1 << 16).view(dtype) for name in ("slot", "other"))
    numel = nbytes // dtype.itemsize
    values, around = torch.arange(numel).to(dtype), torch.zeros(numel + 8, dtype=dtype)
    back = around[4:-4]
    with streams_on_cpu():
        arena.pin(RecordingRegistrar(refuse=0), lambda done, total: told.append((done, total)))
        assert told[-1] == (1 << 17, 1 << 17)
        assert not arena.pinned
        for _ in range(2):
            arena.copy(slot[:numel].zero_(), values)
            arena.copy(back.zero_().view(1, -1), slot[:numel].view(1, -1))
            assert torch.equal(slot[:numel], values)
            assert torch.equal(back, values)
        assert not any(rest.any() for rest in (slot[numel:], other, around[:4], around[-4:]))
        arena.copy(back, values + 1)  # of no slot
        assert torch.equal(back, values + 1)
    assert arena.remark is not None
    for part in ("cannot pin 128 KiB", "error 2 after 0 B", "32.0 KiB of pinned memory", "slower", "budgets.ram"):
        assert part in arena.remark
    arena.close()
