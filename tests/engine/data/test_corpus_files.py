"""A corpus that is damaged anywhere is refused before a wrong token is handed out.
Weights beside the tokens: only where one is not 1, checked like the tokens, and on the label that they belong to."""

import itertools
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from corpora import ORIGIN, loader_of, make_corpus, unique_documents
from hypothesis import assume, given
from hypothesis import strategies as st
from samples import sampled

from penstock.engine.config import DataConfig, Recipe
from penstock.engine.data.corpus import files as corpus_files
from penstock.engine.data.corpus.files import BLOCK_BYTES, META, TOKENS, CorpusWriter, TokenCorpus, verify_corpus
from penstock.engine.data.corpus.prepare import prepare_corpus, prepare_tokenizer, random_corpus, saved_tokenizer
from penstock.engine.data.text.made_tokenizer import TRAINED_ON, require_intact, train_tokenizer
from penstock.engine.hf.constants import read_constants_file, verify_constants, write_constants
from penstock.engine.model.tokens import IGNORE_LABEL
from penstock.engine.verify import verify_run_files
from penstock.storage.files.errors import UserError
from penstock.storage.files.sealed import hex_crc, seal

SUMS, DOCUMENTS, WEIGHTS = corpus_files.SUMS, corpus_files.DOCUMENTS, corpus_files.WEIGHTS
RANDOM = DataConfig(source="random", sequence_length=8, max_documents=6)
TEXTS = [f"a text of {number} words, and another\n" * 3 for number in range(12)]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return random_corpus(RANDOM, 300, tmp_path / "corpus").folder


def large(folder: Path) -> Path:
    """A corpus of some blocks: 200,000 bytes, in documents of 1000 tokens."""
    return make_corpus(folder, np.random.default_rng(0).integers(0, 500, (100, 1000))).folder


def rewrite_meta(folder: Path, **changes: Any) -> None:
    """As somebody would who knows of the checksum."""
    values = json.loads((folder / META).read_text()) | changes
    (folder / META).write_text(json.dumps(seal({key: value for key, value in values.items() if key != "crc32c"})))


def flips(file: Path, step: int = 1) -> Iterator[None]:
    """Flips a bit of every `step`th byte, one after the other; of our own JSON only where that changes what it says."""

    def parsed(content: bytes) -> object:
        with suppress(ValueError):
            return json.loads(content)

    content = file.read_bytes()
    for at in range(0, len(content), step):
        file.write_bytes(content[:at] + bytes([content[at] ^ 0x20]) + content[at + 1 :])
        if file.name not in (META, TRAINED_ON) or parsed(content) != parsed(file.read_bytes()):
            yield
    file.write_bytes(content)


@pytest.mark.parametrize("name", [META, TOKENS, SUMS, DOCUMENTS, WEIGHTS, corpus_files.WEIGHT_SUMS])
def test_every_flipped_byte_is_found_by_use_and_by_scrub(tmp_path: Path, name: str) -> None:
    made = make_corpus(tmp_path / "corpus", [[1, 2, 3, 0], [4, 5, 0]], weights=[[0, 0, 1, 2], None])
    tokens, weights, folder = made.tokens[:].copy(), made.weights[:].copy(), made.folder

    def used() -> bool:
        found = TokenCorpus(folder)
        return bool((found.tokens[:] == tokens).all() and (found.weights[:] == weights).all())

    for _ in flips(folder / name):
        with pytest.raises(UserError, match=f"{name}: damaged: .*; restore the file, or delete the folder {folder}"):
            assert used()
        with pytest.raises(UserError, match=f"{name}: damaged"):
            verify_corpus(folder)
    assert verify_corpus(folder) == sum(path.stat().st_size for path in folder.iterdir())
    (folder / name).unlink()
    with pytest.raises(UserError, match=f"{name}.*restore the file, or delete the folder"):
        TokenCorpus(folder)


