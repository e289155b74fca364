"""The line of keys at the foot of a screen."""

from typing import Any

from textual import widgets


class Footer(widgets.Footer):
    """Makes its keys anew only where they have changed; Textual's does, styles and all, whenever the focus moves."""

    _shown: list[Any] | None = None

    def __init__(self, *, compact: bool = False) -> None:
        super().__init__(compact=compact, show_command_palette=False)

    async def recompose(self) -> None:
        if not self.is_attached:  # the screen was closed while this waited its turn
            return
        keys = [active[1:] for active in self.screen.active_bindings.values() if active.binding.show]
        if keys != self._shown:
            self._shown = keys
            await super().recompose()
