"""The benchmark of packing: both ways train the same tokens, and padding is not computed."""

import json
from pathlib import Path

import pytest

from penstock.app.bench.packing import bench_packing
from penstock.storage.errors import UserError


@pytest.mark.long
def test_both_ways_compute_the_same_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = bench_packing(context=256, document=32, chunk_tokens=64, rounds=2, json=True, folder=tmp_path)
    assert json.loads(capsys.readouterr().out) == report
    assert report["documents"] == 8
    assert report["trained_tokens"] == 8 * 31
    assert report["packed_computed_tokens"] == report["apart_computed_tokens"] == 256
    assert report["apart_padded_tokens"] == 8 * 224
    assert report["cpu_ratio"] == pytest.approx(report["apart_cpu_s"] / report["packed_cpu_s"])
    assert len(report["packed_steps_s"]) == len(report["apart_steps_s"]) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_row_that_holds_one_document_has_nothing_to_pack(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--context 50: give room for two documents of 32"):
        bench_packing(context=50, document=32, folder=tmp_path)
