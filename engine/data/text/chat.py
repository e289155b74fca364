"""Chat templates: a conversation as the text that the model sees, and which characters of it are trained.

What is trained of an assistant's turn is what the model has to write: the text behind the generation prompt up to where
the next message begins, so the token that ends the turn is trained, and the line's end behind it where the template
writes one. Templates with `{% generation %}` say it themselves, and those that are published say the same.

The text is what `apply_chat_template` makes of the messages, but for what templates take in one of two forms: content
in parts is joined for one that takes texts only, the JSON text of a call's arguments becomes an object for one that
makes JSON of it, and functions as they were called before become tools for one that knows these alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from penstock.engine.config import CONVERSATIONS, DataConfig
from penstock.engine.data.samples import Conversation, ImageFile, RowError, in_parts, is_image
from penstock.engine.data.text.sandbox import Limits
from penstock.engine.data.text.tokenizer import TextTokenizer
from penstock.engine.data.text.turn_ends import THOUGHTS, turn_ends
from penstock.engine.data.text.turns import MARKED, FormError, Messages, Template, View, with_functions
from penstock.storage.files.disk import atomic_write
from penstock.storage.files.errors import UserError
from penstock.storage.files.model_folder import has_model_file, read_model_file
from penstock.storage.files.sealed import seal, unseal
from penstock.storage.files.untrusted import one_line, parse_object, printable, read_regular, real_path

_MOST_BYTES = 1 << 24
FILE = "chat_template.json"
"""In the folder of a run's data: the templates that it trains with, by name, as the file that a recipe names may go."""
_MOST_SAVED_BYTES = 1 << 26
Trained = Literal["assistant", "last", "all"]


class Span(NamedTuple):
    """Characters `start` to `stop` of a rendered conversation, each of whose tokens counts `weight`."""

    start: int
    stop: int
    weight: float


class Rendered(NamedTuple):
    """A sample as text, and what of it is trained; None: all of it."""

    text: str
    spans: list[Span] | None
    end_weight: float
    """How much an end-of-text token would count behind it; 0 where no assistant's turn that is trained ends it."""
    bos: bool = False
    """Whether the begin-of-text token comes before it."""
    eos: bool = False
    """Whether the end-of-text token follows; else only where no special token ends a turn of that weight."""
    images: tuple[ImageFile, ...] = ()
    """Whose tokens are in it; none of them is trained."""


def find_template(config: DataConfig, tokenizer: TextTokenizer) -> ChatTemplate | None:
    """The template of `data.chat_template`, else the tokenizer's own; None where there is none."""
    own, folder = tokenizer.chat_template, tokenizer.folder
    where = f"{printable(folder)}: its chat template"
    file = None if config.chat_template is None else real_path(Path(config.chat_template))
    try:
        if file is not None:
            where = f"data.chat_template: {printable(file)}"
            text = read_regular(file, most_bytes=_MOST_BYTES).decode("utf-8")
            own = _in_json(text) if file.suffix == ".json" else text
        elif own is None and has_model_file(folder, "chat_template.json"):
            own = _in_json(read_model_file(folder, "chat_template.json", _MOST_BYTES).decode("utf-8"))
    except UserError:
        raise
    except (OSError, ValueError) as error:
        raise UserError(f"{where} cannot be read: {one_line(error)}") from error
    return None if own is None else ChatTemplate(own, where, tokenizer)


def _in_json(text: str) -> str | dict[str, str]:
    """The template, or the templates by name, that a chat_template.json holds. ValueError where it holds none."""
    result = parse_object(text).get("chat_template")
    if isinstance(result, list):
        result = {entry["name"]: entry["template"] for entry in result if {"name", "template"} <= entry.keys()}
    if not isinstance(result, str | dict):
        raise ValueError("no `chat_template` in it")
    return result


