"""A process that moves bytes between files and a place off the machine: requests as JSON lines in, answers out.

It has the libraries that reach the place, their threads and what they print, so that whoever trains has none of it, and
the lowest priority there is. It ends with whoever began it, as its input ends then.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import queue
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import IO, Any

import tensorstore as ts

from penstock.storage.files.crc import checksum
from penstock.storage.files.disk import prepare_file, publish
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import one_line, open_regular
from penstock.storage.offsite.place import PIECE_BYTES, Place, parts_in_flight

_TRIES = 6
_FIRST_PAUSE_S, _MOST_PAUSE_S = 0.2, 20.0
_SLOWEST_BYTES_PER_S = 1 << 17
"""A request that is slower than this, and than `_PATIENCE_S` besides, is given up and made again."""
_PATIENCE_S = 60.0
_TOLD_S = 0.25
_NO_OBJECT = b"\x02"
"""What tensorstore calls the generation of an object that is not there."""


class Refusal(Exception):
    """What the place refuses; `permanent`: asking again changes nothing."""

    def __init__(self, text: str, *, permanent: bool) -> None:
        super().__init__(text)
        self.permanent = permanent


_MEANT = (
    (("Failed to get credentials", "Failed to create credentials"), "no credentials were found"),
    (("Failed to obtain", "oauth", "Could not find the credentials"), "no credentials were found"),
    (("NoSuchBucket", "bucket does not exist"), "the bucket does not exist"),
    (("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "ExpiredToken"), "the credentials were refused"),
    (("PERMISSION_DENIED", "UNAUTHENTICATED", "AccessDenied"), "the credentials were refused"),
    (
        ("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraint"),
        "the bucket is in another region",
    ),
)


def meaning(error: BaseException) -> Refusal:
    """What an error of tensorstore's means, in words without what a server answered beside its code."""
    text = one_line(str(error).split(" [")[0], 200)
    for marks, what in _MEANT:
        if any(mark in str(error) for mark in marks):
            return Refusal(what, permanent=True)
    if "os_error_code" in str(error):
        return Refusal(text, permanent="os_error_code='28'" not in str(error))
    if isinstance(error, TimeoutError):
        return Refusal("it did not answer in time", permanent=False)
    return Refusal(text or type(error).__name__, permanent=False)