def test_a_block_is_checked_before_its_first_token_is_handed_out_and_others_are_left_alone(tmp_path: Path) -> None:
    """Scrub counts those that are damaged."""
    folder = large(tmp_path / "corpus")
    wanted = TokenCorpus(folder).tokens[:].copy()
    with (folder / TOKENS).open("r+b") as file:
        file.seek(2 * BLOCK_BYTES + 5)
        file.write(b"\0\0\0\0")
    tokens, half = TokenCorpus(folder).tokens, BLOCK_BYTES // 2
    for span in (slice(0, 10), slice(half - 5, half + 5), slice(2 * half - 1, 2 * half), slice(3 * half, 100_000)):
        for _ in range(2):  # the second time it is not checked
            assert (tokens[span] == wanted[span]).all()
    assert len(tokens[7:7]) == 0
    for span in (slice(2 * half, 2 * half + 1), slice(2 * half - 1, 2 * half + 1), slice(0, 100_000)):
        with pytest.raises(UserError, match=r"tokens\.bin: damaged: block 2 \(bytes 131,072 to 196,608\) has CRC-32C"):
            tokens[span]
    loader = loader_of(TokenCorpus(folder), 1000, vocab_size=500)
    with pytest.raises(UserError, match="block 2"):
        [loader.next_step() for _ in range(100)]
    content = (folder / TOKENS).read_bytes()
    (folder / TOKENS).write_bytes(content[:BLOCK_BYTES] + bytes(len(content) - BLOCK_BYTES))
    with pytest.raises(UserError, match=r"block 1 .*, one of 3 damaged blocks of 4; restore"):
        verify_corpus(folder)
    tokens = TokenCorpus(folder).tokens
    os.truncate(folder / TOKENS, BLOCK_BYTES)  # while it is in use
    assert len(tokens[:10]) == 10
    with pytest.raises(UserError, match=r"tokens\.bin: damaged: it became shorter"):
        tokens[BLOCK_BYTES:]


def test_a_description_that_is_none_or_belies_its_tokens(corpus: Path) -> None:
    rewrite_meta(corpus, max_token_id=100)
    with pytest.raises(UserError, match="holds a token id above 100"):
        TokenCorpus(corpus).tokens[:]
    nothing = [b"", b"[1]", b"{}", b"null", b"\xff\xfe", b"[" * 100_000, b'{"fingerprint": 1}', b'{"a": "\\ud800"}']
    for content in (*nothing, None):
        (corpus / META).unlink()
        if content is None:
            (corpus / META).symlink_to("/dev/zero")
        else:
            (corpus / META).write_bytes(content)
        for call in (lambda: TokenCorpus(corpus), lambda: random_corpus(RANDOM, 300, corpus)):
            with pytest.raises(UserError, match=r"meta\.json: damaged: .*; restore the file, or delete the folder"):
                call()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "object"}, "dtype: Invalid enum value 'object'"),
        ({"num_tokens": 10**30}, "num_tokens: Expected `int` <= "),
        ({"num_tokens": 2**62}, "documents of"),
        ({"num_tokens": "48"}, "num_tokens: Expected `int`, got `str`"),
        ({"num_tokens": True}, "num_tokens: Expected `int`, got `bool`"),
        ({"num_documents": -1}, "num_documents: Expected `int` >= 0"),
        ({"num_documents": 0}, "documents of"),
        ({"eos_id": -5}, "eos_id: Expected `int` >= 0"),
        ({"eos_id": 70_000}, "token ids up to"),
        ({"max_token_id": 2**40}, "token ids up to"),
        ({"checksums": {}}, "checksums of "),
        ({"num_tokens": 47}, "do not rise from 0 to 47"),
        ({"num_documents": 5}, "larger than the limit of 48 bytes"),
        ({"dtype": "uint32"}, "it has 96 bytes instead of 192 as written"),
    ],
)
def test_a_description_with_its_own_checksum_is_not_believed_either(corpus: Path, changes: Any, message: str) -> None:
    rewrite_meta(corpus, **changes)
    with pytest.raises(UserError, match=f"damaged: .*{message}"):
        TokenCorpus(corpus)


@pytest.mark.parametrize("name", [TOKENS, SUMS, DOCUMENTS])
def test_a_file_that_is_no_file(corpus: Path, name: str) -> None:
    file, other = corpus / name, corpus.parent / "other"
    file.rename(other)
    for make, unmake in (
        (lambda: os.mkfifo(file), file.unlink),
        (lambda: file.symlink_to(other), file.unlink),
        (file.mkdir, file.rmdir),
        (file.touch, file.unlink),
    ):
        make()
        with pytest.raises(UserError, match=f"{name}.*restore the file, or delete the folder"):
            TokenCorpus(corpus)
        unmake()


def test_documents_that_are_no_offsets(corpus: Path) -> None:
    starts = np.fromfile(corpus / DOCUMENTS, "<i8")
    checksums = json.loads((corpus / META).read_text())["checksums"]
    for array in (starts[::-1], starts[:-1], starts.astype("<f8"), starts + 1):
        (corpus / DOCUMENTS).write_bytes(array.tobytes())
        rewrite_meta(corpus, checksums=checksums | {DOCUMENTS: hex_crc(array.tobytes())})
        with pytest.raises(UserError, match=r"documents\.bin: damaged"):
            TokenCorpus(corpus)


