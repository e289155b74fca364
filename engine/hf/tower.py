"""The vision tower of a model that takes images, with its projector: transformers' own, frozen, with the checkpoint's
weights. It is asked once for each image, without a gradient, for what the image is to the text model."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from penstock.engine.hf.conversion import ConversionPlan
from penstock.engine.hf.quantised import open_checkpoint
from penstock.engine.model import skeleton
from penstock.engine.model.images import BOTH_WAYS, Images
from penstock.engine.model.tokens import MicroBatch
from penstock.storage.files.errors import UserError

Pixels = Mapping[str, Tensor]
"""What a model's processor makes of one image, by the names of the model's arguments."""


class Pictured(NamedTuple):
    """A document of a stream with its images."""

    start: int
    end: int
    images: Sequence[Pixels]


class Tower:
    """Attributes: `nbytes` (bytes of the weights on the device)."""

    def __init__(self, config: PretrainedConfig, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        """Read it from a checkpoint. Raises UserError where that does not have all of it."""
        whole = skeleton.build_whole(config)
        assert whole is not None
        whole.eval()
        self.device, self.dtype = device, dtype
        self._hidden_size = int(config.get_text_config(decoder=True).hidden_size)
        self._places = Places(whole)
        text = _text_modules(whole)
        own = [(name, part) for name, part in whole.named_modules() if id(part) not in text]
        for _, model in reversed(own):  # a tower initialises its own; before parameters, which that sets too
            if isinstance(model, PreTrainedModel):
                parts = [(name, part) for name, part in model.named_modules() if id(part) not in text]
                skeleton.materialise_buffers(model, parts, device)
        wanted = {f"{name}.{key}".removeprefix("."): (part, key) for name, part in own for key in part._parameters}
        wanted = {name: at for name, at in wanted.items() if at[0]._parameters[at[1]] is not None}
        reader = open_checkpoint(folder)
        plan = ConversionPlan(whole, reader)
        self.nbytes = 0
        for conversion in plan.conversions:
            if not wanted.keys().isdisjoint(conversion.targets):
                made = plan.apply(conversion, {name: reader.read(name) for name in conversion.sources})
                for name in made.keys() & wanted.keys():
                    part, key = wanted.pop(name)
                    value = made[name].to(device, dtype)
                    part._parameters[key] = nn.Parameter(value, requires_grad=False)
                    self.nbytes += value.numel() * value.dtype.itemsize
        if wanted:
            raise UserError(
                f"{folder}: no tensor provides '{min(wanted)}' of the vision tower, which images in the data need; "
                "restore the model's files, or remove the images from the data"
            )
        self._get_features = cast(Any, whole.get_image_features)
        self._accepts = inspect.signature(self._get_features).parameters.keys()

    @torch.no_grad()
    def features(self, pixels: Pixels) -> list[Tensor]:
        """Of one image: each [its tokens, hidden] in host memory, as Images.features."""
        given = {name: tensor.to(self.device) for name, tensor in pixels.items() if name in self._accepts}
        if self.dtype != torch.float32:
            given = {name: t.to(self.dtype) if t.is_floating_point() else t for name, t in given.items()}
        found: Any = self._get_features(**given, return_dict=True)
        each = [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]
        return [self._flat(of_image).to("cpu", self.dtype) for of_image in each]

    def _flat(self, features: Tensor | Sequence[Tensor]) -> Tensor:
        parts = [features] if isinstance(features, Tensor) else features
        return torch.cat([part.reshape(-1, self._hidden_size) for part in parts])

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

    def images(self, stream: MicroBatch, documents: Sequence[Pictured], features: Sequence[Tensor]) -> Images:
        """The images of documents of a stream, with their `features`, each [tokens of them all, hidden]."""
        rows, both_ways = [], list[tuple[int, int]]()
        positions = None if self._positions is None else stream.positions[:, None].repeat(1, 4)
        for start, end, images in documents:
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
    """RAM of what it finds of a token that stands for a part of an image."""
    patch_bytes: int
    """What it holds at once of a patch."""
    patch_pixels_bytes: int
    """What the processor makes of a patch."""
    token_patches: int
    """Patches of an image for each of its tokens."""

    @classmethod
    def of(cls, config: PretrainedConfig, item: int) -> TowerSizes:
        """`item`: bytes of an element of the compute dtype."""
        whole, vision = skeleton.build_whole(config), config.vision_config
        assert whole is not None
        text = _text_modules(whole)
        own = (p for part in whole.modules() if id(part) not in text for p in part.parameters(recurse=False))
        width = getattr(vision, "embed_dim", vision.hidden_size)
        inner = getattr(vision, "intermediate_size", None) or round(width * vision.mlp_ratio)
        depth = getattr(vision, "num_hidden_layers", None) or vision.depth
        # Queries, keys, values, attention and what is added to; the inner width twice; every layer's output, of which
        # some projectors take more than the last.
        held = (12 + depth) * width + 3 * inner
        pixels = getattr(vision, "temporal_patch_size", 1) * 3 * vision.patch_size**2 * 4
        merged = float(getattr(vision, "spatial_merge_size", getattr(config, "scale_factor", 1)))
        if (tokens := getattr(config, "mm_tokens_per_image", None)) is not None:
            merged = vision.image_size // vision.patch_size / tokens**0.5
        added = len(getattr(vision, "deepstack_visual_indexes", ()))
        return cls(
            weights_bytes=sum(p.numel() for p in own) * item,
            token_bytes=(1 + added) * config.get_text_config(decoder=True).hidden_size * item,
            patch_bytes=held * item + 2 * pixels,
            patch_pixels_bytes=pixels,
            token_patches=round(merged**2),
        )

    def work_bytes(self, tokens: int) -> int:
        """What it takes beside its weights for an image for which so many tokens stand."""
        return (tokens * self.token_patches + 1) * self.patch_bytes

    def pixels_bytes(self, tokens: int) -> int:
        """What the processor makes of such an image."""
        return tokens * self.token_patches * self.patch_pixels_bytes


def _runs(rows: Tensor) -> list[tuple[int, int]]:
    """The ranges of ascending numbers [m] that follow one another."""
    begins = torch.cat([rows[:1], rows[1:][rows.diff() > 1]]).tolist()
    ends = torch.cat([rows[:-1][rows.diff() > 1], rows[-1:]]).tolist()
    return [(begin, end + 1) for begin, end in zip(begins, ends, strict=True)]


def _text_modules(whole: PreTrainedModel) -> set[int]:
    """The modules, by id, of what is trained on texts."""
    parts = (whole.get_decoder(), whole.get_input_embeddings(), whole.get_output_embeddings())
    modules = itertools.chain.from_iterable(part.modules() for part in parts if part is not None)
    return {id(module) for module in modules}
