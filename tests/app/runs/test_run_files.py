"""Files of a run directory as anybody may have left them: damaged, torn and endless lines, links, pipes; and the reader
of JSON lines that grow, are replaced or cut."""

import itertools
import json
import os
import re
import resource
import sys
import tracemalloc
from pathlib import Path
from unittest.mock import patch

import pytest
from bad_run_files import OBSTACLES
from cli_process import done, started
from hypothesis import given
from hypothesis import strategies as st
from samples import sampled

from penstock.app.runs import files
from penstock.app.runs.files import JsonLines, json_text, number, parse_line, read_last, read_tail, remove_own, span_of
from penstock.app.runs.tail import JsonTail
from penstock.engine.events import Span
from penstock.storage.files.errors import UserError

SPAN = Span("compute", "forward", "layers.0", 2, 0.5, 0.75, 0, 1, 7, (3,), ((1, 0.125),))
WRONG: dict[str, list[object]] = {
    "start_s": [-1e300], "end_s": [None, float("nan"), 10**400, 0.1], "step": [2**63, True], "bytes": [1.5],
    "lane": [["compute"]], "waited": [[[]], 3],
    "awaited": [3, [1], [[1]], [[1, -1.0]], [["x", 1.0]], [[1, float("nan")]]],
}  # fmt: skip
LONGEST = files.MOST_LINE_BYTES
BAD = [
    *(b"[]", b'{"a":1}', b"garbage \xff\x00", b'{"step": 1}' * 2, b"9" * 5000, b'{"step": "\\ud800"}', b""),
    *(b"[" * 100_000, b'{"lane":' * 3000, b"x" * (LONGEST + 1), b"x" * (3 * LONGEST)),
    *(json.dumps(SPAN._asdict() | {field: value}).encode() for field, values in WRONG.items() for value in values),
]


def good(step: int) -> bytes:
    return json.dumps(SPAN._asdict() | {"step": step}).encode()


@given(st.lists(st.sampled_from([*range(len(BAD)), "good"]), max_size=8))
def test_damaged_lines_are_passed_over_and_counted(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[object]
) -> None:
    path = tmp_path_factory.mktemp("lines") / "spans.jsonl"
    content = [good(at) if kind == "good" else BAD[int(str(kind))] for at, kind in enumerate(kinds)]
    path.write_bytes(b"".join(line + b"\n" for line in content) + b'{"torn')
    lines = JsonLines(path)
    assert [span.step for span in lines.spans()] == [at for at, kind in enumerate(kinds) if kind == "good"]
    bad = [at for at, kind in enumerate(kinds, start=1) if kind != "good"]
    assert lines.damaged == len(bad)
    first = f"{path}: .*line {bad[0]}$" if bad else "None"
    assert re.fullmatch(first, str(lines.warning()))


@pytest.mark.parametrize("line", BAD, ids=range(len(BAD)))
def test_no_bad_line_is_a_span_or_hides_the_last_one(tmp_path: Path, line: bytes) -> None:
    assert span_of(parse_line(line) or {}) is None
    (tmp_path / "x.jsonl").write_bytes(good(4) + b"\n" + line[:50_000] + b"\n")
    assert {"step": 4}.items() <= read_tail(tmp_path / "x.jsonl")[0].items()
    (tmp_path / "x.jsonl").write_bytes(good(4) + b"\n" + b"x" * 1_000_000 + b"\n")
    assert (read_last(tmp_path / "x.jsonl") or {})["step"] == 4


def test_spans_of_earlier_versions_lack_fields_and_figures_are_of_a_size_that_something_has() -> None:
    assert span_of({"lane": "h2d", "op": "x", "start_s": 0, "end_s": 1}) == Span("h2d", "x", "", -1, 0.0, 1.0, 0, 0)
    assert span_of(json.loads(good(3))) == SPAN._replace(step=3)
    values = [1, 1.5, True, None, "1", float("nan"), float("inf"), 10**400, -(10**400), 1e300]
    assert [number(value) for value in values] == [1.0, 1.5, *[None] * 8]
    assert [files.whole(value) for value in (3, 3.0, True, 2**63, "3")] == [3, None, None, None, None]


def test_an_endless_line_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    with path.open("wb") as file:
        file.write(good(1) + b"\n")
        file.truncate(400 << 20)  # a hole: zeros without a line's end
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + good(2) + b"\n")
    code = (
        "import resource, sys; from pathlib import Path; from penstock.app.runs.files import JsonLines;"
        "resource.setrlimit(resource.RLIMIT_AS, (400 << 20, 400 << 20));"
        "lines = JsonLines(Path(sys.argv[1])); print([span.step for span in lines.spans()], lines.damaged)"
    )
    assert resource.getrlimit(resource.RLIMIT_AS)[1] == resource.RLIM_INFINITY
    assert done(started(tmp_path, sys.executable, "-c", code, str(path))) == ("[1, 2] 1\n", "")
    assert (read_last(path) or {})["step"] == 2


