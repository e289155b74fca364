"""A process that moves bytes between files and a location off the machine: calls of Bucket's methods in, results out.

It has the libraries that reach the location, their threads and what they print, so that whoever trains has none of it,
and the lowest priority there is. It ends with whoever began it, as its connection ends then.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import queue
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import tensorstore as ts

from penstock.storage.files.crc import checksum
from penstock.storage.files.disk import prepare_file, publish
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import one_line, open_regular
from penstock.storage.offsite.link import Job, Pieces, Report
from penstock.storage.offsite.location import PIECE_BYTES, Location, parts_in_flight

T = TypeVar("T")

_TRIES = 6
_FIRST_PAUSE_S = 0.2
_SLOWEST_BYTES_PER_S = 1 << 17
"""A request that is slower than this, and than `_PATIENCE_S` besides, is given up and made again."""
_PATIENCE_S = 60.0
_NO_OBJECT = b"\x02"
"""What tensorstore calls the generation of an object that is not there."""


class Refusal(Exception):
    """What the location refuses; `permanent`: another try changes nothing."""

    def __init__(self, text: str, *, permanent: bool = False) -> None:
        super().__init__(text)
        self.permanent = permanent


_MEANT = {
    "no credentials were found": "Failed to ((get|create) credentials|obtain)|oauth|Could not find the credentials",
    "the bucket does not exist": "NoSuchBucket|bucket does not exist",
    "the credentials were refused": "InvalidAccessKeyId|SignatureDoesNotMatch|(Invalid|Expired)Token|"
    "PERMISSION_DENIED|UNAUTHENTICATED|AccessDenied",
    "the bucket is in another region": "PermanentRedirect|AuthorizationHeaderMalformed|IllegalLocationConstraint",
}


def meaning(error: BaseException) -> Refusal:
    """What an error of tensorstore's means, in words without what a server answered beside its code."""
    text = one_line(str(error).split(" [")[0], 200)
    for what, marks in _MEANT.items():
        if re.search(marks, str(error)):
            return Refusal(what, permanent=True)
    if "os_error_code" in str(error):
        return Refusal(text, permanent="os_error_code='28'" not in str(error))
    return Refusal("it did not answer in time" if isinstance(error, TimeoutError) else text or type(error).__name__)


