"""What comes from files that anybody may have written: JSON, folders, and text that is shown on a terminal.

Only regular files are opened, links are not followed, JSON is bounded, and text reaches a terminal without control
characters.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeGuard, TypeVar

import msgspec

from penstock.storage.files.errors import UserError

T = TypeVar("T")
MOST_WHOLE = 2**63 - 1
Size = Annotated[int, msgspec.Meta(ge=0, le=MOST_WHOLE)]
Count = Annotated[int, msgspec.Meta(ge=1, le=MOST_WHOLE)]

MOST_DEPTH = 100
"""Levels of nesting; our own files and those of models have fewer than ten."""
MOST_BYTES = 1 << 30
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufff9-\ufffb\ud800-\udfff]")
"""All but tab and newline that moves a cursor, begins an escape, turns text around, or is no character."""


def parse_json(content: bytes | str, *, most_bytes: int = MOST_BYTES, unique: bool = False) -> Any:
    """The value that UTF-8 text holds. ValueError where it is no JSON, too long or too deep, or holds a lone surrogate,
    which no file or terminal takes. `unique`: refuse names given twice."""
    if len(content) > most_bytes:
        raise ValueError(f"{len(content):,} bytes exceed the limit of {most_bytes:,}")
    text = content.decode("utf-8") if isinstance(content, bytes) else content
    try:
        value = json.loads(text, object_pairs_hook=unique_names if unique else None)
    except RecursionError:
        raise ValueError(f"nested more than {MOST_DEPTH} levels deep") from None
    require_sound(value)
    return value


def require_sound(value: Any, depth: int = 0) -> None:
    """ValueError where a JSON value is nested too deep, or holds a lone surrogate."""
    if depth > MOST_DEPTH:
        raise ValueError(f"nested more than {MOST_DEPTH} levels deep")
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError("text with a lone surrogate, which is not a character") from None
    elif isinstance(value, dict):
        for key in value:
            require_sound(key, depth)
        require_sound(list(value.values()), depth)
    elif isinstance(value, list):
        for item in value:
            if not isinstance(item, int | float):
                require_sound(item, depth + 1)


def parse_object(content: bytes | str, *, most_bytes: int = MOST_BYTES, unique: bool = False) -> dict[str, Any]:
    """The same for a JSON object; ValueError where it is anything else."""
    value = parse_json(content, most_bytes=most_bytes, unique=unique)
    if not isinstance(value, dict):
        kinds = {list: "a list", str: "a text", int: "a number", float: "a number"}
        raise ValueError(f"expected a JSON object, not {kinds.get(type(value), json.dumps(value))}")
    return value


def typed(value: Any, wanted: type[T]) -> T:
    """A JSON value as `wanted`, its types and bounds checked; ValueError naming the field for anything else."""
    try:
        return msgspec.convert(value, wanted)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$")
        raise ValueError(f"{path.strip('.`')}: {what}" if path else what) from None


def parse_printable(content: bytes) -> dict[str, Any]:
    """The JSON object that UTF-8 text holds, every text in it, keys included, as `printable` makes it. ValueError; but
    numbers that JSON does not know (NaN) are the reader's to look at."""
    plain = b"\\" not in content and b"\x7f" not in content and content.isascii()
    if plain and len(content) <= MOST_BYTES and content.count(b"[") + content.count(b"{") <= MOST_DEPTH:
        value = json.loads(content)  # such text holds no control character and nests no deeper
        if isinstance(value, dict):
            return value
    return {printable(key): printable_value(item) for key, item in parse_object(content).items()}


def printable_value(value: Any) -> Any:
    """A JSON value, every text in it, keys included, as `printable` makes it."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(key): printable_value(item) for key, item in value.items()}
    return [printable_value(item) for item in value] if isinstance(value, list | tuple) else value


def unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object (json's `object_pairs_hook`). ValueError for a name given twice."""
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"'{one_line(twice, 40)}' appears twice")
    return result


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a JSON value is a whole number of at most 63 bits: no float, no boolean."""
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value <= MOST_WHOLE


def open_regular(path: Path, *, below: Path | None = None, flags: int = os.O_RDONLY) -> int:
    """A descriptor of regular file `path`, of which nothing below folder `below` (default its own) is a link: those
    above are the user's. Never waits: a pipe or a device is refused like a link, with an OSError. `flags`: os.open."""
    folder = Path(below) if below is not None else path.parent
    inner = Path(os.path.relpath(path, folder)).parts
    assert ".." not in inner, (path, below)
    here = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in inner[:-1]:
            here, above = _enter(here, name, path), here
            os.close(above)
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
        try:
            fd = os.open(inner[-1], flags, 0o644, dir_fd=here)
        except OSError as error:
            if _is_link(inner[-1], here):
                refuse(path, "a symbolic link, which is not followed here")
            if error.errno == 6:  # ENXIO: a pipe without a reader, a socket
                refuse(path, "no regular file")
            raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(here)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        refuse(path, "no regular file")
    os.set_blocking(fd, True)
    return fd


def _enter(here: int, name: str, path: Path) -> int:
    try:
        return os.open(name, _FOLDER, dir_fd=here)
    except OSError as error:
        if _is_link(name, here):
            refuse(path, f"in '{name}', a symbolic link, which is not followed here")
        raise OSError(error.errno, error.strerror, str(path)) from None


def _is_link(name: str, here: int) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=here, follow_symlinks=False).st_mode)
    except OSError:
        return False


class RefusedFileError(OSError):
    """A file that must not be opened: a link, a pipe, a device, a folder."""


def refuse(path: Path, why: str) -> NoReturn:
    """Raise RefusedFileError: `path` is `why`."""
    raise RefusedFileError(None, f"it is {why}", str(path))


def read_regular(path: Path, *, below: Path | None = None, most_bytes: int = MOST_BYTES) -> bytes:
    """The content of a file opened by `open_regular`. OSError; ValueError where it has more than `most_bytes`."""
    with open(open_regular(path, below=below), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(min(size, most_bytes) + 1)  # so much is allocated at once
        if len(content) > size:  # it grew meanwhile
            content += file.read(max(0, most_bytes + 1 - len(content)))
    if len(content) > most_bytes:
        raise ValueError(f"larger than the limit of {most_bytes:,} bytes")
    return content


def real_path(path: Path) -> Path:
    """`path` made absolute, its ~ and links followed. UserError for a loop of links and what can be no path."""
    try:
        return path.expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:  # too long, a loop or an unknown ~user, a zero byte
        raise UserError(f"{one_line(path)}: is not a path ({one_line(error)}); choose another") from None


def is_real_folder(path: Path) -> bool:
    """Whether `path` is a folder and no link to one."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def printable(text: object) -> str:
    """`text` as it may be shown on a terminal: every control character, and what turns text around, becomes U+FFFD."""
    return _CONTROL.sub("\ufffd", str(text))


def shell(*words: str | Path) -> str:
    """A command to type, whatever the names in it hold, printable."""
    return printable(shlex.join(map(str, words)))


def one_line(text: object, most: int = 500) -> str:
    """`text` (of another library's error, say), printable, in one line of at most `most` characters."""
    line = printable(" ".join(str(text).split()))
    return line if len(line) <= most else line[:most] + "..."
