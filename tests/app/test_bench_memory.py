"""The memory law's arithmetic, and one small measurement of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.app.bench import memory as bench_memory
from penstock.storage.errors import UserError

PER_TOKEN = 12 * bench_memory.SHAPE.kv_heads * bench_memory.SHAPE.head_dim


def row(tokens: int, depth: int, window: str, size: int) -> dict[str, Any]:
    return {
        "tokens": tokens, "depth": depth, "window": window, "arena_bytes": size, "resident_bytes": size,
        "process_bytes": size, "step_s": 1.0,
    }  # fmt: skip


def test_deviation_by_hand() -> None:
    # At 10 bytes a token 100 tokens weigh 1,000 and the constant 500: the law says 2,500 at 200 tokens.
    rows = [row(100, 1, "whole", 1500), row(200, 1, "whole", 2550), row(100, 1, "streamed", 400)]
    rows += [row(200, 1, "streamed", 404), row(100, 2, "whole", 1530), row(200, 2, "whole", 2530)]
    assert bench_memory.deviation(rows, "whole", "arena_bytes", 10) == pytest.approx(0.02)
    assert bench_memory.deviation(rows, "streamed", "arena_bytes", 10) == pytest.approx(0.01)
    assert bench_memory.depth_difference(rows, "whole", "arena_bytes") == pytest.approx(0.02)


@pytest.mark.long
def test_a_small_measurement_follows_the_law(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    report = bench_memory.bench_memory(
        lengths=(512, 2048),
        depths={"whole": (1, 2), "streamed": (1, 2)},
        document_tokens=128,
        chunk_tokens=64,
        save=tmp_path / "law",
    )
    sizes = {(r["window"], r["depth"], r["tokens"]): r["arena_bytes"] for r in report["rows"]}
    for depth in (1, 2):
        assert sizes["whole", depth, 2048] - sizes["whole", depth, 512] == PER_TOKEN * (2048 - 512)
        assert sizes["streamed", depth, 2048] == sizes["streamed", depth, 512] < sizes["whole", depth, 512]
    assert report["deviation"]["arena_bytes"] == {"whole": 0, "streamed": 0}
    assert report["depth_difference"]["arena_bytes"] == {"whole": 0, "streamed": 0}
    assert all(r["resident_bytes"] > 0 for r in report["rows"])
    assert json.loads((tmp_path / "law.json").read_text()) == report
    assert "<svg" in (tmp_path / "law.svg").read_text()[:500]
    line = f"{PER_TOKEN:,} bytes a token; the arena is off by at most, K/V window whole 0.00%, streamed 0.00%\n"
    assert capsys.readouterr().out == line


@pytest.mark.long
def test_a_failing_measurement_says_which() -> None:
    with pytest.raises(UserError, match=r"bench memory, 1 tokens, 1 layers, whole window: .*sequence_length"):
        bench_memory.bench_memory(lengths=(1,), depths={"whole": (1,)})
