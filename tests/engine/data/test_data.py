"""Documents, tokenizer, corpus folder and packing."""

import dataclasses
import gzip
import itertools
import json
import os
import shutil
import threading
import time

import numpy as np
import pytest
import torch
from corpora import loader_of, make_corpus, unique_documents
from hypothesis import given
from hypothesis import strategies as st
from samples import sampled
from transformers import AutoTokenizer

from penstock.engine import preparing
from penstock.engine.config import DataConfig, Recipe
from penstock.engine.data.corpus import prepare as corpus_module
from penstock.engine.data.corpus.files import TokenCorpus
from penstock.engine.data.corpus.prepare import prepare_corpus, prepare_data, prepare_tokenizer, random_corpus
from penstock.engine.data.formats import text as text_format
from penstock.engine.data.formats.reading import read_samples
from penstock.engine.data.loader import DataLoader, ValidationSet
from penstock.engine.data.packing import split_documents
from penstock.engine.data.text.made_tokenizer import train_tokenizer
from penstock.engine.data.text.tokenizer import EOS_TOKEN, load_tokenizer
from penstock.engine.model.tokens import IGNORE_LABEL, MicroBatch
from penstock.storage.files.errors import UserError

TEXTS = [f"def function_{i}(x):\n    return x * {i} + len('naïve ☃ {i * 37}')\n" * (1 + i % 5) for i in range(40)]


@pytest.fixture
def jsonl(tmp_path):
    file = tmp_path / "documents.jsonl"
    file.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS) + "\n\n")
    return file


@pytest.fixture
def tokenizer(tmp_path):
    return train_tokenizer(TEXTS, 300, tmp_path / "tokenizer")


def check_rows(batch: MicroBatch, rows: int, length: int) -> None:
    """No row shares a document with another, and the positions of each begin anew."""
    assert set(range(0, rows * length, length)) <= set(batch.documents)
    for start, stop in itertools.pairwise([*batch.documents, len(batch.ids)]):
        assert batch.positions[start:stop].tolist() == list(range(stop - start))


def test_a_trained_tokenizer_is_lossless_and_a_folder_whose_one_file_is_enough(tmp_path, tokenizer):
    """The same of the same texts, and as transformers reads it."""
    again = train_tokenizer(iter(TEXTS), 300, tmp_path / "again")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "tokenizer" / name).read_bytes()
    assert (again.fingerprint, tokenizer.vocab_size) == (tokenizer.fingerprint, 300)
    for text, ids in zip(TEXTS, tokenizer.encode_batch(TEXTS), strict=True):
        assert tokenizer.decode(ids) == text
        assert tokenizer.eos_id not in ids
    plain = AutoTokenizer.from_pretrained(tokenizer.folder, local_files_only=True)
    assert plain.eos_token == EOS_TOKEN
    assert plain.eos_token_id == tokenizer.eos_id
    assert plain(TEXTS[3])["input_ids"] == tokenizer.encode_batch(TEXTS[3:4])[0]
    (tmp_path / "alone").mkdir()
    shutil.copy(tokenizer.folder / "tokenizer.json", tmp_path / "alone")
    loaded, alone = load_tokenizer(tokenizer.folder), load_tokenizer(tmp_path / "alone" / "tokenizer.json")
    texts = [*TEXTS, f"{EOS_TOKEN} in a text", " x", ""]
    ids = tokenizer.encode_batch(texts)
    for each in (loaded, alone):
        assert each.encode_batch(texts) == ids
        assert [each.decode(one) for one in ids] == [tokenizer.decode(one) for one in ids]
        assert (each.eos_id, each.vocab_size) == (tokenizer.eos_id, tokenizer.vocab_size)
    assert loaded.fingerprint == tokenizer.fingerprint


