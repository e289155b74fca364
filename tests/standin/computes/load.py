"""Loads the kernels that compute at the end of torch's import: an entry point of torch.backends (../build.sh)."""

from __future__ import annotations

import ctypes
import os
import sys


def load() -> None:
    """Register the kernels, in every process that ../build.sh's `compute` starts, and in their children."""
    import torch

    from computes import emulator, triton_kernels

    torch.ops.load_library(os.environ["COMPUTES_LIBRARY"])
    triton_kernels.install()
    wanted = os.environ.get("STANDIN_PACKAGES", "").split(",")
    sys.path += [str(folder) for folder in emulator.PACKAGES if folder.name in wanted]
    runtime = ctypes.CDLL(None)

    def sleep(cycles: int) -> None:
        """As on a card whose clock is 1 GHz."""
        stream = torch.cuda.current_stream().cuda_stream
        runtime.standin_sleep(ctypes.c_void_p(stream), ctypes.c_long(cycles // 1000))

    torch.cuda._sleep = sleep
