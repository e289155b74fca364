"""TensorBoard: event files in RUN/tensorboard."""

from __future__ import annotations

import json
from typing import Any

from penstock.app.trackers.base import About, End, Line, Tracker
from penstock.app.trackers.figures import samples_text
from penstock.storage.files.untrusted import shell

FOLDER = "tensorboard"


class TensorBoard(Tracker):
    """Events in files of this process's own. A file that begins at a step voids what earlier files say of it and of
    later ones, so that every step is there once, however the process before ended."""

    name = "tensorboard"
    rewinds = True
    local = True

    def __init__(self, about: About, known: dict[str, Any]) -> None:
        super().__init__(about, known)
        self._writer: Any = None
        self._folder = about.path / FOLDER

    def place(self) -> str:
        return FOLDER

    def open(self, first_step: int) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._folder.mkdir(exist_ok=True)
        self._writer = EventFileWriter(str(self._folder), max_queue_size=10_000)
        if self.known:
            self.rewind(first_step)
        else:
            config = {**self.about.config, "made_with": self.about.made_with}
            self._text("recipe", f"```json\n{json.dumps(config, indent=1)}\n```", 0, 0.0)
        self.known |= {"id": FOLDER, "at": f"see it with: {shell('tensorboard', '--logdir', self._folder)}"}

    def send(self, lines: list[Line]) -> None:
        for line in lines:
            for tag, value in line.values.items():
                self._event(line.step, line.time, tag, simple_value=value)
            if line.samples:
                self._text("samples", samples_text(line.samples), line.step, line.time)

    def flush(self) -> None:
        self._writer.flush()

    def rewind(self, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        self._writer.add_event(Event(step=step, session_log=SessionLog(status=SessionLog.START)))

    def close(self, end: End) -> None:
        if self.about.summary is not None:
            text = f"{end}\n\n```json\n{json.dumps(self.about.summary, indent=1)}\n```"
            self._text("summary", text, self.about.summary.get("steps") or 0, 0.0)
        self._writer.close()

    def _text(self, tag: str, text: str, step: int, time: float) -> None:
        from tensorboard.compat.proto.summary_pb2 import SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        tensor = TensorProto(dtype="DT_STRING", string_val=[text.encode()], tensor_shape=shape)
        self._event(step, time, f"{tag}/text_summary", metadata=metadata, tensor=tensor)

    def _event(self, step: int, time: float, tag: str, **value: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._writer.add_event(
            Event(step=step, wall_time=time, summary=Summary(value=[Summary.Value(tag=tag, **value)]))
        )
