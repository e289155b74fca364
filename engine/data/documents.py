"""Which documents a step was made of, for people: where each comes from, how it begins, how much of it there was."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from penstock.engine.data.corpus.files import TokenCorpus
from penstock.engine.data.text.tokenizer import TextTokenizer
from penstock.engine.events import StepDocument
from penstock.engine.model.tokens import MicroBatch, total_weight
from penstock.engine.plan.chunks import Chunk
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import one_line

MOST_DOCUMENTS = 64
"""Reported for a step, at most."""
_EXCERPT_TOKENS, _EXCERPT_CHARS = 60, 120


class _Part(NamedTuple):
    """Tokens of a document in a step."""

    start: int
    """In the corpus."""
    tokens: int
    loss: float | None
    """Mean of the chunks that they lie in, nats; None where nothing is trained there."""


def step_documents(
    corpus: TokenCorpus,
    tokenizer: TextTokenizer | None,
    micro_batches: Sequence[MicroBatch],
    cut: Mapping[int, Chunk],
    losses: Mapping[int, float],
) -> tuple[list[StepDocument], int]:
    """The documents of a step, those of the highest loss first, MOST_DOCUMENTS at most; and how many there are.

    `losses`: chunk's index -> sum of its targets' losses; of the finest chunks that a loss is known of.
    """
    parts = [part for number, batch in enumerate(micro_batches) for part in _parts(number, batch, cut, losses)]
    parts.sort(key=lambda part: -math.inf if part.loss is None else math.inf if math.isnan(part.loss) else part.loss)
    parts.reverse()
    return [_described(corpus, tokenizer, part) for part in parts[:MOST_DOCUMENTS]], len(parts)


def _parts(number: int, batch: MicroBatch, cut: Mapping[int, Chunk], losses: Mapping[int, float]) -> list[_Part]:
    chunks = []
    for index, chunk in cut.items():
        if chunk.micro_batch == number and index in losses:
            tokens = slice(chunk.start, chunk.end)
            weights = None if batch.weights is None else batch.weights[tokens]
            chunks.append((chunk, losses[index], total_weight(batch.labels[tokens], weights)))
    result = []
    for at, length, source in zip(batch.documents, batch.lengths, batch.sources, strict=False):
        own = [(loss, weight) for chunk, loss, weight in chunks if chunk.start < at + length and chunk.end > at]
        weight = sum(weight for _, weight in own)
        result.append(_Part(source, length, sum(loss for loss, _ in own) / weight if weight else None))
    return result


def _described(corpus: TokenCorpus, tokenizer: TextTokenizer | None, part: _Part) -> StepDocument:
    document = corpus.document_at(part.start)
    try:
        result = corpus.origins.where(document)
        where = None if result is None else one_line(result)
    except UserError:  # the run goes on without
        where = None
    excerpt = ""
    if tokenizer is not None:
        ids = corpus.tokens[part.start : part.start + min(part.tokens, _EXCERPT_TOKENS)].tolist()
        excerpt = one_line(tokenizer.decode(ids), _EXCERPT_CHARS)
    loss = None if part.loss is None or not math.isfinite(part.loss) else part.loss
    first = part.start - int(corpus.starts[document])
    return StepDocument(
        document=document, where=where, first_token=first, tokens=part.tokens, loss=loss, excerpt=excerpt
    )
