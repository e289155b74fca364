"""Makes Textual's pilot wait for what an application has to do, not for the processor to be idle.

Textual waits after each key until the process has used little of 20 ms, which takes 40 ms at best, a second beside
threads that work, and nothing at all where the machine gives the process no time. Here it is over when no message is
waiting and nothing is left to be laid out or drawn. What a thread or another process does is not waited for: tests wait
for the outcome (`real_runs.until`). Without a terminal nobody sees what is drawn after each key of several: it is drawn
after the last one, so that what cannot be drawn is found.
"""

import asyncio
import time
from typing import Any

import pytest
import textual.app
import textual.pilot
from textual._compositor import Compositor
from textual._context import active_app
from textual.css.stylesheet import Stylesheet

_TURNS = 8
"""Of the event loop without anything to do, one after the other, until it is over."""
_MOST_S = 1.0
"""Where something is drawn without end."""


def _is_busy(app: Any) -> bool:
    """Whether messages wait; lays out and draws what has to be."""
    if any(pump._next_callbacks or pump._pending_message or pump.message_queue_size for pump in list(app._registry)):
        return True
    if not app._screen_stack:
        return False
    screen = app.screen
    if not screen.is_running or app._batch_count:
        return False
    flags = ("_layout_required", "_scroll_required", "_repaint_required", "_recompose_required", "_dirty_widgets")
    if any(getattr(screen, flag) for flag in flags) or screen._callbacks:
        screen._on_timer_update()
        return True
    return False


async def _settled(min_sleep: float = 0.0, max_sleep: float = _MOST_S) -> None:
    app, deadline, quiet = active_app.get(), time.monotonic() + _MOST_S, 0
    while quiet < _TURNS and time.monotonic() < deadline:
        await asyncio.sleep(0)
        quiet = 0 if _is_busy(app) else quiet + 1


async def _settled_and_drawn(min_sleep: float = 0.0, max_sleep: float = _MOST_S) -> None:
    await _settled()
    app = active_app.get()
    if app._screen_stack and app.screen._compositor._dirty_regions:
        _render_update(app.screen._compositor, screen_stack=app._background_screens)


def _drawn_when_looked_at(compositor: Compositor, full: bool = False, **more: Any) -> Any:
    return _render_update(compositor, full=True, **more) if full else None


_render_update = Compositor.render_update

_parsed: dict[Any, Any] = {}


def _parse_once(sheet: Stylesheet, css: str, read_from: Any, *more: Any, **options: Any) -> Any:
    """The rules of a style sheet, which every application would parse anew."""
    key = (css, read_from, more, tuple(options.items()), tuple(sorted(sheet._variables.items())))
    if key not in _parsed:
        _parsed[key] = _parse_rules(sheet, css, read_from, *more, **options)
    return _parsed[key]


_parse_rules = Stylesheet._parse_rules


def make_quick(patch: pytest.MonkeyPatch, *, drawn_at_once: bool) -> None:
    patch.setattr(textual.app, "wait_for_idle", _settled)
    patch.setattr(textual.pilot, "wait_for_idle", _settled if drawn_at_once else _settled_and_drawn)
    if not drawn_at_once:
        patch.setattr(Compositor, "render_update", _drawn_when_looked_at)
    patch.setattr(Stylesheet, "_parse_rules", _parse_once)
