"""A location off the machine as this process sees it: calls to a mover's process, and its errors in one line."""

from __future__ import annotations

import contextlib
import multiprocessing
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from penstock.storage.files import child
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import one_line
from penstock.storage.offsite.location import Location, require_mounted

Report = Callable[[int], None]
"""Is given bytes that have moved, in the thread that called for it."""
Job = tuple[str, Path, int, int]
"""Key of a chunk at the location, its file here, its bytes, its CRC-32C in the manifest."""
Pieces = list[tuple[str, int]]
"""(SHA-256, bytes) of what a file consists of."""

_GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "1048576", "MALLOC_ARENA_MAX": "2"}
"""The parts that the process has sent go back to the system, where malloc would keep some of each thread's."""
_HINTS = {
    "no credentials were found": {
        "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
        "gcs": "set GOOGLE_APPLICATION_CREDENTIALS, or run gcloud auth application-default login",
    },
    "the credentials were refused": {
        "s3": "set AWS_ACCESS_KEY_ID or AWS_PROFILE to an account that may read, write, list and delete there",
        "gcs": "set GOOGLE_APPLICATION_CREDENTIALS to an account that may read, write, list and delete there",
    },
    "the bucket does not exist": {
        "s3": "create it, or correct its name; for a store other than AWS set AWS_ENDPOINT_URL",
        "gcs": "create it, or correct its name",
    },
    "the bucket is in another region": {"s3": "set AWS_REGION to the bucket's", "gcs": "correct the bucket's name"},
}


class OffsiteError(UserError):
    """What a location refuses. The message is one line: what, where, and how to mend it."""

    def __init__(self, message: str, *, permanent: bool = True) -> None:
        super().__init__(message)
        self.permanent = permanent
        """Whether another try changes nothing: credentials, a bucket that is gone."""


class LocationChangedError(OffsiteError):
    """Somebody else has written to the location since this run last did."""


class Link:
    """A location, reached by a process of its own; use from one thread at a time, and close it.

    Every method raises OffsiteError, of one line, where the location refuses; what may help was tried again before.
    """

    def __init__(self, location: Location, field: str = "storage.offsite", **patience: float) -> None:
        """`field`: how messages name what the user wrote. `patience`: most_pause_s and patience_s of tests."""
        require_mounted(location, field)
        self.location, self._field = location, field
        self._patience = patience
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection[Any, Any] | None = None
        self._lock = threading.Lock()
        self._closed = False

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process, at once, and for good; what it has under way is not finished. Any thread may."""
        self._closed = True
        self.release()

    def release(self) -> None:
        """End the process until there is something to do again."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    @property
    def pid(self) -> int | None:
        """Of the process, where it runs."""
        return None if self._process is None else self._process.pid

    # Of the process's Bucket (mover.py), which says what each does.

    def read(self, key: str, most_bytes: int) -> tuple[bytes | None, bytes]:
        result: tuple[bytes | None, bytes] = self._call("read", key, most_bytes)
        return result

    def write(self, key: str, value: bytes) -> None:
        self._call("write", key, value)

    def replace(self, key: str, value: bytes, if_equal: bytes) -> bytes | None:
        generation: bytes | None = self._call("replace", key, value, if_equal)
        return generation

    def keys(self, prefix: str) -> list[str]:
        return list(self._call("keys", prefix))

    def delete(self, keys: Sequence[str]) -> None:
        self._call("delete", keys)

    def put(self, jobs: Sequence[Job], bytes_per_s: float | None, report: Report) -> int:
        return int(self._call("put", jobs, bytes_per_s, report=report))

    def put_files(
        self, files: Mapping[str, Path], have: set[str], folder: str, bytes_per_s: float | None, report: Report
    ) -> dict[str, Pieces]:
        return dict(self._call("put_files", files, have, folder, bytes_per_s, report=report))

    def get(self, jobs: Sequence[Job], report: Report) -> int:
        return int(self._call("get", jobs, report=report))

    def get_files(self, files: Mapping[Path, Pieces], folder: str, report: Report) -> int:
        return int(self._call("get_files", files, folder, report=report))

    def error(self, what: str, permanent: bool) -> OffsiteError:
        """What was refused, where, and how to mend it."""
        later = "" if permanent else "check the network and the store, then try again"
        hint = _HINTS.get(what, {}).get(self.location.driver) or later
        text = f"{self._field}: {self.location}: {one_line(what)}" + (f"; {hint}" if hint else "")
        return OffsiteError(text, permanent=permanent)

    def _call(self, act: str, *args: Any, report: Report = lambda moved: None) -> Any:
        """What method `act` of the process's Bucket returns."""
        with self._lock:
            if self._closed:
                raise self.error("was given up", permanent=False)
            with contextlib.suppress(OSError, EOFError):
                connection = (self._process and self._connection) or self._start()
                connection.send((act, args))
                while True:
                    kind, value = connection.recv()
                    if kind == "result":
                        return value
                    if kind == "refused":
                        raise self.error(*value)
                    report(value)
            self.release()
            raise self.error("the upload process has ended", permanent=False)

    def _start(self) -> Connection[Any, Any]:
        self._connection, theirs = multiprocessing.Pipe()
        with theirs:
            self._process = subprocess.Popen(
                child.command("storage.offsite.mover", str(theirs.fileno())),
                env=child.environment(OMP_NUM_THREADS="1", **_GIVE_BACK),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # what libraries say of every file that they do not find
                pass_fds=[theirs.fileno()],
                process_group=0,  # no Ctrl-C; a session of its own would have a share of the cores beside ours
            )
        self._connection.send((self.location, self._patience))
        kind, value = self._connection.recv()
        if kind == "refused":
            self.release()
            raise self.error(*value)
        return self._connection
