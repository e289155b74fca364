"""Conversations as OpenAI writes them: `messages`, each with `role` and `content`; `tools` beside them.

Content may come in parts, where all of them are text. A `function_call` and a `function` role, as they were
called before there were tools, become those of today. `weight` of a message, 0 or a number, is how much its tokens
count where they are trained.
"""

from __future__ import annotations

from typing import Any

from penstock.engine.data.formats.base import PREFERENCE, WEIGHTS, is_preference, is_weight, kind, list_field, unpacked
from penstock.engine.data.rows import RowError
from penstock.engine.data.samples import Conversation, content_texts
from penstock.storage.untrusted import one_line

FIELDS = ("messages", "tools")
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def matches(fields: dict[str, Any]) -> bool:
    return has_messages(fields.get("messages"))


def convert(fields: dict[str, Any], where: str) -> Conversation:
    messages = read_messages(list_field(fields, "messages", where), where, "messages")
    require_answer(messages, fields, where)
    return Conversation(where, messages, read_tools(fields, where))


def has_messages(value: Any) -> bool:
    """Whether a value is a list of messages, by the first of them."""
    value = unpacked(value)
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and {"role"} <= value[0].keys()


def read_messages(values: list[Any], where: str, field: str) -> list[dict[str, Any]]:
    """Messages as templates want them. RowError naming the message that is none, or that nobody says anything."""
    messages = [_message(value, f"{where}: {field}[{index}]") for index, value in enumerate(values)]
    if not any(any(content_texts(message.get("content"))) or message.get("tool_calls") for message in messages):
        raise RowError(f"{where}: the conversation is empty: no message has any `content`")
    return messages


def require_answer(messages: list[dict[str, Any]], fields: dict[str, Any], where: str) -> None:
    """RowError where the answers to a conversation are the two of a preference pair."""
    if is_preference(fields) and not any(message["role"] == "assistant" for message in messages):
        raise RowError(f"{where}: {PREFERENCE}")


def read_tools(fields: dict[str, Any], where: str) -> list[dict[str, Any]] | None:
    """The `tools` of a row, or the JSON of them; None where it has no such field."""
    tools = unpacked(fields.get("tools"))
    if tools in (None, ""):
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowError(f"{where}: `tools` is {kind(tools)}; expected a list of JSON schemas of functions")
    return tools


def _message(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RowError(f"{where} is {kind(value)}; expected an object with `role` and `content`")
    message = {key: item for key, item in value.items() if item is not None}
    role = message.get("role")
    if role not in ROLES:
        found = "no `role`" if role is None else f"the role '{one_line(role, 40)}'"
        raise RowError(f"{where} has {found}; roles are {', '.join(ROLES)}")
    if role == "function":
        message["role"] = "tool"
    if "function_call" in message:
        message["tool_calls"] = [{"type": "function", "function": message.pop("function_call")}]
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(message["tool_calls"], where)
        if not message["tool_calls"]:
            del message["tool_calls"]
    if "content" in message:
        _require_text(message["content"], where)
    elif "tool_calls" not in message:
        raise RowError(f"{where} has no `content`; give it a text")
    if "weight" in message:
        require_weight(message["weight"], where)
    return message


def require_weight(weight: Any, where: str) -> None:
    """RowError where a message's weight is no number that tokens can count."""
    if isinstance(weight, bool) or not is_weight(weight):
        raise RowError(f"{where}: `weight` is {one_line(weight, 40)}; {WEIGHTS}")


def _require_text(content: Any, where: str) -> None:
    """RowError where content is neither a text nor parts of text: for a picture or a sound among them."""
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise RowError(f"{where}: `content` is {kind(content)}; expected a text, or a list of parts with text")
    for part in content:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            what = one_line(part.get("type", "no text"), 40) if isinstance(part, dict) else kind(part)
            raise RowError(f"{where}: `content` has a part that is {what}; only text can be trained on, remove it")


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    calls = unpacked(calls)
    if not isinstance(calls, list):
        raise RowError(f"{where}: `tool_calls` is {kind(calls)}; expected a list")
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowError(f"{where}: a call in `tool_calls` names no function; it needs function.name and .arguments")
    return calls
