"""Chat templates: a conversation as the text that the model sees, and which characters of it are trained.

What is trained of an assistant's turn is what the model has to write: the text behind the generation prompt up to where
the next message begins, so the token that ends the turn is trained, and the line's end behind it where the template
writes one. Templates with `{% generation %}` say it themselves, and those that are published say the same.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from penstock.engine.config import DataConfig
from penstock.engine.data.rows import RowError, TurnsError
from penstock.engine.data.samples import Conversation
from penstock.engine.data.tokenizer import TextTokenizer
from penstock.storage.errors import UserError
from penstock.storage.model_folder import has_model_file, read_model_file
from penstock.storage.untrusted import one_line, parse_object, printable, read_regular, real_path

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_TAKES_TEXT = re.compile(r"arguments\s+is\s+(not\s+)?string")
_MOST_BYTES = 1 << 24
_SHOWN_CHARS = 40  # of where two renderings differ
Trained = Literal["assistant", "last", "all"]


@dataclass(frozen=True, slots=True)
class Span:
    """Characters `start` to `stop` of a rendered conversation, each of whose tokens counts `weight`."""

    start: int
    stop: int
    weight: float


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text, and what of it is trained; None: all of it."""

    text: str
    spans: list[Span] | None
    end_weight: float
    """How much an end-of-text token would count behind it; 0 where no assistant's turn that is trained ends it."""


def find_template(config: DataConfig, tokenizer: TextTokenizer) -> ChatTemplate | None:
    """The template of `data.chat_template`, else the tokenizer's own; None where there is none."""
    special = tokenizer.special_tokens
    own: str | dict[str, str] | None
    if config.chat_template is not None:
        file = real_path(Path(config.chat_template))
        try:
            text = read_regular(file, most_bytes=_MOST_BYTES).decode("utf-8")
            own = _in_json(text) if file.suffix == ".json" else text
        except (OSError, ValueError) as error:
            raise UserError(f"data.chat_template: {printable(file)} cannot be read: {one_line(error)}") from error
        return ChatTemplate(own, f"data.chat_template: {printable(file)}", special)
    own = tokenizer.chat_template
    if own is None and has_model_file(tokenizer.folder, "chat_template.json"):
        try:
            own = _in_json(read_model_file(tokenizer.folder, "chat_template.json", _MOST_BYTES).decode("utf-8"))
        except ValueError as error:
            raise UserError(f"{tokenizer.folder}/chat_template.json: cannot be read: {one_line(error)}") from error
    return None if own is None else ChatTemplate(own, f"{printable(tokenizer.folder)}: its chat template", special)


def _in_json(text: str) -> str | dict[str, str]:
    """The template, or the templates by name, that a chat_template.json holds. ValueError where it holds none."""
    found = parse_object(text).get("chat_template")
    if isinstance(found, list):
        found = {entry["name"]: entry["template"] for entry in found if {"name", "template"} <= entry.keys()}
    if not isinstance(found, str | dict):
        raise ValueError("no `chat_template` in it")
    return found


class ChatTemplate:
    """A Jinja template, rendered in transformers' sandbox.

    Attributes: `texts`, the templates by name (`default`, and `tool_use` for conversations with tools).
    """

    def __init__(self, template: str | dict[str, str], where: str, special: dict[str, str]) -> None:
        """`special`: what templates know tokens by, `bos_token` and so on. UserError for what is no template."""
        self.texts = {"default": template} if isinstance(template, str) else template
        self._where, self._special = where, special
        if "default" not in self.texts:
            names = ", ".join(map(printable, self.texts))
            raise UserError(f"{where} has no template 'default' among {names}; give one with data.chat_template")
        from jinja2.exceptions import TemplateSyntaxError
        from transformers.utils.chat_template_utils import _compile_jinja_template

        for text in self.texts.values():
            try:
                _compile_jinja_template(text)
            except TemplateSyntaxError as error:
                raise UserError(
                    f"{where} is not a valid Jinja template: line {error.lineno}: {one_line(error.message)}"
                ) from error

    @property
    def has_markers(self) -> bool:
        """Whether generation markers tell what the assistant writes; else renderings of prefixes do."""
        return all(_MARKED.search(text) for text in self.texts.values())

    def render(self, sample: Conversation, trained: Trained) -> Rendered:
        """The conversation as text, and what of it is trained. RowError where neither can be told.

        `all` is every token, whatever the messages' weights.
        """
        view = self._view(sample)
        turns = [i for i, message in enumerate(sample.messages) if message["role"] == "assistant"]
        ends = bool(turns) and turns[-1] == len(sample.messages) - 1
        if trained == "all":
            return Rendered(view.text, None, 1.0)
        weights = {turn: float(sample.messages[turn].get("weight", 1)) for turn in turns}
        counted = [turn for turn in (turns[-1:] if trained == "last" else turns) if weights[turn] > 0]
        if not counted:
            why = "all assistant messages have weight 0" if turns else "there is no assistant message"
            raise RowError(
                f"{sample.where}: no token to train: {why}; set data.trained_tokens=all, or remove the conversation"
            )
        found = view.marked(turns, counted) if view.generated is not None else view.nested(counted, trained)
        spans = [Span(start, stop, weights[turn]) for turn, start, stop in found]
        return Rendered(view.text, spans, weights[counted[-1]] if ends and counted[-1] == turns[-1] else 0.0)

    def prompt(self, messages: Sequence[dict[str, Any]], *, goes_on: bool = False) -> str:
        """The conversation so far, up to where the assistant is to write; `goes_on`: its turn has begun, by the last
        message. Raises UserError where it is refused."""
        try:
            view = _View(self.texts["default"], list(messages), Conversation("chat", list(messages)), self._special)
            return view.prompt(goes_on)
        except RowError as error:
            raise UserError(str(error)) from error

    def _view(self, sample: Conversation) -> _View:
        text = self.texts["tool_use" if sample.tools and "tool_use" in self.texts else "default"]
        messages = [{key: value for key, value in m.items() if key != "weight"} for m in sample.messages]
        if not any("tool_calls" in message for message in messages) or _TAKES_TEXT.search(text):
            return _View(text, messages, sample, self._special)
        try:
            return _View(text, [_with_objects(message) for message in messages], sample, self._special)
        except RowError:
            return _View(text, messages, sample, self._special)  # some put the arguments' text into a text


