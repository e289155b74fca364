"""The validation loss of a model that is spread over ranks."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from penstock.engine.cluster.model import Sharded
from penstock.engine.cluster.step import Share, loss_sums, target_logits
from penstock.engine.data.loader import ValidationSet
from penstock.engine.events import ValidationMetrics
from penstock.engine.model.tokens import mean_by_weight, total_weight


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
