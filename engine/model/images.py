"""What the images of a stream are to a text model: features in the place of the tokens that stand for them, features
that are added behind its first layers, and positions along time, height and width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.storage.files.errors import UserError

Pixels = Mapping[str, Tensor]
"""What a model's processor makes of one image, by the names of the model's arguments."""
FAMILIES = ("llava", "gemma3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "idefics3", "smolvlm")
"""Model types whose images are proven to give transformers' own gradients (tests/engine/model/test_images.py)."""

BOTH_WAYS = ("gemma3",)
"""Of these the ones in which an image's tokens attend in both directions, so that no chunk may cut it."""


def require_images(model_type: str) -> None:
    """UserError for a model whose images cannot be trained on."""
    if model_type not in FAMILIES:
        raise UserError(
            f"model type '{model_type}': training on images is supported for {', '.join(FAMILIES)}; remove the "
            "images from the data to train on its text, or use one of these models"
        )


class Picture(NamedTuple):
    """An image that a step's own tower looks at."""

    pixels: Pixels
    first: int
    end: int
    """Its place in the stream's Images.rows."""


@dataclass(frozen=True, slots=True)
class Images:
    """The images of a range of a stream's tokens, in host memory; what they are is the tower's (model/tower.py)."""

    rows: Tensor
    """[m] int64, ascending: the tokens that stand for images, counted from the range's first."""
    features: Sequence[Tensor]
    """Each [m, hidden]: what takes the place of their embedding, then what is added to the output of layers 0, 1..."""
    positions: Tensor | None
    """[n, 4] int64 of all tokens: in the document, then along time, height and width; None: the model has only the
    first."""
    both_ways: Sequence[tuple[int, int]] = ()
    """Of a whole stream: ranges of its tokens that attend in both directions; no chunk may cut one."""
    gradients: Sequence[Tensor] = ()
    """Of the features, as backward finds them; empty: the tower is not trained."""
    pictures: Sequence[Picture] = ()
    """Of a whole stream whose tower is trained: its images in their order. Forward finds the features."""

    def part(self, start: int, end: int) -> Images | None:
        """Those of the tokens from `start` to `end` of the range; None where there are none and none is needed."""
        cut = [pair for pair in self.both_ways if any(pair[0] < edge < pair[1] for edge in (start, end))]
        assert not cut, f"a chunk cuts the image of tokens {cut[0]}"
        first, behind = torch.searchsorted(self.rows, torch.tensor([start, end])).tolist()
        if first == behind and self.positions is None:
            return None
        positions = None if self.positions is None else self.positions[start:end]
        features, gradients = ([t[first:behind] for t in of_all] for of_all in (self.features, self.gradients))
        return Images(self.rows[first:behind] - start, features, positions, gradients=gradients)

    def pin(self) -> Images:
        """The same in pinned memory, from which copies do not wait for the GPU."""
        positions = None if self.positions is None else self.positions.pin_memory()
        features, gradients = ([t.pin_memory() for t in of_all] for of_all in (self.features, self.gradients))
        return replace(self, rows=self.rows.pin_memory(), features=features, positions=positions, gradients=gradients)

    def beginning(self, start: int, end: int) -> list[Picture]:
        """Of a whole stream's pictures those whose first token is one of those from `start` to `end`."""
        return [picture for picture in self.pictures if start <= self.rows[picture.first] < end]

    def embed(self, x: Tensor) -> None:
        """Put them into x [n, hidden], the first layer's input."""
        x.index_copy_(0, *self._on(x, 0))

    def add(self, layer: int, y: Tensor) -> None:
        """Add what belongs behind `layer` to y [n, hidden], its output."""
        if layer + 1 < len(self.features):
            y.index_add_(0, *self._on(y, layer + 1))

    def without(self, dx: Tensor) -> Tensor:
        """dx [n, hidden], the gradient of the first layer's input, as it is of the embedding: 0 where an image is."""
        return dx.index_fill(0, self.rows.to(dx.device, non_blocking=True), 0)

    def take(self, number: int, gradient: Tensor) -> None:
        """Save what a gradient [n, hidden] is of feature `number`: of the first layer's input for 0, of the output of
        layer 0 for 1, and so on."""
        if number < len(self.gradients):
            rows = self.rows.to(gradient.device, non_blocking=True)
            self.gradients[number].copy_(gradient.index_select(0, rows), non_blocking=True)

    def _on(self, x: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """Rows and a feature, on the device and in the dtype of x."""
        rows, features = (t.to(x.device, non_blocking=True) for t in (self.rows, self.features[number]))
        return rows, features.to(x.dtype)