def test_load_tokenizer_refuses_what_is_none(tmp_path, tokenizer):
    def refused(folder, message):
        with pytest.raises(UserError, match=message):
            load_tokenizer(folder)

    refused(tmp_path / "nothing", "does not exist")
    (tokenizer.folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    refused(tokenizer.folder, "eos_token")
    (tokenizer.folder / "tokenizer.json").write_text("{")
    refused(tokenizer.folder, "cannot be read")


def test_a_tokenizer_that_makes_any_text_huge_is_refused(tokenizer):
    file = tokenizer.folder / "tokenizer.json"
    good = json.loads(file.read_text())

    def put(part, *steps):
        steps = {"type": "Sequence", "normalizers" if part == "normalizer" else "decoders": list(steps)}
        file.write_text(json.dumps(good | {part: steps}))

    def replace(content, **pattern):
        return {"type": "Replace", "pattern": pattern, "content": content}

    put("normalizer", replace("...", String="…"), replace(" ", Regex=" {2,}"), {"type": "Prepend", "prepend": "▁"})
    assert load_tokenizer(tokenizer.folder).encode_batch(["a…"])
    put("normalizer", *(replace("abc", String=chr(0x2190 + number)) for number in range(40)))
    assert load_tokenizer(tokenizer.folder).encode_batch(["a←"]), "none replaces what another made"
    for part in ("normalizer", "decoder"):
        for step in (replace("ab" * 50, Regex="."), replace("ab" * 50, String="a"), replace("aa", String="a")):
            put(part, *[step] * 40)
            with pytest.raises(UserError, match=rf"the {part} in .*tokenizer\.json can make a text .* times as long"):
                load_tokenizer(tokenizer.folder)
    put("normalizer", {"type": "Prepend", "prepend": "q" * 100_000})
    with pytest.raises(UserError, match=r"1e\+05 times as long, and 65,536 is the most that is read"):
        load_tokenizer(tokenizer.folder)


def test_a_corpus_is_made_once_and_used_whatever_becomes_of_its_source(tmp_path, jsonl, tokenizer, monkeypatch):
    config = DataConfig(source="jsonl", path=str(jsonl))
    first = prepare_corpus(config, tokenizer, tmp_path / "corpus")
    monkeypatch.setattr(corpus_module, "read_samples", lambda *_: pytest.fail("tokenised twice"))

    def notes():
        corpus = prepare_corpus(config, tokenizer, tmp_path / "corpus")
        assert corpus.info == first.info
        return corpus.notes

    content = jsonl.read_bytes()
    assert notes() == []
    os.utime(jsonl, (1, 1))
    assert notes() == [], "another time, the same content"
    jsonl.write_text('{"text": "another"}\n')
    goes_on = "since the run's data was tokenized; the run continues with its existing tokens. "
    goes_on += "To train on the new data, start a new run"
    assert notes() == [f"data.path: {jsonl} has changed {goes_on}"]
    jsonl.unlink()
    assert notes() == [f"data.path: {jsonl} is gone {goes_on}"]
    jsonl.write_bytes(content)
    assert notes() == []
    other = train_tokenizer(TEXTS, 280, tmp_path / "other")
    with pytest.raises(UserError, match=r"corpus: these tokens were made with a different tokenizer.*delete the fol"):
        prepare_corpus(config, other, tmp_path / "corpus")
    assert TokenCorpus(tmp_path / "corpus").info == first.info
    monkeypatch.undo()
    fewer = dataclasses.replace(config, max_documents=1)
    assert prepare_corpus(fewer, tokenizer, tmp_path / "corpus").info.num_documents == 1, "another recipe"
    assert not list(tmp_path.glob("*.building-*"))


def test_long_text_files_are_read_in_pieces_as_one_document(tmp_path, tokenizer, monkeypatch):
    folder = tmp_path / "texts"
    (folder / "below").mkdir(parents=True)
    long = "".join(f"line {i} of a long file\n" for i in range(500))
    (folder / "b.txt").write_text(long)
    (folder / "below" / "c.md").write_text("short")
    (folder / "a.txt").write_text("")
    monkeypatch.setattr(text_format, "_PIECE_CHARS", 1000)
    config = DataConfig(source="text", path=str(folder))
    pieces = list(read_samples(config))
    assert len(pieces) > 10
    assert "".join(p.text for p in pieces[:-1]) == long
    assert [p.last for p in pieces] == [False] * (len(pieces) - 2) + [True, True]
    assert all(p.text.endswith("\n") for p in pieces[:-1])
    corpus = prepare_corpus(config, tokenizer, tmp_path / "corpus")
    assert corpus.info.num_documents == 2
    assert tokenizer.decode(corpus.tokens[: corpus.starts[1] - 1].tolist()) == long
    line = "a" * 10_000 + "\nb"
    (folder / "b.txt").write_text(line)
    pieces = [piece.text for piece in read_samples(config)][:-1]
    assert "".join(pieces) == line
    assert max(map(len, pieces)) <= 2000, "a long line comes in pieces too"


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "text"])
def test_whoever_watches_is_told_how_much_of_the_files_has_been_read(tmp_path, tokenizer, monkeypatch, kind):
    (tmp_path / "source").mkdir()
    for number in range(3):
        lines = [f"line {i} of file {number} " * 8 for i in range(1000)]
        file = tmp_path / "source" / f"{number}.{kind}"
        if kind == "text":
            file.write_text("\n".join(lines))
        else:
            content = "".join(json.dumps({"text": line}) + "\n" for line in lines).encode()
            file.write_bytes(gzip.compress(content) if kind.endswith("gz") else content)
    told = []
    monkeypatch.setattr(preparing, "report", lambda fraction=None, detail=None: told.append((fraction, detail)))
    config = DataConfig(source=kind.partition(".")[0], path=str(tmp_path / "source"))
    documents = prepare_corpus(config, tokenizer, tmp_path / "corpus").info.num_documents
    fractions = [fraction for fraction, detail in told if detail and detail.startswith("tokenizing")]
    assert len(fractions) == documents
    assert fractions == sorted(fractions)
    assert 0 < fractions[0] < 0.5
    assert fractions[-1] > 0.99
    if kind == "jsonl":
        assert len(set(fractions)) > 10, "within the files as well"


