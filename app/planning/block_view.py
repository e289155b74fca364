"""The blocks of a forecast for people: on which tier each lives, and what forward saves of it."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from penstock.app.console.rows import Glyphs, Page, Row
from penstock.storage.files.units import bytes_text

TARGETS = ("weights", "state", "gradient")
TIERS = ("gpu", "ram", "nvme")
_SAVED = {"none": "graph", "selective": "attention", "full": "input"}
"""train.activation_checkpointing -> what forward saves."""


def shades(glyphs: Glyphs) -> str:
    """As many as there are parts with a shade of their own, and one for the others."""
    return "█▓▒░" if glyphs.braille else "#=+-"


def free_mark(glyphs: Glyphs) -> str:
    return "·" if glyphs.braille else "."


def block_map(page: Page, forecast: dict[str, Any]) -> None:
    """One cell a block, the first at the left: in which tier its weights, state and gradient live."""
    blocks = [_together(members) for members in by_block(forecast["blocks"]).values()]
    marks = "█▒░" if page.glyphs.braille else "grn"  # told apart without colours
    page.head("blocks", "  ".join(f"{mark} {tier}" for tier, mark in zip(TIERS, marks, strict=True)))
    for target in TARGETS:
        cells = min(len(blocks), page.width - 10)
        row: Row = [(f"{target:<10}", "dim")]
        places = [blocks[index * len(blocks) // cells][target] for index in range(cells)]
        for tier, run in itertools.groupby(places):
            mark = marks[TIERS.index(tier)] if tier in TIERS else "?" if tier else free_mark(page.glyphs)
            row.append((mark * len(list(run)), f"tier.{tier}" if tier else "axis"))
        page.line(row)
    page.wrapped(f"saved for backward: {', '.join(_saved(forecast['blocks'], of_group(forecast)))}", "dim")


def by_block(blocks: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Block -> its buffers: of what is trained, of what is frozen, of what is kept in float32."""
    result: dict[str, list[dict[str, Any]]] = {}
    for buffer in blocks:
        result.setdefault(buffer.get("block") or buffer["name"], []).append(buffer)
    return result


