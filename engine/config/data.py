"""The data section of a recipe."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from penstock.engine.config.values import MOST_SIZE, MOST_STEPS, MOST_TOKENS, require, require_most
from penstock.storage.errors import UserError
from penstock.storage.untrusted import one_line

Source = Literal[
    "python_stdlib",
    "text",
    "jsonl",
    "messages",
    "sharegpt",
    "alpaca",
    "prompt_completion",
    "tokens",
    "needles",
    "random",
]
"""Formats of engine/data/formats/base.py, and `random`, which reads nothing."""


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """Which text, which tokenizer, how it is packed."""

    source: Source = "python_stdlib"
    """python_stdlib: the running interpreter's library; text: files below path, each a document; jsonl: a `text` field
    per row of path. Conversations, a row each: messages (role and content, as OpenAI has them, tools too), sharegpt,
    alpaca, prompt_completion. tokens: rows of token ids. needles: haystacks made on the spot; random: seeded random
    token ids (benchmarks). Rows come from JSON, JSONL, Parquet, CSV, Arrow and data sets of the hub."""
    path: str | None = None
    """File or folder that the source reads, or hf://OWNER/NAME[@REVISION] of the hub; none is enough to plan with, and
    refused by a run."""
    split: str | None = None
    """Split of a data set of several; none takes train."""
    mixture: list[dict[str, Any]] = field(default_factory=list)
    """Several sources in place of one: objects with path, and where they differ from the fields here source, split,
    columns and max_documents; weight is how often a document comes per epoch (2 twice, 0.5 in every other one)."""
    columns: dict[str, str] = field(default_factory=dict)
    """Names that a row's fields have in the file, by the names that the format has for them: {"messages": "chat"}."""
    chat_template: str | None = None
    """File of a Jinja chat template; none takes the tokenizer's own."""
    trained_tokens: Literal["assistant", "last", "all"] = "assistant"
    """What of a conversation has a loss: the tokens of all assistant turns, of the last one, or all tokens."""
    bad_rows: Literal["refuse", "skip"] = "refuse"
    """What becomes of a row that is malformed, empty or has no token to train: the run is refused, or it is left out
    and counted."""
    packing: Literal["wrap", "best_fit", "none"] = "wrap"
    """How documents fill rows of sequence_length. wrap: end to end, the last of a row goes on in the next; best_fit:
    whole, so placed that little stays empty; none: one a row, and what stays empty costs nothing."""
    long_documents: Literal["split", "cut", "drop"] = "split"
    """What becomes of a document longer than a row: split into documents of a row's length, cut to one, or left out."""
    order: Literal["shuffled", "kept"] = "shuffled"
    """Order of the documents: another one every epoch, chosen by seed, or the source's own."""
    bos: Literal["auto", "on", "off"] = "auto"
    """Whether a text begins with the tokenizer's begin-of-text token; auto where the tokenizer itself puts it there. A
    chat template says so by itself."""
    tokenizer: str | None = None
    """Hugging Face folder or tokenizer.json; none takes the model folder's, or trains a byte-level BPE on the data."""
    tokenizer_vocab_size: int = 4096
    """Entries of a tokenizer trained on the data."""
    sequence_length: int = 4096
    """Tokens of one packed sequence (the context)."""
    seed: int = 0
    """Seed of the document order."""
    max_documents: int | None = None
    """Use only the first documents of the source."""
    validation_documents: int | None = None
    """Documents held out of training for the validation loss, chosen by seed, with order=kept the last ones; none holds
    out none. train.validate_every says when they are looked at."""

    def __post_init__(self) -> None:
        for number, part in enumerate(self.mixture):
            _check_part(part, f"data.mixture[{number}]", self.source)
        require(
            self.path is None or not self.mixture,
            f"data.path: {self.path} beside data.mixture; make it a part of the mixture, or leave one of them out",
        )
        require(self.sequence_length >= 2, f"data.sequence_length: {self.sequence_length} must be at least 2")
        require(
            self.tokenizer_vocab_size > 256,
            f"data.tokenizer_vocab_size: {self.tokenizer_vocab_size} must be over 256, the byte alphabet",
        )
        require_most("data", self, ("sequence_length",), MOST_TOKENS)
        require_most("data", self, ("tokenizer_vocab_size",), MOST_SIZE)
        require_most("data", self, ("max_documents", "validation_documents"), MOST_STEPS)
        require(0 <= self.seed < 2**63, f"data.seed: {self.seed} must be from 0 to 2^63 - 1")
        most = self.max_documents
        require(most is None or most >= 1, f"data.max_documents: {most} must be at least 1; none reads all")
        held = self.validation_documents
        require(held is None or held >= 1, f"data.validation_documents: {held} must be at least 1; none holds out none")
        require(
            held is None or most is None or held < most,
            f"data.validation_documents: {held} leaves nothing of data.max_documents {most} to train on",
        )

    @property
    def lacks_path(self) -> bool:
        """Whether the source reads a path and none is named."""
        return not self.mixture and self.path is None and self.source not in _PATHLESS

    @property
    def parts(self) -> list[DataConfig]:
        """What is read, one source after the other: the parts of a mixture, or this itself."""
        if not self.mixture:
            return [self]
        return [
            replace(
                self,
                mixture=[],
                validation_documents=None,
                **{key: value for key, value in part.items() if key != "weight"},
            )
            for part in self.mixture
        ]

    @property
    def part_weights(self) -> list[float]:
        """How often a document of each part comes per epoch; empty where there is no mixture."""
        return [float(part.get("weight", 1)) for part in self.mixture]


