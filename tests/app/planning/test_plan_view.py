"""A forecast for people: every number present and right, no line too wide, and on a console never too many lines; and
the map of what a model finds in haystacks: read from a run, drawn with and without Unicode, and beside the loss."""

import copy
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console
from sample_forecast import GIB, fitting, refused

from penstock.app.console.rows import ASCII, UNICODE, Glyphs, plain
from penstock.app.planning.view import SCREEN_LINES, fixes, plan_rows, print_plan
from penstock.app.runs.recall_view import RecallMap, map_rows, map_width, recall_of, recall_rows
from penstock.tui.data.run_data import RunData


def shown(forecast: dict[str, Any], width: int, **console: Any) -> str:
    out = io.StringIO()
    print_plan(forecast, Console(file=out, width=width, **console))
    return out.getvalue()


def rows(forecast: dict[str, Any], width: int = 76, glyphs: Glyphs = UNICODE, **state: Any) -> str:
    found = plan_rows(forecast, width, glyphs, **state)
    assert all(sum(cell_len(text) for text, _ in row) == width for row in found)
    return plain(found)


def screen(forecast: dict[str, Any], width: int) -> str:
    """What is shown, which fits on one screen."""
    text = shown(forecast, width)
    lines = text.splitlines()
    assert len(lines) <= SCREEN_LINES
    assert max(map(len, lines)) <= width
    assert "…" not in text
    assert all(line == line.rstrip() for line in lines)
    return text


def flat(text: str) -> str:
    return " ".join(re.sub("─+", "", text).split())


BOTH = (
    "✓ fits on gh200-480: 120b-gh200", "mistral, 123 B parameters, 88 layers; 262,144 tokens a step, context 32,768",
    "NVIDIA GH200 480GB; the machine's figures: data sheets of NVIDIA GH200 and Samsung PM1743, not measured",
    "planned 11m11s 390 15d13h 30.1% 37.2%", "a step tokens/s 2,000 steps MFU HFU", "gpu 80% 72.0 of 90.0 GiB",
    "█ kept activations 30.0 GiB ▓ K/V window 12.0 GiB ▒ weight slots 11.0 GiB ░ 3 more 19.0 GiB",
    "ram 91% 400 of 440 GiB", "nvme 46% 3.12 of 6.84 TiB", "bound by nvme_read", "91% 10m12s 1.66 TiB",
    "1% 8.04 s 680 GiB", "78% 524 s -", "1% 5.50 s 410 GiB", "6% 41.0 s -", "85% 571 s 1.56 TiB",
    "twice as many sequences in a step → 17m45s a step, 492 tokens/s (+26%)",
    "compute-bound from 306,500 tokens a step", "32 chunks of 8,192 tokens; keys and values whole",
    "weight slots: 2 for layers + 1 for embedding and head", "state stages: 6", "2,000 steps in 15d13h",
    "drive: writes 1,562 TiB (800 GiB a step), endurance used 11.4% of 13,672 TiB",
    "drive /mnt/b: writes 1,465 TiB (750 GiB a step), endurance used n/a",
)  # fmt: skip


@pytest.mark.parametrize("width", [80, 100, 140])
def test_every_number_is_there(width: int) -> None:
    text = screen(fitting(), width)
    for part in (*BOTH, "--set train.global_batch_size=16 --set train.gradient_dtype=bfloat16"):
        assert part in flat(text), part
    # Layers 0 to 87 appear once each, whatever the grouping.
    assert re.search(r"layers\.0\b", text)
    assert re.search(r"- 87\b", text)
    text = flat(rows(fitting(), width))
    saved = "saved for backward: graph 2%, attention 98%, 5% on NVMe, <1% on the GPU"
    for part in (*BOTH, saved, "train.global_batch_size=16", "b applies it", "chunk tokens: 8,192", "kv window: whole"):
        assert part in text, part


def test_a_bar_is_as_long_as_its_share_and_blocks_are_drawn_in_their_order() -> None:
    assert fitting()["tiers"]["gpu"]["peak_bytes"] / GIB == 30 + 12 + 11 + 19
    line = next(line for line in rows(fitting()).splitlines() if line.startswith("gpu"))
    bar = line[line.index("█") :]
    assert len(bar) == 43
    assert [round(bar.count(shade) * 90 / 43) for shade in "█▓▒░"] == [29, 13, 10, 19]
    lane = next(line for line in rows(fitting()).splitlines() if line.startswith("compute "))
    assert lane.count("█") == round(0.78 * 41)
    assert "h2d        ▌" in rows(fitting())
    drawn = [line for line in rows(fitting(), 110).splitlines() if line.startswith(("weights ", "state ", "gradient "))]
    assert drawn[0].split()[1] == "█" + "▒" * 40 + "░" * 48 + "█"
    assert drawn[1].split()[1] == "▒" + "░" * 88 + "▒"
    assert "weights   g" + "r" * 40 in rows(fitting(), 110, ASCII)
    for width in (50, 59, 60, 110):
        assert (rows(fitting(), width, ASCII, advising=True) + rows(refused(), width, ASCII)).isascii()


