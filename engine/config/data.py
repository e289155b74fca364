"""The data section of a recipe."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from penstock.engine.config.values import (
    MOST_SIZE,
    MOST_STEPS,
    MOST_TOKENS,
    nearest,
    require,
    require_counts,
    require_kinds,
)
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import one_line

Source = Literal[
    "auto",
    "python_stdlib",
    "text",
    "jsonl",
    "messages",
    "sharegpt",
    "alpaca",
    "prompt_completion",
    "preference",
    "unpaired_preference",
    "prompts",
    "tokens",
    "needles",
    "random",
]
"""Formats of engine/data/formats/base.py; `random`, which reads nothing; `auto`, which is found from the data."""


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """Data, tokenizer and packing."""

    source: Source = "auto"
    """Format of the data. auto finds format, split and columns in the first rows of path. text: each file in path is a
    document. jsonl: each row has a `text` field. Conversations, one per row: messages (OpenAI's role and content, with
    tools), sharegpt, alpaca, prompt_completion. Comparisons of answers: preference (prompt, chosen, rejected),
    unpaired_preference (prompt, completion, label). prompts: prompts alone, for grpo and rloo. tokens: rows of token
    ids. Rows are read from JSON, JSONL, Parquet, CSV, Arrow or data sets on the hub. Without a path: python_stdlib
    (Python's own library), needles (generated retrieval tasks), random (random token ids, for benchmarks)."""
    path: str | None = None
    """File or folder with the data, or hf://OWNER/NAME[@REVISION] on the hub. Not needed for a plan, but for a run."""
    split: str | None = None
    """Split to use if the data set has several. none uses train."""
    mixture: list[dict[str, Any]] = field(default_factory=list)
    """Several data sets instead of one: a list of objects, each with a path and, if they differ from the fields here,
    source, split, columns and max_documents. weight is how often each document is used per epoch (2: twice; 0.5: every
    other epoch)."""
    columns: dict[str, str] = field(default_factory=dict)
    """Names of the columns in your file, if they differ from those of the format: {"messages": "chat"} reads the column
    chat as messages."""
    chat_template: str | None = None
    """File with a Jinja chat template. none uses the tokenizer's own."""
    trained_tokens: Literal["assistant", "last", "all"] = "assistant"
    """Which tokens of a conversation are trained: those of all assistant turns, of the last assistant turn, or all."""
    bad_rows: Literal["refuse", "skip"] = "refuse"
    """What to do with a row that is malformed, empty or has no token to train: refuse the run, or skip and count it."""
    packing: Literal["wrap", "best_fit", "none"] = "wrap"
    """How documents fill rows of data.sequence_length. wrap: end to end; the last document of a row continues in the
    next row. best_fit: whole documents, arranged to leave little space empty. none: one document per row; empty space
    costs no time."""
    long_documents: Literal["split", "cut", "drop"] = "split"
    """What to do with a document longer than a row: split it into several, cut off its end, or drop it."""
    order: Literal["shuffled", "kept"] = "shuffled"
    """Order of the documents: shuffled anew every epoch by data.seed, or kept as in the source."""
    bos: Literal["auto", "on", "off"] = "auto"
    """Whether a text begins with the tokenizer's begin-of-text token. auto follows the tokenizer. Conversations follow
    their chat template."""
    tokenizer: str | None = None
    """Hugging Face folder or tokenizer.json. none uses the tokenizer in the model folder, or without one trains a
    byte-level BPE on the data."""
    tokenizer_vocab_size: int = 4096
    """Vocabulary size of a tokenizer trained on the data."""
    sequence_length: int = 4096
    """Tokens per packed sequence (the context length)."""
    seed: int = 0
    """Seed of the document order."""
    max_documents: int | None = None
    """Use only the first documents of the source."""
    validation_documents: int | None = None
    """Number of documents held out for validations, chosen by data.seed; with data.order=kept the last ones.
    train.validate_every sets how often they are used. none holds out nothing."""

    def __post_init__(self) -> None:
        require_kinds("data", self)
        for number, part in enumerate(self.mixture):
            _check_part(part, f"data.mixture[{number}]", self.source)
        sources = [part.get("source", self.source) for part in self.mixture]
        found = {COMPARISONS.get(source, "") for source in sources if source != "auto"}
        require(
            len(found) < 2,
            f"data.mixture: {', '.join(dict.fromkeys(sources))} cannot be mixed: a run trains on preference pairs, on "
            "answers with a verdict, on prompts alone, or on none of these; leave some of them out",
        )
        require(
            self.path is None or not self.mixture,
            f"data.path: {self.path} cannot be used with data.mixture; add it to the mixture, or leave one of them out",
        )
        require(
            self.tokenizer_vocab_size > 256,
            f"data.tokenizer_vocab_size: {self.tokenizer_vocab_size} must be above 256, the number of bytes",
        )
        require_counts("data", self, ("sequence_length",), MOST_TOKENS, least=2)
        require_counts("data", self, ("tokenizer_vocab_size",), MOST_SIZE)
        require_counts("data", self, ("max_documents", "validation_documents"), MOST_STEPS)
        require(0 <= self.seed < 2**63, f"data.seed: {self.seed} must be from 0 to 2^63 - 1")
        most, held = self.max_documents, self.validation_documents
        require(
            held is None or most is None or held < most,
            f"data.validation_documents: {held} leaves no documents to train on, as data.max_documents is {most}",
        )

    @property
    def lacks_path(self) -> bool:
        """Whether the source reads a path and none is named."""
        return not self.mixture and self.path is None and self.source not in PATHLESS

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
    def comparison(self) -> Comparison:
        """Whether its documents are pairs of answers, answers with a verdict, or prompts alone; "": none of these."""
        return COMPARISONS.get(self.parts[0].source, "")

    @property
    def part_weights(self) -> list[float]:
        """How often a document of each part comes per epoch; empty where there is no mixture."""
        return [float(part.get("weight", 1)) for part in self.mixture]


PATHLESS = ("python_stdlib", "needles", "random")
"""Sources that read no path."""
Comparison = Literal["", "pairs", "unpaired", "prompts"]
COMPARISONS: dict[str, Comparison] = {
    "preference": "pairs",
    "unpaired_preference": "unpaired",
    "prompts": "prompts",
}
"""Sources whose rows compare answers, or leave them to the model -> how."""
CONVERSATIONS = frozenset({"messages", "sharegpt", "alpaca", "prompt_completion", *COMPARISONS})
"""Sources whose rows may be conversations."""
_PART: dict[str, tuple[tuple[type, ...], str]] = {
    "path": ((str,), "text"),
    "source": ((str,), "text"),
    "split": ((str,), "text"),
    "columns": ((dict,), "an object of names"),
    "max_documents": ((int,), "a whole number"),
    "weight": ((int, float), "a number"),
}
"""What a part of a mixture may have, of which types, and how those read."""
_LEAST_WEIGHT, _MOST_WEIGHT = 1e-4, 1e4


def _check_part(part: object, where: str, usual: str) -> None:
    """Raise UserError for a part of a mixture that is not one; `usual` is the source of a part that names none."""
    if not isinstance(part, dict):
        raise UserError(f'{where}: must be an object such as {{"path": "chats.jsonl", "weight": 2}}')
    for key, value in part.items():
        require(key in _PART, f"{where}: unknown field '{one_line(key, 40)}'; {nearest(key, _PART)}")
        types, words = _PART[key]
        fits = isinstance(value, types) and not isinstance(value, bool)
        require(fits, f"{where}.{key}: {one_line(repr(value), 60)} must be {words}")
    source, sources = part.get("source", usual), [name for name in get_args(Source) if name != "random"]
    require(
        source in sources,
        f"{where}.source: '{one_line(source, 40)}' cannot be used in a mixture; {nearest(source, sources)}",
    )
    if (source in PATHLESS) == ("path" in part):
        problem = (
            "its source reads no path" if "path" in part else "has no path; give a file, a folder or hf://OWNER/NAME"
        )
        raise UserError(f"{where}: {problem}")
    columns = [text for pair in part.get("columns", {}).items() for text in pair]
    require(all(isinstance(text, str) for text in columns), f"{where}.columns: must map names to names")
    most, weight = part.get("max_documents", 1), part.get("weight", 1)
    require(most >= 1, f"{where}.max_documents: {most} must be at least 1; leave it out to read all")
    require(
        _LEAST_WEIGHT <= weight <= _MOST_WEIGHT,  # not of NaN either
        f"{where}.weight: {weight} must be from {_LEAST_WEIGHT} to {_MOST_WEIGHT:g}; to leave this data out, remove it",
    )
