"""Prompts without answers: `prompt`, a text or a list of messages, and what reward functions are given beside it.

The whole row is kept for them, each column under its name; the prompt in it is the text, or the messages, as the model
gets it.
"""

from __future__ import annotations

import json
from typing import Any

from penstock.engine.data.formats.base import lists_objects, optional_text, required
from penstock.engine.data.formats.images import FIELDS as IMAGES
from penstock.engine.data.formats.messages import read_kwargs, read_tools, with_system
from penstock.engine.data.formats.preference import read_value, refuse_images
from penstock.engine.data.samples import Completion, Conversation, Prompt, RowError, is_image
from penstock.storage.files.untrusted import one_line

FIELDS = ("prompt", "tools", "functions", "system", "chat_template_kwargs", *IMAGES)
_ANSWERS = ("completion", "completions", "response", "responses", "output", "chosen", "rejected")
"""Columns of data that are trained on as they are."""


def matches(fields: dict[str, Any]) -> bool:
    prompt = fields.get("prompt")
    given = isinstance(prompt, str) or any(lists_objects(prompt, key) for key in ("role", "from"))
    return given and not any(name in fields for name in _ANSWERS)


def convert(fields: dict[str, Any], where: str) -> Prompt:
    refuse_images(fields, where)
    prompt = read_value(fields | {"prompt": required(fields, "prompt", where)}, "prompt", where)
    if isinstance(prompt, list):
        prompt = with_system(prompt, fields, where)
        if any(is_image(part) for message in prompt for part in message.get("content") or ()):
            raise RowError(f"{where}: images in prompts are not supported; remove the row")
        side: Conversation | Completion = Conversation(
            where, prompt, read_tools(fields, where), read_kwargs(fields, where)
        )
    else:
        if not str(prompt).strip():
            raise RowError(f"{where}: `prompt` is empty; give it a text, or remove the row")
        if optional_text(fields, "system", where):
            raise RowError(
                f"{where}: `system` cannot be used beside a `prompt` that is a text; put it into the prompt, or give "
                "it as a list of messages"
            )
        side = Completion(where, str(prompt), "")
    return Prompt(where, side, _as_json(fields | {"prompt": prompt}, where))


def _as_json(fields: dict[str, Any], where: str) -> str:
    """The row. RowError for a column that JSON cannot hold; dates and the like become texts."""
    result = {}
    for name, value in fields.items():
        try:
            result[name] = json.dumps(value, default=_as_text)
        except (TypeError, ValueError, RecursionError) as error:
            raise RowError(
                f"{where}: column {one_line(name, 40)} cannot be given to reward functions ({one_line(error, 80)}); "
                "leave the column out"
            ) from error
    return "{" + ", ".join(f"{json.dumps(name)}: {text}" for name, text in result.items()) + "}"


def _as_text(value: object) -> str:
    if isinstance(value, bytes):
        raise TypeError("it holds bytes")
    return str(value)
