"""Needles in text: prompts of a wanted length in which a few sentences hide numbers that the model must give.

As RULER (arXiv 2404.06654) defines its tasks: `single` hides one needle, `multikey` three others beside the one that
counts, `multivalue` four numbers of the one key. An answer counts by the share of the wanted numbers in it. The text
around them is made on the spot: an essay of many different sentences, or the noise of a few that repeat.
"""

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from penstock.storage.files.errors import UserError

Kind = Literal["single", "multikey", "multivalue"]
Filler = Literal["essay", "noise"]

KINDS: tuple[Kind, ...] = ("single", "multikey", "multivalue")
FILLERS: tuple[Filler, ...] = ("essay", "noise")
_KEYS = {"single": 1, "multikey": 4, "multivalue": 1}
_VALUES = {"single": 1, "multikey": 1, "multivalue": 4}
_LEAST, _MOST = 1_000_000, 9_999_999
"""Hidden numbers have seven digits."""

# fmt: off
_ADJECTIVES = (
    "amber", "brisk", "calm", "dapper", "eager", "faint", "gentle", "hollow", "ivory", "jolly", "keen", "lively",
    "mellow", "narrow", "opal", "patient", "quiet", "rustic", "silent", "tidy", "upright", "velvet", "wistful",
    "young",
)
_NOUNS = (
    "anchor", "barrel", "candle", "drum", "engine", "falcon", "garden", "harbor", "island", "jacket", "kettle",
    "lantern", "mirror", "needle", "orchard", "pillow", "quarry", "ribbon", "saddle", "temple", "umbrella", "violin",
    "window", "yard",
)
_NOISE = (
    "The kettle is on the stove.", "Rain falls on the roof.", "A clock ticks in the hall.",
    "The road goes down to the sea.", "Nothing else has happened.",
)
_WHEN = (
    "In the first days of spring", "Late in the afternoon", "Some years before the bridge was built",
    "After the harvest", "On the morning of the fair", "When the snow had gone", "During the long dry summer",
    "A week after the storm", "Before anyone else was awake", "In the year of the great flood",
    "Towards the end of the week", "By the light of a lamp",
)
_WHO = (
    "the miller of the lower valley", "a teacher from the next town", "the oldest of the three sisters",
    "the ferryman", "an engineer who knew the river well", "the baker's youngest son", "a painter without a studio",
    "the new librarian", "the keeper of the lighthouse", "a doctor on his way home", "the mayor and his clerk",
    "one of the travelling players",
)
_DID = (
    "read aloud from", "wrote a long letter about", "asked again for", "quietly put away", "carried home",
    "argued about", "looked for the owner of", "made a careful drawing of", "could not remember",
    "praised beyond measure", "sold", "counted and recounted",
)
_WHAT = (
    "the maps of the old canal", "a box of letters", "the plans for the new school", "the songs of the fishermen",
    "three volumes on the growing of pears", "the silver spoons", "the timetable of the night train",
    "a broken telescope", "the accounts of the last two winters", "the speech that nobody had heard",
    "the best of the apples", "a small red boat",
)
_WHY = (
    "because the evenings were long", "though the roads were still bad", "while the others were at the market",
    "as if there were no hurry at all", "so that nothing would be forgotten", "and nobody thought it strange",
    "which pleased the whole street", "since there was little else to do", "and was thanked for it years later",
    "without saying a word about it", "until the bell rang for supper", "in the hope of better weather",
)
# fmt: on


