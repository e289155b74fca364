"""The checks of tests/storage/test_readers.py on CUDA memory, through kvikio."""

from pathlib import Path

import pytest
import reader_checks as checks
import torch

from penstock.storage.readers import KvikioReader, Reader, select_readers

pytest.importorskip("kvikio", exc_type=ImportError)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


@pytest.fixture(scope="module")
def reader() -> Reader:
    return KvikioReader()


@pytest.mark.parametrize("dtype", checks.DTYPES)
@pytest.mark.parametrize("nbytes", checks.SIZES_BYTES)
def test_contents(reader: Reader, tmp_path: Path, nbytes: int, dtype: str) -> None:
    checks.check_contents(reader, "cuda", tmp_path / "a", nbytes, dtype)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_any_address(reader: Reader, tmp_path: Path, device: str) -> None:
    checks.check_any_address(reader, device, tmp_path / "a")


def test_rewritten(reader: Reader, tmp_path: Path) -> None:
    checks.check_rewritten(reader, "cuda", tmp_path / "a")


def test_threads(reader: Reader, tmp_path: Path) -> None:
    checks.check_threads(reader, "cuda", tmp_path / "a")


@pytest.mark.parametrize("name", checks.DAMAGE)
def test_damage(reader: Reader, tmp_path: Path, name: str) -> None:
    checks.check_damage(reader, "cuda", tmp_path / "a", name)


def test_stale(reader: Reader, tmp_path: Path) -> None:
    checks.check_stale(reader, "cuda", tmp_path / "a")


def test_device_error(reader: Reader, tmp_path: Path) -> None:
    checks.check_device_error(reader, "cuda", tmp_path / "a")


@pytest.mark.parametrize("choice", ["auto", "kvikio"])
def test_selected_where_it_works(tmp_path: Path, choice: str) -> None:
    chosen = select_readers(choice, torch.device("cuda"), [tmp_path])
    assert chosen.warning is None
    assert (chosen.host.name, chosen.device.name) == ("direct", "kvikio")
    assert list(tmp_path.iterdir()) == []