class ChatTemplate:
    """A Jinja template, rendered in transformers' sandbox.

    Attributes: `texts`, the templates by name (`default`, and `tool_use` for conversations with tools); `limits`;
    `end_ids`, the tokens one of which may end a turn: special ones, and added ones with which it ends its turns.
    """

    def __init__(self, template: str | dict[str, str], where: str, tokenizer: TextTokenizer) -> None:
        """UserError for what is no template."""
        self.texts = {"default": template} if isinstance(template, str) else template
        self.limits = Limits()
        self._tokenizer = tokenizer
        if "default" not in self.texts:
            names = ", ".join(map(printable, self.texts))
            raise UserError(f"{where} has no template 'default' among {names}; give one with data.chat_template")
        from jinja2.exceptions import TemplateSyntaxError
        from transformers.utils.chat_template_utils import _compile_jinja_template

        for text in self.texts.values():
            try:
                with self.limits.bounded(where):
                    _compile_jinja_template(text)
            except TemplateSyntaxError as error:
                raise UserError(
                    f"{where} is not a valid Jinja template: line {error.lineno}: {one_line(error.message)}"
                ) from error
            except (RecursionError, SyntaxError, TypeError) as error:  # too deep for Python, say
                raise UserError(f"{where} is not a valid Jinja template: {one_line(error)}") from error

    @cached_property
    def end_ids(self) -> frozenset[int]:
        special = self._tokenizer.special_ids
        return special if self._tokenizer.added_ids <= special else special | self.turn_ends

    @cached_property
    def turn_ends(self) -> frozenset[int]:
        """The added tokens that end an assistant's turn."""
        return turn_ends(self.texts, self._tokenizer)

    @cached_property
    def _templates(self) -> dict[str, Template]:
        special, ends = self._tokenizer.special_tokens, self._tokenizer.texts_of(self.end_ids)
        return {name: Template(text, special, self.limits, ends, set()) for name, text in self.texts.items()}

    @property
    def has_markers(self) -> bool:
        """Whether generation markers tell what the assistant writes; else renderings of prefixes do."""
        return all(MARKED.search(text) for text in self.texts.values())

    def unread(self, sample: Conversation) -> set[str]:
        """Tools, thoughts and other values of a conversation that no text of the template names."""
        given = {name for message in sample.messages for name in THOUGHTS if message.get(name)}
        beside = [*(sample.given or ()), *(["tools"] if sample.tools else [])]
        return given.union(beside) - self._names

    @cached_property
    def _names(self) -> set[str]:
        """All words of the templates."""
        return {word for text in self.texts.values() for word in re.findall(r"\w+", text)}

    def render(self, sample: Conversation, trained: Trained) -> Rendered:
        """The conversation as text, and what of it is trained. RowError where that cannot be determined.

        `all` is every token, whatever the messages' weights.
        """
        _ = self._templates  # whose rendering takes none of the sample's time
        with self.limits.bounded(sample.where, sample.messages, sample.tools):
            return self._rendered(sample, trained)

    def _rendered(self, sample: Conversation, trained: Trained) -> Rendered:
        view = self._view(sample)
        _require_shown(view, sample, trained)
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
        spans = [Span(start, stop, weights[turn]) for turn, start, stop in view.spans(turns, counted, trained)]
        return Rendered(view.text, spans, weights[counted[-1]] if ends and counted[-1] == turns[-1] else 0.0)

    def request(self, sample: Conversation) -> str:
        """The conversation as text, for the assistant to answer, or to go on with what it says last. RowError where it
        is refused."""
        _ = self._templates
        with self.limits.bounded(sample.where, sample.messages, sample.tools):
            view = self._view(sample)
            _require_shown(view, sample, "assistant")
            return view.prompt(goes_on=sample.messages[-1]["role"] == "assistant")

    def prompt(self, messages: Sequence[dict[str, Any]], *, goes_on: bool = False) -> str:
        """The conversation so far, up to where the assistant is to write; `goes_on`: its turn has begun, by the last
        message. Raises UserError where it is refused."""
        try:
            _ = self._templates
            with self.limits.bounded("chat", messages):
                view = self._see("default", list(messages), "chat")
                if view.unshown and (parted := self._try("default", list(map(in_parts, messages)), "chat")):
                    view = view if parted.unshown else parted
                return view.prompt(goes_on)
        except RowError as error:
            raise UserError(str(error)) from error

    def _view(self, sample: Conversation) -> View:
        """The conversation in the first form that the template can use. RowError where there is none."""
        name = "tool_use" if sample.tools is not None and "tool_use" in self.texts else "default"
        messages = [{key: value for key, value in m.items() if key != "weight"} for m in sample.messages]
        best: View | None = None
        first: RowError | None = None
        for form in _forms(messages):
            try:
                view = self._see(name, form, sample.where, sample)
            except RowError as error:
                first = first or error
                continue
            if (fault := view.fault()) is not None:
                first = first if isinstance(first, FormError) else fault
            elif not (unshown := view.unshown):
                return view
            elif best is None or len(unshown) < len(best.unshown):
                best = view
        if isinstance(first, FormError) and best is None:
            raise first
        unshown = list(range(len(messages))) if best is None else best.unshown
        parts = self._try(name, list(map(in_parts, messages)), sample.where, sample)
        if parts is not None and (lost := sorted(set(unshown) - set(parts.unshown))):
            raise FormError(
                f"{sample.where}: messages[{lost[0]}]: the chat template reads `content` as a list of parts, and shows "
                'nothing of a text; give it as [{"type": "text", "text": "..."}], or another template with '
                "data.chat_template"
            )
        if best is None:
            assert first is not None
            raise first
        return best

    def _see(self, name: str, messages: Messages, where: str, beside: Conversation | None = None) -> View:
        """`beside`: whose tools and other values the template is given."""
        template = self._templates[name]
        if beside is not None and beside.given:
            template = template._replace(special={**template.special, **beside.given}, seen=set())
        return View(template, messages, where, None if beside is None else beside.tools)

    def _try(self, name: str, messages: Messages, where: str, beside: Conversation | None = None) -> View | None:
        with contextlib.suppress(RowError):
            return self._see(name, messages, where, beside)
        return None


