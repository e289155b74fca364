"""The images of a run's data on their way to the text model: from their files in the corpus, by the model's own
processor and its vision tower, once for each micro-batch. A frozen tower looks at them before the pass begins; one that
is trained is a block of the pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from penstock.engine.config import Recipe
from penstock.engine.data.corpus.files import TokenCorpus
from penstock.engine.data.corpus.images import ImageFiles
from penstock.engine.data.text.images import ImageProcessor
from penstock.engine.hf.tower import Pictured, Places, Tower, TowerSizes
from penstock.engine.model import skeleton
from penstock.engine.model.images import BOTH_WAYS, require_images
from penstock.engine.model.spec import ModelSpec
from penstock.engine.model.tokens import MicroBatch
from penstock.engine.plan.problem import DTYPE_BYTES, VisionSpace
from penstock.storage.files.errors import UserError

Compute = Callable[[Callable[[], Any]], Any]
"""Carries out a piece of work, whose result it gives."""
_POSITION_BYTES = 4 * 8
_STEPS = 3
"""Whose features are in RAM at once: the one that runs, the one before and the one after."""


class Vision:
    """Attributes: `space`, the memory that it takes."""

    def __init__(
        self, images: ImageFiles, processor: ImageProcessor, config: PretrainedConfig, folder: Path, trained: bool
    ) -> None:
        """Use `find`."""
        self._images, self._processor, self._config, self._folder = images, processor, config, folder
        self._trained, self._dtype = trained, torch.float32
        self._tower: Tower | None = None
        self._places: Places | None = None
        self.space = VisionSpace()

    @classmethod
    def find(cls, corpus: TokenCorpus, recipe: Recipe, spec: ModelSpec) -> Vision | None:
        """None where the data has no images. Raises UserError for a model whose images cannot be trained on, and where
        a tower that is to be trained would get none."""
        if corpus.images is None:
            if spec.vision is not None:
                raise UserError(
                    f"model.train_vision: {recipe.model.train_vision}, but the data has no images; set it to none, or "
                    "use data with images"
                )
            return None
        require_images(spec.model_type)
        folder = None if recipe.model.path is None else Path(recipe.model.path).expanduser()
        processor = ImageProcessor.find(folder)
        if folder is None or processor is None:
            raise UserError(
                f"model.path: {recipe.model.path} has no processor of images, and the data has images; restore the "
                "model's folder"
            )
        trained = spec.vision is not None
        vision = cls(corpus.images, processor, spec.config, folder, trained)
        train, item = recipe.train, DTYPE_BYTES[recipe.train.compute_dtype]
        sizes = TowerSizes.of(spec.config, item, trained)
        tokens = train.global_batch_size * recipe.data.sequence_length
        most = tokens * corpus.images.share(corpus.starts[1:] - corpus.starts[:-1])
        counts = corpus.images.tokens
        whole, longest = spec.model_type in BOTH_WAYS, train.micro_batch_size * recipe.data.sequence_length
        if whole and train.chunk_tokens is not None and train.chunk_tokens < longest:
            raise UserError(
                f"train.chunk_tokens: {train.chunk_tokens:,}, but {spec.model_type} attends to images in both "
                f"directions, so that a micro-batch of {longest:,} tokens is one chunk; leave it out, and where memory "
                "is short lower data.sequence_length or train.micro_batch_size"
            )
        vision.space = VisionSpace(
            whole_chunks=whole,
            weights_bytes=0 if trained else sizes.weights_bytes,
            work_bytes=sizes.work_bytes(int(counts.max())),
            flops_per_token=round(sizes.token_flops * counts.sum() / len(corpus.tokens)) if trained else 0,
            features_bytes=_STEPS * (round(most * sizes.token_bytes) + tokens * _POSITION_BYTES)
            + (_STEPS if trained else 1) * sizes.pixels_bytes(round(most)),
        )
        return vision

    def open(self, device: torch.device, dtype: torch.dtype) -> None:
        """Load the tower, unless it is trained. Raises UserError where it is not in the model's folder."""
        self._dtype = dtype
        if self._trained:
            whole = skeleton.build_whole(self._config)
            assert whole is not None
            self._places = Places(whole)
        else:
            self._tower = Tower(self._config, self._folder, device, dtype)

    def look(self, micro_batches: Sequence[MicroBatch], compute: Compute) -> list[MicroBatch]:
        """The micro-batches with what the text model is given of their images, or a tower that is trained; `compute`
        does a frozen tower's work where the device's work is done. Raises UserError where an image of the corpus is
        damaged."""
        # All that the CPU does comes first: the device may have a step to compute meanwhile.
        documents = [
            [
                Pictured(
                    start,
                    end,
                    [self._pixels(number) for number in images],
                    [int(self._images.tokens[number]) for number in images],
                )
                for start, end, images in stream.pictured
            ]
            for stream in micro_batches
        ]
        if not any(documents):
            return list(micro_batches)
        if (places := self._places) is not None:
            return [places.unseen(*each, self._dtype) for each in zip(micro_batches, documents, strict=True)]
        tower = self._tower
        assert tower is not None, "the tower is not loaded"
        seen: list[MicroBatch] = compute(lambda: list(map(tower.look, micro_batches, documents)))
        return seen

    def _pixels(self, number: int) -> dict[str, Any]:
        try:
            return self._processor.process(self._images.read(number))[0]
        except ValueError as error:  # which it was not when the corpus was made
            raise UserError(f"{self._images.path}: image {number:,}: {error}; restore the model's folder") from error
