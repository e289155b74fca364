"""Conversations as OpenAI writes them: `messages`, each with `role` and `content`; `tools` beside them.

Content may come in parts, texts and images (formats/images.py). `weight` of a message, 0 or a number, is how much its
tokens count where they are trained; `train`, `training` or `loss` that is false, and `masked` that is true, say 0 as
well. `system` beside the messages is the first of them; `chat_template_kwargs` are what a template is given by name.
"""

from __future__ import annotations

from typing import Any

from penstock.engine.data.formats.base import (
    PREFERENCE,
    VERDICTS,
    WEIGHTS,
    is_preference,
    is_weight,
    kind,
    list_field,
    lists_objects,
    optional_text,
    unpacked,
)
from penstock.engine.data.formats.images import FIELDS as IMAGES
from penstock.engine.data.formats.images import with_images
from penstock.engine.data.samples import Conversation, RowError, content_texts, is_image
from penstock.storage.files.untrusted import one_line

FIELDS = ("messages", "tools", "functions", "system", "chat_template_kwargs", *VERDICTS, *IMAGES)
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_UNTRAINED = {"train": False, "training": False, "loss": False, "masked": True}
"""How other tools say of a message that its tokens count nothing."""
_NOT_GIVEN = ("conversations", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message")
"""What a template knows by these names is said elsewhere."""


def matches(fields: dict[str, Any]) -> bool:
    return lists_objects(fields.get("messages"), "role")


def convert(fields: dict[str, Any], where: str) -> Conversation:
    return conversation(list_field(fields, "messages", where), fields, where, "messages")


def conversation(values: list[Any], fields: dict[str, Any], where: str, field: str) -> Conversation:
    """The conversation of a row whose messages are `values`, of its `field`, with what the row has beside them."""
    messages = with_system(read_messages(values, where, field), fields, where)
    if is_preference(fields) and not any(message["role"] == "assistant" for message in messages):
        raise RowError(f"{where}: {PREFERENCE}")
    messages, images = with_images(messages, fields, where)
    return Conversation(where, messages, read_tools(fields, where), read_kwargs(fields, where), images=images)


def read_messages(values: list[Any], where: str, field: str) -> list[dict[str, Any]]:
    """Messages as templates want them. RowError naming the message that is none, or that nobody says anything."""
    messages = [_message(value, f"{where}: {field}[{index}]") for index, value in enumerate(values)]
    if not any(any(content_texts(message.get("content"))) or _calls(message) for message in messages):
        raise RowError(f"{where}: the conversation is empty: no message has any `content`")
    return messages


def read_tools(fields: dict[str, Any], where: str) -> list[dict[str, Any]] | None:
    """The `tools` of a row, or the JSON of them, or its `functions`, as they were called before; None: it has none."""
    field = "functions" if fields.get("tools") in (None, "") else "tools"
    tools = unpacked(fields.get(field))
    if tools in (None, ""):
        return None
    if not isinstance(tools, list):
        raise RowError(f"{where}: `{field}` is {kind(tools)}; expected a list of JSON schemas of functions")
    tools = [unpacked(tool) for tool in tools]
    wrong = next((number for number, tool in enumerate(tools) if not isinstance(tool, dict)), None)
    if wrong is not None:
        raise RowError(f"{where}: {field}[{wrong}] is {kind(tools[wrong])}; expected the JSON schema of a function")
    return tools if field == "tools" else [{"type": "function", "function": tool} for tool in tools]


def read_kwargs(fields: dict[str, Any], where: str) -> dict[str, Any] | None:
    """The `chat_template_kwargs` of a row: what its template is given by name, as TRL does."""
    given = unpacked(fields.get("chat_template_kwargs"))
    if given in (None, ""):
        return None
    if not isinstance(given, dict):
        raise RowError(f"{where}: `chat_template_kwargs` is {kind(given)}; expected an object")
    wrong = next((name for name in given if name in _NOT_GIVEN), None)
    if wrong is not None:
        raise RowError(f"{where}: `chat_template_kwargs` cannot give `{wrong}`; remove it there")
    return {name: value for name, value in given.items() if value is not None}


def with_system(messages: list[dict[str, Any]], fields: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Messages behind the `system` of their row. RowError where they begin with another one."""
    system = optional_text(fields, "system", where)
    if not system:
        return messages
    if messages[:1] and messages[0]["role"] == "system":
        if "".join(content_texts(messages[0].get("content"))) != system:
            raise RowError(
                f"{where}: `system` is another text than the system message of the conversation; remove one of them"
            )
        return messages
    return [{"role": "system", "content": system}, *messages]


def _message(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RowError(f"{where} is {kind(value)}; expected an object with `role` and `content`")
    message = {key: item for key, item in value.items() if item is not None}
    role = message.get("role")
    if role not in ROLES:
        result = "no `role`" if role is None else f"the role '{one_line(role, 40)}'"
        raise RowError(f"{where} has {result}; roles are {', '.join(ROLES)}")
    if "function_call" in message:
        message["function_call"] = _tool_calls([unpacked(message["function_call"])], where, "function_call")[0]
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(message["tool_calls"], where)
        if not message["tool_calls"]:
            del message["tool_calls"]
    if "content" in message:
        _require_text(message["content"], where)
    elif not _calls(message):
        raise RowError(f"{where} has no `content`; give it a text")
    if "weight" in message and (isinstance(message["weight"], bool) or not is_weight(message["weight"])):
        raise RowError(f"{where}: `weight` is {one_line(message['weight'], 40)}; {WEIGHTS}")
    if any(message.get(name) is value for name, value in _UNTRAINED.items()):
        message["weight"] = 0
    return message


def _calls(message: dict[str, Any]) -> Any:
    """The calls of a message; false where there are none."""
    return message.get("tool_calls") or message.get("function_call")


def _require_text(content: Any, where: str) -> None:
    """RowError where content is neither a text nor parts, texts and images: for a sound or a video among them."""
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise RowError(f"{where}: `content` is {kind(content)}; expected a text, or a list of parts with text")
    for part in content:
        if is_image(part):
            continue
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            what = one_line(part.get("type", "no text"), 40) if isinstance(part, dict) else kind(part)
            raise RowError(
                f"{where}: `content` has a part that is {what}; only texts and images can be trained on, remove it"
            )


def _tool_calls(calls: Any, where: str, field: str = "tool_calls") -> list[dict[str, Any]]:
    calls = unpacked(calls)
    if not isinstance(calls, list):
        raise RowError(f"{where}: `{field}` is {kind(calls)}; expected a list")
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowError(f"{where}: a call in `{field}` names no function; it needs function.name and .arguments")
    return calls
