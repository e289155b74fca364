"""Arrow and Parquet files whose lengths and offsets lie, whose values Python does not know, or that only repeat."""

import io
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import ipc

from penstock.engine.data.files import base
from penstock.engine.data.files.arrow_sizes import object_bytes, uncompressed_bytes
from penstock.engine.data.files.base import read_rows
from penstock.engine.data.files.parquet import page_bytes
from penstock.engine.data.samples import BadRows
from penstock.storage.files.errors import UserError


def write(file: Path, columns: dict[str, Any], compression: str | None = None, stream: bool = False) -> Path:
    table = pa.table(columns)
    options = ipc.IpcWriteOptions(compression=compression)
    with (ipc.new_stream if stream else ipc.new_file)(file, table.schema, options=options) as writer:
        writer.write_table(table)
    return file


TEXTS = pa.array(["abc", "def"])
NUMBERS = pa.array([[7], [7, 7]], pa.list_(pa.int64()))
VIEW = "a text that is too long for a view"
HOSTILE: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...]]] = {
    "a text that ends before it begins": (TEXTS, (0, 3, 6), (0, 5, 2)),
    "a text far behind the end": (TEXTS, (0, 3, 6), (0, 3, 2**30)),
    "a text before the beginning": (TEXTS, (0, 3, 6), (-(2**30), 3, 6)),
    "half a character": (pa.array(["\x01" * 4, "a"]), (0x01010101,), (-1,)),
    "a list far behind the end": (NUMBERS, (0, 1, 3), (0, 2**30, 2**30 + 1)),
    "a list that ends before it begins": (NUMBERS, (0, 1, 3), (0, 3, -5)),
    "a text in a list": (pa.array([["abc"], ["def"]]), (0, 3, 6), (0, 2**20, 6)),
    "a text in a struct": (pa.array([{"a": "abc"}, {"a": "def"}]), (0, 3, 6), (0, 2**20, 6)),
    "a value that the dictionary lacks": (pa.array(["a", "b"]).dictionary_encode(), (0, 1), (0, 2**20)),
    "a view of a buffer that is not there": (pa.array([VIEW] * 2, pa.string_view()), (0, 0, 34), (9, 0, 34)),
    "a view far behind the end": (pa.array([VIEW] * 2, pa.string_view()), (0, 0, 34), (0, 2**30, 34)),
}
"""Columns of two rows, and which of their numbers are replaced by which."""


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("stream", [True, False])
def test_no_value_is_read_from_where_it_cannot_be(tmp_path: Path, name: str, stream: bool) -> None:
    column, old, new = HOSTILE[name]
    file = write(tmp_path / "bad.arrow", {"x": column}, stream=stream)
    assert len(list(read_rows(file, BadRows()))) == 2
    number = f"<{len(old)}i"
    content = file.read_bytes()
    footer = 0 if stream else 10 + int.from_bytes(content[-10:-6], "little")  # which is not read
    begin, _, end = content[: len(content) - footer].rpartition(struct.pack(number, *old))
    assert begin
    file.write_bytes(begin + struct.pack(number, *new) + end + content[len(content) - footer :])
    with pytest.raises(UserError, match=r"bad\.arrow: not a whole \.arrow file \(.+\); copy or download it again"):
        list(read_rows(file, BadRows()))


FOREIGN = {
    "a date": pa.array([0, 10**7], pa.date32()),
    "a time": pa.array([0, 2**62], pa.timestamp("s")),
    "a duration": pa.array([0, 2**62], pa.duration("s")),
    "a time zone": pa.array([None, 5], pa.timestamp("s", "Nowhere/At_All")),
    "a field twice": pa.StructArray.from_arrays(
        [pa.array([1, 2]), pa.array([1, 2])], fields=[pa.field("a", pa.int64())] * 2, mask=pa.array([True, False])
    ),
}


@pytest.mark.parametrize(
    ("name", "ending"),
    [*((name, ".arrow") for name in FOREIGN), ("a date", ".parquet"), ("a time zone", ".parquet")],
)
def test_a_value_that_python_does_not_know_costs_its_row_only(tmp_path: Path, name: str, ending: str) -> None:
    file, columns = tmp_path / f"odd{ending}", {"text": pa.array(["a", "b"]), "x": FOREIGN[name]}
    if ending == ".arrow":
        write(file, columns)
    else:
        pq.write_table(pa.table(columns), file)
    with pytest.raises(UserError, match=rf"odd\{ending}:row 2: column 'x' \(.+\) has a value that cannot be read"):
        list(read_rows(file, BadRows()))
    bad = BadRows("skip")
    assert [row.fields["text"] for row in read_rows(file, bad)] == ["a"]
    assert bad.count == 1