def _together(buffers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Where a block lives: most of its weights, and the state and gradient of what is trained; None: it has none."""
    largest = max(buffers, key=lambda buffer: buffer["bytes"])
    trained = next((buffer for buffer in buffers if not buffer.get("frozen")), None)
    return {"weights": largest["weights"]} | {k: trained and trained[k] for k in ("state", "gradient")}


def block_table(page: Page, forecast: dict[str, Any], most: int) -> None:
    """Where blocks live, how large they are and what is saved of them for backward, in at most `most` rows."""
    page.head("blocks")
    rows = [(["block", *TARGETS, "size"], ["saved for backward"])]
    rows += [_block_row(members, of_group(forecast), apart) for members, apart in _alike(forecast["blocks"], most)]
    widths = [max(len(cells[column]) for cells, _ in rows) for column in range(len(TARGETS) + 2)]
    for index, (cells, saved) in enumerate(rows):
        *left, size = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        begin = "  ".join([*left, size.strip().rjust(widths[-1])]) + "  "
        token = "text" if index else "title"
        text = ", ".join(saved)
        if len(begin + text) <= page.width:
            page.line([(begin + text, token)])
        else:
            page.line([(begin, token)])
            page.wrapped(text, token, indent=4)


def _alike(blocks: Sequence[dict[str, Any]], most: int) -> list[tuple[list[dict[str, Any]], bool]]:
    """Runs of blocks that are treated alike; where these are more than `most`, blocks of like placement wherever they
    lie (True), then of all layers."""

    def kind(block: dict[str, Any]) -> str:
        return re.sub(r"\d+", "*", _block_name(block))

    # Of each sort all blocks' buffers follow one another: what is kept in float32 comes last, before it what is frozen;
    # of these first all layers, then their experts.
    kinds = list(dict.fromkeys(map(kind, blocks)))
    blocks = sorted(blocks, key=lambda b: (bool(b.get("float32")), bool(b.get("frozen")), kinds.index(kind(b))))

    def stem(block: dict[str, Any]) -> tuple[Any, ...]:
        return (kind(block), block.get("frozen"), block.get("float32"))

    def place(block: dict[str, Any]) -> tuple[Any, ...]:
        return (*stem(block), *(block[target] for target in TARGETS))

    def treatment(block: dict[str, Any]) -> tuple[Any, ...]:
        where = (block.get(key) for key in ("spilled", "saved_on_gpu", "offloaded_graphs"))
        return (*place(block), tuple(_levels(block).items()), *where)

    for key, apart in ((treatment, False), (place, False), (place, True), (stem, True)):
        groups: dict[Any, list[dict[str, Any]]] = {}
        for number, (alike, members) in enumerate(itertools.groupby(blocks, key=key)):
            groups.setdefault(alike if apart else number, []).extend(members)
        if len(groups) <= most:
            break
    return [(members, apart) for members in groups.values()]


def _block_row(members: list[dict[str, Any]], chunks: int, apart: bool) -> tuple[list[str], list[str]]:
    """The cells of a row of blocks, and what is saved of them."""
    first, last = (_block_name(members[i]).split(".") for i in (0, -1))
    name = ".".join(first)
    if len(members) > 1:
        # What only tells apart blocks of one layer is left out where there are several layers.
        differs = next((i for i, parts in enumerate(zip(first, last, strict=True)) if len(set(parts)) > 1), -1)
        end = ".".join([last[differs], *(part for part in last[differs + 1 :] if not part.isdigit())])
        name = ".".join(first[: differs + 1]) + ("-" if apart else " - ") + end
        name = f"{len(members)} of {name}" if apart else name
    name += "".join(f", {sort}" for sort in ("frozen", "float32") if members[0].get(sort))
    tiers = [_joined(block[target] or "-" for block in members) for target in TARGETS]
    return [name, *tiers, bytes_text(sum(block["bytes"] for block in members))], _saved(members, chunks)


def _block_name(buffer: dict[str, Any]) -> str:
    return str(buffer.get("block") or buffer["name"])


def _joined(values: Iterable[str]) -> str:
    return "/".join(dict.fromkeys(values))


def _saved(members: Sequence[dict[str, Any]], chunks: int) -> list[str]:
    """What backward finds of these chunks: `attention`, or `graph 3%, input 97%`; where it lies, unless in RAM."""
    members = [block for block in members if _levels(block)]
    total = chunks * len(members)
    counts: Counter[str] = Counter()
    for block in members:
        counts.update(_levels(block))
    texts = [
        _SAVED[level] if count == total else f"{_SAVED[level]} {_part(count, total)}"
        for level, count in counts.items()
        if count
    ]
    if not texts:
        return ["-"]
    places = {"spilled": "on NVMe", "saved_on_gpu": "on the GPU", "offloaded_graphs": "graphs that leave the GPU"}
    for key, where in places.items():
        if count := sum(block.get(key) or 0 for block in members):
            texts.append(f"{_part(count, total)} {where}")
    return texts


def of_group(forecast: dict[str, Any]) -> int:
    """Chunks of one group, which is what is saved of a block at once."""
    return int(forecast.get("group_chunks", forecast["chunks"]))


def groups(forecast: dict[str, Any]) -> list[str]:
    """How the step is cut into groups of micro-batches, where it is, or why it is not."""
    groups = forecast.get("groups", 1)
    if forecast.get("one_group"):
        return [f"one group of {forecast['group_tokens']:,} tokens, for the load-balancing loss"]
    return [f"{groups:,} groups of {forecast['group_tokens']:,} tokens, one after another"] if groups > 1 else []


def _levels(block: dict[str, Any]) -> dict[str, int]:
    """train.activation_checkpointing -> chunks of the block, as planned."""
    result: dict[str, int] = block.get("activation_checkpointing") or {}
    return {level: count for level, count in result.items() if level in _SAVED}


def _part(count: int, total: int) -> str:
    """A share in whole percent; what is little is not nothing, and what is nearly all is not all."""
    if count == total:
        return "all"
    percent = round(100 * count / total)
    return "<1%" if percent == 0 else ">99%" if percent == 100 else f"{percent}%"
