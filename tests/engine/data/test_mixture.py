"""Mixtures of sources: what a recipe may say of them, and how often a document comes. A tokenised corpus is kept for
the next run: known by its source's content, taken by links, made anew if damaged."""

import errno
import json
import os
import shutil
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from corpora import loader_of, make_corpus, unique_documents
from system_calls import failing

from penstock.app.recipes.recipe import apply_overrides, from_json, resolve_paths, to_json
from penstock.engine.config import DataConfig, Recipe
from penstock.engine.data.corpus import cache as corpus_cache
from penstock.engine.data.corpus import prepare as corpus_module
from penstock.engine.data.corpus import sources
from penstock.engine.data.corpus.files import META, TOKENS, verify_corpus
from penstock.engine.data.corpus.prepare import prepare_corpus, require_readable
from penstock.engine.data.packing import rows_per_epoch, split_documents
from penstock.engine.data.text.made_tokenizer import train_tokenizer
from penstock.storage.files.errors import UserError

PART = {"path": "chats.jsonl", "source": "jsonl"}


@pytest.mark.parametrize(
    ("mixture", "message"),
    [
        (["a.jsonl"], r'data\.mixture\[0\]: must be an object such as \{"path"'),
        ([PART, {**PART, "wieght": 2}], r"data\.mixture\[1\]: unknown field 'wieght'; did you mean 'weight'\?"),
        ([{**PART, "weight": "2"}], r"data\.mixture\[0\]\.weight: '2' must be a number"),
        ([{**PART, "weight": True}], r"weight: True must be a number"),
        ([{**PART, "weight": 0}], r"weight: 0 must be from 0\.0001 to 10000; to leave this data out, remove it"),
        ([{**PART, "weight": float("nan")}], r"weight: nan must be from"),
        ([{**PART, "source": "mesages"}], r"data\.mixture\[0\]\.source: 'mesages' .* did you mean 'messages'\?"),
        ([{"source": "random"}], r"data\.mixture\[0\]\.source: 'random'"),
        ([{"source": "text"}], r"data\.mixture\[0\]: has no path"),
        ([{"path": "a.jsonl", "source": "python_stdlib"}], r"data\.mixture\[0\]: its source reads no path"),
        ([{**PART, "max_documents": 0}], r"max_documents: 0 must be at least 1"),
        ([{**PART, "columns": {"text": 1}}], r"columns: must map names to names"),
        ([{**PART, "split": 3}], r"split: 3 must be text"),
    ],
)
def test_a_part_that_is_none_is_refused_by_its_place(mixture, message):
    with pytest.raises(UserError, match=message):
        DataConfig(mixture=mixture)
    with pytest.raises(UserError, match=r"data\.path: a\.txt cannot be used with data\.mixture"):
        DataConfig(source="text", path="a.txt", mixture=[PART])


def test_a_recipe_holds_a_mixture_and_takes_its_paths_from_where_it_is(tmp_path):
    text = json.dumps([PART, {"path": "hf://owner/name", "source": "messages", "weight": 0.5}])
    recipe = apply_overrides(Recipe(name="x"), [f"data.mixture={text}"])
    assert from_json(to_json(recipe)) == recipe
    resolved = resolve_paths(recipe, tmp_path)
    assert [part["path"] for part in resolved.data.mixture] == [str(tmp_path / "chats.jsonl"), "hf://owner/name"]
    assert not recipe.data.lacks_path
    with pytest.raises(UserError, match=r"data\.mixture: .* must be a list of JSON objects"):
        apply_overrides(recipe, ["data.mixture=[1]"])
    # Parts take what they do not say from the section.
    config = DataConfig(source="jsonl", max_documents=7, mixture=[{"path": "a"}, {"path": "b", "max_documents": 2}])
    first, second = config.parts
    assert (first.source, first.path, first.max_documents, first.mixture) == ("jsonl", "a", 7, [])
    assert (second.source, second.path, second.max_documents) == ("jsonl", "b", 2)
    assert config.part_weights == [1, 1]


def epochs(loader, count):
    """How often each document, known by its first token, came in each of some epochs."""
    found = [Counter() for _ in range(count)]
    while (epoch := loader.cursor["epoch"]) < count:
        batch = loader.next_micro_batch()
        stops = [*batch.documents[1:], len(batch.ids)]
        for start, stop in zip(batch.documents, stops, strict=True):
            if batch.filled is None or start < batch.filled:
                found[epoch][int(batch.ids[start])] += stop > start
        if loader._epoch_ended:
            loader._start_epoch(epoch + 1)
    return found


