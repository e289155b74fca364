"""A forecast on one screen: every number present and right, no line too wide, never too many lines."""

from __future__ import annotations

import copy
import io
import re
from typing import Any

import pytest
from rich.console import Console
from sample_forecast import GIB, fitting, refused

from app.plan_view import SCREEN_LINES, print_plan, seconds_text


def shown(forecast: dict[str, Any], width: int, **console: Any) -> str:
    out = io.StringIO()
    print_plan(forecast, Console(file=out, width=width, **console))
    return out.getvalue()


def assert_one_screen(text: str, width: int) -> None:
    lines = text.splitlines()
    assert len(lines) <= SCREEN_LINES
    assert max(map(len, lines)) <= width
    assert "…" not in text
    assert all(line == line.rstrip() for line in lines)


def flat(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("width", [80, 100, 140])
def test_every_number_is_there(width: int) -> None:
    text = shown(fitting(), width)
    assert_one_screen(text, width)
    for part in (
        "120b-gh200 on gh200-480: fits",
        "mistral, 123 B parameters, 88 layers; 262,144 tokens a step, context 32,768",
        "NVIDIA GH200 480GB; the machine's figures: data sheets of NVIDIA GH200 and Samsung PM1743, not measured",
        "11m11s a step",
        "390 tokens/s",
        "bound by nvme_read (91% busy)",
        "MFU 30.1%",
        "HFU 37.2%",
        "80% 72.0 of 90.0 GiB",
        "91% 400.0 of 440.0 GiB",
        "46% 3.12 of 6.84 TiB",
        "32 chunks of 8,192 tokens",
        "keys and values whole",
        "weight slots: 2 layer + 1 edge",
        "state stages: 6",
        "nvme_read 10m12s 91% 1.66 TiB",
        "h2d 8.04 s 1% 680.0 GiB",
        "compute 524 s 78% -",
        "d2h 5.50 s 1% 410.0 GiB",
        "optimizer 41.0 s 6% -",
        "nvme_write 571 s 85% 1.56 TiB",
        "2,000 steps in 15d13h",
        "drive: writes 1562.50 TiB (800.0 GiB a step), endurance used 11.4% of 13671.88 TiB",
        "drive /mnt/b: writes 1464.84 TiB (750.0 GiB a step), endurance used n/a",
        "compute-bound from: 306,500 tokens a step",
        "twice as many sequences in a step: 17m45s a step, 492 tokens/s (+26%)",
        "--set train.global_batch_size=16 --set train.gradient_dtype=bfloat16",
    ):
        assert part in flat(text), part
    # Layers 0 to 87 appear once each, whatever the grouping.
    assert re.search(r"layers\.0\b", text)
    assert re.search(r"- 87\b", text)


def test_parts_of_a_tier_add_up() -> None:
    text = flat(shown(fitting(), 100))
    assert "kept activations 30.0 GiB, K/V window 12.0 GiB, weight slots 11.0 GiB, 3 more 19.0 GiB" in text
    assert fitting()["tiers"]["gpu"]["peak_bytes"] / GIB == 30 + 12 + 11 + 19


def test_blocks_alike_share_a_row_and_say_what_is_saved() -> None:
    rows = [line for line in shown(fitting(), 100).splitlines() if line.startswith(("embed", "layers", "head"))]
    assert [flat(row) for row in rows] == [
        "embed gpu ram ram 5.0 GiB -",
        "layers.0 ram nvme ram 19.0 GiB everything 12%, attention 88%, 6% on the GPU",
        "layers.1 - 10 ram nvme ram 190.0 GiB everything 12%, attention 88%",
        "layers.11 - 39 ram nvme ram 551.0 GiB attention",
        "layers.40 - 69 nvme nvme ram 570.0 GiB attention",
        "layers.70 - 87 nvme nvme ram 342.0 GiB attention, 25% on NVMe",
        "head gpu ram ram 5.0 GiB -",
    ]


@pytest.mark.parametrize("width", [80, 100])
def test_blocks_that_alternate_are_still_few_rows(width: int) -> None:
    forecast = fitting()
    for index, block in enumerate(forecast["blocks"][1:-1]):
        block["weights"] = ("gpu", "ram", "nvme")[index % 3]
        block["saved"] = {"attention": 32 - index % 5, "input": index % 5}
    text = shown(forecast, width)
    assert_one_screen(text, width)
    if width == 100:
        assert re.search(r"30 of layers\.0-87 +gpu ", text)
        assert re.search(r"29 of layers\.2-86 +nvme ", text)
    for index, block in enumerate(forecast["blocks"][1:-1]):
        block["state"] = ("ram", "nvme")[index % 2]
        block["gradient"] = ("gpu", "ram", "nvme")[index % 7 % 3]
    text = shown(forecast, width)
    assert_one_screen(text, width)
    assert re.search(r"88 of layers\.0-87 +gpu/ram/nvme", text)


@pytest.mark.parametrize("width", [80, 100])
def test_reasons_fill_the_screen_and_the_rest_is_counted(width: int) -> None:
    forecast = fitting()
    forecast["blocks"] = forecast["blocks"][:2]
    short = shown(forecast, width)
    assert_one_screen(short, width)
    assert "chunk_tokens: 8,192" in short
    forecast["reasons"] = {f"choice_{i}": "because " * 12 for i in range(40)}
    many = shown(forecast, width)
    assert_one_screen(many, width)
    told = many.count("choice_")
    assert 0 < told < 40
    assert f"{40 - told} more with --json" in many


def test_what_is_not_known_reads_na() -> None:
    forecast = fitting()
    forecast["mfu"] = forecast["hfu"] = forecast["compute_bound_tokens"] = forecast["best_change"] = None
    forecast["machine"] = {"name": "this machine", "source": "measured 2026-11-21", "gpu": None}
    forecast["tiers"]["nvme"]["budget_bytes"] = 0
    text = flat(shown(forecast, 100))
    assert "MFU n/a HFU n/a" in text
    assert "compute-bound from: n/a" in text
    assert "helps most" not in text
    assert "no GPU: the gpu tier is ordinary memory; the machine's figures: measured 2026-11-21" in text
    assert re.search(r"nvme \S+ n/a 3\.12 TiB of 0 B", text)


def test_drives_alike_share_a_line() -> None:
    forecast = fitting()
    forecast["run"]["drives"] = [forecast["run"]["drives"][0]] * 2
    assert shown(forecast, 100).count("2 drives, each writes 1562.50 TiB (800.0 GiB a step), ") == 1


def test_names_with_commas_are_not_taken_apart() -> None:
    forecast = fitting()
    forecast["tiers"]["nvme"]["parts"] = {"spilled activations": 400 * GIB, "state, two generations": 2800 * GIB}
    assert "state, two generations 2.73 TiB,\n" in shown(forecast, 100)


def test_active_parameters_of_a_sparse_model() -> None:
    forecast = fitting()
    forecast["model"]["active_params"] = 5_100_000_000
    assert "123 B parameters (5.1 B active a token), 88 layers" in shown(forecast, 100)


@pytest.mark.parametrize("width", [80, 100])
def test_a_refusal_says_what_would_fit(width: int) -> None:
    text = shown(refused(), width)
    assert_one_screen(text, width)
    for part in (
        "120b-gh200 on rtx3090-64: does not fit",
        "the gpu tier is too small by 11.0 GiB",
        "its budget is 22.00 GiB",
        "shorter chunks, streamed window --set train.chunk_tokens=1024 --set train.kv_window=streamed",
        "--set budgets.gpu=33GiB",
        """--set 'storage.nvme=["/mnt/a", "/mnt/b"]'""",
        "150% 33.0 of 22.0 GiB weight slots 20.0 GiB, workspace 13.0 GiB",
        "n/a of 56.0 GiB",
    ):
        assert part in flat(text), part


def test_a_refusal_without_a_way_out() -> None:
    forecast = refused()
    forecast["refusal"] |= {"changes": [], "short_bytes": None}
    forecast["tiers"] = {}
    text = shown(forecast, 80)
    assert "the gpu tier is too small\n" in text
    assert "no single change was found to fit" in text


def test_a_forecast_is_left_as_it_is() -> None:
    forecast = fitting()
    before = copy.deepcopy(forecast)
    shown(forecast, 100)
    assert forecast == before


def test_colours_only_on_a_terminal_and_not_against_its_will(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" not in shown(fitting(), 100)
    terminal = {"force_terminal": True, "color_system": "standard"}
    assert "\x1b[32m" in shown(fitting(), 100, **terminal)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", shown(fitting(), 100, **terminal))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "n/a"),
        (float("inf"), "n/a"),
        (0, "0 s"),
        (0.00012, "0.00012 s"),
        (0.01234, "0.0123 s"),
        (4.2, "4.20 s"),
        (95.34, "95.3 s"),
        (599.4, "599 s"),
        (600, "10m00s"),
    ],
)
def test_seconds_text(seconds: float | None, text: str) -> None:
    assert seconds_text(seconds) == text
