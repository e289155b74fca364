"""A frozen vision tower, with the checkpoint's weights, which is asked once for each image for what that is to the text
model; where a model has its images; and what a tower takes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from penstock.engine.hf.conversion import ConversionPlan
from penstock.engine.hf.quantised import open_checkpoint
from penstock.engine.model import skeleton
from penstock.engine.model.images import BOTH_WAYS, Images, Picture, Pixels
from penstock.engine.model.tokens import MicroBatch
from penstock.engine.model.tower import TowerRunner, text_modules
from penstock.storage.files.errors import UserError


class Pictured(NamedTuple):
    """A document of a stream with its images."""

    start: int
    end: int
    images: Sequence[Pixels]
    tokens: Sequence[int] = ()
    """Of each, where a step's own tower is to look at them: how many stand for it."""


class Tower:
    """Attributes: `nbytes` (bytes of the weights on the device)."""

    def __init__(self, config: PretrainedConfig, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        """Read it from a checkpoint. Raises UserError where that does not have all of it."""
        self._runner = TowerRunner(config, device, dtype)
        self._places = Places(self._runner.whole)
        reader, wanted = open_checkpoint(folder), self._runner.sites.keys()
        plan = ConversionPlan(self._runner.whole, reader)
        self._weights: dict[str, Tensor] = {}
        for conversion in plan.conversions:
            if not wanted.isdisjoint(conversion.targets):
                made = plan.apply(conversion, {name: reader.read(name) for name in conversion.sources})
                self._weights |= {name: made[name].to(device, dtype) for name in made.keys() & wanted}
        self.nbytes = sum(value.nbytes for value in self._weights.values())
        if missing := wanted - self._weights.keys():
            raise UserError(
                f"{folder}: no tensor provides '{min(missing)}' of the vision tower, which images in the data need; "
                "restore the model's files, or remove the images from the data"
            )

    def features(self, pixels: Pixels) -> list[Tensor]:
        """Of one image: each [its tokens, hidden] in host memory, as Images.features."""
        return [each.to("cpu") for each in self._runner.features(self._weights, pixels)]

    def look(self, stream: MicroBatch, documents: Sequence[Pictured]) -> MicroBatch:
        """`stream` with the images of these of its documents."""
        if not documents:
            return stream
        parts = [self.features(pixels) for document in documents for pixels in document.images]
        features = [torch.cat(of_all) for of_all in zip(*parts, strict=True)]
        return replace(stream, images=self._places.images(stream, documents, features))


class Places:
    """Where a model has its images: which tokens stand for them, their positions, and what sees what.

    Attributes: `image_id` (the token of which as many stand for an image as there are vectors for it).
    """

    def __init__(self, whole: PreTrainedModel) -> None:
        """Of a model that takes images, wherever it is."""
        config = whole.config
        self.image_id = int(getattr(config, "image_token_id", None) or config.image_token_index)
        self._both_ways = config.model_type in BOTH_WAYS
        self._positions = getattr(whole.base_model, "get_rope_index", None)
        self._hidden_size = int(config.get_text_config(decoder=True).hidden_size)
        self._num_features = 1 + len(getattr(config.vision_config, "deepstack_visual_indexes", ()))

    def unseen(self, stream: MicroBatch, documents: Sequence[Pictured], dtype: torch.dtype) -> MicroBatch:
        """`stream` with the images of these of its documents, at which a step's own tower is to look."""
        if not documents:
            return stream
        pixels = [each for document in documents for each in document.images]
        ends = [0, *itertools.accumulate(count for document in documents for count in document.tokens)]
        pictures = [Picture(*each) for each in zip(pixels, ends[:-1], ends[1:], strict=True)]
        features, gradients = (
            [torch.zeros(ends[-1], self._hidden_size, dtype=dtype) for _ in range(self._num_features)] for _ in range(2)
        )
        images = self.images(stream, documents, features)
        return replace(stream, images=replace(images, gradients=gradients, pictures=pictures))

    def images(self, stream: MicroBatch, documents: Sequence[Pictured], features: Sequence[Tensor]) -> Images:
        """The images of documents of a stream, with their `features`, each [tokens of them all, hidden]."""
        rows, both_ways = [], list[tuple[int, int]]()
        positions = None if self._positions is None else stream.positions[:, None].repeat(1, 4)
        for start, end, images, _ in documents:
            is_image = stream.ids[start:end] == self.image_id
            rows.append(start + is_image.nonzero().squeeze(-1))
            if self._both_ways:
                both_ways += _runs(rows[-1])
            if positions is not None and self._positions is not None:
                grids = torch.cat([pixels["image_grid_thw"] for pixels in images])
                types = is_image[None].int()
                found, _ = self._positions(stream.ids[None, start:end], mm_token_type_ids=types, image_grid_thw=grids)
                positions[start:end, 1:] = found[:, 0].T
        result = Images(torch.cat(rows), features, positions, both_ways)
        assert all(len(each) == len(result.rows) for each in features), "as many vectors as tokens that stand for them"
        return result


class TowerSizes(NamedTuple):
    """What a tower takes, by formula."""

    weights_bytes: int
    token_bytes: int
    """RAM of what it finds of a token that stands for a part of an image, and of its gradient where it is trained."""
    patch_bytes: int
    """What it holds at once of a patch."""
    patch_pixels_bytes: int
    """What the processor makes of a patch."""
    token_patches: int
    """Patches of an image for each of its tokens."""
    token_flops: int
    """Forward FLOPs of its matrix products for each token that stands for a part of an image, about."""
    gradient_bytes: int
    """Of what backward finds before it is added to the sums; 0: it is frozen."""

    @classmethod
    def of(cls, config: PretrainedConfig, item: int, trained: bool = False) -> TowerSizes:
        """`item`: bytes of an element of the compute dtype."""
        whole, vision = skeleton.build_whole(config), config.vision_config
        assert whole is not None
        text = text_modules(whole)
        own = [p for part in whole.modules() if id(part) not in text for p in part.parameters(recurse=False)]
        weights_bytes = sum(p.numel() for p in own) * item
        width = getattr(vision, "embed_dim", vision.hidden_size)
        inner = getattr(vision, "intermediate_size", None) or round(width * vision.mlp_ratio)
        depth = getattr(vision, "num_hidden_layers", None) or vision.depth
        # Queries, keys, values, attention and what is added to; the inner width twice; every layer's output, of which
        # some projectors take more than the last.
        held = (12 + depth) * width + 3 * inner
        if trained:  # what one layer's graph saves as well, and gradients
            held += 12 * width + 4 * inner
        pixels = getattr(vision, "temporal_patch_size", 1) * 3 * vision.patch_size**2 * 4
        merged = float(getattr(vision, "spatial_merge_size", getattr(config, "scale_factor", 1)))
        if (tokens := getattr(config, "mm_tokens_per_image", None)) is not None:
            merged = vision.image_size // vision.patch_size / tokens**0.5
        added = len(getattr(vision, "deepstack_visual_indexes", ()))
        return cls(
            weights_bytes=weights_bytes,
            token_bytes=(1 + trained) * (1 + added) * config.get_text_config(decoder=True).hidden_size * item,
            patch_bytes=held * item + 2 * pixels,
            patch_pixels_bytes=pixels,
            token_patches=round(merged**2),
            token_flops=round(merged**2) * sum(2 * p.numel() for p in own if p.dim() > 1),
            gradient_bytes=weights_bytes if trained else 0,
        )

    def work_bytes(self, tokens: int) -> int:
        """What it takes beside its weights for an image for which so many tokens stand."""
        return (tokens * self.token_patches + 1) * self.patch_bytes + self.gradient_bytes

    def pixels_bytes(self, tokens: int) -> int:
        """What the processor makes of such an image."""
        return tokens * self.token_patches * self.patch_pixels_bytes


def _runs(rows: Tensor) -> list[tuple[int, int]]:
    """The ranges of ascending numbers [m] that follow one another."""
    begins = torch.cat([rows[:1], rows[1:][rows.diff() > 1]]).tolist()
    ends = torch.cat([rows[:-1][rows.diff() > 1], rows[-1:]]).tolist()
    return [(begin, end + 1) for begin, end in zip(begins, ends, strict=True)]
