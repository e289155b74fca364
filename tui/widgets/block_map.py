"""The block map pane: where every block's weights, state and gradient are now."""

from __future__ import annotations

from app.rows import Row
from tui.data.blocks import BlockPlace
from tui.render.blockmap import block_map
from tui.widgets.lines import LineWidget


class BlockMap(LineWidget, can_focus=True):
    """Draws a snapshot of BlockPlaces."""

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._blocks: list[BlockPlace] = []

    def show(self, blocks: list[BlockPlace]) -> None:
        """Draw these, unless they are as before."""
        if blocks != self._blocks:
            self._blocks = blocks
            self.redraw()

    def rows(self, width: int, height: int) -> list[Row]:
        """The map."""
        return block_map(self._blocks, width, height, self.glyphs)