def test_sources_without_files(tmp_path):
    pieces = list(read_samples(DataConfig(source="python_stdlib", max_documents=5)))
    assert len(pieces) == 5
    assert all(p.where.endswith(".py") and "site-packages" not in p.where for p in pieces)
    config = DataConfig(source="random", sequence_length=16, max_documents=3)
    one, two = (random_corpus(config, 100_000, tmp_path / name) for name in ("one", "two"))
    assert one.info == two.info
    assert (one.tokens.dtype, one.info.num_tokens) == (np.uint32, 48)
    (tmp_path / "blocked").write_text("a file where a folder should be")
    with pytest.raises(UserError, match="not a writable folder"):
        random_corpus(config, 300, tmp_path / "blocked" / "corpus")
    corpus = make_corpus(tmp_path / "few", [[1, 2, 0], [3, 777, 0]])
    with pytest.raises(UserError, match=r"document 1: token id 777 is beyond the model's vocabulary of 700"):
        loader_of(corpus, 8, vocab_size=700)


def test_prepare_tokenizer_chooses_and_reuses(tmp_path, jsonl, tokenizer, monkeypatch):
    """One that has made tokens is kept whatever becomes of its source."""
    config = DataConfig(source="jsonl", path=str(jsonl), tokenizer_vocab_size=290)
    trained, corpus = prepare_data(Recipe(name="x", data=config), tmp_path / "data")
    assert trained.vocab_size == 290
    assert prepare_tokenizer(config, tokenizer.folder, tmp_path / "data" / "tokenizer").vocab_size == 300
    with monkeypatch.context() as patch:
        patch.setattr(corpus_module, "train_tokenizer", lambda *_: pytest.fail("trained twice"))
        again = prepare_tokenizer(config, None, tmp_path / "data" / "tokenizer")
    assert again.fingerprint == trained.fingerprint
    jsonl.unlink()
    again, same = prepare_data(Recipe(name="x", data=config), tmp_path / "data")
    assert (again.fingerprint, same.info) == (trained.fingerprint, corpus.info)
    assert len(same.notes) == 1
    shutil.rmtree(tmp_path / "data" / "corpus")
    with pytest.raises(UserError, match="does not exist"):
        prepare_data(Recipe(name="x", data=config), tmp_path / "data")


