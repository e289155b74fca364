"""One optimizer step of all ranks together, or a validation: each computes its share of the micro-batches."""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import PreTrainedModel

from penstock.engine.cluster.context import Context, Part, whole_part
from penstock.engine.cluster.model import Sharded
from penstock.engine.config import TrainConfig
from penstock.engine.data.loader import ValidationSet
from penstock.engine.events import ValidationMetrics
from penstock.engine.model.router import RouterBalance
from penstock.engine.model.tokens import MicroBatch, mean_by_weight, total_weight
from penstock.engine.optim.lr import learning_rate


class Share(NamedTuple):
    """Which micro-batches are whose: number i is turn `i // groups` of group `i % groups`, whose ranks share it."""

    group: int
    groups: int
    context: Context | None = None
    """Of the group, where it is more than one rank."""

    def of(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        return list(micro_batches[self.group :: self.groups])

    def part(self, micro_batch: MicroBatch, device: torch.device) -> Part:
        """What this rank computes of one."""
        return whole_part(micro_batch, device) if self.context is None else self.context.part(micro_batch, device)


def train_step(
    sharded: Sharded, train: TrainConfig, step: int, micro_batches: Sequence[MicroBatch], share: Share
) -> tuple[float, float]:
    """Step `step` (1-based) on a whole batch, which every rank has: the engine's step (engine/model/reference.py).

    All ranks' mean cross entropy of its targets by weight, nats, and their gradient norm before clipping.
    """
    model, total = sharded.model, sum(total_weight(m.labels, m.weights) for m in micro_batches)
    scale, balance = mean_by_weight(1.0, total), sharded.balance
    own = share.of(micro_batches)
    if balance is not None:
        balance.begin()
        count_routing(sharded, balance, share, own[1:])
    losses = torch.zeros((), dtype=torch.float64, device=sharded.device)
    for turn, micro_batch in enumerate(own):
        part = share.part(micro_batch, sharded.device)
        if balance is not None:
            balance.watch(part.filled, counting=turn == 0)
        logits = target_logits(model, part)
        if balance is not None and turn == 0:
            dist.all_reduce(balance.counts)
            balance.settle(sum(m.num_filled for m in micro_batches))
            balance.watch(part.filled, counting=False)
        loss, objective = loss_sums(logits, part, train.z_loss)
        losses += loss
        (objective * scale).backward()
    dist.all_reduce(losses)

    gradients = [param.grad for param in sharded.trained().values() if param.grad is not None]
    norm = whole(get_total_norm(gradients))
    if train.clip_norm is not None:
        clip_grads_with_norm_(list(sharded.trained().values()), train.clip_norm, norm)
    for group in sharded.optimizer.param_groups:
        group["lr"] = learning_rate(train, step) * group["lr_factor"]
    sharded.optimizer.step()
    sharded.optimizer.zero_grad()
    return mean_by_weight(float(losses), total), float(norm)


def whole(norm: Tensor) -> Tensor:
    """The norm over all ranks, of one over shards."""
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def target_logits(model: PreTrainedModel, part: Part) -> Tensor:
    """The model's forward on a part of a micro-batch, and its logits [n, vocab] of the tokens that have a target.

    Documents laid end to end are told apart by positions, which begin at 0 in each, or by attention spread over ranks.
    """
    inputs: dict[str, Any] = {"input_ids": part.ids, "use_cache": False}
    accepts = inspect.signature(model.forward).parameters
    if "position_ids" in accepts:
        inputs["position_ids"] = part.positions
    if len(part.ids) == 1 and "logits_to_keep" in accepts:
        logits: Tensor = model(**inputs, logits_to_keep=part.targets).logits[0]
    else:
        logits = model(**inputs).logits.flatten(0, 1)[part.targets]
    return logits


def loss_sums(logits: Tensor, part: Part, z_loss: float) -> tuple[Tensor, Tensor]:
    """Of the logits [n, vocab] of a part's targets: sums of weight x cross entropy (float64, 0-dim), and of what is
    trained, with PaLM's term as well (engine/model/loss.py)."""
    logits = logits.float()
    each = F.cross_entropy(logits, part.labels, reduction="none")
    objective = each + z_loss * torch.logsumexp(logits, dim=-1).square() if z_loss else each
    if part.weights is not None:
        each, objective = each * part.weights, objective * part.weights
    return each.detach().double().sum(), objective.sum()


@torch.no_grad()
def count_routing(sharded: Sharded, balance: RouterBalance, share: Share, micro_batches: Sequence[MicroBatch]) -> None:
    """Where the routers send micro-batches, by a forward of its own: what a token's router is told in backward depends
    on the whole step's tokens, whose activations do not fit the GPU together."""
    for micro_batch in micro_batches:
        part = share.part(micro_batch, sharded.device)
        balance.watch(part.filled, counting=True)
        target_logits(sharded.model, replace(part, targets=part.targets[:0]))


@torch.no_grad()
def validate(sharded: Sharded, held_out: ValidationSet, step: int, share: Share) -> ValidationMetrics:
    """Measure the loss of the documents held out, with the weights after `step`; the same on every rank."""
    started, weight, tokens = time.perf_counter(), 0.0, 0
    sums = torch.zeros(2, dtype=torch.float64, device=sharded.device)  # loss, right answers
    for batch in held_out.passes(share.groups):
        weight += sum(total_weight(m.labels, m.weights) for m in batch)
        tokens += sum(m.num_targets for m in batch)
        own = share.of(batch)
        # All ranks run the model together: those that have nothing left run along.
        part = share.part((own or batch)[0], sharded.device)
        logits = target_logits(sharded.model, part)
        if own:
            sums[0] += loss_sums(logits, part, 0.0)[0]
            sums[1] += (logits.argmax(dim=-1) == part.labels).sum()
    dist.all_reduce(sums)
    return ValidationMetrics(
        step=step,
        loss=mean_by_weight(float(sums[0]), weight),
        tokens=tokens,
        seconds=time.perf_counter() - started,
        time=time.time(),
        accuracy=mean_by_weight(float(sums[1]), tokens),
    )