@pytest.mark.parametrize("kind", OBSTACLES)
def test_nothing_but_regular_files_is_read_or_removed(tmp_path: Path, kind: str) -> None:
    (tmp_path / "target").write_bytes(good(1) + b"\n")
    path = tmp_path / "run" / "x.jsonl"
    path.parent.mkdir()
    OBSTACLES[kind](path, tmp_path / "target")
    assert (read_tail(path), read_last(path), files.read_object(path)) == ([], None, None)
    found, wrong = files.examine_object(path)
    assert found is None
    assert str(wrong).startswith("x.jsonl cannot be read: ")
    with pytest.raises(UserError, match=r"x\.jsonl: cannot be read: "):
        list(JsonLines(path))
    with pytest.raises(OSError, match="not a regular file"):
        remove_own(path)
    assert os.path.lexists(path)
    assert (tmp_path / "target").exists()
    missing = tmp_path / "none"
    lines = JsonLines(missing)
    assert (list(lines), lines.warning(), files.examine_object(missing)) == ([], None, (None, None)), "it is empty"
    remove_own(missing)


def test_text_that_a_terminal_would_obey_is_cleaned_where_it_is_parsed() -> None:
    line = json.dumps({"a\x1b]0;t\x07": ["\x9b31m", {"b": "\u202ex\x7f"}], "c": "tab\tend\n"})
    for text in (line, json.dumps(json.loads(line), ensure_ascii=False)):
        cleaned = {"a\ufffd]0;t\ufffd": ["\ufffd31m", {"b": "\ufffdx\ufffd"}], "c": "tab\tend\n"}
        assert parse_line(text.encode()) == cleaned
    assert parse_line(b'{"a": "\x7f"}') == {"a": "\ufffd"}
    name, shown = os.fsdecode(b"/mnt/\xff/run"), "/mnt/\ufffd/run"  # one that is no text is written readably
    written = json_text({"drives": {name: name}, "smile": "\U0001f600"})
    assert parse_line(written.encode()) == {"drives": {shown: shown}, "smile": "\U0001f600"}


OBJECTS = (b'{"a":1}', b'{"b":[1,{"c":"\xc3\xa9"}]}', b'{"n":NaN}', b"{}")
LINES = [*OBJECTS, b"", b"[1]", b'{"broken', b"null", b"\xff\xfe"]


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


@sampled(15, 60)
@given(st.lists(st.sampled_from(LINES), max_size=12), st.lists(st.integers(0, 120), max_size=8), st.integers(24, 200))
def test_any_split_gives_the_same_objects(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], cuts: list[int], read_bytes: int
) -> None:
    data = b"".join(line + b"\n" for line in lines)
    path = tmp_path_factory.mktemp("tail") / "x.jsonl"
    tail = JsonTail(path)
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    found: list[str] = []
    with patch("penstock.app.runs.tail.READ_BYTES", read_bytes):
        for start, end in itertools.pairwise(edges):
            append(path, data[start:end])
            found += map(repr, tail.read())
            while tail.behind:
                found += map(repr, tail.read())
    assert found == [repr(json.loads(line)) for line in lines if line in OBJECTS]  # as text: NaN equals nothing
    assert (tail.damaged, tail.began_anew) == (len(lines) - len(found), False)


def test_no_file_is_nothing_yet_and_a_folder_or_foreign_file_nothing(tmp_path: Path) -> None:
    tail = JsonTail(tmp_path / "gone" / "x.jsonl")
    assert tail.read() == []
    (tmp_path / "gone").mkdir()
    append(tail.path, b'{"a":1}\n')
    assert tail.read() == [{"a": 1}]
    tail.path.unlink()
    assert (tail.read(), tail.began_anew) == ([], False)
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
    assert (tail.began_anew, tail.damaged) == (False, 0)


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
    assert (tail.began_anew, tail.damaged) == (True, 0)


def test_endless_and_deep_lines_are_damage_and_take_no_memory(tmp_path: Path) -> None:
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
    assert (found, tail.damaged) == ([{"a": 1}, {"a": 2}], 1)
    assert peak < 8 << 20
    for line in (b'{"a":"' + b"x" * files.MOST_LINE_BYTES + b'"}', b"[" * 100_000):
        path.write_bytes(line + b'\n{"a":2}\n')
        tail = JsonTail(path)
        found = tail.read()
        while tail.behind:
            found += tail.read()
        assert (found, tail.damaged) == ([{"a": 2}], 1)


def test_start_near_the_end(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    append(path, b"".join(b'{"a":%d}\n' % i for i in range(1000, 2000)))
    tail = JsonTail(path, start_bytes=105)
    assert [line["a"] for line in tail.read()] == list(range(1991, 2000))
    assert (tail.damaged, tail.left_out_bytes) == (0, 11 * 1000 - 105)
