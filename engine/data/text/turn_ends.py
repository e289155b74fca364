"""Which tokens end an assistant's turn under a chat template: what a chat, and an export, must stop at.

Small conversations are rendered, of words that no template has: what follows the answers are the ends.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any

from penstock.engine.data.samples import RowError, in_parts
from penstock.engine.data.text.sandbox import Limits
from penstock.engine.data.text.tokenizer import TextTokenizer
from penstock.engine.data.text.turns import Messages, Template, View, with_functions

_ASKED, _AGAIN, _ANSWER, _THOUGHT, _FIRST, _SECOND = (f"qzk{word}" for word in ("a", "e", "i", "o", "u", "y"))
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""What templates call the thoughts of a message."""


def turn_ends(templates: Mapping[str, str], tokenizer: TextTokenizer) -> frozenset[int]:
    """The added tokens that end an assistant's turn, whichever of the `templates` (by name) renders it.

    Those behind the last answer, behind one before a question, and behind calls of tools, which some templates end
    differently; none that also stands within a turn. Empty where turns end with text, or none of these is rendered.
    """
    result, inside = set[int](), set[int]()
    for name, text in templates.items():
        probe = _Probe(text, tokenizer, with_tools=name == "tool_use")
        with probe.limits.bounded(f"template '{name}'"):
            result |= probe.ends()
            inside |= probe.inside()
    return frozenset(result - inside)


class _Probe:
    def __init__(self, template: str, tokenizer: TextTokenizer, *, with_tools: bool) -> None:
        self._tokenizer, self.limits = tokenizer, Limits()
        self._template = Template(template, tokenizer.special_tokens, self.limits, frozenset(), set())
        self._tools = [_TOOL] if with_tools else None

    def ends(self) -> set[int]:
        """What follows the last answer, an earlier one, and calls."""
        question, answered = _message("user", _ASKED), _message("assistant", _ANSWER)
        last = self._added(self._behind([question, answered], _ANSWER))
        earlier = self._added(self._between([question, answered, _message("user", _AGAIN)], _ANSWER, _AGAIN))
        called = self._added(self._behind([question, _calls(_FIRST)], _FIRST).lstrip('"}])'))
        # An earlier turn ends as the last one does, or with the first token of what is between it and the question.
        same = [a for a, b in zip(last, earlier, strict=False) if a == b]
        return {*last[-1:], *(same[-1:] or earlier[:1]), *called[-1:]}

    def inside(self) -> set[int]:
        """What stands between thoughts and the answer, and between two calls."""
        question = _message("user", _ASKED)
        thinking = _message("assistant", _ANSWER) | dict.fromkeys(THOUGHTS, _THOUGHT)
        texts = (
            self._between([question, thinking], _THOUGHT, _ANSWER),
            self._between([question, _calls(_FIRST, _SECOND)], _FIRST, _SECOND),
        )
        return {token for text in texts for token in self._tokens(text)} & self._tokenizer.added_ids

    def _behind(self, messages: Messages, word: str) -> str:
        """The text behind the last `word`."""
        _, result, rest = self._render(messages, word).rpartition(word)
        return rest if result else ""

    def _between(self, messages: Messages, word: str, other: str) -> str:
        """The text from the last `word` to the first `other` behind it."""
        text, result, _ = self._behind(messages, word).partition(other)
        return text if result else ""

    def _render(self, messages: Messages, word: str) -> str:
        """A rendering with `word` in it, of the messages in the form that the template takes; empty: there is none."""
        for before, form in itertools.product(([], [_message("system", _AGAIN)]), (dict, in_parts, _in_text)):
            try:
                view = View(self._template, [form(message) for message in [*before, *messages]], "", self._tools)
            except RowError:
                continue
            if word in view.text:
                return view.text
        return ""

    def _added(self, text: str) -> list[int]:
        """The added tokens that `text` begins with, white space between them."""
        return list(itertools.takewhile(self._tokenizer.added_ids.__contains__, self._tokens(text)))

    def _tokens(self, text: str) -> list[int]:
        """Those of `text` that are no white space."""
        ids = self._tokenizer.encode_batch([text])[0] if text else []
        return [token for token in ids if self._tokenizer.decode([token]).strip()]


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


def _in_text(message: dict[str, Any]) -> dict[str, Any]:
    """For templates that write arguments as they are."""
    return with_functions(message, lambda function: function | {"arguments": json.dumps(function["arguments"])})


def _calls(*words: str) -> dict[str, Any]:
    """An assistant's message that calls a tool for each word."""
    calls = [
        {"type": "function", "id": f"callnumb{number}", "function": {"name": "look", "arguments": {"at": word}}}
        for number, word in enumerate(words)
    ]
    return _message("assistant", "") | {"tool_calls": calls}
