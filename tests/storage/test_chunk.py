import itertools
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.storage import chunk, crc
from penstock.storage.arena import empty_aligned
from penstock.storage.crc import checksum
from penstock.storage.layout import ALIGN_NUMEL, FlatLayout, ParamSpec, part_ranges


@given(st.binary(max_size=5000), st.integers(0, 20000))
def test_zeros_need_not_exist(data: bytes, num_zeros: int) -> None:
    assert checksum(memoryview(b"123456789"), 0) == 0xE3069283  # the check value of CRC-32C in the catalogues
    assert checksum(memoryview(data), num_zeros) == crc32c(data + bytes(num_zeros))


def test_sizes_without_the_crc32c_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crc, "HAVE_CRC32C", False)
    for size in (0, 1, 7, 8, 4095, 4097, *(k * crc._PIECE_BYTES + d for k in (1, 3) for d in (-1, 0, 1))):
        data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
        for num_zeros in (0, 1, 4092):
            assert checksum(data.data, num_zeros) == crc32c(data.tobytes() + bytes(num_zeros)), (size, num_zeros)


def test_without_the_package_a_thread_opens_one_store(monkeypatch: pytest.MonkeyPatch) -> None:
    opened, real = [], crc._one_chunk_store
    monkeypatch.setattr(crc, "_one_chunk_store", lambda: opened.append(threading.get_ident()) or real())
    data = np.random.default_rng(0).integers(0, 256, (8, 200_001), dtype=np.uint8)
    with ThreadPoolExecutor(4) as pool:  # at once: what threads share would be written over
        found = list(pool.map(lambda i: crc.through_tensorstore(data[i % 8].data), range(64)))
    assert found == [crc32c(data[i % 8].tobytes()) for i in range(64)]
    assert 1 <= len(opened) == len(set(opened)) <= 4


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
    assert [p.name for p in layout.params] == [p.name for d in (True, False) for p in params if p.decay is d]
    assert layout.numel % ALIGN_NUMEL == 0
    end = 0
    for param in layout.params:
        start = layout.offset(param.name)
        assert start % ALIGN_NUMEL == 0
        assert start >= end
        assert (start < layout.decay_numel) == param.decay
        end = start + param.numel
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
    assert layout.decay_numel == 2048
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
