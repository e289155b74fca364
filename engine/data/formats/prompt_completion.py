"""`prompt` and `completion`: two texts, or two lists of messages; only the completion is trained, unless all is.

Of messages, what stands beside them is read too, and an assistant's turn in the prompt counts nothing.
"""

from __future__ import annotations

from typing import Any

from penstock.engine.data.formats.base import VERDICTS, kind, lists_objects, optional_text, required, unpacked
from penstock.engine.data.formats.images import FIELDS as IMAGES
from penstock.engine.data.formats.images import with_images
from penstock.engine.data.formats.messages import read_kwargs, read_messages, read_tools, with_system
from penstock.engine.data.samples import Completion, Conversation, RowError

FIELDS = ("prompt", "completion", "tools", "functions", "system", "chat_template_kwargs", *VERDICTS, *IMAGES)


def matches(fields: dict[str, Any]) -> bool:
    """Also where one is a text and the other messages, which is refused: neither is a conversation alone."""
    prompt, completion = fields.get("prompt"), fields.get("completion")
    return all(isinstance(value, str) or lists_objects(value, "role") for value in (prompt, completion))


def convert(fields: dict[str, Any], where: str) -> Completion | Conversation:
    prompt, completion = (_messages_or_text(fields, name, where) for name in FIELDS[:2])
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion.strip():
            raise RowError(f"{where}: `completion` is empty, so there is nothing to train on")
        if optional_text(fields, "system", where):
            raise RowError(
                f"{where}: `system` cannot be used beside a `prompt` that is a text; put it into the prompt, or give "
                "both as lists of messages"
            )
        return Completion(where, prompt, completion)
    if isinstance(prompt, str) or isinstance(completion, str):
        raise RowError(
            f"{where}: one of `prompt` and `completion` is a text and the other a list; both must be of the same kind"
        )
    before = with_system(read_messages(prompt, where, "prompt"), fields, where)
    given = [message | {"weight": 0} for message in before]
    answered = read_messages(completion, where, "completion")
    if not any(message["role"] == "assistant" for message in answered):
        raise RowError(f"{where}: `completion` has no assistant message, so there is nothing to train on")
    messages, images = with_images(given + answered, fields, where)
    return Conversation(where, messages, read_tools(fields, where), read_kwargs(fields, where), images=images)


def _messages_or_text(fields: dict[str, Any], name: str, where: str) -> str | list[Any]:
    value = required(fields, name, where)
    messages = unpacked(value)
    if isinstance(messages, list) and (lists_objects(messages, "role") or not isinstance(value, str)):
        return messages
    if not isinstance(value, str):
        raise RowError(f"{where}: `{name}` is {kind(value)}; expected a text or a list of messages")
    return value
