"""What a power cut leaves of a folder: a model of the disk below the real system calls of this process.

Every call that changes the folder is really made, and recorded. A file's bytes are safe once the file was synced, a
folder's entries once the folder was. Of everything else a power cut may keep any part: `Disk.image` builds what it
leaves, with nothing that was not synced, or with a random choice of it (old or new directory entries one by one, old or
new bytes block by block).
"""

import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from system_calls import CHANGING

BLOCK = 4096


class Disk:
    """The disk under folder `top`; `check(image)` is called after recorded calls, with a folder to look at."""

    def __init__(self, top: Path, workspace: Path, patch: pytest.MonkeyPatch, *, seed: int, share: float):
        """Call `check` after a random `share` of the calls. Images are built in `workspace`, outside of `top`."""
        self.check: Callable[[Path], None] = lambda image: None
        self.calls = self.images = 0
        self._top = top
        workspace.mkdir(exist_ok=True)
        self._workspace = workspace
        self._rng = random.Random(seed)
        self._share = share
        self._lock = threading.RLock()
        self._files: dict[int, bytes] = {}  # inode -> synced bytes
        self._folders: dict[int, dict[str, int]] = {}  # inode -> synced entries
        self._held: dict[int, int] = {}  # inode -> descriptor: the number stays its own, and its bytes readable
        self._real = {name: getattr(os, name) for name in CHANGING}
        self._hold(top)
        for name in CHANGING:
            patch.setattr(os, name, self._recorded(name))

    def close(self) -> None:
        """Let the inodes go."""
        for fd in self._held.values():
            os.close(fd)

    def _recorded(self, name: str) -> Callable[..., Any]:
        real = self._real[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._ours(args[0], kwargs) or (name == "open" and not args[1] & (os.O_CREAT | os.O_TRUNC)):
                return real(*args, **kwargs)
            with self._lock:
                result = real(*args, **kwargs)
                if name == "fsync":
                    self._sync(args[0])
                self.calls += 1
                if self._rng.random() < self._share:
                    self.cut()
                return result

        return call

    def cut(self) -> None:
        """Check what a power cut in this moment leaves."""
        with self._lock:
            for chance in (0.0, self._rng.choice([0.1, 0.5, 0.9, 1.0])):
                self.images += 1
                image = self._workspace / f"image{self.images}"
                self._folder(self._top.stat().st_ino, image, chance, {})
                self.check(image)

    def _ours(self, target: Any, kwargs: dict[str, Any]) -> bool:
        fd = target if isinstance(target, int) else kwargs.get("dir_fd")
        path = os.readlink(f"/proc/self/fd/{fd}") if fd is not None else os.path.abspath(os.fspath(target))
        return path == str(self._top) or path.startswith(f"{self._top}/")

    def _hold(self, path: Path | str) -> int:
        inode = os.stat(path, follow_symlinks=False).st_ino
        if inode not in self._held:
            self._held[inode] = self._real["open"](path, os.O_RDONLY)
        return inode

    def _sync(self, fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        if os.path.isdir(path):
            entries = {entry.name: self._hold(entry.path) for entry in os.scandir(path)}
            self._folders[self._hold(path)] = entries
        elif not path.endswith(" (deleted)"):
            inode = self._hold(path)
            self._files[inode] = self._bytes(inode)

    def _bytes(self, inode: int) -> bytes:
        fd = self._held[inode]
        return os.pread(fd, os.fstat(fd).st_size, 0)

    def _folder(self, inode: int, image: Path, chance: float, made: dict[int, Path]) -> None:
        """Build the folder; each change that was not synced is there with probability `chance`."""
        image.mkdir()
        synced = self._folders.get(inode, {})
        path = os.readlink(f"/proc/self/fd/{self._held[inode]}")
        now = {} if path.endswith(" (deleted)") else {e.name: self._hold(e.path) for e in os.scandir(path)}
        for name in sorted(synced.keys() | now.keys()):
            entry = (now if self._rng.random() < chance else synced).get(name)
            if entry is None:
                continue
            target = image / name
            if os.path.isdir(f"/proc/self/fd/{self._held[entry]}"):
                self._folder(entry, target, chance, made)
            elif entry in made:
                self._real["link"](made[entry], target)
            else:
                target.write_bytes(self._content(entry, chance))
                made[entry] = target

    def _content(self, inode: int, chance: float) -> bytes:
        old, new = self._files.get(inode, b""), self._bytes(inode)
        if old == new or chance == 0:
            return old
        size = len(new if self._rng.random() < chance else old)
        blocks = []
        for start in range(0, size, BLOCK):
            chosen = new if self._rng.random() < chance else old
            blocks.append(chosen[start : start + BLOCK].ljust(min(BLOCK, size - start), b"\0"))
        return b"".join(blocks)
