"""Images in the data: the gradients are those of plain transformers' whole model, its tower frozen or trained."""

import itertools
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from image_models import FAMILIES, IMAGE, ROOM, config_of, pixels_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedModel

from penstock.engine.hf.tower import Pictured, Places, Tower, TowerSizes
from penstock.engine.image_check import check_images
from penstock.engine.model.anatomy import take_apart
from penstock.engine.model.images import BOTH_WAYS, Images
from penstock.engine.model.reference import forward_backward, in_buffers
from penstock.engine.model.runner import ModelRunner
from penstock.engine.model.spec import ModelSpec
from penstock.engine.model.tokens import IGNORE_LABEL, MicroBatch
from penstock.engine.model.tower import TowerRunner, tower_params
from penstock.engine.self_check import relative_errors, streamed_gradients
from penstock.storage.files.errors import UserError

LAYOUTS = {
    "in the middle": [[(20, [1])], [(17, [])]],
    "two, and text only": [[(16, [1, 2]), (15, [])], [(14, [1]), (12, [])]],
    "text only": [[(30, [])]],
}
"""Micro-batches of documents: tokens of text, and sizes of images, which go between them."""
OTHERS = ("in the middle", "text only")
"""Layouts of which a few families stand for all."""


class Case(NamedTuple):
    whole: PreTrainedModel
    tower: Tower
    streams: list[MicroBatch]
    """With what the tower finds of their images."""
    unseen: list[MicroBatch]
    """With the images alone, for a tower that is trained."""
    documents: list[tuple[Tensor, Tensor, list[dict[str, Tensor]]]]
    """ids, labels, and what the processor makes of its images."""


def make(folder: Path, family: str, layout: list[list[tuple[int, list[int]]]]) -> Case:
    torch.manual_seed(0)
    whole: Any = AutoModelForImageTextToText.from_config(config_of(family), dtype=torch.float32).eval()
    for parameter in whole.parameters():
        parameter.data.normal_(std=0.1)
    whole.save_pretrained(folder)
    tower = Tower(whole.config, folder, torch.device("cpu"), torch.float32)
    places = Places(whole)
    streams, unseen, documents = [], [], []
    for micro_batch in layout:
        made = [document(family, *each) for each in micro_batch]
        stream = MicroBatch.of([ids for ids, *_ in made], [labels for _, labels, *_ in made])
        ends = [*stream.documents, len(stream.ids)]
        pictured = [Pictured(ends[i], ends[i + 1], *each[2:]) for i, each in enumerate(made) if each[2]]
        streams.append(tower.look(stream, pictured))
        unseen.append(places.unseen(stream, pictured, torch.float32))
        documents += [each[:3] for each in made]
    return Case(whole, tower, streams, unseen, documents)


def document(family: str, tokens: int, sizes: list[int]) -> tuple[Tensor, Tensor, list[dict[str, Tensor]], list[int]]:
    """ids, labels, its images, and how many tokens stand for each."""
    images = [pixels_of(family, size) for size in sizes]
    parts = [*torch.randint(3, 80, (tokens,)).chunk(len(sizes) + 1)]
    for number, (_, count) in reversed([*enumerate(images)]):
        parts.insert(number + 1, torch.full((count,), IMAGE))
    ids = torch.cat(parts)
    labels = torch.cat([ids[1:], torch.tensor([IGNORE_LABEL])])
    labels[labels == IMAGE] = IGNORE_LABEL
    return ids, labels, [pixels for pixels, _ in images], [count for _, count in images]


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
    """Loss and gradients by transformers alone."""
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


def trained(case: Case, spec: ModelSpec, pieces: bool) -> tuple[float, dict[str, Tensor], float, dict[str, Tensor]]:
    """Loss and gradients of what is trained: by the step in plain words, and by a pass of the engine."""
    runner = ModelRunner(spec, device="cpu", dtype=torch.float32)
    parameters = {name: p.detach() for name, p in parameters_of(case.whole).items()}
    weights, chunk = in_buffers(spec, parameters), chunk_of(case)
    names = {param.name for buffer in spec.trained.values() for param in buffer.params}
    gradients = in_buffers(spec, {name: torch.zeros_like(weights[name]) for name in names})
    loss = forward_backward(runner, weights, gradients, case.unseen, chunk, 1 << 14, in_pieces=pieces)
    return loss, gradients, *streamed_gradients(runner, parameters, case.unseen, chunk, pieces)


