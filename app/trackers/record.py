"""RUN/trackers/NAME.json: which run of its own a tracker has for this one, and what of it has been sent."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from penstock.app.runs.files import json_text, number, read_object, whole
from penstock.app.trackers.base import STREAMS, Stream
from penstock.app.trackers.feed import Mark
from penstock.storage.files.disk import temporary_name, write_file
from penstock.storage.files.untrusted import open_regular

FOLDER = "trackers"
"""Below the run directory: records, and what trackers' packages say and keep."""
_ID = re.compile(r"[\w.-]{1,200}")


class Record:
    """What is known of one tracker of a run, by the place that was sent to: other settings are another place.

    A copy of a run directory knows nothing but where the tracker itself lies in it: it is another run.
    """

    def __init__(self, run: Path, name: str, place: str, *, local: bool = False) -> None:
        self.path = run / FOLDER / f"{name}.json"
        self._place = place
        self._content = read_object(self.path) or {}
        places = self._content.get("places")
        self._places: dict[str, Any] = places if isinstance(places, dict) else {}
        status = os.stat(run)
        self._run = [status.st_dev, status.st_ino]
        entry = self._places.get(place)
        own = isinstance(entry, dict) and (local or entry.get("run") == self._run)
        self._entry: dict[str, Any] = entry if own and isinstance(entry, dict) else {}

    @property
    def known(self) -> dict[str, Any]:
        """What the tracker keeps of its run; {} where it has none."""
        known = self._entry.get("known")
        if not isinstance(known, dict) or _ID.fullmatch(str(known.get("id"))) is None:
            return {}
        return known

    @property
    def ended(self) -> str | None:
        """How the run had ended when the tracker's run was closed; None: it is open."""
        ended = self._entry.get("ended")
        return ended if isinstance(ended, str) else None

    @property
    def marks(self) -> dict[Stream, Mark]:
        """The last line of each stream that was sent."""
        sent = self._entry.get("sent")
        found: dict[Stream, Mark] = {}
        for stream in STREAMS:
            mark = sent.get(stream) if isinstance(sent, dict) and self.known else None
            if isinstance(mark, list) and len(mark) == 2 and (step := whole(mark[0])) is not None:
                found[stream] = Mark(step, number(mark[1]) or 0.0)
        return found

    def save(
        self, *, known: Mapping[str, Any], marks: Mapping[Stream, Mark], ended: str | None = None, problem: str = ""
    ) -> None:
        """Replace the file. Not synced: what a power cut voids is sent again, or known by the tracker. OSError."""
        sent = {stream: list(mark) for stream, mark in marks.items() if mark.step >= 0}
        self._entry = {"run": self._run, "known": dict(known), "sent": sent, "ended": ended}
        if problem:
            self._entry["problem"] = problem
        self._places[self._place] = self._entry
        self._content["places"] = self._places
        temporary = temporary_name(self.path)
        write_file(temporary, json_text(self._content, indent=1).encode())
        os.replace(temporary, self.path)


class SenderLock:
    """One process at a time sends a run to a tracker; held until it is left or the process ends."""

    def __init__(self, run: Path, name: str) -> None:
        folder = run / FOLDER
        folder.mkdir(exist_ok=True)
        self._fd = open_regular(folder / f"{name}.lock", flags=os.O_RDWR | os.O_CREAT)

    def take(self) -> bool:
        """Whether it is this process's now."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._fd)
