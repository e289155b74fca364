"""What the images of a stream are to a text model: features in the place of the tokens that stand for them, features
that are added behind its first layers, and positions along time, height and width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.storage.files.errors import UserError

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


@dataclass(frozen=True, slots=True)
class Images:
    """The images of a range of a stream's tokens, in host memory; what they are is the tower's (hf/tower.py)."""

    rows: Tensor
    """[m] int64, ascending: the tokens that stand for images, counted from the range's first."""
    features: Sequence[Tensor]
    """Each [m, hidden]: what takes the place of their embedding, then what is added to the output of layers 0, 1..."""
    positions: Tensor | None
    """[n, 4] int64 of all tokens: in the document, then along time, height and width; None: the model has only the
    first."""
    both_ways: Sequence[tuple[int, int]] = ()
    """Of a whole stream: ranges of its tokens that attend in both directions; no chunk may cut one."""

    def part(self, start: int, end: int) -> Images | None:
        """Those of the tokens from `start` to `end` of the range; None where there are none and none is needed."""
        cut = [pair for pair in self.both_ways if any(pair[0] < edge < pair[1] for edge in (start, end))]
        assert not cut, f"a chunk cuts the image of tokens {cut[0]}"
        first, behind = torch.searchsorted(self.rows, torch.tensor([start, end])).tolist()
        if first == behind and self.positions is None:
            return None
        positions = None if self.positions is None else self.positions[start:end]
        return Images(self.rows[first:behind] - start, [each[first:behind] for each in self.features], positions)

    def pin(self) -> Images:
        """The same in pinned memory, from which copies do not wait for the GPU."""
        positions = None if self.positions is None else self.positions.pin_memory()
        return Images(self.rows.pin_memory(), [each.pin_memory() for each in self.features], positions, self.both_ways)

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

    def _on(self, x: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """Rows and a feature, on the device and in the dtype of x."""
        rows, features = (t.to(x.device, non_blocking=True) for t in (self.rows, self.features[number]))
        return rows, features.to(x.dtype)
