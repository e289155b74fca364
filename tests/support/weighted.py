"""Batches as packed conversations make them: weights per token, and padding at the end of each micro-batch's stream."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from penstock.engine.data.loader import DataLoader
from penstock.engine.model.tokens import IGNORE_LABEL, MicroBatch


class WeightedLoader:
    """Gives out another loader's batches with weights of 0, 1 and between, and with padding at their end.

    `filled`: shares of a stream that micro-batches keep, in turn. Both follow from the number of the micro-batch, so
    that two loaders give the same. Not `cut`: padding is there, and nobody is told where it begins.
    """

    def __init__(self, loader: DataLoader, filled: list[float], *, weights: bool = True, cut: bool = True) -> None:
        self._loader, self._filled, self._weights, self._cut = loader, filled, weights, cut
        self._count = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def next_step(self) -> list[MicroBatch]:
        return [self._changed(batch) for batch in self._loader.next_step()]

    def _changed(self, batch: MicroBatch) -> MicroBatch:
        number, self._count = self._count, self._count + 1
        total = len(batch.ids)
        filled = round(total * self._filled[number % len(self._filled)])
        ids, labels = batch.ids.clone(), batch.labels.clone()
        ids[filled:] = 0
        labels[max(0, filled - 1) :] = IGNORE_LABEL
        weights = None
        if self._weights:
            draw = np.random.default_rng(number).choice([0.0, 0.25, 1.0, 3.0], total).astype(np.float32)
            weights = torch.from_numpy(draw)
            labels[weights == 0] = IGNORE_LABEL
        ends = [*batch.documents[1:], total]
        lengths = [min(end, filled) - start for start, end in zip(batch.documents, ends, strict=True) if start < filled]
        changed = {"ids": ids, "labels": labels, "weights": weights, "lengths": lengths}
        changed["filled"] = filled if self._cut and filled < total else None
        return replace(batch, num_targets=int((labels != IGNORE_LABEL).sum()), **changed)