def _require_shown(view: View, sample: Conversation, trained: Trained) -> None:
    """RowError for a message that the template leaves out, but for the assistant's where not all tokens are trained."""
    for number in view.unshown:
        role = sample.messages[number]["role"]
        if role != "assistant" or trained == "all":
            raise FormError(
                f"{sample.where}: messages[{number}]: the chat template leaves out what the message of role "
                f"'{role}' says; remove it, or name another template with data.chat_template"
            )


def _forms(messages: Messages) -> Iterator[Messages]:
    """The messages as they are, and in the other forms in which a template may want them, the most alike first."""
    parts = [part for m in messages if isinstance(content := m.get("content"), list) for part in content]
    parted = bool(parts) and not any(map(is_image, parts))  # which no text says
    with_tools = list(map(_with_tools, messages))
    for named in (messages, with_tools) if with_tools != messages else (messages,):
        for contents in (named, list(map(_joined, named))) if parted else (named,):
            yield contents
            if (calls := [with_functions(message, _with_object) for message in contents]) != contents:
                yield calls


def _with_tools(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose call of a function, or a function's answer, is that of a tool."""
    result = {name: value for name, value in message.items() if name != "function_call"}
    if result["role"] == "function":
        result["role"] = "tool"
    if "function_call" in message:
        result.setdefault("tool_calls", [{"type": "function", "function": message["function_call"]}])
    return result


def _joined(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose content is a text."""
    if not isinstance(content := message.get("content"), list):
        return message
    return message | {"content": "".join(part if isinstance(part, str) else part["text"] for part in content)}


def _with_object(function: dict[str, Any]) -> dict[str, Any]:
    """A call's function with its arguments as an object, which templates turn into JSON; OpenAI has that JSON."""
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):
            return function | {"arguments": json.loads(arguments)}
    return function


def save_template(config: DataConfig, tokenizer: TextTokenizer, folder: Path) -> None:
    """Write the template that `config` trains with, durably; nothing where its data has no conversations."""
    template = find_template(config, tokenizer) if trains_turns(config) else None
    if template is None:
        return
    content = (json.dumps(seal({"templates": dict(template.texts)}), indent=2) + "\n").encode()
    if not (folder / FILE).is_file() or read_regular(folder / FILE, most_bytes=_MOST_SAVED_BYTES) != content:
        atomic_write(folder / FILE, content)


def load_template(config: DataConfig, tokenizer: TextTokenizer, folder: Path) -> ChatTemplate | None:
    """The template saved in a run's data folder; where there is none, that of recipe and tokenizer as they are.

    Raises UserError where it is damaged, and as `find_template`.
    """
    path = folder / FILE
    if not os.path.lexists(path):
        return find_template(config, tokenizer)
    return ChatTemplate(_read(path)[0], printable(path), tokenizer)


def verify_template(path: Path) -> int:
    """Check the file against its checksum; its bytes. Raises UserError naming it."""
    return _read(path)[1]


def _read(path: Path) -> tuple[dict[str, str], int]:
    """The templates by name, and the file's bytes."""
    try:
        content = read_regular(path, most_bytes=_MOST_SAVED_BYTES)
        texts = unseal(parse_object(content)).content.get("templates")
        if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
            raise ValueError("it holds no chat templates")
        return texts, len(content)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: damaged: {error}; restore the file, or delete it to use the chat template that the recipe names"
        ) from error


def trains_turns(config: DataConfig) -> bool:
    """Whether some of the data is conversations."""
    return any(part.source in CONVERSATIONS for part in config.parts)


def trained_ends(config: DataConfig, template: ChatTemplate | None) -> frozenset[int]:
    """The tokens that ended the turns which were trained; none where the data has no conversations."""
    return template.turn_ends if template is not None and trains_turns(config) else frozenset()
