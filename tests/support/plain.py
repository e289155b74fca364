"""Training as anybody would write it, to compare with."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import tiny
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from penstock.engine.data.loader import MicroBatch
from penstock.engine.optim.lr import learning_rate
from penstock.engine.session import Session


def document_losses(model: nn.Module, m: MicroBatch) -> Iterator[Tensor]:
    """The loss of each document, summed over its targets, in float64."""
    for first, last in itertools.pairwise([*m.documents, len(m.ids)]):
        logits = model(input_ids=m.ids[None, first:last]).logits[0].double()
        yield nn.functional.cross_entropy(logits, m.labels[first:last], ignore_index=-100, reduction="sum")


def plain_training(
    session: Session, steps: int, factor: Callable[[str], float] = lambda name: 1.0
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """The same steps in plain PyTorch: transformers' model, autograd, AdamW, clip_grad_norm_.

    `factor`: of a parameter's learning rate, by its name.

    Losses, weights, and Adam's first moments, which after one step are gradients.
    """
    config, spec, t = session.spec.config, session.spec, session.recipe.train
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    start = tiny.parameters(session.store, spec)
    model.load_state_dict(start, strict=False)
    names = {id(p): n for n, p in model.named_parameters()}
    groups = [
        {"params": [p], "weight_decay": t.weight_decay if p.ndim > 1 else 0.0, "factor": factor(name)}
        for name, p in model.named_parameters()
    ]
    adamw = torch.optim.AdamW(groups, betas=(t.beta1, t.beta2), eps=t.eps)
    losses = []
    for step in range(1, steps + 1):
        micro_batches = session.loader.next_step()
        targets = sum(m.num_targets for m in micro_batches)
        total = 0.0
        for m in micro_batches:
            for loss in document_losses(model, m):
                (loss / targets).backward()
                total += loss.item() / targets
        if t.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), t.clip_norm)
        for group in adamw.param_groups:
            group["lr"] = learning_rate(t, step) * group["factor"]
        adamw.step()
        adamw.zero_grad()
        losses.append(total)
    weights = {names[id(p)]: p.detach() for p in model.parameters()}
    return losses, weights, {names[id(p)]: adamw.state[p]["exp_avg"] for p in model.parameters()}