@pytest.mark.parametrize("order", ["shuffled", "kept"])
@pytest.mark.parametrize("packing", ["best_fit", "none"])
def test_documents_come_as_often_as_their_weight_says(tmp_path, packing, order):
    lengths = [5] * 10 + [7] * 20 + [3] * 9
    documents = unique_documents(lengths)
    firsts = [ids[0] for ids in documents]
    parts = [firsts[:10], firsts[10:30], firsts[30:]]
    corpus = make_corpus(tmp_path, documents, parts=[10, 20, 9])
    assert corpus.info.part_documents == [10, 20, 9]

    def counts(seed):
        return epochs(loader_of(corpus, 32, seed=seed, packing=packing, order=order, weights=[2, 0.5, 1 / 3]), 6)

    found = counts(0)
    for epoch in found:
        assert [epoch[first] for first in parts[0]] == [2] * 10
        assert sum(epoch[first] for first in parts[1]) == 10
        assert sum(epoch[first] for first in parts[2]) == 3
    for part, each in ((parts[1], 3), (parts[2], 2)):
        total = sum(found, Counter())
        assert {total[first] for first in part} == {each}, "every document in its turn"
    halves = [frozenset(first for first in parts[1] if epoch[first]) for epoch in found[:2]]
    assert not halves[0] & halves[1]
    assert counts(0) == found
    assert counts(1) != found


