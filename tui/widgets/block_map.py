"""The block map pane: where every block's weights, state and gradient are now."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.app.console.rows import Row
from penstock.tui.data.blocks import BlockPlace
from penstock.tui.render.blockmap import block_map
from penstock.tui.widgets.lines import LineWidget


class BlockMap(LineWidget, can_focus=True):
    """Draws a snapshot of BlockPlaces."""

    _blocks: Sequence[BlockPlace] = ()

    def show(self, blocks: Sequence[BlockPlace]) -> None:
        """Draw these, unless they are as before."""
        if blocks != self._blocks:
            self._blocks = blocks
            self.redraw()

    def rows(self, width: int, height: int) -> list[Row]:
        return block_map(self._blocks, width, height, self.glyphs)
