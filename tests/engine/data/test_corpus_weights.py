"""Weights beside the tokens: only where one is not 1, checked like the tokens, and on the label that they belong to."""

import itertools

import numpy as np
import pytest
from corpora import loader_of, make_corpus, unique_documents
from hypothesis import given
from hypothesis import strategies as st
from samples import sampled

from penstock.engine.data import corpus_files
from penstock.engine.data.corpus_files import WEIGHTS, CorpusWriter, TokenCorpus, verify_corpus
from penstock.engine.data.span_files import BLOCK_BYTES
from penstock.engine.model.tokens import IGNORE_LABEL
from penstock.storage.errors import UserError


def weighted(folder, tokens=50_000):
    """A corpus of some blocks of weights, in documents of 1000 tokens, of which the first count 1."""
    folder.mkdir()
    writer = CorpusWriter(folder, "uint16")
    ids = np.random.default_rng(0).integers(0, 500, tokens)
    weights = np.random.default_rng(1).choice(np.asarray([0, 1, 0.5], dtype=np.float32), tokens)
    weights[:2000] = 1
    for start in range(0, tokens, 1000):
        found = weights[start : start + 1000]
        writer.append(f"document {start}", ids[start : start + 1000], True, None if start == 0 else found)
    writer.finish("made", 0)
    return TokenCorpus.open(folder), weights


def test_a_corpus_whose_tokens_all_count_one_has_no_weights(tmp_path):
    documents = [[1, 2, 0], [3, 4, 5, 0]]
    plain = make_corpus(tmp_path / "plain", documents)
    ones = make_corpus(tmp_path / "ones", documents, weights=[[1, 1, 1], None])
    assert plain.info == ones.info
    assert plain.weights is ones.weights is None
    assert plain.info.num_trained == 5
    assert {path.name for path in ones.folder.iterdir()} == {path.name for path in plain.folder.iterdir()}
    assert WEIGHTS not in {path.name for path in plain.folder.iterdir()}


def test_weights_are_those_given_though_the_first_that_is_not_one_comes_late(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_files, "COPY_BYTES", 1 << 10)
    corpus, weights = weighted(tmp_path / "corpus")
    assert corpus.weights[:].tolist() == weights.tolist()
    targets = np.delete(weights, np.arange(0, 50_000, 1000))
    assert corpus.info.num_trained == int((targets > 0).sum())
    assert verify_corpus(corpus.folder) == sum(path.stat().st_size for path in corpus.folder.iterdir())


def test_other_weights_are_another_corpus(tmp_path):
    documents = [[1, 2, 0]]
    contents = {
        make_corpus(tmp_path / str(number), documents, weights=given).info.content
        for number, given in enumerate([None, [[1, 0, 1]], [[1, 1, 0]]])
    }
    assert len(contents) == 3


def test_only_the_damaged_block_of_weights_is_refused(tmp_path):
    corpus, weights = weighted(tmp_path / "corpus")
    with (corpus.folder / WEIGHTS).open("r+b") as file:
        file.seek(2 * BLOCK_BYTES + 5)
        file.write(b"\xff\xff")
    found, block = TokenCorpus.open(corpus.folder), BLOCK_BYTES // 4
    assert (found.weights[: 2 * block] == weights[: 2 * block]).all()
    loader = loader_of(found, 1000, packing="best_fit", endless=False)
    with pytest.raises(UserError, match=r"weights\.bin: damaged: block 2 .* has CRC-32C"):
        [loader.next_micro_batch() for _ in range(50)]


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_a_weight_that_is_none_is_refused_whatever_the_checksums_say(tmp_path, bad, monkeypatch):
    monkeypatch.setattr(CorpusWriter, "_append_weights", written_as_it_is)
    corpus = make_corpus(tmp_path / "corpus", [[1, 2, 0]], weights=[[1, bad, 1]])
    with pytest.raises(UserError, match=r"block 0 .* holds an invalid weight"):
        corpus.weights[:]


def written_as_it_is(writer, count, weights):
    writer._weights = writer._weights or corpus_files.SpanWriter(writer._folder / WEIGHTS)
    writer._weights.add(weights.astype("<f4").tobytes())


@sampled(15, 100)
@given(
    st.lists(st.lists(st.sampled_from([0.0, 1.0, 1.0, 0.25, 3.0]), min_size=1, max_size=30), min_size=1, max_size=10),
    st.integers(2, 20),
    st.sampled_from(["wrap", "best_fit", "none"]),
    st.booleans(),
)
def test_a_label_has_the_weight_of_the_token_that_it_names(tmp_path_factory, weights, length, packing, alone):
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
