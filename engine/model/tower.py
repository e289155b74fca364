"""The vision tower of a model that takes images, with its projector: transformers' own modules, run on one image at a
time, forward and backward, with weights that live elsewhere."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from penstock.engine.model import skeleton
from penstock.engine.model.images import FAMILIES, Images, Pixels
from penstock.engine.model.skeleton import Tensors
from penstock.storage.files.errors import UserError
from penstock.storage.tier.layout import ParamSpec

Trained = Literal["projector", "all"]
_PROJECTORS = frozenset({"multi_modal_projector", "connector", "merger", "deepstack_merger_list"})
"""What transformers calls the modules that make a text model's vectors of the tower's."""


class TowerRunner:
    """Computes what images are to the text model on `device` in `dtype`; of `weights`, which hold all parameters by
    their names in the whole model, none is kept.

    Attributes: `whole`, transformers' model, of which the text part stays on meta; `sites`, parameter -> its module and
    attribute.
    """

    def __init__(self, config: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> None:
        whole = skeleton.build_whole(config)
        assert whole is not None
        self.whole = whole.eval()
        self.device, self.dtype = device, dtype
        self._hidden_size = int(config.get_text_config(decoder=True).hidden_size)
        text = text_modules(whole)
        own = _own_modules(whole)
        for _, model in reversed(own):  # a tower initialises its own; before parameters, which that sets too
            if isinstance(model, PreTrainedModel):
                parts = [(name, part) for name, part in model.named_modules() if id(part) not in text]
                skeleton.materialise_buffers(model, parts, device)
        for _, part in own:
            if isinstance(part, GradientCheckpointingLayer):
                # Backward has the inputs of all layers, and what one of them computes.
                run: Any = partial(checkpoint, part.forward, use_reentrant=False, preserve_rng_state=False)
                part.forward = run
        self.sites = _sites(own)
        self._get_features = cast(Any, whole.get_image_features)
        self._accepts = inspect.signature(self._get_features).parameters.keys()

    def features(self, weights: Tensors, pixels: Pixels) -> list[Tensor]:
        """Of one image: each [its tokens, hidden] on the device, as Images.features."""
        with torch.no_grad(), self._bound(weights):
            return self._look(pixels)

    def look(self, weights: Tensors, images: Images, start: int, end: int) -> None:
        """Find the features of those images of a stream that begin among its tokens from `start` to `end`."""
        for picture in images.beginning(start, end):
            for target, source in zip(images.features, self.features(weights, picture.pixels), strict=True):
                target[picture.first : picture.end].copy_(source, non_blocking=True)

    def backward(self, weights: Tensors, images: Images, start: int, end: int, grads: Tensors) -> None:
        """Add the gradients of what `look` did, by those of the features, to `grads` (float32, of what is trained)."""
        for picture in images.beginning(start, end):
            with self._bound(weights, grads) as trained, torch.enable_grad():
                found = self._look(picture.pixels)
                given = [
                    each[picture.first : picture.end].to(self.device, non_blocking=True) for each in images.gradients
                ]
                computed = torch.autograd.grad(found, list(trained.values()), given, allow_unused=True)
            for name, grad in zip(trained, computed, strict=True):
                if grad is not None:
                    grads[name].add_(grad)

    def _look(self, pixels: Pixels) -> list[Tensor]:
        given = {name: tensor.to(self.device) for name, tensor in pixels.items() if name in self._accepts}
        if self.dtype != torch.float32:
            given = {name: t.to(self.dtype) if t.is_floating_point() else t for name, t in given.items()}
        found: Any = self._get_features(**given, return_dict=True)
        each = [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]
        return [self._flat(of_image).to(self.dtype) for of_image in each]

    def _flat(self, features: Tensor | Sequence[Tensor]) -> Tensor:
        parts = [features] if isinstance(features, Tensor) else features
        return torch.cat([part.reshape(-1, self._hidden_size) for part in parts])

    @contextmanager
    def _bound(self, weights: Tensors, trained: Collection[str] = ()) -> Iterator[dict[str, nn.Parameter]]:
        """Inside the block the tower computes with `weights`; yields the parameters that stand for the `trained`."""
        meta = {name: part._parameters[key] for name, (part, key) in self.sites.items()}
        given = {name: nn.Parameter(weights[name], requires_grad=name in trained) for name in self.sites}
        try:
            self._install(given)
            yield {name: given[name] for name in trained}
        finally:
            self._install(meta)

    def _install(self, parameters: Mapping[str, nn.Parameter | None]) -> None:
        for name, (part, key) in self.sites.items():
            part._parameters[key] = parameters[name]


def tower_params(config: PretrainedConfig, trained: Trained) -> tuple[tuple[ParamSpec, ...], frozenset[str]]:
    """The parameters of a model's vision tower and projector, by their names in the whole model, and names of those
    that are never trained, which are those that no image reaches as well. UserError for a model whose tower cannot be
    trained, or that has no projector apart."""
    if config.model_type not in FAMILIES:
        raise UserError(
            f"model.train_vision: {trained}, but it is supported for {', '.join(FAMILIES)} only, not for model type "
            f"'{config.model_type}'; set it to none"
        )
    whole = skeleton.build_whole(config)
    assert whole is not None
    named = {name: part.get_parameter(key) for name, (part, key) in _sites(_own_modules(whole)).items()}
    params = tuple(ParamSpec(name=n, shape=tuple(p.shape), decay=p.dim() > 1) for n, p in named.items())
    stays = frozenset(n for n in named if trained == "projector" and _PROJECTORS.isdisjoint(n.split(".")))
    stays |= _unreached(whole, named)
    if len(stays) == len(params):
        raise UserError(f"model.train_vision: model type '{config.model_type}' has no projector apart; set it to all")
    return params, stays


def _unreached(whole: PreTrainedModel, named: Mapping[str, nn.Parameter]) -> set[str]:
    """Of a tower on meta the parameters that what it finds of an image does not depend on: the layers behind the one
    that is read, a head that pools. Towers that take more than the pixels of an image have none."""
    get_features: Any = cast(Any, whole).get_image_features
    if not {"image_grid_thw", "pixel_attention_mask"}.isdisjoint(inspect.signature(get_features).parameters):
        return set()
    size = whole.config.vision_config.image_size
    found = get_features(pixel_values=torch.empty(1, 3, size, size, device="meta"), return_dict=True).pooler_output
    outputs = [found] if isinstance(found, Tensor) else list(found)
    given = [torch.empty_like(output) for output in outputs]
    gradients = torch.autograd.grad(outputs, list(named.values()), given, allow_unused=True)
    return {name for name, gradient in zip(named, gradients, strict=True) if gradient is None}


def _own_modules(whole: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    """Tower and projector, by name: all modules that are not trained on texts."""
    text = text_modules(whole)
    return [(name, part) for name, part in whole.named_modules() if id(part) not in text]


def _sites(modules: Sequence[tuple[str, nn.Module]]) -> dict[str, tuple[nn.Module, str]]:
    """Parameter of one of the modules -> the module and the parameter's name in it."""
    return {
        f"{name}.{key}".removeprefix("."): (part, key)
        for name, part in modules
        for key, parameter in part._parameters.items()
        if parameter is not None
    }


def text_modules(whole: PreTrainedModel) -> set[int]:
    """The modules, by id, of what is trained on texts."""
    parts = (whole.get_decoder(), whole.get_input_embeddings(), whole.get_output_embeddings())
    modules = itertools.chain.from_iterable(part.modules() for part in parts if part is not None)
    return {id(module) for module in modules}
