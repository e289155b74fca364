"""The line of key figures and the gauges at every width."""

from __future__ import annotations

import pytest

from penstock.app.rows import ASCII, UNICODE, plain
from penstock.tui.data.tiers import Tier
from penstock.tui.render.bars import bar, tier_rows
from penstock.tui.render.kpi import Figure, kpi_row

FIGURES = [
    Figure("1,240/8,000", label="step"),
    Figure("1.8342 (ema 1.851)", "1.8342", label="loss"),
    Figure("2,143 tok/s"),
    Figure("6h12m", label="ETA"),
    Figure("31.2%", label="MFU"),
]


def line(width: int) -> str:
    return plain([kpi_row(width, "qwen3-32b-20261122", "running", FIGURES, UNICODE)]).rstrip()


def test_a_wide_line_has_everything_and_what_goes_first() -> None:
    assert line(120) == (
        "qwen3-32b-20261122  ● running  step 1,240/8,000  loss 1.8342 (ema 1.851)  2,143 tok/s  ETA 6h12m  MFU 31.2%"
    )
    assert line(100) == (
        "qwen3-32b-20261122  ● running  step 1,240/8,000  loss 1.8342  2,143 tok/s  ETA 6h12m  MFU 31.2%"
    )
    assert line(80) == "qwen3-32b-202…  ● running  step 1,240/8,000  loss 1.8342  2,143 tok/s  ETA 6h12m"
    assert line(50) == "qwen3-32b-20261122  ● running  step 1,240/8,000"
    assert line(30) == "qwen3-32b-20261122  ● running"
    assert line(20) == "qwen3-32…  ● running"
    assert line(9) == "● running"
    assert line(5) == "● run"


@pytest.mark.parametrize("width", range(0, 150, 7))
def test_every_row_is_as_wide_as_asked(width: int) -> None:
    assert len(plain([kpi_row(width, "name", "crashed", FIGURES, ASCII)])) == width
    tiers = [Tier("gpu", 100.0, 50.0, 70.0), Tier("ram", None, None, None), Tier("nvme", 1e13, 2e13, 3e13)]
    for each in (1, 2):
        for glyphs in (UNICODE, ASCII):
            rows = tier_rows(tiers, width, each, glyphs)
            assert {len(plain([row])) for row in rows} == {width}


def test_bar_is_filled_to_what_is_held_and_marked_at_the_plan() -> None:
    assert plain([bar(10, 0.4, 0.8, UNICODE, "x")]) == "████░░░┃░░"
    assert plain([bar(10, 0.9, 0.5, ASCII, "x")]) == "####|####."
    assert plain([bar(4, None, None, UNICODE, "x")]) == "░░░░"
    assert plain([bar(4, 7.0, 7.0, UNICODE, "x")]) == "███┃"


def test_tier_says_held_of_budget() -> None:
    gib = 2.0**30
    rows = tier_rows([Tier("ram", 128 * gib, 100 * gib, 96 * gib)], 40, 2, UNICODE)
    assert plain(rows[:1]) == "ram  96.0 of 128 GiB  plan 100 GiB   75%"
    assert rows[0][-1] == ("  75%", "text")
    assert tier_rows([Tier("ram", 100.0, 50.0, 97.0)], 40, 2, UNICODE)[0][-1] == ("  97%", "warn")
    assert tier_rows([Tier("ram", 100.0, 50.0, 101.0)], 40, 2, UNICODE)[0][-1] == (" 101%", "bad")
    assert "planned 50 of 100 B" in plain(tier_rows([Tier("ram", 100.0, 50.0, None)], 40, 2, UNICODE))