def test_what_is_held_out_of_a_mixture_is_measured_once(tmp_path):
    documents = unique_documents([4] * 12)
    corpus = make_corpus(tmp_path / "two", documents, parts=[6, 6])
    mixture = [{**PART, "weight": 3}, {**PART, "weight": 0.5}]
    data = DataConfig(mixture=mixture, validation_documents=4, packing="best_fit", sequence_length=8)
    kept, _ = split_documents(12, 4, 0)
    loader = loader_of(corpus, 8, packing="best_fit", documents=kept, weights=data.part_weights)
    (found,) = epochs(loader, 1)
    wanted = [3 * sum(i < 6 for i in kept), round(0.5 * sum(i >= 6 for i in kept))]
    assert [sum(n for first, n in found.items() if (first < 24) == low) for low in (True, False)] == wanted
    assert rows_per_epoch(corpus, data, 8) == -(-sum(wanted) // 2)
    corpus = make_corpus(tmp_path / "one", unique_documents([4, 4]), parts=[2])
    for packing in ("wrap", "best_fit"):  # an epoch without a document is passed over
        loader = loader_of(corpus, 4, packing=packing, weights=[0.01])
        assert {int(loader.next_micro_batch().ids[0]) for _ in range(2)} == {1, 5}


def test_parts_are_tokenised_one_after_the_other(tmp_path):
    chats, texts = tmp_path / "chats.jsonl", tmp_path / "texts"
    chats.write_text("".join(json.dumps({"body": f"line {i}"}) + "\n" for i in range(5)))
    texts.mkdir()
    for name in ("a", "b"):
        (texts / f"{name}.txt").write_text(f"text {name}")
    tokenizer = train_tokenizer(["line 1 text a b"], 270, tmp_path / "tokenizer")
    mixture = [
        {"path": str(chats), "source": "jsonl", "columns": {"text": "body"}, "max_documents": 3},
        {"path": str(texts), "source": "text", "weight": 2},
    ]
    config = DataConfig(mixture=mixture)
    require_readable(config)
    corpus = prepare_corpus(config, tokenizer, tmp_path / "corpus")
    assert corpus.info.part_documents == [3, 2]
    said = [tokenizer.decode(corpus.tokens[a:b].tolist()) for a, b in pairwise(corpus.starts)]
    assert said == [f"{text}<|endoftext|>" for text in ("line 0", "line 1", "line 2", "text a", "text b")]
    assert ", parts of 3, 2 documents" in corpus.info.words()
    (texts / "b.txt").unlink()
    assert "b.txt is gone" in prepare_corpus(config, tokenizer, tmp_path / "corpus").notes[0]
    (texts / "b.txt").write_text("text b")
    (texts / "c.txt").write_text("another")
    assert f"{texts}/c.txt has come since" in prepare_corpus(config, tokenizer, tmp_path / "corpus").notes[0]
    for file in Path(texts).iterdir():
        file.write_text(" ")
    with pytest.raises(UserError, match=rf"the corpus is empty: text found no text in {texts}"):
        prepare_corpus(config, tokenizer, tmp_path / "new")


TEXTS = [f"def function_{i}(x):\n    return x * {i}\n" * (1 + i % 5) for i in range(40)]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(corpus_cache, "LEAST_BYTES", 0)
    return tmp_path / "cache" / "penstock" / "corpora"


@pytest.fixture
def source(tmp_path):
    file = tmp_path / "documents.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return DataConfig(source="jsonl", path=str(file))


@pytest.fixture
def tokenizer(tmp_path):
    return train_tokenizer(TEXTS, 300, tmp_path / "tokenizer")


@pytest.fixture
def readings(monkeypatch):
    """One for each time that a source was tokenised."""
    found = []
    encode_all = corpus_module.encode_all
    monkeypatch.setattr(corpus_module, "encode_all", lambda *given: found.append(1) or encode_all(*given))
    return found


def moved(config, to):
    shutil.copy(config.path, to)
    return replace(config, path=str(to))


def test_another_run_with_the_same_content_takes_what_was_kept(
    tmp_path, cache, source, tokenizer, readings, monkeypatch
):
    one = prepare_corpus(source, tokenizer, tmp_path / "one")
    (kept,) = cache.iterdir()
    elsewhere = moved(source, tmp_path / "copy.jsonl")
    two = prepare_corpus(elsewhere, tokenizer, tmp_path / "two")
    assert len(readings) == 1
    assert two.tokens[:].tolist() == one.tokens[:].tolist()
    assert os.stat(tmp_path / "two" / TOKENS).st_ino == os.stat(kept / TOKENS).st_ino
    assert [file.path for file in two.info.sources] == [elsewhere.path]
    assert prepare_corpus(elsewhere, tokenizer, tmp_path / "two").notes == []
    shutil.rmtree(cache)
    assert verify_corpus(tmp_path / "two") > 0, "a run is whole by itself"
    failing(monkeypatch, ["link"], errno.EXDEV)
    for name in ("three", "four"):  # where no link can be made files are copied
        prepare_corpus(source, tokenizer, tmp_path / name)
    assert len(readings) == 2
    assert len({os.stat(tmp_path / name / TOKENS).st_ino for name in ("three", "four")}) == 2


def test_what_decides_the_tokens_decides_what_is_taken(tmp_path, cache, source, tokenizer, readings):
    """Other weights of a mixture are the same tokens."""
    for weight in (1, 0.5):
        mixture = [{"path": source.path, "source": "jsonl", "weight": weight}]
        corpus = prepare_corpus(DataConfig(mixture=mixture), tokenizer, tmp_path / str(weight))
        assert corpus.info.part_documents == [40]
    assert len(readings) == 1
    with open(source.path, "a") as file:
        file.write("\n")
    others = [
        (source, tokenizer),
        (replace(source, max_documents=3), tokenizer),
        (source, train_tokenizer(TEXTS, 280, tmp_path / "other")),
        (replace(moved(source, tmp_path / "x.jsonl"), columns={"text": "text"}), tokenizer),
    ]
    for number, (config, made_by) in enumerate(others):
        prepare_corpus(config, made_by, tmp_path / f"other {number}")
    with open(source.path, "a") as file:
        file.write(json.dumps({"text": "one more"}) + "\n")
    prepare_corpus(source, tokenizer, tmp_path / "more")
    assert len(readings) == len(list(cache.iterdir())) == 6


@pytest.mark.parametrize("name", [META, TOKENS])
def test_what_is_damaged_is_made_anew(tmp_path, cache, source, tokenizer, readings, name):
    prepare_corpus(source, tokenizer, tmp_path / "one")
    (kept,) = cache.iterdir()
    content = (kept / name).read_bytes()
    (kept / name).unlink()  # not the run's, which is the same file
    (kept / name).write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    prepare_corpus(source, tokenizer, tmp_path / "two")
    assert len(readings) == 2
    assert verify_corpus(tmp_path / "two") == verify_corpus(tmp_path / "one") == verify_corpus(kept)
    assert not list(tmp_path.glob("*.building-*"))
    kept.chmod(0o777)  # what somebody else may write is not believed
    prepare_corpus(source, tokenizer, tmp_path / "three")
    assert len(readings) == 3


def test_only_the_newest_are_kept(tmp_path, cache, source, tokenizer, readings, monkeypatch):
    monkeypatch.setattr(corpus_cache, "MOST_KEPT", 2)
    entries = []
    for documents in (1, 2, 3):
        config = replace(source, max_documents=documents)
        prepare_corpus(config, tokenizer, tmp_path / str(documents))
        entries.append(next(entry for entry in cache.iterdir() if entry not in entries))
        os.utime(entries[-1], (documents, documents))
        if documents == 2:  # used again
            prepare_corpus(replace(source, max_documents=1), tokenizer, tmp_path / "again")
    assert [entry.exists() for entry in entries] == [True, False, True]
    monkeypatch.setattr(corpus_cache, "MOST_BYTES", 1)
    corpus_cache._prune(cache)
    assert list(cache.iterdir()) == []


def test_small_ones_and_a_cache_that_is_none_leave_nothing(tmp_path, cache, source, tokenizer, monkeypatch):
    monkeypatch.setattr(corpus_cache, "LEAST_BYTES", 1 << 20)
    prepare_corpus(source, tokenizer, tmp_path / "one")
    assert not cache.exists()
    monkeypatch.setattr(corpus_cache, "LEAST_BYTES", 0)
    cache.parent.mkdir(parents=True)
    cache.write_text("a file in the way")
    prepare_corpus(source, tokenizer, tmp_path / "two")
    assert cache.read_text() == "a file in the way"


def test_the_hash_of_a_large_file_is_kept_as_long_as_its_size_and_time(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(sources, "_MEMO_BYTES", 1)
    file = tmp_path / "large"
    file.write_bytes(b"one")
    os.utime(file, (5, 5))
    (first,) = sources.describe_files([file])
    file.write_bytes(b"two")
    os.utime(file, (5, 5))
    assert next(sources.describe_files([file])) == first, "looked at by size and time"
    os.utime(file, (6, 6))
    assert next(sources.describe_files([file])).sha256 != first.sha256
