"""Pairs of answers to one prompt, of which one is preferred: `chosen` and `rejected`, and `prompt`.

Prompt and answers are texts or lists of messages, an answer also one message. Without a prompt the sides are whole
conversations, or whole texts, and what they have in common at the beginning is the prompt; so it is beside a prompt
where both sides repeat it as messages. `conversations` are a prompt as well, as ShareGPT has them. Scores and whatever
else stands beside them are not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.engine.data.formats.base import kind, list_field, lists_objects, optional_text, unpacked
from penstock.engine.data.formats.images import FIELDS as IMAGES
from penstock.engine.data.formats.messages import read_kwargs, read_messages, read_tools, with_system
from penstock.engine.data.formats.sharegpt import read_turn
from penstock.engine.data.samples import Comparison, Completion, Conversation, RowError, content_texts, is_image
from penstock.storage.files.untrusted import one_line

FIELDS = (
    *("chosen", "rejected", "prompt", "conversations"),
    *("tools", "functions", "system", "chat_template_kwargs", *IMAGES),
)
QUESTIONS = ("question", "instruction", "query", "input")
"""Names that others have for the prompt: a row that has one does not repeat it in its answers."""
_ANSWER, _REQUEST = "\n\nAssistant:", "\n\nHuman:"
"""Before each turn in the texts of Anthropic's hh-rlhf."""
_FIRST_SPACELESS = "\u2e80"
"""From here on scripts put no space between words."""
Messages = list[dict[str, Any]]


def matches(fields: dict[str, Any]) -> bool:
    return all(isinstance(fields.get(name), str | list | dict) for name in FIELDS[:2])


def convert(fields: dict[str, Any], where: str) -> Comparison:
    refuse_images(fields, where)
    prompt = read_value(fields, "prompt", where) or None
    if prompt is None and fields.get("conversations") is not None:
        prompt = read_list(list_field(fields, "conversations", where), where, "conversations")
    chosen, rejected = (_side(fields, name, where) for name in FIELDS[:2])
    if isinstance(chosen, str) and isinstance(rejected, str):
        if chosen == rejected:
            raise _equal(where)
        if prompt is None or isinstance(prompt, str):
            return _of_texts(prompt, chosen, rejected, fields, where)
        chosen, rejected = ([{"role": "assistant", "content": text}] for text in (chosen, rejected))
    if isinstance(chosen, str) or isinstance(rejected, str):
        raise RowError(
            f"{where}: one of `chosen` and `rejected` is a text and the other a list; both must be of the same kind"
        )
    if isinstance(prompt, str):
        # A text beside whole conversations is what they begin with.
        prompt = None if chosen[0]["role"] != "assistant" else [{"role": "user", "content": prompt}]
    before, answers = _parted(prompt, (chosen, rejected), where)
    sides = (
        conversation(with_system(before, fields, where), answer, fields, f"{where}: {name}")
        for answer, name in zip(answers, FIELDS[:2], strict=True)
    )
    return Comparison(where, tuple(sides))


def conversation(before: Messages, answer: Messages, fields: dict[str, Any], where: str) -> Conversation:
    """A side, of which the answer is trained. RowError where the assistant does not answer, or shows images."""
    if not any(message["role"] == "assistant" and _says(message) for message in answer):
        raise RowError(f"{where} has no answer of the assistant; give it one, or remove the row")
    messages = [message | {"weight": 0} for message in before] + answer
    contents = [message.get("content") for message in messages]
    if any(is_image(part) for content in contents if isinstance(content, list) for part in content):
        raise _images(where)
    return Conversation(where, messages, read_tools(fields, where), read_kwargs(fields, where))


def _says(message: dict[str, Any]) -> bool:
    texts = content_texts(message.get("content"))
    return any(text.strip() for text in texts) or bool(message.get("tool_calls") or message.get("function_call"))


def completion(prompt: str, text: str, fields: dict[str, Any], where: str) -> Completion:
    """A side that is a text. RowError for an empty one."""
    if not text.strip():
        raise RowError(f"{where} is empty; give it an answer, or remove the row")
    if optional_text(fields, "system", where):
        raise RowError(
            f"{where}: `system` cannot be used beside texts; put it into the prompt, or give all as lists of messages"
        )
    return Completion(where, prompt, text)


def read_value(fields: dict[str, Any], name: str, where: str) -> str | Messages | None:
    """A text or messages, also as their JSON, or one message; None where the field is missing. RowError for what is
    neither, and for an empty list."""
    given = fields.get(name)
    value = [given] if isinstance(given, dict) else given
    if isinstance(given, str):  # whose JSON may be messages, or an answer
        value = unpacked(given)
        value = [value] if isinstance(value, dict) else value
        if not (isinstance(value, list) and value and _is_message(value[0])):
            return given
    if value is None:
        return None
    if not isinstance(value, list):
        raise RowError(f"{where}: `{name}` is {kind(given)}; expected a text or a list of messages")
    if not value:
        raise RowError(f"{where}: `{name}` is empty")
    return read_list(value, where, name)


def _is_message(value: Any) -> bool:
    kinds = ({"role", "content"}, {"role", "tool_calls"}, {"from", "value"})
    return isinstance(value, dict) and any(names <= value.keys() for names in kinds)


