import errno
import itertools
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import reader_checks as checks
import torch
from system_calls import refuse_direct

from penstock.storage import chunk, readers
from penstock.storage.errors import UserError
from penstock.storage.readers import DirectReader, Reader, Readers, TensorstoreReader, find_readers, select_readers

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PART = torch.empty(checks.PART_BYTES, dtype=torch.uint8)


@pytest.fixture(params=["direct", "buffered", "tensorstore"])
def reader(request: pytest.FixtureRequest) -> Reader:
    if request.param == "tensorstore":
        return TensorstoreReader()
    return DirectReader(direct=request.param == "direct")


def test_contents(reader: Reader, tmp_path: Path) -> None:
    for nbytes, dtype in itertools.product(checks.SIZES_BYTES, checks.DTYPES):
        checks.check_contents(reader, "cpu", tmp_path / f"{nbytes} {dtype}", nbytes, dtype)


@pytest.mark.parametrize("check", checks.CHECKS)
def test_checks(reader: Reader, tmp_path: Path, check: Callable[[Reader, str, Path], None]) -> None:
    check(reader, "cpu", tmp_path / "a")


def test_damage(reader: Reader, tmp_path: Path) -> None:
    for name in checks.DAMAGE:
        checks.check_damage(reader, "cpu", tmp_path / name, name)


