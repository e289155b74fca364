"""Files and folders that appear whole or not at all, whatever is in their place; what is read of others' files; errors
that say that something is used up, as Python, torch and the system word them; and figures in few cells."""

import errno
import itertools
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from obstacles import plant
from samples import sampled
from system_calls import failing
from used_up import SHORTAGES

from penstock.storage.files import disk, units, untrusted
from penstock.storage.files.errors import UserError, not_ours


def test_folders_are_made_and_refused_where_nothing_can_be_written(tmp_path: Path) -> None:
    disk.require_writable(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []
    (tmp_path / "file").write_text("")
    # /proc refuses new entries to everyone, root included.
    for path in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/penstock"), Path("/proc")):
        with pytest.raises(UserError, match=f"{path}: not a writable folder"):
            disk.require_writable(path)
    disk.require_free(tmp_path, 1, "a byte")
    with pytest.raises(UserError, match=r"the moon needs 1,000,000,000,000,000,000 bytes.* are free"):
        disk.require_free(tmp_path, 10**18, "the moon")


def test_a_drive_that_goes_while_folders_are_made_is_said_to_be_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive = tmp_path / "drive"
    (drive / "a").mkdir(parents=True)

    def mkdir_then_unmount(path: Path, mode: int) -> None:
        try:
            mkdir(path, mode)
        finally:
            drive.rename(tmp_path / "unmounted")

    mkdir = os.mkdir
    monkeypatch.setattr(os, "mkdir", mkdir_then_unmount)
    with pytest.raises(FileNotFoundError):
        disk.make_folder(drive / "a" / "b", inside=drive)


def test_syncing_waits_for_no_pipe_and_follows_no_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "target").write_text("")
    for kind in ("link", "pipe"):
        plant(tmp_path / kind, kind, tmp_path / "target")
        with pytest.raises(OSError, match=r"Too many levels|Invalid argument"):
            disk.fsync_file(tmp_path / kind)
    failing(monkeypatch, ["fsync"], errno.EINVAL)  # a file system that cannot sync folders
    disk.fsync_dir(tmp_path)
    failing(monkeypatch, ["fsync"], errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        disk.fsync_dir(tmp_path)


@pytest.mark.parametrize("links", [True, False])
def test_link_or_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(bytes(range(256)) * 40_000)
    if not links:
        failing(monkeypatch, ["link"], errno.EXDEV)
    assert disk.link_or_copy(source, target) == (0 if links else 256 * 40_000)
    assert target.read_bytes() == source.read_bytes()
    assert source.stat().st_nlink == 1 + links
    with pytest.raises(FileExistsError):
        disk.link_or_copy(source, target)
    with pytest.raises(FileNotFoundError):
        disk.link_or_copy(tmp_path / "nothing", tmp_path / "new")


def test_atomic_write_replaces_and_what_a_killed_process_left_is_swept(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content in ("text", b"bytes", ""):
        disk.atomic_write(path, content)
        assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
        assert os.listdir(tmp_path) == ["file"]
    disk.publish(disk.prepare_file(path, (b"%d\n" % i for i in range(3))), path)
    assert path.read_bytes() == b"0\n1\n2\n"
    for number, kind in enumerate(("file", "link", "folder")):
        plant(tmp_path / f".file.{number}.tmp", kind, tmp_path / "other")
    disk.sweep_temporaries(path)
    assert sorted(os.listdir(tmp_path)) == [".file.1.tmp", ".file.2.tmp", "file"]


def test_full_disk_keeps_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    write = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, data, offset: write(fd, [data[0][:2]], offset))
    failing(monkeypatch, ["pwritev"], errno.ENOSPC, first=1)  # two bytes are written before
    with pytest.raises(UserError, match=r"file: writing 3 bytes failed: No space left.*free some space"):
        disk.atomic_write(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("kind", ["link", "dangling link", "hard link", "pipe", "folder"])
def test_what_is_planted_under_the_temporary_name_is_never_written_through(tmp_path: Path, kind: str) -> None:
    path, victim = tmp_path / "run" / "file", tmp_path / "victim"
    path.parent.mkdir()
    path.write_text("old")
    victim.write_text("not ours")
    planted = disk.temporary_name(path)
    plant(planted, kind, victim)
    if kind == "hard link":  # looks like a file that a killed process left
        disk.atomic_write(path, "new")
        assert path.read_text() == "new"
    else:
        with pytest.raises(UserError, match=rf"{planted}: writing 3 bytes failed: it is in the way.*move it away"):
            disk.atomic_write(path, "new")
        assert path.read_text() == "old"
        assert os.path.lexists(planted)
    assert victim.read_text() == "not ours"
    assert not (tmp_path / "nothing").exists()


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    for content in ("old", "new"):
        with disk.build_folder(folder) as temporary:
            (temporary / content).write_text("")
    assert os.listdir(folder) == ["new"]
    with pytest.raises(KeyError), disk.build_folder(folder):
        raise KeyError
    assert os.listdir(tmp_path) == ["made"]
    assert os.listdir(folder) == ["new"]


@pytest.mark.parametrize("name", ["made", "m[a]de*"])
def test_what_a_killed_process_built_goes_with_the_next(tmp_path: Path, name: str) -> None:
    folder, killed = tmp_path / name, tmp_path / f"{name}.building-99999999"
    killed.mkdir()
    (killed / "tokens.bin").write_bytes(bytes(1 << 20))
    (tmp_path / "made.other").mkdir()
    with disk.build_folder(folder) as temporary:
        assert not killed.exists()
        assert temporary.is_dir()
    assert sorted(os.listdir(tmp_path)) == sorted([name, "made.other"])


@pytest.mark.parametrize("where", ["made", "made.building-PID"])
@pytest.mark.parametrize("kind", ["link", "dangling link", "file"])
def test_nothing_is_written_or_deleted_through_a_link(tmp_path: Path, where: str, kind: str) -> None:
    target, place = tmp_path / "target", tmp_path / "run" / where.replace("PID", str(os.getpid()))
    place.parent.mkdir()
    target.mkdir()
    (target / "thesis.tex").write_text("not ours")
    plant(place, kind, target)
    refusal = pytest.raises(UserError, match=f"{place.name}: is where a folder has to be made; move it away")
    with refusal, disk.build_folder(place.with_name("made")):
        pass
    assert os.path.lexists(place)
    assert os.listdir(target) == ["thesis.tex"]
    assert not (tmp_path / "nothing").exists()


TEXT = st.text(st.characters(codec="utf-8"))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
)


@sampled(25, 100)
@given(JSON)
def test_what_json_wrote_is_read(value: object) -> None:
    assert untrusted.parse_json(json.dumps(value).encode()) == value


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
    nestings = (("[", "]"), ('{"a":', "}"))
    for depth, (opening, closing) in itertools.product((untrusted.MOST_DEPTH + 2, 5_000, 3_000_000), nestings):
        with pytest.raises(ValueError, match="levels deep"):
            untrusted.parse_json(opening * depth + "1" + closing * depth)


def test_regular_files_are_opened_and_links_are_said_to_be_links(tmp_path: Path) -> None:
    file = tmp_path / "a" / "b" / "file"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"content")
    assert untrusted.read_regular(file, below=tmp_path) == b"content"
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert untrusted.read_regular(tmp_path / "link" / "b" / "file", below=tmp_path / "link") == b"content"
    with pytest.raises(ValueError, match="larger than the limit of 3 bytes"):
        untrusted.read_regular(file, most_bytes=3)
    with pytest.raises(FileNotFoundError):
        untrusted.read_regular(tmp_path / "a" / "none")
    with pytest.raises(untrusted.RefusedFileError, match="it is a symbolic link, which is not followed here"):
        untrusted.open_regular(tmp_path / "link")
    assert [untrusted.is_real_folder(tmp_path / name) for name in ("a", "link", "none")] == [True, False, False]


