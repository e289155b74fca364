"""Chat templates: the text, and which tokens of it are trained, against transformers' own mask."""

import contextlib
import functools
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from chat_templates import BOS, CHATML, EOS, LLAMA, PLAIN, THINKING, make_tokenizer, unmarked
from hypothesis import given
from hypothesis import strategies as st
from published_templates import KINDS, NAMES, PAGE, PUBLISHED, compare
from random_templates import ROLE_TOKENS, SHAPES, Shape, conversations
from samples import cases, sampled
from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer

from penstock.engine.config import DataConfig
from penstock.engine.data.samples import Conversation, Encoded
from penstock.engine.data.text.encode import Encoder
from penstock.engine.data.text.tokenizer import load_tokenizer
from penstock.storage.files.errors import UserError

USER, BOT = {"role": "user", "content": "And 2 + 3?"}, {"role": "assistant", "content": "  It is 5 ☃, naïve!  "}
CHAT = [{"role": "system", "content": "Be brief."}, USER, BOT, USER | {"content": "Thanks."}, BOT | {"content": "No."}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("chat") / "tokenizer")


loaded = functools.cache(load_tokenizer)


def encoder_of(folder: Path, template: str, tmp_path: Path, **more: Any) -> Encoder:
    file = tmp_path / "template.jinja"
    file.write_text(template)
    return Encoder(DataConfig(source="messages", chat_template=str(file), **more), loaded(folder))


