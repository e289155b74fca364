import itertools
import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.storage import chunk, crc
from penstock.storage.crc import checksum


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


def test_without_the_package_a_thread_opens_one_store_however_many_checksums_it_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = []
    real = crc._one_chunk_store
    monkeypatch.setattr(crc, "_one_chunk_store", lambda: opened.append(threading.get_ident()) or real())
    data = np.random.default_rng(0).integers(0, 256, (8, 200_001), dtype=np.uint8)
    with ThreadPoolExecutor(4) as pool:  # at once: what threads share would be written over
        found = list(pool.map(lambda i: crc.through_tensorstore(data[i % 8].data), range(64)))
    assert found == [crc32c(data[i % 8].tobytes()) for i in range(64)]
    assert 1 <= len(opened) == len(set(opened)) <= 4


def _aligned(size: int) -> chunk.Bytes:
    return np.frombuffer(mmap.mmap(-1, max(size, 1)), np.uint8)[:size]


UGLY = [1, 2, 4091, 4092, 4093, 4095, 4096, 4097, 8191, 8192, 12288, 65536 + 4096]


@pytest.mark.parametrize("direct", [False, True])
def test_round_trip(tmp_path: Path, direct: bool) -> None:
    for size, spare in itertools.product(UGLY, (0, 1, 4096, 100_000)):
        form = chunk.ChunkFormat(size + spare)
        data, out = _aligned(size), _aligned(size)
        path = tmp_path / f"{size}-{spare}"
        for seed in (1, 2):  # the second write overwrites in place
            data[:] = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
            chunk.write_chunk(path, data, form, direct=direct)
            chunk.read_chunk(path, out, form, direct=direct)
            assert np.array_equal(out, data)
            raw = path.read_bytes()
            assert len(raw) % 4096 == 0
            assert len(raw) == form.file_bytes
            assert raw[:size] == data.tobytes()
            assert not any(raw[size:-4])
            assert int.from_bytes(raw[-4:], "little") == crc32c(raw[:-4])


@settings(max_examples=30, deadline=None)
@given(position=st.integers(0, 8191), bit=st.integers(0, 7))
def test_any_flipped_payload_bit_is_found(tmp_path_factory: pytest.TempPathFactory, position: int, bit: int) -> None:
    path = tmp_path_factory.mktemp("flip") / "c"
    form = chunk.ChunkFormat(8192)
    data, out = _aligned(8192), _aligned(8192)
    chunk.write_chunk(path, data, form, direct=True)
    raw = bytearray(path.read_bytes())
    raw[position] ^= 1 << bit
    path.write_bytes(raw)
    with pytest.raises(chunk.ChunkError, match="checksum"):
        chunk.read_chunk(path, out, form, direct=True)


def test_probe_leaves_nothing(tmp_path: Path) -> None:
    assert isinstance(chunk.supports_direct(tmp_path), bool)
    assert os.listdir(tmp_path) == []
