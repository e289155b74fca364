"""Which matrices are never decayed: biases and the factors of norms, found by running the model."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from penstock.engine.attention import chunk as attention

_TOKENS = 12
_ADDS = ("add", "add_", "sub", "sub_")
_SUMMANDS = {"addmm": 0, "baddbmm": 0, "convolution": 2}
"""Operations that multiply -> which of their operands is added to the product."""
_SCALE = 3.0
_TOLERANCE = 1e-2


def undecayed_matrices(model: PreTrainedModel, attend: attention.Handler) -> frozenset[str]:
    """Of the matrices of a (small) model on the CPU the names of biases, which are added to something of the tokens,
    and of norms', whose output does not change with the scale of their input. `attend` stands in for attention."""
    matrices: dict[str, Tensor] = {
        name: parameter for name, parameter in model.named_parameters() if parameter.ndim > 1
    }
    owners = {
        module: f"{name}." for name, module in model.named_modules()
        if not isinstance(module, nn.Linear | nn.Embedding) and not any(True for _ in module.children())
        and any(parameter.ndim > 1 for parameter in module.parameters())
    }  # fmt: skip
    norms: set[str] = set()

    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if args and isinstance(args[0], Tensor) and args[0].is_floating_point() and isinstance(output, Tensor):
            scaled, nothing = (module.forward(factor * args[0], *args[1:], **kwargs) for factor in (_SCALE, 0.0))
            if (scaled - output).norm() < _TOLERANCE * (output - nothing).norm():
                norms.add(owners[module])

    positions = torch.arange(_TOKENS)[None]
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    kwargs = {"position_ids": positions} if takes_positions else {}
    summands = _Summands(matrices)
    with ExitStack() as hooks, torch.no_grad(), attention.use(attend), summands:
        for module in owners:
            hooks.enter_context(module.register_forward_hook(look, with_kwargs=True))
        model(input_ids=positions % 7 + 3, use_cache=False, **kwargs)
    return frozenset(summands.found | {name for name in matrices if name.rpartition(".")[0] + "." in norms})


class _Summands(TorchDispatchMode):
    """Sees which parameters, or what is made of parameters alone, are added to something else."""

    def __init__(self, parameters: dict[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[str] = set()
        self._names = {_storage(parameter): {name} for name, parameter in parameters.items()}
        self._held: list[Any] = [parameters]  # another tensor might else come to lie where one lay

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        operands = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if _is_float(leaf)]
        made_of = [self._names.get(_storage(operand), set()) for operand in operands]
        if name in _SUMMANDS and len(args) > _SUMMANDS[name] and _is_float(args[_SUMMANDS[name]]):
            self.found |= self._names.get(_storage(args[_SUMMANDS[name]]), set())
        elif operands and all(made_of):
            if name != "embedding":  # a table's rows are of the tokens
                self._held.append(output)
                for tensor in filter(_is_float, pytree.tree_leaves(output)):
                    self._names.setdefault(_storage(tensor), set()).update(*made_of)
        elif name in _ADDS:
            self.found.update(*made_of)
        return output


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel() > 0


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
