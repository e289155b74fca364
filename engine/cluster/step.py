"""One optimizer step of all ranks together: each computes its share of the micro-batches of one step."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import PreTrainedModel

from penstock.engine.cluster.model import Sharded
from penstock.engine.config import TrainConfig
from penstock.engine.data.loader import MicroBatch
from penstock.engine.model.tokens import IGNORE_LABEL, mean_by_weight, total_weight
from penstock.engine.optim.lr import learning_rate


class Share(NamedTuple):
    """Which micro-batches are whose: number i is rank `i % ranks`'s."""

    rank: int
    ranks: int

    def of(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        return list(micro_batches[self.rank :: self.ranks])


class StepResult(NamedTuple):
    """What a step came to, the same on every rank."""

    loss: float
    """Mean of the batch's targets by their weights, nats: the cross entropy alone."""
    grad_norm: float
    """Global, before clipping."""


def train_step(
    sharded: Sharded, train: TrainConfig, step: int, micro_batches: Sequence[MicroBatch], share: Share
) -> StepResult:
    """Step `step` (1-based) on a whole batch, which every rank has: the engine's step (engine/model/reference.py)."""
    model, total = sharded.model, sum(total_weight(m.labels, m.weights) for m in micro_batches)
    scale, own = mean_by_weight(1.0, total), share.of(micro_batches)
    losses = torch.zeros((), dtype=torch.float64, device=sharded.device)
    for number, micro_batch in enumerate(own):
        with_all = micro_batches[number * share.ranks : (number + 1) * share.ranks]
        begin_balance(sharded, micro_batch)
        rows = target_logits(model, micro_batch, sharded.device)
        settle_balance(sharded, sum(num_tokens(m) for m in with_all), len(own))
        loss, objective = loss_sums(rows, train.z_loss)
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
    return StepResult(mean_by_weight(float(losses), total), float(norm))


def whole(norm: Tensor) -> Tensor:
    """The norm over all ranks, of one over shards."""
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


class TargetRows(NamedTuple):
    """Logits where there is something to predict: n rows."""

    logits: Tensor
    """[n, vocab] in the dtype of computing."""
    labels: Tensor
    """[n] int64."""
    weights: Tensor | None
    """[n] float32; None: 1 for all."""


def target_logits(model: PreTrainedModel, micro_batch: MicroBatch, device: torch.device) -> TargetRows:
    """The model's forward on a micro-batch, and its logits of the tokens that have a target.

    Documents that lie end to end are told apart by their positions, which begin at 0 in each; transformers masks by
    them. Where no document crosses a row's end each row is one of the model's own batch.
    """
    ids, labels, positions = (t.to(device) for t in (micro_batch.ids, micro_batch.labels, micro_batch.positions))
    end, rows = _filled(micro_batch), _rows(micro_batch)
    found = torch.nonzero(labels[:end] != IGNORE_LABEL).squeeze(1)
    inputs: dict[str, Any] = {"input_ids": ids[:end].view(rows, -1), "use_cache": False}
    accepts = inspect.signature(model.forward).parameters
    if "position_ids" in accepts:
        inputs["position_ids"] = positions[:end].view(rows, -1)
    if rows == 1 and "logits_to_keep" in accepts:
        logits = model(**inputs, logits_to_keep=found).logits[0]
    else:
        logits = model(**inputs).logits.flatten(0, 1)[found]
    weights = None if micro_batch.weights is None else micro_batch.weights.to(device)[found]
    return TargetRows(logits, labels[found], weights)


def _filled(micro_batch: MicroBatch) -> int:
    """Tokens before the padding at the stream's end, of which at least one is computed with."""
    return len(micro_batch.ids) if micro_batch.filled is None else max(1, micro_batch.filled)


def _rows(micro_batch: MicroBatch) -> int:
    """Rows of the model's own batch: documents lie whole in rows of equal length, or all in one."""
    tokens = _filled(micro_batch)
    for rows in range(len(micro_batch.documents), 1, -1):
        starts = range(0, tokens, tokens // rows)
        if tokens % rows == 0 and set(starts) <= set(micro_batch.documents):
            return rows
    return 1


def num_tokens(micro_batch: MicroBatch) -> int:
    """Tokens that are computed with."""
    return _filled(micro_batch)


def loss_sums(rows: TargetRows, z_loss: float) -> tuple[Tensor, Tensor]:
    """Sums over rows of weight x cross entropy (float64, 0-dim), and of what is trained: with PaLM's term as well
    (engine/model/loss.py)."""
    logits = rows.logits.float()
    each = F.cross_entropy(logits, rows.labels, reduction="none")
    objective = each + z_loss * torch.logsumexp(logits, dim=-1).square() if z_loss else each
    if rows.weights is not None:
        each, objective = each * rows.weights, objective * rows.weights
    return each.detach().double().sum(), objective.sum()


def begin_balance(sharded: Sharded, micro_batch: MicroBatch) -> None:
    if sharded.balance is not None:
        sharded.balance.begin()
        sharded.balance.watch(num_tokens(micro_batch), counting=True)


def settle_balance(sharded: Sharded, tokens: int, turns: int) -> None:
    """All ranks' routers have seen `tokens` together, in one of a step's `turns`, whose losses' mean is trained."""
    balance = sharded.balance
    if balance is not None:
        dist.all_reduce(balance.counts)
        balance.settle(tokens)
        balance.slope.div_(turns)
        balance.watch(balance.num_rows, counting=False)
