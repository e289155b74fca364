"""Cross entropy and its gradient, block of rows by block of rows, in the memory of the logits themselves.

A chunk of 16,384 tokens has 5 GB of logits in bfloat16 at 152,000 vocabulary entries. So the head makes logits for as
many rows as a limit allows (`rows_at_once`), as each such piece adds to the gradient of the output matrix; float32
exists only for a few rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.engine.objectives.statistics import ENTROPY, MEAN_LOGIT

WORK_SHARE = 8
"""One part in so many of the memory for logits holds rows in float32."""

_MATMULS = ("Mm", "Addmm", "Bmm", "Baddbmm", "Linear", "MkldnnLinear")
_VIEWS = ("Select", "UnsafeView", "View", "Slice", "Alias", "ReshapeAlias", "Squeeze", "Unsqueeze")


@dataclass(frozen=True, slots=True)
class LogitsCost:
    """What a row of logits takes, found by making some."""

    row_bytes: int
    """Logits, what autograd keeps of their size, and their gradient."""
    in_place: bool
    """Whether the gradient may be written over the logits, because backward does not read them."""

    @staticmethod
    def of(make: Callable[[], Tensor], parameters: Iterable[Tensor]) -> LogitsCost:
        """The cost of the logits [rows, vocab] that `make` returns, made with gradients enabled from `parameters`."""
        saved: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            logits = make()
        rows, nbytes = logits.shape[0], logits.numel() * logits.element_size()
        in_place = logits.untyped_storage().data_ptr() not in saved
        for tensor in (*parameters, logits):
            saved.pop(tensor.untyped_storage().data_ptr(), None)
        total = nbytes + sum(size for size in saved.values() if size >= nbytes // 2)
        if not in_place:
            total += nbytes
        if not _ends_in_matmul(logits):
            total += 2 * nbytes  # elementwise work on logits passes a gradient on, and on
        return LogitsCost(-(-total // rows), in_place)


def _ends_in_matmul(logits: Tensor) -> bool:
    node: Any = logits.grad_fn
    while node is not None and node.name().partition("Backward")[0] in _VIEWS:
        node = node.next_functions[0][0]
    return node is not None and node.name().partition("Backward")[0] in _MATMULS


def rows_at_once(logits_bytes: int, cost: LogitsCost) -> int:
    """Rows of logits that exist together so that they and all that goes with them take `logits_bytes`; at least one."""
    return max(1, (logits_bytes - logits_bytes // WORK_SHARE) // cost.row_bytes)


def even_pieces(tensor: Tensor, most: int) -> Sequence[Tensor]:
    """`tensor` [n, ...] cut along its rows into as few pieces of at most `most` as there can be, alike within one row:
    a rest of a few rows would cost kernels and allocator nearly as much as a whole one."""
    return tensor.tensor_split(max(1, -(-tensor.shape[0] // most)))


class CrossEntropy:
    """Cross entropy over row blocks; compiled into one kernel per block, or eager."""

    def __init__(self, *, compile: bool) -> None:
        self._block: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor] = _block_eager_
        if compile:
            self._block = torch.compile(_block_, dynamic=True)  # not fullgraph: see engine/optim/adamw.py

    @torch.no_grad()
    def __call__(
        self, logits: Tensor, labels: Tensor, weights: Tensor, scale: float, work_bytes: int, z_loss: float = 0.0
    ) -> Tensor:
        """Sum over rows of weight x cross entropy (float64, 0-dim) of logits [n, vocab]; leaves in `logits` the
        gradient of scale x the sum over rows of weight x (cross entropy + z_loss x logsumexp(row)^2).

        labels: int64 [n]; weights: float64 [n]. `work_bytes` of rows are in float32 at a time, at least one (float64
        stays). The second term is PaLM's (arXiv 2204.02311, section 5); what is returned is without it.
        """
        dtype = torch.promote_types(logits.dtype, torch.float32)
        factor = torch.full((), scale, dtype=dtype, device=logits.device)
        z = torch.full((), z_loss, dtype=dtype, device=logits.device) if z_loss else None
        loss = torch.zeros((), dtype=torch.float64, device=logits.device)
        step = max(1, work_bytes // (logits.shape[1] * dtype.itemsize))
        for rows, targets, shares in zip(*(even_pieces(t, step) for t in (logits, labels, weights)), strict=True):
            loss += self._block(rows, targets, shares.to(dtype)[:, None], factor, z)
        return loss


class NegatedValue:
    """In the place of a cross entropy the negative of a reward model's value."""

    def __call__(
        self, values: Tensor, labels: Tensor, weights: Tensor, scale: float, work_bytes: int, z_loss: float = 0.0
    ) -> Tensor:
        """Minus the sum over rows of weight x value (float64, 0-dim) of `values` [n, 1]; leaves in them the gradient
        of scale x that. The other arguments are those of a CrossEntropy, and none counts."""
        loss = -(weights * values[:, 0]).sum(dtype=torch.float64)
        values.copy_((-scale * weights)[:, None])
        return loss


