"""ShareGPT's conversations: `conversations`, each with `from` and `value`; `system` and `tools` beside them.

`role` and `content` are read as well, and what else a message has. A `function_call` is JSON: `name`, `arguments`.
"""

from __future__ import annotations

from typing import Any

from penstock.engine.data.formats.base import VERDICTS, kind, list_field, lists_objects, unpacked
from penstock.engine.data.formats.images import FIELDS as IMAGES
from penstock.engine.data.formats.messages import conversation
from penstock.engine.data.samples import Conversation, RowError
from penstock.storage.files.untrusted import one_line

FIELDS = ("conversations", "system", "tools", "functions", "chat_template_kwargs", *VERDICTS, *IMAGES)
ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
}
"""`from` -> the role of the message."""


def matches(fields: dict[str, Any]) -> bool:
    return lists_objects(fields.get("conversations"), "from")


def convert(fields: dict[str, Any], where: str) -> Conversation:
    turns = list_field(fields, "conversations", where)
    messages = [read_turn(turn, f"{where}: conversations[{index}]") for index, turn in enumerate(turns)]
    return conversation(messages, fields, where, "conversations")


def read_turn(turn: Any, where: str) -> dict[str, Any]:
    """A turn as a message. RowError for one that is none."""
    if not isinstance(turn, dict):
        raise RowError(f"{where} is {kind(turn)}; expected an object with `from` and `value`")
    who, value = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
    role = ROLES.get(who.lower()) if isinstance(who, str) else None
    if role is None:
        result = "no `from`" if who is None else f"`from` '{one_line(who, 40)}'"
        raise RowError(f"{where} has {result}; known are {', '.join(ROLES)}")
    if value is None and "from" in turn:
        raise RowError(f"{where} has no `value`; give it a text")
    message = {name: item for name, item in turn.items() if name not in ("from", "value")} | {"role": role}
    if str(who).lower() != "function_call":
        return message | {"content": value}
    called = unpacked(value)
    calls = called if isinstance(called, list) else [called]
    if not all(isinstance(call, dict) for call in calls):
        raise RowError(f'{where}: a function_call must be JSON: {{"name": ..., "arguments": {{...}}}}')
    return message | {"tool_calls": [{"type": "function", "function": call} for call in calls]}
