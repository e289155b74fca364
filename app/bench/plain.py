"""What Penstock is compared with: the same step in plain PyTorch, everything in memory, as most write it
(`plain_steps`) and as fast as is known here for a model whose activations fit (`compiled_steps`)."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PretrainedConfig

from penstock.engine.config import TrainConfig
from penstock.engine.model.skeleton import from_config


@dataclass(frozen=True, slots=True)
class PlainBatch:
    """One micro-batch: one row, or rows of one length where there are no labels."""

    ids: Tensor
    """[tokens] or [rows, tokens], int64."""
    labels: Tensor | None = None
    """[tokens]: the next token, or -100; None: every token but a row's first is a target."""


def plain_steps(
    config: PretrainedConfig,
    batches: Iterable[Sequence[PlainBatch]],
    train: TrainConfig,
    device: torch.device,
    weights: Mapping[str, Tensor] | None = None,
    *,
    checkpointing: bool = True,
) -> Iterator[tuple[float, float, float]]:
    """(loss, gradient norm, seconds) of an optimizer step on each of `batches`, a sequence of micro-batches.

    Weights and gradients of the compute dtype, gradient checkpointing of every layer (with `checkpointing`), fp32
    master weights, moments (torch's fused AdamW) and sums of gradients, exact clipping by the global norm. A bf16
    gradient dies as soon as its fp32 copy exists; fp32 weights are their own masters. `weights`: float32 values to
    start from, by parameter name; None: the model's own initialiser's.
    """
    model, params, masters, own = _model(config, train, device, weights)
    if checkpointing:
        with warnings.catch_warnings():  # the older name of activation checkpointing, which every transformers 5 has
            warnings.simplefilter("ignore", FutureWarning)
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    decayed = [master for master in masters if master.ndim > 1]
    undecayed = [master for master in masters if master.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": train.weight_decay}, {"params": undecayed, "weight_decay": 0.0}]
    betas = (train.beta1, train.beta2)
    adamw = torch.optim.AdamW(groups, lr=train.lr, betas=betas, eps=train.eps, fused=True)
    for micro_batches in batches:
        start = time.perf_counter()
        targets = sum(_targets(batch) for batch in micro_batches)
        loss = torch.zeros((), device=device)
        for batch in micro_batches:
            part = _loss_sum(model, batch, device) / targets
            part.backward()
            loss += part.detach()
            for param, master in zip(params, masters, strict=True):
                assert param.grad is not None
                master.grad = param.grad.float() if master.grad is None else master.grad.add_(param.grad)
                param.grad = None
        norm = torch.nn.utils.clip_grad_norm_(masters, train.clip_norm or float("inf"), foreach=True)
        adamw.step()
        adamw.zero_grad()
        if not own:
            with torch.no_grad():
                torch._foreach_copy_(params, masters)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        yield float(loss), float(norm), time.perf_counter() - start


def compiled_steps(
    config: PretrainedConfig,
    batches: Iterable[Sequence[PlainBatch]],
    train: TrainConfig,
    device: torch.device,
    weights: Mapping[str, Tensor] | None = None,
) -> Iterator[tuple[float, float, float]]:
    """The same as `plain_steps` in as little time as plain PyTorch takes for it: every activation is kept, and layers,
    final norm, loss, norm of the gradient and AdamW are compiled.

    Of a single micro-batch the gradients are read as backward leaves them, twice: for their norm, and by the update,
    which clips, steps and rounds to the compute dtype in the same pass. Needs the compilers that torch.compile does.
    """
    model, params, masters, own = _model(config, train, device, weights)
    decoder = model.get_decoder()
    for part in (*decoder.layers, decoder.norm):
        part.compile()
    entropy: Callable[[Tensor, Tensor], Tensor] = torch.compile(_entropy_sum, dynamic=True)
    squares = torch.compile(_squares, dynamic=True)
    update: Callable[..., None] = torch.compile(_update, dynamic=True)
    moments = [(torch.zeros_like(master), torch.zeros_like(master)) for master in masters]
    decay = [1 - train.lr * train.weight_decay if master.ndim > 1 else 1.0 for master in masters]
    clip_norm, constants = train.clip_norm or float("inf"), (train.lr, train.beta1, train.beta2, train.eps)
    for number, micro_batches in enumerate(batches, start=1):
        start = time.perf_counter()
        targets = sum(_targets(batch) for batch in micro_batches)
        loss = torch.zeros((), device=device)
        gradients: list[Tensor] = []
        for batch in micro_batches:
            part = _loss_sum(model, batch, device, entropy) / targets
            part.backward()
            loss += part.detach()
            if len(micro_batches) > 1:
                result: list[Tensor] = [_gradient(param) for param in params]
                if gradients:
                    for total, gradient in zip(gradients, result, strict=True):
                        total.add_(gradient)
                else:
                    gradients = [gradient.float() for gradient in result]
                model.zero_grad()
        gradients = gradients or [_gradient(param) for param in params]
        with torch.no_grad():
            norm = torch.stack([squares(gradient.flatten()) for gradient in gradients]).sum().sqrt()
            clip = (clip_norm / (norm + 1e-6)).clamp(max=1.0)
            rates = torch.tensor([1 / (1 - train.beta1**number), 1 / (1 - train.beta2**number)], device=device)
            for param, master, (first, second), keep in zip(params, masters, moments, decay, strict=True):
                flat = [tensor.flatten() for tensor in (master, first, second, gradients.pop(0))]
                param.grad = None
                kept = torch.full((), keep, device=device)
                update(*flat, None if own else param.flatten(), clip, rates, kept, *constants)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        yield float(loss), float(norm), time.perf_counter() - start


def _model(
    config: PretrainedConfig, train: TrainConfig, device: torch.device, weights: Mapping[str, Tensor] | None
) -> tuple[Any, list[Tensor], list[Tensor], bool]:
    """The model in the compute dtype, its parameters, their fp32 masters, and whether these are the same tensors."""
    dtype = getattr(torch, train.compute_dtype)
    with device:
        model = from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.config.use_cache = False
    model.train()
    named = dict(model.named_parameters())
    params: list[Tensor] = list(named.values())
    own = dtype == torch.float32
    masters = [param.detach() if own else param.detach().float() for param in params]
    if weights is not None:
        for name, param, master in zip(named, params, masters, strict=True):
            master.copy_(weights[name])
            param.data.copy_(master)
    return model, params, masters, own


def _gradient(param: Tensor) -> Tensor:
    assert param.grad is not None
    return param.grad


def _squares(gradient: Tensor) -> Tensor:
    """Sum of squares in fp32."""
    return gradient.float().square().sum()


def _update(
    master: Tensor,
    first: Tensor,
    second: Tensor,
    gradient: Tensor,
    weights: Tensor | None,
    clip: Tensor,
    rates: Tensor,
    keep: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """AdamW in place on flat tensors [n] (arXiv 1711.05101): `clip` times the gradient, `rates` the inverse bias
    corrections of both moments, `keep` what decay leaves of a weight; `weights` takes the rounded masters."""
    scaled = gradient.float() * clip
    first.lerp_(scaled, 1 - beta1)
    second.lerp_(scaled.square(), 1 - beta2)
    master.mul_(keep).sub_(lr * rates[0] * first / ((second * rates[1]).sqrt() + eps))
    if weights is not None:
        weights.copy_(master)


def _targets(batch: PlainBatch) -> int:
    if batch.labels is not None:
        return int((batch.labels >= 0).sum())
    return batch.ids[..., 1:].numel()


def _entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """logits: [rows, tokens, vocab]; labels: [rows, tokens], or [tokens] of one row."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")


def _loss_sum(
    model: torch.nn.Module,
    batch: PlainBatch,
    device: torch.device,
    entropy: Callable[[Tensor, Tensor], Tensor] = _entropy_sum,
) -> Tensor:
    ids = batch.ids.to(device)
    rows = ids if ids.ndim > 1 else ids[None]
    labels = functional.pad(rows[:, 1:], (0, 1), value=-100) if batch.labels is None else batch.labels.to(device)
    return entropy(model(input_ids=rows).logits, labels)
