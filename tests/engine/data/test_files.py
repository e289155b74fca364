"""Containers of rows: every one, compressed or not, whole or broken."""

import bz2
import csv
import gzip
import io
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import zstandard
from datasets import Dataset, DatasetDict, Features, Json, List
from pyarrow import ipc, parquet

from penstock.engine.config import DataConfig
from penstock.engine.data.files import base, json_rows
from penstock.engine.data.files.base import read_rows
from penstock.engine.data.files.splits import find_splits, split_files
from penstock.engine.data.formats.detect import detect
from penstock.engine.data.formats.reading import read_samples
from penstock.engine.data.samples import BadRows
from penstock.storage.files.errors import UserError

TEXT = '"naïve", ☃ {[\\]}\nanother line'
ROWS: list[dict[str, Any]] = [{"text": f"row {i}: {TEXT}{'x' * (i % 7)}", "label": str(i)} for i in range(300)]


def _csv(rows: list[dict[str, Any]], separator: str) -> bytes:
    stream = io.StringIO()
    writer = csv.DictWriter(stream, ["text", "label"], delimiter=separator)
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue().encode()


def _arrow(rows: list[dict[str, Any]], opened: Callable[[Any, Any], Any]) -> bytes:
    table, sink = pa.Table.from_pylist(rows), pa.BufferOutputStream()
    with opened(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=100)
    return bytes(sink.getvalue())


def _parquet(rows: list[dict[str, Any]]) -> bytes:
    sink = pa.BufferOutputStream()
    parquet.write_table(pa.Table.from_pylist(rows), sink, row_group_size=70)
    return bytes(sink.getvalue())


TEXT_KINDS: dict[str, Callable[[list[dict[str, Any]]], bytes]] = {
    "list.json": lambda rows: json.dumps(rows).encode(),
    "pretty.json": lambda rows: json.dumps(rows, indent=2, ensure_ascii=False).encode(),
    "object.json": lambda rows: json.dumps({"version": 1, "names": ["a"], "data": rows, "end": {"a": []}}).encode(),
    "lines.json": lambda rows: "\n".join(map(json.dumps, rows)).encode(),
    "rows.jsonl": lambda rows: ("\n\n".join(map(json.dumps, rows)) + "\r\n").encode(),
    "rows.ndjson": lambda rows: "\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode(),
    "comma.csv": lambda rows: _csv(rows, ","),
    "semicolon.csv": lambda rows: _csv(rows, ";"),
    "rows.tsv": lambda rows: _csv(rows, "\t"),
}
BINARY_KINDS: dict[str, Callable[[list[dict[str, Any]]], bytes]] = {
    "rows.parquet": _parquet,
    "file.arrow": lambda rows: _arrow(rows, ipc.new_file),
    "stream.arrow": lambda rows: _arrow(rows, ipc.new_stream),
    "rows.feather": lambda rows: _arrow(rows, ipc.new_file),
}
PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