def test_text_made_ahead_is_found_and_what_is_wrong_is_said_when_it_is_asked_for(tmp_path, jsonl, monkeypatch, capfd):
    config = DataConfig(source="jsonl", path=str(jsonl), tokenizer_vocab_size=290)
    trainings = []

    def counted(*given):
        trainings.append(threading.current_thread().name)
        return train_tokenizer(*given)

    monkeypatch.setattr(corpus_module, "train_tokenizer", counted)
    corpus_module.prepare_text_ahead(config, tmp_path / "data")
    while not trainings:
        time.sleep(0.001)
    _, corpus = prepare_data(Recipe(name="x", data=config), tmp_path / "data")
    assert trainings == ["tokenize"]
    assert corpus.info.num_documents == len(TEXTS)
    missing = DataConfig(source="text", path=str(tmp_path / "missing"))
    corpus_module.prepare_text_ahead(missing, tmp_path / "other")
    with pytest.raises(UserError, match="does not exist"):
        prepare_data(Recipe(name="x", data=missing), tmp_path / "other")
    assert capfd.readouterr().err == ""


def test_text_made_ahead_can_be_called_off(tmp_path, jsonl, monkeypatch):
    config = DataConfig(source="jsonl", path=str(jsonl), tokenizer_vocab_size=290)
    read = threading.Event()
    pieces = corpus_module.read_samples

    def slow(*given):
        for piece in pieces(*given):
            read.set()
            assert corpus_module._cancelled.wait(60)
            yield piece

    monkeypatch.setattr(corpus_module, "read_samples", slow)
    corpus_module.prepare_text_ahead(config, tmp_path / "data")
    assert read.wait(60)
    corpus_module.cancel_text_ahead()
    for thread in threading.enumerate():
        if thread.name == "tokenize":
            thread.join()
    assert not (tmp_path / "data" / "tokenizer").exists()
    _, corpus = prepare_data(Recipe(name="x", data=config), tmp_path / "data")
    assert corpus.info.num_documents == len(TEXTS)


@sampled(10, 40)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=12),
    st.integers(2, 33),
    st.integers(1, 3),
    st.integers(0, 5),
    st.booleans(),
)
def test_an_epoch_gives_every_token_and_target_once(tmp_path_factory, lengths, length, rows, seed, alone):
    documents = unique_documents(lengths)
    corpus = make_corpus(tmp_path_factory.mktemp("corpus"), documents)
    loader = loader_of(corpus, length, rows, per_step=2, seed=seed, one_document_per_row=alone)
    assert loader.report.split == sum(n > length for n in lengths)
    following = {a: b for ids in documents for a, b in itertools.pairwise(ids)}
    seen: list[int] = []
    while len(seen) < 2 * corpus.info.num_tokens:
        step = loader.next_step()
        assert len(step) == 2
        for batch in step:
            assert batch.ids.dtype == batch.labels.dtype == batch.positions.dtype == torch.int64
            assert len(batch.ids) == rows * length
            assert batch.documents == sorted(set(batch.documents))
            assert batch.num_targets == int((batch.labels != IGNORE_LABEL).sum())
            check_rows(batch, rows, length)
            ids = batch.ids.tolist()
            tokens = [token for token in ids if token != 0]
            assert sum(batch.lengths) == len(tokens)
            assert alone or len(tokens) == rows * length
            assert batch.labels.tolist() == [following.get(token, IGNORE_LABEL) for token in ids]
            seen += tokens
    total = corpus.info.num_tokens
    assert sorted(seen[:total]) == sorted(seen[total : 2 * total]) == list(range(1, total + 1))


def test_order_differs_by_seed_and_epoch(tmp_path):
    """Rows of seed 3 were written down before documents could be held out."""
    pinned = make_corpus(tmp_path / "pinned", unique_documents([5, 17, 1, 9, 30]))
    loader = loader_of(pinned, 7, 1, 2, seed=3)
    ids = [token for _ in range(2) for batch in loader.next_step() for token in batch.ids.tolist()]
    assert ids == [*range(1, 6), 23, *range(47, 54), *range(33, 40), *range(6, 13), 54]
    corpus = make_corpus(tmp_path / "corpus", unique_documents([4] * 16))

    def epochs(seed: int) -> list[list[int]]:
        loader = loader_of(corpus, 64, seed=seed)
        return [loader.next_step()[0].ids.tolist() for _ in range(2)]

    first, second = epochs(0), epochs(1)
    assert first == epochs(0)
    assert len({tuple(e) for e in first + second}) == 4
    assert all(sorted(e) == list(range(1, 65)) for e in first + second)
    held_out = [tuple(split_documents(100, count, seed)[1]) for seed in (0, 1) for count in (5, 10)]
    assert len(set(held_out)) == 4
    assert set(held_out[0]) <= set(held_out[1]), "more documents are these and others"
    with pytest.raises(UserError, match=r"data\.validation_documents: 4, but the corpus has 4 documents"):
        split_documents(4, 4, 0)


