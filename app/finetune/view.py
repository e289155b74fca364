"""What `penstock finetune` found and chose, for people: rows that the console prints and the form scrolls."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.cells import cell_len

from penstock.app.console.rows import Glyphs, Page, Row, merged
from penstock.storage.files.units import params_text, percent_text

SAMPLE_CHARS = 700
"""Of a document that is shown: of a longer one the middle is left out."""
_BAR = 40
_VALUE = 8
"""Cells of a value; a longer one has a row of its own."""
_TRAINED = "good line"
WHOLE_CHARS = 20_000
"""Of one that is looked at closely."""
Piece = Mapping[str, Any]


def report_rows(proposal: Mapping[str, Any], width: int, glyphs: Glyphs) -> list[Row]:
    """All of it: what was found, samples, and what was chosen with its reasons."""
    page = Page(width, glyphs)
    found_rows(page, proposal)
    sample_rows(page, proposal["samples"])
    chosen_rows(page, proposal["chosen"])
    return page.rows


def found_rows(page: Page, proposal: Mapping[str, Any]) -> None:
    """The model, the data and the lengths of its documents."""
    if (model := proposal.get("model")) is not None:
        page.head("model")
        page.wrapped(" ".join(_model_words(model)), "text", 2)
    page.head("data")
    for text in proposal["data"]["lines"]:
        page.wrapped(text, "text", 2)
    is_pairs = proposal["data"].get("comparison") == "pairs"
    _lengths(page, proposal["lengths"], proposal["row"], "pair" if is_pairs else "document")
    for text in proposal["warnings"]:
        page.wrapped(text, "warn", 2)


def _model_words(model: Mapping[str, Any]) -> Iterator[str]:
    yield f"{model['type']}, {params_text(model['params'])} parameters,"
    yield "context not known," if model["context"] is None else f"context {model['context']:,},"
    yield f"vocabulary {model['vocab_size']:,}: {model['path']}"


def _lengths(page: Page, lengths: Mapping[str, Any], row: int, what: str) -> None:
    figures = f"median {lengths['median']:,}, p95 {lengths['p95']:,}, longest {lengths['max']:,}"
    page.head(f"tokens a {what}", figures)
    most = max(bar["documents"] for bar in lengths["histogram"])
    names = [_span(bar) for bar in lengths["histogram"]]
    wide = max(map(len, names))
    counts = [f"{bar['documents']:,}" for bar in lengths["histogram"]]
    width = max(4, min(_BAR, page.width - wide - max(map(len, counts)) - 6))
    for name, bar, count in zip(names, lengths["histogram"], counts, strict=True):
        cells = max(round(width * bar["documents"] / most), bar["documents"] > 0)
        over = bar["least"] > row
        pieces = (page.glyphs.bar_full * cells, "warn" if over else "accent"), (" " * (width - cells), "text")
        page.line([(f"  {name:>{wide}} ", "text"), *pieces, (f" {count}", "text")])
    share = percent_text(lengths["trained_tokens"] / lengths["tokens"])
    page.wrapped(
        f"{lengths['documents']:,} {what}s, {lengths['tokens']:,} tokens, of which {share} are trained", "text", 2
    )
    if lengths["longer"]:
        verb = {"cut": "cut to it", "split": "split", "drop": "left out"}[lengths["long_documents"]]
        are = f"{what} is" if lengths["longer"] == 1 else f"{what}s are"
        page.wrapped(f"{lengths['longer']:,} {are} longer than a row of {row:,} tokens, and {verb}", "warn", 2)


def _span(bar: Mapping[str, int]) -> str:
    return f"{bar['most']:,}" if bar["least"] == bar["most"] else f"{bar['least']:,}-{bar['most']:,}"


def marks(glyphs: Glyphs) -> tuple[str, str]:
    """What stands around trained tokens."""
    return ("«", "»") if glyphs.braille else ("[[", "]]")


def sample_rows(page: Page, samples: Sequence[Mapping[str, Any]], most: int = SAMPLE_CHARS) -> None:
    """Documents with what is trained underlined, in colour and between marks; of each `most` characters."""
    if not samples:
        return
    opening, closing = marks(page.glyphs)
    page.head("as training reads them", f"trained: {opening}between marks{closing}")
    for result in samples:
        page.ends(
            [(f"  {result['where']}", "dim")],
            [(f"{result['tokens']:,} tokens, {result['trained_tokens']:,} trained", "dim")],
        )
        for row in marked_rows(result["pieces"], page.width - 4, page.glyphs, most):
            page.line([("    ", "text"), *row])


def marked_rows(pieces: Sequence[Piece], width: int, glyphs: Glyphs, most: int = SAMPLE_CHARS) -> Iterator[Row]:
    """The text of a document on rows of at most `width` cells, its middle left out where it is long."""
    opening, closing = marks(glyphs)
    row: Row = []
    used = 0
    for piece in shortened(pieces, most, glyphs.ellipsis):
        trained = piece["trained"]
        token = _TRAINED if trained else "dim" if trained is None else "text"
        parts = [(opening, "good bold")] if trained else []
        parts.append((piece["text"].expandtabs(4), token))
        parts += [(closing, "good bold")] if trained else []
        for text, style in parts:
            for char in text:
                if char == "\n" or used + cell_len(char) > width:
                    yield merged(row)
                    row, used = [], 0
                if char != "\n":
                    row.append((char, style))
                    used += cell_len(char)
    if row:
        yield merged(row)


def shortened(pieces: Sequence[Piece], most: int, ellipsis: str) -> list[Piece]:
    """The pieces, or their first and last characters with a word on how many are left out between them."""
    total = sum(len(piece["text"]) for piece in pieces)
    if total <= most:
        return list(pieces)
    head, tail, at = [], [], 0
    for piece in pieces:
        text = piece["text"]
        if at < most // 2:
            head.append({**piece, "text": text[: most // 2 - at]})
        if (first := total - most // 2 - at) < len(text):
            tail.append({**piece, "text": text[max(0, first) :]})
        at += len(text)
    left_out = f"\n{ellipsis} {total - 2 * (most // 2):,} characters left out {ellipsis}\n"
    return [*head, {"text": left_out, "trained": None}, *tail]


def chosen_rows(page: Page, chosen: Sequence[Mapping[str, Any]]) -> None:
    """Every field that is not a default, and why."""
    page.head("chosen", "all of it can be changed")
    wide = max(len(item["key"]) for item in chosen)
    width = max(10, page.width - wide - _VALUE - 6)
    for item in chosen:
        value = "none" if item["value"] is None else item["value"]
        text = value if isinstance(value, str) else json.dumps(value)
        token = "good bold" if item["why"] == "set by you" else "accent"
        row: Row = [(f"  {item['key']:<{wide}}  ", "text")]
        why = textwrap.wrap(item["why"], width)
        if len(text) > _VALUE:
            page.line([*row, (" ".join(text.split()), token)])
            row = [(" " * (wide + 4), "text")]
            text = ""
        for number, line in enumerate(why):
            page.line([*row, (f"{text:>{_VALUE}}  ", token), (line, "dim")])
            if not number:
                row, text = [(" " * (wide + 4), "text")], ""
