"""Fine-tuning a vision-language model on rows with images, from the file to the exported folder."""

import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from image_models import COLOURS, make_image_model
from image_runs import rows, sections
from ranked import ranked
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from penstock.engine.config import BudgetConfig, SamplesConfig
from penstock.engine.data.corpus.prepare import prepare_data
from penstock.engine.data.text.images import ImageProcessor
from penstock.engine.export import export
from penstock.engine.model.anatomy import take_apart
from penstock.engine.model.images import BOTH_WAYS
from penstock.engine.ranks.ranks import Ranks
from penstock.engine.run_files import INPUTS
from penstock.storage.files.errors import UserError
from penstock.storage.generations.store import NvmeStore


@pytest.fixture(scope="module", params=["llava", "gemma3", "qwen3_vl"])
def origin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_image_model(tmp_path_factory.mktemp("model") / request.param, request.param)


@pytest.fixture(scope="module", params=["idefics3"])
def tiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_image_model(tmp_path_factory.mktemp("model") / request.param, request.param)


def test_it_learns_what_is_in_an_image_and_the_export_tells(tmp_path: Path, origin: Path) -> None:
    run, observer = sections(origin, rows(tmp_path)), tiny.Silent()
    tiny.train_run(tmp_path / "run", observer, **run)
    assert any("6 images" in message for message in observer.messages)
    assert observer.metrics[-1].loss < 0.02 < observer.metrics[0].loss, "it tells colours, and does not guess"
    assert observer.plan["tiers"]["gpu"]["parts"]["vision tower"] > 0
    assert observer.plan["tiers"]["ram"]["parts"]["images"] > 0
    export(tmp_path / "run", tiny.recipe(**run), out_dir=tmp_path / "out")
    before, after = (load_file(folder / "model.safetensors") for folder in (origin, tmp_path / "out"))
    assert before.keys() == after.keys()
    untouched = [name for name in before if "vision" in name or "visual" in name or "projector" in name]
    assert untouched
    assert all(torch.equal(before[name], after[name]) for name in untouched)
    for file in ("preprocessor_config.json", "processor_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "out" / file).read_bytes() == (origin / file).read_bytes()
    for colour in COLOURS:
        assert answer(tmp_path / "out", tmp_path / f"{colour}.png") == f"It is {colour}."


def answer(folder: Path, image: Path) -> str:
    """What transformers' model says of an image."""
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    processor = ImageProcessor(folder)._processor
    question = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What colour is it?"}]}]
    text = processor.apply_chat_template(question, add_generation_prompt=True)
    from PIL import Image

    given = processor(images=[Image.open(image)], text=text, return_tensors="pt")
    made = model.generate(**given, max_new_tokens=12, do_sample=False)[0, given["input_ids"].shape[1] :]
    return str(processor.tokenizer.decode(made, skip_special_tokens=True))


def of_tower(name: str) -> bool:
    return "vision" in name or "visual" in name


def of_projector(name: str) -> bool:
    return "projector" in name or "merger" in name


@pytest.mark.parametrize("vision", ["projector", "all"])
def test_a_trained_tower_is_exported_as_it_is_in_the_run(tmp_path: Path, origin: Path, vision: str) -> None:
    """What is trained has moved and is the run's master; what is not is as it was, bit by bit."""
    run, observer = sections(origin, rows(tmp_path), steps=6, vision=vision), tiny.Silent()
    tiny.train_run(tmp_path / "run", observer, **run)
    assert observer.metrics[-1].loss < observer.metrics[0].loss
    assert "vision tower" not in observer.plan["tiers"]["gpu"]["parts"], "it is among the blocks"
    assert observer.plan["blocks"][0]["block"] == "vision"
    export(tmp_path / "run", tiny.recipe(**run), out_dir=tmp_path / "out")
    before, after = (load_file(folder / "model.safetensors") for folder in (origin, tmp_path / "out"))
    assert before.keys() == after.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert all(name in moved for name in before if of_projector(name))
    assert any(of_tower(name) and not of_projector(name) for name in moved) == (vision == "all")
    spec = take_apart(AutoModelForImageTextToText.from_pretrained(origin).config, train_vision=vision)
    with closing(NvmeStore.open(tmp_path / "run" / "state")) as store:
        masters = tiny.parameters(store, spec)
    loaded = dict(AutoModelForImageTextToText.from_pretrained(tmp_path / "out").named_parameters())
    tower = [param.name for param in spec.params_of(spec.blocks[0])]
    assert all(torch.equal(loaded[name], masters[name]) for name in tower)


def test_in_bfloat16_the_frozen_part_of_a_tower_is_exported_as_it_was(tmp_path: Path, origin: Path) -> None:
    run = sections(origin, rows(tmp_path), steps=2, vision="projector")
    run["train"] = replace(run["train"], compute_dtype="bfloat16")
    tiny.train_run(tmp_path / "run", tiny.Silent(), **run)
    export(tmp_path / "run", tiny.recipe(**run), out_dir=tmp_path / "out")
    before, after = (load_file(folder / "model.safetensors") for folder in (origin, tmp_path / "out"))
    assert all(
        torch.equal(before[name], after[name]) != of_projector(name)
        for name in before
        if of_tower(name) or of_projector(name)
    )


def test_a_resumed_run_goes_on_with_its_tower(tmp_path: Path, origin: Path) -> None:
    """Memory is so scarce that the tower is streamed from NVMe."""
    run = sections(origin, rows(tmp_path), steps=4, vision="all")
    run |= {"budgets": BudgetConfig(gpu="least", ram="least")}
    tiny.train_run(tmp_path / "straight", observer := tiny.Silent(), **run)
    assert {block["state"] for block in observer.plan["blocks"] if not block["frozen"]} == {"nvme"}
    tiny.train_run(tmp_path / "run", tiny.Silent(stop_after=2), **run)
    tiny.train_run(tmp_path / "run", tiny.Silent(), resume=True, **run)
    spec = take_apart(AutoModelForImageTextToText.from_pretrained(origin).config, train_vision="all")
    states = []
    for name in ("straight", "run"):
        with closing(NvmeStore.open(tmp_path / name / "state")) as store:
            states.append(tiny.parameters(store, spec))
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


WAYS: list[dict[str, Any]] = [{"activation_checkpointing": "none"}, {"activation_checkpointing": "full"}]
WAYS += [{"kv_window": "streamed"}, {"micro_batch_size": 3}]


@pytest.mark.parametrize("vision", ["none", "all"])
def test_however_it_is_computed_it_is_the_same_step(tmp_path: Path, origin: Path, vision: str) -> None:
    run = sections(origin, rows(tmp_path), steps=2, vision=vision)
    found = []
    for number, way in enumerate([{}, *WAYS]):
        observer = tiny.Silent()
        chunk_tokens = 288 if origin.name in BOTH_WAYS else run["train"].chunk_tokens
        train = replace(run["train"], **({"chunk_tokens": chunk_tokens} | way))
        tiny.train_run(tmp_path / str(number), observer, **(run | {"train": train}))
        found.append([value for metrics in observer.metrics for value in (metrics.loss, metrics.grad_norm)])
    assert all(values == pytest.approx(found[0], rel=1e-4) for values in found)


def on_ranks(ranks: Ranks, folder: Path, run: dict[str, Any]) -> list[tuple[float, float]]:
    tiny.train_run(folder, observer := tiny.Silent(), ranks=ranks, **run)
    return [(m.loss, m.grad_norm) for m in observer.metrics]


@pytest.mark.parametrize("vision", ["none", "all"])
def test_on_several_ranks_it_is_the_same_run(tmp_path: Path, origin: Path, vision: str) -> None:
    run = sections(origin, rows(tmp_path), steps=2, vision=vision)
    # Chunks of one length, whatever would suit the number of ranks.
    chunk_tokens = run["train"].chunk_tokens or run["data"].sequence_length
    run["train"] = replace(run["train"], replicas=3, chunk_tokens=chunk_tokens)
    found = {count: ranked(count, on_ranks, tmp_path / str(count), run) for count in (1, 3)}
    assert all(each == found[1][0] for each in found[3])
    assert tiny.digest_of(tmp_path / "1") == tiny.digest_of(tmp_path / "3")


def test_a_resumed_run_sees_the_same_images(tmp_path: Path, origin: Path) -> None:
    run = sections(origin, rows(tmp_path), steps=6)
    tiny.train_run(tmp_path / "straight", tiny.Silent(), **run)
    tiny.train_run(tmp_path / "run", tiny.Silent(stop_after=3), **run)
    for colour in COLOURS:
        (tmp_path / f"{colour}.png").unlink()
    tiny.train_run(tmp_path / "run", tiny.Silent(), resume=True, **run)
    spec = tiny.spec_of(AutoModelForImageTextToText.from_pretrained(origin).config)
    states = []
    for name in ("straight", "run"):
        with closing(NvmeStore.open(tmp_path / name / "state")) as store:
            states.append(tiny.parameters(store, spec))
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


def test_a_validation_sees_the_tower_of_its_step(tmp_path: Path, origin: Path) -> None:
    """Nothing but the tower is trained, so that what changes comes of it alone. Samples, of texts, pass it by."""
    run, observer = sections(origin, rows(tmp_path), steps=2, vision="all"), tiny.Silent()
    text = [param.name for param in take_apart(AutoModelForImageTextToText.from_pretrained(origin).config).params]
    run["train"] = replace(run["train"], validate_every=1, validate_first=True, freeze=text)
    run["data"] = replace(run["data"], validation_documents=3)
    samples = SamplesConfig(every=1, prompts=["colour?"], tokens=2)
    tiny.train_run(tmp_path / "run", observer, **run, samples=samples)
    assert len({metrics.loss for metrics in observer.validations}) == 3
    assert len({str(each.samples) for each in observer.samples}) == 1


def test_what_cannot_be_is_refused(tmp_path: Path, origin: Path) -> None:
    run = sections(origin, rows(tmp_path), steps=2, vision="projector")
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    (tmp_path / "texts.jsonl").write_text(lines[-1] + "\n")
    texts = run | {"data": replace(run["data"], path=str(tmp_path / "texts.jsonl"))}
    with pytest.raises(UserError, match=r"model\.train_vision: projector, but the data has no images; set it to none"):
        tiny.train_run(tmp_path / "texts", tiny.Silent(), **texts)
    tiny.train_run(tmp_path / "run", tiny.Silent(), **run)
    other = run | {"model": replace(run["model"], train_vision="all")}
    with pytest.raises(UserError, match=r"model\.train_vision: all in the recipe, projector in the run"):
        tiny.train_run(tmp_path / "run", tiny.Silent(), resume=True, **other)
    # As where a run has been downloaded, without its model's weights.
    small = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(origin, tmp_path / "run" / INPUTS / "model", ignore=small)
    lost = replace(tiny.recipe(**run), model=replace(run["model"], path=str(tmp_path / "lost")))
    with pytest.raises(UserError, match=r"lost is missing here, and the vision tower, which is trained"):
        export(tmp_path / "run", lost, out_dir=tmp_path / "out")


def test_the_tokens_are_those_of_the_models_processor(tmp_path: Path, origin: Path) -> None:
    require_tokens(tmp_path, origin)


def test_so_are_those_of_an_image_in_tiles(tmp_path: Path, tiled: Path) -> None:
    require_tokens(tmp_path, tiled)
    run, observer = sections(tiled, tmp_path / "rows.jsonl", steps=2), tiny.Silent()
    run["data"] = replace(run["data"], sequence_length=192)
    tiny.train_run(tmp_path / "run", observer, **run)
    assert len(observer.metrics) == 2


def require_tokens(tmp_path: Path, origin: Path) -> None:
    run = tiny.recipe(**sections(origin, rows(tmp_path)))
    corpus = prepare_data(run, tmp_path / "data").corpus
    processor = ImageProcessor(origin)
    from PIL import Image

    images = [Image.open(tmp_path / f"{colour}.png") for colour in ("red", "blue")]
    parts = [{"type": "image"}, {"type": "text", "text": " or "}, {"type": "image"}, {"type": "text", "text": "?"}]
    talk = [{"role": "user", "content": parts}, {"role": "assistant", "content": [{"type": "text", "text": "blue"}]}]
    text = processor._processor.apply_chat_template(talk)
    expected = processor._processor(images=[images], text=[text])["input_ids"][0]
    start, stop = corpus.starts[4:6]
    assert corpus.tokens[start:stop].tolist() == expected
    assert corpus.weights is not None
    trained = corpus.tokens[start:stop][corpus.weights[start:stop] > 0]
    assert processor._processor.tokenizer.decode(trained).rstrip() == "blue<|im_end|>"
    assert corpus.images is not None
    assert [len(corpus.images.of_document(number)) for number in range(6)] == [1, 1, 1, 1, 2, 0]
