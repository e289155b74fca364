import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from obstacles import plant
from samples import sampled

from penstock.storage import untrusted

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=3)
    ),
)


@sampled(25, 100)
@given(JSON)
def test_what_json_wrote_is_read(value: object) -> None:
    assert untrusted.parse_json(json.dumps(value).encode()) == value


@pytest.mark.parametrize("depth", [untrusted.MOST_DEPTH + 2, 5_000, 3_000_000])
def test_deep_nesting_is_a_value_error(depth: int) -> None:
    for opening, closing in ("[]", ('{"a":', "}")):
        with pytest.raises(ValueError, match="levels deep"):
            untrusted.parse_json(opening * depth + "1" + closing * depth)


def test_what_is_no_json_is_a_value_error() -> None:
    for content in (b"", b"{", b"\xff\xfe", b'{"a": "\\ud800"}', b'{"\\udfff": 1}', b"9" * 10_000, b"nul", b"[1] 2"):
        with pytest.raises(ValueError, match=r"\w"):
            untrusted.parse_json(content)
    with pytest.raises(ValueError, match="bytes exceed the limit of 3"):
        untrusted.parse_json(b"[1,2]", most_bytes=3)
    for text in ("[]", "1", "null", '"a"'):
        with pytest.raises(ValueError, match="expected a JSON object"):
            untrusted.parse_object(text)
    assert [untrusted.is_whole(v) for v in (0, -1, 2**62, 1.0, True, None, "1", 2**70)] == [True] * 3 + [False] * 5


def test_regular_files_are_opened(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_bytes(b"content")
    assert untrusted.read_regular(tmp_path / "a" / "b" / "file", below=tmp_path) == b"content"
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert untrusted.read_regular(tmp_path / "link" / "b" / "file", below=tmp_path / "link") == b"content"
    with pytest.raises(ValueError, match="larger than the limit of 3 bytes"):
        untrusted.read_regular(tmp_path / "a" / "b" / "file", most_bytes=3)
    with pytest.raises(FileNotFoundError):
        untrusted.read_regular(tmp_path / "a" / "none")


@pytest.mark.parametrize("kind", ["link", "dangling link", "link in the way", "pipe", "socket", "folder", "device"])
def test_nothing_else_is(tmp_path: Path, kind: str) -> None:
    target, path = tmp_path / "target", tmp_path / "run" / "file"
    target.write_bytes(b"secret")
    path.parent.mkdir()
    if kind == "link in the way":
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "file").write_bytes(b"secret")
        (tmp_path / "run" / "sub").symlink_to(tmp_path / "other")
        path = tmp_path / "run" / "sub" / "file"
    elif kind == "device":
        path = Path("/dev/null")
    else:
        plant(path, kind, target)
    below = path.parent if kind == "device" else tmp_path / "run"
    for flags in (os.O_RDONLY, os.O_WRONLY | os.O_APPEND | os.O_CREAT, os.O_RDWR | os.O_CREAT):
        with pytest.raises(OSError, match=r"it is|Is a directory"):
            os.close(untrusted.open_regular(path, below=below, flags=flags))
    assert target.read_bytes() == b"secret"
    assert not (tmp_path / "nothing").exists()


def test_links_are_said_to_be_links_and_no_folders(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(untrusted.RefusedFileError, match="it is a symbolic link, which is not followed here"):
        untrusted.open_regular(tmp_path / "link")
    assert [untrusted.is_real_folder(tmp_path / name) for name in ("real", "link", "none")] == [True, False, False]


@given(st.text())
def test_printable_text_moves_no_cursor(text: str) -> None:
    shown = untrusted.printable(text)
    assert len(shown) == len(text)
    assert not any((ord(c) < 32 and c not in "\t\n") or 127 <= ord(c) < 160 for c in shown)
    shown.encode()
    assert untrusted.printable("a\x1b]0;title\x07b\u202ec\nd\te") == "a\ufffd]0;title\ufffdb\ufffdc\nd\te"
