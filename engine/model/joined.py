"""Linear modules that read one tensor, and whose weights lie one behind the other, as one product: queries, keys and
values, or the two halves of a gated MLP. Their weights are the rows of one matrix, so nothing is copied, and one larger
kernel takes the place of several, forward and for both gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from penstock.engine.model import skeleton


def sharing_copy(layer: nn.Module) -> nn.Module:
    """A copy of `layer` with the same parameters and buffers."""
    shared = [*layer.parameters(), *layer.buffers()]
    return copy.deepcopy(layer, {id(tensor): tensor for tensor in shared})


def side_by_side(tensors: Sequence[Tensor]) -> Tensor:
    """Matrices [rows, in] that lie one behind the other in one flat buffer, as one [sum of rows, in]; no copy."""
    first = tensors[0]
    offset = first.storage_offset()
    for tensor in tensors:
        lies = tensor.untyped_storage()._cdata == first.untyped_storage()._cdata and tensor.storage_offset() == offset
        assert lies, "matrices that are joined do not lie one behind the other"
        offset += tensor.numel()
    if len(tensors) == 1:
        return first
    rows, width = sum(tensor.shape[0] for tensor in tensors), first.shape[1]
    return first.as_strided((rows, width), (width, 1), first.storage_offset())


class _Rest:
    """The outputs of one product that its modules have yet to hand on."""

    def __init__(self) -> None:
        self.outputs: list[Tensor] = []


class _Part(nn.Module):
    """Stands where a linear module of a product stood, and hands on its own columns of the output. The one that is
    called first has the `whole` product and computes the columns of all, `sizes` of each."""

    def __init__(
        self, linear: nn.Linear, rest: _Rest, whole: nn.Linear | None = None, sizes: Sequence[int] = ()
    ) -> None:
        super().__init__()
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)
        self.rest, self.whole, self.sizes = rest, whole, list(sizes)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        outputs = self.rest.outputs if self.whole is None else self.whole(x).split(self.sizes, dim=-1)
        y: Tensor
        y, *self.rest.outputs = outputs
        return y


class JoinedTwin:
    """A layer in which groups of linear modules are one product each, with the parameters and buffers of `layer`."""

    def __init__(self, layer: nn.Module, groups: Sequence[Sequence[str]]) -> None:
        """`groups`: names of linear modules in the order in which they are called and in which their weights lie."""
        self.module = sharing_copy(layer) if groups else layer
        self.members: dict[str, Sequence[str]] = {}
        """The linear module of each product -> those whose weights are its rows."""
        self._bound: list[tuple[nn.Linear, Tensor, Sequence[str]]] = []
        """Each product's module, its weight while there is none, and the modules whose weights are its rows."""
        for names in groups:
            modules = map(self.module.get_submodule, names)
            linears = [module for module in modules if isinstance(module, nn.Linear)]
            like, sizes = linears[0].weight, [linear.out_features for linear in linears]
            has_bias = linears[0].bias is not None
            whole = nn.Linear(linears[0].in_features, sum(sizes), bias=has_bias, device="meta")
            for key, parameter in list(whole.named_parameters()):
                empty = skeleton.placeholder(parameter, like.device, like.dtype, trained=like.requires_grad)
                setattr(whole, key, empty)
            self._bound.append((whole, whole.weight.data, names))
            rest = _Rest()
            for name, linear in zip(names, linears, strict=True):
                first = name == names[0]
                self.module.set_submodule(name, _Part(linear, rest, whole if first else None, sizes))
            self.members[f"{names[0]}.whole"] = names

    def bind(self, find: Callable[[str], Tensor]) -> None:
        """Point the products at the weights of their members; `find` gives a parameter of the layer by its name."""
        for whole, _, names in self._bound:
            whole.weight.data = side_by_side([find(f"{name}.weight") for name in names])
            if whole.bias is not None:  # vectors, between which there are gaps
                whole.bias.data = torch.cat([find(f"{name}.bias") for name in names])

    def unbind(self) -> None:
        for whole, empty, _ in self._bound:
            whole.weight.data = empty


def readers_of_one(
    layer: nn.Module, names: Sequence[str], run: Callable[[nn.Module], Tensor]
) -> tuple[tuple[str, ...], ...]:
    """Those of the layer's linear modules `names`, each of which is called once, that are given the very same tensor,
    in the order of their calls. `run(layer)` is the layer's output."""
    calls = inputs_of(layer, names, run)
    readers: dict[int, list[str]] = {}
    for name, x in calls:
        readers.setdefault(id(x), []).append(name)
    return tuple(tuple(group) for group in readers.values() if len(group) > 1)


def inputs_of(layer: nn.Module, names: Iterable[str], run: Callable[[nn.Module], Tensor]) -> list[tuple[str, Tensor]]:
    """Each call of the layer's modules `names` while it runs, in order: the module's name and its input."""
    calls: list[tuple[str, Tensor]] = []
    hooks = [
        layer.get_submodule(name).register_forward_pre_hook(lambda _, args, name=name: calls.append((name, args[0])))
        for name in names
    ]
    with torch.no_grad():
        run(layer)
    for hook in hooks:
        hook.remove()
    return calls
