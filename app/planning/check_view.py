"""What `penstock check` found, for people: a line for one model; for all types a row each, printed as it comes, and how
many there are of each verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from penstock.app.console.rows import ASCII, UNICODE

IN_CHUNKS = "exact in chunks"
IN_DOCUMENTS = "exact in one chunk per document"
REFUSED = "refused"
VERDICTS = {"chunks": IN_CHUNKS, "documents": IN_DOCUMENTS}
"""Of a model that passes, by how it is cut."""
_STYLES = {IN_CHUNKS: "green", IN_DOCUMENTS: "yellow", REFUSED: "red"}
_NAME = 26


def verdict(result: Mapping[str, Any]) -> str:
    """In a few words."""
    return VERDICTS[result["cut"]] if result["ok"] else REFUSED


def counts(results: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Verdict -> how many there are."""
    found = Counter(verdict(result) for result in results)
    return {name: found[name] for name in (*VERDICTS.values(), REFUSED)}


def short_reason(result: Mapping[str, Any]) -> str:
    """Why it is refused, in a line that does not name its type once more; empty where it is not."""
    reason = " ".join((result["reason"] or "").split())
    start = f"model type '{result['model_type']}'"
    return reason.removeprefix(start).removeprefix(":").strip()


def result_line(result: Mapping[str, Any]) -> str:
    """One model."""
    if not result["ok"]:
        return f"{result['model_type']}: refused: {result['reason']}"
    return f"{result['model_type']}: {verdict(result)}, largest relative error {result['max_rel_error']:.1e}"


def print_types(results: Iterable[Mapping[str, Any]], console: Console) -> None:
    """Print a row for each result as it comes."""
    glyphs = ASCII if console.options.ascii_only else UNICODE
    for result in results:
        name = verdict(result)
        error = result["max_rel_error"]
        head = f"{glyphs.check if result['ok'] else glyphs.cross} {result['model_type']:<{_NAME}} "
        tail = f"{name:<{len(IN_DOCUMENTS)}}" if result["ok"] else name
        if error is not None:
            tail += f"  {error:.1e}"
        row = Text(head + tail, style=_STYLES[name] if not result["ok"] else "")
        console.print(row, highlight=False, soft_wrap=True)
        if reason := short_reason(result):
            for line in Text(reason, style="dim").wrap(console, max(40, console.width - 4)):
                console.print(Text("    ") + line, highlight=False, soft_wrap=True)


def counts_text(found: Mapping[str, int], of: int) -> str:
    """The counts, of so many types."""
    done = sum(found.values())
    text = "; ".join(f"{number} {name}" for name, number in found.items())
    return f"{text}: {done} types" if done == of else f"{text}: {done} of {of} types, the others were not checked"
