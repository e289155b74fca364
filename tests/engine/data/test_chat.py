"""Chat templates: the text, and which tokens of it are trained, against transformers' own mask."""

import functools
import importlib.util
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from chat_templates import BOS, CHATML, EOS, LLAMA, PLAIN, THINKING, make_tokenizer, unmarked
from hypothesis import given
from hypothesis import strategies as st
from samples import sampled
from transformers import AutoTokenizer

from penstock.engine.config import DataConfig
from penstock.engine.data.encode import Encoder
from penstock.engine.data.samples import Conversation, Encoded
from penstock.engine.data.tokenizer import load_tokenizer
from penstock.storage.errors import UserError

TRL: Any = importlib.util.find_spec("trl")
PUBLISHED = Path(TRL.origin).parent / "chat_templates"
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
        r"conversation, .*set data\.trained_tokens=last or all, or data\.chat_template to a template with generation"
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
    begins = unmarked(CHATML) + "{{- messages[0].role[:0] -}}"
    refused(encoder_of(folder, begins, tmp_path), CHAT[2:], "with its first 0 messages")
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
