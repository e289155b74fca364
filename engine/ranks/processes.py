"""The processes of a run's other ranks, as the first one starts them, watches them and ends them.

The first rank is the run's own process, so that its signals, its files and its exit code are those of any run. The
others end with it, however it ends: the kernel kills them. It ends when one of them does, with that one's own words.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import TracebackType

from penstock.engine.ranks.ranks import COUNT, PARENT, PIPE, RANK, Ranks
from penstock.storage.files import child
from penstock.storage.files.errors import UserError

DUMP = signal.SIGUSR1
"""A rank that gets it says where its threads are."""
MOST_WORDS = 1 << 16
"""Characters of what a rank says that are kept."""
END_S = 20.0
"""How long ranks may take to end by themselves, once the run has."""
POLL_S = 0.1
"""Between two looks at the processes, and between two signs of life of each."""
HUNG_LOOKS = 300
"""So many looks without one, and a process is taken for hung. Looks are counted, as time also passes while the first
process itself is stopped; nothing that we call keeps Python's lock for so long."""


class RankError(RuntimeError):
    """Another rank has failed, with its own traceback in the message."""


class Processes:
    """Ranks 1 to `count` - 1, each in a process of `command`. A context manager, which gives the first one."""

    def __init__(self, command: Sequence[str], count: int, visible: Sequence[str] | None) -> None:
        """`visible`: what CUDA_VISIBLE_DEVICES is for each rank; None: there is no GPU."""
        self.failure: Exception | None = None
        self._closing = False
        self._processes: dict[int, subprocess.Popen[str]] = {}
        self._words: dict[int, deque[str]] = {}
        self._readers: dict[int, threading.Thread] = {}
        self._quiet: dict[int, int] = {}
        """Looks at each process since its last sign of life."""
        self._pipes: dict[int, Connection] = {}
        self.ranks = Ranks(0, count, self._pipes, self.check)
        if visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible[0]
        try:
            for rank in range(1, count):
                more = {RANK: str(rank), COUNT: str(count), PARENT: str(os.getpid())}
                if visible is not None:
                    more["CUDA_VISIBLE_DEVICES"] = visible[rank]
                self._start(rank, list(command), more)
        except BaseException:
            self._kill()
            raise
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()

    def _start(self, rank: int, command: list[str], more: dict[str, str]) -> None:
        here, there = Pipe()
        self._pipes[rank] = here
        try:
            process = subprocess.Popen(
                command,
                env=child.environment(**more, **{PIPE: str(there.fileno())}),
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C is for the first rank alone
            )
        except OSError as error:
            raise UserError(f"--gpus: process {rank} cannot be started ({error.strerror})") from error
        finally:
            there.close()
        words = self._words[rank] = deque[str](maxlen=MOST_WORDS // 80)
        self._processes[rank], self._quiet[rank] = process, 0
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        reader = self._readers[rank] = threading.Thread(target=_drain, args=(process, words), daemon=True)
        reader.start()

    def check(self) -> None:
        """Raise what another rank has ended by, if one has."""
        if self.failure is not None:
            raise self.failure

    def __enter__(self) -> Ranks:
        return self.ranks

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait until the others have ended, as the run has; after an error end them."""
        deadline = time.monotonic() + (END_S if error is None else 0.0)
        while any(p.poll() is None for p in self._processes.values()) and time.monotonic() < deadline:
            time.sleep(0.02)
        self._closing = True
        self._kill()
        self._watcher.join()

    def _kill(self) -> None:
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
        for reader in self._readers.values():
            reader.join(1.0)
        for pipe in self._pipes.values():
            pipe.close()

    def _watch(self) -> None:
        """Note the first rank that ends before it should, or hangs."""
        while not self._closing:
            for rank, process in self._processes.items():
                if process.poll() not in (None, 0):
                    self.failure = self._said(rank)
                elif process.poll() is None and self._hangs(rank, process):
                    self.failure = self._dumped(rank, process)
                if self.failure is not None:
                    return
            time.sleep(POLL_S)

    def _hangs(self, rank: int, process: subprocess.Popen[str]) -> bool:
        assert process.stdout is not None
        self._quiet[rank] += 1
        with contextlib.suppress(BlockingIOError):
            if os.read(process.stdout.fileno(), 4096):
                self._quiet[rank] = 0
        return self._quiet[rank] > HUNG_LOOKS

    def _dumped(self, rank: int, process: subprocess.Popen[str]) -> Exception:
        """End a rank that hangs, by an error that says where its threads are."""
        process.send_signal(DUMP)
        process.send_signal(signal.SIGCONT)
        time.sleep(1.0)
        process.kill()
        process.wait()
        self._readers[rank].join(1.0)
        words = "".join(self._words[rank]).strip()
        return RankError(f"GPU {rank}: its process {process.pid} shows no sign of life; its threads are here:\n{words}")

    def _said(self, rank: int) -> Exception:
        """What a rank has ended by, as the error that the run ends by."""
        process = self._processes[rank]
        self._readers[rank].join(1.0)
        words = "".join(self._words[rank]).strip()
        if process.returncode == 2:
            return UserError(f"GPU {rank}: {words.rpartition('error: ')[2]}")
        if process.returncode < 0:
            name = signal.Signals(-process.returncode).name
            why = ": if the kernel did, memory ran out (journalctl -k)" if name == "SIGKILL" else ""
            return UserError(f"GPU {rank}: its process {process.pid} was killed by {name}{why}")
        return RankError(f"GPU {rank}: its process has failed\n{words}")


def live() -> None:
    """In a rank's process: show signs of life, and where its threads are when asked."""
    faulthandler.enable()
    faulthandler.register(DUMP, all_threads=True)

    def beat() -> None:
        with contextlib.suppress(OSError):
            while True:
                os.write(1, b".")
                time.sleep(POLL_S)

    threading.Thread(target=beat, name="beat", daemon=True).start()


def _drain(process: subprocess.Popen[str], words: deque[str]) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        words.append(line)
