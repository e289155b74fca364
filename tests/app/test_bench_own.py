"""Small measurements by the benchmarks of memory, packing, precision and uploads, and their arithmetic by hand."""

import json
from pathlib import Path

import pytest
import torch

from penstock.app.bench import memory, precision
from penstock.app.bench.offsite import bench_offsite
from penstock.app.bench.packing import bench_packing

PER_TOKEN = 12 * memory.SHAPE.kv_heads * memory.SHAPE.head_dim
Captured = pytest.CaptureFixture[str]


def test_deviation_from_the_memory_law_by_hand() -> None:
    # At 10 bytes a token 100 tokens weigh 1,000 and the constant 500: the law says 2,500 at 200 tokens.
    sizes = [(100, 1, "whole", 1500), (200, 1, "whole", 2550), (100, 1, "streamed", 400), (200, 1, "streamed", 404)]
    sizes += [(100, 2, "whole", 1530), (200, 2, "whole", 2530)]
    rows = [dict(zip(("tokens", "depth", "window", "arena_bytes"), size, strict=True)) for size in sizes]
    assert memory.deviation(rows, "whole", "arena_bytes", 10) == pytest.approx(0.02)
    assert memory.deviation(rows, "streamed", "arena_bytes", 10) == pytest.approx(0.01)
    assert memory.depth_difference(rows, "whole", "arena_bytes") == pytest.approx(0.02)


@pytest.mark.long
def test_a_small_measurement_follows_the_memory_law(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    depths = {"whole": (1, 2), "streamed": (1, 2)}
    report = memory.bench_memory(
        lengths=(512, 2048), depths=depths, document_tokens=128, chunk_tokens=64, save=tmp_path / "law"
    )
    sizes = {(r["window"], r["depth"], r["tokens"]): r["arena_bytes"] for r in report["rows"]}
    for depth in (1, 2):
        assert sizes["whole", depth, 2048] - sizes["whole", depth, 512] == PER_TOKEN * (2048 - 512)
        assert sizes["streamed", depth, 2048] == sizes["streamed", depth, 512] < sizes["whole", depth, 512]
    for figure in ("deviation", "depth_difference"):
        assert report[figure]["arena_bytes"] == {"whole": 0, "streamed": 0}
    assert all(r["resident_bytes"] > 0 for r in report["rows"])
    assert json.loads((tmp_path / "law.json").read_text()) == report
    assert "<svg" in (tmp_path / "law.svg").read_text()[:500]
    line = f"{PER_TOKEN:,} bytes a token; the arena is off by at most, K/V window whole 0.00%, streamed 0.00%\n"
    assert capsys.readouterr().out == line


@pytest.mark.long
@pytest.mark.parametrize("on_drive", [False, True])
def test_a_small_measurement_of_uploads(tmp_path: Path, capsys: Captured, on_drive: bool) -> None:
    """Steps alone and beside one, in turn, and bytes that moved meanwhile."""
    report = bench_offsite(
        rounds=1, steps=2, layers=1, hidden=64, bytes_per_s=2_000_000, on_drive=on_drive, json=True, folder=tmp_path
    )
    assert json.loads(capsys.readouterr().out) == report
    for way in ("alone", "limited", "unlimited"):
        assert [len(of_round) for of_round in report[f"{way}_steps_s"]] == [2]
        assert (report[f"{way}_moved_bytes"] > 0) == (way != "alone")
    assert report["limited_ratio"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_both_ways_of_packing_compute_the_same_tokens(tmp_path: Path, capsys: Captured) -> None:
    report = bench_packing(context=256, document=32, chunk_tokens=64, rounds=2, json=True, folder=tmp_path)
    assert json.loads(capsys.readouterr().out) == report
    assert (report["documents"], report["trained_tokens"]) == (8, 8 * 31)
    assert report["packed_computed_tokens"] == report["apart_computed_tokens"] == 256
    assert report["apart_padded_tokens"] == 8 * 224
    assert report["cpu_ratio"] == pytest.approx(report["apart_cpu_s"] / report["packed_cpu_s"])
    assert len(report["packed_steps_s"]) == len(report["apart_steps_s"]) == 2
    assert list(tmp_path.iterdir()) == []


def test_stochastic_rounding_goes_to_a_neighbour_and_is_right_on_average() -> None:
    ulp = 2.0**-7  # of bfloat16 between 1 and 2
    values = torch.full((20_000,), 1 + 0.25 * ulp)
    generator = torch.Generator().manual_seed(0)
    for sign in (1, -1):
        found = precision.rounded_stochastically(sign * values, generator)
        assert found.dtype == torch.bfloat16
        up = (found.abs() == 1 + ulp).float().mean()
        assert (found.abs() == 1).float().mean() + up == 1
        assert (found.sign() == sign).all()
        assert up == pytest.approx(0.25, abs=0.02)
    exact = torch.randn(1000).bfloat16()
    assert torch.equal(precision.rounded_stochastically(exact.float(), generator), exact)


@pytest.mark.long
def test_a_small_measurement_of_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """At a rate at which a few steps show it."""
    monkeypatch.chdir(tmp_path)
    report = precision.bench_precision(steps=10, before_steps=10, every=5, lr=1e-5, save=tmp_path / "found")
    cases, learnt = report["cases"], report["learnt"]
    assert list(cases) == list(precision.CASES)
    assert all([row["step"] for row in rows] == [0, 5, 10] for rows in cases.values())
    assert len({rows[0]["loss"] for rows in cases.values()}) == 1, "all start at the same weights"
    last = {name: rows[-1] for name, rows in cases.items()}
    assert last["masters"]["loss"] == pytest.approx(last["float32"]["loss"], rel=2e-3)
    assert learnt["masters"] == pytest.approx(1, abs=0.1)
    assert learnt["weights"] > 2 * learnt["in_place"]
    assert last["float32"]["changed"] > 0.95
    assert last["weights"]["changed"] > last["in_place"]["changed"]
    assert json.loads((tmp_path / "found.json").read_text()) == report
    assert "<svg" in (tmp_path / "found.svg").read_text()[:500]
    assert capsys.readouterr().out.startswith("10 steps at 1e-05, learnt of what float32 learns: float32 throughout")
