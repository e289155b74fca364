"""Paths that a user types, for files that are to be written."""

from __future__ import annotations

import os
from pathlib import Path

from penstock.storage.files.errors import UserError


def written_path(root: Path, typed: str, *, inside: bool) -> Path:
    """The path that `typed` means, below `root` unless it is absolute.

    Raises UserError for what is no path, and with `inside` for what would lie outside `root` once links are followed.
    """
    try:
        path = root / Path(typed).expanduser()
        os.lstat(path)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, RuntimeError) as error:  # ValueError: a NUL or half a character; RuntimeError: ~nobody
        raise UserError(f"{typed}: cannot be written there ({getattr(error, 'strerror', None) or error})") from None
    if inside and not _is_inside(path, root):
        raise UserError(f"{typed}: is outside {root}; in a browser, files can only be written below that folder")
    return path


def _is_inside(path: Path, root: Path) -> bool:
    """Whether neither the path nor what it is a link to lies elsewhere."""
    base = Path(os.path.realpath(root))
    return Path(os.path.realpath(path)).is_relative_to(base) and Path(os.path.realpath(path.parent)).is_relative_to(
        base
    )
