"""One conversation under one chat template: its text, where each turn of the assistant begins and ends in it, and
whether the template shows what the messages say.

Templates with `{% generation %}` mark the turns. For others two renderings are compared: the messages before a turn
with the generation prompt, and the messages up to its end. Each must begin the whole conversation's text; then the turn
is what the second has more. Where one does not, because a template writes the end of a conversation's last turn another
way or refuses a beginning of the conversation, the messages that follow are rendered behind another beginning: what
they become there must end the whole text too, and so shows where they begin in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple

from penstock.engine.data.samples import RowError, TurnsError, content_texts, is_image
from penstock.engine.data.text.sandbox import Limits
from penstock.storage.files.untrusted import one_line, printable

MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_SHOWN_CHARS = 40  # of where two renderings differ
_OTHER = "anything else"  # in place of a message's text
Messages = list[dict[str, Any]]


class FormError(RowError):
    """A conversation in a form that its template cannot use: content or arguments of calls do not come out of it."""


class Template(NamedTuple):
    """A template's text, and what it is rendered with."""

    text: str
    special: Mapping[str, Any]
    """What it knows by name, tokens first of all."""
    limits: Limits
    ends: frozenset[str]
    """Texts of the tokens, one of which may end a turn."""
    seen: set[tuple[Any, ...]]
    """Sorts of messages whose texts it is known to show."""