_PATHLESS = ("python_stdlib", "needles", "random")
_PART: dict[str, tuple[tuple[type, ...], str]] = {
    "path": ((str,), "a text"),
    "source": ((str,), "a text"),
    "split": ((str,), "a text"),
    "columns": ((dict,), "an object of texts"),
    "max_documents": ((int,), "a whole number"),
    "weight": ((int, float), "a number"),
}
"""What a part of a mixture may have, of which types, and how those read."""
_LEAST_WEIGHT, _MOST_WEIGHT = 1e-4, 1e4


def _check_part(part: object, where: str, usual: str) -> None:
    """Raise UserError for a part of a mixture that is none; `usual` is the source of one that names none."""
    if not isinstance(part, dict):
        raise UserError(f'{where}: must be an object such as {{"path": "chats.jsonl", "weight": 2}}')
    for key, value in part.items():
        require(key in _PART, f"{where}: unknown field '{one_line(key, 40)}'; {_nearest(key, _PART)}")
        types, words = _PART[key]
        fits = isinstance(value, types) and not isinstance(value, bool)
        require(fits, f"{where}.{key}: {one_line(repr(value), 60)} must be {words}")
    source, sources = part.get("source", usual), [name for name in get_args(Source) if name != "random"]
    require(source in sources, f"{where}.source: '{one_line(source, 40)}' mixes not; {_nearest(source, sources)}")
    if (source in _PATHLESS) == ("path" in part):
        lacks = "a source that reads its path" if "path" in part else "a path: a file, a folder or hf://OWNER/NAME"
        raise UserError(f"{where}: lacks {lacks}")
    columns = [text for pair in part.get("columns", {}).items() for text in pair]
    require(all(isinstance(text, str) for text in columns), f"{where}.columns: must give names by names")
    most, weight = part.get("max_documents", 1), part.get("weight", 1)
    require(most >= 1, f"{where}.max_documents: {most} must be at least 1; leave it out to read all")
    require(
        _LEAST_WEIGHT <= weight <= _MOST_WEIGHT,  # not of NaN either
        f"{where}.weight: {weight} must be from {_LEAST_WEIGHT} to {_MOST_WEIGHT:g}; leave the part out for none of it",
    )


def _nearest(word: object, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(str(word), names := list(names), n=1, cutoff=0.5)
    return f"did you mean '{near[0]}'?" if near else "valid names: " + ", ".join(names)
