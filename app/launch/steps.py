"""A run as an iterator over its steps."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue

from penstock.app.launch.api import begin
from penstock.app.launch.callbacks import Callbacks, OnMessage, OnSample, OnValidation, StopTraining
from penstock.engine.config import Recipe
from penstock.engine.events import StepMetrics


def steps(
    recipe: Recipe | str | Path,
    *,
    run_dir: str | Path | None = None,
    overrides: Sequence[str] = (),
    from_scratch: bool = False,
    on_validation: OnValidation | None = None,
    on_sample: OnSample | None = None,
    on_message: OnMessage | None = None,
) -> Iterator[StepMetrics]:
    """Train as `penstock.train` does, one StepMetrics after the other.

    Training goes on when the next one is asked for. Whoever leaves the loop, by `break`, an error or control-C, stops
    the run at that step, which is committed. The other callbacks are called in the thread that trains, which is not
    the one that iterates. Raises what `penstock.train` raises.
    """
    reported: SimpleQueue[StepMetrics | BaseException | None] = SimpleQueue()
    wanted = threading.Semaphore(0)
    left = threading.Event()

    def on_step(metrics: StepMetrics) -> None:
        reported.put(metrics)
        wanted.acquire()
        if left.is_set():
            raise StopTraining

    guest = Callbacks(on_step=on_step, on_validation=on_validation, on_sample=on_sample, on_message=on_message)

    def work() -> None:
        end: BaseException | None = None
        try:
            begin(recipe, run_dir=run_dir, overrides=overrides, from_scratch=from_scratch, guest=guest)
        except BaseException as error:
            end = error
        reported.put(end)

    # A program that ends in the middle of the loop does not wait for the step: what was committed stays.
    thread = threading.Thread(target=work, name="training", daemon=True)
    thread.start()
    try:
        while isinstance(item := reported.get(), StepMetrics):
            yield item
            wanted.release()
        if item is not None:
            raise item
    finally:
        left.set()
        guest.stopping = True
        wanted.release()
        thread.join()
