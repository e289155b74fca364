"""What every reader must do with the files of one array; run here on host memory, in tests/gpu on CUDA memory."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from penstock.storage.tier import chunk
from penstock.storage.tier.arena import empty_aligned
from penstock.storage.tier.layout import part_ranges
from penstock.storage.tier.readers import Reader

PART_BYTES = 8192
SIZES_BYTES = [4, 2048, 4092, 4096, 4100, PART_BYTES - 4, PART_BYTES, PART_BYTES + 4, 3 * PART_BYTES]
SIZES_BYTES.append(3 * PART_BYTES + 4096)
"""Of arrays of float32; bfloat16 arrays have as many elements, so half the bytes."""
DTYPES = ["float32", "bfloat16"]


class Files:
    """The chunk files of one array, as the store lays them out, and what they hold."""

    def __init__(self, folder: Path, numel: int, dtype: str):
        self.folder = folder
        torch_dtype: torch.dtype = getattr(torch, dtype)
        item_bytes = torch_dtype.itemsize
        part_numel = PART_BYTES // item_bytes
        self.form = chunk.ChunkFormat(min(numel, part_numel) * item_bytes if numel <= part_numel else PART_BYTES)
        stored_numel, rest = divmod(self.form.stored_bytes, item_bytes)
        assert rest == 0
        self.parts = part_ranges(numel, part_numel)
        self.values = torch.rand(numel, generator=torch.Generator().manual_seed(numel)).to(torch_dtype)
        folder.mkdir(parents=True, exist_ok=True)
        metadata = {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [len(self.parts), self.form.part_bytes // item_bytes],
            "data_type": dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1, stored_numel]}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
            "fill_value": 0,
        }
        (folder / "zarr.json").write_text(json.dumps(metadata))
        for part in range(len(self.parts)):
            chunk.write_chunk(self.path(part), self.payload(part).numpy(), self.form, direct=True)

    def path(self, part: int) -> Path:
        return self.folder / f"c.{part}.0"

    def payload(self, part: int) -> torch.Tensor:
        start, stop = self.parts[part]
        return self.values[start:stop].view(torch.uint8)

    def crc(self, part: int) -> int:
        return int.from_bytes(self.path(part).read_bytes()[-4:], "little")


def _out(nbytes: int, device: str) -> torch.Tensor:
    if device == "cpu":
        return empty_aligned(nbytes, torch.uint8).fill_(0xAA)
    out = torch.full((nbytes,), 0xAA, dtype=torch.uint8, device=device)
    torch.cuda.synchronize()
    return out


def check_contents(reader: Reader, device: str, folder: Path, nbytes: int, dtype: str) -> None:
    """All parts come back, the last and shorter one too, with and without the manifest's checksum."""
    files = Files(folder, nbytes // 4, dtype)
    for part in range(len(files.parts)):
        for expected in (None, files.crc(part)):
            out = _out(files.payload(part).numel(), device)
            reader.read(files.path(part), out, files.form, expected)
            assert torch.equal(out.cpu(), files.payload(part)), (part, expected)


def check_any_address(reader: Reader, device: str, folder: Path) -> None:
    """Memory that starts at no page boundary is filled as well, and nothing beside it is touched."""
    files = Files(folder, PART_BYTES // 4, "float32")
    memory = _out(PART_BYTES + 64, device)
    reader.read(files.path(0), memory[32 : 32 + PART_BYTES], files.form, None)
    assert torch.equal(memory[32 : 32 + PART_BYTES].cpu(), files.payload(0))
    assert set(memory[:32].tolist() + memory[32 + PART_BYTES :].tolist()) == {0xAA}


def check_rewritten(reader: Reader, device: str, folder: Path) -> None:
    """A file that was read before and written since is read anew."""
    files = Files(folder, PART_BYTES // 4, "float32")
    out = _out(PART_BYTES, device)
    reader.read(files.path(0), out, files.form, files.crc(0))
    files.values.neg_()
    chunk.write_chunk(files.path(0), files.payload(0).numpy(), files.form, direct=True)
    reader.read(files.path(0), out, files.form, files.crc(0))
    assert torch.equal(out.cpu(), files.payload(0))


def check_threads(reader: Reader, device: str, folder: Path) -> None:
    """Eight threads read 32 parts of one array at once."""
    files = Files(folder, 32 * PART_BYTES // 4, "float32")
    outs = [_out(PART_BYTES, device) for _ in files.parts]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda part: reader.read(files.path(part), outs[part], files.form, None), range(len(outs))))
    for part, out in enumerate(outs):
        assert torch.equal(out.cpu(), files.payload(part))


def _flip(position: int, path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[position] ^= 1
    path.write_bytes(raw)


def _resize(change: int, path: Path) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[:change] if change < 0 else raw + bytes(change))


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "first byte": (partial(_flip, 0), "checksum"),
    "last payload byte": (partial(_flip, PART_BYTES - 1), "checksum"),
    "padding": (partial(_flip, PART_BYTES + 7), "checksum"),
    "checksum": (partial(_flip, -2), "checksum|damaged"),
    "missing": (Path.unlink, "missing"),
    "empty": (lambda path: path.write_bytes(b""), "has 0 bytes instead of"),
    "one block short": (partial(_resize, -4096), "bytes instead of"),
    "one byte short": (partial(_resize, -1), "bytes instead of"),
    "one block long": (partial(_resize, 4096), "bytes instead of"),
}


def check_damage(reader: Reader, device: str, folder: Path, name: str) -> None:
    """A damaged file is a ChunkError that says what is wrong; the part beside it is still read."""
    files = Files(folder, 2 * PART_BYTES // 4, "float32")
    expected = files.crc(1)
    damage, message = DAMAGE[name]
    damage(files.path(1))
    out = _out(PART_BYTES, device)
    with pytest.raises(chunk.ChunkError, match=message):
        reader.read(files.path(1), out, files.form, expected)
    reader.read(files.path(0), out, files.form, None)
    assert torch.equal(out.cpu(), files.payload(0))


def check_stale(reader: Reader, device: str, folder: Path) -> None:
    """A whole file of another generation: only the manifest's checksum tells."""
    files = Files(folder, PART_BYTES // 4, "float32")
    out = _out(PART_BYTES, device)
    with pytest.raises(chunk.ChunkError, match="stale"):
        reader.read(files.path(0), out, files.form, files.crc(0) ^ 1)


def check_device_error(reader: Reader, device: str, folder: Path) -> None:
    """What the operating system refuses is an OSError, not damage."""
    files = Files(folder, PART_BYTES // 4, "float32")
    files.path(0).unlink()
    files.path(0).symlink_to(files.path(0).name)
    with pytest.raises(OSError, match="symbolic links"):
        reader.read(files.path(0), _out(PART_BYTES, device), files.form, None)


CHECKS = [check_any_address, check_rewritten, check_threads, check_stale, check_device_error]
