"""Tokenised corpora cached for this user between runs, a folder each below XDG_CACHE_HOME/penstock/corpora.

A folder is named by a digest of all that decides its tokens: the content of the source's files, how rows are read and
what made tokens of them. Its files are linked into a run's folder, so that a run stays whole by itself. An entry that
is damaged, or that somebody else could have written, counts as none.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from dataclasses import replace
from pathlib import Path

from penstock.engine.data.corpus.files import CORPUS_FILES, META, Origin, read_info, verify_corpus, write_info
from penstock.storage.files.disk import build_folder, link_or_copy
from penstock.storage.files.errors import UserError
from penstock.storage.files.user_cache import cache_folder

LEAST_BYTES = 1 << 20
"""Of a cached corpus; a smaller one is made again in a moment."""
MOST_BYTES = 1 << 38
"""Of all cached corpora."""
MOST_KEPT = 8
"""The newest, by when they were last used."""


def cached_corpus(digest: str, folder: Path, origin: Origin) -> bool:
    """Put the corpus cached under `digest` into `folder`, with what it says of its origin; False: there is none."""
    entry = _entry(digest)
    if entry is None or not _is_own(entry):
        return False
    try:
        with build_folder(folder) as temporary:
            for name in CORPUS_FILES:
                if name != META and (entry / name).exists():
                    link_or_copy(entry / name, temporary / name)
            write_info(temporary, replace(read_info(entry), **vars(origin)))
            verify_corpus(temporary)
        os.utime(entry)
    except (OSError, UserError):
        shutil.rmtree(entry, ignore_errors=True)
        return False
    return True


def cache_corpus(digest: str, folder: Path) -> None:
    """Cache the corpus of a run's `folder` under `digest`, unless it is small, large or cannot be linked."""
    entry = _entry(digest)
    size = _size(folder)
    if entry is None or not LEAST_BYTES <= size <= MOST_BYTES or entry.exists():
        return
    temporary = entry.with_name(f".{digest}.{os.getpid()}")
    try:
        entry.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary.mkdir(mode=0o700)
        for name in CORPUS_FILES:
            if (folder / name).exists():
                link_or_copy(folder / name, temporary / name)
        os.rename(temporary, entry)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
    with contextlib.suppress(OSError):
        _prune(entry.parent)


def _entry(digest: str) -> Path | None:
    folder = cache_folder("corpora")
    return None if folder is None else folder / digest


def _is_own(folder: Path) -> bool:
    try:
        result = os.lstat(folder)
    except OSError:
        return False
    return (
        stat.S_ISDIR(result.st_mode)
        and result.st_uid == os.geteuid()
        and not result.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    )


def _size(folder: Path) -> int:
    return sum((folder / name).stat().st_size for name in CORPUS_FILES if (folder / name).exists())


def _prune(folder: Path) -> None:
    """Leave the newest. What a killed process left half made goes by its age, as any other."""
    total = 0
    entries = sorted(folder.iterdir(), key=lambda path: path.lstat().st_mtime, reverse=True)
    for number, entry in enumerate(entries):
        total += _size(entry)
        if number >= MOST_KEPT or total > MOST_BYTES:
            shutil.rmtree(entry, ignore_errors=True)
