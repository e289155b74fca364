"""Parts of layers as blocks of their own (engine/branches): the stand-in for one in its layer, and what computes it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.engine.branches import experts
from penstock.engine.branches.base import Sent
from penstock.engine.model import skeleton
from penstock.engine.model.groups import uncut
from penstock.engine.model.skeleton import Tensors
from penstock.engine.model.spec import BlockSpec, ModelSpec
from penstock.engine.model.sums import GradientSums


class Outbox:
    """Where the copies of a layer leave what they have handed to their branch; a copy of it is itself."""

    def __init__(self) -> None:
        self.sent: tuple[Tensor, ...] = ()

    def __deepcopy__(self, memo: Any) -> Outbox:
        return self

    def take(self) -> tuple[Tensor, ...]:
        sent, self.sent = self.sent, ()
        return sent


class Sender(nn.Module):
    """Stands for a branch in its layer."""

    def __init__(self, outbox: Outbox) -> None:
        super().__init__()
        self.outbox = outbox

    def forward(self, *sent: Tensor) -> Tensor:
        self.outbox.sent = sent
        return torch.zeros_like(sent[0])


class BranchRunner:
    """The branches of layers; see ModelRunner for `weights` and `grads`. Tensors that are sent are [n, width]."""

    def __init__(
        self, spec: ModelSpec, layers: nn.ModuleList, prefix: str, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        """`layers`: those of the model, on the meta device; `prefix`: their name in it."""
        self._spec, self._dtype = spec, dtype
        self._blocks: list[list[BlockSpec]] = [[] for _ in layers]
        """Per layer its branches: none, one, or one for each group of its experts."""
        for block in spec.blocks:
            if block.branch_of is not None:
                self._blocks[block.branch_of].append(block)
        self._prefixes = [f"{prefix}.{index}.{name}." for index, name in enumerate(spec.branches)]
        self._names: dict[str, dict[str, str]] = {}
        """Block -> parameter of the branch's module -> its name in the block's buffers."""
        self._templates: dict[int, nn.Module] = {}
        whole = uncut(spec)
        for index in sorted({spec.structures[i] for i, name in enumerate(spec.branches) if name is not None}):
            module = copy.deepcopy(layers[index].get_submodule(str(spec.branches[index])))
            skeleton.empty(module, self._prefixes[index], whole, device, dtype)
            self._templates[index] = module
            if (group := self._blocks[index][0].group) is not None:
                experts.shrink_to(module, group[1] - group[0])

    def groups(self, index: int) -> int:
        """Branches that layer `index` has."""
        return len(self._blocks[index])

    def forward(self, index: int, weights: Tensors, x: Tensor, sent: Sequence[Tensor], group: int = 0) -> Tensor:
        """x [n, hidden], what layer `index` makes without its branch, with the branch's output added; of groups of
        experts the output of one."""
        with torch.no_grad():
            result = self._run(index, group, self._bound(index, group, weights), self._typed(sent))
            return x.clone() if result is None else result.add_(x)

    def backward(
        self,
        index: int,
        weights: Tensors,
        sent: Sequence[Tensor],
        dy: Tensor,
        grads: Tensors,
        *,
        group: int = 0,
        dsent: Sequence[Tensor] = (),
    ) -> list[Tensor]:
        """Gradients of what was `sent`, of those that have any, for dy [n, hidden], in float32 where they travel so,
        added to those `dsent` of the groups behind; adds the parameters' to `grads`."""
        module, names = self._bound(index, group, weights), self._names[self._blocks[index][group].name]
        sums = grads if isinstance(grads, GradientSums) else GradientSums(grads)
        given = [tensor.detach() for tensor in self._typed(sent)]
        wanted = [tensor.requires_grad_() for tensor in self.with_gradient(given)]
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        with torch.enable_grad():
            y = self._run(index, group, module, given)
        if y is None:  # none of the chunk's tokens goes to this group
            result: Sequence[Tensor] = [torch.zeros_like(tensor) for tensor in wanted]
        else:
            result = torch.autograd.grad(y, [*wanted, *trained.values()], dy)
            for name, gradient in zip(trained, result[len(wanted) :], strict=True):
                sums.add(names[name], gradient)
        kinds = [each for each in self._spec.sent if each.has_gradient]
        own = [self._travels(tensor, each) for tensor, each in zip(result, kinds, strict=False)]
        return [mine + other for mine, other in zip(own, dsent, strict=True)] if dsent else own

    def with_gradient(self, sent: Sequence[Tensor]) -> list[Tensor]:
        """Those of what is sent that have a gradient."""
        return [tensor for tensor, each in zip(sent, self._spec.sent, strict=True) if each.has_gradient]

    def _run(self, index: int, group: int, module: nn.Module, given: Sequence[Tensor]) -> Tensor | None:
        """The branch's output; None where that is a group that nothing was sent to."""
        rows = self._blocks[index][group].group
        result: Tensor | None = module(*given) if rows is None else experts.run_group(module, rows, *given)
        return result

    def _typed(self, sent: Sequence[Tensor]) -> list[Tensor]:
        """As layers send it, whatever it travelled as."""
        given = zip(sent, self._spec.sent, strict=True)
        return [t.view(-1, e.width).to(self._dtype if e.has_gradient else torch.int64) for t, e in given]

    def _travels(self, gradient: Tensor, sent: Sent) -> Tensor:
        """A gradient in the dtype in which it goes from block to block, or in a wider one that it is computed in."""
        return gradient if sent.dtype == "compute" else gradient.to(torch.promote_types(gradient.dtype, torch.float32))

    def _bound(self, index: int, group: int, weights: Tensors) -> nn.Module:
        module, block = self._templates[self._spec.structures[index]], self._blocks[index][group]
        if block.name not in self._names:
            params = self._spec.params_of(block)
            whole = {param.name: param.name if param.rows is None else param.rows.of for param in params}
            self._names[block.name] = {of.removeprefix(self._prefixes[index]): name for name, of in whole.items()}
        for name, parameter in module.named_parameters():
            parameter.data = weights[self._names[block.name][name]]
        return module
