"""Rows of whole documents: every document once an epoch, none across a row's end, and a resume repeats nothing."""

import itertools
import json
from collections import Counter

import numpy as np
import pytest
from corpora import loader_of, make_corpus, unique_documents
from hypothesis import given
from hypothesis import strategies as st
from samples import sampled

from penstock.engine.config import DataConfig
from penstock.engine.data import packing
from penstock.engine.data.loader import ValidationSet
from penstock.engine.data.packing import best_fit, count_rows, cut_pieces, fit_in_order, pack_rows, rows_per_epoch
from penstock.engine.model.tokens import IGNORE_LABEL
from penstock.storage.files.errors import UserError

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=30)
PACKINGS = st.sampled_from(["best_fit", "none"])
LONG = st.sampled_from(["split", "cut", "drop"])
ORDERS = st.sampled_from(["shuffled", "kept"])


@pytest.fixture
def small_windows(monkeypatch):
    """An epoch of a few documents has several windows."""
    monkeypatch.setattr(packing, "WINDOW_DOCUMENTS", 4)
    monkeypatch.setattr(packing, "WINDOW_ROWS", 1)


def expected_pieces(documents, length, long):
    """What an epoch must have, as tokens, in the corpus' order."""
    found = []
    for ids in documents:
        if len(ids) <= length or long == "split":
            found += [ids[at : at + length] for at in range(0, len(ids), length)]
        elif long == "cut":
            found.append(ids[:length])
    return found


def documents_of(batch):
    stops = [*batch.documents[1:], len(batch.ids)]
    filled = len(batch.ids) if batch.filled is None else batch.filled
    spans = [(a, b) for a, b in zip(batch.documents, stops, strict=True) if a < filled]
    for start, stop in spans:
        assert batch.positions[start:stop].tolist() == list(range(stop - start))
    assert [stop - start for start, stop in spans] == batch.lengths
    assert sum(batch.lengths) == filled
    if filled < len(batch.ids):
        assert filled in batch.documents, "the padding is a document of its own"
        assert (batch.labels[filled:] == IGNORE_LABEL).all()
        assert (batch.positions[filled:] == 0).all()
    return [batch.ids[start:stop].tolist() for start, stop in spans]


@pytest.mark.usefixtures("small_windows")
@sampled(30, 300)
@given(LENGTHS, st.integers(2, 33), st.integers(1, 3), st.integers(0, 3), PACKINGS, LONG, ORDERS)
def test_an_epoch_gives_every_document_once(tmp_path_factory, lengths, length, rows, seed, how, long_documents, order):
    documents = unique_documents(lengths)
    corpus = make_corpus(tmp_path_factory.mktemp("corpus"), documents)
    wanted = expected_pieces(documents, length, long_documents)
    given = {"seed": seed, "packing": how, "long_documents": long_documents, "order": order, "endless": False}
    if not wanted:
        with pytest.raises(UserError, match="drop leaves nothing"):
            loader_of(corpus, length, rows, **given)
        return
    loader = loader_of(corpus, length, rows, **given)
    following = {a: b for ids in documents for a, b in itertools.pairwise(ids)}
    seen = []
    while not loader.exhausted:
        batch = loader.next_micro_batch()
        for ids in (found := documents_of(batch)):
            seen.append(ids)
            at = batch.documents[found.index(ids)]
            last = following.get(ids[-1], IGNORE_LABEL) if long_documents == "split" else IGNORE_LABEL
            assert batch.labels[at : at + len(ids)].tolist() == [*ids[1:], last]
        assert batch.num_targets == int((batch.labels != IGNORE_LABEL).sum())
        assert how == "best_fit" or len(found) == rows or loader.exhausted
    assert Counter(map(tuple, seen)) == Counter(map(tuple, wanted))
    if how == "none" and order == "kept":
        assert seen == wanted
    count = sum(n > length for n in lengths)
    names = {"split": "split", "cut": "cut", "drop": "dropped"}
    reported = {"split": 0, "cut": 0, "dropped": 0, "untrained": 0, "filled": 0} | {names[long_documents]: count}
    assert loader.report._asdict() | {"filled": 0} == reported


@given(LENGTHS, st.integers(40, 90), ORDERS, st.integers(0, 5))
def test_rows_hold_what_fits_and_all_of_it(lengths, capacity, order, seed):
    given = np.asarray(lengths)
    rows = pack_rows(given, capacity, "best_fit", order, np.random.SeedSequence(seed))
    assert sorted(rows.members.tolist()) == list(range(len(lengths)))
    sums = [int(given[rows.row(i)].sum()) for i in range(len(rows))]
    assert min(sums) > 0
    assert max(sums) <= capacity
    assert len(rows) == count_rows(given, capacity, "best_fit", order)
    if order == "shuffled":  # any two rows that would fit into one are one
        assert len(sums) == 1 or sum(sorted(sums)[:2]) > capacity


