"""What the two sides of pairs have in common, which need not be computed twice."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from penstock.engine.data.corpus.files import TokenCorpus

_AT_ONCE = 1 << 20
"""Tokens that are read at once, or a pair's."""


def shared_tokens(corpus: TokenCorpus, target: Callable[[NDArray[np.int64]], int] | None) -> NDArray[np.int64]:
    """[pairs of the corpus] with how many equal tokens both sides of each begin, of those before the second side's
    first token that has a target.

    Usually these are the prompt without its last token, whose target is the answer's first one. With a `target` the one
    token that it says is all that has one.
    """
    assert corpus.sides is not None
    assert corpus.weights is not None
    starts, result = corpus.starts, np.zeros(len(corpus.sides), dtype=np.int64)
    first = 0
    while first < len(result):
        end = max(first + 1, int(np.searchsorted(starts, starts[first] + _AT_ONCE, side="right")) - 1)
        base, stop = int(starts[first]), int(starts[end])
        tokens, trained = corpus.tokens[base:stop], corpus.weights[base:stop] > 0
        for pair in range(first, end):
            begin, stop = int(starts[pair]) - base, int(starts[pair + 1]) - base
            middle = begin + int(corpus.sides[pair, 1])
            if target is None:
                before = _first(trained[middle + 1 : stop])
            else:
                before = target(tokens[middle:stop].astype(np.int64))
            most = min(before, middle - begin)
            result[pair] = _first(tokens[begin : begin + most] != tokens[middle : middle + most])
        first = end
    return result


def _first(mask: NDArray[np.bool_]) -> int:
    """Where it first is true; its length where it never is."""
    place = int(mask.argmax()) if len(mask) else 0
    return place if len(mask) and mask[place] else len(mask)
