"""Which tokens end an assistant's turn under a chat template: what a chat, and an export, must stop at.

Small conversations are rendered, of words that no template has: what follows the answers are the ends.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.engine.data.sandbox import Limits
from penstock.engine.data.tokenizer import TextTokenizer

_ASKED, _AGAIN, _ANSWER, _THOUGHT, _FIRST, _SECOND = (f"qzk{word}" for word in ("a", "e", "i", "o", "u", "y"))
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""What templates call the thoughts of a message."""


def turn_ends(templates: Mapping[str, str], tokenizer: TextTokenizer) -> frozenset[int]:
    """The added tokens that end an assistant's turn, whichever of the `templates` (by name) renders it.

    Those behind the last answer, behind one that is followed by a question, and behind calls of tools, which some
    templates end differently. A token that also stands within a turn, as between thoughts and answer, is none. Empty
    where turns end with text, or the templates render none of these.
    """
    found, inside = set[int](), set[int]()
    for name, text in templates.items():
        probe = _Probe(text, tokenizer, with_tools=name == "tool_use")
        with Limits().bounded(f"template '{name}'"):
            found |= probe.ends()
            inside |= probe.inside()
    return frozenset(found - inside)


class _Probe:
    def __init__(self, template: str, tokenizer: TextTokenizer, *, with_tools: bool) -> None:
        self._template, self._tokenizer, self._with_tools = template, tokenizer, with_tools

    def ends(self) -> set[int]:
        """What follows the last answer, an earlier one, and calls."""
        asked, answered = _message("user", _ASKED), _message("assistant", _ANSWER)
        last = self._added(self._behind([asked, answered], _ANSWER))
        earlier = self._added(self._between([asked, answered, _message("user", _AGAIN)], _ANSWER, _AGAIN))
        called = self._added(self._behind([asked, _calls(_FIRST)], _FIRST, skip='"}])'))
        # An earlier turn ends as the last one does, or with the first token of what is between it and the question.
        same = [a for a, b in zip(last, earlier, strict=False) if a == b]
        return {*last[-1:], *(same[-1:] or earlier[:1]), *called[-1:]}

    def inside(self) -> set[int]:
        """What stands between thoughts and the answer, and between two calls."""
        asked = _message("user", _ASKED)
        thinking = _message("assistant", _ANSWER) | dict.fromkeys(THOUGHTS, _THOUGHT)
        calling = _calls(_FIRST, _SECOND)
        return {
            *self._all_added(self._between([asked, thinking], _THOUGHT, _ANSWER)),
            *self._all_added(self._between([asked, calling], _FIRST, _SECOND)),
        }

    def _behind(self, messages: list[dict[str, Any]], word: str, skip: str = "") -> str:
        """The text behind the last `word`, without characters of `skip` that it begins with."""
        _, found, rest = self._render(messages, word).rpartition(word)
        return rest.lstrip(skip) if found else ""

    def _between(self, messages: list[dict[str, Any]], word: str, other: str) -> str:
        """The text from the last `word` to the first `other` behind it."""
        text, found, _ = self._behind(messages, word).partition(other)
        return text if found else ""

    def _render(self, messages: list[dict[str, Any]], word: str) -> str:
        """A rendering with `word` in it, of the messages in the form that the template takes; empty: there is none."""
        from transformers.utils.chat_template_utils import render_jinja_template

        render: Any = render_jinja_template
        for before, form in itertools.product(([], [_message("system", _AGAIN)]), (_as_given, _in_parts, _in_text)):
            try:
                texts, _ = render(
                    conversations=[[form(message) for message in [*before, *messages]]],
                    tools=[_TOOL] if self._with_tools else None,
                    chat_template=self._template,
                    **self._tokenizer.special_tokens,
                )
            except Exception:  # a template raises what it likes
                continue
            if word in texts[0]:
                return str(texts[0])
        return ""

    def _added(self, text: str) -> list[int]:
        """The added tokens that `text` begins with, white space between them."""
        return list(itertools.takewhile(self._is_added, self._tokens(text)))

    def _all_added(self, text: str) -> list[int]:
        return [token for token in self._tokens(text) if self._is_added(token)]

    def _tokens(self, text: str) -> list[int]:
        """Those of `text` that are no white space."""
        ids = self._tokenizer.encode_batch([text])[0] if text else []
        return [token for token in ids if self._tokenizer.decode([token]).strip()]

    def _is_added(self, token: int) -> bool:
        return token in self._tokenizer.added_ids


_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string", "description": "What."}}},
    },
}


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _as_given(message: dict[str, Any]) -> dict[str, Any]:
    return message


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """For templates that go through the parts of a content."""
    return message | {"content": [{"type": "text", "text": message["content"]}]}


def _in_text(message: dict[str, Any]) -> dict[str, Any]:
    """For templates that write arguments as they are."""
    if "tool_calls" not in message:
        return message
    called = [call["function"] for call in message["tool_calls"]]
    texts = [{"function": one | {"arguments": json.dumps(one["arguments"])}} for one in called]
    calls = [call | text for call, text in zip(message["tool_calls"], texts, strict=True)]
    return message | {"tool_calls": calls}


def _calls(*words: str) -> dict[str, Any]:
    """An assistant's message that calls a tool for each word."""
    calls: Sequence[dict[str, Any]] = [
        {"type": "function", "id": f"callnumb{number}", "function": {"name": "look", "arguments": {"at": word}}}
        for number, word in enumerate(words)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}
