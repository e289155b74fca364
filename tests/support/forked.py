"""Processes that fork_server.py forks, with the handle that subprocess gives of others."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from fork_server import NUMBER

REPOSITORY = Path(__file__).parents[2]
PATHS = {"PYTHONPATH": str(REPOSITORY / "src"), "COLUMNS": "100"}
BEGUN_WITH = os.environ | PATHS
"""The fork server's environment; conftest.py sets it anew."""

_READ_BY_IMPORTS = ("ATEN_", "DNNL_", "HF_", "HOME", "LANG", "LC_", "LD_", "MKL_", "OMP_", "ONEDNN_", "OPENBLAS_")
_READ_BY_IMPORTS += ("PYTHON", "TOKENIZERS_", "TORCH", "TRANSFORMERS_", "USE_", "XDG_")
"""Begins of the names of variables that a module may read as it is imported."""


def default_signals() -> None:
    """In a child before it starts: signals that the tests' own parent ignores (nohup, a shell's background) count."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class ForkServer:
    """fork_server.py as a process, which ends with this one."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._read = self._read_by_imports(environment)
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("fork_server.py"))],
                env=environment,
                stdin=other,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                preexec_fn=default_signals,
            )

    @staticmethod
    def _read_by_imports(environment: Mapping[str, str]) -> dict[str, str]:
        """Without what hub_names.stay_offline has set in this process, as it does in every command."""
        ours = {"USE_HUB_KERNELS"} | ({"HF_HUB_OFFLINE"} if "PENSTOCK_OFFLINE_BY_DEFAULT" in environment else set())
        read = {name: value for name, value in environment.items() if name.startswith(_READ_BY_IMPORTS)}
        return {name: value for name, value in read.items() if name not in ours}

    def has(self, environment: Mapping[str, str]) -> bool:
        """Whether what it has imported would be the same there."""
        return self._read_by_imports(environment) == self._read

    def fork(self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str], streams: list[int]) -> int:
        """A pipe that gives the pid of the new process, and later how it ends."""
        told, tells = os.pipe()
        message = {"arguments": arguments, "folder": str(folder), "environment": dict(environment)}
        socket.send_fds(self._socket, [json.dumps(message).encode()], [*streams, tells])
        os.close(tells)
        return told

    def number(self, told: int) -> int:
        """The next one of such a pipe."""
        found = os.read(told, NUMBER.size)
        assert found, f"the fork server has ended: {self._process.communicate()[1]}"
        return int(NUMBER.unpack(found)[0])


class Forked(subprocess.Popen[str]):
    """A process of the fork server; the three methods of Popen that know of its parent are its own."""

    _told: int

    def _execute_child(self, args: Any, *more: Any) -> None:
        cwd, env, pipes = more[4], more[5], more[9:15]
        p2cread, _, _, c2pwrite, _, errwrite = pipes
        streams = [number if fd == -1 else fd for number, fd in enumerate((p2cread, c2pwrite, errwrite))]
        self._told = fork_server().fork(args[1:], cwd, env, streams)
        self.pid = fork_server().number(self._told)
        self._close_pipe_fds(*pipes)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if wait_flags and not select.select([self._told], [], [], 0)[0]:
            return 0, 0
        status = fork_server().number(self._told)
        os.close(self._told)
        return self.pid, status

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid:
                self._handle_exitstatus(status)
        return self.returncode


@cache
def fork_server() -> ForkServer:
    """This process's own; begun with the first command."""
    return ForkServer(BEGUN_WITH)
