"""The packages whose kernels transformers takes for recurrent layers where they are installed: flash-linear-attention,
mamba-ssm, causal-conv1d.

It takes them on every device, but they run on a GPU only: what is looked at on the CPU or without data (engine/model)
takes transformers' own Python version.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.activations import XIELUActivation


def keep_to_gpus(model: nn.Module) -> None:
    """From now on the functions that the layers of `model` call are a package's on a GPU only; xIELU is transformers'
    own everywhere, as its kernel is of CUDA alone and the self-check does not see it."""
    for part in model.modules():
        if isinstance(part, XIELUActivation):
            part._xielu_cuda_obj = None
    for module in {sys.modules[type(part).__module__] for part in model.modules()}:
        for name, function in list(vars(module).items()):
            if inspect.isfunction(function) and _of_package(function):
                setattr(module, name, _by_device(function))


def _of_package(function: Callable[..., Any]) -> bool:
    """Whether it is transformers' choice between a package's function and its own, and chose the first."""
    names = function.__code__.co_freevars
    return "is_new_implementation" in names and bool(
        inspect.getclosurevars(function).nonlocals["is_new_implementation"]
    )


def _by_device(function: Callable[..., Any]) -> Callable[..., Any]:
    own: Callable[..., Any] = inspect.unwrap(function)
    takes = inspect.signature(own).parameters

    @functools.wraps(own)
    def run(*args: Any, **kwargs: Any) -> Any:
        given = (each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor))
        if next(given).device.type == "cuda":
            return function(*args, **kwargs)
        return own(*args, **{name: value for name, value in kwargs.items() if name in takes})

    return run
