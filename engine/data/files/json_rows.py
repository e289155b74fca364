"""JSON: a list of objects, or one object of which one field is such a list; or JSON lines, each an object.

The list is decoded element by element, as far as it has been read. Files named .json may hold lines too.
"""

from __future__ import annotations

import codecs
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from penstock.engine.data.files import base
from penstock.engine.data.samples import BadRows, Row, RowError
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import parse_json, printable, require_sound, unique_names

_READ_BYTES = 1 << 20
_ALONE_BYTES = 8 << 20  # of an object on one line, beyond which it is no single row
_SPACE = re.compile(r"[ \t\n\r]*")
_CUT_CHARS = 12  # of the longest token that a read may have cut, a literal or an escape


def read(file: Path, bad: BadRows) -> Iterator[Row]:
    are_lines = base.container_of(file) != ".json" or _is_lines(file)
    with base.open_utf8(file) as stream:
        if are_lines:
            yield from _lines(stream, bad, printable(file))
            return
        text = _Text(stream, printable(file))
        begin = text.next()
        if begin == "[":
            text.skip("[")
            yield from _elements(text, bad, f"{printable(file)}:row ")
        elif begin == "{":
            yield from _object(text, bad, printable(file))
        elif begin:
            raise text.wrong("neither a list of objects nor an object that holds one")
        if text.next():
            raise text.wrong("something follows the end of the list; put JSON lines in a .jsonl file")


def _is_lines(file: Path) -> bool:
    """Whether the first line looks like an object and another line follows, or that object is a row."""
    with base.open_utf8(file) as stream:
        line = stream.readline(base.LINE_BYTES)
        if not line.startswith(b"{") or not line.rstrip().endswith(b"}"):
            return False
        if stream.read(_READ_BYTES).strip():
            return True
        try:
            return len(line) <= _ALONE_BYTES and _list_field(json.loads(line)) is None
        except (ValueError, RecursionError):
            return False


def _lines(stream: BinaryIO, bad: BadRows, name: str) -> Iterator[Row]:
    """A row per line; empty lines are none."""
    for where, line in base.numbered_lines(stream, name):
        try:
            row = _row(line, where)
        except RowError as error:
            bad.add(error)
            continue
        if row is not None:
            yield row


def _row(line: bytes, where: str) -> Row | None:
    """None for an empty line. RowError naming `where` for what is no object."""
    if len(line) > base.LINE_BYTES:
        raise RowError(f"{where}: a line of more than {base.LINE_BYTES >> 20} MiB; split it into several documents")
    if not line.strip():
        return None
    try:
        record = parse_json(base.decode_line(line, where), unique=True)
    except RowError:
        raise
    except json.JSONDecodeError as error:
        raise RowError(
            f"{where}: not a JSON object: {error.msg}, column {error.pos + 1:,}; each line must be one"
        ) from error
    except ValueError as error:
        raise RowError(f"{where}: not a JSON object: {error}; each line must be one") from error
    if not isinstance(record, dict):
        hint = "; put a list of rows in a .json file" if isinstance(record, list) else ""
        raise RowError(f"{where}: not a JSON object, as each line must be{hint}")
    return Row(where, record)


def _list_field(record: dict[str, Any]) -> str | None:
    """The only field that is a list of objects, unless these are the messages of a conversation."""
    lists = [key for key, value in record.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    return lists[0] if len(lists) == 1 and not {"role", "from"} & record[lists[0]][0].keys() else None


def _object(text: _Text, bad: BadRows, name: str) -> Iterator[Row]:
    """The rows of the one field that is a list of objects; `text` is at the object's bracket."""
    result: str | None = None
    text.skip("{")
    while text.next() == '"' or text.skip(","):
        key = text.value()
        if not isinstance(key, str) or not text.skip(":"):
            raise text.wrong("expected a field's name and a colon")
        if not text.skip("["):
            text.value()
            continue
        if text.next() != "{":
            while not text.skip("]"):
                text.value()
                text.skip(",")
            continue
        if result is not None:
            raise text.wrong(
                f"two lists of objects, '{printable(result)}' and '{printable(key)}'; keep one, or write two files"
            )
        result = key
        yield from _elements(text, bad, f"{name}:row ")
    if not text.skip("}"):
        raise text.wrong("an object that is not closed")
    if result is None:
        raise UserError(
            f"{name}: an object without a list of objects; write a list of rows, or one object a line (.jsonl)"
        )


def _elements(text: _Text, bad: BadRows, where: str) -> Iterator[Row]:
    """The objects of a list, whose bracket has been read."""
    if text.skip("]"):
        return
    for number in itertools.count(1):
        value = text.value()
        try:
            if not isinstance(value, dict):
                raise RowError(f"{where}{number}: not a JSON object, as each row must be")
            require_sound(value)
            yield Row(f"{where}{number}", value)
        except RowError as error:
            bad.add(error)
        except ValueError as error:
            bad.add(RowError(f"{where}{number}: {error}"))
        if text.skip("]"):
            return
        if not text.skip(","):
            raise text.wrong(f"expected a comma or the end of the list after row {number}")


class _Text:
    """The text of a stream as far as it is needed: JSON values are taken from its front one by one."""

    def __init__(self, stream: BinaryIO, name: str) -> None:
        self._stream, self._name = stream, name
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._json = json.JSONDecoder(object_pairs_hook=unique_names)
        self._text, self._at = "", 0
        self._lines, self._bytes = 0, 0
        self._ended = False

    def wrong(self, what: str) -> UserError:
        """What is wrong at the present place. The rest cannot be made out, so such a file is always refused."""
        line = 1 + self._lines + self._text.count("\n", 0, self._at)
        return UserError(f"{self._name}:{line}: not the JSON of rows: {what}")

    def next(self) -> str:
        """The next character that is no space; empty at the end."""
        while True:
            space = _SPACE.match(self._text, self._at)
            assert space is not None
            self._at = space.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def skip(self, character: str) -> bool:
        """Whether `character` is next; then it is taken."""
        result = self.next() == character
        self._at += result
        return result

    def value(self) -> Any:
        """The next value. UserError naming the line where it is none."""
        self.next()
        while True:
            try:
                value, end = self._json.raw_decode(self._text, self._at)
                if end < len(self._text) or not self._more():  # a number may go on
                    self._at = end
                    return value
            except json.JSONDecodeError as error:
                cut = error.msg.startswith("Unterminated string") or error.pos >= len(self._text) - _CUT_CHARS
                if len(self._text) - self._at > base.LINE_BYTES:
                    raise self.wrong(f"a row of more than {base.LINE_BYTES >> 20} MiB; split it") from error
                if not cut or not self._more():
                    self._at = error.pos
                    raise self.wrong(f"{error.msg}, column {error.colno}") from error
            except RecursionError as error:
                raise self.wrong("nested too deep") from error
            except ValueError as error:  # a whole number of thousands of digits, a name given twice
                raise self.wrong(str(error)) from error

    def _more(self) -> bool:
        """Read on, at least as much as is not taken yet; False at the end."""
        if self._ended:
            return False
        self._lines += self._text.count("\n", 0, self._at)
        self._text, self._at = self._text[self._at :], 0
        data = self._stream.read(max(_READ_BYTES, len(self._text)))
        self._ended = not data
        try:
            self._text += self._decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            raise UserError(
                f"{self._name}: not UTF-8 text (byte 0x{error.object[error.start]:02x} about byte "
                f"{self._bytes + error.start:,} of the file); convert it, for example from Latin-1: "
                "iconv -f LATIN1 -t UTF-8 OLD > NEW"
            ) from error
        self._bytes += len(data)
        return bool(data)