def test_fits_by_hand_and_an_order_that_is_kept(monkeypatch):
    assert best_fit(np.asarray([3, 6, 4, 7, 2]), 10) == [0, 1, 1, 0, 2]
    assert best_fit(np.asarray([5, 5, 5, 5]), 10) == [0, 0, 1, 1]
    lengths = np.sort(np.random.default_rng(0).integers(1, 500, 3000))
    rows = np.asarray(fit_in_order(lengths, 1000))
    means = [lengths[rows == row].mean() for row in range(rows.max() + 1)]
    assert np.corrcoef(means, np.arange(len(means)))[0, 1] > 0.95
    assert (np.maximum.accumulate(rows) - rows).max() < packing._OPEN_ROWS
    lengths = np.random.default_rng(0).integers(1, 600, 4000)
    monkeypatch.setattr(packing, "WINDOW_DOCUMENTS", 100)
    monkeypatch.setattr(packing, "WINDOW_ROWS", 4)
    exact = count_rows(lengths, 1024, "best_fit", "shuffled")
    monkeypatch.setattr(packing, "_LOOKED_AT", 8)  # rows of a large epoch are estimated
    assert abs(count_rows(lengths, 1024, "best_fit", "shuffled") / exact - 1) < 0.03


@pytest.mark.parametrize(("median", "capacity"), [(400, 4096), (400, 32768), (1500, 8192)])
def test_a_realistic_mix_fills_its_rows(median, capacity):
    generator = np.random.Generator(np.random.PCG64(0))
    lengths = np.clip(np.exp(generator.normal(np.log(median), 0.9, 20_000)), 16, None).astype(np.int64)
    starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
    for how in ("split", "cut"):
        pieces = cut_pieces(starts[:-1], starts[1:], capacity, how)
        found = pieces.tokens(np.arange(len(pieces.starts)), capacity)
        found = found[packing.shuffled(np.random.SeedSequence(1), len(found))]
        rows = count_rows(found, capacity, "best_fit", "shuffled")
        assert found.sum() / (rows * capacity) >= 0.97


@pytest.mark.usefixtures("small_windows")
@sampled(10, 60)
@given(LENGTHS, st.integers(40, 64), st.integers(1, 2), PACKINGS | st.just("wrap"), LONG, ORDERS)
def test_a_resume_at_any_step_goes_on_exactly(tmp_path_factory, lengths, length, rows, how, long_documents, order):
    corpus = make_corpus(tmp_path_factory.mktemp("corpus"), unique_documents(lengths))
    given = {"packing": how, "long_documents": long_documents, "order": order, "seed": 5}

    def fetched(loader):
        return [(b.ids.tolist(), b.labels.tolist(), b.documents, b.filled) for b in loader.next_step()]

    whole = loader_of(corpus, length, rows, 2, **given)
    cursors, steps = [], []
    for _ in range(8):
        cursors.append(json.loads(json.dumps(whole.cursor)))
        steps.append(fetched(whole))
    for start, cursor in enumerate(cursors):
        resumed = loader_of(corpus, length, rows, 2, **given)
        resumed.seek(cursor)
        assert [fetched(resumed) for _ in range(start, 8)] == steps[start:]


def test_a_cursor_of_other_rows_is_refused_by_the_fields_name(tmp_path):
    corpus = make_corpus(tmp_path, unique_documents([5, 7, 3, 9]))
    names = ("packing", "long_documents", "order")
    every = itertools.product(("wrap", "best_fit", "none"), ("split", "cut"), ("shuffled", "kept"))
    cursors = {ways: loader_of(corpus, 16, **dict(zip(names, ways, strict=True))).cursor for ways in every}
    for ways, other in itertools.permutations(cursors, 2):
        loader = loader_of(corpus, 16, **dict(zip(names, ways, strict=True)))
        (name, now, before), *_ = ((n, a, b) for n, a, b in zip(names, ways, other, strict=True) if a != b)
        with pytest.raises(UserError, match=rf"data\.{name}: {now}, but the run so far used {before}"):
            loader.seek(cursors[other])
    loader = loader_of(corpus, 16, packing="best_fit")
    good = loader.cursor
    without = {key: value for key, value in good.items() if key != "row"}
    for bad in (good | {"window": 2}, good | {"row": 99}, good | {"window": 1, "row": 1}, good | {"row": -1}, without):
        with pytest.raises(UserError, match="the record of the generation"):
            loader.seek(bad)
    loader.seek(good | {"window": 1})
    assert documents_of(loader.next_micro_batch())


def test_other_epochs_pack_other_rows(tmp_path):
    corpus = make_corpus(tmp_path, unique_documents([5, 7, 3, 9, 4, 8, 6, 2] * 4))
    loader = loader_of(corpus, 16, packing="best_fit")
    rows = rows_per_epoch(corpus, DataConfig(packing="best_fit"), 16)
    first, second = ([documents_of(loader.next_micro_batch()) for _ in range(rows)] for _ in range(2))
    assert loader.cursor["epoch"] == 1
    assert sorted(itertools.chain(*first)) == sorted(itertools.chain(*second))
    assert first != second