@pytest.mark.parametrize("position", [0, 4000, checks.PART_BYTES - 1, checks.PART_BYTES + 1])
def test_tensorstore_itself_finds_a_flipped_bit(tmp_path: Path, position: int) -> None:
    files = checks.Files(tmp_path / "a", checks.PART_BYTES // 4, "float32")
    raw = bytearray(files.path(0).read_bytes())
    raw[position] ^= 0x10
    files.path(0).write_bytes(raw)
    with pytest.raises(chunk.ChunkError, match="Digest mismatch"):
        TensorstoreReader().read(files.path(0), PART, files.form, None)


@pytest.mark.parametrize("content", [None, "{", '{"zarr_format": 3}'])
def test_tensorstore_needs_a_whole_zarr_json(tmp_path: Path, content: str | None) -> None:
    files = checks.Files(tmp_path / "a", checks.PART_BYTES // 4, "float32")
    description = files.folder / "zarr.json"
    description.unlink()
    if content is not None:
        description.write_text(content)
    with pytest.raises(chunk.ChunkError, match=r"zarr\.json|zarr3"):
        TensorstoreReader().read(files.path(0), PART, files.form, None)


def test_tensorstore_refuses_the_description_of_another_array(tmp_path: Path) -> None:
    small = checks.Files(tmp_path / "small", 7, "float32")
    large = checks.Files(tmp_path / "large", checks.PART_BYTES // 4, "float32")
    os.replace(small.folder / "zarr.json", large.folder / "zarr.json")
    with pytest.raises(chunk.ChunkError, match=r"zarr\.json describes another array"):
        TensorstoreReader().read(large.path(0), PART, large.form, None)


def test_tensorstore_sees_an_array_made_anew(tmp_path: Path) -> None:
    reader = TensorstoreReader()
    for numel in (checks.PART_BYTES // 4, 3 * checks.PART_BYTES // 4, 100):
        files = checks.Files(tmp_path / "a", numel, "float32")
        for part in range(len(files.parts)):
            out = torch.empty(files.payload(part).numel(), dtype=torch.uint8)
            reader.read(files.path(part), out, files.form, None)
            assert torch.equal(out, files.payload(part))
        shutil.rmtree(tmp_path / "a")


def test_file_system_without_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = checks.Files(tmp_path / "a", checks.PART_BYTES // 4, "float32")
    refuse_direct(monkeypatch)
    for reader in (DirectReader(), TensorstoreReader()):
        reader.read(files.path(0), PART.zero_(), files.form, files.crc(0))
        assert torch.equal(PART, files.payload(0))


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


def test_named_readers_on_cuda_pass_through_host_memory(tmp_path: Path) -> None:
    for choice in ("direct", "tensorstore"):
        chosen = select_readers(choice, CUDA, [tmp_path])
        assert (chosen.host.name, chosen.device, chosen.warning) == (choice, None, None)


def test_fallback_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvikio", None)
    for choice in ("auto", "kvikio"):
        chosen = select_readers(choice, CUDA, [tmp_path])
        assert (chosen.host.name, chosen.device) == ("direct", None)
        assert chosen.warning is not None
        assert "pip install 'penstock[gpu]'" in chosen.warning
        assert "\n" not in chosen.warning


class FailingReader:
    """Stands where kvikio would; fails its probe as kvikio does without libcuda."""

    name = "kvikio"
    checks_payload = False

    def read(self, path: Path, out: torch.Tensor, form: chunk.ChunkFormat, expected: int | None) -> None:
        raise RuntimeError("libcuda.so.1: cannot open shared object file\nmore")


class RightReader(FailingReader):
    def read(self, path: Path, out: torch.Tensor, form: chunk.ChunkFormat, expected: int | None) -> None:
        DirectReader().read(path, out, form, expected)


class SwappingReader(FailingReader):
    """Puts two pieces of a file in each other's place."""

    def read(self, path: Path, out: torch.Tensor, form: chunk.ChunkFormat, expected: int | None) -> None:
        DirectReader().read(path, out, form, expected)
        out.copy_(out.roll(out.numel() // 2))


@pytest.fixture
def no_cuda_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory "on the GPU" is host memory."""
    real_empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, device=None, **kwargs: real_empty(*args, **kwargs))


@pytest.mark.usefixtures("no_cuda_needed")
def test_the_probe_needs_no_folder_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "KvikioReader", RightReader)
    chosen = select_readers("auto", CUDA, [tmp_path / "drive" / "run", tmp_path])
    assert (chosen.warning, chosen.host.name) == (None, "direct")
    assert isinstance(chosen.device, RightReader)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_cuda_needed")
@pytest.mark.parametrize(("kind", "reason"), [(FailingReader, "libcuda.so.1"), (SwappingReader, "different bytes")])
def test_fallback_when_the_probe_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[FailingReader], reason: str
) -> None:
    monkeypatch.setattr(readers, "KvikioReader", kind)
    chosen = select_readers("auto", CUDA, [tmp_path])
    assert (chosen.host.name, chosen.device) == ("direct", None)
    assert chosen.warning is not None
    assert reason in chosen.warning
    assert "\n" not in chosen.warning
    assert list(tmp_path.iterdir()) == []


def test_no_memory_of_the_device_is_taken_before_the_run_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator is configured after planning, and the plan asks which readers there are."""
    monkeypatch.setattr(readers, "KvikioReader", FailingReader)
    for name in ("empty", "zeros", "full", "tensor", "arange"):
        monkeypatch.setattr(torch, name, lambda *args, **kwargs: pytest.fail("allocates"))
    found = find_readers("auto", CUDA)
    assert (found.host.name, found.warning) == ("direct", None)
    assert isinstance(found.device, FailingReader)


class PartReader(FailingReader):
    """Works for what is small, as a driver that cannot map a whole part does."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.sizes: list[int] = []
        self.threads: list[int] = []

    def read(self, path: Path, out: torch.Tensor, form: chunk.ChunkFormat, expected: int | None) -> None:
        self.sizes.append(out.numel())
        self.threads.append(threading.get_ident())
        if out.numel() > self.most:
            raise OSError(errno.ENOMEM, "cannot map so much")
        DirectReader().read(path, out, form, expected)


@pytest.mark.parametrize("size", [1, 4095, 4 << 20, (4 << 20) + 3])
def test_a_reader_is_confirmed_in_the_runs_memory_at_its_size(tmp_path: Path, size: int) -> None:
    reader = PartReader(size)
    begun: list[int] = []
    memory = torch.full((size + 64,), 0xAA, dtype=torch.uint8)
    found = Readers(DirectReader(), reader)
    drives = [tmp_path / "a", tmp_path / "b" / "not yet"]
    assert found.confirm(memory[32:-32], drives, lambda: begun.append(threading.get_ident())) is found
    assert reader.sizes == [size, size]
    assert set(reader.threads) == set(begun) != {threading.get_ident()}
    assert set(memory[:32].tolist() + memory[-32:].tolist()) == {0xAA}
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_fails_at_the_size_of_a_part_is_not_used(tmp_path: Path) -> None:
    reader = PartReader((4 << 20) - 1)
    found = Readers(TensorstoreReader(), reader)
    confirmed = found.confirm(torch.empty(4 << 20, dtype=torch.uint8), [tmp_path])
    assert (confirmed.host, confirmed.device) == (found.host, None)
    assert confirmed.warning == (
        "kvikio is not used; reads to the GPU go through host memory (tensorstore): cannot map so much"
    )
    assert confirmed.pinned_bytes(4) == 0
    assert list(tmp_path.iterdir()) == []


def test_what_is_read_as_host_memory_needs_no_confirmation(tmp_path: Path) -> None:
    missing = tmp_path / "readonly"
    for found in (find_readers("auto", CPU), find_readers("direct", CUDA)):
        assert found.confirm(torch.empty(0, dtype=torch.uint8), [missing]) is found
