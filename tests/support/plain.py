"""Training as anybody would write it, to compare with."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import tiny
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from penstock.engine.data.loader import MicroBatch
from penstock.engine.model.tokens import total_weight
from penstock.engine.optim.lr import learning_rate
from penstock.engine.session import Session


def document_losses(model: nn.Module, m: MicroBatch) -> Iterator[Tensor]:
    """The loss of each document, summed over its targets by their weights, in float64."""
    for first, last in itertools.pairwise([*m.documents, len(m.ids)]):
        logits = model(input_ids=m.ids[None, first:last]).logits[0].double()
        losses = nn.functional.cross_entropy(logits, m.labels[first:last], ignore_index=-100, reduction="none")
        yield losses.sum() if m.weights is None else (losses * m.weights[first:last]).sum()


def plain_model(session: Session) -> Any:
    """Transformers' model with the weights of the committed generation, in float32."""
    config = session.spec.config
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    model.load_state_dict(tiny.parameters(session.store, session.spec), strict=False)
    return model


def plain_training(
    session: Session, steps: int, factor: Callable[[str], float] = lambda name: 1.0
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """The same steps in plain PyTorch: transformers' model, autograd, AdamW, clip_grad_norm_.

    `factor`: of a parameter's learning rate, by its name.

    Losses, weights, and Adam's first moments, which after one step are gradients.
    """
    model, t = plain_model(session), session.recipe.train
    names = {id(p): n for n, p in model.named_parameters()}
    groups = [
        {"params": [p], "weight_decay": t.weight_decay if p.ndim > 1 else 0.0, "factor": factor(name)}
        for name, p in model.named_parameters()
    ]
    adamw = torch.optim.AdamW(groups, betas=(t.beta1, t.beta2), eps=t.eps)
    losses = []
    for step in range(1, steps + 1):
        micro_batches = session.loader.next_step()
        targets = sum(total_weight(m.labels, m.weights) for m in micro_batches)
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