def write(file: Path, content: bytes | str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


def rows_of(file: Path, bad: BadRows | None = None) -> list[dict[str, Any]]:
    return [fields for _, fields in read_rows(file, bad or BadRows())]


def refused(file: Path, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        rows_of(file)
    assert "\n" not in str(caught.value)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("name", [*TEXT_KINDS, *BINARY_KINDS])
def test_a_container_gives_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(json_rows, "_READ_BYTES", 97)  # every place of a row is cut by a read
    content = (TEXT_KINDS | BINARY_KINDS)[name](ROWS)
    assert rows_of(write(tmp_path / name, content)) == ROWS
    for ending, pack in PACK.items():
        file = write(tmp_path / (name + ending), pack(content))
        if name in TEXT_KINDS or not ending:
            assert rows_of(file) == ROWS, file
        else:
            refused(file, "cannot be read compressed; decompress it first")
    if name in TEXT_KINDS:
        text = "\ufeff" + content.decode()
        for codec in ("utf-8", "utf-16-le", "utf-16-be"):
            assert rows_of(write(tmp_path / name, text.encode(codec))) == ROWS
        refused(write(tmp_path / name, text.encode("utf-16-le") + b"\x00"), "not UTF-16")
        refused(write(tmp_path / name, text.encode("utf-32-le")), "UTF-32 text; convert it")
        assert rows_of(write(tmp_path / name, b"")) == []


def test_a_broken_compressed_or_columnar_file_is_refused(tmp_path: Path) -> None:
    for ending, pack in list(PACK.items())[1:]:
        content = pack(TEXT_KINDS["rows.jsonl"](ROWS))
        half = write(tmp_path / f"half.jsonl{ending}", content[: len(content) // 2])
        refused(half, "not a whole .* download it again")
        refused(write(tmp_path / f"none.jsonl{ending}", b"plain text, not compressed"), "not a whole")
        assert rows_of(write(tmp_path / f"two.jsonl{ending}", content + content)) == ROWS + ROWS
    for name, of in BINARY_KINDS.items():
        content = of(ROWS)
        for broken in (content[: len(content) // 2], b"nothing of the kind"):
            refused(write(tmp_path / name, broken), "not a whole")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"a": 1}\n{"a": \n', "a.jsonl:2: not a JSON object"),
        ("a.jsonl", "[1]\n", "a.jsonl:1: not a JSON object, as each line must be; put a list of rows in a .json"),
        ("a.jsonl", "[" * 100_000, "nested"),
        ("a.jsonl", '{"a": 1}\n{"a": [{"b": 1, "b": 2}]}\n', "a.jsonl:2: not a JSON object: 'b' appears twice"),
        ("a.json", '[{"a": 1}, {"a": 2, "a": 3}]', "a.json:1: not the JSON of rows: 'a' appears twice"),
        ("a.json", '[{"a": 1},\n{"a": 2}\n{"a": 3}]', "a.json:3: .*after row 2"),
        ("a.json", '[{"a": 1},\n{"a": tru}]', "a.json:2: .*Expecting value"),
        ("a.json", '[{"a": 1},\n{"a": "b', "a.json:2: .*Unterminated string"),
        ("a.json", '[{"a": 1}] []', "something follows the end"),
        ("a.json", '[{"a": 1}, 7]', "row 2: not a JSON object"),
        ("a.json", '{"a": 1,\n "b": {"c": 2}}', "an object without a list of objects"),
        ("a.json", '{"train": [{"a": 1}],\n"test": [{"a": 2}]}', "two lists of objects, 'train' and 'test'"),
        ("a.json", "words", "a.json:1: .*neither a list of objects"),
        ("a.json", '[{"a": ' + "[" * 100_000, "nested too deep|nested more"),
        ("a.json", '[{"a": "\\ud800"}]', "row 1: .*lone surrogate"),
        ("a.csv", "a,b\n1,2\n1,2,3\n", "a.csv:3: 3 values for 2 columns"),
        ("a.csv", "a,a\n1,2\n", "column 'a' appears twice"),
        ("a.csv", 'a,b\n1,"2\n', "a.csv:.*check its double quotes"),
        ("a.xml", "<a/>", "not a file of rows: its name must end in one of"),
        # Latin-1: the way to convert it is told.
        ("a.jsonl", b'{"a": "a"}\n{"a": "caf\xe9"}\n', "a.jsonl:2: not UTF-8 .* .byte 0xe9 at 11.*iconv -f LATIN1"),
        ("a.csv", b"text\nfine\ncaf\xe9\n", "a.csv:3: not UTF-8 text .byte 0xe9 at 4.*iconv -f LATIN1"),
        ("a.json", b'[{"text": "fine"}, {"text": "caf\xe9"}]', "a.json: not UTF-8 .* about byte 32.*iconv -f LATIN1"),
    ],
)
def test_what_is_malformed_is_named_by_file_and_place(tmp_path: Path, name: str, content: Any, message: str) -> None:
    refused(write(tmp_path / name, content), message)


def test_bad_rows_are_left_out_and_counted_where_that_is_wanted(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(base, "LINE_BYTES", 1000)
    bad = BadRows("skip")
    lines = ['{"a": 1}', "{", '{"a": "' + "x" * 5000 + '"}', '"text"', '{"a": 2}']
    assert rows_of(write(tmp_path / "a.jsonl", "\n".join(lines)), bad) == [{"a": 1}, {"a": 2}]
    assert bad.count == 3
    assert "a.jsonl:2: not a JSON object" in bad.first
    assert rows_of(write(tmp_path / "a.csv", "a,b\n1,2\n3\n4,5\n"), bad) == [{"a": "1", "b": "2"}, {"a": "4", "b": "5"}]
    assert rows_of(write(tmp_path / "a.json", '[{"a": 1}, null, {"a": 2}]'), bad) == [{"a": 1}, {"a": 2}]
    assert bad.take()[0] == 5
    assert bad.count == 0
    monkeypatch.setattr(base, "LINE_BYTES", 1 << 16)
    monkeypatch.setattr(json_rows, "_READ_BYTES", 1 << 12)
    long = '{"text": "' + "x" * (1 << 20) + '"}'  # refused before it is held
    refused(write(tmp_path / "a.jsonl", long), "a line of more than 0 MiB")
    refused(write(tmp_path / "a.json", f"[{long}]"), "a row of more than 0 MiB")
    refused(write(tmp_path / "a.csv", "text\n" + "x" * (1 << 20)), "a line of more than")


def test_nulls_of_columns_are_no_fields_but_null_in_json_is_a_value(tmp_path: Path) -> None:
    """And an object on a line by itself is a row, unless it holds rows."""
    said = [{"role": "user", "content": "a", "name": None}, {"role": "x", "content": None, "name": "n"}]
    rows: list[dict[str, Any]] = [{"messages": said}, {"messages": None}]
    expected = [{"messages": [{"role": "user", "content": "a"}, {"role": "x", "name": "n"}]}, {"messages": None}]
    assert rows_of(write(tmp_path / "a.parquet", _parquet(rows))) == expected
    assert rows_of(write(tmp_path / "a.json", json.dumps(rows))) == rows
    for row in ({"messages": [{"role": "user", "content": "a"}]}, {"text": "a"}, {"rows": []}):
        assert rows_of(write(tmp_path / "a.json", json.dumps(row) + "\n")) == [row]
    assert rows_of(write(tmp_path / "a.json", json.dumps({"rows": [{"text": "a"}] * 2}))) == [{"text": "a"}] * 2


def test_splits_are_told_by_the_names_of_files_and_folders(tmp_path: Path) -> None:
    def splits(*names: str) -> dict[str, list[str]]:
        root = tmp_path / f"set{len(list(tmp_path.iterdir()))}"
        for name in names:
            write(root / name, '{"text": "a"}\n')
        found = {split: [str(file.relative_to(root)) for file in files] for split, files in find_splits(root).items()}
        assert all(split_files(root, split) for split in found)
        return found

    assert splits("b.jsonl", "a.jsonl") == {"train": ["a.jsonl", "b.jsonl"]}
    assert splits("train.jsonl", "dev.jsonl", "notes.jsonl") == {"train": ["train.jsonl"], "validation": ["dev.jsonl"]}
    named = {"train": ["my-training-set.csv.gz"], "test": ["test/a.csv"]}
    assert splits("my-training-set.csv.gz", "test/a.csv") == named
    hub = [f"data/{split}-0000{n}-of-00002.parquet" for split in ("train_sft", "test_sft") for n in (0, 1)]
    assert splits(*hub, "README.md", ".cache/train.json") == {"train_sft": hub[:2], "test_sft": hub[2:]}
    assert splits("validate_me.jsonl", "contest.jsonl") == {"train": ["contest.jsonl", "validate_me.jsonl"]}
    with pytest.raises(UserError, match=r"holds \.csv and \.json files"):
        splits("a.csv", "b.json")
    with pytest.raises(UserError, match="several data sets, 'main' and 'other' among them"):
        splits("main/train-00000-of-00001.parquet", "other/train-00000-of-00001.parquet")


HEAD = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: raw/first*.jsonl
  - split: holdout
    path: [raw/b.jsonl]
{more}---
# A data set
"""


def test_splits_that_a_readme_lists(tmp_path: Path) -> None:
    for name in ("first-1", "first-2", "b", "other"):
        write(tmp_path / "raw" / f"{name}.jsonl", json.dumps({"text": name}))
    write(tmp_path / "README.md", HEAD.format(more=""))
    found = detect(tmp_path)
    assert found.split == "train"
    assert {split: len(files) for split, files in find_splits(tmp_path).items()} == {"train": 2, "holdout": 1}
    assert split_files(tmp_path, "holdout") == [tmp_path / "raw" / "b.jsonl"]
    second = "- config_name: extra\n  data_files: raw/other.jsonl\n"
    write(tmp_path / "README.md", HEAD.format(more=second))
    with pytest.raises(UserError, match="holds several data sets: main, extra"):
        find_splits(tmp_path)
    write(tmp_path / "README.md", HEAD.format(more=second + "  default: true\n"))
    assert find_splits(tmp_path) == {"train": [tmp_path / "raw" / "other.jsonl"]}
    outside = ("configs:\n- data_files: ../*.jsonl", "configs:\n- data_files: ['/etc/*', '', 'a**']")
    for broken in (": [", "configs: 7", "configs: [7, {}]", *outside):
        write(tmp_path / "README.md", f"---\n{broken}\n---\n")
        assert len(find_splits(tmp_path)["train"]) == 4


def test_the_split_that_is_missing_says_which_there_are(tmp_path: Path) -> None:
    for name in ("train_sft", "test_sft"):
        write(tmp_path / f"{name}-00000-of-00001.jsonl", json.dumps({"text": name}))
    config = DataConfig(source="jsonl", path=str(tmp_path), split="test_sft")
    assert [sample.text for sample in read_samples(config)] == ["test_sft"]
    (tmp_path / "empty").mkdir()
    for act, message in (
        (lambda: detect(tmp_path), r"no split 'train'; set data\.split to one of: test_sft, train_sft"),
        (
            lambda: split_files(tmp_path / "train_sft-00000-of-00001.jsonl", "test"),
            r"no split 'test'; leave data",
        ),
        (lambda: split_files(tmp_path / "empty", None), "holds no file of rows"),
    ):
        with pytest.raises(UserError, match=message):
            act()


JSON_ROWS: list[dict[str, Any]] = [
    {"text": 'one\n"two"', "mixed": {"a": None}, "messages": [{"role": "user", "content": [{"text": "☃"}]}]},
    {"text": "three", "mixed": 7, "messages": [{"role": "user", "content": None}]},
    {"text": None, "mixed": None, "messages": []},
]


def test_columns_of_json_are_what_the_json_holds(tmp_path: Path) -> None:
    """`datasets` has them for mixed types; null in it is a value, where in a struct it is a field that others have."""
    features = Features({"text": Json(), "mixed": Json(), "messages": List(Json())})
    data = Dataset.from_list(JSON_ROWS, features=features)
    data.save_to_disk(tmp_path / "saved")
    data.to_parquet(tmp_path / "rows.parquet")
    parquet.write_table(parquet.read_table(tmp_path / "rows.parquet"), tmp_path / "bare.parquet", store_schema=False)
    for file in ("rows.parquet", "bare.parquet", "saved/data-00000-of-00001.arrow"):
        assert rows_of(tmp_path / file) == JSON_ROWS
    broken = pa.ExtensionArray.from_storage(pa.json_(pa.string()), pa.array(['"fine"', "{half"]))
    parquet.write_table(pa.table({"text": broken}), tmp_path / "broken.parquet")
    with pytest.raises(UserError, match=r"broken\.parquet:row 2: column 'text': .*data\.bad_rows=skip"):
        rows_of(tmp_path / "broken.parquet")
    bad = BadRows("skip")
    assert [row.fields for row in read_rows(tmp_path / "broken.parquet", bad)] == [{"text": "fine"}]
    assert bad.count == 1


def test_maps_are_objects(tmp_path: Path) -> None:
    kind = pa.list_(pa.struct([("name", pa.string()), ("arguments", pa.map_(pa.string(), pa.string()))]))
    calls = [
        [{"name": "weather", "arguments": [("city", "Rome"), ("unit", None)]}],
        [{"name": None, "arguments": None}],
    ]
    parquet.write_table(pa.table({"calls": pa.array(calls, type=kind)}), tmp_path / "maps.parquet")
    wanted = [{"calls": [{"name": "weather", "arguments": {"city": "Rome", "unit": None}}]}, {"calls": [{}]}]
    assert rows_of(tmp_path / "maps.parquet") == wanted
    twice = pa.array([[("a", "1"), ("a", "2")]], type=pa.map_(pa.string(), pa.string()))
    parquet.write_table(pa.table({"m": twice}), tmp_path / "twice.parquet")
    with pytest.raises(UserError, match=r"twice\.parquet:row 1: column 'm': the key 'a' appears twice"):
        rows_of(tmp_path / "twice.parquet")


def test_data_sets_that_were_saved_to_disk(tmp_path: Path) -> None:
    train, test = Dataset.from_list(ROWS[:200]), Dataset.from_list(ROWS[200:])
    DatasetDict(train=train, test=test).save_to_disk(tmp_path / "dict", num_shards={"train": 3, "test": 1})
    train.save_to_disk(tmp_path / "one")

    def rows(name: str, split: str | None) -> list[dict[str, Any]]:
        return [row for file in split_files(tmp_path / name, split) for row in rows_of(file)]

    assert rows("dict", None) == rows("one", None) == ROWS[:200]
    assert rows("dict", "test") == ROWS[200:]
    found = detect(tmp_path / "dict")
    assert (found.source, found.split) == ("jsonl", "train")
    assert {split: len(files) for split, files in find_splits(tmp_path / "dict").items()} == {"train": 3, "test": 1}
    (tmp_path / "one" / "data-00000-of-00001.arrow").unlink()
    with pytest.raises(UserError, match=r"names the file data-00000-of-00001\.arrow, which is not there"):
        split_files(tmp_path / "one", None)


def test_texts_may_be_compressed_and_have_marks(tmp_path: Path) -> None:
    for ending, pack in PACK.items():
        write(tmp_path / f"a.md{ending}", pack("# naïve\r\n".encode()))
    write(tmp_path / "b.txt", "\ufeff# naïve\r\n".encode("utf-16-le"))
    write(tmp_path / "c.txt", "\ufeff# naïve\r\n")
    samples = list(read_samples(DataConfig(source="text", path=str(tmp_path))))
    assert [sample.text for sample in samples] == ["# naïve\r\n"] * 7
    assert detect(tmp_path).source == "text"
    write(tmp_path / "d.txt", b"fine\n" * 10_000 + b"caf\xe9\n")
    with pytest.raises(UserError, match=r"d\.txt:10001: not UTF-8 text \(byte 0xe9 at 4 of the line\)"):
        list(read_samples(DataConfig(source="text", path=str(tmp_path))))
