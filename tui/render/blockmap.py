"""The block map: a column for each block, a row for each thing it has, a letter for where that is now.

`g` GPU, `r` RAM, `n` NVMe; an arrow while it is in flight, up towards the GPU. What has left its home for the GPU
stands as a capital `G`. Colours repeat what the letters say.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from penstock.app.console.rows import Glyphs, Row, exactly, merged
from penstock.storage.files.units import bytes_text
from penstock.tui.data.blocks import KINDS, BlockLocation
from penstock.tui.render.ticks import fit

_LETTERS = {"gpu": "g", "ram": "r", "nvme": "n"}
_LABELS = {"weights": "weights", "state": "state", "gradient": "grad", "doing": "now"}
_LABEL_CELLS = 8
Cell = tuple[str, str]


def legend(width: int, glyphs: Glyphs) -> Row:
    """What the letters mean, as far as there is room."""
    row: Row = []
    used = 0
    items = [
        ("g", "tier.gpu", "gpu"),
        ("r", "tier.ram", "ram"),
        ("n", "tier.nvme", "nvme"),
        (glyphs.up + glyphs.down, "flight", "in flight"),
        ("G", "tier.gpu reverse", "fetched"),
        ("f b u", "accent", "forward backward update"),
    ]
    for sign, token, name in items:
        size = len(sign) + 1 + len(name) + 2
        if used + size > width + 2:
            break
        row += [(sign, token), (" " + name + "  ", "dim")]
        used += size
    return exactly(row, width)


def block_map(blocks: Sequence[BlockLocation], width: int, height: int, glyphs: Glyphs) -> list[Row]:
    """At most `height` rows of `width` cells. Where the blocks outnumber the cells, they wrap, or share cells."""
    if width < 1 or height < 1:
        return []
    if not blocks:
        return [exactly([("no plan yet", "dim")], width)]
    gutter = _LABEL_CELLS if width >= 24 else 0
    space = width - gutter
    kinds: list[str] = [*KINDS, "doing"][: max(1, height)] if height < 4 else [*KINDS, "doing"]
    band = len(kinds) + 1  # with its ruler
    num_bands = max(1, (height - (1 if height > band + 1 else 0)) // band) if height >= band else 1
    per_cell = max(1, math.ceil(len(blocks) / (space * num_bands)))
    num_cells = math.ceil(len(blocks) / per_cell)
    cells_each = min(space, math.ceil(num_cells / math.ceil(num_cells / space)))
    pitch = min(4, space // max(1, num_cells)) if num_cells <= space else 1
    pitch = max(1, pitch)
    rows: list[Row] = []
    for start in range(0, num_cells, cells_each):
        shown = range(start, min(num_cells, start + cells_each))
        groups = [blocks[cell * per_cell : (cell + 1) * per_cell] for cell in shown]
        if height >= band:
            rows.append(exactly([(" " * gutter, "dim"), (_ruler(groups, start * per_cell, pitch), "dim")], width))
        for kind in kinds:
            row: Row = [(_LABELS[kind].ljust(gutter)[:gutter], "dim")]
            for group in groups:
                sign, token = max((_cell(block, kind, glyphs) for block in group), key=_weight)
                row += [(sign * (pitch - 1 if pitch > 1 else 1), token), (" " * (pitch > 1), "text")]
            rows.append(exactly(merged(piece for piece in row if piece[0]), width))
    if len(rows) < height:
        rows.append(legend(width, glyphs))
    available = height - len(rows) - 2
    if available >= 3 and width >= 34:
        # Where there is no room for all, those that are not at rest.
        listed = blocks if len(blocks) <= available else [block for block in blocks if _is_away(block)][:available]
        rows += _table(listed, width, glyphs) if listed else []
    return rows[:height]


def _is_away(block: BlockLocation) -> bool:
    """Whether anything of a block is under way, or neither at home nor waiting there."""
    places = ((block.location.get(kind), block.home.get(kind)) for kind in KINDS)
    return bool(block.moving or block.doing) or any(location and location != home for location, home in places)


def _table(blocks: Sequence[BlockLocation], width: int, glyphs: Glyphs) -> list[Row]:
    name_cells = min(24, max(len("block"), *(len(block.name) for block in blocks)) + 1)
    kind_cells = 10 if width >= name_cells + 46 else 7
    head = "block".ljust(name_cells) + "".join(_LABELS[kind].ljust(kind_cells) for kind in KINDS)
    rows: list[Row] = [[(" " * width, "text")], exactly([(head + "size".rjust(9) + "  now", "dim")], width)]
    for block in blocks:
        row: Row = [(fit(block.name, name_cells, glyphs.ellipsis), "text")]
        for kind in KINDS:
            direction, location = block.moving.get(kind), block.location.get(kind, "")
            if direction is not None:
                row.append(((glyphs.up if direction == "in" else glyphs.down) + " " * (kind_cells - 1), "flight"))
            else:
                shown = "fetched" if location == "gpu" != block.home.get(kind) and kind_cells > 7 else location or "-"
                row.append(
                    (shown[: kind_cells - 1].ljust(kind_cells), f"tier.{location}" if location in _LETTERS else "axis")
                )
        row += [(bytes_text(block.num_bytes).rjust(9), "dim"), ("  " + block.doing, "accent")]
        rows.append(exactly(row, width))
    return rows


_WEIGHT = {"flight": 9, "accent": 9, "tier.gpu": 5, "tier.nvme": 4, "tier.ram": 3, "axis": 0}


def _weight(cell: Cell) -> int:
    """The cell of most weight stands for those of its group."""
    return _WEIGHT.get(cell[1].split()[0], 0) + cell[1].endswith("reverse")


def _cell(block: BlockLocation, kind: str, glyphs: Glyphs) -> Cell:
    if kind == "doing":
        return (block.doing[0], "accent") if block.doing else ("·" if glyphs.braille else ".", "axis")
    direction = block.moving.get(kind)
    if direction is not None:
        return (glyphs.up if direction == "in" else glyphs.down), "flight"
    location, home = block.location.get(kind, ""), block.home.get(kind, "")
    if location not in _LETTERS:
        return ("·" if glyphs.braille else "."), "axis"
    letter = _LETTERS[location]
    if location == "gpu" and home != "gpu":
        return "G", "tier.gpu reverse"
    return letter, f"tier.{location}" + (" bold" if location != home else "")


def _ruler(groups: Sequence[Sequence[BlockLocation]], first: int, pitch: int) -> str:
    """Names over the columns: e for embed, h for head, and every so often a layer's number."""
    cells = [" "] * (len(groups) * pitch + 4)
    free, every = 0, {1: 10, 2: 5}.get(pitch, 2)
    for index, group in enumerate(groups):
        name = group[0].name
        if name.startswith("layers."):
            number = name.removeprefix("layers.")
            wanted = first + index == 1 or (number.isdigit() and int(number) % every < len(group))
            label = number if wanted and number.isdigit() else ""
        else:
            label = name[:1]
        at = index * pitch
        if label and at >= free and at + len(label) <= len(groups) * pitch:
            cells[at : at + len(label)] = label
            free = at + len(label) + 1
    return "".join(cells[: len(groups) * pitch])
