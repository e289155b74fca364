"""File systems in image files, of which a copy is a clone of the disk: for tests as root."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class Disks:
    """File systems in image files, mounted below `top`."""

    def __init__(self, top: Path) -> None:
        self._top = top
        self._mounted: list[Path] = []

    def make(self, image: str) -> None:
        path = self._top / image
        path.touch()
        os.truncate(path, 8 << 20)
        subprocess.run(["mkfs.ext4", "-q", path], check=True)

    def clone(self, image: str, to: str) -> None:
        os.sync()
        shutil.copy(self._top / image, self._top / to)

    def mount(self, image: str, name: str) -> Path:
        folder = self._top / name
        folder.mkdir(exist_ok=True)
        subprocess.run(["mount", "-o", "loop", self._top / image, folder], check=True, capture_output=True)
        self._mounted.append(folder)
        return folder

    def unmount(self, *folders: Path) -> None:
        for folder in folders:
            subprocess.run(["umount", folder], check=True)
            self._mounted.remove(folder)

    def close(self) -> None:
        for folder in self._mounted[::-1]:
            subprocess.run(["umount", "--lazy", folder], check=True)  # a failed test may hold files


@contextmanager
def mounted_disks(top: Path) -> Iterator[Disks]:
    """The file system `original` is mounted at top/disk. Skips the test where that cannot be."""
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None:
        pytest.skip("mounting an image needs root and mkfs.ext4")
    found = Disks(top)
    found.make("original")
    try:
        found.mount("original", "disk")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"images cannot be mounted here: {error.stderr!r}")
    try:
        yield found
    finally:
        found.close()