def test_a_column_of_a_name_that_is_taken(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    with ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(UserError, match="the column 'text' appears twice"):
        list(read_rows(tmp_path / "a.arrow", BadRows()))


def test_types_that_no_data_for_language_models_has(tmp_path: Path) -> None:
    runs = pa.RunEndEncodedArray.from_arrays([1, 2**30], ["a", "b"])
    file = write(tmp_path / "a.arrow", {"x": runs.slice(0, 5)})
    with pytest.raises(UserError, match=r"a\.arrow: column 'x': values of type run_end_encoded.* cannot be read"):
        list(read_rows(file, BadRows()))


def large(count: int = 2**28) -> dict[str, Any]:
    """Columns that are gigabytes as Python's objects, in files of kilobytes."""
    text = pa.array(["a" * 2**20])
    views = pa.array(["b" * 2**20], pa.string_view()).buffers()
    repeated = pa.py_buffer(views[1].to_pybytes() * 5000)
    return {
        "nulls in a list": pa.ListArray.from_arrays(pa.array([0, count], pa.int32()), pa.nulls(count)),
        "a value of a dictionary": pa.DictionaryArray.from_arrays(pa.array([0] * 5000, pa.int32()), text),
        "views of one text": pa.Array.from_buffers(pa.string_view(), 5000, [None, repeated, views[2]]),
    }


@pytest.mark.parametrize("name", large(1))
def test_what_only_repeats_itself_is_refused_before_it_takes_memory(tmp_path: Path, name: str) -> None:
    file = write(tmp_path / "bomb.arrow", {"x": large()[name]}, compression="zstd")
    assert file.stat().st_size < 50_000
    with pytest.raises(UserError, match=r"bomb\.arrow: .*becomes more than 250 times as large as the file"):
        list(read_rows(file, BadRows()))


def test_the_same_long_text_in_each_row_of_a_parquet_file(tmp_path: Path) -> None:
    table = pa.table({"text": pa.array(["a" * 2**20] * 80)})
    pq.write_table(table, tmp_path / "a.parquet", compression="zstd", dictionary_pagesize_limit=2**22)
    seen = []
    with pytest.raises(UserError, match=r"from row \d+ on it becomes more than 250 times"):
        seen += read_rows(tmp_path / "a.parquet", BadRows())


@pytest.mark.parametrize("ending", [".arrow", ".parquet"])
def test_what_uncompresses_to_far_more_is_refused_before_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    monkeypatch.setattr(base, "FEW_BYTES", 0)
    columns, file = {"text": ["a" * 2**24]}, tmp_path / f"bomb{ending}"
    if ending == ".arrow":
        write(file, columns, compression="zstd")
    else:
        pq.write_table(pa.table(columns), file, compression="zstd", use_dictionary=False, write_statistics=False)
    with pytest.raises(UserError, match=rf"bomb\{ending}: becomes more than 250 times .* when uncompressed"):
        list(read_rows(file, BadRows()))


def test_a_row_that_is_too_long_is_one_bad_row(tmp_path: Path) -> None:
    letters = "".join(map(chr, range(0x4E00, 0x9FA5)))
    long = [f"{number} {letters}" for number in range(1100)]
    file = write(tmp_path / "a.arrow", {"texts": [["a"], long, ["c"]]})
    bad = BadRows("skip")
    assert [row.where[-5:] for row in read_rows(file, bad)] == ["row 1", "row 3"]
    assert "a.arrow:row 2: a row of more than 64 MiB; split it" in bad.first


def test_what_is_uncompressed_is_known_to_the_byte(tmp_path: Path) -> None:
    texts = [f"row {number} of some" for number in range(500)]
    for stream in (True, False):
        plain = write(tmp_path / "plain.arrow", {"text": texts}, stream=stream)
        small = write(tmp_path / "small.arrow", {"text": texts}, compression="zstd", stream=stream)
        content = 501 * 4 + sum(map(len, texts))
        for file, wanted in ((plain, 0), (small, content)):
            assert sum(uncompressed_bytes(io.BytesIO(file.read_bytes()), 0 if stream else 8)) == wanted
    for settings in ({}, {"use_dictionary": False, "data_page_version": "2.0"}, {"row_group_size": 70}):
        pq.write_table(pa.table({"text": texts, "n": list(range(500))}), tmp_path / "a.parquet", **settings)
        metadata = pq.read_metadata(tmp_path / "a.parquet")
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        said = sum(group.column(index).total_uncompressed_size for group in groups for index in (0, 1))
        with open(tmp_path / "a.parquet", "rb") as file:
            pages = list(page_bytes(file, (tmp_path / "a.parquet").stat().st_size))
        headers = said - sum(size for _, size in pages)
        assert 10 * len(pages) < headers < 100 * len(pages)
        assert sum(dictionary for dictionary, _ in pages) == (0 if "use_dictionary" in settings else 2 * len(groups))


def test_sizes_are_those_of_the_slice() -> None:
    texts = pa.array(["a" * 1000, "b" * 10, None, "c" * 100])
    for column in (texts, texts.dictionary_encode(), texts.cast(pa.string_view()), texts.cast(pa.large_string())):
        assert [object_bytes(column.slice(at, 1)) // 10 for at in range(4)] in ([105, 6, 5, 15], [106, 7, 6, 16])
    lists = pa.array([["a" * 1000], [], None, ["b"] * 20])
    assert object_bytes(lists.slice(1)) < object_bytes(lists.slice(0, 1)) + 200
    maps = pa.array([[("k", "v" * 1000)], [("k", "v")]], pa.map_(pa.string(), pa.string()))
    assert object_bytes(maps.slice(1)) < 300 < object_bytes(maps.slice(0, 1))
