"""Samples to tokens by as many processes as there are processors, where one does not do.

Rendering a chat template is Python, and takes long. For plain text the threads of a fast tokenizer are enough.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import chain, islice
from queue import SimpleQueue

from penstock.engine.data.samples import Encoded, Sample, Text
from penstock.engine.data.text.encode import Encoder, batches
from penstock.storage.files import child
from penstock.storage.files.errors import UserError

BATCH_CHARS = 4 * 2**20
"""Text handed to the tokenizer at once: bounds memory, feeds its threads."""
_SHARE_CHARS = 2**18
"""Handed to a process at once."""
SERIAL_BATCHES = 2
"""Batches that this process encodes itself before it begins others: few samples are done before those have started."""
_MOST_PROCESSES = 16
Answer = tuple[list[Encoded], tuple[int, str]]
"""What became of a batch, how many samples were left out, and what was wrong with the first."""
_KILLED = (
    "data: a tokenizing process was killed by signal {signal} (9 usually means out of memory); free some memory or "
    "use fewer processors (taskset), then start again"
)


def encode_all(encoder: Encoder, samples: Iterator[Sample]) -> Iterator[Encoded]:
    """All of `samples` in order; what cannot be used goes to `encoder.bad`.

    What is in memory is bounded by a few batches. Raises UserError as the encoder does. No process is left behind.
    """
    for batch in islice(batches(samples, BATCH_CHARS), SERIAL_BATCHES):
        yield from encoder.encode(batch)
    processes = min(len(os.sched_getaffinity(0)), _MOST_PROCESSES)
    first = next(samples, None)
    if first is None:
        return
    samples = chain([first], samples)
    if processes > 1 and not (isinstance(first, Text) and encoder.has_fast_tokenizer):
        yield from _in_parallel(encoder, samples, processes)
        return
    for batch in batches(samples, BATCH_CHARS):
        yield from encoder.encode(batch)


def _in_parallel(encoder: Encoder, samples: Iterator[Sample], processes: int) -> Iterator[Encoded]:
    """Two batches a process are under way at a time; the answers come in the order of the samples."""
    start = pickle.dumps(encoder, protocol=pickle.HIGHEST_PROTOCOL)
    workers: list[_Worker] = []
    idle: SimpleQueue[_Worker] = SimpleQueue()
    threads = ThreadPoolExecutor(processes)
    under_way: deque[Future[Answer]] = deque()

    def request(batch: list[Sample]) -> Answer:
        worker = idle.get()
        try:
            return worker.request(batch)
        finally:
            idle.put(worker)

    def oldest() -> list[Encoded]:
        encoded, bad = under_way.popleft().result()
        encoder.bad.add_many(*bad)
        return encoded

    try:
        for _ in range(processes):
            workers.append(_Worker(start))
            idle.put(workers[-1])
        for batch in batches(samples, _SHARE_CHARS):
            under_way.append(threads.submit(request, batch))
            if len(under_way) >= 2 * processes:
                yield from oldest()
        while under_way:
            yield from oldest()
    finally:
        for worker in workers:
            worker.kill()
        threads.shutdown(cancel_futures=True)
        for worker in workers:
            worker.close()


class _Worker:
    """A process that runs `main`: one batch at a time."""

    def __init__(self, encoder: bytes) -> None:
        self._unsent = encoder
        self._process = subprocess.Popen(
            child.command("engine.data.text.encode_pool"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # Each has a processor; threads of their own would wait for one another.
            env=child.environment(RAYON_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1"),
        )

    def request(self, batch: list[Sample]) -> Answer:
        """What became of the batch. Raises what the process did, UserError where it was killed."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(self._unsent + pickle.dumps(batch, protocol=pickle.HIGHEST_PROTOCOL))
            stdin.flush()
            self._unsent = b""
            answer = pickle.load(stdout)
        except (EOFError, OSError, ValueError, pickle.UnpicklingError):
            if (code := self._process.wait()) < 0:
                raise UserError(_KILLED.format(signal=-code)) from None
            raise RuntimeError(f"a tokenizing process failed:\nit ended with code {code}") from None
        if isinstance(answer, Exception):
            raise answer
        result: Answer = answer
        return result

    def kill(self) -> None:
        """Whatever it is at; what it answers then is a failure."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):  # what was not sent is not wanted
                pipe.close()


def main() -> None:
    """What a process does: an Encoder comes on its standard input, then batches of samples, until it ends.

    Its answers, or the errors in their place, go to standard output, pickled like what it is given. It ends with the
    process that began it, as its input ends then, and leaves control-C to that one.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    given = sys.stdin.buffer
    encoder = pickle.load(given)
    encoder.bad.take()
    while True:
        try:
            samples = pickle.load(given)
        except EOFError:
            return
        answer: Answer | Exception
        try:
            answer = encoder.encode(samples), encoder.bad.take()
        except UserError as error:
            answer = error
        except Exception:
            answer = RuntimeError(f"a tokenizing process failed:\n{traceback.format_exc()}")
        pickle.dump(answer, answers, protocol=pickle.HIGHEST_PROTOCOL)
        answers.flush()


if __name__ == "__main__":
    main()
