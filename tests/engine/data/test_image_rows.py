"""Rows with images: the layouts that are read, and what is refused in one line."""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny
from image_models import COLOURS, make_image_model, write_image
from transformers import AutoTokenizer

from penstock.engine.config import DataConfig, ModelConfig, Recipe
from penstock.engine.data.corpus.files import TokenCorpus
from penstock.engine.data.corpus.prepare import prepare_data
from penstock.engine.data.formats.detect import detect
from penstock.engine.data.loading import make_loader
from penstock.engine.hf.config import model_config
from penstock.storage.files.errors import UserError

ANSWER = {"role": "assistant", "content": "red"}
ASKED = [{"type": "image"}, {"type": "text", "text": "Which?"}]


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_image_model(tmp_path_factory.mktemp("model") / "qwen3_vl", "qwen3_vl")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for colour in COLOURS:
        write_image(tmp_path / f"{colour}.png", colour)
    whole = write_image(tmp_path / "whole.jpg", "red", (64, 64)).read_bytes()
    (tmp_path / "broken.png").write_bytes(whole[: len(whole) - 20])
    (tmp_path / "text.png").write_text("no image")
    return tmp_path


def recipe(origin: Path, file: Path, **changes: Any) -> Recipe:
    settings: dict[str, Any] = {"source": detect(file).source, "packing": "best_fit", "sequence_length": 64}
    return tiny.recipe(model=ModelConfig(path=str(origin)), data=DataConfig(path=str(file), **(settings | changes)))


def prepared(origin: Path, folder: Path, *rows: dict[str, Any], **changes: Any) -> TokenCorpus:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return prepare_data(recipe(origin, file, **changes), folder / "data").corpus


def test_all_layouts_are_the_same_document(origin: Path, folder: Path) -> None:
    user, marked = {"role": "user", "content": "Which?"}, {"role": "user", "content": "<image>Which?"}
    own = [{"type": "image", "path": "red.png"}, ASKED[1]]
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": ASKED}, ANSWER], "images": ["red.png"]},
        {"messages": [user, ANSWER], "images": ["red.png"]},
        {"messages": [marked, ANSWER], "images": [str(folder / "red.png")]},
        {"messages": [marked, ANSWER], "image": "red.png"},
        {"messages": [{"role": "user", "content": own}, ANSWER]},
        {"messages": [marked, ANSWER], "images": [{"path": "red.png"}]},
    ]
    corpus = prepared(origin, folder, *rows)
    documents = [
        corpus.tokens[start:stop].tolist() for start, stop in zip(corpus.starts, corpus.starts[1:], strict=False)
    ]
    assert len(documents) == len(rows)
    assert all(document == documents[0] for document in documents)
    assert corpus.images is not None
    assert {corpus.images.read(number) for number in range(len(rows))} == {(folder / "red.png").read_bytes()}
    others = {
        "sharegpt": {"conversations": [{"from": "human", "value": "<image>Which?"}, {"from": "gpt", "value": "red"}]},
        "prompt_completion": {"prompt": [marked], "completion": [ANSWER]},
        "alpaca": {"instruction": "<image>Which?", "output": "red"},
    }
    for name, row in others.items():
        (folder / name).mkdir()
        corpus = prepared(origin, folder / name, row | {"images": [str(folder / "red.png")]})
        assert corpus.tokens[:].tolist() == documents[0], name


def test_tokens_of_images_are_never_trained(origin: Path, folder: Path) -> None:
    row = {"messages": [{"role": "user", "content": ASKED}, ANSWER], "images": ["red.png"]}
    corpus = prepared(origin, folder, row, trained_tokens="all")
    tokenizer = AutoTokenizer.from_pretrained(origin)
    is_image = corpus.tokens[:] == tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert corpus.weights is not None
    assert is_image.any()
    assert (corpus.weights[:] == ~is_image).all()


def test_images_of_columnar_files_are_bytes(origin: Path, folder: Path) -> None:
    content = (folder / "blue.png").read_bytes()
    row = {"messages": [{"role": "user", "content": "<image>Which?"}, ANSWER]}
    table = pa.Table.from_pylist(
        [row | {"images": [{"bytes": content, "path": None}]}, row | {"images": [{"path": "red.png"}]}]
    )
    pq.write_table(table, folder / "rows.parquet")
    corpus = prepare_data(recipe(origin, folder / "rows.parquet"), folder / "data").corpus
    assert corpus.images is not None
    assert [corpus.images.read(number) for number in range(2)] == [content, (folder / "red.png").read_bytes()]


def test_a_batch_keeps_a_document_with_its_images(origin: Path, folder: Path) -> None:
    two = {"messages": [{"role": "user", "content": "<image><image>Which?"}, ANSWER], "images": ["red.png", "blue.png"]}
    text = {"messages": [{"role": "user", "content": "Which?"}, ANSWER]}
    run = recipe(origin, folder / "rows.jsonl") if (corpus := prepared(origin, folder, two, text)) else None
    assert run is not None
    loader = make_loader(corpus, tiny.spec_of(model_config(run, None)), run)
    pictured = [entry for micro_batch in loader.next_step() for entry in micro_batch.pictured]
    assert [list(images) for _, _, images in pictured] == [[0, 1]] * len(pictured)
    assert all(end - start == corpus.starts[1] for start, end, _ in pictured)