class Bucket:
    """Objects of a location, each request tried again where that may help. Every method raises Refusal."""

    def __init__(
        self, location: Location, report: Report, *, most_pause_s: float = 20.0, patience_s: float = _PATIENCE_S
    ) -> None:
        """`report` is given bytes that have moved, by any thread."""
        self._location, self._report = location, report
        self._most_pause_s, self._patience_s = most_pause_s, patience_s
        retries = {"max_retries": 2, "initial_delay": "100ms", "max_delay": "1s"}
        name = {"s3": "s3_request_retries", "gcs": "gcs_request_retries"}.get(location.driver)
        try:
            spec = location.spec() | ({name: retries} if name else {})
            self._kv = ts.KvStore.open(spec, context=ts.Context()).result(timeout=patience_s)
        except (ValueError, TimeoutError) as error:
            raise meaning(error) from error

    def read(self, key: str, most_bytes: int) -> tuple[bytes | None, bytes]:
        """The object, None where there is none, and its generation. Refusal where it has more than `most_bytes`."""

        def act() -> tuple[bytes | None, bytes]:
            try:
                self._read(key, slice(0, most_bytes + 1))
            except ValueError as error:
                if not str(error).startswith("OUT_OF_RANGE"):
                    raise
            else:  # it is longer, or not there
                result = self._read(key, slice(0, 1))
                if result.state == "value":
                    raise Refusal(f"{key} is larger than the limit of {most_bytes:,} bytes", permanent=True)
                return None, bytes(result.stamp.generation)
            result = self._read(key, slice(0, None), most_bytes)
            return bytes(result.value) if result.state == "value" else None, bytes(result.stamp.generation)

        return self._try(act)

    def write(self, key: str, value: bytes) -> None:
        """Write an object and see that it is what is there, by its MD5 or by reading it back; else write it again."""
        crc = checksum(memoryview(value))

        def act() -> None:
            stamp = self._result(self._kv.write(key, value), len(value))
            if self._location.driver == "s3":
                digest = hashlib.md5(value, usedforsecurity=False).hexdigest()
                if stamp.generation == b'\x00"' + digest.encode() + b'"':
                    return
            result = self._result(self._kv.read(key), len(value))
            there = result.value if result.state == "value" else b""  # a copy, each time that it is asked for
            del result
            if len(there) != len(value):
                raise Refusal(f"{key} has only {len(there):,} of its {len(value):,} bytes there")
            if checksum(memoryview(there)) != crc:
                raise Refusal(f"{key} has a different checksum there")

        self._try(act)

    def replace(self, key: str, value: bytes, if_equal: bytes) -> bytes | None:
        """Write an object in the place of generation `if_equal`; its generation, None where that is another by now."""
        expected = if_equal or _NO_OBJECT

        def act() -> bytes | None:
            nonlocal expected
            stamp = self._result(self._kv.write(key, value, if_equal=expected), len(value))
            result, generation = self.read(key, 1 << 28)
            if result == value:  # ours: also where the answer to an earlier try was cut, and this one came too late
                return generation
            if not stamp.generation or generation != stamp.generation:
                return None
            expected = generation
            raise Refusal(f"{key} differs from what was written")

        return self._try(act)

    def keys(self, prefix: str) -> list[str]:
        """Keys that begin with `prefix`."""
        span = ts.KvStore.KeyRange(prefix, prefix[:-1] + chr(ord(prefix[-1]) + 1)) if prefix else ts.KvStore.KeyRange()
        return self._try(lambda: [key.decode() for key in self._result(self._kv.list(span), 1 << 24)])

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; those that are not there are none the less gone."""
        for start in range(0, len(keys), 16):

            def act(some: Sequence[str] = keys[start : start + 16]) -> None:
                for future in [self._kv.write(key, None) for key in some]:
                    self._result(future, 0)

            self._try(act)

    def put(self, jobs: Sequence[Job], bytes_per_s: float | None) -> int:
        """Write chunk files to the location; the bytes that went there."""
        limit = Limit(bytes_per_s)

        def one(job: Job) -> int:
            key, path, file_bytes, crc = job
            limit.take(file_bytes)
            self.write(key, read_chunk_bytes(path, file_bytes, crc))
            return file_bytes

        return self._all(one, jobs, max((size for _, _, size, _ in jobs), default=0))

    def put_files(
        self, files: Mapping[str, Path], have: set[str], folder: str, bytes_per_s: float | None
    ) -> dict[str, Pieces]:
        """Write files in pieces called by their SHA-256 below `folder`, but for those in `have`; the pieces of each."""
        limit = Limit(bytes_per_s)

        def one(path: Path) -> Iterator[tuple[str, int]]:
            with open(path.resolve(strict=True), "rb") as file:
                left = os.fstat(file.fileno()).st_size  # it may grow meanwhile
                while left > 0 and (piece := file.read(min(PIECE_BYTES, left))):
                    left -= len(piece)
                    digest = hashlib.sha256(piece).hexdigest()
                    if digest not in have:
                        limit.take(len(piece))
                        self.write(f"{folder}/{digest}", piece)
                        have.add(digest)
                    self._report(len(piece))
                    yield digest, len(piece)

        return {name: list(one(path)) for name, path in files.items()}

    def get(self, jobs: Sequence[Job]) -> int:
        """Make chunk files of what the location has; those that are whole stay."""

        def one(job: Job) -> int:
            key, path, file_bytes, crc = job
            with contextlib.suppress(OSError, UserError):
                read_chunk_bytes(path, file_bytes, crc)
                return file_bytes
            data = self._read_exactly(key, file_bytes, lambda value: require_chunk(value, crc, key))
            publish(prepare_file(path, data), path)
            return file_bytes

        return self._all(one, jobs, max((size for _, _, size, _ in jobs), default=0))

    def get_files(self, files: Mapping[Path, Pieces], folder: str) -> int:
        """Make files of their pieces below `folder`."""

        def pieces_of(pieces: Pieces) -> Iterator[bytes]:
            for digest, size in pieces:

                def check(value: bytes, digest: str = digest) -> None:
                    if hashlib.sha256(value).hexdigest() != digest:
                        raise UserError(f"{folder}/{digest} is damaged")

                yield self._read_exactly(f"{folder}/{digest}", size, check)

        def one(item: tuple[Path, Pieces]) -> int:
            path, pieces = item
            publish(prepare_file(path, pieces_of(pieces)), path)
            return sum(size for _, size in pieces)

        return self._all(one, files.items(), PIECE_BYTES)

    def _read_exactly(self, key: str, size: int, check: Callable[[bytes], None]) -> bytes:
        """An object of `size` bytes that `check` raises no UserError for."""

        def act() -> bytes:
            try:
                result = self._read(key, slice(0, size), size)
                if result.state != "value":
                    raise Refusal(f"{key} is missing", permanent=True)
                check(value := bytes(result.value))
            except UserError as error:
                raise Refusal(str(error)) from None
            except ValueError as error:
                if str(error).startswith("OUT_OF_RANGE"):
                    raise Refusal(f"{key} is shorter than its {size:,} bytes") from error
                raise
            return value

        return self._try(act)

    def _read(self, key: str, span: slice, size: int = 0) -> Any:
        return self._result(self._kv.read(key, byte_range=span), size)

    def _result(self, future: Any, num_bytes: int) -> Any:
        try:
            return future.result(timeout=self._patience_s + num_bytes / _SLOWEST_BYTES_PER_S)
        except TimeoutError:
            future.cancel()
            raise

    def _try(self, act: Callable[[], T]) -> T:
        """What `act` returns, after pauses where it is refused for now."""
        for attempt in range(_TRIES):
            try:
                return act()
            except (ValueError, TimeoutError, Refusal) as error:
                refusal = error if isinstance(error, Refusal) else meaning(error)
                if refusal.permanent or attempt == _TRIES - 1:
                    raise refusal from error
            time.sleep(min(self._most_pause_s, _FIRST_PAUSE_S * 2**attempt) * (0.5 + random.random() / 2))
        raise AssertionError

    def _all(self, one: Callable[[T], int], jobs: Iterable[T], largest_bytes: int) -> int:
        """Do all jobs, a few at a time; what the first that fails raises, once those under way have ended."""
        total = 0
        with ThreadPoolExecutor(parts_in_flight(largest_bytes), thread_name_prefix="move") as threads:
            for size in threads.map(one, jobs):
                total += size
                self._report(size)
        return total


class Limit:
    """A token bucket: so many bytes a second on average, None any number."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._rate, self._lock = bytes_per_s, threading.Lock()
        self._free_at = time.monotonic()

    def take(self, num_bytes: int) -> None:
        """Wait until so many bytes may be moved."""
        if self._rate is None:
            return
        with self._lock:
            begins = max(self._free_at, time.monotonic())
            self._free_at = begins + num_bytes / self._rate
        time.sleep(max(0.0, begins - time.monotonic()))


