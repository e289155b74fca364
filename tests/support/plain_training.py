"""Training as anybody would write it: one document after the other through transformers' model, autograd, AdamW.

`train_plainly` uses nothing of ours but the documents that a step has, and where each begins: not its rows, labels,
masks, positions or weights. `plain_training` computes on a session's own micro-batches.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import tiny
import torch
from every_format import Tokens
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from penstock.engine.config import TrainConfig
from penstock.engine.model.tokens import MicroBatch, total_weight
from penstock.engine.optim.lr import learning_rate
from penstock.engine.session import Session

Trained = tuple[list[float], dict[str, Tensor], dict[str, Tensor]]
"""Losses of the steps, and behind them weights and Adam's first moments, by the parameters' names; after one step these
are gradients."""


class Piece(NamedTuple):
    """A document, or a part of it, which is then a document of its own but for the target of its last token."""

    ids: list[int]
    targets: list[int]
    """Of every token, 0 where it counts nothing; of a document's last one there is none."""
    weights: list[float]
    """Of the targets."""


def pieces(document: Tokens, capacity: int) -> list[Piece]:
    """The parts of a row's length."""
    ids, weights = document
    return [_piece(ids, weights, start, start + capacity) for start in range(0, len(ids), capacity)]


def _piece(ids: list[int], weights: list[float], start: int, stop: int) -> Piece:
    weighted = weights[start + 1 : stop + 1]
    targets = [target if weight else 0 for target, weight in zip(ids[start + 1 : stop + 1], weighted, strict=True)]
    return Piece(ids[start:stop], targets, weighted)


def _is_trained(piece: Piece) -> bool:
    return any(piece.weights)


def in_order(documents: Sequence[Tokens], capacity: int) -> list[list[Piece]]:
    """The rows of documents laid end to end: one that crosses a row's end goes on in the next as one of its own. What
    has no target, a row or a part of a document that is longer, is left out."""
    rows: list[list[Piece]] = [[]]
    room = capacity
    for ids, weights in documents:
        for begin in range(0, len(ids), capacity):
            start, end = begin, min(begin + capacity, len(ids))
            if len(ids) > capacity and not _is_trained(_piece(ids, weights, start, end)):
                continue
            while start < end:
                stop = min(end, start + room)
                rows[-1].append(_piece(ids, weights, start, stop))
                room -= stop - start
                start = stop
                if not room:
                    rows.append([])
                    room = capacity
    return [row for row in rows if any(map(_is_trained, row))]


def found_in(micro_batch: MicroBatch, documents: Sequence[Tokens], capacity: int) -> list[Piece]:
    """The pieces that a micro-batch has, by their tokens alone."""
    known = {tuple(piece.ids): piece for document in documents for piece in pieces(document, capacity)}
    assert all(piece == known[tuple(piece.ids)] for document in documents for piece in pieces(document, capacity))
    ends = [*micro_batch.documents, len(micro_batch.ids)]
    spans = itertools.islice(itertools.pairwise(ends), len(micro_batch.lengths))
    return [known[tuple(micro_batch.ids[first:last].tolist())] for first, last in spans]


def train_plainly(
    config: PretrainedConfig, start: dict[str, Tensor], settings: TrainConfig, steps: Sequence[Sequence[Piece]]
) -> Trained:
    """Train on these pieces in float64."""
    make: Any = AutoModelForCausalLM
    model = make.from_config(config, attn_implementation="eager", experts_implementation="eager", dtype=torch.float64)
    model.load_state_dict({name: tensor.double() for name, tensor in start.items()}, strict=False)

    def losses(members: Sequence[Piece]) -> Iterator[Tensor]:
        total = sum(sum(piece.weights) for piece in members)
        return (_loss(model, piece) / total for piece in members if piece.targets)

    return trained_on(model, settings, map(losses, steps))


def trained_on(
    model: nn.Module,
    settings: TrainConfig,
    steps: Iterable[Iterable[Tensor]],
    factor: Callable[[str], float] = lambda name: 1.0,
) -> Trained:
    """By autograd, clip_grad_norm_ and AdamW, on what the loss of each step is the sum of."""
    parameters = dict(model.named_parameters())
    decayed = {n for n, p in parameters.items() if p.ndim > 1 and not n.endswith("bias") and "norm" not in n}
    groups = [
        {"params": [p], "weight_decay": settings.weight_decay * (name in decayed), "factor": factor(name)}
        for name, p in parameters.items()
    ]
    adamw = torch.optim.AdamW(groups, betas=(settings.beta1, settings.beta2), eps=settings.eps)
    losses = []
    for step, shares in enumerate(steps, start=1):
        found = 0.0
        for loss in shares:
            loss.backward()
            found += loss.item()
        if settings.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)
        for group in adamw.param_groups:
            group["lr"] = learning_rate(settings, step) * group["factor"]
        adamw.step()
        adamw.zero_grad()
        losses.append(found)
    moments = {name: adamw.state[p]["exp_avg"] for name, p in parameters.items()}
    return losses, {name: p.detach() for name, p in parameters.items()}, moments


def plain_model(session: Session) -> Any:
    """Transformers' model with the weights of the committed generation, in float32."""
    config = session.spec.config
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    model.load_state_dict(tiny.parameters(session.store, session.spec), strict=False)
    return model


def plain_training(session: Session, steps: int, factor: Callable[[str], float] = lambda name: 1.0) -> Trained:
    """A session's next steps on its own micro-batches; `factor`: of a parameter's learning rate, by its name."""
    model = plain_model(session)

    def losses() -> Iterator[Tensor]:
        micro_batches = session.loader.next_step()
        targets = sum(total_weight(m.labels, m.weights) for m in micro_batches)
        found = (document_losses(model, m, session.recipe.train.z_loss) for m in micro_batches)
        return (loss / targets for loss in itertools.chain.from_iterable(found))

    return trained_on(model, session.recipe.train, (losses() for _ in range(steps)), factor)


def document_losses(model: nn.Module, m: MicroBatch, z_loss: float = 0.0) -> Iterator[Tensor]:
    """The loss of each document, summed over its targets by their weights, in float64."""
    for first, last in itertools.pairwise([*m.documents, len(m.ids)]):
        for module in model.modules():
            if hasattr(module, "max_seq_len_cached"):  # rotary tables may remember how long a document before was
                module.__init__(module.config)
        logits, labels = model(input_ids=m.ids[None, first:last]).logits[0].double(), m.labels[first:last]
        losses = nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="none")
        losses = losses + z_loss * torch.logsumexp(logits, -1).square() * (labels != -100)
        yield losses.sum() if m.weights is None else (losses * m.weights[first:last]).sum()


def _loss(model: Any, piece: Piece) -> Tensor:
    """The sum over the targets by their weights."""
    logits = model(input_ids=torch.tensor([piece.ids])).logits[0][: len(piece.targets)]
    losses = torch.nn.functional.cross_entropy(logits, torch.tensor(piece.targets), reduction="none")
    return (losses * torch.tensor(piece.weights)).sum()


def document_loss(model: Any, ids: list[int], weights: list[float]) -> Tensor:
    """That of a whole document."""
    return _loss(model, _piece(ids, weights, 0, len(ids)))
