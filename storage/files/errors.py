"""Errors that are the user's to fix, raised by every package and shown as one message by the command line."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """Bad input: a recipe, model folder, data set, disk or budget that cannot be used. The message says what is wrong,
    where, and how to fix it; the command line prints it without a traceback and exits with code 2."""


class BudgetError(UserError):
    """A tier's budget cannot hold what is needed; the message names both figures in bytes. The attributes are set where
    a plan did not fit."""

    def __init__(self, message: str, *, tier: str | None = None, need_bytes: int = 0, budget_bytes: int = 0) -> None:
        super().__init__(message)
        self.tier, self.need_bytes, self.budget_bytes = tier, need_bytes, budget_bytes


def ensure(ok: object, what: str) -> None:
    """An `assert` on which the state on disk rests: AssertionError, also where Python runs with -O."""
    if not ok:
        raise AssertionError(what)


@contextmanager
def refused(what: str, *, with_type: bool = True) -> Iterator[None]:
    """What fails inside the block (of a library, say) is a UserError: `what`, its type and why. UserError passes, and
    so does what `not_ours` knows: the machine failed, not what was tried."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if not_ours(error) is not None:
            raise
        raise UserError(f"{what}: {type(error).__name__}: {error}" if with_type else f"{what}: {error}") from error


_GPU = re.compile(
    r"CUDA error|CUDA driver error|CUBLAS_STATUS_|CUDNN_STATUS_|cuDNN error|Triton Error \[CUDA\]|cudaError|CUFILE_"
)


def gpu_failure(error: BaseException) -> str | None:
    """What a GPU's driver or its libraries say in `error`, in a line; None where they raised something else."""
    of_torch = type(error).__name__ == "AcceleratorError"
    if not of_torch and not (isinstance(error, RuntimeError) and _GPU.search(str(error))):
        return None
    return str(error).strip().partition("\n")[0]


def not_ours(error: BaseException) -> UserError | None:
    """`error` as a message for the user where the machine is what failed: a GPU, or what is used up; else None."""
    said = gpu_failure(error)
    if said is None:
        return used_up(error)
    return UserError(
        f"the GPU failed: {said}. What is on disk is as it was; if the GPU is gone or hangs (nvidia-smi; Xid in the "
        "kernel's log), restart the machine or use another one"
    )


_NO_MEMORY = re.compile(r"an't allocate memory|annot allocate memory|failed to map segment|std::bad_alloc")


def used_up(error: BaseException) -> UserError | None:
    """`error` as a message for the user where this process has no memory, threads or open files left; else None."""
    code = error.errno if isinstance(error, OSError) else None
    if code in (errno.EMFILE, errno.ENFILE):
        return UserError("the limit on open files is reached; raise it (ulimit -n)")
    if isinstance(error, RuntimeError) and str(error).startswith("can't start new thread"):
        return UserError(
            "no more threads can be started; raise the limit on threads (ulimit -u, pids.max) or on memory"
        )
    said = isinstance(error, (RuntimeError, ImportError)) and _NO_MEMORY.search(str(error))
    if said or isinstance(error, MemoryError) or code == errno.ENOMEM:
        return UserError("out of memory; use smaller sizes, or stop other programs")
    return None
