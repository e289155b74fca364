"""TensorBoard: event files in RUN/tensorboard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.app.trackers.base import End, Line, Stream, Tracker, samples_text
from penstock.storage.files.untrusted import shell

FOLDER = "tensorboard"


class TensorBoard(Tracker):
    """Events in files of this process's own. A file that begins at a step voids what earlier files say of it and of
    later ones, so that every step is there once, however the process before ended."""

    name = "tensorboard"
    package = ("tensorboard", (2, 18))
    rewinds = True
    local = True
    _writer: Any = None

    def __init__(self, path: Path, name: str, config: dict[str, Any]) -> None:
        super().__init__(path, name, config)
        self._last: dict[Stream, int] = {}
        """The last step of each stream that this process has written."""

    def location(self) -> str:
        return FOLDER

    def open(self, first_step: int) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = self.path / FOLDER
        folder.mkdir(exist_ok=True)
        self._writer = EventFileWriter(str(folder), max_queue_size=10_000)
        if self.known:
            self._void(first_step)
        else:
            self._text("recipe", f"```json\n{json.dumps(self.config, indent=1)}\n```", 0, 0.0)
        self.known |= {"id": FOLDER, "at": f"see it with: {shell('tensorboard', '--logdir', folder)}"}

    def send(self, lines: list[Line]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        for line in lines:
            if line.step <= self._last.get(line.stream, -1):
                self._void(line.step)
            self._last[line.stream] = line.step
            values = [Summary.Value(tag=tag, simple_value=value) for tag, value in line.values.items()]
            self._event(step=line.step, wall_time=line.time, summary=Summary(value=values))
            if line.samples:
                self._text("samples", samples_text(line.samples), line.step, line.time)
        self._writer.flush()

    def _void(self, step: int) -> None:
        """Void what there is of `step` and later ones."""
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._last = {stream: min(last, step - 1) for stream, last in self._last.items()}
        self._event(step=step, session_log=SessionLog(status=SessionLog.START))

    def close(self, end: End, summary: dict[str, Any] | None) -> None:
        if summary is not None:
            text = f"{end}\n\n```json\n{json.dumps(summary, indent=1)}\n```"
            self._text("summary", text, summary.get("steps") or 0, 0.0)
        self._writer.close()

    def _text(self, tag: str, text: str, step: int, time: float) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        self._event(step=step, wall_time=time, summary=text_pb(f"{tag}/text_summary", text))

    def _event(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(**fields))


TRACKER = TensorBoard