def rest_of(loader):
    found = []
    while not loader.exhausted:
        found.append(loader.next_micro_batch())
    return found


@pytest.mark.parametrize(("how", "rows"), [("wrap", 4), ("best_fit", 4), ("none", 5)])
def test_rows_of_an_epoch_are_those_that_the_loader_gives(tmp_path, how, rows):
    corpus, data = make_corpus(tmp_path, unique_documents([5, 7, 30, 9])), DataConfig(packing=how)
    assert rows_per_epoch(corpus, data, 16) == rows
    assert len(rest_of(loader_of(corpus, 16, packing=how, endless=False))) == rows
    # A model with state needs a row for each document.
    assert rows_per_epoch(corpus, data, 16, one_document_per_row=True) == 5
    loader = loader_of(corpus, 16, 2, packing=how, one_document_per_row=True, endless=False)
    batches = rest_of(loader)
    assert all(batch.filled is None and {0, 16} == set(batch.documents) for batch in batches)
    assert sum(len(batch.lengths) for batch in batches) == 5
    assert loader.report.filled == 51 / 80


@pytest.mark.parametrize("how", ["best_fit", "none"])
def test_validation_measures_each_document_once(tmp_path, how):
    corpus = make_corpus(tmp_path, unique_documents([5, 7, 3, 9, 12, 1]))
    held_out = np.asarray([1, 3, 5])
    loader = loader_of(corpus, 16, 2, packing=how, documents=held_out, endless=False)
    validation = ValidationSet(loader, num_documents=3, most=10)
    twice = [[ids for p in validation.passes(2) for batch in p for ids in documents_of(batch)] for _ in range(2)]
    assert twice[0] == twice[1]
    assert sorted(map(len, twice[0])) == [1, 7, 9]
    assert validation.num_targets == 6 + 8


def test_what_became_of_long_documents_is_said(tmp_path):
    corpus = make_corpus(tmp_path, unique_documents([5, 40, 20, 16]))
    said = {"split": "split, rows 84.4%", "cut": "cut to it, rows 82.8%", "drop": "left out, rows 65.6%"}
    for how, words in said.items():
        report = loader_of(corpus, 16, packing="best_fit", long_documents=how).report
        assert report.words() == f", 2 longer than the context and {words} filled"
    leaves_nothing = r"data\.long_documents: drop leaves nothing, because all 4 documents are longer"
    with pytest.raises(UserError, match=leaves_nothing):
        loader_of(corpus, 4, long_documents="drop")
    with pytest.raises(UserError, match="because all 2 documents held out for validation are longer"):
        loader_of(corpus, 16, long_documents="drop", documents=np.asarray([1, 2]), endless=False)


@sampled(30, 300)
@given(st.data(), st.integers(2, 20), st.integers(1, 3), st.sampled_from(["wrap", "best_fit", "none"]), LONG, ORDERS)
def test_no_row_is_without_a_target(tmp_path_factory, data, length, rows, how, long_documents, order):
    """No token of a prompt is trained: where it is longer than a row, pieces of it alone are left out. Targets stay."""
    lengths = data.draw(st.lists(st.integers(2, 60), min_size=1, max_size=8))
    documents, weights = unique_documents(lengths), []
    for count in lengths:
        trained = data.draw(st.sets(st.integers(1, count - 1), min_size=1, max_size=3))
        weights.append([float(index in trained) for index in range(count)])
    corpus = make_corpus(tmp_path_factory.mktemp("corpus"), documents, weights)
    wanted = Counter()
    for ids, counted in zip(documents, weights, strict=True):
        if long_documents == "split" or len(ids) <= length or long_documents == "cut":
            stop = length if long_documents == "cut" else len(ids)
            wanted.update(token for token, weight in zip(ids[:stop], counted, strict=False) if weight)
    given_ways = {"packing": how, "long_documents": long_documents, "order": order, "endless": False}
    if not wanted:
        with pytest.raises(UserError, match="leaves nothing"):
            loader_of(corpus, length, rows, **given_ways)
        return
    loader = loader_of(corpus, length, rows, **given_ways)
    seen = Counter()
    while not loader.exhausted:
        batch = loader.next_micro_batch()
        seen.update(batch.labels[batch.labels != IGNORE_LABEL].tolist())
        stops = [*batch.documents[1:], len(batch.ids)]
        if how == "wrap":
            filled = [batch.labels[row * length : (row + 1) * length] for row in range(rows)]
            assert all((row != IGNORE_LABEL).any() for row in filled) or loader.exhausted
        else:
            pieces = [batch.labels[a:b] for a, b in zip(batch.documents, stops, strict=True)][: len(batch.lengths)]
            shortened = [piece for piece, count in zip(pieces, batch.lengths, strict=True) if count == length]
            assert all((piece != IGNORE_LABEL).any() for piece in shortened)
        assert batch.num_targets or loader.exhausted
    assert seen == wanted
