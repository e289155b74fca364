"""What Penstock is compared with: the same training step in plain PyTorch, everything in memory."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, PretrainedConfig

from penstock.engine.config import TrainConfig


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
) -> Iterator[tuple[float, float, float]]:
    """(loss, gradient norm, seconds) of an optimizer step on each of `batches`, a sequence of micro-batches.

    Weights and gradients of the compute dtype, gradient checkpointing of every layer, fp32 master weights and moments
    in torch's fused AdamW, exact clipping by the global norm, micro-batches' gradients summed in fp32. A bf16 gradient
    dies as soon as its fp32 copy exists, so the peak holds no parameter's gradient twice; fp32 weights are their own
    masters. `weights`: float32 values to start from, by parameter name; without them the model's own initialiser's.
    """
    dtype = getattr(torch, train.compute_dtype)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").to(device)
    model.config.use_cache = False
    with warnings.catch_warnings():  # the older name of activation checkpointing, which every transformers 5 has
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    named = dict(model.named_parameters())
    params = list(named.values())
    own = dtype == torch.float32
    masters = [param.detach() if own else param.detach().float() for param in params]
    if weights is not None:
        for name, param, master in zip(named, params, masters, strict=True):
            master.copy_(weights[name])
            param.data.copy_(master)
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


def _targets(batch: PlainBatch) -> int:
    if batch.labels is not None:
        return int((batch.labels >= 0).sum())
    return batch.ids[..., 1:].numel()


def _loss_sum(model: torch.nn.Module, batch: PlainBatch, device: torch.device) -> Tensor:
    ids = batch.ids.to(device)
    rows = ids if ids.ndim > 1 else ids[None]
    labels = functional.pad(rows[:, 1:], (0, 1), value=-100) if batch.labels is None else batch.labels.to(device)
    logits: Tensor = model(input_ids=rows).logits
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
