"""Prompts without answers: their tokens are those that transformers makes of them, and their rows come back whole."""

import json
import math
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_templates import BOS, CHATML, make_tokenizer, unmarked
from transformers import AutoTokenizer

from penstock.engine.config import DataConfig
from penstock.engine.data.corpus.files import META, CorpusWriter, TokenCorpus, read_info, verify_corpus
from penstock.engine.data.corpus.prepare import prepare_corpus
from penstock.engine.data.corpus.rows import ROW_INDEX, ROWS
from penstock.engine.data.formats.detect import detect
from penstock.engine.data.text import encode_pool
from penstock.engine.data.text.tokenizer import load_tokenizer
from penstock.storage.files.errors import UserError
from penstock.storage.files.sealed import seal

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
TALK = [
    {"role": "user", "content": "What is 2 + 3?"},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "And 4 + 4? ☃"},
]
CHATS: list[dict[str, Any]] = [
    {"prompt": TALK[:1], "answer": 5, "cases": [{"in": [1, 2], "out": None}]},
    {"prompt": TALK, "answer": 8},
    {"prompt": TALK[:1], "answer": "5", "system": "Be brief."},
    {"prompt": TALK[:1], "tools": [TOOL], "chat_template_kwargs": {"loud": True}},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("prompts") / "tokenizer", unmarked(CHATML), puts_bos=True)


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def made(path: Path, tokenizer: Path, **more: Any) -> TokenCorpus:
    config = DataConfig(**({"source": "prompts", "path": str(path)} | more))
    return prepare_corpus(config, load_tokenizer(tokenizer), path.parent / f"corpus of {path.name}")


def documents(corpus: TokenCorpus) -> list[list[int]]:
    return [corpus.tokens[int(a) : int(b)].tolist() for a, b in zip(corpus.starts, corpus.starts[1:], strict=False)]


def test_a_text_begins_as_that_of_a_completion_and_is_ended_by_nothing(tmp_path: Path, folder: Path) -> None:
    file = write(tmp_path / "rows.jsonl", {"prompt": "2 + 3 =", "answer": "5"}, {"prompt": "a", "answer": None})
    corpus, tokenizer = made(file, folder), load_tokenizer(folder)
    assert [tokenizer.decode(ids) for ids in documents(corpus)] == [f"{BOS}2 + 3 =", f"{BOS}a"]
    answered = write(tmp_path / "answered.jsonl", {"prompt": "2 + 3 =", "completion": " 5"})
    (whole,) = documents(made(answered, folder, source="prompt_completion"))
    assert whole[: len(documents(corpus)[0])] == documents(corpus)[0]
    (bare, single) = documents(made(write(tmp_path / "bare.jsonl", *map(corpus.row, range(2))), folder, bos="off"))
    assert tokenizer.decode(bare) == "2 + 3 ="
    assert len(single) == 1, "a prompt of one token is no document without a target"
    assert [corpus.row(0), corpus.row(1)] == [{"prompt": "2 + 3 =", "answer": "5"}, {"prompt": "a", "answer": None}]
    assert (corpus.comparison, corpus.sides, corpus.weights, corpus.info.num_trained) == ("prompts", None, None, 0)
    assert corpus.info.words() == f"2 prompts, {len(corpus.tokens)} tokens"


def test_messages_are_what_the_template_makes_of_them_with_the_generation_prompt(tmp_path: Path, folder: Path) -> None:
    text = unmarked(CHATML) + "{% if tools %}{{ tools | length }} tools{% endif %}{% if loud %}LOUD{% endif %}"
    (tmp_path / "template.jinja").write_text(text)
    corpus = made(write(tmp_path / "rows.jsonl", *CHATS), folder, chat_template=str(tmp_path / "template.jinja"))
    theirs = AutoTokenizer.from_pretrained(folder)
    for number, row in enumerate(CHATS):
        before = [{"role": "system", "content": row["system"]}] if "system" in row else []
        given = {"tools": row.get("tools"), **row.get("chat_template_kwargs", {})}
        wanted = theirs.apply_chat_template(
            before + row["prompt"], chat_template=text, add_generation_prompt=True, return_dict=False, **given
        )
        assert documents(corpus)[number] == wanted
        assert corpus.row(number) == row | {"prompt": before + row["prompt"]}
    shown = theirs.decode(documents(corpus)[3])
    assert "1 tools" in shown
    assert "LOUD" in shown


def test_a_turn_that_the_assistant_has_begun_goes_on(tmp_path: Path, folder: Path) -> None:
    begun = [TALK[0], {"role": "assistant", "content": "It is"}]
    corpus, theirs = made(write(tmp_path / "a.jsonl", {"prompt": begun}), folder), AutoTokenizer.from_pretrained(folder)
    wanted = theirs.apply_chat_template(begun, continue_final_message=True, return_dict=False)
    assert documents(corpus) == [wanted]
    assert theirs.decode(wanted).endswith("It is")


