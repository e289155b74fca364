"""What was found of a model's data, in plain figures: lengths, and documents with their trained tokens marked."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.engine.config.data import Comparison
from penstock.storage.files.untrusted import printable

if TYPE_CHECKING:
    from penstock.engine.data.text.tokenizer import TextTokenizer

SAMPLES = 3
_BINS = 8
"""Most bars of the histogram."""


class Document(NamedTuple):
    """One document as training reads it."""

    where: str
    ids: NDArray[np.int64]
    weights: NDArray[np.float32] | None
    """One per token: how much it counts as a target; None: 1 for all."""
    comparison: Comparison = ""
    sides: tuple[int, int] | None = None
    """As `TokenCorpus` has both."""

    def apart(self) -> list[Document]:
        """Each side of a comparison; else the document."""
        if self.sides is None:
            return [self]
        if self.comparison == "unpaired":
            return [self._replace(where=f"{self.where}, {'wanted' if self.sides[1] else 'not wanted'}")]
        return [
            self._replace(
                where=f"{self.where}, {name}",
                ids=self.ids[side],
                weights=None if self.weights is None else self.weights[side],
            )
            for name, side in (("chosen", slice(self.sides[1])), ("rejected", slice(self.sides[1], None)))
        ]


class Bar(NamedTuple):
    """Documents of `least` to `most` tokens."""

    least: int
    most: int
    documents: int


def histogram(lengths: NDArray[np.int64]) -> list[Bar]:
    """Documents by length, [documents], in bars that double, so that short and long ones are seen; no end is empty."""
    powers = np.ceil(np.log2(np.maximum(lengths, 1))).astype(int)  # most tokens of a bar: 2**power
    first, last = int(powers.min()), int(powers.max())
    first = max(first, last - _BINS + 1)
    counts = np.bincount(np.maximum(powers, first) - first, minlength=last - first + 1)
    result = []
    for number, count in enumerate(counts):
        power = first + number
        least = int(lengths.min()) if number == 0 else 2 ** (power - 1) + 1
        result.append(Bar(min(least, 2**power), 2**power, int(count)))
    return result


def length_figures(lengths: NDArray[np.int64], trained: NDArray[np.int64], row: int) -> dict[str, Any]:
    """Tokens a document, how many of all are trained, and how many documents are longer than a `row`."""
    median, p95, p99 = (int(value) for value in np.percentile(lengths, (50, 95, 99), method="higher"))
    return {
        "documents": len(lengths),
        "tokens": int(lengths.sum()),
        "trained_tokens": int(trained.sum()),
        "median": median,
        "p95": p95,
        "p99": p99,
        "max": int(lengths.max()),
        "longer": int((lengths > row).sum()),
        "histogram": [bar._asdict() for bar in histogram(lengths)],
    }


def sample(document: Document, tokenizer: TextTokenizer) -> dict[str, Any]:
    """A document as people read it: text in pieces, each with whether it is trained. The first token never is."""
    ids = document.ids
    trained = np.ones(len(ids), dtype=bool) if document.weights is None else document.weights > 0
    edges = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(ids)]
    pieces = [
        {"text": printable(tokenizer.decode(ids[start:stop].tolist())), "trained": bool(trained[start])}
        for start, stop in itertools.pairwise(edges)
        if stop > start
    ]
    return {
        "where": printable(document.where),
        "tokens": len(ids),
        "trained_tokens": int(trained.sum()),
        "pieces": pieces,
    }


def token_row(document: Document, tokenizer: TextTokenizer) -> dict[str, Any]:
    """A document as programs check it: ids, how much each counts, the text, and each token's own text; of a comparison
    `sides` as well."""
    ids = document.ids.tolist()
    weights = [1.0] * len(ids) if document.weights is None else document.weights.tolist()
    return {
        **({} if document.sides is None else {"comparison": document.comparison, "sides": document.sides}),
        "where": document.where,
        "ids": ids,
        "weights": weights,
        "text": tokenizer.decode(ids),
        "tokens": [tokenizer.decode([id]) for id in ids],
    }