def read_list(values: list[Any], where: str, name: str) -> Messages:
    """Messages of either spelling."""
    if _is_sharegpt(values):
        values = [read_turn(value, f"{where}: {name}[{number}]") for number, value in enumerate(values)]
    return read_messages(values, where, name)


def _is_sharegpt(values: list[Any]) -> bool:
    return lists_objects(values, "from")


def refuse_images(fields: dict[str, Any], where: str) -> None:
    """RowError for a row with images beside its texts."""
    if any(fields.get(name) for name in IMAGES):
        raise _images(where)


def _images(where: str) -> RowError:
    return RowError(f"{where}: images in comparisons of answers are not supported; remove the row")


def _equal(where: str) -> RowError:
    return RowError(f"{where}: `chosen` and `rejected` are equal, so neither can be preferred; remove the row")


def _side(fields: dict[str, Any], name: str, where: str) -> str | Messages:
    value = read_value(fields, name, where)
    if value is None:
        there = ", ".join(sorted(key for key, value in fields.items() if value is not None)) or "none"
        raise RowError(
            f"{where}: no `{name}` field; the row has {one_line(there, 200)}; name the one that holds it with "
            f'data.columns={{"{name}": "..."}}'
        )
    return value


def _of_texts(prompt: str | None, chosen: str, rejected: str, fields: dict[str, Any], where: str) -> Comparison:
    if prompt is None:
        if questions := [name for name in QUESTIONS if fields.get(name)]:
            fix = (
                f'set data.columns={{"prompt": "{questions[0]}"}}' if len(questions) == 1 else "join them in one column"
            )
            names = " and ".join(f"`{name}`" for name in questions)
            raise RowError(f"{where}: no `prompt` field; if it is {names}, {fix}")
        at = _border(chosen, rejected)
        if not chosen[:at].strip():
            raise RowError(
                f"{where}: no `prompt` field, and the texts `chosen` and `rejected` do not begin with a prompt; name "
                'the column that holds it with data.columns={"prompt": "..."}'
            )
        prompt, chosen, rejected = chosen[:at], chosen[at:], rejected[at:]
        if prompt.rfind(_REQUEST) > prompt.rfind(_ANSWER):
            raise _differ(where)
    sides = zip((chosen, rejected), FIELDS[:2], strict=True)
    return Comparison(where, tuple(completion(prompt, text, fields, f"{where}: {name}") for text, name in sides))


def _border(chosen: str, rejected: str) -> int:
    """Where the prompt of two whole texts ends: behind the last request to answer that they have in common, else where
    they part, but within no word, and before the space that a word begins with; so that something is left of both."""
    common = chosen[: _alike(chosen, rejected)]
    if (at := common.rfind(_ANSWER)) >= 0:
        return len(common) if common.rfind(_REQUEST) > at else at + len(_ANSWER)
    at = min(len(common), len(chosen.rstrip()) - 1, len(rejected.rstrip()) - 1)
    while at > 0 and _in_word(common[at - 1]) and (_in_word(chosen[at : at + 1]) or _in_word(rejected[at : at + 1])):
        at -= 1
    return max(0, at - (common[at - 1 : at] == " "))


def _alike(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How much two texts, or lists, have in common at the beginning."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def _in_word(char: str) -> bool:
    return char.isalnum() and char < _FIRST_SPACELESS


def _parted(
    prompt: Messages | None, sides: tuple[Messages, Messages], where: str
) -> tuple[Messages, tuple[Messages, Messages]]:
    """The prompt and both answers. RowError where the sides are equal, or answer different prompts."""
    chosen, rejected = sides
    if chosen == rejected:
        raise _equal(where)
    shared = _alike(chosen, rejected)
    if prompt is None:
        before, at = chosen[:shared], shared
        if not before:
            raise RowError(
                f"{where}: no `prompt` field, and the conversations `chosen` and `rejected` do not begin with the same "
                'message; name the column that holds the prompt with data.columns={"prompt": "..."}'
            )
    else:
        before, at = prompt, 0
        if shared >= len(prompt) and chosen[: len(prompt)] == prompt:  # both repeat it
            at = len(prompt)
        for side in sides:
            require_answer(prompt, side[at:], where)
    if any(_asks(side[shared:]) for side in sides):
        raise _differ(where)
    return before, (chosen[at:], rejected[at:])


def require_answer(prompt: Messages, answer: Messages, where: str) -> None:
    """RowError where a prompt that asks is followed by another message that does."""
    if prompt and prompt[-1]["role"] == "user" and _asks(answer):
        raise RowError(
            f"{where}: a message of role '{answer[0]['role']}' follows the prompt, which ends with the user's; answers "
            "that repeat the prompt must both begin with all of its messages"
        )


def _asks(messages: Sequence[dict[str, Any]]) -> bool:
    """Whether somebody else than the assistant and its tools begins."""
    return bool(messages) and messages[0]["role"] in ("system", "developer", "user")


def _differ(where: str) -> RowError:
    return RowError(
        f"{where}: `chosen` and `rejected` answer different prompts: they part before the assistant answers; give both "
        "the same prompt, or remove the row"
    )