def encoded(encoder: Encoder, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> Encoded:
    (found,) = encoder.encode([Conversation("rows.jsonl:7", messages, tools)])
    return found


def trained(encoder: Encoder, found: Encoded) -> list[str]:
    runs = itertools.groupby(zip(found.ids.tolist(), found.weights.tolist(), strict=True), key=lambda pair: pair[1] > 0)
    return [encoder._tokenizer.decode([token for token, _ in run]) for is_trained, run in runs if is_trained]


def refused(encoder: Encoder, messages: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        encoded(encoder, messages)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("template", [CHATML, LLAMA], ids=["chatml", "llama"])
def test_ids_and_mask_are_transformers_own(folder: Path, tmp_path: Path, template: str) -> None:
    plain = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    for messages in (CHAT, CHAT[1:], CHAT[:3], CHAT[:4]):
        asked = {"chat_template": template, "return_dict": True, "return_assistant_tokens_mask": True}
        expected = plain.apply_chat_template(messages, **asked)
        for used in (template, unmarked(template)):
            found = encoded(encoder_of(folder, used, tmp_path), messages)
            assert found.ids.tolist() == expected["input_ids"]
            assert found.weights.tolist() == expected["assistant_masks"]


@pytest.mark.parametrize("name", ["gemma", "gemma3", "llama3", "phi3", "phi3_5", "lfm2", "qwen3_instruct_2507"])
def test_prefixes_of_published_templates_tell_what_training_ones_mark(folder: Path, tmp_path: Path, name: str) -> None:
    """Where models' own templates have no markers, TRL has a copy with them for each."""
    own, marked = ((PUBLISHED / f"{name}{kind}.jinja").read_text() for kind in ("", "_training"))
    assert "generation -%}" not in own.replace("add_generation", "")
    one, other = (encoded(encoder_of(folder, text, tmp_path), CHAT[1:]) for text in (own, marked))
    assert one.ids.tolist() == other.ids.tolist()
    assert one.weights.tolist() == other.weights.tolist()


@pytest.mark.parametrize("name", cases(NAMES, "gptoss", "lfm2_v2", "qwen2_5", "smolvlm"))
def test_the_page_says_what_becomes_of_conversations_under_published_templates(name: str) -> None:
    cells = list(compare(name).values())
    assert "DIFFERENT" not in cells
    assert re.search(rf"^\|[\w, ]* {name}[, ][\w, ]*\| {re.escape(' | '.join(cells))} \|$", PAGE.read_text(), re.M)
    assert len(NAMES) >= 30
    assert len(KINDS) == len(cells)


WORDS = st.text(st.sampled_from("ab é☃\n .<|>"), max_size=12).map(lambda text: "x" + text)
TURNS = st.lists(st.tuples(st.sampled_from(["user", "assistant", "system"]), WORDS), min_size=1, max_size=6)


@sampled(25, 300)
@given(turns=TURNS)
def test_prefixes_tell_what_markers_tell(folder: Path, turns: list[tuple[str, str]]) -> None:
    messages = [{"role": role, "content": text} for role, text in [("user", "x"), *turns, ("assistant", "x")]]
    for template in (CHATML, LLAMA):
        both = []
        for used in (template, unmarked(template)):
            found = encoded(encoder_of(folder, used, folder.parent), messages)
            both.append((found.ids.tolist(), found.weights.tolist()))
        assert both[0] == both[1]
        assert 1 in both[0][1]


def test_prefixes_that_do_not_nest_are_refused_with_the_ways_out(folder: Path, tmp_path: Path) -> None:
    message = (
        r"rows\.jsonl:7: messages\[2\]: the chat template renders it as '<think>.* by itself and as .* in the whole "
        r"conversation, .*set data\.trained_tokens=last or all, `weight` of messages\[2\] to 0, or data\.chat_template "
        r"to a template with generation"
    )
    refused(encoder_of(folder, THINKING, tmp_path), CHAT, message)
    one = encoder_of(folder, THINKING, tmp_path)
    assert trained(one, encoded(one, CHAT[:3]))[0].startswith("<think>\n\n</think>\n\n  It is")
    last = encoder_of(folder, THINKING, tmp_path, trained_tokens="last")
    assert trained(last, encoded(last, CHAT)) == ["<think>\n\n</think>\n\nNo.<|im_end|>\n"]
    whole = encoded(encoder_of(folder, THINKING, tmp_path, trained_tokens="all"), CHAT)
    assert whole.weights is None
    assert whole.ids.tolist() == encoded(last, CHAT).ids.tolist()
    longer = unmarked(CHATML).replace("assistant\\n' -}}{%- endif", "assistant\\n<think>' -}}{%- endif")
    assert longer != unmarked(CHATML)
    refused(encoder_of(folder, longer, tmp_path, trained_tokens="last"), CHAT, r"set data\.trained_tokens=all, or")
    skipping = encoder_of(folder, THINKING, tmp_path, bad_rows="skip")
    assert len(skipping.encode([Conversation("a", CHAT), Conversation("b", CHAT[:3])])) == 1
    assert skipping.bad.count == 1


PIECES = CHATML.replace(
    "{{- message.content + '<|im_end|>\\n' -}}{%- endgeneration -%}",
    "{{- message.content -}}{%- endgeneration -%}{%- generation -%}{{- '<|im_end|>\\n' -}}{%- endgeneration -%}",
)
"""Markers in several pieces belong to their turn."""
assert PIECES.count("endgeneration") == 2


@pytest.mark.parametrize("template", [CHATML, unmarked(CHATML), PIECES], ids=["markers", "prefixes", "pieces"])
def test_the_last_turn_and_weights_of_messages(folder: Path, tmp_path: Path, template: str) -> None:
    last = encoder_of(folder, template, tmp_path, trained_tokens="last")
    assert trained(last, encoded(last, CHAT)) == ["No.<|im_end|>\n"]
    assert trained(last, encoded(last, CHAT[:4])) == ["  It is 5 ☃, naïve!  <|im_end|>\n"]
    weighted = [CHAT[0], USER, BOT | {"weight": 0.5}, USER, BOT | {"weight": 0}, USER, BOT]
    every = encoder_of(folder, template, tmp_path)
    found, unweighted = encoded(every, weighted), encoded(every, [CHAT[0], USER, BOT, USER, BOT, USER, BOT])
    assert found.ids.tolist() == unweighted.ids.tolist()
    assert set(found.weights.tolist()) == {0, 0.5, 1}
    assert len(trained(every, found)) == 2
    marks = encoded(encoder_of(folder, CHATML, tmp_path), weighted)
    assert found.weights.tolist() == marks.weights.tolist()
    refused(every, CHAT[:2], "no token to train: there is no assistant message; set data.trained_tokens=all")
    refused(every, [USER, BOT | {"weight": 0}], "no token to train: all assistant messages have weight 0")


def test_tools_are_passed_and_arguments_are_objects(folder: Path, tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city":  "Paris"}'}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    messages = [USER, {"role": "assistant", "tool_calls": [call]}]
    encoder = encoder_of(folder, THINKING, tmp_path)
    found = encoded(encoder, messages, tools)
    assert trained(encoder, found)[0].endswith('<tool_call>weather{"city": "Paris"}<|im_end|>\n')
    assert encoder._tokenizer.decode(found.ids).startswith('<|im_start|>tool\n{"type": "function"')
    joined = THINKING.replace("(call.function.arguments | tojson)", "call.function.arguments")
    encoder = encoder_of(folder, joined, tmp_path)
    assert trained(encoder, encoded(encoder, messages, tools))[0].endswith('weather{"city":  "Paris"}<|im_end|>\n')


def test_what_a_template_refuses_is_one_line(folder: Path, tmp_path: Path) -> None:
    strict = "{{- raise_exception('only\\nusers') if messages[0].role != 'user' -}}" + unmarked(CHATML)
    refused(encoder_of(folder, strict, tmp_path), CHAT, r"rows\.jsonl:7: the chat template refuses .*: only users")
    loose = "{{- messages[0].role.nothing.at_all -}}" + unmarked(CHATML)
    refused(encoder_of(folder, loose, tmp_path), CHAT, "has no attribute")
    escape = "{{- ''.__class__.__mro__ -}}" + unmarked(CHATML)
    refused(encoder_of(folder, escape, tmp_path), CHAT, "unsafe|undefined|no attribute|refuses")
    alone = "{{- raise_exception('no user') if messages[-1].role == 'system' -}}" + unmarked(LLAMA).replace(
        "assistant<|end_header_id|>\\n\\n' -}}{%- endif", "assistant<|end_header_id|>\\n\\n<think>' -}}{%- endif"
    )
    told = r"messages\[1\]: the chat template refuses the messages before it: .*no user.*set data\.trained_tokens=all"
    refused(encoder_of(folder, alone, tmp_path), [CHAT[0], BOT], told)
    with pytest.raises(UserError, match=r"template\.jinja is not a valid Jinja template: line 1"):
        encoded(encoder_of(folder, "{% if %}", tmp_path), CHAT)


def test_where_the_template_comes_from(folder: Path, tmp_path: Path) -> None:
    config = DataConfig(source="messages")
    own = Encoder(config, load_tokenizer(make_tokenizer(tmp_path / "own", unmarked(LLAMA))))
    expected = encoded(own, CHAT).ids.tolist()
    make_tokenizer(tmp_path / "processor")
    (tmp_path / "processor" / "chat_template.json").write_text(json.dumps({"chat_template": unmarked(LLAMA)}))
    named = Encoder(config, load_tokenizer(tmp_path / "processor"))
    assert encoded(named, CHAT).ids.tolist() == expected
    several = tmp_path / "several.json"
    templates = [{"name": "default", "template": LLAMA}, {"name": "tool_use", "template": CHATML}]
    several.write_text(json.dumps({"chat_template": templates}))
    encoder = Encoder(DataConfig(source="messages", chat_template=str(several)), load_tokenizer(folder))
    assert encoded(encoder, CHAT).ids.tolist() == expected
    assert encoder._tokenizer.decode(encoded(encoder, CHAT, [{"name": "a"}]).ids).startswith("<|im_start|>")
    none = Encoder(config, load_tokenizer(folder))
    refused(none, CHAT, r"data\.chat_template: rows\.jsonl:7 is a conversation, and the tokenizer has no chat template")
    missing = Encoder(DataConfig(source="messages", chat_template=str(tmp_path / "none")), load_tokenizer(folder))
    refused(missing, CHAT, r"data\.chat_template: .*none cannot be read")
    assert len({encoder.fingerprint for encoder in (own, named, encoder, none)}) == 3
    assert own.fingerprint == named.fingerprint


def test_a_turn_that_no_token_ends_is_ended_by_the_end_of_text(folder: Path, tmp_path: Path) -> None:
    encoder = encoder_of(folder, PLAIN, tmp_path)
    found = encoded(encoder, CHAT)
    assert found.ids[-1] == encoder._tokenizer.eos_id
    assert found.weights.tolist()[-1] == 1
    assert trained(encoder, found)[-1] == f"No.\n{EOS}"
    asked = encoded(encoder, CHAT[:4])
    assert asked.ids[-1] != encoder._tokenizer.eos_id
    ended = encoder_of(folder, unmarked(LLAMA), tmp_path)
    text = ended._tokenizer.decode(encoded(ended, CHAT).ids)
    assert text.startswith(f"{BOS}<|start_header_id|>system")
    assert text.endswith("No.<|eot_id|>")
    assert text.count(BOS) == 1


@pytest.fixture(scope="module")
def random_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("random") / "tokenizer", special=ROLE_TOKENS)


@sampled(120, 3000, deadline=None)
@given(shape=SHAPES, conversation=conversations())
def test_random_templates_are_trained_as_by_hand_or_refused(
    random_folder: Path, shape: Shape, conversation: tuple[list[dict[str, Any]], list[dict[str, Any]] | None]
) -> None:
    messages, tools = conversation
    encoder = encoder_of(random_folder, shape.jinja(), random_folder.parent)
    refusals = contextlib.suppress(UserError) if shape.may_refuse(messages) else contextlib.nullcontext()
    found = None
    with refusals:
        found = encoded(encoder, messages, tools)
    if found is None:
        return
    text, marks = shape.right(messages, tools)
    plain = AutoTokenizer.from_pretrained(random_folder, local_files_only=True)
    whole = plain(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, spans = whole["input_ids"], [marks[start:stop] for start, stop in whole["offset_mapping"]]
    weights = [None if None in span else float(any(span)) for span in spans]
    if messages[-1]["role"] == "assistant" and not text.rstrip().endswith(
        tuple(map(str, plain.added_tokens_decoder.values()))
    ):
        ids, weights = [*ids, plain.eos_token_id], [*weights, 1.0]
    assert found.ids.tolist() == ids
    pairs = zip(found.weights.tolist(), weights, strict=True)
    assert [had for had, wanted in pairs if wanted is not None] == [one for one in weights if one is not None]


ENDED = unmarked(CHATML).replace("message.content + '<|im_end|>\\n'", "message.content + ending")
OLMO = "{%- set every = messages -%}" + ENDED.replace(
    "{%- for message in messages -%}",
    "{%- if messages[0].role != 'system' -%}{{- '<|im_start|>system\\nBe good.<|im_end|>\\n' -}}{%- endif -%}"
    "{%- for message in messages -%}{%- set ending = '<|im_end|>\\n' -%}"
    "{%- if loop.last and message.role == 'assistant' -%}{%- set ending = eos_token -%}{%- endif -%}",
)
"""As Olmo 3's: the last answer alone ends with the end-of-text token, and a system message is put in."""
GLM = (
    "{%- for m in messages -%}{{- '<|' + m.role + '|>\\n' + m.content -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
ALWAYS = "{%- for m in messages -%}{{- '<|' + m.role + '|>' + m.content + '<|im_end|>' -}}{%- endfor -%}<|assistant|>"


def test_what_ends_a_turn_is_trained(folder: Path, random_folder: Path, tmp_path: Path) -> None:
    assert OLMO.count("ending") == 4
    for messages in (CHAT, CHAT[1:]):
        encoder = encoder_of(folder, OLMO, tmp_path)
        assert trained(encoder, encoded(encoder, messages)) == ["  It is 5 ☃, naïve!  <|im_end|>\n", f"No.{EOS}"]
    encoder = encoder_of(random_folder, GLM, tmp_path)
    assert trained(encoder, encoded(encoder, CHAT)) == ["\n  It is 5 ☃, naïve!  <|user|>", f"\nNo.{EOS}"]
    encoder = encoder_of(random_folder, ALWAYS, tmp_path)
    assert trained(encoder, encoded(encoder, CHAT)) == ["  It is 5 ☃, naïve!  <|im_end|>", "No.<|im_end|>"]


def test_a_conversation_may_begin_with_the_assistant(folder: Path, tmp_path: Path) -> None:
    for template in (CHATML, unmarked(CHATML), unmarked(LLAMA)):
        strict = "{{- raise_exception('no message') if not messages -}}" + template
        encoder = encoder_of(folder, strict, tmp_path)
        first, second = trained(encoder, encoded(encoder, CHAT[2:]))
        assert (first.strip()[:7], second[:3]) == ("It is 5", "No.")
        assert first.rstrip().endswith("|>")


PARTS = "{%- for part in message.content if part.type == 'text' -%}{{- part.text -}}{%- endfor -%}"
BOTH = "{%- if message.content is string -%}{{- message.content -}}{%- else -%}" + PARTS + "{%- endif -%}"


def test_content_in_parts(folder: Path, tmp_path: Path) -> None:
    """As the template takes them; joined for one that takes texts alone, and never printed as Python prints a list."""
    parts = [USER, BOT | {"content": [{"type": "text", "text": "So"}, {"type": "text", "text": " it is"}]}]
    texts = [USER | {"content": "Why?"}, BOT | {"content": "So it is"}]
    for template in (unmarked(CHATML), unmarked(CHATML).replace("message.content", "(message.content ~ '')")):
        encoder = encoder_of(folder, template, tmp_path)
        assert trained(encoder, encoded(encoder, parts)) == ["So it is<|im_end|>\n"]
    reading = unmarked(CHATML).replace("{{- message.content + '<|im_end|>\\n' -}}", "{}{{- '<|im_end|>\\n' -}}")
    for how in (PARTS, BOTH):
        encoder = encoder_of(folder, reading.replace("{}", how), tmp_path)
        every = [USER | {"content": [{"type": "text", "text": USER["content"]}]}, parts[1]]
        assert trained(encoder, encoded(encoder, every)) == ["So it is<|im_end|>\n"]
    assert trained(encoder, encoded(encoder, texts)) == ["So it is<|im_end|>\n"]
    first = encoder_of(folder, reading.replace("{}", "{{- message.content[0].text -}}"), tmp_path)
    refused(first, [every[0], parts[1]], r"leaves out what messages\[1\] says")
    told = r"messages\[0\]: the chat template reads `content` as a list of parts, and shows nothing of a text; give it"
    refused(encoder_of(folder, reading.replace("{}", PARTS), tmp_path), texts, told)
    prompt = encoder_of(folder, reading.replace("{}", PARTS), tmp_path).template.prompt(
        [{"role": "user", "content": "?"}]
    )
    assert prompt == "<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n"


def test_arguments_are_never_printed_as_python_prints_them(folder: Path, tmp_path: Path) -> None:
    def calling(arguments: Any) -> list[dict[str, Any]]:
        return [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": arguments}}]}]

    text = '{"city": "Rome", "ok": true}'
    for how in ("{{- call.function.arguments -}}", "{{- '' ~ call.function.arguments -}}"):
        printing = THINKING.replace(
            "{{- '<tool_call>' + call.function.name + (call.function.arguments | tojson) -}}",
            "{{- call.function.name -}}" + how,
        )
        assert how in printing
        encoder = encoder_of(folder, printing, tmp_path)
        assert trained(encoder, encoded(encoder, calling(text)))[0].endswith(f"weather{text}<|im_end|>\n")
        refused(
            encoder,
            calling({"city": "Rome"}),
            r"messages\[1\]: arguments of a call are an object, which the chat .*JSON",
        )
    encoder = encoder_of(folder, THINKING, tmp_path)
    for arguments in (text, json.loads(text)):
        assert trained(encoder, encoded(encoder, calling(arguments)))[0].endswith(f"weather{text}<|im_end|>\n")


def test_a_turn_whose_text_is_left_out_is_refused(folder: Path, tmp_path: Path) -> None:
    content = "'x' if message.role == 'assistant' else message.content"
    silent = unmarked(CHATML).replace(
        "{{- '<|im_start|>'",
        "{%- set message = {'role': message.role, 'content': " + content + "} -%}{{- '<|im_start|>'",
        1,
    )
    refused(encoder_of(folder, silent, tmp_path), CHAT, r"leaves out what messages\[2\] says")
    call = [USER, BOT | {"tool_calls": [{"function": {"name": "weather", "arguments": {}}}]}]
    name = "message.content + (message.tool_calls[0].function.name if message.tool_calls else '') +"
    named = unmarked(CHATML).replace("message.content +", name)
    calls = [
        [USER, BOT | {"tool_calls": [{"function": {"name": "weather", "arguments": given_}}]}]
        for given_ in ({"a": 1}, '{"a": 1}')
    ]
    for calling in calls:
        refused(encoder_of(folder, named, tmp_path), calling, r"leaves out what messages\[1\] says")
    refused(
        encoder_of(folder, CHATML, tmp_path), call, r"leaves out what messages\[1\] says.*set the message's weight to 0"
    )


def test_no_part_of_arguments_is_printed_as_python_prints_it(folder: Path, tmp_path: Path) -> None:
    call = "{{- '<tool_call>' + call.function.name + (call.function.arguments | tojson) -}}"
    items = (
        "{{- call.function.name -}}{%- for k, v in call.function.arguments.items() -%}{{- k ~ '=' ~ v -}}{%- endfor -%}"
    )
    assert call in THINKING
    encoder = encoder_of(folder, THINKING.replace(call, items), tmp_path)
    inner: dict[str, Any] = {"city": {"name": "Rome"}}
    for arguments in (inner, json.dumps(inner), {"days": ["Monday"]}):
        function = {"name": "weather", "arguments": arguments}
        calling = [USER, {"role": "assistant", "tool_calls": [{"function": function}]}]
        refused(encoder, calling, r"messages\[1\]: arguments of a call are an object, which .* or a part of it; give")
    function = {"name": "weather", "arguments": '{"city": "Rome", "days": [1, 2]}'}
    found = encoded(encoder, [USER, {"role": "assistant", "tool_calls": [{"function": function}]}])
    assert trained(encoder, found)[0].endswith("weathercity=Romedays=[1, 2]<|im_end|>\n")


def test_what_anybody_says_is_shown_or_the_conversation_is_refused(folder: Path, tmp_path: Path) -> None:
    deaf = unmarked(CHATML).replace("for message in messages", "for message in messages if message.role != 'system'")
    refused(encoder_of(folder, deaf, tmp_path), CHAT, r"messages\[0\]: .* leaves out what the message of role 'system'")
    other = [
        USER | {"content": [{"type": "input_text", "text": "?"}]},
        BOT | {"content": [{"type": "text", "text": "x"}]},
    ]
    reading = unmarked(CHATML).replace("{{- message.content + '<|im_end|>\\n' -}}", BOTH + "{{- '<|im_end|>\\n' -}}")
    encoder = encoder_of(folder, reading.replace("{%- if message.content is string -%}", "{%- if false -%}"), tmp_path)
    refused(encoder, other, r"messages\[0\]: the chat template leaves out what the message of role 'user' says; remove")


def test_functions_as_they_were_before_tools_are_rendered_as_they_stand(folder: Path, tmp_path: Path) -> None:
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    talk = [USER, {"role": "assistant", "function_call": function}, {"role": "function", "content": "sun"}, BOT]
    call = "{%- for call in message.tool_calls or [] -%}"
    assert call in THINKING
    old = THINKING.replace(call, "{%- for call in [{'function': message.function_call}] if message.function_call -%}")
    for template, role in ((THINKING, "tool"), (old, "function")):
        encoder = encoder_of(folder, template, tmp_path, trained_tokens="all")
        text = encoder._tokenizer.decode(encoded(encoder, talk).ids)
        assert f'<tool_call>weather{{"city": "Rome"}}<|im_end|>\n<|im_start|>{role}\nsun<|im_end|>' in text


def test_a_row_gives_its_template_what_it_names(folder: Path, tmp_path: Path) -> None:
    template = "{%- if thinks is defined and not thinks -%}{{- '/no' -}}{%- endif -%}" + CHATML
    encoder = encoder_of(folder, template, tmp_path)
    plain = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    for named in (None, {"thinks": False}, {"thinks": True}):
        (found,) = encoder.encode([Conversation("c", CHAT, None, named)])
        expected = plain.apply_chat_template(CHAT, chat_template=template, tokenize=False, **(named or {}))
        assert plain.decode(found.ids) == expected


@pytest.mark.parametrize("special", [True, False])
def test_a_token_that_was_added_and_is_not_special_ends_turns_as_well(tmp_path: Path, special: bool) -> None:
    """As `add_tokens` of transformers adds those of ChatML to a base model."""
    added = [AddedToken(name, special=special, normalized=False) for name in ("<|s|>", "<|e|>")]
    folder = make_tokenizer(tmp_path / "added")
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    (backend.add_special_tokens if special else backend.add_tokens)(added)
    backend.save(str(folder / "tokenizer.json"))
    template = unmarked(CHATML).replace("<|im_start|>", "<|s|>").replace("<|im_end|>", "<|e|>")
    encoder = encoder_of(folder, template, tmp_path)
    assert trained(encoder, encoded(encoder, CHAT)) == ["  It is 5 ☃, naïve!  <|e|>\n", "No.<|e|>\n"]
    thinks = template.replace("message.content + '<|e|>", "message.content + '</e>").replace("<|s|>", "<|im_start|>")
    encoder = encoder_of(folder, thinks, tmp_path)
    assert trained(encoder, encoded(encoder, CHAT))[0].endswith("</e>\n<|im_start|>"), "the next message ends it"
