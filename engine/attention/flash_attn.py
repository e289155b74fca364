"""flash-attn 2, 3 and 4, where installed; the protocol is engine/attention/backends.py's.

The packages are imported at the first CUDA problem and never downloaded. Where their versions differ, the arguments
that a function declares decide; what is declared is checked once more on the GPU (engine/attention/select.py).
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from penstock.engine.attention.backends import Gradients, Operands, Problem
from penstock.engine.attention.spans import Geometry
from penstock.engine.attention.torch_cuda import FlashKernel, round_up, segment_lengths, window_limits

NOT_INSTALLED = "is not installed"


@cache
def _module(*names: str) -> Any:
    """The first of the modules that can be imported, or why none can."""
    reason = ""
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            missing = error.name is not None and name.startswith(error.name)
            reason = reason or (NOT_INSTALLED if missing else f"cannot be imported: {error}")
        except Exception as error:  # a package built for another torch, driver or GPU fails in any way
            reason = f"cannot be imported: {type(error).__name__}: {error}"
    return reason


def _arguments(function: Any) -> set[str]:
    """Names that a function or a torch operator declares."""
    default = getattr(function, "default", None)
    if isinstance(default, torch._ops.OpOverload):
        return {argument.name for argument in default._schema.arguments}
    return set(inspect.signature(function).parameters)


class PackagedFlash(FlashKernel):
    """A kernel of a package that may be there."""

    modules: tuple[str, ...]
    """Where it may be, in order."""
    softcap = True

    @property
    def _package(self) -> Any:
        return _module(*self.modules)

    def _missing(self) -> str | None:
        return self._package if isinstance(self._package, str) else self._unknown(self._package)

    def _unknown(self, module: Any) -> str | None:
        """Why this version of the package cannot be used."""
        raise NotImplementedError


class FlashAttention3(PackagedFlash):
    """`flash_attn_3`: Hopper only. Operators are called directly, by the argument names that they declare."""

    name = "flash-attn-3"
    packages = ("flash_attn_3",)
    modules = ("flash_attn_3._C", "flash_attn_interface", "flash_attn_3.flash_attn_interface")
    capabilities = (9,)

    def _unknown(self, module: Any) -> str | None:
        operators = torch.ops.flash_attn_3
        if not (hasattr(operators, "fwd") and hasattr(operators, "bwd")):
            return "registers no operators with torch: too old"
        wanted = {"softmax_scale", "is_causal", "window_size_left", "window_size_right", "softcap", "cu_seqlens_q"}
        if not (wanted <= _arguments(operators.fwd) and wanted | {"dq", "dk", "dv"} <= _arguments(operators.bwd)):
            return "declares operators with unknown arguments"
        return None

    def _limit(self, problem: Problem) -> str | None:
        wide = problem.deterministic and max(self._widths(problem.qk_dim, problem.v_dim)) > 192
        return "has no deterministic backward for heads over 192 wide" if problem.backward and wide else None

    def _widths(self, qk_dim: int, v_dim: int) -> tuple[int, int]:
        qk_width, v_width = round_up(qk_dim, 8), round_up(v_dim, 8)
        if 128 < qk_width <= 192 and 96 < v_width <= 128:
            return qk_width, v_width
        return (max(qk_width, v_width),) * 2

    def _launch(self, x: Operands, geometry: Geometry) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.flash_attn_3.fwd(x.q, x.k, x.v, **_flash_arguments(x, geometry), num_splits=1)
        return out, lse

    def _launch_backward(self, x: Operands, given: Gradients, geometry: Geometry) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (torch.empty_like(t) for t in (x.q, x.k, x.v))
        tensors, options = (given.dout, x.q, x.k, x.v, given.out, given.lse), _flash_arguments(x, geometry)
        options["deterministic"] = torch.are_deterministic_algorithms_enabled()
        torch.ops.flash_attn_3.bwd(*tensors, dq=dq, dk=dk, dv=dv, **options)
        return dq, dk, dv


class FlashAttention4(PackagedFlash):
    """`flash-attn-4`: Hopper and newer, compiled on the machine itself at first use."""

    name = "flash-attn-4"
    packages = ("flash-attn-4", "nvidia-cutlass-dsl")
    modules = ("flash_attn.cute.interface",)
    capabilities = (9, 10, 11, 12)

    def _unknown(self, module: Any) -> str | None:
        forward, backward = getattr(module, "_flash_attn_fwd", None), getattr(module, "_flash_attn_bwd", None)
        if forward is None or backward is None:
            return "does not have the functions that keep the log-sum-exp"
        wanted = {"softmax_scale", "causal", "softcap", "window_size_left", "window_size_right", "cu_seqlens_q"}
        if not (wanted | {"return_lse"} <= _arguments(forward) and wanted <= _arguments(backward)):
            return "declares functions with unknown arguments"
        return None

    def _limit(self, problem: Problem) -> str | None:
        deterministic = not problem.deterministic or "deterministic" in _arguments(self._package._flash_attn_bwd)
        return "has no deterministic backward" if problem.backward and not deterministic else None

    def _widths(self, qk_dim: int, v_dim: int) -> tuple[int, int]:
        return round_up(qk_dim, 8), round_up(v_dim, 8)

    def _options(self, function: Callable[..., Any], x: Operands, geometry: Geometry) -> dict[str, Any]:
        options = _flash_arguments(x, geometry)
        options["causal"] = options.pop("is_causal")
        for side in ("window_size_left", "window_size_right"):
            options[side] = None if options[side] < 0 else options[side]
        known = _arguments(function)
        return {name: value for name, value in options.items() if name in known}

    def _launch(self, x: Operands, geometry: Geometry) -> tuple[Tensor, Tensor]:
        forward = self._package._flash_attn_fwd
        options = self._options(forward, x, geometry)
        if not x.call.softcap:
            options["softcap"] = None
        out, lse, *_ = forward(x.q, x.k, x.v, **options, return_lse=True)
        return out, lse

    def _launch_backward(self, x: Operands, given: Gradients, geometry: Geometry) -> tuple[Tensor, Tensor, Tensor]:
        backward = self._package._flash_attn_bwd
        options = self._options(backward, x, geometry)
        if torch.are_deterministic_algorithms_enabled():
            options["deterministic"] = True
        dq, dk, dv, *_ = backward(x.q, x.k, x.v, given.out, given.dout, given.lse, **options)
        return dq, dk, dv


class FlashAttention2(PackagedFlash):
    """`flash-attn` 2.7 and newer."""

    name = "flash-attn-2"
    packages = ("flash-attn",)
    modules = ("flash_attn.flash_attn_interface",)

    def _unknown(self, module: Any) -> str | None:
        forward = getattr(module, "_wrapped_flash_attn_forward", None)
        if forward is None or "window_size_left" not in _arguments(forward):
            return "is too old: 2.7 or newer is needed"
        return None

    def _launch(self, x: Operands, geometry: Geometry) -> tuple[Tensor, Tensor]:
        module = self._package
        forward = module._wrapped_flash_attn_varlen_forward if geometry.cu_q else module._wrapped_flash_attn_forward
        out, lse, *_ = forward(x.q, x.k, x.v, **_flash2_arguments(x, geometry), return_softmax=False)
        return out, lse

    def _launch_backward(self, x: Operands, given: Gradients, geometry: Geometry) -> tuple[Tensor, Tensor, Tensor]:
        module = self._package
        tensors = (given.dout, x.q, x.k, x.v, given.out, given.lse)
        grads = [torch.empty_like(t) for t in (x.q, x.k, x.v)]
        backward = module._wrapped_flash_attn_varlen_backward if geometry.cu_q else module._wrapped_flash_attn_backward
        deterministic = torch.are_deterministic_algorithms_enabled()
        backward(*tensors, *grads, **_flash2_arguments(x, geometry), deterministic=deterministic)
        return grads[0], grads[1], grads[2]


def _flash_arguments(x: Operands, geometry: Geometry) -> dict[str, Any]:
    """As flash-attn 3 names them; segments only where there are some."""
    left, right = window_limits(geometry)
    options: dict[str, Any] = segment_lengths(geometry, x.q.device) if geometry.cu_q else {}
    options |= {"softmax_scale": x.call.softmax_scale, "is_causal": geometry.causal, "softcap": x.call.softcap or 0.0}
    return options | {"window_size_left": left, "window_size_right": right}


def _flash2_arguments(x: Operands, geometry: Geometry) -> dict[str, Any]:
    options = _flash_arguments(x, geometry)
    options["causal"] = options.pop("is_causal")
    return {**options, "dropout_p": 0.0, "alibi_slopes": None}