def test_blocks_alike_share_a_row_and_say_what_is_saved() -> None:
    table = [line for line in shown(fitting(), 100).splitlines() if line.startswith(("embed", "layers", "head"))]
    assert [flat(row) for row in table] == [
        "embed gpu ram ram 5.0 GiB -", "layers.0 ram nvme ram 19.0 GiB graph 12%, attention 88%, 6% on the GPU",
        "layers.1 - 10 ram nvme ram 190 GiB graph 12%, attention 88%", "layers.11 - 39 ram nvme ram 551 GiB attention",
        "layers.40 - 69 nvme nvme ram 570 GiB attention",
        "layers.70 - 87 nvme nvme ram 342 GiB attention, 25% on NVMe", "head gpu ram ram 5.0 GiB -",
    ]  # fmt: skip


@pytest.mark.parametrize("width", [80, 100])
def test_blocks_that_alternate_are_still_few_rows(width: int) -> None:
    forecast = fitting()
    for index, block in enumerate(forecast["blocks"][1:-1]):
        block["weights"] = ("gpu", "ram", "nvme")[index % 3]
        block["activation_checkpointing"] = {"selective": 32 - index % 5, "full": index % 5}
    text = screen(forecast, width)
    if width == 100:
        assert re.search(r"30 of layers\.0-87 +gpu ", text)
        assert re.search(r"29 of layers\.2-86 +nvme ", text)
    for index, block in enumerate(forecast["blocks"][1:-1]):
        block["state"] = ("ram", "nvme")[index % 2]
        block["gradient"] = ("gpu", "ram", "nvme")[index % 7 % 3]
    assert re.search(r"88 of layers\.0-87 +gpu/ram/nvme", screen(forecast, width))


