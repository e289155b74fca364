"""Forks the processes of the command line, which takes milliseconds where an interpreter imports PyTorch for seconds.

cli_process.py starts it. File descriptor 0 is a socket: a message is JSON, {"arguments", "folder", "environment"}, and
carries four file descriptors, the new process's 0, 1 and 2 and a pipe on which its pid and later its end are told, as
os.waitpid has it. The server ends with whoever holds the other end of the socket.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import selectors
import socket
import struct
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

NUMBER = struct.Struct("q")
"""What is told: as many bytes each, so that one read takes one."""

APP = "cli.bench cli.cluster cli.eval cli.finetune cli.sample console.streams launch.api launch.run runs.control"
APP += " runs.offsite sampling.exported"
ENGINE = "cluster.convert export optim.adamw train"
OTHERS = "pydantic.type_adapter rich.table transformers.convert_slow_tokenizer typer.main"
OTHERS += " transformers.models.auto.tokenization_auto transformers.models.llama.modeling_llama"
OTHERS += " transformers.models.qwen3.modeling_qwen3"
"""What commands import, but for the command line's own module, which runs as __main__."""


def load() -> None:
    from penstock.app.console.loading import loading
    from penstock.app.hub.names import stay_offline

    stay_offline()
    with loading():
        ours = [*(f"app.{name}" for name in APP.split()), *(f"engine.{name}" for name in ENGINE.split())]
        for name in [*(f"penstock.{name}" for name in ours), *OTHERS.split()]:
            importlib.import_module(name)
    threads = len(os.listdir("/proc/self/task"))
    assert threads == threading.active_count() == 1, f"{threads} threads: a fork would have one of them"


def serve(control: socket.socket) -> list[str]:
    """For ever in the server; in a fork it returns the arguments of the interpreter in whose place it is."""
    watched = selectors.DefaultSelector()
    watched.register(control, selectors.EVENT_READ)
    while True:
        for key, _ in watched.select():
            if key.fileobj is not control:
                pid, told = key.data
                tell(told, os.waitpid(pid, 0)[1])
                os.close(told)
                watched.unregister(key.fd)
                os.close(key.fd)
                continue
            message, descriptors, _, _ = socket.recv_fds(control, 1 << 20, 4)
            if not message:
                sys.exit()
            *streams, told = descriptors
            pid = os.fork()
            if pid == 0:
                control.detach()  # its number is to be that of the standard input
                for other in watched.get_map().values():
                    if other.data:
                        os.close(other.fd)
                        os.close(other.data[1])
                os.close(told)
                watched.close()
                return become(json.loads(message), streams)
            for stream in streams:
                os.close(stream)
            tell(told, pid)
            watched.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, told))


def tell(pipe: int, number: int) -> None:
    with suppress(BrokenPipeError):  # nobody waits for it
        os.write(pipe, NUMBER.pack(number))


def become(wanted: dict[str, Any], streams: list[int]) -> list[str]:
    """What an interpreter has when it has just begun."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(wanted["folder"])
    os.environ.clear()
    os.environ.update(wanted["environment"])
    arguments: list[str] = wanted["arguments"]
    return arguments


def run(arguments: list[str]) -> None:
    """As the interpreter does with `-m MODULE ...` or `FILE ...`."""
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[0] = str(Path(sys.argv[0]).parent)
        runpy.run_path(sys.argv[0], run_name="__main__")


def leave(code: int) -> None:
    """As sys.exit does, but for taking all modules apart: that would copy every page that a fork shares."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    load()
    gc.freeze()
    try:
        run(serve(socket.socket(fileno=0)))
    except SystemExit as end:
        if not isinstance(end.code, int):
            raise
        leave(end.code)
