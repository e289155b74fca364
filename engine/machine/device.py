"""The compute device: which one, what of it a run may use, and how it is to compute."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from penstock.engine.config import TrainConfig
from penstock.engine.machine.platforms import gpu_memory
from penstock.engine.machine.precision import BFLOAT16_CAPABILITY
from penstock.storage.files.errors import UserError
from penstock.storage.files.units import bytes_text

CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")
_ALLOC_CONF = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

LEAST_LIMIT_BYTES = 2**30
"""Budgets below this are not enforced: the allocator takes memory in pieces of up to 20 MiB, and cuBLAS takes 32 MiB a
stream, which is much for a test's model and nothing for a real one's."""


def compute_dtype(train: TrainConfig) -> torch.dtype:
    """Dtype of weights and activations in forward and backward, once it is decided."""
    assert train.compute_dtype != "auto"
    return torch.bfloat16 if train.compute_dtype == "bfloat16" else torch.float32


def resolve_device(config: TrainConfig) -> torch.device:
    """The compute device. Raises UserError when CUDA is requested and there is none, or the GPU is too old."""
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise UserError(
            f"train.device: cuda was requested, but torch finds no CUDA device: {why_no_cuda()}; use auto or cpu"
        )
    if config.device == "cpu" or not available:
        return torch.device("cpu")
    # Read once, at the first product of the process; this is 32 MiB per stream, what torch takes on Hopper anyway.
    os.environ.setdefault(CUBLAS_WORKSPACE, _DETERMINISTIC_WORKSPACES[0])
    device = torch.device("cuda", torch.cuda.current_device())
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    reason = too_old(name, capability, torch.cuda.get_arch_list(), config.compute_dtype)
    if reason is not None:
        raise UserError(f"train.device: {reason}")
    return device


def gpus_like(gpu: int) -> list[int]:
    """Numbers of the visible GPUs of the kind of that one."""
    kinds = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return [number for number, kind in enumerate(kinds) if kind == kinds[gpu]]


def why_no_cuda() -> str:
    if torch.version.cuda is None and torch.version.hip is None:
        return f"this torch ({torch.__version__}) is built without CUDA; install one built with CUDA"
    try:
        torch.cuda.init()
    except Exception as error:  # torch raises several types here
        return str(error).partition("\n")[0].rstrip(".")
    if torch.version.hip is not None:
        return "the driver shows no GPU (rocminfo; HIP_VISIBLE_DEVICES)"
    return "the driver shows no GPU (nvidia-smi -L; CUDA_VISIBLE_DEVICES)"


def too_old(name: str, capability: tuple[int, int], arch_list: Sequence[str], compute_dtype: str) -> str | None:
    """Why a GPU of this compute capability cannot train, and what to do; None if it can.

    arch_list: what torch was compiled for, for example sm_80 and compute_90 (torch.cuda.get_arch_list).
    """
    is_at = f"{name} has compute capability {capability[0]}.{capability[1]}"
    # Of sm_80, sm_90a or compute_120 the number.
    built = [
        (int(digits[:-1]), int(digits[-1]))
        for arch in arch_list
        if (digits := re.sub(r"\D", "", arch.partition("_")[2]))
    ]
    if built and capability < min(built):
        oldest = ".".join(map(str, min(built)))
        return f"{is_at}, and this torch ({torch.__version__}) is built for {oldest} and newer; use train.device=cpu"
    if compute_dtype == "bfloat16" and capability < BFLOAT16_CAPABILITY:
        return f"{is_at}, and bfloat16 needs 8.0 (Ampere) or newer; use train.compute_dtype=float32"
    return None


class DeviceSettings(contextlib.ExitStack):
    """Process-wide settings of torch for one run; `restore` undoes them. Use `configure`."""

    message: str | None = None
    """What of the GPU the run may use, in words."""

    def set(self, owner: Any, name: str, value: Any) -> None:
        self.call(lambda new: setattr(owner, name, new), getattr(owner, name), value)

    def call(self, setter: Callable[[Any], Any], before: Any, value: Any) -> None:
        """Call `setter` with `value` now and with `before` at the end."""
        self.callback(setter, before)
        setter(value)

    def restore(self) -> None:
        """Undo everything, last first; a GPU that has failed takes no settings any more."""
        with contextlib.suppress(RuntimeError):
            self.close()


def configure(device: torch.device, gpu_budget_bytes: int, *, deterministic: bool) -> DeviceSettings:
    """Set torch up for a run, before its first allocation on the device.

    On CUDA: the caching allocator gets `gpu_budget_bytes` (at least LEAST_LIMIT_BYTES) and no more, in segments that
    grow, so that nothing is left over between blocks; float32 products are float32, not TF32, and bfloat16 products are
    summed in float32 throughout. `deterministic`: only kernels that give the same bits on every run.

    Raises UserError when the budget exceeds what the GPU has free.
    """
    settings = DeviceSettings()
    try:
        if device.type == "cuda":
            if device.index is None:  # the allocator's limit is one of a GPU with a number
                device = torch.device("cuda", torch.cuda.current_device())
            _limit_memory(settings, device, gpu_budget_bytes)
            matmul = torch.backends.cuda.matmul
            settings.call(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision(), "highest")
            settings.set(matmul, "allow_bf16_reduced_precision_reduction", False)
        if deterministic:
            _be_deterministic(settings)
    except BaseException:
        settings.restore()
        raise
    return settings


def _limit_memory(settings: DeviceSettings, device: torch.device, budget_bytes: int) -> None:
    free, total = gpu_memory(device)
    others = total - free - torch.cuda.memory_reserved(device)
    if budget_bytes > total - others:
        raise UserError(
            f"budgets.gpu: {budget_bytes:,} bytes, but {others:,} of the GPU's {total:,} are used by other processes "
            "and by CUDA itself; lower budgets.gpu, or stop the other programs on this GPU (nvidia-smi)"
        )
    given = any("expandable_segments" in os.environ.get(name, "") for name in _ALLOC_CONF)
    if not given and torch.version.hip is None:  # which torch has for NVIDIA's driver alone
        setter = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # torch >= 2.10
        (setter or torch.cuda.memory._set_allocator_settings)("expandable_segments:True")
    limit = max(budget_bytes, LEAST_LIMIT_BYTES) / total
    before = torch.cuda.get_per_process_memory_fraction(device)
    settings.call(
        lambda fraction: torch.cuda.set_per_process_memory_fraction(fraction, device), before, min(limit, 1.0)
    )
    torch.cuda.reset_peak_memory_stats(device)
    settings.message = (
        f"GPU memory: {bytes_text(budget_bytes)} of {bytes_text(total)} are this run's budget; other processes and "
        f"CUDA itself use {bytes_text(others)}"
    )


def _be_deterministic(settings: DeviceSettings) -> None:
    if os.environ.get(CUBLAS_WORKSPACE) not in _DETERMINISTIC_WORKSPACES:
        os.environ[CUBLAS_WORKSPACE] = _DETERMINISTIC_WORKSPACES[0]
    # Filling what is about to be overwritten costs a pass over memory and finds no mistake of ours.
    settings.set(torch.utils.deterministic, "fill_uninitialized_memory", False)
    settings.set(torch.backends.cudnn, "benchmark", False)
    before = torch.get_deterministic_debug_mode()
    settings.call(torch.set_deterministic_debug_mode, before, "error")
    inductor = torch._inductor.config
    if hasattr(inductor, "deterministic"):  # else kernels are chosen by timing them, and so is the order of their sums
        settings.set(inductor, "deterministic", True)


def memory_use(device: torch.device) -> dict[str, int] | None:
    """Peaks of this run's GPU memory; None without a GPU.

    reserved_bytes is what the allocator held, allocated_bytes what tensors took; the rest was lost to fragmentation.
    """
    if device.type != "cuda":
        return None
    allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return {"allocated_bytes": allocated, "reserved_bytes": reserved, "fragmentation_bytes": reserved - allocated}