def test_prompts_are_found_where_no_answer_stands_beside_them(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    share = [{"from": "human", "value": "a"}]
    for row in ({"prompt": "a"}, *CHATS, {"prompt": json.dumps(TALK), "solution": "8"}, {"prompt": share, "level": 3}):
        assert detect(write(file, row)).source == "prompts"
    others: dict[str, dict[str, Any]] = {
        "prompt_completion": {"completion": "b"},
        "jsonl": {"text": "b"},
        "preference": {"chosen": "b", "rejected": "c"},
        "unpaired_preference": {"completion": "b", "label": True},
        "messages": {"messages": TALK},
    }
    for source, beside in others.items():
        assert detect(write(file, {"prompt": "a"} | beside)).source == source
    for name in ("response", "output", "completions"):
        with pytest.raises(UserError, match=f"the columns prompt, {name} match no known format"):
            detect(write(file, {"prompt": "a", name: "b"}))
    write(file, {"question": "2 + 3?", "answer": "5"})
    with pytest.raises(UserError, match="match no known format"):
        detect(file)
    assert detect(file, columns={"prompt": "question"}).source == "prompts"


def test_the_row_has_every_column_by_the_name_that_the_format_has_for_it(tmp_path: Path, folder: Path) -> None:
    """As a data set of the hub has them: typed columns, some without a value."""
    table = pa.table(
        {
            "question": ["1 + 1?", "☃ \U0001f600"],
            "answer": [2, None],
            "day": [date(2024, 2, 29), None],
            "price": [Decimal("1.50"), None],
            "cases": [[{"in": "a", "out": [1.5, math.inf]}], []],
        }
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    corpus = made(tmp_path / "rows.parquet", folder, columns={"prompt": "question"})
    cases = [{"in": "a", "out": [1.5, math.inf]}]
    first = {"prompt": "1 + 1?", "answer": 2, "day": "2024-02-29", "price": "1.50", "cases": cases}
    assert corpus.row(0) == first
    assert corpus.row(1) == {"prompt": "☃ \U0001f600", "answer": None, "day": None, "price": None, "cases": []}
    packed = {"prompt": json.dumps(TALK), "x": "\u0000"}
    (document,) = documents(corpus := made(write(tmp_path / "packed.jsonl", packed), folder))
    assert corpus.row(0) == {"prompt": TALK, "x": "\u0000"}
    assert document == documents(made(write(tmp_path / "open.jsonl", {"prompt": TALK}), folder))[0]


def test_what_cannot_be_a_row_is_refused_by_its_name_or_left_out(tmp_path: Path, folder: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a", "b"], "sound": [b"\x00", None]}), tmp_path / "rows.parquet")
    with pytest.raises(UserError, match=r"row 1: column sound cannot be given to reward functions \(it holds bytes\)"):
        made(tmp_path / "rows.parquet", folder)
    corpus = made(tmp_path / "rows.parquet", folder, bad_rows="skip")
    assert (corpus.info.num_documents, corpus.info.skipped_rows) == (1, 1)
    assert corpus.row(0) == {"prompt": "b", "sound": None}, "a row is that of its document"
    bare = make_tokenizer(tmp_path / "bare", None)
    with pytest.raises(UserError, match=r"rows\.jsonl:1 is a conversation, and the tokenizer has no chat template"):
        made(write(tmp_path / "rows.jsonl", CHATS[0]), bare)
    with pytest.raises(UserError, match="cannot be mixed: a run trains on preference pairs"):
        DataConfig(mixture=[{"path": "a", "source": "prompts"}, {"path": "b", "source": "jsonl"}])


def test_prompts_are_the_same_by_one_process_and_by_several(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [row | {"number": number} for number, row in enumerate(CHATS * 20)]
    one, several = (write(tmp_path / f"{name}.jsonl", *rows) for name in ("one", "several"))
    alone = made(one, folder)
    monkeypatch.setattr(encode_pool, "SERIAL_BATCHES", 0)
    monkeypatch.setattr(encode_pool, "_SHARE_CHARS", 2000)
    shared = made(several, folder)
    assert documents(shared) == documents(alone)
    assert [shared.row(at)["number"] for at in range(len(rows))] == list(range(len(rows)))
    assert shared.info.content == alone.info.content


def test_rows_are_part_of_the_content_and_damage_is_found_before_one_is_handed_out(
    tmp_path: Path, folder: Path
) -> None:
    corpus = made(write(tmp_path / "a.jsonl", {"prompt": "a", "x": 1}, {"prompt": "b", "x": 2}), folder)
    other = made(write(tmp_path / "b.jsonl", {"prompt": "a", "x": 1}, {"prompt": "b", "x": 3}), folder)
    assert documents(corpus) == documents(other)
    assert corpus.info.content != other.info.content
    size = sum(file.stat().st_size for file in corpus.folder.iterdir())
    assert verify_corpus(corpus.folder) == size
    for name in (ROWS, ROW_INDEX):
        file = corpus.folder / name
        content = file.read_bytes()
        for at in range(len(content)):
            file.write_bytes(content[:at] + bytes([content[at] ^ 0x20]) + content[at + 1 :])
            with pytest.raises(UserError, match=rf"{name.replace('.', '[.]')}: damaged: "):
                verify_corpus(corpus.folder)
        file.write_bytes(content[:-1])
        with pytest.raises(UserError, match="damaged"):
            TokenCorpus(corpus.folder)
        file.write_bytes(content)
    assert TokenCorpus(corpus.folder).row(1) == {"prompt": "b", "x": 2}


def test_a_description_that_hides_the_rows_is_refused(tmp_path: Path, folder: Path) -> None:
    corpus = made(write(tmp_path / "a.jsonl", {"prompt": "a"}), folder)
    values = json.loads((corpus.folder / META).read_text())
    del values["crc32c"]
    for comparison in ("", "pairs"):
        (corpus.folder / META).write_text(json.dumps(seal(values | {"comparison": comparison})))
        with pytest.raises(UserError, match=f"comparison '{comparison}'"):
            read_info(corpus.folder)


def test_a_row_and_a_prompt_come_together(tmp_path: Path) -> None:
    ids = np.asarray([1, 2])
    with pytest.raises(Exception, match="a row of comparison 'prompts'"):
        CorpusWriter(tmp_path, 300, "prompts").append("a", ids, True)
    with pytest.raises(Exception, match="a row of comparison ''"):
        CorpusWriter(tmp_path, 300).append("a", ids, True, row="{}")