def read_chunk_bytes(path: Path, file_bytes: int, crc: int) -> bytes:
    """A chunk file, compared with the checksum that the manifest has for it. UserError."""
    with open(open_regular(path), "rb") as file:
        data = file.read(file_bytes + 1)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # training has better use for the memory
    if len(data) != file_bytes:
        raise UserError(f"{path}: has {len(data):,} bytes instead of {file_bytes:,}; scrub the run")
    require_chunk(data, crc, str(path))
    return data


def require_chunk(data: bytes, crc: int, name: str) -> None:
    """UserError unless `data` is a chunk file of checksum `crc`."""
    view = memoryview(data)
    result, stored = checksum(view[:-4]), int.from_bytes(view[-4:], "little")
    if not result == stored == crc:
        raise UserError(
            f"{name}: is damaged: it has CRC-32C {result:08x}, but records {stored:08x}, and the manifest records "
            f"{crc:08x}"
        )


def _answer(act: Callable[[], Any]) -> tuple[str, Any]:
    """What `act` returns, or why it is refused and for good, as `Link` reads it."""
    try:
        return "result", act()
    except Refusal as refusal:
        return "refused", (str(refusal), refusal.permanent)
    except UserError as error:
        return "refused", (str(error), True)
    except OSError as error:
        return "refused", (f"{error.filename or 'a file'}: {error.strerror or error}", True)


def main() -> None:
    """Carry out calls until the connection ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # what the terminal sends to all is for whoever began this
    with contextlib.suppress(OSError):
        os.nice(19)  # where the drive's scheduler knows priorities, of its time as well
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
    lock = threading.Lock()

    def listen() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                calls.put(connection.recv())
        os._exit(0)  # whoever began this is gone, or wants no more

    def say(kind: str, value: Any) -> None:
        with lock:
            connection.send((kind, value))

    threading.Thread(target=listen, name="calls", daemon=True).start()
    location, patience = calls.get()
    kind, bucket = _answer(lambda: Bucket(location, lambda moved: say("moved", moved), **patience))
    say(kind, None if kind == "result" else bucket)
    while True:
        act, args = calls.get()
        say(*_answer(functools.partial(getattr(bucket, act), *args)))


if __name__ == "__main__":
    main()
