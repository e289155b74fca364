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


@pytest.mark.parametrize("name", ["first byte", "last payload byte", "padding"])
def test_tensorstore_itself_finds_a_flipped_bit(tmp_path: Path, name: str) -> None:
    files = checks.Files(tmp_path / "a", checks.PART_BYTES // 4, "float32")
    checks.DAMAGE[name][0](files.path(0))
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
    for nbytes in (checks.PART_BYTES, 3 * checks.PART_BYTES, 400):
        checks.check_contents(reader, "cpu", tmp_path / "a", nbytes, "float32")
        shutil.rmtree(tmp_path / "a")


def test_file_system_without_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_direct(monkeypatch)
    for reader in (DirectReader(), TensorstoreReader()):
        checks.check_contents(reader, "cpu", tmp_path / reader.name, checks.PART_BYTES, "float32")


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
    for choice in ("direct", "tensorstore"):
        chosen = select_readers(choice, CUDA, [tmp_path])
        assert (chosen.host.name, chosen.device, chosen.warning) == (choice, None, None)
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
    checks_payload = False

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