def _with_objects(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose calls have their arguments as objects, which templates turn into JSON; OpenAI has that JSON."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        function = dict(call.get("function", call))
        if isinstance(arguments := function.get("arguments"), str):
            with contextlib.suppress(ValueError):
                function["arguments"] = json.loads(arguments)
        calls.append(call | {"function": function} if "function" in call else function)
    return message | {"tool_calls": calls}


class _View:
    """A conversation under one template: its text, and the spans that generation markers tell (None: no markers)."""

    def __init__(
        self, template: str, messages: list[dict[str, Any]], sample: Conversation, special: dict[str, str]
    ) -> None:
        self._template, self._messages, self._special = template, messages, special
        self._where, self._tools = sample.where, sample.tools
        self._has_markers = _MARKED.search(template) is not None
        self.text, spans = self._render(len(messages))
        self.generated = spans if self._has_markers else None

    def _render(self, count: int, prompt: bool = False, goes_on: bool = False) -> tuple[str, list[tuple[int, int]]]:
        """The first `count` messages, with the generation `prompt` behind them or without; `goes_on`: up to the end of
        the last one's text."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            render: Any = render_jinja_template
            texts, spans = render(
                conversations=[self._messages[:count]],
                tools=self._tools,
                chat_template=self._template,
                return_assistant_tokens_mask=self._has_markers,
                add_generation_prompt=prompt,
                continue_final_message=goes_on,
                **self._special,
            )
        except Exception as error:  # a template raises what it likes
            of = "" if count == len(self._messages) else f" with its first {count} messages"
            raise RowError(
                f"{self._where}: the chat template refuses the conversation{of}: {one_line(error, 200)}"
            ) from error
        return texts[0], spans[0] if self._has_markers else []

    def prompt(self, goes_on: bool) -> str:
        """All messages, with the generation prompt behind them, or without an end of the last one's turn."""
        return self._render(len(self._messages), prompt=not goes_on, goes_on=goes_on)[0]

    def marked(self, turns: list[int], counted: list[int]) -> list[tuple[int, int, int]]:
        """(turn, start, stop) of what generation markers tell of the turns `counted`.

        Where a turn has several pieces, or none, how many are rendered up to its end tells which are its own.
        """
        spans = self.generated or []
        if len(spans) == len(turns):
            return [(turn, *span) for turn, span in zip(turns, spans, strict=True) if turn in counted]
        ends = [len(self._render(turn + 1)[1]) for turn in turns[:-1]] + [len(spans)]
        begins = [0, *ends[:-1]]
        if any(begin > end for begin, end in zip(begins, ends, strict=True)):
            raise RowError(
                f"{self._where}: the chat template's generation markers do not show which turn they belong to; set "
                "data.trained_tokens=all, or choose another template with data.chat_template"
            )
        owned = zip(turns, begins, ends, strict=True)
        return [(turn, *span) for turn, begin, end in owned if turn in counted for span in spans[begin:end]]

    def nested(self, counted: list[int], trained: Trained) -> list[tuple[int, int, int]]:
        """(turn, start, stop) of the turns `counted`, by rendering what comes before each and what comes up to its end.

        Each rendering must begin the next: then a turn is what the one has more than the other.
        """
        found, eos = [], self._special.get("eos_token") or ""
        for turn in counted:
            before, _ = self._render(turn, prompt=True)
            upto = self.text if turn + 1 == len(self._messages) else self._render(turn + 1)[0]
            if eos and not self.text.startswith(upto):
                upto = upto.removesuffix(eos)  # some end every rendering, not every turn, with it
            for rendered in (before, upto):
                if not self.text.startswith(rendered):
                    raise self._not_nested(turn, rendered, trained)
            if len(before) > len(upto):
                raise self._not_nested(turn, before, trained)
            found.append((turn, len(before), len(upto)))
        return found

    def _not_nested(self, turn: int, rendered: str, trained: Trained) -> TurnsError:
        pairs = zip(rendered, self.text, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(rendered), len(self.text)))
        one, other = (repr(text[at : at + _SHOWN_CHARS]) for text in (rendered, self.text))
        ways = "all" if trained == "last" else "last or all"
        return TurnsError(
            f"{self._where}: messages[{turn}]: the chat template renders it as {printable(one)} by itself and as "
            f"{printable(other)} in the whole conversation, so Penstock cannot tell which tokens to train; set "
            f"data.trained_tokens={ways}, or data.chat_template to a template with generation markers"
        )
