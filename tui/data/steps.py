"""One step's spans out of a spans.jsonl of any size, found without reading the whole file.

Lines are roughly in order of time, so the step at a place in the file rises with the place, except where a crashed run
went on from an earlier generation: there it falls back, and of the steps done twice the last ones count.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from penstock.app.runs.files import number, open_read, parse_line, span_of, whole_lines
from penstock.app.runs.ops import STEP_END
from penstock.tui.data.critical import StepAnalysis, analyse
from penstock.tui.data.spans import Ints, SpanStore, SpanView, StepWindow

MAX_SPANS = 400_000
"""Of one step; of a longer one the last are kept."""
MAX_STEP_BYTES = 1 << 30

_BLOCK_BYTES = 1 << 18
_AROUND_BYTES = 1 << 18
"""Lines before a step's first and after its last among which there may be more of its spans."""
_MARK = f'"{STEP_END}"'.encode()
"""In every line that ends a step."""


@dataclass(frozen=True)
class StepSpans:
    """A step's window with all that ran in it, and some of what ran around it."""

    window: StepWindow
    view: SpanView
    num_damaged: int
    first_byte: int
    end_byte: int

    @property
    def whole(self) -> bool:
        """False where the step had more spans than are kept."""
        return self.view.complete_from_s <= self.window.start_s

    @cached_property
    def analysis(self) -> StepAnalysis:
        return analyse(self.view, self.window)

    @property
    def rows(self) -> Ints:
        """All that ran in it, in order of start."""
        return self.view.rows_between(self.window.start_s, self.window.end_s)


class _Clip(NamedTuple):
    step: int
    end_s: float
    offset: int
    """Of its line."""


class StepIndex:
    """Finds steps in a spans.jsonl that may grow meanwhile. Each call opens the file: it may come and vanish."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem: str | None = None
        """Why the file cannot be read."""
        self._looked_at = 0
        self._first: _Clip | None = None
        self._last: _Clip | None = None

    def bounds(self) -> tuple[int, int] | None:
        """The first and the last step whose end the file holds; None where there is none, or no file.

        Called again, it reads only what was added.
        """
        try:
            with open_read(self.path) as file:
                size = file.seek(0, os.SEEK_END)
                if size < self._looked_at:
                    self._first = self._last = None
                if self._first is None:
                    self._first = next(_clips_after(file, 0), None)
                    self._last = _clip_before(file, size)
                elif size > self._looked_at:
                    # The last line may have been torn, and its beginning may have looked like a clip's.
                    for clip in _clips_after(file, max(0, self._looked_at - _BLOCK_BYTES)):
                        self._last = clip
                self._looked_at = size
        except OSError as error:
            self.problem = f"{self.path.name} cannot be read: {error.strerror}"
            self._first = self._last = None
        if self._first is None or self._last is None:
            return None
        return min(self._first.step, self._last.step), self._last.step

    def find(self, step: int) -> StepSpans | None:
        """The spans of a step, the last time that it was done; None where the file does not hold its end.

        Nor is a step there that a crash undid and that has not been done again.
        """
        try:
            with open_read(self.path) as file:
                clip = _find_clip(file, step)
                return None if clip is None else _read_step(file, clip)
        except OSError:
            return None


def _find_clip(file: BinaryIO, step: int) -> _Clip | None:
    """The last `clip` of `step`; None where the file ends with an earlier step.

    Backwards, the step falls by one per step's bytes, and rises where a crashed run went on from an earlier generation.
    So within a quarter of the bytes of the steps in between, `step` was not done again.
    """
    clip = last = _clip_before(file, file.seek(0, os.SEEK_END))
    if last is None or last.step < step:
        return None
    before = _clip_before(file, last.offset)
    step_bytes = last.offset - (before.offset if before else 0)
    end = None
    while clip is not None and clip.step > step:
        end = clip.offset
        clip = _clip_before(file, end - max(0, (clip.step - step) * step_bytes // 4 - 2 * step_bytes))
    clip = last if end is None else _clip_before(file, end, step)
    return clip if clip is not None and clip.step == step else None


def _read_step(file: BinaryIO, clip: _Clip) -> StepSpans | None:
    before = _clip_before(file, clip.offset)
    first_byte = max(0, (before.offset if before else 0) - _AROUND_BYTES, clip.offset - MAX_STEP_BYTES)
    first_byte = _seek_line(file, first_byte)
    store = SpanStore(MAX_SPANS)
    num_damaged = 0
    offset = overlap_end = first_byte
    batch: list[Any] = []
    for line in whole_lines(file):
        offset = file.tell()
        span = parse_line(line)
        start = None if span is None else number(span.get("start_s"))
        if start is None:
            num_damaged += 1
            continue
        batch.append(span)
        if len(batch) == 4096:
            store.add(batch)
            batch.clear()
        if start < clip.end_s:
            overlap_end = offset
        elif offset > max(overlap_end, clip.offset) + _AROUND_BYTES:
            break
    store.add(batch)
    view = store.view
    if before is not None and before.step == clip.step - 1:
        start_s = before.end_s
    else:
        earliest_s = before.end_s if before else view.first_start_s
        mine = (view.step == clip.step) & (view.start_s >= earliest_s)
        start_s = float(view.start_s[mine].min(initial=clip.end_s))
    if start_s >= clip.end_s:
        return None
    window = StepWindow(clip.step, start_s, clip.end_s)
    return StepSpans(window, view, num_damaged + store.num_rejected, first_byte, offset)


def _seek_line(file: BinaryIO, offset: int) -> int:
    """Go to the first line that begins at `offset` or behind it; where that is."""
    file.seek(max(0, offset - 1))
    if offset > 0:
        file.readline(_BLOCK_BYTES)
    return file.tell()


def _clip_before(file: BinaryIO, end: int, step: int | None = None) -> _Clip | None:
    """The last `clip` whose line lies before `end`; with `step`, the last one of it or of a step before it."""
    torn = b""
    floor = max(0, end - MAX_STEP_BYTES)
    while end > floor:
        start = max(floor, end - _BLOCK_BYTES)
        file.seek(start)
        text = file.read(end - start) + torn
        first = text.find(b"\n") + 1 if start else 0
        at = len(text)
        while (at := text.rfind(_MARK, first, at)) >= 0:
            begin, line_end = text.rfind(b"\n", 0, at) + 1, text.find(b"\n", at)
            clip = _clip_of(text[begin:line_end], start + begin) if line_end >= 0 else None
            if clip is not None and (step is None or clip.step <= step):
                return clip
        torn = text[:first] if first < _BLOCK_BYTES else b""
        end = start
    return None


def _clips_after(file: BinaryIO, offset: int) -> Iterator[_Clip]:
    _seek_line(file, offset)
    for line in whole_lines(file):
        if line is not None and _MARK in line and (clip := _clip_of(line, file.tell() - len(line))) is not None:
            yield clip


def _clip_of(line: bytes, offset: int) -> _Clip | None:
    """The clip of a line at `offset`; None where it is none."""
    span = span_of(parse_line(line) or {})
    return None if span is None or span.op != STEP_END else _Clip(span.step, span.end_s, offset)