def require_gradients(case: Case, family: str, spec: ModelSpec, pieces: bool = False) -> dict[str, Tensor]:
    """Both ways of computing a step have transformers' gradients; where keys and values are whole, the same bits."""
    loss, expected = plain(case, family)
    in_words, gradients, streamed, found = trained(case, spec, pieces)
    assert in_words == pytest.approx(loss, rel=1e-6)
    assert streamed == pytest.approx(loss, rel=1e-6)
    assert found.keys() == gradients.keys()
    zero = torch.zeros(())
    expected = {name: expected.get(name, zero.expand(each.shape)) for name, each in gradients.items()}
    for each in (gradients, found):
        errors = relative_errors(each, expected)
        assert max(errors.values()) < 1e-5, errors
    assert pieces or all(torch.equal(found[name], gradients[name]) for name in found)
    return found


@pytest.mark.parametrize(
    ("family", "layout"),
    [*((family, "two, and text only") for family in FAMILIES), *itertools.product(["llava", "qwen3_vl"], OTHERS)],
)
def test_a_trained_tower_has_transformers_gradients(tmp_path: Path, family: str, layout: str) -> None:
    case = make(tmp_path, family, LAYOUTS[layout])
    spec = take_apart(case.whole.config, train_vision="all")
    assert {param.name for param in spec.params} == parameters_of(case.whole).keys()
    found = require_gradients(case, family, spec)
    tower = spec.params_of(spec.blocks[0])
    reached = {param.name for param in tower if parameters_of(case.whole)[param.name].grad is not None}
    own = {param.name for param in spec.params_of(spec.blocks[0], trained=True)}
    assert reached == (set() if layout == "text only" else own)
    assert any(found[name].any() for name in own) == (layout != "text only")


@pytest.mark.parametrize("family", ["llava", "qwen3_vl"])
def test_it_has_them_where_keys_and_values_are_streamed(tmp_path: Path, family: str) -> None:
    case = make(tmp_path, family, LAYOUTS["two, and text only"])
    require_gradients(case, family, take_apart(case.whole.config, train_vision="all"), pieces=True)


def test_it_has_them_beside_experts_that_are_blocks_of_their_own(tmp_path: Path) -> None:
    case = make(tmp_path, "qwen3_vl_moe", LAYOUTS["two, and text only"])
    require_gradients(case, "qwen3_vl_moe", take_apart(case.whole.config, split_layers="experts", train_vision="all"))


@pytest.mark.parametrize("family", ["llava", "gemma3", "qwen3_vl", "idefics3"])
def test_the_projector_can_be_trained_alone(tmp_path: Path, family: str) -> None:
    """Beside a text part that is trained and beside one that is frozen, as when a new projector is learnt."""
    case = make(tmp_path, family, LAYOUTS["two, and text only"])
    spec = take_apart(case.whole.config, train_vision="projector")
    own = {param.name for param in spec.params_of(spec.blocks[0], trained=True)}
    assert own
    assert spec.blocks[0].buffers == ("vision", "vision.frozen")
    require_gradients(case, family, spec)
    text = [param.name for param in take_apart(case.whole.config).params]
    alone = take_apart(case.whole.config, text, train_vision="projector")
    assert [*alone.trained] == ["vision"]
    case.whole.zero_grad()
    assert require_gradients(case, family, alone).keys() == own


def test_a_tower_that_is_not_known_is_refused() -> None:
    for config in (CONFIG_MAPPING["llama"](), CONFIG_MAPPING["mistral3"]()):
        with pytest.raises(
            UserError, match=r"model\.train_vision: all, but it is supported for llava, .* set it to none"
        ):
            tower_params(config, "all")


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


@pytest.mark.parametrize("family", FAMILIES)
def test_so_does_a_trained_one(tmp_path: Path, family: str) -> None:
    case = make(tmp_path, family, LAYOUTS["text only"])
    spec, sizes = take_apart(case.whole.config, train_vision="all"), TowerSizes.of(config_of(family), 4, trained=True)
    runner = TowerRunner(spec.config, torch.device("cpu"), torch.float32)
    weights = {name: p.detach() for name, p in parameters_of(case.whole).items() if name in runner.sites}
    sums, places = {name: torch.zeros_like(weight) for name, weight in weights.items()}, Places(case.whole)
    for size in (1, 3, 8):
        pixels, tokens = pixels_of(family, size)
        stream = MicroBatch.of([torch.full((tokens,), IMAGE)])
        images = places.unseen(stream, [Pictured(0, tokens, [pixels], [tokens])], torch.float32).images
        assert images is not None
        with Live() as live:
            runner.look(weights, images, 0, tokens)
            runner.backward(weights, images, 0, tokens, sums)
        assert live.peak <= sizes.work_bytes(tokens)
        assert sum(each.nbytes for each in (*images.features, *images.gradients)) == tokens * sizes.token_bytes


@pytest.mark.parametrize("mistake", ["add", "embed", "without", "take"])
def test_the_self_check_of_images_finds_a_mistake(monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    monkeypatch.setattr(Images, mistake, lambda self, *given: given[-1])
    with pytest.raises(UserError, match=r"self-check of images of model type 'qwen3_vl' failed"):
        check_images(config_of("qwen3_vl"))