def half_frozen() -> dict[str, Any]:
    """`fitting` with the embedding frozen, and of each layer all but a thousandth."""
    forecast, blocks = fitting(), list[dict[str, Any]]()
    for block in forecast["blocks"]:
        name = block["name"]
        if name != "embed":
            blocks.append(block | {"block": name, "frozen": False, "bytes": GIB // 1000})
        if name != "head":
            places = {"state": None, "gradient": None, "weights": "nvme", "bytes": GIB, "activation_checkpointing": {}}
            blocks.append({"name": f"{name}.frozen", "block": name, "frozen": True} | places)
    frozen = {"params": 122_000_000_000, "param_bytes": 2, "trained_param_bytes": 18}
    return forecast | {"blocks": blocks, "frozen": frozen}


@pytest.mark.parametrize("width", [80, 100])
def test_what_is_frozen_is_said_in_a_row_and_told_apart(width: int) -> None:
    text = screen(half_frozen(), width)
    said = "frozen: 122 B of 123 B parameters, weights only, 2 bytes each instead of 18"
    assert said in flat(text)
    table = [flat(line) for line in text.splitlines()]
    assert any(row.startswith("layers.0 - 87, frozen nvme - - 88.0 GiB") for row in table)
    assert any(row.startswith("embed, frozen nvme - - 1.0 GiB") for row in table)
    drawn = rows(half_frozen(), 110)
    assert said in drawn
    lines = [line.split()[1] for line in drawn.splitlines() if line.startswith(("weights ", "state "))]
    assert lines == ["░" * 89 + "█", "·" + "░" * 88 + "▒"], "of a block its larger weights; no state of the embedding"


@pytest.mark.parametrize("width", [80, 100])
def test_reasons_fill_the_screen_and_the_rest_is_counted(width: int) -> None:
    forecast = fitting()
    forecast["blocks"] = forecast["blocks"][:2]
    assert "chunk tokens: 8,192" in screen(forecast, width)
    forecast["reasons"] = {f"choice_{i}": "because " * 12 for i in range(40)}
    many = screen(forecast, width)
    told = many.count("choice ")
    assert 0 < told < 40
    assert f"{40 - told} more with --json" in many


def test_what_is_not_known_reads_na_drives_alike_share_a_line_and_a_note_is_said() -> None:
    forecast = fitting() | {"mfu": None, "hfu": None, "compute_bound_tokens": None, "best_change": None, "run": {}}
    forecast["machine"] = {"name": "generic", "source": "measured 2026-11-21", "gpu": None}
    forecast["tiers"]["nvme"] |= {"budget_bytes": None, "peak_bytes": None}
    forecast["lanes"]["h2d"] = {}
    for text in map(flat, (shown(forecast, 100), rows(forecast))):
        for part in (
            "fits on this machine", "no single change was found that helps", "compute-bound from n/a tokens",
            "no GPU: the gpu tier is ordinary memory; the machine's figures: measured 2026-11-21",
            "n/a n/a n/a a step tokens/s 2,000 steps MFU HFU", "nvme n/a n/a of n/a",
        ):  # fmt: skip
            assert part in text, part
    forecast = fitting() | {"note": "shape from the recipe: /m is not there"}
    forecast["run"]["drives"] = [forecast["run"]["drives"][0]] * 2
    forecast["model"]["active_params"] = 5_100_000_000
    text = shown(forecast, 100)
    assert text.count("2 drives, each writes 1,562 TiB (800 GiB a step), ") == 1
    assert "123 B parameters (5.1 B active a token), 88 layers" in text
    assert "◆ shape from the recipe: /m is not there" in text


@pytest.mark.parametrize("width", [80, 100])
def test_a_refusal_says_what_would_fit(width: int) -> None:
    text = screen(refused(), width)
    both = (
        "✗ does not fit on rtx3090-64: 120b-gh200", "the gpu tier is too small by 11.0 GiB", "its budget is 22.00 GiB",
        "gpu 150% 33.0 of 22.0 GiB", "█ weight slots 20.0 GiB ▓ workspace 13.0 GiB", "n/a of 56.0 GiB",
    )  # fmt: skip
    chunks = "- shorter chunks, streamed window --set train.chunk_tokens=1024 --set train.kv_window=streamed"
    for part in (*both, chunks, "--set budgets.gpu=33GiB", """--set 'storage.nvme=["/mnt/a", "/mnt/b"]'"""):
        assert part in flat(text), part
    forecast = refused()
    forecast["refusal"]["changes"].append({"set": [], "text": "a machine with 33.0 GiB of GPU memory"})
    numbered = ("1 shorter chunks, streamed window", 'two drives storage.nvme=["/mnt/a", "/mnt/b"]', "- a machine with")
    for part in (*both, *numbered, "a key applies it"):
        assert part in flat(rows(forecast, width)), part
    assert [change["text"] for change in fixes(forecast)][2:] == ["two drives"]
    assert fixes(fitting()) == fixes(None) == []


def test_what_is_still_being_tried_is_said_and_the_forecast_left_as_it_is() -> None:
    early, empty = fitting(), refused()
    del early["best_change"]
    empty["refusal"] |= {"changes": [], "short_bytes": None}
    before = copy.deepcopy([early, empty])
    assert "trying…" in rows(early, advising=True)
    assert "trying changes one by one…" in rows(empty, advising=True)
    shown(empty, 100)
    assert [early, empty] == before
    empty["tiers"] = {}
    assert "the gpu tier is too small\n" in shown(empty, 80)
    assert "no single change was found that fits" in shown(empty, 80)


def test_colours_only_on_a_terminal_and_not_against_its_will(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" not in shown(fitting(), 100)
    terminal = {"force_terminal": True, "color_system": "standard"}
    assert re.search(r"\x1b\[[0-9;]*32m", shown(fitting(), 100, **terminal))
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", shown(fitting(), 100, **terminal))


def on_a_cluster(**changes: Any) -> dict[str, Any]:
    """Of `penstock plan --cluster 2x8`."""
    parts = {"logits": 20 * GIB, "saved activations": 10 * GIB, "moments": 8 * GIB, "gradients": 4 * GIB}
    parts |= {"gathered weights": 3 * GIB, "master weights": 3 * GIB}
    return {
        "nodes": 2, "gpus_per_node": 8, "gpu": "NVIDIA H100 80GB HBM3", "compiled": False, "fits": True, "parts": parts,
        "source": "planned from data sheets, not measured", "budget_bytes": 78 * GIB, "peak_bytes": 48 * GIB,
        "steps": 2000, "micro_batches_per_gpu": 2, "step_s": 60.0, "tokens_per_s": 4369.0, "run_s": 120_000.0,
        "compute_s": 59.0, "nvlink_s": 3.1, "network_s": 3.5, "bound_by": "compute", "network_gbit_per_s": 400,
        "mfu": 0.31, "would_fit": [],
    } | changes  # fmt: skip


@pytest.mark.parametrize("width", [80, 100, 140])
def test_a_cluster_has_its_rows(width: int) -> None:
    text = screen(fitting() | {"cluster": on_a_cluster()}, width)
    for part in (
        "FSDP2 on 2 nodes of 8 H100 80GB HBM3", "planned from data sheets, not measured",
        "to finish: 15d13h here, 1d09h there (11.2 times as fast)",
        "2,000 steps of 60.0 s, 4,369 tokens/s, MFU 31.0%; a GPU's micro-batches in a step: 2",
        "✓ memory of a GPU 48.0 of 78.0 GiB: logits 20.0 GiB, saved activations 10.0 GiB, moments 8.0 GiB, gradients "
        "4.0 GiB, others 6.0 GiB",
        "bound by compute: compute takes 59.0 s a step (eager layers), all-gather and reduce-scatter meanwhile, "
        "3.10 s over NVLink, 3.50 s over the network, for each GPU 400 Gbit/s, assumed",
    ):  # fmt: skip
        assert part in flat(text), part


def test_a_cluster_that_is_too_small_says_what_would_do() -> None:
    small = on_a_cluster(fits=False, peak_bytes=90 * GIB, would_fit=["train.micro_batch_size=1", "4x8 GPUs"])
    text = flat(shown(fitting() | {"cluster": small}, 100))
    assert "to finish: 15d13h here, does not fit there" in text
    assert "✗ memory of a GPU 90.0 of 78.0 GiB" in text
    assert "too large by 12.0 GiB; would fit: train.micro_batch_size=1 or 4x8 GPUs" in text
    text = flat(shown(refused() | {"cluster": on_a_cluster(nodes=1, network_s=0.0)}, 100))
    assert "FSDP2 on one node of 8 H100" in text
    assert "to finish: does not fit here, 1d09h there" in text
    assert "over the network" not in text


LENGTHS = {"lengths": [512, 8192], "queried": [[9, 7], [8, 8]]}
BEFORE = {"step": 0, "loss": 4.0, "recall": LENGTHS | {"right": [[0, 1], [0, 0]]}}
AFTER = {"step": 9, "loss": 0.1, "recall": LENGTHS | {"right": [[9, 7], [8, 4]]}}


def found(line: dict[str, object]) -> RecallMap:
    recall = recall_of(line)
    assert recall is not None
    return recall


def test_two_maps_side_by_side_in_percent() -> None:
    text = plain(recall_rows(found(BEFORE), found(AFTER), ASCII))
    lines = text.splitlines()
    assert "guessing gives 10%" in lines[0]
    assert lines[1].split() == ["3%", "right", "before", "training", "88%", "right", "after", "step", "9"]
    assert lines[2].split() == ["tokens", "0%", "50%"] * 2
    assert lines[3].split() == ["512", "0", ".", "14", "512", "#100", "#100"]
    assert lines[4].split() == ["8,192", "0", "0", "8,192", "#100", "=", "50"]
    assert len(recall_rows(found(AFTER), found(AFTER), ASCII)[1]) == 1 + len(map_rows(found(AFTER), ASCII)[0])


def test_what_was_never_asked_is_no_zero() -> None:
    line = AFTER | {"recall": {"lengths": [512], "right": [[1, 0]], "queried": [[2, 0]]}}
    rows = map_rows(found(line), UNICODE)
    assert plain(rows).splitlines()[-1].split() == ["512", "▄", "50", "-"]
    assert all(sum(len(text) for text, _ in row) == map_width(found(line)) for row in rows)


def test_what_is_no_map_is_left_out() -> None:
    maps = [([512], [1], [1]), ([512], [[1]], [[0]]), ([512], [[1, 1]], [[1]]), ([512], [[0]], [[0]])]
    maps += [(["512"], [[1]], [[1]]), ([1] * 100, [[1]] * 100, [[1]] * 100)]
    for recall in (None, [], {"lengths": [1]}, *({"lengths": a, "right": b, "queried": c} for a, b, c in maps)):
        assert recall_of({"step": 1, "loss": 1.0, "recall": recall}) is None, recall


def test_a_reader_keeps_the_first_and_the_last(tmp_path: Path) -> None:
    middle = AFTER | {"step": 5}
    (tmp_path / "validation.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (BEFORE, middle, AFTER)))
    data = RunData(tmp_path)
    data.poll()
    assert data.metrics.recall == [found(BEFORE), found(AFTER)]