class Question(NamedTuple):
    """A prompt in which something hides."""

    kind: Kind
    length: int
    """Tokens of prompt and answer together, at most; fewer by less than a sentence."""
    depth: int
    """The band of depth in which the first of `values` is."""
    text: str
    """What is hidden, and the question."""
    begun: str
    """How the answer begins; it goes on behind it."""
    values: tuple[str, ...]
    """What the answer should hold."""
    depths: tuple[int, ...]
    """The band of each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Haystacks:
    """Which questions are asked."""

    kinds: tuple[Kind, ...] = KINDS
    lengths: tuple[int, ...]
    depths: int = 5
    """Bands of depth, from the beginning of a text to its end."""
    samples: int = 2
    """Questions of each kind, length and depth."""
    new_tokens: int = 128
    """Of each length, reserved for the answer."""
    filler: Filler = "essay"
    seed: int = 0


def questions(
    haystacks: Haystacks, count: Callable[[str], int], measure: Callable[[Question], int]
) -> Iterator[Question]:
    """The questions, shorter ones first: the same ones for the same tokenizer.

    `count`: tokens of a text; `measure`: of a question's whole prompt. UserError for a length that is too short.
    """
    sizes: dict[str, int] = {}

    def size(sentence: str) -> int:
        if sentence not in sizes:
            sizes[sentence] = count(" " + sentence)
        return sizes[sentence]

    wanted = itertools.product(haystacks.lengths, haystacks.kinds, range(haystacks.depths), range(haystacks.samples))
    for length, kind, depth, sample in wanted:
        chance = random.Random(f"{haystacks.seed}:{kind}:{length}:{depth}:{sample}")
        yield _question(haystacks, kind, length, depth, chance, size, measure)


def _question(
    haystacks: Haystacks,
    kind: Kind,
    length: int,
    depth: int,
    chance: random.Random,
    size: Callable[[str], int],
    measure: Callable[[Question], int],
) -> Question:
    keys = [f"{a} {n}" for a, n in zip(chance.sample(_ADJECTIVES, 4), chance.sample(_NOUNS, 4), strict=True)][
        : _KEYS[kind]
    ]
    numbers = [str(number) for number in chance.sample(range(_LEAST, _MOST + 1), len(keys) * _VALUES[kind])]
    values = tuple(numbers[: _VALUES[kind]])
    # The others of several values go round the bands, so that over all depths each band has as many.
    bands = tuple((depth + position) % haystacks.depths for position in range(len(values)))
    hidden = [
        (keys[0], value, (band + chance.random()) / haystacks.depths) for value, band in zip(values, bands, strict=True)
    ]
    hidden += [(key, value, chance.random()) for key, value in zip(keys[1:], numbers[len(values) :], strict=True)]
    needles = [(f"One of the secret numbers of the {key} is {value}.", at) for key, value, at in hidden]

    number, are = ("numbers", "are") if len(values) > 1 else ("number", "is")
    subject, between = f"secret {number} of the {keys[0]}", "\n" if haystacks.filler == "noise" else " "

    def made(sentences: Sequence[str]) -> Question:
        text = (
            f"Somewhere in the text below it says what the {subject} {are}. Read it with care: there will be a "
            f"question about it.\n\n{between.join(_hide(sentences, needles, size))}\n\n"
            f"What {are} the {subject} in the text above?"
        )
        return Question(kind, length, depth, text, f"The {subject} {are}", values, bands)

    most = length - haystacks.new_tokens
    if (least := measure(made([]))) > most:
        raise UserError(
            f"--lengths {length:,}: too short for the hidden text, the question and the answer ({kind}); the minimum "
            f"is {least + haystacks.new_tokens:,} tokens, {haystacks.new_tokens:,} of them for the answer"
        )
    filler = _sentences(haystacks.filler, chance)
    sentences: list[str] = []
    total = least
    while total < most:
        sentences.append(next(filler))
        total += size(sentences[-1])
    # Sentences end to end may have a token more or less than one by one.
    result = made(sentences)
    while (over := measure(result) - most) > 0:
        while over > 0 and sentences:
            over -= size(sentences.pop())
        result = made(sentences)
    return result


def _hide(sentences: Sequence[str], needles: Sequence[tuple[str, float]], size: Callable[[str], int]) -> list[str]:
    """The sentences with each needle between the two that are at its share of their tokens."""
    ends = list(itertools.accumulate(map(size, sentences)))
    total = ends[-1] if ends else 0
    placed = list(sentences)
    for needle, at in sorted(needles, key=lambda one: -one[1]):
        placed.insert(bisect.bisect_right(ends, at * total), needle)
    return placed


def _sentences(filler: Filler, chance: random.Random) -> Iterator[str]:
    if filler == "noise":
        yield from itertools.cycle(_NOISE)
    while True:
        when, who, did, what, why = (chance.choice(words) for words in (_WHEN, _WHO, _DID, _WHAT, _WHY))
        yield f"{when} {who} {did} {what}, {why}."


def found_values(question: Question, answer: str) -> list[bool]:
    """Which of the values are anywhere in an answer."""
    return [value in answer for value in question.values]


def recall(question: Question, answer: str) -> float:
    """Share of the values that are in an answer: RULER's score of it."""
    return sum(found_values(question, answer)) / len(question.values)
