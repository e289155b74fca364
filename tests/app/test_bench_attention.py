"""A step against its attention alone, at a tiny size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.bench.attention import bench_attention
from storage.errors import UserError


def test_ratio_of_a_tiny_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = bench_attention(tokens=256, chunk_tokens=64, rounds=2, compile=False, json=True, folder=tmp_path)
    assert json.loads(capsys.readouterr().out) == report
    assert len(report["rounds"]) == 2
    for each in report["rounds"]:
        assert each["ratio"] == pytest.approx(each["step_s"] / each["attention_s"])
        assert each["attention_s"] > 0
    assert min(e["ratio"] for e in report["rounds"]) <= report["ratio"] <= max(e["ratio"] for e in report["rounds"])
    assert list(tmp_path.iterdir()) == []


def test_one_chunk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="at least two chunks, 128"):
        bench_attention(tokens=100, chunk_tokens=64, folder=tmp_path)
