"""Needles in haystacks: what the documents say, their order, their tokenizer, and how answers are counted. And needles
in text: of the wanted length, at the wanted depth, found by who reads them, and scored by their share."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from corpora import loader_of
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import AutoTokenizer

from penstock.engine.config import DataConfig, Recipe
from penstock.engine.data.corpus.files import TokenCorpus
from penstock.engine.data.corpus.prepare import prepare_data
from penstock.engine.data.loader import DataLoader
from penstock.engine.data.needles import haystacks
from penstock.engine.data.needles.haystacks import DEPTHS, NEEDLES, STAGES, TESTED, VOCABULARY, haystack
from penstock.engine.data.needles.retrieval import KINDS, Haystacks, Question, found_values, questions, recall
from penstock.engine.data.packing import split_documents
from penstock.engine.data.recall import Tally
from penstock.storage.files.errors import UserError


def needle_config(**changes: object) -> DataConfig:
    return DataConfig(source="needles", packing="best_fit", order="kept", **{"sequence_length": 128, **changes})  # type: ignore[arg-type]


SOME = needle_config(max_documents=70, validation_documents=2)


@settings(deadline=None)
@given(length=st.integers(10, 700), seed=st.integers(0, 9), repeats=st.booleans())
def test_every_answer_is_what_the_haystack_says_of_its_name(length: int, seed: int, repeats: bool) -> None:
    ids, weights = haystack(length, np.random.default_rng(seed), repeats=repeats)
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
    assert repeats or {words[place - 1] for place in asked} == said.keys()
    assert words.index(VOCABULARY[0]) == length - 1


def test_documents_get_longer_and_those_held_out_are_of_all_lengths() -> None:
    config = needle_config(sequence_length=1024, validation_documents=6)
    lengths = [len(sample.ids) for sample in haystacks.documents(config)]
    below = [(length, rows) for length, rows in STAGES if length < 1024]
    expected = [length for length, rows in below for _ in range(rows * (1024 // length))]
    assert lengths[: len(expected)] == expected
    assert set(lengths[len(expected) : -6]) == {1024}
    assert lengths[-6:] == [512] * 3 + [1024] * 3
    assert max(TESTED) == max(length for length, _ in STAGES) == 8192
    few = list(haystacks.documents(needle_config(max_documents=5, validation_documents=2)))
    assert [len(sample.ids) for sample in few] == [10, 10, 10, 128, 128]
    with pytest.raises(UserError, match=r"data\.sequence_length: 9 is too short for a haystack; set at least 10"):
        next(haystacks.documents(needle_config(sequence_length=9)))


def rows_of(corpus: TokenCorpus, documents: NDArray[np.int64], *, endless: bool = True) -> DataLoader:
    return loader_of(corpus, 128, vocab_size=53, packing="best_fit", order="kept", documents=documents, endless=endless)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> TokenCorpus:
    return prepare_data(Recipe(name="x", data=SOME), tmp_path_factory.mktemp("needles"))[1]


def test_plain_transformers_read_the_tokenizer(corpus: TokenCorpus, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(corpus.folder.parent / "tokenizer")
    assert len(tokenizer) == len(VOCABULARY) == len(set(VOCABULARY)) == 53
    ids, _ = haystack(80, np.random.default_rng(0))
    text = " ".join(VOCABULARY[number] for number in ids)
    assert tokenizer(text)["input_ids"] == ids.tolist()
    assert tokenizer.decode(ids[:-1]) == text.removesuffix(f" {tokenizer.eos_token}")
    found = [
        prepare_data(Recipe(name="x", data=needle_config(max_documents=4, seed=n)), tmp_path)[1].info for n in (0, 1, 0)
    ]
    assert found[0] == found[2]
    assert found[0].content != found[1].content, "other settings make other documents"


def test_rows_hold_short_documents_in_order_and_only_answers_are_targets(corpus: TokenCorpus) -> None:
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


def test_answers_are_counted_by_length_and_depth(corpus: TokenCorpus) -> None:
    loader = rows_of(corpus, np.array([0, 68]), endless=False)
    batches = [loader.next_micro_batch(), loader.next_micro_batch()]
    targets = sum(batch.num_targets for batch in batches)
    right = torch.ones(targets, dtype=torch.bool)
    right[0] = False
    tally = Tally()
    tally.add(batches, right)
    found = tally.recall()
    assert found.lengths == [10, 128]
    assert [sum(row) for row in found.queried] == [2, 16]
    assert [sum(row) for row in found.right] == [1, 16]
    words = [VOCABULARY[number] for number in corpus.tokens[corpus.starts[68] : corpus.starts[69]]]
    depths = [0] * DEPTHS
    for place, word in enumerate(words[: words.index("?")]):
        depths[place * DEPTHS // 128] += words[place + 1].isdigit() and not word.isdigit()
    assert found.queried[1] == depths


HAYSTACKS = Haystacks(lengths=(300, 900), depths=4, samples=2, new_tokens=40, seed=5)


def words(text: str) -> int:
    return len(text.split())


def asked(haystacks: Haystacks) -> list[Question]:
    return list(questions(haystacks, words, lambda question: words(f"{question.text} {question.begun}")))


@pytest.mark.parametrize("filler", ["essay", "noise"])
def test_prompts_fill_their_length_and_hide_values_at_their_depth(filler: str) -> None:
    made = asked(replace(HAYSTACKS, filler=filler))
    assert len(made) == len(KINDS) * 2 * 4 * 2
    assert len({question.text for question in made}) == len(made)
    for question in made:
        used = words(f"{question.text} {question.begun}") + HAYSTACKS.new_tokens
        assert question.length - 40 < used <= question.length
        body = question.text.split("\n\n")[1]
        assert question.depths[0] == question.depth
        for value, depth in zip(question.values, question.depths, strict=True):
            assert question.text.count(value) == 1
            share = words(body[: body.index(value)]) / words(body)
            # A needle has nine words, four of them may be in the body too.
            assert depth / 4 - 0.15 < share < (depth + 1) / 4 + 0.25, (question.kind, depth, share)


def test_kinds_are_as_ruler_defines_them() -> None:
    kinds = {question.kind: question for question in asked(replace(HAYSTACKS, lengths=(900,), samples=1))}
    needles = {kind: question.text.count("One of the secret numbers of") for kind, question in kinds.items()}
    assert needles == {"single": 1, "multikey": 4, "multivalue": 4}
    values = {kind: len(question.values) for kind, question in kinds.items()}
    assert values == {"single": 1, "multikey": 1, "multivalue": 4}
    for question in kinds.values():
        key = question.begun.removeprefix("The secret numbers of the ").removeprefix("The secret number of the ")
        key = key.removesuffix(" are").removesuffix(" is")
        hidden = [f"One of the secret numbers of the {key} is {value}." for value in question.values]
        assert all(needle in question.text for needle in hidden)


def test_every_depth_is_asked_as_often_and_the_same_by_the_same_seed() -> None:
    assert asked(HAYSTACKS) == asked(HAYSTACKS) != asked(replace(HAYSTACKS, seed=6))
    with pytest.raises(UserError, match=r"--lengths 60: too short for .* the minimum is \d+ tokens, 40 of them"):
        asked(replace(HAYSTACKS, lengths=(60,)))
    for kind in KINDS:
        made = asked(replace(HAYSTACKS, kinds=(kind,)))
        depths = [depth for question in made for depth in question.depths]
        assert {depths.count(depth) for depth in range(4)} == {len(depths) // 4}
    question = next(question for question in asked(HAYSTACKS) if question.kind == "multivalue")
    one, two, three, four = question.values  # an answer counts by the share that it has of them
    assert recall(question, f" {two}, and {four}.") == 0.5
    assert found_values(question, f"{two} {four}") == [False, True, False, True]
    assert recall(question, "none") == 0.0
    assert recall(question, f"{four}{three}{two}{one}") == 1.0