def log_probabilities_(logits: Tensor, labels: Tensor, work_bytes: int, statistics: Sequence[str] = ()) -> Tensor:
    """Of each row of logits [n, vocab] the log-probability of its label and `statistics`, by their names in
    objectives/statistics.py: float64 [1 + statistics, n]. Rows are taken to float32 as by CrossEntropy; `logits` that
    are float32 already hold something else behind this."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    step = max(1, work_bytes // (logits.shape[1] * dtype.itemsize))
    result = []
    for rows, targets in zip(even_pieces(logits, step), even_pieces(labels, step), strict=True):
        work = rows.to(dtype)
        total = work.logsumexp(dim=-1)
        found = {"": work.gather(1, targets[:, None])[:, 0].double() - total.double()}
        if MEAN_LOGIT in statistics:
            found[MEAN_LOGIT] = work.mean(dim=-1).double()
        if ENTROPY in statistics:
            found[ENTROPY] = _entropy_(work, total).double()
        result.append(torch.stack([found[name] for name in ("", *statistics)]))
    return torch.cat(result, dim=1)


def _entropy_(work: Tensor, total: Tensor) -> Tensor:
    """Of rows [n, vocab] whose logsumexp is `total` [n]; as `logsumexp`, with one copy of the rows. Logits of minus
    infinity add nothing."""
    work.sub_(total[:, None]).clamp_(min=torch.finfo(work.dtype).min)
    return -work.exp().mul_(work).sum(dim=-1)


def _block_(logits: Tensor, labels: Tensor, weights: Tensor, factor: Tensor, z: Tensor | None) -> Tensor:
    """One block, for torch.compile: two passes over the logits, nothing else of their size. weights: [n, 1]."""
    x, scale = logits.to(factor.dtype), weights * factor
    most = x.amax(dim=-1, keepdim=True)
    x = x - most
    total = x.exp().sum(dim=-1, keepdim=True)
    target = x.gather(1, labels[:, None])
    hit = torch.arange(logits.shape[1], device=logits.device)[None, :] == labels[:, None]
    slope = scale if z is None else scale * (1 + 2 * z * (total.log() + most))
    gradient = x.exp() * (slope / total) - torch.where(hit, scale, torch.zeros_like(scale))
    logits.copy_(gradient)
    return (weights * (total.log() - target)).sum(dtype=torch.float64)


def _block_eager_(logits: Tensor, labels: Tensor, weights: Tensor, factor: Tensor, z: Tensor | None) -> Tensor:
    """One block in place throughout: one copy of the rows in float32 is the largest thing that ever exists here."""
    work, scale = logits.to(factor.dtype, copy=True), weights * factor
    most = work.amax(dim=-1, keepdim=True)
    work.sub_(most)
    index = labels[:, None]
    target = work.gather(1, index)
    total = work.exp_().sum(dim=-1, keepdim=True)
    slope = scale if z is None else scale * (1 + 2 * z * (total.log() + most))
    work.mul_(slope / total)
    work.scatter_(1, index, work.gather(1, index) - scale)
    logits.copy_(work)
    return (weights * (total.log() - target)).sum(dtype=torch.float64)
