"""Images in the data: the text model's gradients are those of plain transformers' whole model, its tower frozen."""

import weakref
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from image_models import FAMILIES, IMAGE, ROOM, config_of, pixels_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForImageTextToText, PreTrainedModel

from penstock.engine.hf.tower import Pictured, Tower, TowerSizes
from penstock.engine.image_check import check_images
from penstock.engine.model.anatomy import take_apart
from penstock.engine.model.images import BOTH_WAYS, Images
from penstock.engine.model.reference import forward_backward, in_buffers
from penstock.engine.model.runner import ModelRunner
from penstock.engine.model.tokens import IGNORE_LABEL, MicroBatch
from penstock.engine.self_check import relative_errors, streamed_gradients
from penstock.storage.files.errors import UserError

LAYOUTS = {
    "in the middle": [[(20, [1])], [(17, [])]],
    "two, and text only": [[(16, [1, 2]), (15, [])], [(14, [1]), (12, [])]],
    "text only": [[(30, [])]],
}
"""Micro-batches of documents: tokens of text, and sizes of images, which go between them."""


class Case(NamedTuple):
    whole: PreTrainedModel
    tower: Tower
    streams: list[MicroBatch]
    documents: list[tuple[Tensor, Tensor, list[dict[str, Tensor]]]]
    """ids, labels, and what the processor makes of its images."""


def make(folder: Path, family: str, layout: list[list[tuple[int, list[int]]]]) -> Case:
    torch.manual_seed(0)
    whole: Any = AutoModelForImageTextToText.from_config(config_of(family), dtype=torch.float32).eval()
    for parameter in whole.parameters():
        parameter.data.normal_(std=0.1)
    whole.save_pretrained(folder)
    tower = Tower(whole.config, folder, torch.device("cpu"), torch.float32)
    streams, documents = [], []
    for micro_batch in layout:
        made = [document(family, *each) for each in micro_batch]
        stream = MicroBatch.of([ids for ids, _, _ in made], [labels for _, labels, _ in made])
        ends = [*stream.documents, len(stream.ids)]
        pictured = [Pictured(ends[i], ends[i + 1], images) for i, (_, _, images) in enumerate(made) if images]
        streams.append(tower.look(stream, pictured))
        documents += made
    return Case(whole, tower, streams, documents)


def document(family: str, tokens: int, sizes: list[int]) -> tuple[Tensor, Tensor, list[dict[str, Tensor]]]:
    images = [pixels_of(family, size) for size in sizes]
    parts = [*torch.randint(3, 80, (tokens,)).chunk(len(sizes) + 1)]
    for number, (_, count) in reversed([*enumerate(images)]):
        parts.insert(number + 1, torch.full((count,), IMAGE))
    ids = torch.cat(parts)
    labels = torch.cat([ids[1:], torch.tensor([IGNORE_LABEL])])
    labels[labels == IMAGE] = IGNORE_LABEL
    return ids, labels, [pixels for pixels, _ in images]


def cuts(case: Case, chunk: int) -> bool:
    """Whether chunks of so many tokens cut an image."""
    is_image = [stream.ids == IMAGE for stream in case.streams]
    return any(mask[edge - 1] and mask[edge] for mask in is_image for edge in range(chunk, len(mask), chunk))


def chunk_of(case: Case) -> int:
    """Tokens of a chunk, of which there are four or more; images are cut where they may be."""
    pictured = any(images for _, _, images in case.documents)
    may_cut = case.whole.config.model_type not in BOTH_WAYS
    most = min(len(stream.ids) for stream in case.streams) // (4 if may_cut else 2)
    return next(chunk for chunk in range(most, 2, -1) if not pictured or cuts(case, chunk) == may_cut)


