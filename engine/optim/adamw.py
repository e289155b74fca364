"""AdamW on flat fp32 state, gradient clipping by the global norm, and learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from engine.config import TrainConfig

PIECE_NUMEL = {"cpu": 1 << 24, "cuda": 1 << 18}
"""Elements updated at once where the update is not compiled, per device type: there are up to ten copies in float32, in
RAM 640 MiB, on a GPU 10 MiB of what the plan leaves to the allocator."""

Update = Callable[..., None]
"""See `adamw`."""


@dataclass(frozen=True, slots=True)
class Scalars:
    """The scalars of one AdamW step on the state's device; see `scalars`."""

    step: int
    decayed: Tensor
    undecayed: Tensor
    host: tuple[tuple[float, ...], tuple[float, ...]]
    """The same two as floats."""


def learning_rate(config: TrainConfig, step: int) -> float:
    """Learning rate of step `step` (1-based): linear warm-up from 0, then decay to `min_lr_ratio` at the last step."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    span = max(1, config.steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    if config.lr_schedule == "constant":
        return config.lr
    shape = 1 - progress if config.lr_schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * shape)


def clip_coefficient(norm: float, clip_norm: float | None) -> float:
    """Factor on every gradient so that their global norm is at most `clip_norm` (torch.nn.utils.clip_grad_norm_)."""
    return 1.0 if clip_norm is None else min(1.0, clip_norm / (norm + 1e-6))


def scalars(config: TrainConfig, step: int, clip: float, device: torch.device) -> Scalars:
    """Scalars of optimizer step `step` (1-based) with gradients scaled by `clip`.

    Order: lr, beta1, beta2, eps, 1 / (1 - beta1^step), 1 / (1 - beta2^step), clip, 1 - lr * weight_decay.
    """
    lr = learning_rate(config, step)
    common = [
        lr,
        config.beta1,
        config.beta2,
        config.eps,
        1 / (1 - config.beta1**step),
        1 / (1 - config.beta2**step),
        clip,
    ]
    rows = torch.tensor([[*common, 1 - lr * config.weight_decay], [*common, 1.0]], dtype=torch.float32)
    decayed, undecayed = rows.tolist()
    if device.type == "cuda":
        pinned = torch.empty_like(rows, pin_memory=True).copy_(rows)
        rows = pinned.to(device, non_blocking=True)
        wait_for_copies(device)  # other streams read it
    return Scalars(step, rows[0], rows[1], (tuple(decayed), tuple(undecayed)))


def wait_for_copies(device: torch.device) -> None:
    """Return once what the calling thread has put on its stream is done; the thread sleeps meanwhile."""
    if device.type == "cuda":
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(device))
        event.synchronize()


def adamw(master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, gradient: Tensor, weights: Tensor, s: Tensor) -> None:
    """One AdamW step in place (Loshchilov and Hutter, arXiv 1711.05101, decoupled decay).

    master, exp_avg, exp_avg_sq: float32 [n]; gradient: float32 or bfloat16 [n]; weights: compute dtype [n], set to
    the rounded new master; s: see `scalars`.
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


def _torch_fused(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradient: Tensor,
    weights: Tensor,
    s: tuple[float, ...],
    step: int,
) -> None:
    """The same step through torch's fused kernel, for machines on which torch.compile has no compiler."""
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
    """AdamW over ranges of flat buffers: "compiled", "eager", or "fused" where there is no compiler."""

    def __init__(self, mode: Literal["compiled", "eager", "fused"], *, free_threaded: bool = False) -> None:
        """`free_threaded`: compiled, an update in RAM does not hold the interpreter's lock, so that other lanes launch
        kernels meanwhile. It takes about twice as long to compile.
        """
        self.mode = mode
        # The number of threads is the calling thread's, not that of whoever compiled first.
        on_cpu: dict[str, str | int | bool | Callable[..., Any]] = {"cpp.dynamic_threads": True}
        if free_threaded:
            on_cpu["cpp_wrapper"] = True  # Inductor's Python bindings of kernels hold the lock for a whole call
        self._update: dict[str, Update] = {"cpu": adamw, "cuda": adamw}
        if mode == "compiled":
            # Not fullgraph: its flags are the process's, and other lanes' compiled code would run eagerly meanwhile.
            self._update["cpu"] = torch.compile(adamw, dynamic=True, options=on_cpu)
            self._update["cuda"] = torch.compile(adamw, dynamic=True)

    @torch.no_grad()
    def step(
        self,
        state: tuple[Tensor, Tensor, Tensor],
        gradient: Tensor,
        weights: Tensor,
        decay_numel: int,
        values: Scalars,
    ) -> None:
        """Update one range of a buffer in place.

        state: master, exp_avg, exp_avg_sq, float32 [n]; gradient [n]; weights [n], compute dtype;
        decay_numel: the first elements of the range are decayed, the others not.
        """
        numel, device = weights.numel(), weights.device.type
        ranges = ((0, decay_numel, values.decayed), (decay_numel, numel, values.undecayed))
        for (begin, stop, s), host in zip(ranges, values.host, strict=True):
            # Compiled, nothing but the operands is ever in memory; otherwise there are copies, of a piece at a time.
            piece = numel if self.mode == "compiled" else PIECE_NUMEL[device]
            for start in range(begin, stop, piece):
                end = min(start + piece, stop)
                master, first, second, grad, rounded = (t[start:end] for t in (*state, gradient, weights))
                if self.mode == "fused":
                    _torch_fused(master, first, second, grad, rounded, host, values.step)
                elif self.mode == "compiled" and device == "cpu":
                    # Tensors of their own: whether a range begins its tensor would otherwise be compiled in.
                    own = (torch.from_dlpack(rows) for rows in (master, first, second, grad, rounded))
                    self._update[device](*own, s)
                else:
                    self._update[device](master, first, second, grad, rounded, s)
