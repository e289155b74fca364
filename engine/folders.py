"""Folders that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from storage.disk import fsync_dir, require_writable


@contextmanager
def build_folder(folder: Path) -> Iterator[Path]:
    """A new folder to fill; it takes the place of `folder` when the block ends, and vanishes when the block fails.

    Raises UserError when it cannot be made.
    """
    temporary = folder.with_name(f"{folder.name}.building-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    require_writable(temporary)
    try:
        yield temporary
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(temporary, folder)
        fsync_dir(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
