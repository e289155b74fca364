"""Ranks of a run in processes of the tests' own, which begin in no time."""

import multiprocessing
import os
import pickle
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

import torch

from penstock.engine.ranks.ranks import Ranks

T = TypeVar("T")
PRELOADED = ["tiny", "ranked", "penstock.engine.train"]


def _work(
    rank: int, count: int, pipes: dict[int, Connection], answer: Connection, work: Callable[..., Any], given: Any
) -> None:
    torch.set_num_threads(1)  # as many on any number of ranks
    try:
        result = work(Ranks(rank, count, pipes, lambda: None), *given)
        answer.send((True, pickle.dumps(result)))
    except BaseException:
        answer.send((False, traceback.format_exc()))
    finally:
        answer.close()
        os._exit(0)


def ranked(count: int, work: Callable[..., T], *given: Any) -> list[T]:
    """What `work(ranks, *given)` returns for each of `count` ranks, by rank; where one fails all are ended."""
    results: dict[int, T] = {}
    for rank, (there, found) in started(count, work, *given).items():
        assert there, found
        results[rank] = pickle.loads(found)
    return [results[rank] for rank in range(count)]


def started(count: int, work: Callable[..., Any], *given: Any) -> dict[int, tuple[bool, Any]]:
    """(whether it returned, what, pickled, or its traceback) by rank; what ends without a word is (False, how). Where
    one fails the others are killed, and have said nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    pairs = {rank: context.Pipe() for rank in range(1, count)}
    pipes = {0: {rank: pair[0] for rank, pair in pairs.items()}, **{rank: {0: pair[1]} for rank, pair in pairs.items()}}
    processes, answers = {}, {}
    for rank in range(count):
        here, there = context.Pipe(duplex=False)
        processes[rank] = context.Process(target=_work, args=(rank, count, pipes[rank], there, work, given))
        processes[rank].start()
        there.close()
        answers[here] = rank
    found: dict[int, tuple[bool, Any]] = {}
    while len(found) < count:
        for ready in wait([here for here, rank in answers.items() if rank not in found]):
            assert isinstance(ready, Connection)
            rank = answers[ready]
            try:
                found[rank] = ready.recv()
            except EOFError:
                processes[rank].join()
                found[rank] = (False, processes[rank].exitcode)
        if not all(there for there, _ in found.values()):
            for process in processes.values():
                if process.pid is not None and process.is_alive():
                    os.kill(process.pid, signal.SIGKILL)
            break
    for process in processes.values():
        process.join()
    return found
