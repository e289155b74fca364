"""The reader of growing JSON lines: any appends, replaced and cut files, damaged, torn and endless lines."""

import itertools
import json
import os
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from samples import sampled

from penstock.app.tail import JsonTail

OBJECTS = (b'{"a":1}', b'{"b":[1,{"c":"\xc3\xa9"}]}', b'{"n":NaN}', b"{}")
LINES = [*OBJECTS, b"", b"[1]", b'{"broken', b"null", b"\xff\xfe"]


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


@sampled(15, 60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(LINES), max_size=12), st.lists(st.integers(0, 120), max_size=8), st.integers(24, 200))
def test_any_split_gives_the_same_objects(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], cuts: list[int], read_bytes: int
) -> None:
    data = b"".join(line + b"\n" for line in lines)
    path = tmp_path_factory.mktemp("tail") / "x.jsonl"
    tail = JsonTail(path, read_bytes=read_bytes)
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    found: list[str] = []
    for start, end in itertools.pairwise(edges):
        append(path, data[start:end])
        found += map(repr, tail.read())
        while tail.behind:
            found += map(repr, tail.read())
    assert found == [repr(json.loads(line)) for line in lines if line in OBJECTS]  # as text: NaN equals nothing
    assert tail.damaged == len(lines) - len(found)
    assert tail.resets == 0


def test_no_file_is_nothing_yet_and_a_folder_or_foreign_file_nothing(tmp_path: Path) -> None:
    tail = JsonTail(tmp_path / "gone" / "x.jsonl")
    assert tail.read() == []
    (tmp_path / "gone").mkdir()
    append(tail.path, b'{"a":1}\n')
    assert tail.read() == [{"a": 1}]
    tail.path.unlink()
    assert tail.read() == []
    assert tail.resets == 0
    tail.path.mkdir()
    assert JsonTail(tail.path).read() == []
    (tmp_path / "y").write_bytes(bytes(range(256)) * 50)
    assert JsonTail(tmp_path / "y").read() == []


def test_torn_line_waits_and_may_be_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    append(path, b'{"a":1}\n{"a":2')
    tail = JsonTail(path)
    assert tail.read() == [{"a": 1}]
    os.truncate(path, 8)
    append(path, b'{"a":3}\n')
    assert tail.read() == [{"a": 3}]
    assert (tail.resets, tail.damaged) == (0, 0)


@pytest.mark.parametrize("how", ["replaced", "longer in place", "cut"])
def test_another_file_is_read_again(tmp_path: Path, how: str) -> None:
    path = tmp_path / "x.jsonl"
    append(path, b'{"a":1}\n{"a":2}\nbad\n')
    tail = JsonTail(path)
    assert len(tail.read()) == 2
    match how:
        case "replaced":
            (tmp_path / "y").write_bytes(b'{"b":1}\n')
            os.replace(tmp_path / "y", path)
        case "longer in place":  # than what was read
            path.write_bytes(b'{"b":1}\n{"b":2}\n{"b":3}\n{"b":4}\n')
        case "cut":
            os.truncate(path, 8)
    assert tail.read()[0] == ({"a": 1} if how == "cut" else {"b": 1})
    assert (tail.resets, tail.damaged) == (1, 0)


def test_endless_line_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    with path.open("wb") as file:
        file.write(b'{"a":1}\n')
        file.truncate(100 << 20)
        file.seek(0, os.SEEK_END)
        file.write(b'\n{"a":2}\n')
    tail = JsonTail(path)
    tracemalloc.start()
    found = tail.read()
    while tail.behind:
        found += tail.read()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == [{"a": 1}, {"a": 2}]
    assert tail.damaged == 1
    assert peak < 8 << 20


def test_a_line_that_is_too_much_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    for line, most in ((b'{"a":"' + b"x" * 100 + b'"}', {"max_line_bytes": 50}), (b"[" * 100_000, {})):
        path.write_bytes(line + b'\n{"a":2}\n')
        tail = JsonTail(path, **most)
        assert tail.read() == [{"a": 2}]
        assert tail.damaged == 1


def test_start_near_the_end(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    append(path, b"".join(b'{"a":%d}\n' % i for i in range(1000, 2000)))
    tail = JsonTail(path, start_bytes=105)
    assert [line["a"] for line in tail.read()] == list(range(1991, 2000))
    assert tail.damaged == 0
    assert tail.left_out_bytes == 11 * 1000 - 105
