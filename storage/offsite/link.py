"""A place off the machine as this process sees it: requests to a mover's process, answers, errors in one line."""

from __future__ import annotations

import base64
import contextlib
import json
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.storage.files import child
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import one_line, printable
from penstock.storage.offsite.place import Place, require_mounted

Told = Callable[[int], None]
"""Told of bytes that have moved, from the thread that asked for it."""
Job = tuple[str, Path, int, int]
"""Key of a chunk at the place, its file here, its bytes, its CRC-32C in the manifest."""
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
    """What a place refuses. The message is one line: what, where, and how to mend it."""

    def __init__(self, message: str, *, permanent: bool) -> None:
        super().__init__(message)
        self.permanent = permanent
        """Whether asking again changes nothing: credentials, a bucket that is gone."""


class PlaceChangedError(OffsiteError):
    """Somebody else has written to the place since this run last did."""

    def __init__(self, message: str) -> None:
        super().__init__(message, permanent=True)


class PlaceLink:
    """A place, reached by a process of its own; use from one thread at a time, and close it.

    Every method raises OffsiteError, of one line, where the place refuses; what may help was tried again before.
    """

    def __init__(self, place: Place, field: str = "storage.offsite", **patience: float) -> None:
        """`field`: how messages name what the user wrote. `patience`: most_pause_s and patience_s of tests."""
        require_mounted(place, field)
        self.place, self._field = place, field
        self._patience = patience
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._closed = False

    def __enter__(self) -> PlaceLink:
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
            with contextlib.suppress(OSError):
                for stream in (process.stdin, process.stdout):
                    if stream is not None:
                        stream.close()
            process.wait()

    @property
    def pid(self) -> int | None:
        """Of the process, where it runs."""
        return None if self._process is None else self._process.pid

    def read(self, key: str, most: int) -> tuple[str | None, bytes]:
        """A text, None where there is none, and its generation."""
        found = self._ask({"do": "read", "key": key, "most": most})
        return found["text"], base64.b64decode(found["generation"])

    def write(self, key: str, text: str) -> None:
        self._ask({"do": "write", "key": key, "text": text})

    def replace(self, key: str, text: str, if_equal: bytes) -> bytes | None:
        """Write a text in the place of generation `if_equal`; its own, None where the object is another by now."""
        generation = base64.b64encode(if_equal).decode()
        written = self._ask({"do": "replace", "key": key, "text": text, "if_equal": generation})
        return None if written is None else base64.b64decode(written)

    def keys(self, prefix: str) -> list[str]:
        found: list[str] = self._ask({"do": "keys", "prefix": prefix})
        return found

    def delete(self, keys: Sequence[str]) -> None:
        if keys:
            self._ask({"do": "delete", "keys": list(keys)})

    def put(self, jobs: Sequence[Job], bytes_per_s: float | None, told: Told) -> int:
        """Write chunk files to the place, and see that they are there; their bytes."""
        return int(self._ask({"do": "put", "jobs": _plain(jobs), "bytes_per_s": bytes_per_s}, told))

    def put_files(
        self, files: Mapping[str, Path], have: Sequence[str], folder: str, bytes_per_s: float | None, told: Told
    ) -> dict[str, Pieces]:
        """Write files in pieces below `folder`, but for pieces that are there; the pieces of each."""
        request = {"do": "put_files", "files": [[name, str(path)] for name, path in files.items()]}
        found = self._ask({**request, "have": list(have), "folder": folder, "bytes_per_s": bytes_per_s}, told)
        return {name: [(digest, size) for digest, size in pieces] for name, pieces in found}

    def get(self, jobs: Sequence[Job], told: Told) -> int:
        """Make chunk files of what the place has; those that are whole already stay."""
        return int(self._ask({"do": "get", "jobs": _plain(jobs)}, told))

    def get_files(self, files: Mapping[Path, Pieces], folder: str, told: Told) -> int:
        """Make files of their pieces below `folder`."""
        request = [[str(path), pieces] for path, pieces in files.items()]
        return int(self._ask({"do": "get_files", "files": request, "folder": folder}, told))

    def error(self, what: str, *, permanent: bool) -> OffsiteError:
        """What was refused, where, and how to mend it."""
        hint = _HINTS.get(what, {}).get(self.place.driver)
        hint = hint or ("" if permanent else "check the network and the store, then try again")
        said = f"{self._field}: {self.place}: {one_line(printable(what))}" + (f"; {hint}" if hint else "")
        return OffsiteError(said, permanent=permanent)

    def _ask(self, request: dict[str, Any], told: Told = lambda moved: None) -> Any:
        with self._lock:
            if self._closed:
                raise self.error("was given up", permanent=False)
            process = self._process or self._start()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                print(json.dumps(request), file=process.stdin, flush=True)
                for line in process.stdout:
                    content = json.loads(line)
                    told(content.get("moved", 0))
                    if "refused" in content:
                        raise self.error(content["refused"], permanent=content["permanent"])
                    if "result" in content:
                        return content["result"]
            except (OSError, ValueError) as error:
                if isinstance(error, UserError):
                    raise
            self.release()
            raise self.error("the upload process has ended", permanent=False)

    def _start(self) -> subprocess.Popen[str]:
        self._process = subprocess.Popen(
            child.command("storage.offsite.mover"),
            env=child.environment(OMP_NUM_THREADS="1", **_GIVE_BACK),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # what libraries say of every file that they do not find
            text=True,
            process_group=0,  # no Ctrl-C; a session of its own would have a share of the cores beside ours
        )
        place = {"driver": self.place.driver, "bucket": self.place.bucket, "path": self.place.path}
        print(json.dumps({"do": "open", **place, **self._patience}), file=self._process.stdin, flush=True)
        assert self._process.stdout is not None
        opened = json.loads(self._process.stdout.readline() or '{"refused": "ended at once", "permanent": false}')
        if "refused" in opened:
            self.release()
            raise self.error(opened["refused"], permanent=opened["permanent"])
        return self._process


def _plain(jobs: Sequence[Job]) -> list[list[Any]]:
    return [[key, str(path), size, crc] for key, path, size, crc in jobs]
