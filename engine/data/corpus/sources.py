"""Which files a corpus was made from, known by their content: equal ones need not be tokenised again."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from penstock.engine import preparing
from penstock.engine.data.corpus.files import SourceFile
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import one_line
from penstock.storage.files.user_cache import read_cached, write_cached

_MOST_RECORDED = 1000
"""Files that a corpus names; of more, only all of them together are known."""
_MEMO_BYTES = 1 << 26
"""Of a file whose SHA-256 is cached; that of a smaller one is computed in a moment."""
_MOST_MEMOS = 4096
_READ_BYTES = 1 << 22


def describe_files(files: Iterable[Path]) -> Iterator[SourceFile]:
    """What is known of each file. Raises UserError naming one that cannot be read."""
    for file in files:
        try:
            status = file.stat()
            yield SourceFile(str(file), status.st_size, status.st_mtime_ns, _sha256(file, status))
        except OSError as error:
            raise UserError(f"{one_line(file)}: cannot be read: {error.strerror}") from error


def what_changed(recorded: Sequence[SourceFile], now: Iterable[Path] = ()) -> str | None:
    """The first file that is gone or has another content than a corpus was made from, or of those read `now` the first
    that is new, in words. None: there is none, or nothing recorded."""
    for known in recorded:
        file = Path(known.path)
        try:
            status = file.stat()
            same = (status.st_size, status.st_mtime_ns) == known[1:3]
            same = same or (status.st_size == known.num_bytes and _sha256(file, status) == known.sha256)
        except FileNotFoundError:
            return f"{one_line(known.path)} is gone"
        except OSError as error:
            return f"{one_line(known.path)} cannot be read ({error.strerror})"
        if not same:
            return f"{one_line(known.path)} has changed"
    names = {known.path for known in recorded}
    new = next((str(file) for file in now if names and _is_text(file) and str(file) not in names), None)
    return None if new is None else f"{one_line(new)} has come"


def to_record(files: Sequence[SourceFile]) -> list[SourceFile]:
    """Those that a corpus names: of very many none, and none whose name is not UTF-8."""
    return [file for file in files if _is_text(file.path)] if len(files) <= _MOST_RECORDED else []


def _is_text(name: str | Path) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in str(name))


def _sha256(file: Path, status: os.stat_result) -> str:
    """Of a file's content, as found before where neither its size nor its time is another. OSError."""
    worth_caching = status.st_size >= _MEMO_BYTES
    stamp = {"path": os.fsencode(file).hex(), "bytes": status.st_size, "mtime_ns": status.st_mtime_ns}
    key = hashlib.sha256(repr(stamp).encode()).hexdigest()
    known = (read_cached("sources", key) or {}).get("sha256") if worth_caching else None
    if isinstance(known, str):
        return known
    digest, done = hashlib.sha256(), 0
    with file.open("rb") as stream:
        while data := stream.read(_READ_BYTES):
            digest.update(data)
            done += len(data)
            preparing.report(min(1.0, done / max(1, status.st_size)), f"looking at {file.name}")
    if worth_caching:
        write_cached("sources", key, {"sha256": digest.hexdigest()}, _MOST_MEMOS)
    return digest.hexdigest()
