"""The self-check of images: a shrunk copy of a model, given vectors in the place of what its tower would find, by the
engine against transformers' own forward and autograd. The tower itself is transformers' own code, and not checked."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel

from penstock.engine.hf.tower import Pictured, Places
from penstock.engine.model.anatomy import take_apart
from penstock.engine.model.runner import ModelRunner
from penstock.engine.model.shrink import shrink
from penstock.engine.model.spec import ModelSpec
from penstock.engine.model.tokens import IGNORE_LABEL, MicroBatch
from penstock.engine.model.trace import one_thread
from penstock.engine.self_check import relative_errors, streamed_gradients
from penstock.storage.files.errors import UserError, refused

TOLERANCE = 1e-4
"""Largest relative error of the loss and of any parameter's gradient: what float32 may round, and no mistake."""
_TEXTS, _SIDES = (9, 8, 19), (2, 3)
"""Tokens of text around the two images of a document, and the sides of each."""
_CHUNK, _UNCUT = 13, 16
"""Tokens of a chunk, of which an edge is in an image, and of one with none."""


class _Document(NamedTuple):
    ids: Tensor
    labels: Tensor
    features: Sequence[Tensor]
    """Each [tokens of its images, hidden]."""
    grids: Tensor
    """[images, 3] as the processor has them."""


@one_thread()
def check_images(config: PretrainedConfig, *, pieces: bool = False) -> float:
    """The largest relative error of loss and gradients. UserError where it is too large, or nothing is computed.

    `pieces`: attention goes over one chunk of keys at a time.
    """
    with refused("images: no small copy could be made for the self-check"):
        small, _ = shrink(config)
        for name in ("image_token_id", "image_token_index"):
            if hasattr(small, name):
                setattr(small, name, small.get_text_config(decoder=True).vocab_size - 1)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            make: Any = AutoModelForImageTextToText
            whole = make.from_config(small, attn_implementation="eager", dtype=torch.float32).eval()
            for parameter in whole.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            spec, places = take_apart(small), Places(whole)
            documents = [_document(small, places.image_id) for _ in range(2)]
    with refused("images: transformers' own forward fails"):
        loss, expected = _plain(whole, spec, documents)
    with refused("images: streaming fails"):
        parameters = {name: parameter.detach() for name, parameter in _parameters(whole, spec).items()}
        constants = {name: buffer for name, buffer in whole.named_buffers() if name in spec.constants}
        runner = ModelRunner(spec, device="cpu", dtype=torch.float32, constants=constants)
        streams = [_stream(places, document) for document in documents]
        images = [stream.images for stream in streams if stream.images is not None]
        chunk = _UNCUT if any(each.both_ways for each in images) else _CHUNK
        streamed, gradients = streamed_gradients(runner, parameters, streams, chunk, pieces)
        gradients |= _of_features([each.gradients for each in images])
    errors = relative_errors(gradients, expected) | {"loss": abs(streamed - loss) / abs(loss)}
    worst = max(errors, key=errors.__getitem__)
    if not errors[worst] <= TOLERANCE:
        raise UserError(
            f"self-check of images of model type '{config.model_type}' failed, so it is not trained on them: {worst}: "
            f"differs from transformers' by {errors[worst]:.2g} (relative; {TOLERANCE:g} is allowed); remove the "
            "images from the data"
        )
    return errors[worst]


def _document(config: PretrainedConfig, image_id: int) -> _Document:
    text = config.get_text_config(decoder=True)
    merged = int(getattr(config.vision_config, "spatial_merge_size", 1))
    texts = [torch.randint(6, image_id, (count,)) for count in _TEXTS]
    count = _SIDES[0] * _SIDES[1]
    image = torch.full((count,), image_id)
    ids = torch.cat([texts[0], image, texts[1], image, texts[2]])
    labels = torch.cat([ids[1:], torch.tensor([IGNORE_LABEL])])
    labels[labels == image_id] = IGNORE_LABEL
    added = len(getattr(config.vision_config, "deepstack_visual_indexes", ()))
    features = [torch.randn(2 * count, text.hidden_size) for _ in range(1 + added)]
    return _Document(ids, labels, features, torch.tensor([[1, *(merged * side for side in _SIDES)]] * 2))


def _stream(places: Places, document: _Document) -> MicroBatch:
    stream = MicroBatch.of([document.ids], [document.labels])
    pictured = Pictured(0, len(document.ids), [{"image_grid_thw": grid[None]} for grid in document.grids])
    images = places.images(stream, [pictured], document.features)
    return replace(stream, images=replace(images, gradients=[torch.zeros_like(each) for each in document.features]))


def _of_features(gradients: Sequence[Sequence[Tensor]]) -> dict[str, Tensor]:
    """What a trained tower goes backward from, by number, of the documents' gradients of their features."""
    return {f"features {number}": torch.cat(each) for number, each in enumerate(zip(*gradients, strict=True))}


def _plain(whole: PreTrainedModel, spec: ModelSpec, documents: Sequence[_Document]) -> tuple[float, dict[str, Tensor]]:
    """Mean loss, and the gradients of the text part and of the features, by transformers alone, a document at a
    time."""
    accepts = inspect.signature(whole.forward).parameters
    places, total = Places(whole), sum(int((d.labels != IGNORE_LABEL).sum()) for d in documents)
    loss, given_features = torch.zeros(()), [[f.clone().requires_grad_() for f in d.features] for d in documents]
    for (ids, labels, _, grids), features in zip(documents, given_features, strict=True):
        each = [list(part.chunk(2)) for part in features]
        stacked: Any = each[0] if "image_grid_thw" in accepts or spec.model_type == "llava" else torch.stack(each[0])
        given: dict[str, Any] = {"mm_encoder_outputs": {"image": SimpleNamespace(pooler_output=stacked)}}
        given["mm_encoder_outputs"]["image"].deepstack_features = each[1:]
        types = (ids == places.image_id)[None].int()
        if "image_grid_thw" in accepts:
            given |= {"image_grid_thw": grids, "mm_token_type_ids": types}
        elif "token_type_ids" in accepts:
            given["token_type_ids"] = types
        logits = whole(input_ids=ids[None], use_cache=False, **given).logits[0]
        loss = loss + functional.cross_entropy(logits, labels, ignore_index=IGNORE_LABEL, reduction="sum") / total
    loss.backward()
    named, zero = _parameters(whole, spec), torch.zeros(())
    gradients = {n: zero.expand(p.shape) if p.grad is None else p.grad for n, p in named.items()}
    of_features = [[zero.expand(f.shape) if f.grad is None else f.grad for f in each] for each in given_features]
    return loss.item(), gradients | _of_features(of_features)


def _parameters(whole: PreTrainedModel, spec: ModelSpec) -> dict[str, Tensor]:
    """Those of the text part, by the names that they have in it."""
    own = {parameter.name for parameter in spec.params}
    named = ((name if name in own else name.replace("language_model.", ""), p) for name, p in whole.named_parameters())
    return {name: parameter for name, parameter in named if name in own}