class View:
    """A conversation under one template.

    Attributes: `text`; `messages`; `generated`, the spans (start, stop) of generation markers, None where it has none.
    """

    def __init__(
        self, template: Template, messages: Messages, where: str, tools: list[dict[str, Any]] | None = None
    ) -> None:
        """RowError where the template refuses the conversation."""
        self.messages = messages
        self._template, self._where, self._tools = template, where, tools
        self._special, self._ends, self._seen = template.special, template.ends, template.seen
        self._has_markers = MARKED.search(template.text) is not None
        self.text, spans = self._render(messages)
        self.generated = spans if self._has_markers else None

    def _render(
        self, messages: Messages, *, prompt: bool = False, goes_on: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """Messages, with the generation `prompt`, or up to the last one's text if it `goes_on`; and markers' spans."""
        from transformers.utils.chat_template_utils import render_jinja_template

        refused: str | None = None
        try:
            render: Any = render_jinja_template
            texts, spans = render(
                conversations=[messages],
                tools=self._tools,
                chat_template=self._template.text,
                return_assistant_tokens_mask=self._has_markers,
                add_generation_prompt=prompt,
                continue_final_message=goes_on,
                **self._special,
            )
        except MemoryError:
            raise
        except Exception as error:  # a template raises what it likes
            refused = one_line(error, 200)
        if refused is not None:  # without the error, which may hold hundreds of megabytes
            of = "" if len(messages) == len(self.messages) else f" with its first {len(messages)} messages"
            raise RowError(f"{self._where}: the chat template refuses the conversation{of}: {refused}")
        self._template.limits.require_modest(texts[0], (messages, self._tools, self._special), self._where)
        return texts[0], spans[0] if self._has_markers else []

    def _try(self, messages: Messages, *, prompt: bool = False) -> str | None:
        """The text of messages; None where the template refuses them."""
        try:
            return self._render(messages, prompt=prompt)[0]
        except RowError:
            return None

    def prompt(self, goes_on: bool) -> str:
        """All messages, with the generation prompt behind them, or without an end of the last one's turn."""
        return self._render(self.messages, prompt=not goes_on, goes_on=goes_on)[0]

    # Where turns are

    def spans(self, turns: list[int], counted: list[int], trained: str) -> list[tuple[int, int, int]]:
        """(turn, start, stop) of the assistant's turns `counted`, which are some of its `turns`.

        A turn that generation markers cut has several. TurnsError where they cannot be determined.
        """
        result = self._marked(turns, counted) if self.generated is not None else self._nested(counted, trained)
        for turn in counted:
            said = "".join(self.text[start:stop] for of, start, stop in result if of == turn)
            if not self._shows(turn, said):
                raise FormError(
                    f"{self._where}: the chat template leaves out what messages[{turn}] says, so the turn would be "
                    "trained without it; correct the template, name another with data.chat_template, or set the "
                    "message's weight to 0"
                )
        return result

    def _marked(self, turns: list[int], counted: list[int]) -> list[tuple[int, int, int]]:
        """Where a turn has several pieces, or none, how many are rendered up to its end shows which are its own."""
        spans = self.generated or []
        if len(spans) == len(turns):
            return [(turn, *span) for turn, span in zip(turns, spans, strict=True) if turn in counted]
        ends = [len(self._render(self.messages[: turn + 1])[1]) for turn in turns[:-1]] + [len(spans)]
        begins = [0, *ends[:-1]]
        if any(begin > end for begin, end in zip(begins, ends, strict=True)):
            raise RowError(
                f"{self._where}: the chat template's generation markers do not show which turn they belong to; set "
                "data.trained_tokens=all, or choose another template with data.chat_template"
            )
        owned = zip(turns, begins, ends, strict=True)
        return [(turn, *span) for turn, begin, end in owned if turn in counted for span in spans[begin:end]]

    def _nested(self, counted: list[int], trained: str) -> list[tuple[int, int, int]]:
        result = []
        for turn in counted:
            start = self._start(turn, trained)
            stop = self._stop(turn, start, trained)
            if start > stop:
                raise self._indistinct(turn, self.text[:start], trained)
            result.append((turn, start, stop))
        return result

    def _start(self, turn: int, trained: str) -> int:
        """Where the assistant begins to write."""
        before, refused = "", None
        if turn:
            try:
                before, _ = self._render(self.messages[:turn], prompt=True)
            except RowError as error:
                refused = error
            else:
                if self.text.startswith(before):
                    return len(before)
        if (result := max(self._elsewhere(turn, prompt=True), default=None)) is not None:
            return result
        if turn and refused is None:
            raise self._indistinct(turn, before, trained)
        why = f"the chat template refuses the messages before it: {refused}" if refused else "nothing comes before it"
        raise TurnsError(
            f"{self._where}: messages[{turn}]: {why}, so Penstock cannot tell which tokens of the assistant's turn to "
            f"train; {self._ways_out(turn, trained)}, or begin the conversation with a user's message"
        )

    def _stop(self, turn: int, start: int, trained: str) -> int:
        """Where the next message begins; behind its first special token where that ends the turn, as in GLM's."""
        if turn + 1 == len(self.messages):
            return len(self.text) - len(self._prompt_behind(start))
        upto, _ = self._render(self.messages[: turn + 1])
        nested = self.text.startswith(upto)
        stop = len(upto)
        if not nested or self._is_open(upto):
            begin = max((at for at in self._elsewhere(turn + 1) if at >= start), default=-1)
            alike = self._alike(upto)
            alike = min(self._between_tokens(text, alike) for text in (upto, self.text))
            if begin > stop * nested and self._is_ending(self.text[alike:begin]) and self._is_ending(upto[alike:]):
                stop = begin
            elif not nested:
                raise self._indistinct(turn, upto, trained)
        if self._is_open(self.text[:stop]):
            at = len(self.text) - len(self.text[stop:].lstrip())
            if token := self._token_at(self.text, at):
                return at + len(token)
        return stop

    def _prompt_behind(self, start: int) -> str:
        """The generation prompt at the end of the text, from a template that always writes it: what
        is before `start`, where the last turn begins, and gives way to a user's message."""
        if "add_generation_prompt" in self._template.text:
            return ""
        followed = self._try([*self.messages, self._beginnings(empty=False)[0][0]])
        if followed is None:
            return ""
        alike = self._between_tokens(self.text, self._alike(followed))
        return self.text[alike:] if self.text[:start].endswith(self.text[alike:]) else ""

    def _alike(self, text: str) -> int:
        """How many characters another text has in common with this one, from the first on."""
        pairs = zip(text, self.text, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(text), len(self.text)))

    def _is_open(self, text: str) -> bool:
        """Whether no token ends a text, so that what ends its last turn may come with the next message."""
        return not text.rstrip().endswith(tuple(self._ends))

    def _token_at(self, text: str, at: int) -> str:
        """The special token that a text has there; empty where it has none."""
        return max((token for token in self._ends if text.startswith(token, at)), key=len, default="")

    def _between_tokens(self, text: str, at: int) -> int:
        """`at`, or the beginning of the special token that it is within."""
        longest = max(map(len, self._ends), default=0)
        starts = (start for start in range(max(0, at - longest), at) if start + len(self._token_at(text, start)) > at)
        return next(starts, at)

    def _is_ending(self, text: str) -> bool:
        """Whether a text may end a turn: it has special tokens and white space only."""
        for token in sorted(self._ends, key=len, reverse=True):
            text = text.replace(token, "")
        return not text.strip()

    def _elsewhere(self, first: int, *, prompt: bool = False) -> Iterator[int]:
        """Where the messages from `first` on begin, by each other beginning behind which they are the same text.

        `prompt`: the beginning is rendered with the generation prompt, behind which the first of them goes on.
        """
        for begin in self._beginnings(empty=not prompt):
            if begin and begin[-1]["role"] == self.messages[first]["role"]:
                continue  # a template may make one turn of both
            text = self._try(begin, prompt=prompt) if begin else ""
            whole = self._try([*begin, *self.messages[first:]])
            if text is None or whole is None:
                continue
            if not whole.startswith(text) and begin[-1]["role"] != "assistant":
                text = text.removesuffix(self._special.get("eos_token") or "")  # which some write behind everything
            if whole.startswith(text) and self.text.endswith(whole[len(text) :]):
                yield len(self.text) - (len(whole) - len(text))

    def _beginnings(self, *, empty: bool) -> list[Messages]:
        in_parts = any(isinstance(message.get("content"), list) for message in self.messages)
        content: Any = [{"type": "text", "text": "x"}] if in_parts else "x"
        system, user, assistant = ({"role": role, "content": content} for role in ("system", "user", "assistant"))
        own = self.messages[:1] if self.messages[0]["role"] == "system" else []
        behind = [[user], [system, user], [*own, user]]
        if not empty:
            return behind
        return [[], own or [system], [user, assistant], *behind]

    def _indistinct(self, turn: int, rendered: str, trained: str) -> TurnsError:
        at = self._alike(rendered)
        one, other = (repr(text[at : at + _SHOWN_CHARS]) for text in (rendered, self.text))
        return TurnsError(
            f"{self._where}: messages[{turn}]: the chat template renders it as {printable(one)} by itself and as "
            f"{printable(other)} in the whole conversation, so Penstock cannot tell which tokens to train; "
            f"{self._ways_out(turn, trained)}"
        )

    def _ways_out(self, turn: int, trained: str) -> str:
        """What makes a conversation usable of which this turn cannot be determined."""
        last, ways = len(self.messages) - 1, ["data.trained_tokens=all"]
        if trained != "last" and turn != last and self.messages[last]["role"] == "assistant":
            with suppress(RowError):
                self._nested([last], "last")
                ways = ["data.trained_tokens=last or all", f"`weight` of messages[{turn}] to 0"]
        return f"set {', '.join(ways)}, or data.chat_template to a template with generation markers"

    # What the template shows

    def fault(self) -> FormError | None:
        """What is wrong with the form of contents and arguments: they come out in Python's form, or as JSON of JSON."""
        for number, message in enumerate(self.messages):
            content, what = message.get("content"), ""
            if isinstance(content, list) and str(content) in self.text:
                what = "`content` is a list of parts, which the chat template prints as Python does"
            for arguments in [call.get("arguments") for call in _calls(message)]:
                if isinstance(arguments, str) and json.dumps(arguments, ensure_ascii=False) in self.text:
                    what = what or "the chat template makes JSON of arguments that are JSON already"
                if any(str(value) in self.text for value in _unlike_json(arguments)):
                    what = what or (
                        "arguments of a call are an object, which the chat template prints as Python does, or a part "
                        "of it; give them as JSON text, or another template with data.chat_template"
                    )
            if what:
                return FormError(f"{self._where}: messages[{number}]: {what}")
        return None

    @cached_property
    def unshown(self) -> list[int]:
        """Messages whose texts do not come out of the template."""
        return [number for number in range(len(self.messages)) if not self._shows(number, self.text)]

    def _shows(self, number: int, rendered: str) -> bool:
        """Whether a rendering has what a message says: its text, without thoughts before it, and its calls.

        A template may write a text another way. Then it is shown where another text makes another rendering, which is
        tried of each sort of message as well, as what a text says may stand elsewhere.
        """
        message = self.messages[number]
        if any(call["name"] not in rendered for call in _calls(message)):
            return False
        content: Any = message.get("content")
        texts = content_texts(content)
        sort = (message["role"], type(content), "tool_calls" in message, number + 1 == len(self.messages))
        for index, text in enumerate(texts):
            said = text.rpartition("</think>")[2].strip()
            if not said or (sort in self._seen and said in rendered):
                continue
            other = _OTHER if isinstance(content, str) else _with_text(content, index)
            result = self._with(number, message | {"content": other})
            if result == self.text:
                return False
            if result is not None and _OTHER in result and len(texts) == 1:
                self._seen.add(sort)
        if (sort, "arguments") in self._seen or not any(call.get("arguments") for call in _calls(message)):
            return True
        result = self._with(number, with_functions(message, _with_other_arguments))
        if result is not None and result != self.text:
            self._seen.add((sort, "arguments"))
        return result != self.text

    def _with(self, number: int, message: dict[str, Any]) -> str | None:
        """The text of the conversation with another message in a place; None where the template refuses it."""
        return self._try([*self.messages[:number], message, *self.messages[number + 1 :]])


