"""The benchmark of uploads: steps alone and beside one, in turn, and bytes that moved meanwhile."""

import json
from pathlib import Path

import pytest

from penstock.app.bench.offsite import bench_offsite


@pytest.mark.long
@pytest.mark.parametrize("on_drive", [False, True])
def test_a_small_measurement(tmp_path: Path, capsys: pytest.CaptureFixture[str], on_drive: bool) -> None:
    report = bench_offsite(
        rounds=1, steps=2, layers=1, hidden=64, bytes_per_s=2_000_000, on_drive=on_drive, json=True, folder=tmp_path
    )
    assert json.loads(capsys.readouterr().out) == report
    for way in ("alone", "limited", "unlimited"):
        assert [len(of_round) for of_round in report[f"{way}_steps_s"]] == [2]
        assert (report[f"{way}_moved_bytes"] > 0) == (way != "alone")
    assert report["limited_ratio"] > 0
    assert list(tmp_path.iterdir()) == []
