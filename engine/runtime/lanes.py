"""What a run's lanes need before anything is compiled or timed on them: the device's settings, cores, threads.

That happens on the threads and with the settings of the run: torch compiles again where a thread count, a precision
flag or a setting of its own differs, and cuDNN's plans are a thread's own.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections import deque

import torch

from penstock.engine.machine.affinity import Placement
from penstock.engine.machine.device import DeviceSettings, configure
from penstock.engine.machine.platforms import usable_cpus
from penstock.engine.runtime.executor import Executor

IN_FLIGHT = {"nvme_read": 3, "nvme_write": 3}
"""Ops that a disk lane may have under way at once on each drive."""

RECOMPILE_LIMIT = 256
"""torch.compile counts all layer structures, chunk lengths and grad modes of one class together."""

SWITCH_INTERVAL_S = 2e-4
"""How long Python code may keep the interpreter from a lane that has a kernel to launch. A step's schedule is built in
Python beside them, and with Python's own 5 ms each launch could wait that long."""


class Lanes:
    """The executor of a run, with the process's settings for as long as it lives. Close it."""

    def __init__(self, settings: DeviceSettings, executor: Executor, placement: Placement | None) -> None:
        self.settings, self.executor, self.placement = settings, executor, placement
        self.fallbacks = EagerFallbacks()
        self.fallbacks.begin()

    @staticmethod
    def open(
        device: torch.device,
        gpu_budget_bytes: int,
        *,
        compiled: bool = False,
        deterministic: bool = False,
        num_drives: int = 1,
        placement: Placement | None = None,
        ranks: int = 1,
    ) -> Lanes:
        """Set torch up (see engine.machine.device.configure, whose errors these are) and start the lanes' threads.
        `compiled`: layers will be. `placement`: which cores the lanes have; None leaves them all of the process's.
        `ranks`: processes of the run, which share the cores."""
        settings = configure(device, gpu_budget_bytes, deterministic=deterministic)
        try:
            # Of a container that sees more CPUs than it may use, or shared with other ranks.
            if (cpus := max(1, usable_cpus() // ranks)) < torch.get_num_threads():
                settings.call(torch.set_num_threads, torch.get_num_threads(), cpus)
            settings.call(sys.setswitchinterval, sys.getswitchinterval(), SWITCH_INTERVAL_S)
            if compiled:
                _set_up_compilation(settings, device)
            in_flight = {lane: count * num_drives for lane, count in IN_FLIGHT.items()}

            def on_start(lane: str) -> None:
                if placement is not None:
                    placement.enter_lane(lane)
                # A backward runs on the lane that asks for it: on CUDA autograd would hand it to a thread of its own,
                # with cores, settings of torch, cuBLAS workspace and cuDNN plans of its own.
                torch.autograd.set_multithreading_enabled(False)

            return Lanes(settings, Executor(None, device, in_flight, on_start), placement)
        except BaseException:
            settings.restore()
            raise

    def close(self) -> None:
        self.executor.close()
        self.fallbacks.end()
        self.settings.restore()


def _set_up_compilation(settings: DeviceSettings, device: torch.device) -> None:
    """torch.compile's settings; importing what they belong to takes a second."""
    import torch._inductor.async_compile as workers

    dynamo, functorch = torch._dynamo.config, torch._functorch.config
    settings.set(dynamo, "recompile_limit", max(dynamo.recompile_limit, RECOMPILE_LIMIT))
    # The attention call splits a layer in two, not, with each function around it, in four.
    if hasattr(dynamo, "nested_graph_breaks"):
        settings.set(dynamo, "nested_graph_breaks", True)
    # Nothing to change: what the loss over few rows of a large vocabulary is compiled to; float32 that is float32.
    warnings.filterwarnings("ignore", message=r"\s*Online softmax is disabled on the fly")
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
    # A backward is compiled with its forward, not where it first runs.
    settings.set(functorch, "force_non_lazy_backward_lowering", True)
    if device.type == "cuda":
        # Inductor's worker processes inherit the cores of whoever compiles first, and a lane has few.
        workers.maybe_warm_pool()


class EagerFallbacks(logging.Handler):
    """Notes layers that run eagerly since torch.compile gave them up, once each: torch says so in its log only."""

    _LOGGER = "torch._dynamo.convert_frame"

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._noted, self._reported = deque[str](), set[str]()

    def begin(self) -> None:
        logging.getLogger(self._LOGGER).addHandler(self)

    def end(self) -> None:
        logging.getLogger(self._LOGGER).removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Look at one of torch's warnings, on whichever thread compiles."""
        if "recompile_limit" not in record.getMessage() or not isinstance(record.args, tuple) or len(record.args) < 3:
            return
        what = str(record.args[2])
        if what not in self._reported:
            self._reported.add(what)
            self._noted.append(
                f"torch.compile has given up on {what} after compiling it {record.args[1]} times: it runs eagerly "
                "from now on, slower than planned; chunks of equal length (train.chunk_tokens) need fewer compilations"
            )

    def take(self) -> list[str]:
        """A sentence for people on each that was noted since the last call."""
        return [self._noted.popleft() for _ in range(len(self._noted))]
