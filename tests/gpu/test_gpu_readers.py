"""The checks of tests/storage/tier/test_readers.py on CUDA memory, through kvikio."""

from collections.abc import Callable
from pathlib import Path

import pytest
import reader_checks as checks
import torch

from penstock.storage.tier.readers import KvikioReader, Reader, select_readers

pytest.importorskip("kvikio", exc_type=ImportError)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


@pytest.fixture(scope="module")
def reader() -> Reader:
    return KvikioReader()


@pytest.mark.parametrize("dtype", checks.DTYPES)
@pytest.mark.parametrize("nbytes", checks.SIZES_BYTES)
def test_contents(reader: Reader, tmp_path: Path, nbytes: int, dtype: str) -> None:
    checks.check_contents(reader, "cuda", tmp_path / "a", nbytes, dtype)


@pytest.mark.parametrize("check", checks.CHECKS)
def test_checks(reader: Reader, tmp_path: Path, check: Callable[[Reader, str, Path], None]) -> None:
    check(reader, "cuda", tmp_path / "a")


def test_any_address_of_the_host(reader: Reader, tmp_path: Path) -> None:
    checks.check_any_address(reader, "cpu", tmp_path / "a")


@pytest.mark.parametrize("name", checks.DAMAGE)
def test_damage(reader: Reader, tmp_path: Path, name: str) -> None:
    checks.check_damage(reader, "cuda", tmp_path / "a", name)


@pytest.mark.parametrize("choice", ["auto", "kvikio"])
def test_selected_where_it_works(tmp_path: Path, choice: str) -> None:
    chosen = select_readers(choice, torch.device("cuda"), [tmp_path])
    assert chosen.warning is None
    assert (chosen.host.name, chosen.device.name) == ("direct", "kvikio")
    assert list(tmp_path.iterdir()) == []
