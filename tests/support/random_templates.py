"""Chat templates of the shapes that published ones have, drawn at random, and what is right of each: a second renderer,
written by hand, that says of every character whether the owner of the data would mark it as trained."""

import json
from dataclasses import dataclass, replace
from typing import Any

from chat_templates import BOS, EOS
from hypothesis import strategies as st

HEADERS = {
    "chatml": ("<|im_start|>{}\n", ""),
    "llama": ("<|start_header_id|>{}<|end_header_id|>\n\n", ""),
    "text": ("### {}:\n", ""),
    "token": ("<|{}|>", ""),
    "inst": ("", " [/INST]"),
}
"""Style -> what stands before a message of a role, and behind a user's."""
ENDS = ("<|im_end|>\n", "<|im_end|>", "<|eot_id|>", EOS, "\n")
ROLE_TOKENS = ("<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "[INST]")
"""Beside those of chat_templates.SPECIAL."""


@dataclass(frozen=True)
class Shape:
    """What a template does."""

    header: str
    end: str
    bos: bool
    default_system: bool
    last_end: str | None
    """What ends the last turn of the assistant in place of `end`."""
    end_before_next: bool
    """What ends a turn is written at the beginning of the next."""
    eos_behind_all: bool
    content: str
    """text, trim, parts, both; concat: raises for parts."""
    markers: str
    """none, turn, content."""
    thoughts: str
    """none, last (dropped from earlier turns), all; empty: empty ones in the last turn."""
    prompt_thinks: bool
    calls: str
    """json, print, either."""

    def jinja(self) -> str:
        before, behind_user = HEADERS[self.header]
        header = "{{ '" + before.format("' ~ message.role ~ '").replace("\n", "\\n") + "' }}"
        if self.header == "inst":
            header = "{% if message.role != 'assistant' %}{{ '[INST] ' }}{% endif %}"
        contents = {
            "text": "{{ message.content }}",
            "trim": "{{ message.content | trim }}",
            "concat": "{{ '' + message.content }}",
            "parts": "{% for part in message.content if part.type == 'text' %}{{ part.text }}{% endfor %}",
        }
        contents["both"] = (
            "{% if message.content is string %}" + contents["text"] + "{% else %}" + contents["parts"] + "{% endif %}"
        )
        content = "{% if message.content %}" + contents[self.content] + "{% endif %}"
        thought = {
            "none": "",
            "last": "{% if message.reasoning_content and loop.index0 > last.user %}<think>{{ message.reasoning_content "
            "}}</think>{% endif %}",
            "all": "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}",
            "empty": "{% if loop.index0 > last.user %}<think></think>{% endif %}",
        }[self.thoughts]
        arguments = {
            "json": "{{ call.function.arguments | tojson }}",
            "print": "{{ call.function.arguments }}",
            "either": "{% if call.function.arguments is string %}{{ call.function.arguments }}{% else %}"
            "{{ call.function.arguments | tojson }}{% endif %}",
        }[self.calls]
        calls = (
            "{% for call in message.tool_calls or [] %}<call>{{ call.function.name }} "
            + arguments
            + "</call>{% endfor %}"
        )
        end = "{{ '" + self.end.replace("\n", "\\n") + "' }}"
        if self.last_end is not None:
            end = "{% if loop.last %}" + self.last_end + "{% else %}" + end + "{% endif %}"
        body, tail = thought + content + calls, "" if self.end_before_next else end
        if self.markers == "turn":
            body = "{% generation %}" + body + tail + "{% endgeneration %}"
        elif self.markers == "content":
            body = "{% generation %}" + body + "{% endgeneration %}" + tail
        else:
            body += tail
        others = content + ("" if self.end_before_next else "{{ '" + self.end.replace("\n", "\\n") + "' }}")
        if self.header == "inst":
            others = content + behind_user
        between = "{% if not loop.first %}" + end + "{% endif %}" if self.end_before_next else ""
        system = "{{ '" + (self._message_text("system", "Be good.")).replace("\n", "\\n") + "' }}"
        return (
            "{% set last = namespace(user=-1) %}"
            "{% for message in messages %}{% if message.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}"
            "{% endfor %}"
            + ("{{ bos_token }}" if self.bos else "")
            + "{% if tools %}{{ tools | tojson }}{% endif %}"
            + ("{% if messages[0].role != 'system' %}" + system + "{% endif %}" if self.default_system else "")
            + "{% for message in messages %}"
            + between
            + header
            + "{% if message.role == 'assistant' %}"
            + body
            + "{% else %}"
            + others
            + "{% endif %}{% endfor %}"
            + "{% if add_generation_prompt %}"
            + ("{{ '" + self.end.replace("\n", "\\n") + "' }}" if self.end_before_next else "")
            + "{{ '"
            + ("" if self.header == "inst" else before.format("assistant").replace("\n", "\\n"))
            + ("<think>" if self.prompt_thinks else "")
            + "' }}"
            + ("{% else %}" + EOS if self.eos_behind_all else "")
            + "{% endif %}"
        )

    def _message_text(self, role: str, text: str) -> str:
        if self.header == "inst":
            return f"[INST] {text} [/INST]"
        return HEADERS[self.header][0].format(role) + text + ("" if self.end_before_next else self.end)

    def right(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
    ) -> tuple[str, list[bool | None]]:
        """The text, and of each character whether it is trained; None where that is all the same."""
        text = ""
        marks: list[bool | None] = []

        def write(piece: str, marked: bool | None = False) -> None:
            nonlocal text
            text += piece
            marks.extend([marked] * len(piece))

        write(BOS if self.bos else "")
        write(json.dumps(tools, ensure_ascii=False) if tools else "")
        if self.default_system and messages[0]["role"] != "system":
            write(self._message_text("system", "Be good."))
        last_user = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
        open_turn = False  # the assistant's turn before has written no special token that ends it
        for number, message in enumerate(messages):
            is_last, role = number + 1 == len(messages), message["role"]
            if self.end_before_next and number:
                write(self.end.rstrip(), open_turn)
                write(self.end[len(self.end.rstrip()) :], None if open_turn else False)
                open_turn = open_turn and not self.end.strip()
            begin = HEADERS[self.header][0].format(role)
            if self.header == "inst":
                begin = "" if role == "assistant" else "[INST] "
            token = next(
                (token for token in (*ROLE_TOKENS, "<|im_start|>", "<|start_header_id|>") if begin.startswith(token)),
                "",
            )
            write(token, open_turn and self.markers == "none")
            write(begin[len(token) :])
            said = (
                "".join(part["text"] for part in message["content"])
                if isinstance(message["content"], list)
                else message["content"]
            )
            if self.content == "trim":
                said = said.strip()
            if role != "assistant":
                open_turn = False
                write(said)
                write(" [/INST]" if self.header == "inst" else "" if self.end_before_next else self.end)
                continue
            thought = message.get("reasoning_content")
            if self.thoughts == "empty":
                thought = ""
            if (self.thoughts == "all" and thought) or (
                number > last_user and self.thoughts != "none" and thought is not None
            ):
                write("<think>", not (self.prompt_thinks and self.markers == "none"))
                write(f"{thought}</think>", True)
            write(said, True)
            for call in message.get("tool_calls", []):
                arguments = call["function"]["arguments"]
                if not isinstance(arguments, str):
                    arguments = json.dumps(arguments, ensure_ascii=False)
                write(f"<call>{call['function']['name']} {arguments}</call>", True)
            end = "" if self.end_before_next else self.end
            if self.last_end is not None and is_last and not self.end_before_next:
                end = {"{{ eos_token }}": EOS, "": ""}[self.last_end]
            write(end, self.markers != "content")
            open_turn = self.markers == "none" and not end.strip()
        write(EOS if self.eos_behind_all else "", self.markers == "none" and messages[-1]["role"] == "assistant")
        return text, marks

    def may_refuse(self, messages: list[dict[str, Any]]) -> bool:
        """Whether nobody could say which tokens to train, or the row has a form that the template cannot use."""
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        users = [i for i, message in enumerate(messages) if message["role"] == "user"]
        parted = any(isinstance(message["content"], list) for message in messages)
        objects = any(
            not isinstance(call["function"]["arguments"], str)
            for message in messages
            for call in message.get("tool_calls", [])
        )
        unmarked = self.markers == "none"
        return (
            (unmarked and self.prompt_thinks)
            or (unmarked and self.thoughts in ("last", "empty") and len(turns) > 1 and bool(users))
            or (unmarked and self.thoughts in ("last", "empty") and turns[0] == 0)
            or (self.content == "parts" and not parted)
            or (self.calls == "print" and objects)
            or (unmarked and self.end == "\n" and self.last_end is not None)
        )


SHAPES = st.builds(
    Shape,
    header=st.sampled_from(list(HEADERS)),
    end=st.sampled_from(ENDS),
    bos=st.booleans(),
    default_system=st.booleans(),
    last_end=st.sampled_from([None, None, "{{ eos_token }}", ""]),
    end_before_next=st.sampled_from([False, False, False, True]),
    eos_behind_all=st.sampled_from([False, False, False, True]),
    content=st.sampled_from(["text", "trim", "parts", "both", "concat"]),
    markers=st.sampled_from(["none", "none", "turn", "content"]),
    thoughts=st.sampled_from(["none", "none", "last", "all", "empty"]),
    prompt_thinks=st.sampled_from([False, False, False, True]),
    calls=st.sampled_from(["json", "print", "either"]),
).map(lambda shape: replace(shape, last_end=None) if shape.end_before_next else shape)
WORDS = st.text(st.sampled_from("ab é☃\n .<|>{}\"'"), max_size=10).map(lambda text: f"x{text}y")
ARGUMENTS = st.dictionaries(st.sampled_from(["city", "n"]), st.one_of(WORDS, st.none(), st.booleans()), max_size=2)


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Messages that have an answer, all texts or all in parts, and the tools that they may call."""
    parted, as_text = draw(st.sampled_from([False, False, True])), draw(st.booleans())
    roles = draw(st.lists(st.sampled_from(["user", "assistant"]), min_size=0, max_size=4))
    if draw(st.booleans()):
        roles = ["system", *roles]
    roles.append("assistant")
    messages: list[dict[str, Any]] = []
    for role in roles:
        text = draw(WORDS)
        message: dict[str, Any] = {"role": role, "content": [{"type": "text", "text": text}] if parted else text}
        if role == "assistant" and draw(st.integers(0, 3)) == 0:
            message["reasoning_content"] = draw(WORDS)
        if role == "assistant" and draw(st.integers(0, 3)) == 0:
            arguments = draw(ARGUMENTS)
            call = {"name": "weather", "arguments": json.dumps(arguments, ensure_ascii=False) if as_text else arguments}
            message["tool_calls"] = [{"type": "function", "id": "a1", "function": call}]
        messages.append(message)
        if "tool_calls" in message and len(messages) < len(roles):
            said = [{"type": "text", "text": draw(WORDS)}] if parted else draw(WORDS)
            messages.append({"role": "tool", "tool_call_id": "a1", "name": "weather", "content": said})
    return messages, draw(st.sampled_from([None, TOOLS]))
