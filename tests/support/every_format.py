"""Rows of every format, in files as users have them, and what plain transformers makes of each: tokens and weights.

A row says what colour a fruit has, which is the same whenever it is asked, so that a tiny model soon learns it.
"""

import csv
import gzip
import io
import json
import lzma
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from penstock.engine.config import DataConfig
from penstock.engine.config.data import COMPARISONS, Source

SOURCES = [
    name
    for name in get_args(Source)
    if name not in ("auto", "python_stdlib", "needles", "random") and name not in COMPARISONS
]
"""Formats of rows that are read and trained token by token; the rest is made on the spot, comes with the interpreter or
compares answers."""

Row = dict[str, Any]
Tokens = tuple[list[int], list[float]]
"""Ids of a document, and how much each counts as a target."""

_CHATML = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['role'] == 'assistant' %}BEGIN"
    "{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\nEND{% else %}{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = _CHATML.replace("BEGIN", "").replace("END", "")
"""ChatML with tools, and no word on what the assistant generates."""
MARKED = _CHATML.replace("BEGIN", "{% generation %}").replace("END", "{% endgeneration %}")
"""The same with generation markers."""

_FRUIT = ("apple", "pear", "plum", "cherry", "melon", "fig", "quince", "grape")
_COLOURS = ("red", "green", "blue", "yellow", "purple", "brown", "golden", "black")
_SYSTEM = "Answer in one sentence."