@pytest.mark.parametrize(("images", "content", "message"), [
    (["https://example.org/red.png"], "<image>?", r"rows.jsonl:1: images\[0\] is a URL, https://example.org/red.png"),
    (["none.png"], "<image>?", "rows.jsonl:1: image .*none.png: it does not exist; paths of images are relative to"),
    (["broken.png"], "<image>?", "rows.jsonl:1: image .*broken.png: not a whole image"),
    (["text.png"], "<image>?", "rows.jsonl:1: image .*text.png: not an image of a known format"),
    (["red.png"], "<image> and <image>?", "rows.jsonl:1: 1 images and 2 places for them"),
    ([7], "<image>?", r"rows.jsonl:1: images\[0\] is a number; expected the path"),
    (["red.png"], "<image>? <|image_pad|>", "the chat template shows 2 images, and the conversation has 1"),
    (None, [{"type": "image", "url": "http://a.org/b.png"}], "rows.jsonl:1: an image part is a URL"),
    (None, [{"type": "image"}], "rows.jsonl:1: 0 images and 1 places for them"),
    (None, [{"type": "video"}], "a part that is video; only texts and images can be trained on"),
])  # fmt: skip
def test_what_is_refused(origin: Path, folder: Path, images: Any, content: Any, message: str) -> None:
    row = {"messages": [{"role": "user", "content": content}, ANSWER]} | ({} if images is None else {"images": images})
    with pytest.raises(UserError, match=message) as found:
        prepared(origin, folder, row)
    assert "\n" not in str(found.value)
    good = {"messages": [{"role": "user", "content": "Which?"}, ANSWER]}
    assert prepared(origin, folder, row, good, bad_rows="skip").info.skipped_rows == 1


def test_a_row_names_no_private_file(origin: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, hidden = folder / "data of others", folder / ".hidden"
    data.mkdir()
    hidden.mkdir()
    write_image(hidden / "mine.png", "red")
    write_image(folder / "secret.png", "red").chmod(0o600)
    row = {"messages": [{"role": "user", "content": ASKED}, ANSWER]}
    for name, why in (("../.hidden/mine.png", "hidden"), (str(folder / "secret.png"), "nobody else may read")):
        with pytest.raises(UserError, match=f"rows.jsonl:1: image .*outside of the data's folder and .*{why}"):
            prepared(origin, data, row | {"images": [name]})
    monkeypatch.setenv("PENSTOCK_LINKS", str(hidden))
    assert prepared(origin, data, row | {"images": ["../.hidden/mine.png"]}).info.num_images == 1


def test_a_model_without_a_processor_takes_no_images(origin: Path, folder: Path) -> None:
    bare = folder / "bare"
    bare.mkdir()
    for file in origin.iterdir():
        if "processor" not in file.name:
            (bare / file.name).write_bytes(file.read_bytes())
    row = {"messages": [{"role": "user", "content": ASKED}, ANSWER], "images": ["red.png"]}
    with pytest.raises(UserError, match=r"rows.jsonl:1: the row has images, and the model takes none"):
        prepared(bare, folder, row)


def test_a_family_that_is_not_proven_is_refused_in_one_line(origin: Path, folder: Path) -> None:
    other = Path(shutil.copytree(origin, folder / "other"))
    config = json.loads((other / "config.json").read_text()) | {"model_type": "llava_next"}
    (other / "config.json").write_text(json.dumps(config))
    row = {"messages": [{"role": "user", "content": ASKED}, ANSWER], "images": ["red.png"]}
    with pytest.raises(UserError, match=r"model type 'llava_next': training on images is supported for llava, gemma3"):
        prepared(other, folder, row)


@pytest.mark.parametrize(("changes", "message"), [
    ({"packing": "wrap"}, r"data.packing: wrap cuts documents at .* there are documents with images; set"),
    ({"sequence_length": 16}, "data.sequence_length: 16, but 1 documents with images are longer"),
])  # fmt: skip
def test_a_document_with_images_is_never_cut(origin: Path, folder: Path, changes: Any, message: str) -> None:
    row = {"messages": [{"role": "user", "content": ASKED}, ANSWER], "images": ["red.png"]}
    corpus = prepared(origin, folder, row)
    run = recipe(origin, folder / "rows.jsonl", **changes)
    with pytest.raises(UserError, match=message):
        make_loader(corpus, tiny.spec_of(model_config(run, None)), run)


def test_a_damaged_image_is_told(origin: Path, folder: Path) -> None:
    row = {"messages": [{"role": "user", "content": ASKED}, ANSWER], "images": ["red.png"]}
    path = prepared(origin, folder, row).folder / "images.bin"
    content = bytearray(path.read_bytes())
    content[20] ^= 1
    path.write_bytes(content)
    images = TokenCorpus(path.parent).images
    assert images is not None
    with pytest.raises(UserError, match=r"images.bin: damaged: image 0 .* is not as written"):
        images.read(0)
