"""What the live runs of this user have planned to take of this machine's memory, so that the next one leaves it alone.

Memory that a run has planned looks free until it is touched. So each process keeps a file of what it planned in a
folder of this user's, locked for as long as it lives; whoever plans takes off what the others have not touched yet.
From the reading of free memory to the settled plan a process holds the folder's own lock, and the next one waits.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct, to_builtins

from penstock.engine.machine.budgets import Reserved, gpu_name, words
from penstock.engine.machine.limits import free_memory
from penstock.engine.machine.platforms import is_shared
from penstock.storage.files.disk import held
from penstock.storage.files.errors import BudgetError
from penstock.storage.files.units import bytes_text
from penstock.storage.files.untrusted import Size, parse_object, printable, typed

if TYPE_CHECKING:
    import torch

    from penstock.engine.events import Observer
    from penstock.engine.machine.budgets import Budgets
    from penstock.engine.plan.plan import Plan
    from penstock.engine.preparing import Checklist

WAIT_S = 300.0
"""How long a process waits for another one's plan, which may have to compile and to measure first."""

_POLL_S = 0.05
_LOCK, _PREFIX = "lock", "run-"
_RECORD_BYTES, _MOST_PATH = 8192, 1000
"""Every record is padded to this, so that one is replaced by one write; paths are cut to so many characters."""


def reserved() -> list[Reserved]:
    """What other processes have reserved; nothing is written. [] where that cannot be read."""
    for folder_path in _folder_paths():
        with contextlib.suppress(OSError), held(_open_folder(folder_path)) as folder:
            return _read(folder)
    return []


class Reservation:
    """A process's own reservation: a context manager, which takes it back in the end.

    Entered, it holds the lock until `settle`; `others` is what to leave alone. Without a folder it only says so.
    """

    def __init__(self, run_dir: Path, device: torch.device, observer: Observer, checklist: Checklist) -> None:
        self.others: list[Reserved] = []
        self._run = printable(run_dir.resolve())[:_MOST_PATH]
        self._device, self._observer, self._checklist = device, observer, checklist
        self._folder = self._lock = self._file = -1
        self._name = ""
        self._left_bytes = self._base_bytes = 0
        self._why: dict[str, str] = {}

    def __enter__(self) -> Reservation:
        errors = []
        for folder_path in _folder_paths():
            try:
                self._enter(folder_path)
                return self
            except BaseException as error:
                self.release()
                if not isinstance(error, OSError):
                    raise
                errors.append(f"{folder_path}: {error.strerror or error}")
        self._report_unreserved("; ".join(errors))
        return self

    def _enter(self, folder_path: Path) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder_path, 0o700)
        self._folder = _open_folder(folder_path)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._lock = os.open(_LOCK, flags, 0o600, dir_fd=self._folder)
        if self._wait():
            _sweep(self._folder)
        self.others = _read(self._folder)
        taken = sum(other.ram_bytes for other in self.others)
        self._left_bytes = max(0, free_memory().free_bytes - taken)

    def _report_unreserved(self, why: str) -> None:
        self._observer.on_message(f"memory is not reserved against other runs' plans ({why})")

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """What did not fit says who has the rest."""
        self.release()
        if not isinstance(error, BudgetError) or error.tier is None:
            return
        why = self._why.get(error.tier, "")
        if " reserved" in why:
            raise BudgetError(
                f"{error}. Of {error.tier} there is {why}",
                tier=error.tier,
                need_bytes=error.need_bytes,
                budget_bytes=error.budget_bytes,
            ) from error

    def release(self) -> None:
        if self._name:
            with contextlib.suppress(OSError):
                os.unlink(self._name, dir_fd=self._folder)
        self._name = ""
        for fd in (self._file, self._lock, self._folder):
            if fd >= 0:
                os.close(fd)
        self._file = self._lock = self._folder = -1

    def reserve(self, budgets: Budgets) -> None:
        """Reserve all that the plan may take, instead of what was reserved before."""
        self._why = budgets.why
        if not self._name:
            self._base_bytes = _touched(os.getpid())
        self._write(budgets.ram, budgets.gpu)

    def settle(self, plan: Plan, ranks: int = 1) -> None:
        """Reserve what the plan of each rank takes, and let others plan. Warns where it is more than what is left."""
        ram, gpu = plan.tiers["ram"].peak_bytes * ranks, plan.tiers["gpu"].peak_bytes
        self._write(ram, gpu)
        if self._lock >= 0:
            os.ftruncate(self._lock, 0)
            os.close(self._lock)
            self._lock = -1
        planned = ram + (gpu if is_shared(self._device) else 0)
        if self.others and planned > self._left_bytes:
            self._observer.on_message(
                f"warning: this run plans {bytes_text(planned)} of RAM, but only {bytes_text(self._left_bytes)} "
                f"are free besides what other runs need: {words(self.others)}; lower budgets.ram, or a run may run "
                "out of memory"
            )

    def allocated(self) -> None:
        """The run holds its GPU memory: from here on the GPU's driver counts it."""
        if not is_shared(self._device):
            self._write(None, 0)

    def _write(self, ram: int | None, gpu: int) -> None:
        """Make the record say this; `ram` None leaves that as it is."""
        if self._folder < 0:
            return
        if ram is not None:
            self._ram_bytes = ram + (gpu if is_shared(self._device) else 0)
        gpus = {} if is_shared(self._device) else {gpu_name(self._device): gpu}
        record = _Record(self._run, os.getpid(), self._base_bytes, self._ram_bytes, gpus)
        content = json.dumps(to_builtins(record)).encode().ljust(_RECORD_BYTES - 1) + b"\n"
        try:
            if not self._name:
                self._file, self._name = _make(self._folder)
            os.pwrite(self._file, content, 0)
        except OSError as error:
            self._report_unreserved(str(error.strerror or error))
            self.release()

    def _wait(self) -> bool:
        """Take the lock, telling for whom it waits; whether it came in time."""
        if not _try_lock(self._lock):
            holder = printable(os.pread(self._lock, 4200, 0).decode(errors="replace").strip()) or "another run"
            with self._checklist.step(f"waiting for {holder} to plan its memory"):
                deadline = time.monotonic() + WAIT_S
                while not _try_lock(self._lock):
                    if time.monotonic() > deadline:
                        os.close(self._lock)
                        self._lock = -1
                        break
                    time.sleep(_POLL_S)
            if self._lock < 0:
                self._observer.on_message(
                    f"{holder} is still planning its memory; continuing with what it has not reserved"
                )
                return False
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{self._run} (process {os.getpid()})\n".encode(), 0)
        return True


