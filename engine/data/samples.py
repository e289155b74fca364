"""What the rows of a source are, before and after they are tokenised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


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
    """Each with `role` and `content`, a text or a list of parts with texts, and what else the template reads
    (`tool_calls`, `name`, ...). `weight`, a number from 0 on, is how much its tokens count where they are trained; 1
    where it is not given."""
    tools: list[dict[str, Any]] | None = None
    """JSON schemas of the functions that the assistant may call."""
    given: dict[str, Any] | None = None
    """What else the template is given by name."""
    plain: Completion | None = None
    """What takes its place where the tokenizer has no chat template; None: it cannot do without."""


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


Sample = Text | Conversation | Completion | Ids


class Encoded(NamedTuple):
    """Tokens of a document, or of a part of it."""

    where: str
    ids: NDArray[np.int64]
    weights: NDArray[np.float32] | None
    """One per token: how much it counts as a target, 0 not at all; None: 1 for all."""
    last: bool
    """The document ends here."""


def content_texts(content: Any) -> list[str]:
    """The texts of a message's content, which may be in parts; none where there is none."""
    if isinstance(content, str):
        return [content]
    return [part if isinstance(part, str) else part["text"] for part in content or []]


def in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose content is a list of parts."""
    if not isinstance(content := message.get("content"), str):
        return message
    return message | {"content": [{"type": "text", "text": content}]}
