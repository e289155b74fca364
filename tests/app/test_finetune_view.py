"""What a fine-tune found and chose, as people read it: marks without colour, no row too wide, nothing lost."""

from typing import Any

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console
from sample_proposal import Letters, document, proposal

from penstock.app.finetune_report import Document, histogram, length_figures, sample, token_row
from penstock.app.finetune_view import SAMPLE_CHARS, marked_rows, print_rows, report_rows, shortened
from penstock.app.rows import ASCII, UNICODE, plain


def test_lengths_are_counted_in_bars_that_double() -> None:
    bars = histogram(np.asarray([1, 2, 3, 4, 5, 900]))
    # Eight bars at the most: what is shorter is in the first.
    assert [tuple(bar) for bar in bars] == [
        (1, 8, 5), (9, 16, 0), (17, 32, 0), (33, 64, 0), (65, 128, 0), (129, 256, 0), (257, 512, 0), (513, 1024, 1),
    ]  # fmt: skip
    assert [tuple(bar) for bar in histogram(np.asarray([5, 5]))] == [(5, 8, 2)]
    assert sum(bar.documents for bar in histogram(np.arange(1, 5000))) == 4999


def test_figures_of_lengths() -> None:
    lengths = np.arange(1, 101)
    figures = length_figures(lengths, lengths // 2, 90)
    names = ("documents", "tokens", "trained_tokens", "median", "p95", "p99", "max", "longer")
    assert [figures[name] for name in names] == [100, 5050, 2500, 51, 96, 100, 100, 10]


def test_a_sample_is_cut_where_what_is_trained_begins_and_ends() -> None:
    found = sample(document("ab<cd>\x1b", "..xx.xx"), Letters())
    pieces = [(piece["text"], piece["trained"]) for piece in found["pieces"]]
    assert pieces == [("ab", False), ("<c", True), ("d", False), (">\ufffd", True)]
    assert (found["tokens"], found["trained_tokens"]) == (7, 4)
    whole = sample(Document("a", np.asarray([97, 98]), None), Letters())
    assert whole["pieces"] == [{"text": "ab", "trained": True}]


def test_a_row_of_tokens_is_exact() -> None:
    row = token_row(document("ab", ".x"), Letters())
    assert row == {"where": "talks.jsonl:3", "ids": [97, 98], "weights": [0, 1], "text": "ab", "tokens": ["a", "b"]}


def test_trained_tokens_are_marked_without_colours() -> None:
    pieces = [{"text": "a", "trained": False}, {"text": "b\nc", "trained": True}, {"text": "d", "trained": False}]
    assert plain(marked_rows(pieces, 40, UNICODE)) == "a«b\nc»d"
    assert plain(marked_rows(pieces, 40, ASCII)) == "a[[b\nc]]d"


def test_long_lines_and_wide_characters_are_wrapped_and_none_is_lost() -> None:
    text = "学习 is learning " * 20
    for width in (4, 5, 40):
        rows = list(marked_rows([{"text": text, "trained": False}], width, UNICODE))
        assert all(cell_len(plain([row])) <= width for row in rows)
        assert plain(rows).replace("\n", "") == text


def test_of_a_long_document_both_ends_are_shown() -> None:
    pieces = [{"text": "a" * 5000, "trained": False}, {"text": "b" * 10, "trained": True}]
    cut = shortened(pieces, SAMPLE_CHARS, "...")
    assert "".join(piece["text"] for piece in cut if piece["trained"]) == "b" * 10
    assert cut[0]["text"] == "a" * (SAMPLE_CHARS // 2)
    assert "4,310 characters left out" in cut[1]["text"]
    assert sum(len(piece["text"]) for piece in cut if piece["trained"] is not None) == SAMPLE_CHARS
    assert shortened(pieces, 6000, "...") == pieces


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
@pytest.mark.parametrize("width", [30, 80, 120])
def test_a_report_fits_its_width_and_tells_all(glyphs: Any, width: int) -> None:
    rows = report_rows(proposal(), width, glyphs)
    assert {cell_len(plain([row])) for row in rows} == {width}
    text = " ".join(plain(rows).split())
    for part in ("llama, 1.5 B parameters", "messages: 5 rows", "5 documents, 1,253 tokens", "one row was left out"):
        assert part in text
    if width >= 80:
        for part in ("median 120, p95 900, longest 900", "usual for 1.5 B", "1 document is longer than a row of 512"):
            assert part in text
    assert plain(rows).isascii() or glyphs is UNICODE or "Käse" in plain(rows)


def test_a_report_is_printed_in_ascii_where_the_console_wants_it() -> None:
    console = Console(width=80, record=True, force_terminal=True, color_system="truecolor")
    print_rows(report_rows(proposal(), 80, UNICODE), console)
    text = console.export_text(styles=True)
    assert "«" in text
    assert "\x1b[4;32mKäse" in text, "underlined and green"