def test_names_that_are_not_utf_8(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/texts/caf\xe9.txt")).write_text("a few words")
    config = DataConfig(source="text", path=str(tmp_path / "texts"), tokenizer_vocab_size=300)
    tokenizer = prepare_tokenizer(config, None, tmp_path / "tokenizer")
    corpus = prepare_corpus(config, tokenizer, tmp_path / "corpus")
    assert corpus.info == TokenCorpus(corpus.folder).info
    with pytest.raises(UserError, match=r"caf\ufffd\.txt: token id"):
        corpus.require_vocabulary(1)


@pytest.fixture
def trained(tmp_path: Path) -> tuple[DataConfig, Path]:
    (tmp_path / "source.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    config = DataConfig(source="jsonl", path=str(tmp_path / "source.jsonl"), tokenizer_vocab_size=280)
    prepare_tokenizer(config, None, tmp_path / "tokenizer")
    return config, tmp_path / "tokenizer"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", TRAINED_ON])
def test_every_file_of_a_trained_tokenizer_is_checked(trained: tuple[DataConfig, Path], name: str) -> None:
    config, folder = trained
    saved = partial(saved_tokenizer, Recipe(name="x", data=config), folder.parent)
    calls = (partial(prepare_tokenizer, config, None, folder), saved, partial(require_intact, folder))
    for _ in flips(folder / name, max(1, (folder / name).stat().st_size // 50)):
        for call in calls:
            with pytest.raises(UserError, match=f"{name}: damaged: .*; restore the file, or delete the folder"):
                call()
    assert require_intact(folder) > 0


def test_other_damage_of_a_trained_tokenizer(trained: tuple[DataConfig, Path]) -> None:
    """A record that is none, and a file put beside it or taken away."""
    config, folder = trained
    sealed = (folder / TRAINED_ON).read_text()
    for content in (b"", b"[1]", b"null", b'{"files": [1]}', b"[" * 100_000):
        (folder / TRAINED_ON).write_bytes(content)
        with pytest.raises(UserError, match=r"trained_on\.json: damaged"):
            require_intact(folder)
    (folder / TRAINED_ON).write_text(sealed)
    (folder / "added_tokens.json").write_text('{"x": 5}')
    with pytest.raises(UserError, match=r"added_tokens\.json: damaged: the file was not written by Penstock"):
        prepare_tokenizer(config, None, folder)
    (folder / "added_tokens.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer_config\.json: damaged: the file is missing"):
        saved_tokenizer(Recipe(name="x", data=config), folder.parent)


def test_constants_are_checked_against_the_generations_checksum(tmp_path: Path) -> None:
    file, tensors = tmp_path / "constants.safetensors", {"scale": torch.arange(4.0)}
    crc, shapes = write_constants(file, tensors), {"scale": (4,), "other": (2,)}
    assert read_constants_file(file, crc, shapes)["scale"].equal(tensors["scale"])
    with pytest.raises(UserError, match=r"constants\.safetensors: damaged: it holds scale \[4\], but the model has"):
        read_constants_file(file, crc, {"scale": (5,)})
    assert verify_constants(file, crc) == file.stat().st_size
    for _ in flips(file):
        for call in (lambda: read_constants_file(file, crc, shapes), lambda: verify_constants(file, crc)):
            with pytest.raises(UserError, match=r"constants\.safetensors: damaged: it has CRC-32C"):
                call()
    file.write_bytes(b"\xff" * 100)
    with pytest.raises(UserError, match=r"constants\.safetensors: damaged"):
        read_constants_file(file, crc, shapes)
    file.unlink()
    with pytest.raises(UserError, match=r"constants\.safetensors: damaged: the file is missing"):
        read_constants_file(file, crc, shapes)


def test_all_that_is_damaged_is_listed(tmp_path: Path) -> None:
    data, state = tmp_path / "data", tmp_path / "state"
    train_tokenizer(TEXTS, 280, data / "tokenizer")
    random_corpus(RANDOM, 300, data / "corpus")
    state.mkdir()
    meta = {"constants": write_constants(state / "constants.safetensors", {})}
    size = verify_run_files(tmp_path, meta)
    assert size == sum(path.stat().st_size for path in [*(data / "corpus").iterdir(), *state.iterdir()])
    for file in (data / "corpus" / TOKENS, state / "constants.safetensors"):
        file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(UserError) as error:
        verify_run_files(tmp_path, meta)
    damaged = [str(data / "corpus" / TOKENS), str(state / "constants.safetensors")]
    assert [line.split(": ")[0] for line in str(error.value).splitlines()] == damaged
    shutil.rmtree(data)
    (state / "constants.safetensors").unlink()
    with pytest.raises(UserError, match="the file is missing"):
        verify_run_files(tmp_path, meta)


def test_a_corpus_whose_tokens_all_count_one_has_no_weights(tmp_path):
    documents = [[1, 2, 0], [3, 4, 5, 0]]
    plain = make_corpus(tmp_path / "plain", documents)
    ones = make_corpus(tmp_path / "ones", documents, weights=[[1, 1, 1], None])
    assert plain.info == ones.info
    assert plain.weights is ones.weights is None
    assert plain.info.num_trained == 5
    assert {path.name for path in ones.folder.iterdir()} == {path.name for path in plain.folder.iterdir()}
    assert WEIGHTS not in {path.name for path in plain.folder.iterdir()}
    others = [make_corpus(tmp_path / str(n), documents, weights=[[1, n, 1 - n], None]).info.content for n in (0, 1)]
    assert len({plain.info.content, *others}) == 3


def test_weights_are_those_given_though_the_first_that_is_not_one_comes_late(tmp_path, monkeypatch):
    """In some blocks, in documents of 1000 tokens, of which the first two count 1."""
    monkeypatch.setattr(corpus_files, "COPY_BYTES", 1 << 10)
    weights = np.random.default_rng(1).choice(np.asarray([0, 1, 0.5], dtype=np.float32), 50_000)
    weights[:2000] = 1
    ids = np.random.default_rng(0).integers(0, 500, (50, 1000))
    corpus = make_corpus(tmp_path / "corpus", ids, weights=[None, *weights[1000:].reshape(49, 1000)])
    assert corpus.weights[:].tolist() == weights.tolist()
    targets = np.delete(weights, np.arange(0, 50_000, 1000))
    assert corpus.info.num_trained == int((targets > 0).sum())
    assert verify_corpus(corpus.folder) == sum(path.stat().st_size for path in corpus.folder.iterdir())

    def as_it_is(writer, count, given):
        writer._weights = writer._weights or corpus_files.SpanWriter(writer._folder / WEIGHTS)
        writer._weights.add(given.astype("<f4").tobytes())

    monkeypatch.setattr(CorpusWriter, "_append_weights", as_it_is)
    for bad in (-1.0, float("nan"), float("inf")):  # whatever the checksums say
        corpus = make_corpus(tmp_path / str(bad), [[1, 2, 0]], weights=[[1, bad, 1]])
        with pytest.raises(UserError, match=r"block 0 .* holds an invalid weight"):
            corpus.weights[:]


@sampled(15, 100)
@given(
    st.lists(st.lists(st.sampled_from([0.0, 1.0, 1.0, 0.25, 3.0]), min_size=1, max_size=30), min_size=1, max_size=10),
    st.integers(2, 20),
    st.sampled_from(["wrap", "best_fit", "none"]),
    st.booleans(),
)
def test_a_label_has_the_weight_of_the_token_that_it_names(tmp_path_factory, weights, length, packing, alone):
    assume(any(any(counted[1:]) for counted in weights))  # a corpus without a target is refused
    documents = unique_documents(list(map(len, weights)))
    corpus = make_corpus(tmp_path_factory.mktemp("corpus"), documents, weights=weights)
    given = dict(zip(itertools.chain(*documents), itertools.chain(*weights), strict=True))
    firsts = {ids[0] for ids in documents}
    loader = loader_of(corpus, length, 2, packing=packing, one_document_per_row=alone, endless=False)
    trained = {}
    while not loader.exhausted:
        batch = loader.next_micro_batch()
        assert batch.num_targets == int((batch.labels != IGNORE_LABEL).sum())
        found = [1.0] * len(batch.ids) if batch.weights is None else batch.weights.tolist()
        kept = [(int(label), weight) for label, weight in zip(batch.labels, found, strict=True) if label >= 0]
        assert batch.weights is None or any(weight != 1 for _, weight in kept)
        trained |= dict(kept)
    assert trained == {token: weight for token, weight in given.items() if weight > 0 and token not in firsts}
    assert corpus.info.num_trained == len(trained)


def test_the_token_that_ends_texts_may_be_higher_than_any_that_there_is(tmp_path):
    """Ids that somebody else made, and chats that end by another token, have none as high. Nor need the model."""
    writer = CorpusWriter(tmp_path, 2**16)
    writer.append("document 0", np.asarray([3, 7, 5]), True)
    writer.finish(ORIGIN, eos_id=50_256)
    corpus = TokenCorpus(tmp_path)
    assert (corpus.info.max_token_id, corpus.info.eos_id) == (7, 50_256)
    batch = loader_of(corpus, 8, endless=False, vocab_size=8).next_micro_batch()
    assert batch.ids[:3].tolist() == [3, 7, 5]
    assert int(batch.ids.max()) < 8, "padding is a token of the model"
    assert batch.num_targets == 2
