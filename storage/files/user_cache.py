"""Files cached for this user between commands, mostly JSON, a folder a kind, below XDG_CACHE_HOME. Each is named by
a digest of all that decides its content. One that is damaged, or that somebody else could have written, counts as none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from penstock.storage.files.sealed import seal, unseal
from penstock.storage.files.untrusted import open_regular, parse_object

_MOST_BYTES = 1 << 22


def cache_folder(kind: str) -> Path | None:
    """The folder of a kind of file; None where no home is known. The XDG specification has relative paths ignored."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.expanduser("~/.cache")
    return Path(base) / "penstock" / kind if os.path.isabs(base) else None


def code_digest(folders: Iterable[Path]) -> str:
    """Of the Python files in these folders."""
    result = hashlib.sha256()
    for folder in folders:
        for file in sorted(folder.glob("*.py")):
            result.update(file.read_bytes())
    return result.hexdigest()


def read_cached(kind: str, digest: str) -> dict[str, Any] | None:
    """What was cached under a digest; None where there is nothing that can be trusted."""
    data = read_cached_file(kind, f"{digest}.json", _MOST_BYTES)
    try:
        if data is None:
            return None
        content, sealed = unseal(parse_object(data, most_bytes=_MOST_BYTES))
        return content if sealed and content.pop("digest", None) == digest else None
    except ValueError:
        return None


def write_cached(kind: str, digest: str, content: dict[str, Any], most_files: int) -> None:
    """Keep `content`, and the newest `most_files` in all; nothing where it is too large, or cannot be written."""
    data = json.dumps(seal({"digest": digest, **content})).encode()
    if len(data) <= _MOST_BYTES:
        write_cached_file(kind, f"{digest}.json", data, most_files)


def read_cached_file(kind: str, name: str, most_bytes: int) -> bytes | None:
    """The content of a file, whose checksum is the caller's to look at; None where there is none of at most so many
    bytes that this user alone can have written."""
    folder = cache_folder(kind)
    try:
        if folder is None:
            return None
        with open(open_regular(folder / name), "rb") as file:
            result = os.fstat(file.fileno())
            if result.st_uid != os.geteuid() or result.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return None
            data = file.read(most_bytes + 1)
        return data if len(data) <= most_bytes else None
    except (OSError, ValueError):
        return None


def write_cached_file(kind: str, name: str, data: bytes, most_files: int) -> None:
    """Keep `data` in the place of what is there, and the newest `most_files` in all; nothing where it cannot be
    written."""
    folder = cache_folder(kind)
    if folder is None:
        return
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd, temporary = tempfile.mkstemp(dir=folder)  # not synced: what a power cut leaves is known by its checksum
        try:
            with open(fd, "wb") as file:
                file.write(data)
            os.replace(temporary, folder / name)
        except OSError:
            os.unlink(temporary)
            raise
        for old in sorted(folder.iterdir(), key=lambda path: path.lstat().st_mtime, reverse=True)[most_files:]:
            old.unlink()
