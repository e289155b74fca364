"""Counting a model's answers about haystacks (engine/data/needles)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine.data.needles.haystacks import DEPTHS
from penstock.engine.events import Recall
from penstock.engine.model.tokens import IGNORE_LABEL, MicroBatch


class Tally:
    """Right answers and all, by the length of the haystack and the depth of the pair in it."""

    def __init__(self) -> None:
        self._counts: dict[int, NDArray[np.int64]] = {}
        """Length -> [2, DEPTHS]: right, all."""

    def add(self, batches: Sequence[MicroBatch], right: Tensor) -> None:
        """`right`: bool [targets], whether the model finds each of the batches' targets, in order, the likeliest token.

        A question about what the document does not say, as the rest of a haystack may not, is not counted.
        """
        done = 0
        for batch in batches:
            ids, rows = batch.ids.numpy(), (batch.labels != IGNORE_LABEL).nonzero().squeeze(-1).numpy()
            hits = right[done : (done := done + len(rows))].numpy()
            for start, length in zip(batch.documents, batch.lengths, strict=False):
                document = ids[start : start + length]
                of_document = slice(*np.searchsorted(rows, (start, start + length)))
                for row, hit in zip(rows[of_document] - start, hits[of_document], strict=True):
                    depth_index = int(np.argmax(document == document[row]))
                    if depth_index < row:
                        counts = self._counts.setdefault(length, np.zeros((2, DEPTHS), np.int64))
                        counts[:, depth_index * DEPTHS // length] += (int(hit), 1)

    def recall(self) -> Recall:
        lengths = sorted(self._counts)
        right, queried = ([self._counts[length][row].tolist() for length in lengths] for row in (0, 1))
        return Recall(lengths=lengths, right=right, queried=queried)
