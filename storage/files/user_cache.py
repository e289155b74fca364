"""Small JSON files cached for this user between commands, a folder a kind, below XDG_CACHE_HOME; each named by a digest
of all that decides its content. One that is damaged, or that somebody else could have written, counts as none."""

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
    folder = cache_folder(kind)
    try:
        if folder is None:
            return None
        with open(open_regular(folder / f"{digest}.json"), "rb") as file:
            result = os.fstat(file.fileno())
            if result.st_uid != os.geteuid() or result.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return None
            content, sealed = unseal(parse_object(file.read(_MOST_BYTES + 1), most_bytes=_MOST_BYTES))
        return content if sealed and content.pop("digest", None) == digest else None
    except (OSError, ValueError):
        return None


def write_cached(kind: str, digest: str, content: dict[str, Any], most_files: int) -> None:
    """Keep `content`, and the newest `most_files` in all; nothing where it is too large, or cannot be written."""
    folder, data = cache_folder(kind), json.dumps(seal({"digest": digest, **content})).encode()
    if folder is None or len(data) > _MOST_BYTES:
        return
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd, temporary = tempfile.mkstemp(dir=folder)  # not synced: what a power cut leaves is known by its checksum
        try:
            with open(fd, "wb") as file:
                file.write(data)
            os.replace(temporary, folder / f"{digest}.json")
        except OSError:
            os.unlink(temporary)
            raise
        for old in sorted(folder.iterdir(), key=lambda path: path.lstat().st_mtime, reverse=True)[most_files:]:
            old.unlink()
