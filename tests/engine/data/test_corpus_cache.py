"""A tokenised corpus is kept for the next run: known by its source's content, taken by links, made anew if damaged."""

import json
import os
import shutil
from dataclasses import replace

import pytest

from penstock.engine.config import DataConfig
from penstock.engine.data import corpus as corpus_module
from penstock.engine.data import corpus_cache, sources
from penstock.engine.data.corpus import prepare_corpus
from penstock.engine.data.corpus_files import META, TOKENS, verify_corpus
from penstock.engine.data.tokenizer import train_tokenizer

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


def test_another_run_with_the_same_content_takes_what_was_kept(tmp_path, cache, source, tokenizer, readings):
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


def test_what_decides_the_tokens_decides_what_is_taken(tmp_path, cache, source, tokenizer, readings):
    with open(source.path, "a") as file:
        file.write("\n")
    others = [
        (source, tokenizer),
        (replace(source, max_documents=3), tokenizer),
        (source, train_tokenizer(TEXTS, 280, tmp_path / "other")),
        (replace(moved(source, tmp_path / "x.jsonl"), columns={"text": "text"}), tokenizer),
    ]
    for number, (config, made_by) in enumerate(others):
        prepare_corpus(config, made_by, tmp_path / str(number))
    with open(source.path, "a") as file:
        file.write(json.dumps({"text": "one more"}) + "\n")
    prepare_corpus(source, tokenizer, tmp_path / "more")
    assert len(readings) == len(list(cache.iterdir())) == 5


def test_other_weights_of_a_mixture_are_the_same_tokens(tmp_path, cache, source, tokenizer, readings):
    for weight in (1, 0.5):
        mixture = [{"path": source.path, "source": "jsonl", "weight": weight}]
        corpus = prepare_corpus(DataConfig(mixture=mixture), tokenizer, tmp_path / str(weight))
        assert corpus.info.part_documents == [40]
    assert len(readings) == 1


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


def test_where_no_link_can_be_made_files_are_copied(tmp_path, cache, source, tokenizer, readings, monkeypatch):
    def no_link(*_, **__):
        raise OSError("Invalid cross-device link")

    monkeypatch.setattr(os, "link", no_link)
    prepare_corpus(source, tokenizer, tmp_path / "one")
    prepare_corpus(source, tokenizer, tmp_path / "two")
    assert len(readings) == 1
    inodes = {os.stat(tmp_path / run / TOKENS).st_ino for run in ("one", "two")}
    assert len(inodes) == 2


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
