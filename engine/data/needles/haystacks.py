"""Needles in haystacks: documents in which a model must find what was said once, made on the spot.

A haystack is filler in which pairs of a name and a digit hide, and at its end, behind "?", all of the names again in
another order, each with its digit: only those digits are trained and counted. Guessing is right one time in ten. Where
an answer stands says how far back the model saw, and how deep in the haystack the pair was.

    straw hay ann 7 reed moss bob 3 ... ? bob 3 ann 7 <|endoftext|>

Attention finds an answer by two steps that it must learn together: to know the word before each, and to look for the
one that follows the same name. Two pairs without filler teach it, sixteen do not: so documents get longer
(`curriculum`) and are used in that order. If every name were queried once in training, a model would learn to give
the digits that it has not given yet, and nothing more; so in training some are queried twice, and others not at all.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers

from penstock.engine.config import DataConfig
from penstock.engine.data.samples import Ids
from penstock.engine.data.text.made_tokenizer import save_tokenizer
from penstock.engine.data.text.tokenizer import EOS_TOKEN, TextTokenizer
from penstock.storage.files.errors import UserError

_DIGITS = tuple("0123456789")
# fmt: off
_NAMES = (
    "ann", "bob", "cat", "dan", "eve", "fay", "gus", "hal", "ivy", "jim", "kim", "leo", "mia",
    "ned", "ola", "pat", "quin", "ray", "sue", "tom", "una", "vic", "wes", "xia", "yan", "zoe",
)
_FILLER = (
    "hay", "straw", "reed", "moss", "clover", "chaff", "stalk", "husk", "bran", "sedge", "fern", "thyme",
    "dust", "rush", "oat",
)
# fmt: on
VOCABULARY = (EOS_TOKEN, "?", *_DIGITS, *_NAMES, *_FILLER)
"""The 53 words; a word's id is its place."""

NEEDLES = 16
"""Pairs of a haystack; fewer in one that is too short for as many and their questions."""
DEPTHS = 5
"""Bands of depth: a fifth of a haystack each, from its beginning."""

_QUESTION = VOCABULARY.index("?")
_FIRST_DIGIT, _FIRST_NAME, _FIRST_FILLER = (VOCABULARY.index(words[0]) for words in (_DIGITS, _NAMES, _FILLER))
_SHORTEST = 10
"""Tokens of the shortest haystack, of two pairs."""

STAGES = (
    *((10, 55), (18, 12), (34, 8), (66, 8), (128, 6), (256, 6)),
    *((512, 8), (1024, 8), (2048, 10), (4096, 12), (8192, 27)),
)
"""The curriculum: haystacks of so many tokens, and how many rows of 8,192 tokens they fill."""
TESTED = (512, 1024, 2048, 4096, 8192)
"""Lengths of the haystacks that are held out."""


def haystack(
    length: int, random: np.random.Generator, *, repeats: bool = False
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Ids and weights [length] of a haystack, which has at least 10 tokens; only the answers have weight.

    `repeats`: a name may be queried more than once, and another not at all.
    """
    pairs = min(NEEDLES, (length - 2) // 4)
    body = length - 2 * pairs - 2
    names = _FIRST_NAME + random.permutation(len(_NAMES))[:pairs]
    digits = _FIRST_DIGIT + random.integers(0, len(_DIGITS), pairs)
    ids = _FIRST_FILLER + random.integers(0, len(_FILLER), length)
    positions = np.sort(random.permutation(body - pairs)[:pairs]) + np.arange(pairs)
    ids[positions], ids[positions + 1] = names, digits
    order = random.integers(0, pairs, pairs) if repeats else random.permutation(pairs)
    ids[body] = _QUESTION
    ids[body + 1 : -1 : 2], ids[body + 2 : -1 : 2] = names[order], digits[order]
    ids[-1] = VOCABULARY.index(EOS_TOKEN)
    weights = np.zeros(length, np.float32)
    weights[body + 2 : -1 : 2] = 1
    return ids, weights


def made_of(config: DataConfig) -> list[Any]:
    """What decides the documents, beside their number: JSON."""
    return [config.seed, config.sequence_length, config.validation_documents, list(map(list, STAGES)), list(TESTED)]


def curriculum(longest: int) -> Iterator[int]:
    """The lengths of the documents to train on, rising to `longest`: those of STAGES that are shorter, then `longest`.

    A stage fills as many rows of `longest` tokens as STAGES says; the last one goes on without end.
    """
    for length, rows in STAGES:
        if length < longest:
            yield from itertools.repeat(length, rows * (longest // length))
    yield from itertools.repeat(longest)


def num_documents(longest: int) -> int:
    """Documents of the whole curriculum, when its last stage has the rows that STAGES says."""
    below = [(length, rows) for length, rows in STAGES if length < longest]
    return sum(rows * (longest // length) for length, rows in below) + STAGES[min(len(below), len(STAGES) - 1)][1]


def documents(config: DataConfig) -> Iterator[Ids]:
    """`config.max_documents` haystacks, all of the curriculum's if none: those to train on, then those to hold out.

    These are as many of each length of TESTED up to `config.sequence_length`. UserError where a row is too short.
    """
    longest = config.sequence_length
    if longest < _SHORTEST:
        raise UserError(f"data.sequence_length: {longest} is too short for a haystack; set at least {_SHORTEST}")
    held_out = config.validation_documents or 0
    trained = (config.max_documents or num_documents(longest) + held_out) - held_out
    tested = [length for length in TESTED if length < longest] + [longest]
    random = np.random.Generator(np.random.PCG64(config.seed))
    lengths = itertools.chain(
        itertools.islice(curriculum(longest), trained),
        (tested[index * len(tested) // held_out] for index in range(held_out)),
    )
    for number, length in enumerate(lengths):
        ids, weights = haystack(length, random, repeats=number < trained)
        yield Ids(f"haystack {number}", ids.tolist(), weights.tolist())


def write_tokenizer(folder: Path) -> TextTokenizer:
    """A Hugging Face tokenizer of VOCABULARY in `folder`: words between spaces; any other word is the end of text."""
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(VOCABULARY)}, unk_token=EOS_TOKEN))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([EOS_TOKEN])
    return save_tokenizer(backend, folder)
