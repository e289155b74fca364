"""Needles in text: of the wanted length, at the wanted depth, found by who reads them, and scored by their share."""

from dataclasses import replace

import pytest

from penstock.engine.data.retrieval import KINDS, Haystacks, Question, found_values, questions, recall
from penstock.storage.errors import UserError

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
    assert {kind: len(question.values) for kind, question in kinds.items()} == {
        "single": 1,
        "multikey": 1,
        "multivalue": 4,
    }
    for question in kinds.values():
        key = question.begun.removeprefix("The secret numbers of the ").removeprefix("The secret number of the ")
        key = key.removesuffix(" are").removesuffix(" is")
        hidden = [f"One of the secret numbers of the {key} is {value}." for value in question.values]
        assert all(needle in question.text for needle in hidden)


def test_every_depth_is_asked_as_often() -> None:
    for kind in KINDS:
        made = asked(replace(HAYSTACKS, kinds=(kind,)))
        depths = [depth for question in made for depth in question.depths]
        assert {depths.count(depth) for depth in range(4)} == {len(depths) // 4}


def test_the_same_seed_asks_the_same_and_another_does_not() -> None:
    assert asked(HAYSTACKS) == asked(HAYSTACKS)
    assert asked(HAYSTACKS) != asked(replace(HAYSTACKS, seed=6))


def test_an_answer_counts_by_the_share_of_its_values() -> None:
    question = next(question for question in asked(HAYSTACKS) if question.kind == "multivalue")
    one, two, three, four = question.values
    assert recall(question, f" {two}, and {four}.") == 0.5
    assert found_values(question, f"{two} {four}") == [False, True, False, True]
    assert recall(question, "none") == 0.0
    assert recall(question, f"{four}{three}{two}{one}") == 1.0


def test_a_length_without_room_is_refused_with_the_least_that_has() -> None:
    with pytest.raises(UserError, match=r"--lengths 60: too short for .* the minimum is \d+ tokens, 40 of them"):
        asked(replace(HAYSTACKS, lengths=(60,)))