def asked(number: int) -> tuple[str, str, str, str]:
    """Fruit, colour, a question and its answer."""
    index = (number * 5 + number // 8) % len(_FRUIT)
    fruit, colour = _FRUIT[index], _COLOURS[index]
    return fruit, colour, f"Basket {number}: what colour has the {fruit}?", f"The {fruit} is {colour}."


def tools_of(number: int) -> list[Row]:
    """Schemas, each row's own, so that no two rows begin alike."""
    return [{"type": "function", "function": {"name": f"look_{number}", "parameters": {"fruit": "string"}}}]


def messages_of(source: str, number: int) -> list[Row]:
    """The conversation that a row of the formats of conversations stands for, as transformers takes it."""
    fruit, colour, question, answer = asked(number)
    turns: list[Row] = [{"role": "user", "content": question}]
    if source == "messages" and number % 2:
        call = {"type": "function", "function": {"name": f"look_{number}", "arguments": {"fruit": fruit}}}
        turns += [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": colour}]
    turns.append({"role": "assistant", "content": answer})
    if source == "sharegpt":
        *_, again, answered = asked(number + 3)
        turns += [{"role": "user", "content": again}, {"role": "assistant", "content": answered}]
        return [{"role": "system", "content": _SYSTEM}, *turns]
    return turns


def row(source: str, number: int) -> Row:
    """A row as the file has it; `text` is one of a whole file. `tokens` are of `token_row`."""
    *_, question, answer = asked(number)
    if source in ("text", "jsonl"):
        lines = [" ".join(asked(n)[2:]) for n in range(number, number + 3)]
        return {"text": f"# Basket {number}\n\n" + "\n".join(lines) + "\n"}
    if source == "messages":
        return {"messages": [_openai(message) for message in messages_of(source, number)], "tools": tools_of(number)}
    if source == "sharegpt":
        names = {"user": "human", "assistant": "gpt"}
        turns = [{"from": names[m["role"]], "value": m["content"]} for m in messages_of(source, number)[1:]]
        return {"id": f"x{number}", "conversations": turns, "system": _SYSTEM}
    if source == "alpaca":
        return {"instruction": question, "input": "", "output": answer}
    assert source == "prompt_completion"
    return {"prompt": f"Q: {question}\nA:", "completion": f" {answer}"}


def _openai(message: Row) -> Row:
    """A call's arguments are their JSON."""
    functions = [call["function"] for call in message.get("tool_calls", [])]
    if not functions:
        return message
    functions = [function | {"arguments": json.dumps(function["arguments"])} for function in functions]
    calls = [{"id": "call_1", "type": "function", "function": function} for function in functions]
    return message | {"tool_calls": calls, "content": None}


def token_row(number: int, tokenizer: Any) -> Row:
    """A question and its answer as tokens, with `labels` that leave the question out."""
    *_, question, answer = asked(number)
    before, after = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (question, f" {answer}"))
    ids = [*before, *after, tokenizer.eos_token_id]
    return {"input_ids": ids, "labels": [-100] * len(before) + ids[len(before) :]}


def document(source: str, number: int, tokenizer: Any) -> Tokens:
    """What plain transformers makes of a row: `tokenizer` with the template MARKED, whose markers tell what counts."""
    if source in ("text", "jsonl"):
        ids = [*tokenizer(row(source, number)["text"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        return ids, [1.0] * len(ids)
    if source == "tokens":
        given = token_row(number, tokenizer)
        return given["input_ids"], [float(label != -100) for label in given["labels"]]
    if source == "prompt_completion":
        prompt, completion = row(source, number).values()
        found = tokenizer(prompt + completion, add_special_tokens=False, return_offsets_mapping=True)
        weights = [float(stop > len(prompt)) for _, stop in found["offset_mapping"]]
        return [*found["input_ids"], tokenizer.eos_token_id], [*weights, 1.0]
    tools = tools_of(number) if source == "messages" else None
    template: dict[str, Any] = {"chat_template": MARKED, "return_dict": True, "return_assistant_tokens_mask": True}
    found = tokenizer.apply_chat_template(messages_of(source, number), tools=tools, **template)
    return found["input_ids"], [float(there) for there in found["assistant_masks"]]


@dataclass(frozen=True)
class Way:
    """A format in a container."""

    source: str
    container: str
    """In words."""
    write: Callable[[Path, list[Row]], str]
    """Makes files of rows below a folder; DATA of the command."""
    template: str = PLAIN
    settings: tuple[str, ...] = ()
    """Texts of --set that it needs."""

    @property
    def name(self) -> str:
        return f"{self.source}: {self.container}"


def _at(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _lines(rows: list[Row]) -> str:
    return "".join(json.dumps(fields, ensure_ascii=False) + "\n" for fields in rows)


def _bytes(name: str, content: Callable[[list[Row]], bytes]) -> Callable[[Path, list[Row]], str]:
    def write(folder: Path, rows: list[Row]) -> str:
        _at(folder / name).write_bytes(content(rows))
        return name

    return write


def _csv(rows: list[Row], **dialect: Any) -> str:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), **dialect)
    writer.writeheader()
    for fields in rows:
        writer.writerow({key: each if isinstance(each, str) else json.dumps(each) for key, each in fields.items()})
    return text.getvalue()


def _zst(data: bytes) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor().compress(data)


def _markdown(folder: Path, rows: list[Row]) -> str:
    for number, fields in enumerate(rows):
        _at(folder / "notes" / f"chapter {number // 10:02}" / f"{number:03}.md").write_text(fields["text"])
    return "notes"


def _utf16_texts(folder: Path, rows: list[Row]) -> str:
    for number, fields in enumerate(rows):
        _at(folder / "old" / f"{number:03}.txt.gz").write_bytes(gzip.compress(fields["text"].encode("utf-16")))
    return "old"


def _hub_shards(folder: Path, rows: list[Row]) -> str:
    """As a data set lies on the hub: shards of each split."""
    import pyarrow
    from pyarrow import parquet

    half = len(rows) // 2
    parts = {"train-00000-of-00002": rows[:half], "train-00001-of-00002": rows[half:], "test-00000-of-00001": rows[:2]}
    for name, part in parts.items():
        parquet.write_table(pyarrow.Table.from_pylist(part), _at(folder / "set" / "data" / f"{name}.parquet"))
    (folder / "set" / "README.md").write_text("---\nlicense: mit\n---\n")
    return "set"


def _parquet(name: str, renamed: dict[str, str]) -> Callable[[Path, list[Row]], str]:
    def write(folder: Path, rows: list[Row]) -> str:
        import pyarrow
        from pyarrow import parquet

        table = [{renamed.get(key, key): value for key, value in fields.items()} for fields in rows]
        parquet.write_table(pyarrow.Table.from_pylist(table), _at(folder / name), compression="zstd")
        return name

    return write


def _saved(folder: Path, rows: list[Row]) -> str:
    """As `datasets` saves a data set with splits: Arrow."""
    import datasets

    splits = {"train": datasets.Dataset.from_list(rows), "test": datasets.Dataset.from_list(rows[:2])}
    datasets.DatasetDict(splits).save_to_disk(folder / "saved")  # type: ignore[arg-type]
    return "saved"


def _crlf(rows: list[Row]) -> bytes:
    return b"\xef\xbb\xbf" + _lines(rows).replace("\n", "\r\n").encode()


def _tsv(rows: list[Row]) -> bytes:
    return lzma.compress(_csv(rows, dialect="excel-tab").encode())


_EXCEL = _bytes("excel.csv", lambda r: _csv(r, delimiter=";").encode("utf-16"))
_CHAT = ("data.source=sharegpt", 'data.columns={"conversations": "chat"}')
WAYS = [
    Way("text", "folder of Markdown files", _markdown),
    Way("text", "folder of UTF-16 .txt.gz", _utf16_texts),
    Way("jsonl", ".jsonl with a BOM and CRLF", _bytes("a.jsonl", _crlf)),
    Way("jsonl", "Parquet shards of two splits", _hub_shards),
    Way("messages", ".jsonl.gz, with tools", _bytes("talks.jsonl.gz", lambda r: gzip.compress(_lines(r).encode()))),
    Way("messages", "Arrow of datasets, two splits", _saved, MARKED),
    Way("sharegpt", ".json, one list", _bytes("share.json", lambda r: json.dumps(r, indent=1).encode())),
    Way("sharegpt", "Parquet, another column", _parquet("share.parquet", {"conversations": "chat"}), MARKED, _CHAT),
    Way("alpaca", ".json.zst", _bytes("alpaca.json.zst", lambda r: _zst(json.dumps(r).encode())), MARKED),
    Way("alpaca", "UTF-16 .csv with semicolons", _EXCEL),
    Way("prompt_completion", ".csv, quoted lines' ends", _bytes("pairs.csv", lambda r: _csv(r).encode())),
    Way("prompt_completion", ".tsv.xz", _bytes("pairs.tsv.xz", _tsv)),
    Way("tokens", "Parquet", _parquet("tokens.parquet", {})),
    Way("tokens", ".ndjson", _bytes("tokens.ndjson", lambda r: _lines(r).encode())),
]
"""Every format, twice; no container twice. The first of each is enough for the format."""

FIRST = {source: next(way for way in WAYS if way.source == source) for source in SOURCES}


def rows_of(source: str, count: int, tokenizer: Any) -> list[Row]:
    """Rows of a file. Arrow wants all of the same fields: of messages those without a call are as those with one."""
    return [token_row(n, tokenizer) if source == "tokens" else row(source, n) for n in range(count)]


def data_config(way: Way, path: Path, **changes: Any) -> DataConfig:
    """The data section for what `way` has written."""
    values = dict(text.partition("=")[::2] for text in way.settings)
    columns = json.loads(values.get("data.columns", "{}"))
    return DataConfig(source=way.source, path=str(path), columns=columns, **changes)  # type: ignore[arg-type]
