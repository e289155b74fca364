"""`penstock check`: whether a model would be trained exactly, and which of all types that transformers knows would be.

Each type is checked by a process of its own, of which there are as many at a time as CPUs: one that crashes, hangs or
takes all memory is refused, and the others go on.
"""

from __future__ import annotations

import fcntl
import math
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

from penstock.engine.machine.limits import total_memory
from penstock.engine.machine.platforms import usable_cpus
from penstock.storage.files.units import bytes_text, duration_text

if TYPE_CHECKING:
    from penstock.engine.self_check import CheckResult

LIMIT_S = 1200.0
"""Time that one type may take, on a machine that does other things too."""
_LOADED = ("penstock.engine.self_check",)
"""Loaded once, for all processes."""


def to_json(result: CheckResult) -> dict[str, Any]:
    """The fields of a result; JSON has no infinity."""
    fields = asdict(result)
    if not math.isfinite(fields["max_rel_error"] or 0.0):
        fields["max_rel_error"] = None
    return fields


@dataclass(frozen=True, slots=True)
class _Job:
    model_type: str
    process: BaseProcess
    began: float


def check_types(model_types: Sequence[str], limit_s: float = LIMIT_S) -> Generator[dict[str, Any]]:
    """Of each type what `to_json` says of its default config, as it comes. Closing it ends what is under way."""
    processes = min(usable_cpus(), len(model_types))
    memory = total_memory() // (2 * processes) if processes else 0
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_LOADED))
    life, ours_alone = context.Pipe(duplex=False)
    waiting = list(model_types)[::-1]
    jobs: dict[Connection, _Job] = {}
    try:
        while waiting or jobs:
            while waiting and len(jobs) < processes:
                kind = waiting.pop()
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_check, args=(kind, theirs, life, memory), daemon=True)
                process.start()
                theirs.close()
                jobs[ours] = _Job(kind, process, time.monotonic())
            due_s = min(job.began for job in jobs.values()) + limit_s - time.monotonic()
            ready = wait(list(jobs), max(0.0, due_s))
            for pipe in [pipe for pipe in jobs if pipe in ready or jobs[pipe].began + limit_s <= time.monotonic()]:
                job, late = jobs.pop(pipe), f"not done after {duration_text(limit_s)}"
                result = _result(job, pipe) if pipe in ready else _refusal(job.model_type, late)
                _end(job, pipe)
                yield result
    finally:
        for pipe, job in jobs.items():
            _end(job, pipe)
        life.close()
        ours_alone.close()


def _result(job: _Job, pipe: Connection) -> dict[str, Any]:
    try:
        result: dict[str, Any] = pipe.recv()
    except (EOFError, OSError):
        job.process.join()
        code = job.process.exitcode or 0
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return _refusal(job.model_type, f"the process that checked it ended ({how}); perhaps memory is short")
    return result


def _refusal(model_type: str, reason: str) -> dict[str, Any]:
    from penstock.engine.self_check import CheckResult

    return to_json(CheckResult(model_type, False, None, None, reason))


def _end(job: _Job, pipe: Connection) -> None:
    job.process.kill()
    job.process.join()
    pipe.close()


def _check(model_type: str, out: Connection, life: Connection, memory_bytes: int) -> None:
    """A child's life. It ends with the process that has the other end of `life`, for which it is not the child; Ctrl-C
    is for that one to hear. What libraries print is for nobody."""
    fcntl.fcntl(life.fileno(), fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life.fileno(), fcntl.F_SETFL, os.O_ASYNC)  # SIGIO, which ends it, when the other end is closed
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    from penstock.engine.model.types import default_config
    from penstock.engine.self_check import check_model
    from penstock.storage.files.errors import UserError, used_up

    try:
        result = to_json(check_model(default_config(model_type)))
    except UserError as error:
        result = _refusal(model_type, str(error))
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        if used_up(error) is not None:
            reason = f"its check needs more than {bytes_text(memory_bytes)} of memory"
        result = _refusal(model_type, reason)
    out.send(result | {"model_type": model_type})  # two types may share a config, which has the name of one
