"""AdamW on flat fp32 state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.engine.config import TrainConfig
from penstock.engine.optim.base import Mode, UpdateRange
from penstock.engine.optim.lr import on_device

PIECE_NUMEL = {"cpu": 1 << 24, "cuda": 1 << 18}
"""Elements updated at once where it is not compiled, which bounds two float32 copies of the gradient: 128 MiB, 2
MiB."""


@dataclass(frozen=True, slots=True)
class Scalars:
    """The scalars of one AdamW step on the state's device, of decayed weights and of others. lr, beta1, beta2, eps, 1 /
    (1 - beta1^step), 1 / (1 - beta2^step), clip, and 1 - lr * weight_decay or 1."""

    step: int
    decayed: Tensor
    undecayed: Tensor
    host: tuple[tuple[float, ...], tuple[float, ...]]
    """The same two as floats."""


def adamw(master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, gradient: Tensor, weights: Tensor, s: Tensor) -> None:
    """One AdamW step in place (Loshchilov and Hutter, arXiv 1711.05101, decoupled decay).

    master, exp_avg, exp_avg_sq: float32 [n]; gradient: float32 or bfloat16 [n]; weights: compute dtype [n], set to
    the rounded new master; s: see `Scalars`.
    """
    lr, beta1, beta2, eps, inverse1, inverse2, clip, keep = s.unbind()
    grad = gradient.float() * clip
    first = torch.lerp(grad, exp_avg, beta1)
    second = torch.lerp(grad * grad, exp_avg_sq, beta2)
    denominator = (second * inverse2).sqrt() + eps
    new = master * keep - lr * inverse1 * (first / denominator)
    exp_avg.copy_(first)
    exp_avg_sq.copy_(second)
    master.copy_(new)
    weights.copy_(new)


def _torch_fused(operands: Sequence[Tensor], s: tuple[float, ...], step: int) -> None:
    """The same step through torch's fused kernel, where it is not compiled."""
    master, exp_avg, exp_avg_sq, gradient, weights = operands
    lr, beta1, beta2, eps, _, _, clip, keep = s
    torch._fused_adamw_(
        [master],
        [gradient.float() * clip],
        [exp_avg],
        [exp_avg_sq],
        [],
        [torch.full((), float(step), device=master.device)],
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=(1 - keep) / lr if lr else 0.0,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )
    weights.copy_(master)


class AdamW:
    """AdamW over ranges of flat buffers."""

    def __init__(self, mode: Mode, *, free_threaded: bool = False) -> None:
        """`free_threaded`: compiled, in about twice the time, an update in RAM does not hold the interpreter's lock."""
        self.mode: Mode = mode
        # The number of threads is the calling thread's, not that of whoever compiled first.
        on_cpu: dict[str, str | int | bool | Callable[..., Any]] = {"cpp.dynamic_threads": True}
        if free_threaded:
            on_cpu["cpp_wrapper"] = True  # Inductor's Python bindings of kernels hold the lock for a whole call
        self._compiled: dict[str, Callable[..., None]] = {}
        if mode == "compiled":
            # Not fullgraph: its flags are the process's, and other lanes' compiled code would run eagerly meanwhile.
            self._compiled["cpu"] = torch.compile(adamw, dynamic=True, options=on_cpu)
            self._compiled["cuda"] = torch.compile(adamw, dynamic=True)

    @staticmethod
    def scalars(train: TrainConfig, lr: float, step: int, clip: float, device: torch.device) -> Scalars:
        inverses = [1 / (1 - beta**step) for beta in (train.beta1, train.beta2)]
        common = [lr, train.beta1, train.beta2, train.eps, *inverses, clip]
        rows = torch.tensor([[*common, 1 - lr * train.weight_decay], [*common, 1.0]], dtype=torch.float32)
        decayed, undecayed = rows.tolist()
        rows = on_device(rows, device)
        return Scalars(step, rows[0], rows[1], (tuple(decayed), tuple(undecayed)))

    @torch.no_grad()
    def step(
        self, state: Mapping[str, Tensor], gradient: Tensor, weights: Tensor, where: UpdateRange, scalars: Scalars
    ) -> None:
        numel, device = weights.numel(), weights.device.type
        operands = (state["master"], state["exp_avg"], state["exp_avg_sq"], gradient, weights)
        ways = {True: (scalars.decayed, scalars.host[0]), False: (scalars.undecayed, scalars.host[1])}
        for begin, stop, decays in where.decay_runs:
            s, host = ways[decays]
            # Compiled, nothing but the operands is ever in memory; otherwise there are copies, of a piece at a time.
            piece = numel if self.mode == "compiled" else PIECE_NUMEL[device]
            for start in range(begin, stop, piece):
                end = min(start + piece, stop)
                pieces = [t[start:end] for t in operands]
                if self.mode == "fused":
                    _torch_fused(pieces, host, scalars.step)
                else:
                    if device == "cpu":
                        # Tensors of their own: whether a range begins its tensor would otherwise be compiled in.
                        pieces = [torch.from_dlpack(rows) for rows in pieces]
                    self._compiled[device](*pieces, s)