def _folder_paths() -> Iterator[Path]:
    """Folders for the records of this user's processes, the best first."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime.startswith("/"):
        yield Path(runtime, "penstock")
    with contextlib.suppress(OSError):  # no temporary folder can be written
        yield Path(tempfile.gettempdir(), f"penstock-{os.geteuid()}")


def _open_folder(folder_path: Path) -> int:
    """A descriptor of the folder. OSError where other users can access it: what is in it decides over their runs."""
    folder = os.open(folder_path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    status = os.fstat(folder)
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        os.close(folder)
        raise PermissionError(None, "other users can access it")
    return folder


def _make(folder: int) -> tuple[int, str]:
    """A locked new file and its name."""
    while True:
        name = f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return fd, name
        os.close(fd)  # swept before it was locked


def _sweep(folder: int) -> None:
    """Remove the files of processes that are gone."""
    for name in os.listdir(folder):
        if name.startswith(_PREFIX):
            with contextlib.suppress(OSError), _opened(folder, name) as fd:
                if _try_lock(fd):
                    os.unlink(name, dir_fd=folder)


def _read(folder: int) -> list[Reserved]:
    """What other live processes have reserved and do not hold; whatever is no record is left out."""
    result = []
    for name in sorted(os.listdir(folder)):
        if name.startswith(_PREFIX):
            with contextlib.suppress(OSError, ValueError), _opened(folder, name) as fd:
                if not _try_lock(fd, fcntl.LOCK_SH) and (other := _planned(os.pread(fd, _RECORD_BYTES, 0))) is not None:
                    result.append(other)
    return result


class _Record(Struct):
    """What a process planned: the content of its file."""

    run: str
    pid: Size
    base_bytes: Size
    """RAM that it held before."""
    ram_bytes: Size
    gpu_bytes: dict[str, Size]
    """Of each GPU, by `gpu_name`."""


def _planned(content: bytes) -> Reserved | None:
    """What another process plans beyond what it holds; None for this process. ValueError for what is no record."""
    record = typed(parse_object(content), _Record)
    if record.pid == os.getpid():
        return None
    held = max(0, _touched(record.pid) - record.base_bytes)
    return Reserved(record.run, record.pid, max(0, record.ram_bytes - held), record.gpu_bytes)


def _opened(folder: int, name: str) -> contextlib.AbstractContextManager[int]:
    return held(os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder))


def _try_lock(fd: int, how: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _touched(pid: int) -> int:
    """Bytes of its own that a process holds in RAM, without what it maps of files; 0 where that cannot be read."""
    try:
        _, resident, shared = Path(f"/proc/{pid}/statm").read_text().split()[:3]
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * resource.getpagesize()
