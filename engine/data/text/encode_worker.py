"""A process that makes tokens of samples: an Encoder on its standard input, then batches of samples, until it ends.

Its answers go to standard output, pickled like what it is given. It ends with the process that began it, as its input
ends then; what the terminal sends to all of its processes, control-C, it leaves to that one.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import traceback

from penstock.engine.data.text.encode import Answer
from penstock.storage.files.errors import UserError


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    batches = sys.stdin.buffer
    encoder = pickle.load(batches)
    encoder.bad.take()
    while True:
        try:
            samples = pickle.load(batches)
        except EOFError:
            return
        try:
            answer = Answer(encoder.encode(samples), encoder.bad.take())
        except UserError as error:
            answer = Answer([], (0, ""), user_error=error)
        except Exception:
            answer = Answer([], (0, ""), failure=traceback.format_exc())
        pickle.dump(answer, answers, protocol=pickle.HIGHEST_PROTOCOL)
        answers.flush()


if __name__ == "__main__":
    main()