def _with_text(parts: list[Any], index: int) -> list[Any]:
    """A list of parts of which text number `index` is another."""
    at = [number for number, part in enumerate(parts) if not is_image(part)][index]
    part = _OTHER if isinstance(parts[at], str) else parts[at] | {"text": _OTHER}
    return [*parts[:at], part, *parts[at + 1 :]]


def _with_other_arguments(function: dict[str, Any]) -> dict[str, Any]:
    if not (arguments := function.get("arguments")):
        return function
    other = {_OTHER: _OTHER}
    return function | {"arguments": json.dumps(other) if isinstance(arguments, str) else other}


def with_functions(message: dict[str, Any], changed: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """A message with each of its calls' functions `changed`."""
    result = dict(message)
    if "function_call" in message:
        result["function_call"] = changed(message["function_call"])
    if "tool_calls" in message:
        result["tool_calls"] = [
            call | {"function": changed(call["function"])} if "function" in call else changed(call)
            for call in message["tool_calls"]
        ]
    return result


def _calls(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for call in message.get("tool_calls", []):
        yield call.get("function", call)
    if "function_call" in message:
        yield message["function_call"]


def _unlike_json(value: Any) -> Iterator[Any]:
    """The objects and lists in a value, itself among them, that Python prints otherwise than JSON has them."""
    if isinstance(value, dict | list):
        if str(value) != json.dumps(value, ensure_ascii=False):
            yield value
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _unlike_json(inner)
