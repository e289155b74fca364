"""Answers that are wanted or not: `prompt`, `completion`, and `label` (or `kto_tag`), true or false.

Prompt and completion are texts or lists of messages. `messages` or `conversations` that end with the answer of the
assistant may stand in place of both. A row with `chosen` and `rejected` and no label is two answers, of which the
chosen one is wanted.
"""

from __future__ import annotations

from typing import Any

from penstock.engine.data.formats import preference
from penstock.engine.data.formats.base import VERDICTS, is_preference, kind, list_field, lists_objects, required
from penstock.engine.data.formats.images import FIELDS as IMAGES
from penstock.engine.data.formats.messages import with_system
from penstock.engine.data.formats.preference import (
    completion,
    conversation,
    read_list,
    read_value,
    refuse_images,
    require_answer,
)
from penstock.engine.data.samples import Comparison, RowError
from penstock.storage.files.untrusted import one_line

_WHOLE = ("messages", "conversations")
FIELDS = (
    *("prompt", "completion", *VERDICTS, *_WHOLE, "chosen", "rejected"),
    *("tools", "functions", "system", "chat_template_kwargs", *IMAGES),
)
_TRUE, _FALSE = ("true", "1", "1.0"), ("false", "0", "0.0")


def matches(fields: dict[str, Any]) -> bool:
    """A `label` that is a number or a text may mean anything, and is not taken for a verdict."""
    label = fields.get("label")
    verdict = isinstance(label, bool) or _is_word(label) or fields.get("kto_tag") is not None
    whole = any(lists_objects(fields.get(name), key) for name in _WHOLE for key in ("role", "from"))
    return verdict and (whole or {"prompt", "completion"} <= fields.keys())


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and value.lower() in ("true", "false")


def convert(fields: dict[str, Any], where: str) -> Comparison:
    """Raises RowError; a pair is left to who reads the row (`Comparison.apart`)."""
    if is_preference(fields) and all(fields.get(name) is None for name in VERDICTS):
        return preference.convert(fields, where)
    refuse_images(fields, where)
    wanted = _verdict(fields, where)
    whole = next((name for name in _WHOLE if fields.get(name) is not None), None)
    if whole is not None and fields.get("completion") is None:
        messages = read_list(list_field(fields, whole, where), where, whole)
        if messages[-1]["role"] != "assistant":
            raise RowError(f"{where}: `{whole}` does not end with the answer of the assistant, which `label` is about")
        prompt, answer = messages[:-1], messages[-1:]
    else:
        for name in FIELDS[:2]:
            required(fields, name, where)
        asked, answered = (read_value(fields, name, where) or "" for name in FIELDS[:2])
        if isinstance(asked, str) and isinstance(answered, str):
            return Comparison(where, (completion(asked, answered, fields, f"{where}: completion"),), wanted)
        prompt = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
        prompt = prompt if asked else []
        answer = [{"role": "assistant", "content": answered}] if isinstance(answered, str) else answered
        require_answer(prompt, answer, where)
    side = conversation(with_system(prompt, fields, where), answer, fields, f"{where}: completion")
    return Comparison(where, (side,), wanted)


def _verdict(fields: dict[str, Any], where: str) -> bool:
    """Whether the answer is wanted. RowError for a label that does not say."""
    name = next((name for name in VERDICTS if fields.get(name) is not None), VERDICTS[0])
    value = required(fields, name, where)
    text = str(value).strip().lower() if isinstance(value, bool | int | float | str) else ""
    if text not in _TRUE + _FALSE:
        what = kind(value) if text == "" else one_line(value, 40)
        raise RowError(f"{where}: `{name}` is {what}, which is no verdict; expected true or false (or 1 or 0)")
    return text in _TRUE
