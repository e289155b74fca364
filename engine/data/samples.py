"""A row of a source, what it is before and after it is tokenised, and what becomes of one that is none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.storage.files.errors import UserError


class Row(NamedTuple):
    """An object of a source, its fields by name; None where the file has no value."""

    where: str
    """`file:line`, or `file:row 7` where lines mean nothing; counted from 1."""
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Text:
    """Text of a document, or of a part of it when it is long; all of it is trained."""

    where: str
    """Where it comes from: a path, or `file:line`."""
    text: str
    last: bool = True
    """The document ends here."""
    first: bool = True
    """The document begins here."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages that a chat template renders."""

    where: str
    messages: list[dict[str, Any]]
    """Each with `role` and `content`, a text or a list of parts, texts and images, and what else the template reads
    (`tool_calls`, ...). `weight`, from 0 on, 1 if not given: how much its tokens count where they are trained."""
    tools: list[dict[str, Any]] | None = None
    """JSON schemas of the functions that the assistant may call."""
    given: dict[str, Any] | None = None
    """What else the template is given by name."""
    plain: Completion | None = None
    """What takes its place where the tokenizer has no chat template; None: it cannot do without."""
    images: tuple[str | bytes, ...] = ()
    """Those of its parts, in order: a path, or the content of a file."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt and what is to follow it, without a template; only the completion is trained, unless all tokens are."""

    where: str
    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Ids:
    """Tokens that somebody else made; taken as they are, nothing is added."""

    where: str
    ids: list[int]
    weights: list[float] | None = None
    """One per token: how much it counts as a target; None: 1 for all."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What somebody thinks of answers: a pair, of which one is preferred, or one with a verdict."""

    where: str
    sides: tuple[Completion | Conversation, ...]
    """The chosen and the rejected one, each with the prompt before it; or the only one. Only answers are trained."""
    wanted: bool | None = None
    """The verdict on the only one; None for a pair."""

    @property
    def apart(self) -> list[Comparison]:
        """Answers with a verdict each: of a pair the chosen one is wanted."""
        if self.wanted is not None:
            return [self]
        return [Comparison(self.where, (side,), number == 0) for number, side in enumerate(self.sides)]


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the model is to answer, of which nothing is trained."""

    where: str
    side: Completion | Conversation
    """The prompt, with an empty completion where it is a text."""
    row: str
    """The whole row, an object as JSON."""


Sample = Text | Conversation | Completion | Comparison | Prompt | Ids


class ImageFile(NamedTuple):
    """An image of a document that is tokens."""

    content: bytes
    tokens: int
    """As many stand for it."""


class Encoded(NamedTuple):
    """Tokens of a document, or of a part of it."""

    where: str
    ids: NDArray[np.int64]
    weights: NDArray[np.float32] | None
    """One per token: how much it counts as a target, 0 not at all; None: 1 for all."""
    last: bool
    """The document ends here."""
    images: tuple[ImageFile, ...] = ()
    """Those of a whole document, in order."""
    sides: tuple[int, int] | None = None
    """Of a comparison, which is a document: the tokens before the first trained one, and the tokens of the chosen side,
    behind which the rejected one begins, or of an only side 1 where it is wanted, else 0."""
    row: str | None = None
    """Of a prompt: its row, as JSON."""


def is_image(part: Any) -> bool:
    """Whether a part of a message's content is an image."""
    return isinstance(part, dict) and part.get("type") == "image"


def content_texts(content: Any) -> list[str]:
    """The texts of a message's content, which may be in parts; none where there is none."""
    if isinstance(content, str):
        return [content]
    return [part if isinstance(part, str) else part["text"] for part in content or [] if not is_image(part)]


def in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose content is a list of parts."""
    if not isinstance(content := message.get("content"), str):
        return message
    return message | {"content": [{"type": "text", "text": content}]}


class RowError(UserError):
    """One row, line or sample that cannot be used; `data.bad_rows` says what becomes of it."""


class TurnsError(RowError):
    """A conversation whose template does not tell the tokens of its turns."""


class BadRows:
    """Refuses the first bad row, or counts all of them.

    Attributes: `count`, and `first`, what was wrong with the first one (empty where there was none).
    """

    def __init__(self, mode: Literal["refuse", "skip"] = "refuse") -> None:
        self.mode = mode
        self.count, self.first = 0, ""

    def add(self, error: RowError) -> None:
        """One more. Raises UserError where none is accepted."""
        if self.mode == "refuse":
            message = f"{error}; or set data.bad_rows=skip to skip such rows"
            raise (TurnsError if isinstance(error, TurnsError) else UserError)(message) from error
        self.first = self.first or str(error)
        self.count += 1

    def add_many(self, count: int, first: str) -> None:
        """Bad rows that were counted elsewhere."""
        self.first = self.first or first
        self.count += count

    def take(self) -> tuple[int, str]:
        """Count and first so far, which begin anew."""
        taken = self.count, self.first
        self.count, self.first = 0, ""
        return taken