def plain(case: Case, family: str) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the text part by transformers alone."""
    total = sum(int((labels != IGNORE_LABEL).sum()) for _, labels, _ in case.documents)
    loss = torch.zeros(())
    for ids, labels, images in case.documents:
        given = {name: torch.cat([pixels[name] for pixels in images]) for name in (images[0] if images else ())}
        if images and (name := ROOM.get(family, "mm_token_type_ids")) is not None:
            given[name] = (ids == IMAGE)[None].int()
        logits = case.whole(input_ids=ids[None], use_cache=False, **given).logits[0]
        loss = loss + torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORE_LABEL, reduction="sum")
    loss = loss / total
    loss.backward()
    return loss.item(), {n: p.grad for n, p in parameters_of(case.whole).items() if p.grad is not None}


def parameters_of(whole: PreTrainedModel) -> dict[str, Tensor]:
    """By the names of the text model, which has some of its own where transformers has a class for it alone."""
    own = {parameter.name for parameter in take_apart(whole.config).params}
    named = dict(whole.named_parameters())
    return {name if name in own else name.replace("model.language_model.", "model."): p for name, p in named.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_step_in_plain_words_has_transformers_gradients(tmp_path: Path, family: str, layout: str) -> None:
    case = make(tmp_path, family, LAYOUTS[layout])
    loss, expected = plain(case, family)
    spec = take_apart(case.whole.config)
    runner = ModelRunner(spec, device="cpu", dtype=torch.float32)
    weights = in_buffers(spec, {name: p.detach() for name, p in parameters_of(case.whole).items()})
    gradients = in_buffers(spec, {name: torch.zeros_like(weight) for name, weight in weights.items()})
    streamed = forward_backward(runner, weights, gradients, case.streams, chunk_of(case), 1 << 14)
    assert streamed == pytest.approx(loss, rel=1e-6)
    text = {name: gradient for name, gradient in expected.items() if name in gradients}
    assert text.keys() == gradients.keys()
    errors = relative_errors(gradients, text)
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("pieces", [False, True], ids=["whole window", "streamed window"])
@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_vl_moe, experts apart"])
def test_the_streamed_pass_has_them_too(tmp_path: Path, family: str, pieces: bool) -> None:
    family, apart, _ = family.partition(", experts apart")
    case = make(tmp_path, family, LAYOUTS["two, and text only"])
    loss, expected = plain(case, family)
    spec = take_apart(case.whole.config, split_layers="experts" if apart else None)
    runner = ModelRunner(spec, device="cpu", dtype=torch.float32)
    parameters = {name: p.detach() for name, p in parameters_of(case.whole).items()}
    chunk = chunk_of(case)
    assert cuts(case, chunk) != (family in BOTH_WAYS)
    streamed, gradients = streamed_gradients(runner, parameters, case.streams, chunk, pieces)
    assert streamed == pytest.approx(loss, rel=1e-6)
    errors = relative_errors(gradients, {name: gradient for name, gradient in expected.items() if name in gradients})
    assert max(errors.values()) < 1e-5, errors


class Live(TorchDispatchMode):
    """The most bytes that tensors made inside it have at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)]
        self._known |= {tensor.untyped_storage()._cdata for tensor in given}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (key := (storage := tensor.untyped_storage())._cdata) not in self._known:
                self._known.add(key)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._gone, key, storage.nbytes())
        return result

    def _gone(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tower_takes_no_more_than_is_planned(tmp_path: Path, family: str) -> None:
    tower = make(tmp_path, family, LAYOUTS["text only"]).tower
    sizes = TowerSizes.of(config_of(family), 4)
    assert tower.nbytes == sizes.weights_bytes
    for size in (1, 3, 8):
        pixels, tokens = pixels_of(family, size)
        with Live() as live:
            features = tower.features(pixels)
        assert live.peak <= sizes.work_bytes(tokens)
        assert sum(each.numel() * 4 for each in features) == tokens * sizes.token_bytes
        assert pixels["pixel_values"].numel() * 4 == sizes.pixels_bytes(tokens)


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_self_check_of_images_passes(family: str, pieces: bool) -> None:
    assert check_images(config_of(family), pieces=pieces) <= 1e-4


@pytest.mark.parametrize("mistake", ["add", "embed", "without"])
def test_the_self_check_of_images_finds_a_mistake(monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    monkeypatch.setattr(Images, mistake, lambda self, *given: given[-1])
    with pytest.raises(UserError, match=r"self-check of images of model type 'qwen3_vl' failed"):
        check_images(config_of("qwen3_vl"))
