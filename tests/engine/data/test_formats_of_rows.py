"""Formats of rows, from files as people have them, and what is refused of them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import sampled

from penstock.engine.config import DataConfig
from penstock.engine.data.formats.base import FORMATS, RowFormat, find_format
from penstock.engine.data.formats.detect import detect
from penstock.engine.data.formats.reading import read_samples
from penstock.engine.data.samples import BadRows, Completion, Conversation, Ids, RowError, Sample
from penstock.storage.files.errors import UserError

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}


def samples_of(folder: Path, source: str, *rows: Any, **more: Any) -> list[Sample]:
    file = folder / "rows.jsonl"
    file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return list(read_samples(DataConfig(**({"source": source, "path": str(file)} | more))))


def conversation(folder: Path, source: str, row: Any, **more: Any) -> Conversation:
    (sample,) = samples_of(folder, source, row, **more)
    assert isinstance(sample, Conversation)
    return sample


def turns(sample: Conversation) -> list[tuple[str, Any]]:
    return [(message["role"], message.get("content", "")) for message in sample.messages]


def test_messages_with_tools_and_parts_and_functions_as_they_stand(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "How is it "}, {"type": "text", "text": "there?"}]
    row = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": parts},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "weight": 0},
            {"role": "tool", "content": "sunny", "tool_call_id": "1", "name": "weather"},
            {"role": "assistant", "content": "Sunny.", "tool_calls": None},
        ],
        "tools": [WEATHER],
        "id": 7,
    }
    sample = conversation(tmp_path, "messages", row)
    assert turns(sample)[1:3] == [("user", parts), ("assistant", "")]
    assert "content" not in sample.messages[2]
    assert sample.messages[2]["tool_calls"] == [CALL]
    assert sample.messages[2]["weight"] == 0
    assert sample.messages[3]["name"] == "weather"
    assert "tool_calls" not in sample.messages[4]
    assert sample.tools == [WEATHER]
    assert sample.where.endswith("rows.jsonl:1")
    old = {
        "messages": [
            {"role": "assistant", "content": None, "function_call": CALL["function"]},
            {"role": "function", "name": "weather", "content": "sunny"},
        ]
    }
    sample = conversation(tmp_path, "messages", old)
    assert sample.messages[0] == {"role": "assistant", "function_call": CALL["function"]}
    assert sample.messages[1]["role"] == "function"


def test_messages_come_as_json_in_a_column_of_csv(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    messages = json.dumps([{"role": "user", "content": 'say "a"'}, {"role": "assistant", "content": "a"}])
    file.write_text('messages,tools\n"' + messages.replace('"', '""') + '",\n')
    (sample,) = read_samples(DataConfig(source="messages", path=str(file)))
    assert isinstance(sample, Conversation)
    assert turns(sample) == [("user", 'say "a"'), ("assistant", "a")]
    assert sample.tools is None
    assert detect(file).source == "messages"


def test_sharegpt_with_tools(tmp_path: Path) -> None:
    row = {
        "conversations": [
            {"from": "human", "value": "Weather?"},
            {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Rome"}}'},
            {"from": "observation", "value": "rain"},
            {"from": "gpt", "value": "Rain.", "weight": 2},
        ],
        "system": "Be brief.",
        "tools": json.dumps([WEATHER]),
    }
    sample = conversation(tmp_path, "sharegpt", row)
    assert [role for role, _ in turns(sample)] == ["system", "user", "assistant", "tool", "assistant"]
    (call,) = sample.messages[2]["tool_calls"]
    assert call == {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    assert sample.messages[4] == {"role": "assistant", "content": "Rain.", "weight": 2}
    assert sample.tools == [WEATHER]
    roles = {"conversations": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    assert turns(conversation(tmp_path, "sharegpt", roles)) == [("user", "a"), ("assistant", "b")]


def test_alpaca_as_turns_and_as_its_own_prompt(tmp_path: Path) -> None:
    row = {"instruction": "Add.", "input": "1 and 2", "output": "3", "history": [["Hello", "Hi"]], "system": ""}
    sample = conversation(tmp_path, "alpaca", row)
    assert turns(sample) == [("user", "Hello"), ("assistant", "Hi"), ("user", "Add.\n\n1 and 2"), ("assistant", "3")]
    plain = conversation(tmp_path, "alpaca", {"instruction": "Say a.", "input": "", "output": "a"}).plain
    begin = "Below is an instruction that describes a task. Write a response that appropriately completes the request."
    assert plain.prompt == f"{begin}\n\n### Instruction:\nSay a.\n\n### Response:\n"
    assert plain.completion == "a"
    plain = conversation(tmp_path, "alpaca", row | {"system": "You add."}).plain
    assert plain.prompt.startswith("You add.\n\n### Instruction:\nHello\n\n### Response:\nHi\n\n### Instruction:\nAdd.")
    assert plain.prompt.endswith("\n\n### Input:\n1 and 2\n\n### Response:\n")


def test_prompt_and_completion_as_texts_and_as_messages(tmp_path: Path) -> None:
    (sample,) = samples_of(tmp_path, "prompt_completion", {"prompt": "1 + 1 =", "completion": " 2"})
    assert sample == Completion(str(tmp_path / "rows.jsonl:1"), "1 + 1 =", " 2")
    prompt = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    row = {"prompt": prompt, "completion": [{"role": "assistant", "content": "d"}]}
    found = conversation(tmp_path, "prompt_completion", row)
    assert [message.get("weight") for message in found.messages] == [0, 0, 0, None]
    row = {"text": "not this", "body": "this"}
    (named,) = samples_of(tmp_path, "jsonl", row, columns={"text": "body"})  # columns rename the fields
    assert named.text == "this"
    row = {"question": "a", "answer": "b"}
    (named,) = samples_of(tmp_path, "prompt_completion", row, columns={"prompt": "question", "completion": "answer"})
    assert named == Completion(str(tmp_path / "rows.jsonl:1"), "a", "b")
    with pytest.raises(UserError, match=r"data\.columns: 'words' is not a field of the format; it reads text"):
        samples_of(tmp_path, "jsonl", row, columns={"words": "question"})


def test_tokens_and_what_of_them_is_trained(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"input_ids": [5, 6, 7]},
        {"ids": [5, 6, 7], "labels": [-100, 6, 7]},
        {"tokens": [5, 6, 7, 0], "loss_mask": [0, 0.5, 1, 0], "attention_mask": [1, 1, 1, 0]},
        {"input_ids": [5, 6], "completion_mask": [False, True]},
        {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "loss_mask": [1, 0, 1], "weights": [1, 1, 0.5]},
        {"input_ids": [5, 6, 7], "completion_mask": [0, 1, 1], "assistant_masks": [0, 0, 1]},
        {
            "input_ids": [0, 5, 6],
            "attention_mask": [0, 1, 1],
            "position_ids": [0, 0, 1],
            "special_tokens_mask": [1, 0, 0],
        },
    ]
    found = samples_of(tmp_path, "tokens", *rows)
    assert [(sample.ids, sample.weights) for sample in found if isinstance(sample, Ids)] == [
        ([5, 6, 7], None),
        ([5, 6, 7], [0, 1, 1]),
        ([5, 6, 7], [0, 0.5, 1]),
        ([5, 6], [0, 1]),
        ([5, 6, 7], [0, 0, 0.5]),
        ([5, 6, 7], [0, 0, 1]),
        ([5, 6], None),
    ]


def test_what_stands_beside_messages_is_read_whatever_the_format(tmp_path: Path) -> None:
    turns_ = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    beside = {"system": "Be brief.", "tools": [json.dumps(WEATHER)], "chat_template_kwargs": {"thinks": False}}
    rows: dict[str, Any] = {
        "messages": {"messages": turns_},
        "sharegpt": {"conversations": turns_},
        "prompt_completion": {"prompt": turns_[:1], "completion": turns_[1:]},
    }
    for source, row in rows.items():
        sample = conversation(tmp_path, source, row | beside)
        assert turns(sample) == [("system", "Be brief."), ("user", "a"), ("assistant", "b")]
        assert (sample.tools, sample.given) == ([WEATHER], {"thinks": False})
        old = {name: value for name, value in beside.items() if name != "tools"} | {"functions": [WEATHER["function"]]}
        assert conversation(tmp_path, source, row | old).tools == [WEATHER]
    given = [{"role": "system", "content": "Be brief."}, *turns_]
    assert len(conversation(tmp_path, "messages", {"messages": given} | beside).messages) == 3


def test_a_message_keeps_what_it_has_and_may_say_in_other_words_that_it_is_not_trained(tmp_path: Path) -> None:
    said = {"role": "assistant", "content": "b"}
    for more in ({"train": False}, {"training": False}, {"loss": False}, {"masked": True}):
        assert conversation(tmp_path, "messages", {"messages": [SAYS, said | more]}).messages[1]["weight"] == 0
        shared = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"} | more]
        assert conversation(tmp_path, "sharegpt", {"conversations": shared}).messages[1]["weight"] == 0
    for more in ({"train": True}, {"masked": False}, {"loss": 0.5}):
        assert "weight" not in conversation(tmp_path, "messages", {"messages": [SAYS, said | more]}).messages[1]
    calling = {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"}
    sample = conversation(tmp_path, "sharegpt", {"conversations": [{"from": "human", "value": "a"}, calling]})
    assert (sample.messages[1]["tool_calls"], sample.messages[1]["reasoning_content"]) == ([CALL], "hm")
    shouted = {"from": "Function_Call", "value": '{"name": "weather", "arguments": {}}'}
    assert "tool_calls" in conversation(tmp_path, "sharegpt", {"conversations": [shouted]}).messages[0]


SAYS = {"role": "user", "content": "a"}
BAD: list[tuple[str, Any, str]] = [
    ("jsonl", {"content": "a"}, 'no `text` field; the row has content; name the one .* data.columns={"text": "..."}'),
    ("jsonl", {"text": 7}, "no `text` field that is a string; it holds a number"),
    ("messages", {"messages": []}, "`messages` is empty"),
    ("messages", {"messages": "hello"}, "`messages` is a text; expected a list"),
    ("messages", {"messages": ["a"]}, r"messages\[0\] is a text; expected an object with `role`"),
    ("messages", {"messages": [{"role": "bot", "content": "a"}]}, r"messages\[0\] has the role 'bot'; roles are"),
    ("messages", {"messages": [{"content": "a"}]}, r"messages\[0\] has no `role`"),
    ("messages", {"messages": [{"role": "user"}]}, r"messages\[0\] has no `content`"),
    ("messages", {"messages": [{"role": "user", "content": ""}]}, "the conversation is empty"),
    ("messages", {"messages": [{"role": "user", "content": 3}]}, "`content` is a number"),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "a part that is image_url"),
    ("messages", {"messages": [{"role": "assistant", "content": "a", "weight": -1}]}, "`weight` is -1; expected 0"),
    ("messages", {"messages": [{"role": "assistant", "tool_calls": [{"id": 1}]}]}, "names no function"),
    ("messages", {"messages": [{"role": "user", "content": "a"}], "tools": "x"}, "`tools` is a text"),
    ("sharegpt", {"conversations": [{"from": "alien", "value": "a"}]}, r"conversations\[0\] has `from` 'alien'; known"),
    ("sharegpt", {"conversations": [{"from": "gpt"}]}, r"conversations\[0\] has no `value`"),
    ("sharegpt", {"conversations": [{"from": "function_call", "value": "go"}]}, "a function_call must be JSON"),
    ("alpaca", {"instruction": "a"}, "no `output` field; the row has instruction"),
    ("alpaca", {"instruction": "a", "output": " "}, "`output` is empty"),
    ("alpaca", {"instruction": "", "output": "a"}, "`instruction` and `input` are empty"),
    ("alpaca", {"instruction": "a", "output": "a", "history": ["a"]}, "`history` holds a text"),
    ("prompt_completion", {"prompt": "a", "chosen": "b"}, "no `completion` field; the row has chosen, prompt"),
    ("prompt_completion", {"prompt": "a", "completion": ""}, "`completion` is empty"),
    ("prompt_completion", {"prompt": "a", "completion": [{"role": "user", "content": "b"}]}, "be of the same kind"),
    ("tokens", {"input_ids": [1, -2]}, r"input_ids\[1\] is -2, which is not a token id"),
    ("tokens", {"input_ids": [1, 2.5]}, r"input_ids\[1\] is 2.5"),
    ("tokens", {"input_ids": [1, 2], "labels": [1]}, "`labels` has 1 values for 2 ids"),
    ("tokens", {"input_ids": [1, 2], "labels": [2, -100]}, r"labels\[0\] is 2 where the id is 1; .*not shifted"),
    ("tokens", {"input_ids": [1, 2], "weights": [1, -1]}, r"weights\[1\] is -1"),
    ("tokens", {"text": "a"}, "no `input_ids` field"),
    ("tokens", {"input_ids": [1, 2], "attention_mask": ["0", "1"]}, r"attention_mask\[0\] is 0; expected 0 or 1"),
    ("tokens", {"input_ids": [1, 2], "attention_mask": [1, 2]}, r"attention_mask\[1\] is 2"),
    ("tokens", {"input_ids": [1, 2], "position_ids": [0, 0]}, "`position_ids` says that the row has several documents"),
    ("tokens", {"input_ids": [1, 2], "seq_lengths": [1, 1]}, "`seq_lengths` says that the row has several documents"),
    (
        "tokens",
        {"input_ids": [1, 2], "target_mask": [0, 1]},
        '`target_mask` is not read; .*{"loss_mask": "target_mask"}',
    ),
    ("messages", {"messages": [SAYS], "tools": [1]}, r"tools\[0\] is a number; expected the JSON schema"),
    ("messages", {"messages": [SAYS], "chat_template_kwargs": "x"}, "`chat_template_kwargs` is a text"),
    ("messages", {"messages": [SAYS], "chat_template_kwargs": {"tools": []}}, "cannot give `tools`"),
    ("messages", {"messages": [SAYS], "label": False}, "`label` is false: its answer is not wanted"),
    ("messages", {"messages": [{"role": "system", "content": "a"}], "system": "b"}, "`system` is another text than"),
    ("sharegpt", {"conversations": [{"from": "gpt", "value": "a"}], "kto_tag": False}, "`kto_tag` is false"),
    ("sharegpt", {"conversations": [{"from": "system", "value": "a"}], "system": "b"}, "`system` is another text than"),
    ("prompt_completion", {"prompt": "a", "completion": "b", "label": "False"}, "`label` is false"),
    ("prompt_completion", {"prompt": "a", "completion": "b", "system": "c"}, "`system` cannot be used beside"),
    ("prompts", {"question": "a"}, 'no `prompt` field; the row has question; name the one .*{"prompt": "..."}'),
    ("prompts", {"prompt": " "}, "`prompt` is empty"),
    ("prompts", {"prompt": []}, "`prompt` is empty"),
    ("prompts", {"prompt": 3}, "`prompt` is a number; expected a text or a list of messages"),
    ("prompts", {"prompt": [{"role": "user"}]}, r"prompt\[0\] has no `content`"),
    ("prompts", {"prompt": "a", "system": "b"}, "`system` cannot be used beside a `prompt` that is a text"),
    ("prompts", {"prompt": "a", "images": ["a.png"]}, "images in"),
]


@pytest.mark.parametrize(("source", "row", "message"), BAD, ids=[f"{source} {m[:40]}" for source, _, m in BAD])
def test_a_bad_row_is_named_or_left_out(tmp_path: Path, source: str, row: Any, message: str) -> None:
    with pytest.raises(UserError, match=rf"rows\.jsonl:1: {message}|rows\.jsonl:1: .*{message}") as caught:
        samples_of(tmp_path, source, row)
    assert "\n" not in str(caught.value)
    bad = BadRows("skip")
    config = DataConfig(source=source, path=str(tmp_path / "rows.jsonl"))  # type: ignore[arg-type]
    assert list(read_samples(config, bad)) == []
    assert bad.count == 1


SHAPES: dict[str, Any] = {
    "messages": {"messages": [{"role": "user", "content": "a"}], "prompt": "a", "prompt_id": "1"},
    "sharegpt": {"id": "1", "conversations": [{"from": "human", "value": "a"}]},
    "alpaca": {"instruction": "a", "input": "", "output": "b", "text": "all of it"},
    "prompt_completion": {"prompt": "a", "completion": "b"},
    "preference": {"prompt": "a", "chosen": "b", "rejected": "c", "score_chosen": 7.0},
    "unpaired_preference": {"prompt": "a", "completion": "b", "label": True},
    "tokens": {"input_ids": [1, 2], "attention_mask": [1, 1]},
    "jsonl": {"text": "a", "meta": {"url": "b"}},
    "prompts": {"prompt": "a", "answer": "b"},
}


PAGE = (Path(__file__).parents[3] / "docs" / "data.md").read_text()
SHOWN = dict(re.findall(r"^`(\w+)`: [^\n]*\n```json\n([^`]*)^```", PAGE, re.MULTILINE))


def test_the_page_shows_rows_of_every_format_which_is_recognised(tmp_path: Path) -> None:
    assert set(SHOWN) == set(SHAPES) == {name for name in FORMATS if isinstance(find_format(name), RowFormat)}
    for source, shown in SHOWN.items():
        for row in shown.splitlines():
            (tmp_path / "a.jsonl").write_text(row)
            assert detect(tmp_path / "a.jsonl").source == source
            assert len(samples_of(tmp_path, source, row)) == 1
        folder = tmp_path / source
        folder.mkdir()
        (folder / "train.json").write_text(json.dumps([SHAPES[source]] * 3))
        (folder / "test.json").write_text(json.dumps([SHAPES[source]]))
        found = detect(folder)
        assert (found.source, found.split, found.rename) == (source, "train", {})
        assert detect(folder, "test").split == "test"
        assert len(list(read_samples(DataConfig(source=source, path=str(folder))))) == 3  # type: ignore[arg-type]


def test_what_is_not_recognised_is_refused_with_its_columns(tmp_path: Path) -> None:
    """A conversation under another name is."""
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"id": 1, "chat": SHAPES["messages"]["messages"]}))
    assert (detect(file).source, detect(file).rename) == ("messages", {"messages": "chat"})
    file.write_text(json.dumps({"dialog": SHAPES["sharegpt"]["conversations"]}))
    assert detect(file).rename == {"conversations": "dialog"}
    file.write_text('{"question": "a", "answer": "b"}')
    with pytest.raises(UserError, match=r"the columns question, answer match no known format; .*data\.columns="):
        detect(file)
    file.write_text("")
    with pytest.raises(UserError, match="it has no rows"):
        detect(file)
    file.write_text("not json\n")
    with pytest.raises(UserError, match=r"a\.jsonl:1: not a JSON object"):
        detect(file)
    picture = tmp_path / "folder" / "a.png"
    picture.parent.mkdir()
    picture.write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    with pytest.raises(UserError, match=r"a\.png is neither a supported file of rows .* nor UTF-8 text"):
        detect(picture.parent)
    with pytest.raises(UserError, match="does not exist"):
        detect(tmp_path / "nothing")


NAMES = st.sampled_from(sorted({name for source in SHAPES for name in find_format(source).FIELDS}))  # type: ignore[union-attr]
INNER = st.sampled_from(["role", "content", "from", "value", "weight", "tool_calls"])
INNER |= st.sampled_from(["function", "function_call", "name", "arguments", "type", "text"])
WORDS = st.sampled_from(["user", "assistant", "tool", "gpt", "function_call", "", "[1]", '{"a": 1}', "text", "[", " "])
LEAVES = st.one_of(WORDS, st.none(), st.booleans(), st.integers(-2, 7), st.floats(allow_nan=True))
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(INNER, inner, max_size=4), max_leaves=8
)


@sampled(150, 2000)
@given(fields=st.dictionaries(NAMES, VALUES, max_size=4), source=st.sampled_from(sorted(SHAPES)))
def test_any_row_is_a_sample_or_a_bad_row(fields: dict[str, Any], source: str) -> None:
    reader = find_format(source)
    assert isinstance(reader, RowFormat)
    reader.matches(fields)
    refusal, sample = "", None
    try:
        sample = reader.convert(fields, "a:1")
    except RowError as error:
        refusal = str(error)
    assert refusal.startswith("a:1") or not refusal
    assert "\n" not in refusal
    if isinstance(sample, Conversation):
        roles = {message["role"] for message in sample.messages}
        assert roles <= {"system", "developer", "user", "assistant", "tool", "function"}
        assert all(isinstance(message.get("content", ""), str) for message in sample.messages)
        assert all(0 <= message.get("weight", 1) < float("inf") for message in sample.messages)
    if isinstance(sample, Ids):
        assert sample.weights is None or len(sample.weights) == len(sample.ids)


def test_preferences_of_another_format_are_named(tmp_path: Path) -> None:
    """What is wanted of them can be said with data.columns."""
    question, good, bad = (
        [{"role": role, "content": text}] for role, text in (("user", "?"), ("assistant", "yes"), ("assistant", "no"))
    )
    pairs: list[dict[str, Any]] = [
        {"prompt": question, "chosen": good, "rejected": bad},
        {"chosen": question + good, "rejected": question + bad},
        {"prompt": "?", "chosen": "yes", "rejected": "no"},
    ]
    file = tmp_path / "rows.jsonl"
    ways = r"this is a preference pair .*data\.source=preference and train\.objective=dpo; .*the chosen answers alone"
    for pair in pairs:
        with pytest.raises(UserError, match=rf"rows\.jsonl:1: {ways}"):
            samples_of(tmp_path, "messages", pair)
    asked = {
        "conversations": [{"from": "human", "value": "?"}],
        "chosen": {"from": "gpt", "value": "yes"},
        "rejected": {"from": "gpt", "value": "no"},
    }
    with pytest.raises(UserError, match="this is a preference pair"):
        samples_of(tmp_path, "sharegpt", asked)
    for pair, columns in ((pairs[0], {"completion": "chosen"}), (pairs[2], {"completion": "chosen"})):
        assert len(samples_of(tmp_path, "prompt_completion", pair, columns=columns)) == 1
    assert len(samples_of(tmp_path, "messages", pairs[1], columns={"messages": "chosen"})) == 1
    labelled = {"prompt": "?", "completion": "no", "label": False}
    ways = "set data.source=unpaired_preference and train.objective=kto; else remove the rows"
    with pytest.raises(UserError, match=rf"`label` is false: its answer is not wanted; .*{ways}"):
        samples_of(tmp_path, "prompt_completion", labelled)
    assert len(samples_of(tmp_path, "prompt_completion", labelled, columns={"label": "not read"})) == 1
    file.write_text(json.dumps(labelled))
    assert detect(file, columns={"label": "not read"}).source == "prompt_completion"
    for pair in (
        {"messages": question + good, "rejected_response": "no"},
        {"conversations": question + good, "rejected": bad},
        {"instruction": "?", "output": "yes", "rejected": "no"},
    ):
        file.write_text(json.dumps(pair))
        source = "alpaca" if "output" in pair else "messages"
        with pytest.raises(
            UserError, match=r"`rejected\w*` holds answers that are not wanted|hold conversations"
        ) as told:
            detect(file)
        assert f"data.source={source}" in str(told.value)
    for row in ({"prompt": "?", "completion": good}, {"prompt": question, "completion": "yes"}):
        file.write_text(json.dumps(row))
        assert detect(file).source == "prompt_completion", "neither half alone is a conversation"
        with pytest.raises(UserError, match="both must be of the same kind"):
            samples_of(tmp_path, "prompt_completion", row)
    file.write_text(json.dumps({"model_a": question + good, "model_b": question + bad}))
    with pytest.raises(UserError, match=r"the columns model_a, model_b all hold conversations; name the one"):
        detect(file)
