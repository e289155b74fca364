"""Needles in haystacks: what the documents say, their order, their tokenizer, and how answers are counted."""

from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import AutoTokenizer

from penstock.engine.config import DataConfig
from penstock.engine.data import needles
from penstock.engine.data.corpus import prepare_text
from penstock.engine.data.corpus_files import TokenCorpus
from penstock.engine.data.loader import DataLoader
from penstock.engine.data.needles import DEPTHS, NEEDLES, STAGES, TESTED, VOCABULARY, haystack
from penstock.engine.data.packing import split_documents
from penstock.engine.data.recall import Tally
from penstock.storage.errors import UserError


def needle_config(**changes: object) -> DataConfig:
    return DataConfig(source="needles", packing="best_fit", order="kept", **{"sequence_length": 128, **changes})  # type: ignore[arg-type]


@settings(deadline=None)
@given(length=st.integers(10, 700), seed=st.integers(0, 9), again=st.booleans())
def test_every_answer_is_what_the_haystack_says_of_its_name(length: int, seed: int, again: bool) -> None:
    ids, weights = haystack(length, np.random.default_rng(seed), again=again)
    words = [VOCABULARY[number] for number in ids]
    assert len(words) == len(weights) == length
    asked = np.flatnonzero(weights)
    pairs = min(NEEDLES, (length - 2) // 4)
    assert len(asked) == pairs
    end = words.index("?")
    said = {name: digit for name, digit in pairwise(words[:end]) if digit.isdigit()}
    assert len(said) == pairs
    assert all(words[place].isdigit() and words[place] == said[words[place - 1]] for place in asked)
    assert asked[0] == end + 2
    assert again or {words[place - 1] for place in asked} == said.keys()
    assert words.index(VOCABULARY[0]) == length - 1


def test_documents_get_longer_and_those_held_out_are_of_all_lengths() -> None:
    config = needle_config(sequence_length=2048, validation_documents=6)
    lengths = [len(sample.ids) for sample in needles.documents(config)]
    below = [(length, rows) for length, rows in STAGES if length < 2048]
    expected = [length for length, rows in below for _ in range(rows * (2048 // length))]
    assert lengths[: len(expected)] == expected
    assert set(lengths[len(expected) : -6]) == {2048}
    assert lengths[-6:] == [512, 512, 1024, 1024, 2048, 2048]
    assert max(TESTED) == max(length for length, _ in STAGES) == 8192
    few = list(needles.documents(needle_config(max_documents=5, validation_documents=2)))
    assert [len(sample.ids) for sample in few] == [10, 10, 10, 128, 128]


def test_the_same_seed_gives_the_same_documents_and_another_others() -> None:
    first, again, other = (
        [sample.ids for sample in islice(needles.documents(needle_config(seed=seed)), 50)] for seed in (3, 3, 4)
    )
    assert first == again != other


def test_a_row_without_room_is_refused() -> None:
    with pytest.raises(UserError, match=r"data\.sequence_length: 9 is too short for a haystack; set at least 10"):
        next(needles.documents(needle_config(sequence_length=9)))


def rows_of(corpus: TokenCorpus, documents: NDArray[np.int64], *, endless: bool = True) -> DataLoader:
    rows = {"vocab_size": 53, "sequence_length": 128, "global_batch_size": 1, "packing": "best_fit", "order": "kept"}
    return DataLoader(corpus, documents=documents, endless=endless, **rows)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("needles")
    prepare_text(needle_config(max_documents=70, validation_documents=2), None, folder)
    return folder


def test_plain_transformers_read_the_tokenizer(prepared: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(prepared / "tokenizer")
    assert len(tokenizer) == len(VOCABULARY) == len(set(VOCABULARY)) == 53
    ids, _ = haystack(80, np.random.default_rng(0))
    text = " ".join(VOCABULARY[number] for number in ids)
    assert tokenizer(text)["input_ids"] == ids.tolist()
    assert tokenizer.decode(ids[:-1]) == text.removesuffix(f" {tokenizer.eos_token}")


def test_other_settings_make_other_documents(prepared: Path) -> None:
    config = needle_config(max_documents=70, validation_documents=2)
    kept = prepare_text(config, None, prepared)[1].info
    other = prepare_text(needle_config(max_documents=70, validation_documents=2, seed=1), None, prepared)[1].info
    assert other.content != kept.content
    assert prepare_text(config, None, prepared)[1].info == kept


def test_rows_hold_short_documents_in_order_and_only_answers_are_targets(prepared: Path) -> None:
    corpus = prepare_text(needle_config(max_documents=70, validation_documents=2), None, prepared)[1]
    train, held_out = split_documents(corpus.info.num_documents, 2, 0, "kept")
    assert (list(train), list(held_out)) == (list(range(68)), [68, 69])
    loader = rows_of(corpus, train)
    first = loader.next_micro_batch()
    assert first.lengths == [10] * 12
    assert first.num_targets == 24
    digits = {VOCABULARY.index(str(digit)) for digit in range(10)}
    assert set(first.labels[first.labels >= 0].tolist()) <= digits
    start, stop = corpus.starts[3], corpus.starts[4]
    assert first.ids[30:40].tolist() == corpus.tokens[start:stop].tolist()


def test_answers_are_counted_by_length_and_depth(prepared: Path) -> None:
    corpus = prepare_text(needle_config(max_documents=70, validation_documents=2), None, prepared)[1]
    loader = rows_of(corpus, np.array([0, 68]), endless=False)
    batches = [loader.next_micro_batch(), loader.next_micro_batch()]
    targets = sum(batch.num_targets for batch in batches)
    right = torch.ones(targets, dtype=torch.bool)
    right[0] = False
    tally = Tally()
    tally.add(batches, right)
    found = tally.recall()
    assert found.lengths == [10, 128]
    assert [sum(row) for row in found.asked] == [2, 16]
    assert [sum(row) for row in found.right] == [1, 16]
    words = [VOCABULARY[number] for number in corpus.tokens[corpus.starts[68] : corpus.starts[69]]]
    depths = [0] * DEPTHS
    for place, word in enumerate(words[: words.index("?")]):
        depths[place * DEPTHS // 128] += words[place + 1].isdigit() and not word.isdigit()
    assert found.asked[1] == depths
