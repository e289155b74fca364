"""One step's spans out of a spans.jsonl of any size, found without reading the whole file.

Lines are roughly in order of time, so the step at a place in the file rises with the place, except where a crashed run
went on from an earlier generation: there it falls back, and of the steps done twice the last ones count.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from penstock.app.runs.files import number, open_read, parse_line, span_of, whole_lines
from penstock.app.runs.ops import STEP_END
from penstock.tui.data.spans import SpanStore, SpanView, StepWindow

MAX_SPANS = 400_000
"""Of one step; of a longer one the last are kept."""
MAX_STEP_BYTES = 1 << 30

_PROBE_BYTES = 1 << 13
_BLOCK_BYTES = 1 << 18
_AROUND_BYTES = 1 << 18
"""Lines before a step's first and after its last among which there may be more of its spans."""
_STEP = re.compile(rb'"step":\s*(\d{1,15})\b')
_CLIP = re.compile(rb'"op":\s*"%s"' % STEP_END.encode())


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class _Clip:
    step: int
    end_s: float
    offset: int


class StepIndex:
    """Finds steps in a spans.jsonl that may grow meanwhile. Each call opens the file: it may come and vanish."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem: str | None = None
        self._looked_at = 0
        self._first: _Clip | None = None
        self._last: _Clip | None = None

    def bounds(self) -> tuple[int, int] | None:
        """The first and the last step whose end the file holds; None where there is none, or no file.

        Called again, it reads only what was added.
        """
        try:
            with open_read(self.path) as file:
                size = _whole_lines(file)
                if size < self._looked_at:
                    self._first = self._last = None
                    self._looked_at = 0
                if self._first is None:
                    self._first = next(_clips_after(file, 0, min(size, MAX_STEP_BYTES)), None)
                    self._last = _clip_before(file, size)
                else:
                    for clip in _clips_after(file, self._looked_at, size):
                        self._last = clip
                self._looked_at = size
        except OSError as error:
            self.problem = f"{self.path.name} cannot be read: {error.strerror}"
            self._first = self._last = None
            self._looked_at = 0
        if self._first is None or self._last is None:
            return None
        return min(self._first.step, self._last.step), self._last.step

    def find(self, step: int) -> StepSpans | None:
        """The spans of a step, the last time that it was done; None where the file does not hold its end.

        Nor is a step there that a crash undid and that has not been done again.
        """
        try:
            with open_read(self.path) as file:
                size = _whole_lines(file)
                last = _clip_before(file, size)
                clip = _find_clip(file, step, last, size) if last and step <= last.step else None
                return None if clip is None else _read_step(file, clip)
        except OSError:
            return None


def _find_clip(file: BinaryIO, step: int, last: _Clip, size: int) -> _Clip | None:
    """The last `clip` of `step`; `last` is the file's last one.

    Backwards, the step falls by one per step's bytes, and rises where a crashed run went on from an earlier generation.
    So within a quarter of the bytes of the steps in between, `step` was not done again.
    """
    before = _clip_before(file, last.offset)
    step_bytes = last.offset - (before.offset if before else 0)
    at, end = size, size
    seen: int | None = last.step
    while at > 0 and (seen is None or seen > step):
        end = at
        at -= _PROBE_BYTES if seen is None else max(1, (seen - step) * step_bytes // 4)
        seen = _step_at(file, max(0, at), size)
    clip = _clip_before(file, min(size, end + 2 * _PROBE_BYTES), step)
    return clip if clip is not None and clip.step == step else None


def _read_step(file: BinaryIO, clip: _Clip) -> StepSpans | None:
    before = _clip_before(file, clip.offset)
    first_byte = _line_start(file, max(0, (before.offset if before else 0) - _AROUND_BYTES))
    if clip.offset - first_byte > MAX_STEP_BYTES:
        first_byte = _line_start(file, clip.offset - MAX_STEP_BYTES)
    store = SpanStore(MAX_SPANS)
    num_damaged = 0
    file.seek(first_byte)
    offset = overlap_end = first_byte
    batch: list[Any] = []
    for line in whole_lines(file):
        offset = file.tell()
        span = parse_line(line)
        start = None if span is None else number(span.get("start_s"))
        if span is None or start is None:
            num_damaged += 1
        else:
            batch.append(span)
        if len(batch) == 4096:
            store.add(batch)
            batch.clear()
        if start is not None and start < clip.end_s:
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
    window = StepWindow(clip.step, start_s, clip.end_s)
    return (
        StepSpans(window, view, num_damaged + store.num_rejected, first_byte, offset) if start_s < clip.end_s else None
    )


def _whole_lines(file: BinaryIO) -> int:
    """The file's length without a torn last line."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - _BLOCK_BYTES)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def _line_start(file: BinaryIO, offset: int) -> int:
    """The first line that begins at `offset` or behind it."""
    if offset <= 0:
        return 0
    file.seek(offset - 1)
    file.readline(_BLOCK_BYTES)
    return file.tell()


def _step_at(file: BinaryIO, offset: int, size: int) -> int | None:
    """The earliest step of the first whole lines behind `offset`; None where there is none."""
    length = _PROBE_BYTES
    while True:
        file.seek(offset)
        text = file.read(min(length, size - offset))
        begin, end = text.find(b"\n") + 1 if offset else 0, text.rfind(b"\n") + 1
        steps = [int(step) for step in _STEP.findall(text, begin, end)] if end > begin else []
        if steps:
            return min(steps)
        if offset + length >= size or length >= _BLOCK_BYTES:
            return None
        length *= 4


def _clip_before(file: BinaryIO, end: int, step: int | None = None) -> _Clip | None:
    """The last `clip` whose line lies before `end`; with `step`, the last one of it or of a step before it."""
    torn = b""
    floor = max(0, end - MAX_STEP_BYTES)
    while end > floor:
        start = max(floor, end - _BLOCK_BYTES)
        file.seek(start)
        text = file.read(end - start) + torn
        first = text.find(b"\n") + 1 if start else 0
        for match in reversed(list(_CLIP.finditer(text, first))):
            clip = _parse_clip(text, match.start(), start)
            if clip is not None and (step is None or clip.step <= step):
                return clip
        torn = text[:first] if len(text[:first]) < _BLOCK_BYTES else b""
        end = start
    return None


def _clips_after(file: BinaryIO, start: int, end: int) -> Iterator[_Clip]:
    torn = b""
    while start < end:
        file.seek(start)
        text = torn + file.read(min(_BLOCK_BYTES, end - start))
        whole = text.rfind(b"\n") + 1
        for match in _CLIP.finditer(text, 0, whole):
            clip = _parse_clip(text, match.start(), start - len(torn))
            if clip is not None:
                yield clip
        start += len(text) - len(torn)
        torn = text[whole:] if len(text) - whole < _BLOCK_BYTES else b""


def _parse_clip(text: bytes, at: int, offset: int) -> _Clip | None:
    """The line around `at` of a text that lies at `offset` of the file; None where it is torn or no clip."""
    begin, end = text.rfind(b"\n", 0, at) + 1, text.find(b"\n", at)
    if end < 0:
        return None
    span = span_of(parse_line(text[begin:end]) or {})
    return None if span is None or span.op != STEP_END else _Clip(span.step, span.end_s, offset + begin)