@pytest.mark.parametrize("kind", ["link", "dangling link", "link in the way", "pipe", "socket", "folder", "device"])
def test_nothing_else_is(tmp_path: Path, kind: str) -> None:
    target, path, below = tmp_path / "target", tmp_path / "run" / "file", tmp_path / "run"
    target.write_bytes(b"secret")
    below.mkdir()
    if kind == "link in the way":
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "file").write_bytes(b"secret")
        (below / "sub").symlink_to(tmp_path / "other")
        path = below / "sub" / "file"
    elif kind == "device":
        path, below = Path("/dev/null"), Path("/dev")
    else:
        plant(path, kind, target)
    for flags in (os.O_RDONLY, os.O_WRONLY | os.O_APPEND | os.O_CREAT, os.O_RDWR | os.O_CREAT):
        with pytest.raises(OSError, match=r"it is|Is a directory"):
            os.close(untrusted.open_regular(path, below=below, flags=flags))
    assert target.read_bytes() == b"secret"
    assert not (tmp_path / "nothing").exists()


@given(st.text())
def test_printable_text_moves_no_cursor(text: str) -> None:
    shown = untrusted.printable(text)
    assert len(shown) == len(text)
    assert not any((ord(c) < 32 and c not in "\t\n") or 127 <= ord(c) < 160 for c in shown)
    shown.encode()
    assert untrusted.printable("a\x1b]0;title\x07b\u202ec\nd\te") == "a\ufffd]0;title\ufffdb\ufffdc\nd\te"


