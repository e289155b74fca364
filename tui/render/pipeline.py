"""The pipeline: NVMe, RAM and GPU as three stops, what flows from the one to the other, and what comes back.

Arrows above go to the GPU, arrows below come back. Marks on them have moved as far as bytes have: where they stand,
nothing moves. An arrow of dashes carried nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.app.console.rows import Glyphs, Row, exactly, merged
from penstock.storage.files.units import rate_text
from penstock.tui.data.flow import DIRECT, LOAD, READ, STORE, WRITE, Flow, Link, Marks, Node, Route
from penstock.tui.render.bars import tier_bar, tier_text
from penstock.tui.render.ticks import fit

TOKENS = {READ: "lane.nvme_read", LOAD: "lane.h2d", STORE: "lane.d2h", WRITE: "lane.nvme_write"}
_GAPS = ((READ, WRITE), (LOAD, STORE))
"""From left to right: the way to the GPU, and the way back."""
_SHORT = {"activation gradients": "act. gradients", "optimizer state": "state"}
_LEAST_GAP = 12
_BACK = {WRITE, STORE}


def height_for(width: int, height: int) -> int:
    """Rows of the pipeline in a terminal of that size; 0 where there is no room for it."""
    if width < 40 or height < 16:
        return 0
    if height < 20 or width < 58:
        return 1
    if height < 34 or width < 100:
        return 3
    return 5 if height < 44 else 7


def pipeline_rows(width: int, height: int, now: Flow, offsets: Mapping[Route, int], glyphs: Glyphs) -> list[Row]:
    """At most `height` rows of exactly `width` cells; `offsets`: how far the marks of each way have come."""
    if width < 1 or height < 1:
        return []
    framed = height >= 5
    stop = min(40, max(22, width // 6)) if framed else max(10, min(16, (width - 48) // 3))
    gap = (width - 3 * stop) // 2
    if height < 2 or gap < _LEAST_GAP:
        rows = [_line(now, glyphs, width)]
    elif framed:
        rows = _framed(stop, gap, 7 if height >= 7 else 5, now, offsets, glyphs)
    else:
        rows = _strip(stop, gap, now, offsets, glyphs)
        if height >= 3:
            rows.append(_now_row(now, glyphs, width))
    return [exactly(merged(row), width, glyphs.ellipsis) for row in rows]


def _arrow(width: int, route: Route, now: Flow, offsets: Mapping[Route, int], glyphs: Glyphs, label: str) -> Row:
    link = now.links[route]
    flows, back = link.bytes_per_s > 0, route in _BACK
    head = glyphs.left if back else glyphs.right
    cells = list((glyphs.shaft if flows else glyphs.shaft_still) * width)
    if flows and now.live:
        at = offsets.get(route, 0)
        for cell in range(width):
            distance = width - 1 - cell if back else cell
            if (distance - at) % Marks.SPACING == 0:
                cells[cell] = head
    cells[0 if back else -1] = head
    token = TOKENS[route] if flows else "axis"
    label = f" {label} " if label else ""
    begin = (width - len(label) + (1 if back else -1)) // 2
    return [
        ("".join(cells[:begin]), token),
        (label, "bold" if flows else "dim"),
        ("".join(cells[begin + len(label) :]), token),
    ]


def _carries(link: Link, width: int, glyphs: Glyphs) -> str:
    """What a way carries and how fast: `weights 1.2 GB/s`; where room is scarce the first kind alone, without rate."""
    if not link.cargo:
        return fit("nothing", min(7, width))
    rate = rate_text(link.bytes_per_s)
    names = [name for name, _ in link.cargo]
    short = [_SHORT.get(name, name) for name in names]
    result = [", ".join(some) for some in (names, short)]
    result += [f"{', '.join(short[:count])}, {glyphs.ellipsis}" for count in range(len(short) - 1, 0, -1)]
    result += [short[0] + glyphs.ellipsis] if len(short) > 1 else []
    result = [f"{text} {rate}" for text in result] + [short[0], rate]
    return next((text for text in result if len(text) <= width), "")


def _on_the_way(link: Link, width: int) -> str:
    cargo, block = link.now
    if not cargo:
        return ""
    short, of = _SHORT.get(cargo, cargo), f" of {block}" if block else ""
    result = (f"{cargo}{of}", f"{short}{of}", f"{short} {block}", block, short)
    return next((text for text in result if text and len(text) <= width), "")


def _line(now: Flow, glyphs: Glyphs, width: int) -> Row:
    row: Row = []
    for index, (name, node) in enumerate(now.nodes.items()):
        share = node.tier.share if node.tier and width >= 70 else None
        row.append((f"{node.name}{'' if share is None else f' {share:.0%}'}", f"tier.{name} bold"))
        for to, back in _GAPS[index : index + 1]:
            row.append((f" {rate_text(now.links[to].bytes_per_s)}{glyphs.right}", TOKENS[to]))
            row.append((f" {glyphs.left}{rate_text(now.links[back].bytes_per_s)} ", TOKENS[back]))
    return [*row, (f"  {now.when}", "dim")]


def _strip(stop: int, gap: int, now: Flow, offsets: Mapping[Route, int], glyphs: Glyphs) -> list[Row]:
    above: Row = []
    below: Row = []
    for index, (name, node) in enumerate(now.nodes.items()):
        share = node.tier.share if node.tier else None
        percent = "" if share is None else f"{share:.0%}"
        above.append((f" {node.name}{percent.rjust(stop - 2 - len(node.name))} ", f"box.tier.{name}"))
        edges = ("", "") if glyphs.braille else ("[", "]")
        token = f"tier.{name}"
        below += [(edges[0], token), *_fill(node, stop - 2 * len(edges[0]), glyphs), (edges[1], token)]
        if index < len(_GAPS):
            for row, route in zip((above, below), _GAPS[index], strict=True):
                row += _arrow(gap, route, now, offsets, glyphs, _carries(now.links[route], gap - 4, glyphs))
    return [above, below]


def _fill(node: Node, width: int, glyphs: Glyphs) -> Row:
    return tier_bar(node.tier, width, glyphs) if node.tier else [(" " * width, "text")]


def _now_row(now: Flow, glyphs: Glyphs, width: int) -> Row:
    ways = {LOAD: "to GPU", STORE: "from GPU", READ: "read", WRITE: "write"}
    gpu, ram = now.nodes["gpu"], now.nodes["ram"]
    items: list[tuple[str, str, str]] = [("GPU ", gpu.doing, "tier.gpu")] if gpu.doing else []
    items += [(f"{word} ", _on_the_way(now.links[way], 26), TOKENS[way]) for way, word in ways.items()]
    items += [("RAM ", ram.doing, "tier.ram")] if ram.doing else []
    direct = _direct(now, glyphs)
    row: Row = [(direct, "lane.nvme_read")] if direct else []
    left = width - len(now.when) - len(direct) - 2
    for label, words, token in items:
        separator = "   " if row else ""
        if words and len(separator + label + words) <= left:
            row += [(separator + label, "dim"), (words, token)]
            left -= len(separator + label + words)
    if gpu.note and len(gpu.note) + 12 <= left:
        row.append((f"{'   ' if row else ''}GPU tier {gpu.note}", "dim"))
    used = sum(len(text) for text, _ in row)
    return [*row, (now.when.rjust(max(0, width - used)), "dim")]


def _direct(now: Flow, glyphs: Glyphs) -> str:
    link = now.links.get(DIRECT, Link())
    return f"NVMe{glyphs.right}GPU {_carries(link, 60, glyphs)}" if link.cargo else ""


def _framed(stop: int, gap: int, height: int, now: Flow, offsets: Mapping[Route, int], glyphs: Glyphs) -> list[Row]:
    rows: list[Row] = [[] for _ in range(height)]
    for index, (name, node) in enumerate(now.nodes.items()):
        for row, piece in zip(rows, _box(node, name, stop, height, glyphs), strict=True):
            row += piece
        if index < len(_GAPS):
            middle = (now.when, _direct(now, glyphs))[index]
            for row, piece in zip(rows, _ways(gap, height, _GAPS[index], middle, now, offsets, glyphs), strict=True):
                row += piece
    return rows


def _box(node: Node, name: str, width: int, height: int, glyphs: Glyphs) -> list[Row]:
    token, tier, inner = f"tier.{name}", node.tier, width - 4
    share = tier.share if tier else None
    percent = "" if share is None else f" {share:4.0%}"
    figures = "no plan yet" if tier is None else tier_text(tier)
    holds = _stored(node.holds, inner, glyphs)
    doing: Row = [(node.doing, f"{token} bold")]
    content: list[Row] = [
        [*_fill(node, inner - len(percent), glyphs), (percent, "bold")],
        [(figures, "text")],
        doing if node.doing else [(node.note or holds, "dim")],
    ]
    if height > 5:
        content[2:] = [[(holds, "dim")], [(node.note, "dim")], doing]
    top_left, top_right, bottom_left, bottom_right = [*glyphs.corners]
    title = f" {node.name}{' tier' if node.note else ''} "
    rule = glyphs.hline * (width - 3 - len(title))
    side = (glyphs.vline, token)
    return [
        [(f"{top_left}{glyphs.hline}", token), (title, f"{token} bold"), (f"{rule}{top_right}", token)],
        *([side, (" ", "text"), *exactly(row, inner, glyphs.ellipsis), (" ", "text"), side] for row in content),
        [(f"{bottom_left}{glyphs.hline * (width - 2)}{bottom_right}", token)],
    ]


def _stored(names: Sequence[str], width: int, glyphs: Glyphs) -> str:
    if not names:
        return ""
    full, short = (", ".join(names), ", ".join(_SHORT.get(name, name) for name in names))
    result = [text for text in (f"stores {full}", f"stores {short}", full, short) if len(text) <= width]
    return result[0] if result else fit(short, width, glyphs.ellipsis)


def _ways(
    width: int,
    height: int,
    routes: tuple[Route, Route],
    middle: str,
    now: Flow,
    offsets: Mapping[Route, int],
    glyphs: Glyphs,
) -> list[Row]:
    to, back = routes
    inner = width - 2
    rows: list[Row] = [
        [(_carries(now.links[to], inner, glyphs).center(inner), f"{TOKENS[to]} bold")],
        _arrow(inner, to, now, offsets, glyphs, _on_the_way(now.links[to], inner * 2 // 3)),
        [(fit(middle, inner, glyphs.ellipsis).strip().center(inner), "dim")],
        _arrow(inner, back, now, offsets, glyphs, _on_the_way(now.links[back], inner * 2 // 3)),
        [(_carries(now.links[back], inner, glyphs).center(inner), f"{TOKENS[back]} bold")],
    ]
    if height > 5:
        rows.insert(4, [(_breakdown(now.links[back], inner, glyphs), "dim")])
        rows.insert(2, [(_breakdown(now.links[to], inner, glyphs), "dim")])
    return [[(" ", "text"), *exactly(row, inner), (" ", "text")] for row in rows]


def _breakdown(link: Link, width: int, glyphs: Glyphs) -> str:
    parts = [f"{name} {rate_text(rate)}" for name, rate in link.cargo]
    return fit(", ".join(parts), width, glyphs.ellipsis).strip().center(width) if len(parts) > 1 else ""
