"""Where a run's state lies; folders that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.config import StorageConfig
from storage.disk import disk_error, fsync_dir, require_writable
from storage.errors import UserError
from storage.untrusted import is_real_folder


@contextmanager
def build_folder(folder: Path) -> Iterator[Path]:
    """A new folder to fill; it takes the place of `folder` when the block ends, and vanishes when the block fails.

    Raises UserError when it cannot be made or filled, or what is no folder of ours, a link say, is in its place.
    """
    temporary = folder.with_name(f"{folder.name}.building-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    for place, fine in ((temporary, False), (folder, is_real_folder(folder))):
        if os.path.lexists(place) and not fine:
            raise UserError(f"{place}: is in the way of a new folder; move it away")
    require_writable(temporary)
    try:
        yield temporary
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(temporary, folder)
        fsync_dir(folder.parent)
    except OSError as error:
        raise disk_error(error, Path(error.filename or temporary), f"making {folder.name}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def state_folder(run_dir: Path) -> Path:
    """Where a run's manifest is, and its chunk files unless the recipe names drives."""
    return run_dir / "state"


def drive_folders(run_dir: Path, storage: StorageConfig) -> list[Path]:
    """The folders that hold a run's chunk files: one of the run's name on each drive of the recipe."""
    given = [Path(drive).expanduser().absolute() / run_dir.resolve().name for drive in storage.drives]
    return given or [state_folder(run_dir)]