@pytest.mark.parametrize("name", SHORTAGES)
def test_what_is_used_up_is_a_message(name: str) -> None:
    cause, message = SHORTAGES[name]
    with pytest.raises((MemoryError, OSError, RuntimeError)) as caught:
        cause()
    assert message in str(not_ours(caught.value))


def test_other_errors_are_none() -> None:
    for cause in (lambda: os.stat("/no/such/file"), lambda: torch.ones(2) + torch.ones(3), threading.Lock().release):
        with pytest.raises((OSError, RuntimeError)) as caught:
            cause()
        assert not_ours(caught.value) is None


def test_a_gpu_that_failed_is_a_message() -> None:
    """Of torch by its type, of the libraries of CUDA by their words: the first line of what they say."""
    errors = (
        torch.AcceleratorError("HIP error: unspecified launch failure\nFor debugging consider..."),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`\nmore"),
    )
    for error, first in zip(errors, ("HIP error: unspecified launch failure", "cublasGemmEx`"), strict=True):
        said = str(not_ours(error))
        assert said.startswith("the GPU failed: ")
        assert f"{first}. What is on disk is as it was" in said
        assert "debugging" not in said
    assert not_ours(ValueError("CUDA error: in somebody's text")) is None


GIB, NAN = 2**30, float("nan")


@pytest.mark.parametrize(
    ("formatter", "values", "texts"),
    [
        (units.bytes_text, (None, NAN, 0, 1023, 1024), "n/a, n/a, 0 B, 1023 B, 1.0 KiB"),
        (units.bytes_text, (1.5 * GIB, 206 * 2**20, 1023.7 * 2**20), "1.5 GiB, 206 MiB, 1.0 GiB"),
        (units.bytes_text, (2**41, 25.15 * 2**40, 1562.5 * 2**40), "2.00 TiB, 25.1 TiB, 1,562 TiB"),
        (lambda sizes: units.of_text(*sizes), ((61.2 * GIB, 78.4 * GIB),), "61.2 of 78.4 GiB"),  # one unit for both
        (lambda sizes: units.of_text(*sizes), ((900 * 2**20, GIB), (None, GIB)), "900 MiB of 1.0 GiB, n/a of 1.0 GiB"),
        (lambda sizes: units.of_text(*sizes), ((GIB, None),), "1.0 GiB of n/a"),
        (units.size_text, (999, 2**10, 120 * 2**20, 120 * 2**20 + 1), "999, 1KiB, 120MiB, 121MiB"),
        (units.size_text, (16_384, 3 * GIB, 3 * GIB + 1, 200 * GIB - 5), "16KiB, 3GiB, 3073MiB, 200GiB"),
        (units.rate_text, (None, 500, 3.12e9, 250e6), "n/a, 500 B/s, 3.1 GB/s, 250 MB/s"),
        (units.seconds_text, (None, float("inf"), 0, 0.00012, 0.01234), "n/a, n/a, 0 s, 120 us, 12.3 ms"),
        (units.seconds_text, (0.9999, 4.2, 95.34, 599.4, 600), "1.00 s, 4.20 s, 95.3 s, 599 s, 10m00s"),
        (units.duration_text, (None, NAN, 0, 59.4, 59.6), "n/a, n/a, 0s, 59s, 1m00s"),
        (units.duration_text, (185, 22_320, 183_600), "3m05s, 6h12m, 2d03h"),
        (units.percent_text, (None, NAN, 0.0, 0.376), "n/a, n/a, 0.0%, 37.6%"),
        (units.params_text, (812, 1.5e6, 122.6e9), "812, 1.5 M, 123 B"),
        (units.count_text, (0, 950, 1000, 1234, 45_600, 3.1e6, 2e12), "0, 950, 1k, 1.2k, 45.6k, 3.1M, 2T"),
        (units.figure, (None, 0, 0.000123, 1.2345, 123.4, 12345.6), "n/a, 0, 1.23e-4, 1.23, 123, 12,346"),
    ],
)
def test_figures(formatter: Callable[[Any], str], values: tuple[Any, ...], texts: str) -> None:
    assert ", ".join(map(formatter, values)) == texts