class Bucket:
    """Objects of a place, each request tried again where that may help."""

    def __init__(self, place: Place, *, most_pause_s: float = _MOST_PAUSE_S, patience_s: float = _PATIENCE_S) -> None:
        self._most_pause_s, self._patience_s = most_pause_s, patience_s
        retries = {"max_retries": 2, "initial_delay": "100ms", "max_delay": "1s"}
        name = {"s3": "s3_request_retries", "gcs": "gcs_request_retries"}.get(place.driver)
        self.place = place
        try:
            spec = place.spec() | ({name: retries} if name else {})
            self._kv = ts.KvStore.open(spec, context=ts.Context()).result(timeout=patience_s)
        except (ValueError, TimeoutError) as error:
            raise meaning(error) from error

    def again(self, act: Callable[[], Any]) -> Any:
        """What `act` returns, after pauses where it is refused for now. Refusal."""
        for attempt in range(_TRIES):
            try:
                return act()
            except (ValueError, TimeoutError, Refusal) as error:
                refusal = error if isinstance(error, Refusal) else meaning(error)
                if refusal.permanent or attempt == _TRIES - 1:
                    raise refusal from error
            time.sleep(min(self._most_pause_s, _FIRST_PAUSE_S * 2**attempt) * (0.5 + random.random() / 2))
        raise AssertionError

    def _result(self, future: Any, num_bytes: int) -> Any:
        try:
            return future.result(timeout=self._patience_s + num_bytes / _SLOWEST_BYTES_PER_S)
        except TimeoutError:
            future.cancel()
            raise

    def read(self, key: str, most: int) -> tuple[bytes | None, bytes]:
        """The object, None where there is none, and its generation. Refusal where it has more than `most` bytes."""

        def act() -> tuple[bytes | None, bytes]:
            try:
                self._read(key, slice(0, most + 1))
            except ValueError as error:
                if not str(error).startswith("OUT_OF_RANGE"):
                    raise
            else:  # it is longer, or not there
                found = self._read(key, slice(0, 1))
                if found.state == "value":
                    raise Refusal(f"{key} is larger than the limit of {most:,} bytes", permanent=True)
                return None, bytes(found.stamp.generation)
            found = self._read(key, slice(0, None), most)
            return bytes(found.value) if found.state == "value" else None, bytes(found.stamp.generation)

        value: tuple[bytes | None, bytes] = self.again(act)
        return value

    def read_exactly(self, key: str, size: int, check: Callable[[bytes], None]) -> bytes:
        """An object of `size` bytes that `check` has nothing against. Refusal where that is not what is there."""

        def act() -> bytes:
            try:
                found = self._read(key, slice(0, size), size)
            except ValueError as error:
                if str(error).startswith("OUT_OF_RANGE"):
                    raise Refusal(f"{key} is shorter than its {size:,} bytes", permanent=False) from error
                raise
            if found.state != "value":
                raise Refusal(f"{key} is missing", permanent=True)
            check(value := bytes(found.value))
            return value

        data: bytes = self.again(act)
        return data

    def _read(self, key: str, span: slice, size: int = 0) -> Any:
        return self._result(self._kv.read(key, byte_range=span), size)

    def write(self, key: str, value: bytes, *, crc: int) -> None:
        """Write an object and see that it is what is there: what is short or another is written again. Refusal.

        The place's own word for it is taken where it is the MD5 of what it has, else the object is read back.
        """

        def act() -> None:
            stamp = self._result(self._kv.write(key, value), len(value))
            if self.place.driver == "s3":
                digest = hashlib.md5(value, usedforsecurity=False).hexdigest()
                if stamp.generation == b'\x00"' + digest.encode() + b'"':
                    return
            found = self._result(self._kv.read(key), len(value))
            there = found.value if found.state == "value" else b""  # a copy, each time that it is asked for
            del found
            if len(there) != len(value):
                raise Refusal(f"{key} has only {len(there):,} of its {len(value):,} bytes there", permanent=False)
            if checksum(memoryview(there)) != crc:
                raise Refusal(f"{key} has a different checksum there", permanent=False)

        self.again(act)

    def replace(self, key: str, value: bytes, if_equal: bytes) -> bytes | None:
        """Write an object in the place of generation `if_equal`; its generation, None where that is another by now."""
        expected = if_equal or _NO_OBJECT

        def act() -> bytes | None:
            nonlocal expected
            stamp = self._result(self._kv.write(key, value, if_equal=expected), len(value))
            found, generation = self.read(key, 1 << 28)
            if found == value:  # ours: also where the answer to an earlier try was cut, and this one came too late
                return generation
            if not stamp.generation or generation != stamp.generation:
                return None
            expected = generation
            raise Refusal(f"{key} differs from what was written", permanent=False)

        written: bytes | None = self.again(act)
        return written

    def keys(self, prefix: str) -> list[str]:
        """Keys that begin with `prefix`."""
        span = ts.KvStore.KeyRange(prefix, prefix[:-1] + chr(ord(prefix[-1]) + 1)) if prefix else ts.KvStore.KeyRange()
        keys: list[str] = self.again(lambda: [key.decode() for key in self._result(self._kv.list(span), 1 << 24)])
        return keys

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; those that are not there are none the less gone."""
        for start in range(0, len(keys), 16):
            some = keys[start : start + 16]

            def act(some: Sequence[str] = some) -> None:
                for future in [self._kv.write(key, None) for key in some]:
                    self._result(future, 0)

            self.again(act)


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
    found, stored = checksum(view[:-4]), int.from_bytes(view[-4:], "little")
    if not found == stored == crc:
        raise UserError(
            f"{name}: is damaged: it has CRC-32C {found:08x}, but records {stored:08x}, and the manifest records "
            f"{crc:08x}"
        )


class Mover:
    """Carries out requests; each method is one, by its name."""

    def __init__(self, told: Callable[[int], None]) -> None:
        self._told = told
        self._bucket: Bucket | None = None

    @property
    def bucket(self) -> Bucket:
        assert self._bucket is not None, "open first"
        return self._bucket

    def open(self, driver: Any, bucket: str, path: str, **patience: float) -> None:
        self._bucket = Bucket(Place(driver, bucket, path), **patience)

    def read(self, key: str, most: int) -> dict[str, Any]:
        value, generation = self.bucket.read(key, most)
        text = None if value is None else value.decode("utf-8", errors="replace")
        return {"text": text, "generation": base64.b64encode(generation).decode()}

    def write(self, key: str, text: str) -> None:
        value = text.encode()
        self.bucket.write(key, value, crc=checksum(memoryview(value)))

    def replace(self, key: str, text: str, if_equal: str) -> str | None:
        written = self.bucket.replace(key, text.encode(), base64.b64decode(if_equal))
        return None if written is None else base64.b64encode(written).decode()

    def keys(self, prefix: str) -> list[str]:
        return self.bucket.keys(prefix)

    def delete(self, keys: list[str]) -> None:
        self.bucket.delete(keys)

    def put(self, jobs: list[tuple[str, str, int, int]], bytes_per_s: float | None) -> int:
        """Write chunk files, (key, path, bytes, CRC-32C) each, to the place; the bytes that went there."""
        limit = Limit(bytes_per_s)

        def one(key: str, path: str, file_bytes: int, crc: int) -> int:
            limit.take(file_bytes)
            data = read_chunk_bytes(Path(path), file_bytes, crc)
            whole = checksum(memoryview(data))
            self.bucket.write(key, data, crc=whole)
            return file_bytes

        return self._all(one, jobs, largest(jobs))

    def put_files(
        self, files: list[tuple[str, str]], have: list[str], folder: str, bytes_per_s: float | None
    ) -> list[tuple[str, list[tuple[str, int]]]]:
        """Write files, (name, path) each, in pieces that are called by their SHA-256, below `folder`, but for those
        that it is said to `have`; (name, [(SHA-256, bytes)]) of each. A file may grow meanwhile."""
        limit, there = Limit(bytes_per_s), set(have)

        def one(name: str, path: str) -> Iterator[tuple[str, int]]:
            with open(Path(path).resolve(strict=True), "rb") as file:
                left = os.fstat(file.fileno()).st_size
                while left > 0 and (piece := file.read(min(PIECE_BYTES, left))):
                    left -= len(piece)
                    digest = hashlib.sha256(piece).hexdigest()
                    if digest not in there:
                        limit.take(len(piece))
                        self.bucket.write(f"{folder}/{digest}", piece, crc=checksum(memoryview(piece)))
                        there.add(digest)
                    self._told(len(piece))
                    yield digest, len(piece)

        return [(name, list(one(name, path))) for name, path in files]

    def get(self, jobs: list[tuple[str, str, int, int]]) -> int:
        """Make chunk files, (key, path, bytes, CRC-32C) each, of what the place has; those that are whole stay."""

        def one(key: str, path: str, file_bytes: int, crc: int) -> int:
            with contextlib.suppress(OSError, UserError):
                read_chunk_bytes(Path(path), file_bytes, crc)
                return file_bytes

            def check(value: bytes) -> None:
                try:
                    require_chunk(value, crc, key)
                except UserError as error:
                    raise Refusal(str(error), permanent=False) from None

            data = self.bucket.read_exactly(key, file_bytes, check)
            publish(prepare_file(Path(path), data), Path(path))
            return file_bytes

        return self._all(one, jobs, largest(jobs))

    def get_files(self, files: list[tuple[str, list[tuple[str, int]]]], folder: str) -> int:
        """Make files, (path, [(SHA-256, bytes)]) each, of their pieces below `folder`."""

        def one(path: str, pieces: list[tuple[str, int]]) -> int:
            publish(prepare_file(Path(path), self._pieces(pieces, folder)), Path(path))
            return sum(size for _, size in pieces)

        return self._all(one, files, PIECE_BYTES)

    def _pieces(self, pieces: list[tuple[str, int]], folder: str) -> Iterator[bytes]:
        for digest, size in pieces:

            def check(value: bytes, digest: str = digest) -> None:
                if hashlib.sha256(value).hexdigest() != digest:
                    raise Refusal(f"{folder}/{digest} is damaged", permanent=False)

            yield self.bucket.read_exactly(f"{folder}/{digest}", size, check)

    def _all(self, one: Callable[..., int], jobs: Sequence[Sequence[Any]], largest_bytes: int) -> int:
        """Do all jobs, a few at a time; what the first that fails raises, once those under way have ended."""
        total, left, at_once = 0, iter(jobs), parts_in_flight(largest_bytes)
        with ThreadPoolExecutor(at_once, thread_name_prefix="move") as threads:
            running: set[Future[int]] = set()
            while True:
                while len(running) < at_once and (job := next(left, None)) is not None:
                    running.add(threads.submit(one, *job))
                if not running:
                    return total
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    size = future.result()
                    total += size
                    self._told(size)


def largest(jobs: Sequence[tuple[str, str, int, int]]) -> int:
    """Bytes of the largest chunk file of the jobs."""
    return max((size for _, _, size, _ in jobs), default=0)


class _Telling:
    """Writes lines to whoever began this process; its bytes moved at most some times a second."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream, self._lock = stream, threading.Lock()
        self._moved, self._at = 0, time.monotonic()

    def moved(self, num_bytes: int) -> None:
        with self._lock:
            self._moved += num_bytes
            if time.monotonic() - self._at < _TOLD_S:
                return
            moved, self._moved, self._at = self._moved, 0, time.monotonic()
        self.say({"moved": moved})

    def answer(self, content: dict[str, Any]) -> None:
        with self._lock:
            moved, self._moved = self._moved, 0
        self.say({**content, "moved": moved})

    def say(self, content: dict[str, Any]) -> None:
        with self._lock:
            print(json.dumps(content), file=self._stream, flush=True)


def _answer(mover: Mover, request: dict[str, Any]) -> dict[str, Any]:
    act = request.pop("do")
    try:
        return {"result": getattr(mover, act)(**request)}
    except Refusal as refusal:
        return {"refused": str(refusal), "permanent": refusal.permanent}
    except UserError as error:
        return {"refused": str(error), "permanent": True}
    except OSError as error:
        return {"refused": f"{error.filename or 'a file'}: {error.strerror or error}", "permanent": True}


def main() -> None:
    """Answer requests until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # what the terminal sends to all is for whoever began this
    with contextlib.suppress(OSError):
        os.nice(19)  # where the drive's scheduler knows priorities, of its time as well
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            requests.put(line)
        os._exit(0)  # whoever began this is gone, or wants no more

    threading.Thread(target=listen, name="requests", daemon=True).start()
    telling = _Telling(answers)
    mover = Mover(telling.moved)
    while True:
        telling.answer(_answer(mover, json.loads(requests.get())))


if __name__ == "__main__":
    main()