@given(lengths=st.lists(st.integers(1, 40), min_size=2, max_size=20), alone=st.booleans(), data=st.data())
@sampled(15, 60)
def test_documents_held_out_are_validated_on_and_never_trained_on(tmp_path_factory, lengths, alone, data):
    length, rows, per_pass = data.draw(st.integers(4, 16)), data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    held_out, seed = data.draw(st.integers(1, len(lengths) - 1)), data.draw(st.integers(0, 3))
    documents = unique_documents(lengths)
    corpus = make_corpus(tmp_path_factory.mktemp("corpus"), documents)
    train, validation = split_documents(len(lengths), held_out, seed)
    assert len(validation) == held_out
    assert sorted([*train, *validation]) == list(range(len(lengths)))

    def loader(chosen: object, endless: bool) -> DataLoader:
        options = {"seed": seed, "one_document_per_row": alone, "documents": chosen, "endless": endless}
        return loader_of(corpus, length, rows, per_pass, **options)

    trained = loader(train, True)
    seen = {int(t) for _ in range(20) for batch in trained.next_step() for t in batch.ids} - {0}
    assert seen <= {token for index in train for token in documents[index]}
    targets = sorted(token for index in validation for token in documents[index][1:])
    most = data.draw(st.integers(1, 60))
    if not targets:
        with pytest.raises(UserError, match=r"data\.validation_documents: .* have no token to predict"):
            ValidationSet(loader(validation, False), num_documents=held_out, most=most)
        return
    try:
        chosen = ValidationSet(loader(validation, False), num_documents=held_out, most=most)
    except UserError:
        assert most * rows * length < sum(map(len, documents))
        return
    passes = [list(chosen.passes(per_pass)) for _ in range(2)]
    assert [len(p) for p in passes[0][:-1]] == [per_pass] * (len(passes[0]) - 1)
    batches = [batch for p in passes[0] for batch in p]
    assert len(batches) <= most
    found = sorted(int(label) for batch in batches for label in batch.labels if label != IGNORE_LABEL)
    assert len(found) == chosen.num_targets == sum(batch.num_targets for batch in batches)
    assert set(found) <= set(targets)
    assert len(set(found)) == len(found), "each once"
    for batch in batches:
        check_rows(batch, rows, length)
    for one, other in zip(batches, [batch for p in passes[1] for batch in p], strict=True):
        assert torch.equal(one.ids, other.ids)
        assert torch.equal(one.labels, other.labels)


def test_a_cursor_that_is_no_place_in_the_corpus(tmp_path):
    """Nor one of another seed or of other tokens."""
    corpus = make_corpus(tmp_path / "one", [[1, 2, 0], [3, 4, 5, 6, 0]])
    loader = loader_of(corpus, 4)
    good = loader.cursor
    with pytest.raises(UserError, match=r"data\.seed"):
        loader_of(corpus, 4, seed=4).seek(good)
    with pytest.raises(UserError, match="not the tokens that the run has trained on"):
        loader_of(make_corpus(tmp_path / "two", unique_documents([5, 6])), 4).seek(good)
    for bad in (
        *(None, [1], {}, good | {"piece": 4}, good | {"piece": 3, "offset": 1}, good | {"offset": 4}),
        *({key: value for key, value in good.items() if key != name} for name in ("corpus", "seed", "epoch", "offset")),
        *(good | {name: value} for name in ("epoch", "piece", "offset") for value in (-1, "0", None, 1.0, True, 2**63)),
    ):
        with pytest.raises(UserError, match="the record of the generation"):
            loader.seek(bad)
    loader.seek(good | {"piece": 3})
    assert loader.next_step()[0].num_targets > 0
