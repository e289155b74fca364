"""What a file or a folder holds, found by looking at its first rows; and what `data.source=auto` stands for."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from penstock.engine.config import DataConfig
from penstock.engine.data.files.base import container_of, open_utf8, read_rows
from penstock.engine.data.files.splits import find_splits, split_files
from penstock.engine.data.formats.base import FORMATS, RowFormat, find_format, lists_objects
from penstock.engine.data.formats.preference import QUESTIONS
from penstock.engine.data.formats.reading import renamed
from penstock.engine.data.samples import BadRows
from penstock.storage.files.errors import UserError
from penstock.storage.files.links import below_data, require_no_entry, require_of_data
from penstock.storage.files.untrusted import one_line, printable

_ROWS = 20  # that are looked at
_TEXT_FILES = 20
_TEXT_BYTES = 4096


class Detected(NamedTuple):
    """What a path holds: what to put into the data section of a recipe."""

    source: str
    split: str | None
    """None where there are none."""
    rename: dict[str, str]
    """For data.columns: where the format has another name for a field."""


def detect(path: Path, split: str | None = None, columns: Mapping[str, str] | None = None) -> Detected:
    """What is at `path`, by the first rows of the split (train where none is named); `columns` as data.columns has it.

    Raises UserError where nothing is there or no format fits, telling the columns that there are.
    """
    root = path.expanduser()
    try:
        if not root.exists():
            raise UserError(f"data.path: {printable(root)} does not exist; name a file or a folder")
        require_no_entry(root.resolve())
        if root.is_file() and container_of(root) is None:
            splits: dict[str, list[Path]] = {}
        else:
            splits = find_splits(root)
        if not splits:
            return _plain_text(root)
        files = split_files(root, split)
        chosen = next(name for name, listed in splits.items() if listed == files)
        if root.is_dir():
            require_of_data(files[:1], root)
        bad = BadRows("skip")
        first = [row.fields for row in itertools.islice(read_rows(files[0], bad), _ROWS)]
    except OSError as error:
        raise UserError(f"data.path: {error.filename or root} cannot be read: {error.strerror}") from error
    if not first:
        raise UserError(bad.first or f"{printable(files[0])}: it has no rows; give a file that has some")
    given = dict(columns or {})
    source, rename = _format_of([renamed(fields, given) for fields in first], files[0])
    return Detected(source, chosen if len(splits) > 1 else None, rename)


def _format_of(rows: list[dict[str, Any]], file: Path) -> tuple[str, dict[str, str]]:
    """Format and what it renames, of rows that all match. UserError telling the columns where none does."""
    for source in FORMATS:
        reader = find_format(source)
        if isinstance(reader, RowFormat) and any(map(reader.matches, rows)):
            if (name := next(filter(None, map(_rejected, rows)), None)) is not None:
                shown = one_line(name, 40)
                raise UserError(
                    f"{printable(file)}: `{shown}` holds answers that are not wanted; to train on pairs set "
                    f'data.source=preference, data.columns={{"chosen": "...", "rejected": "{shown}"}} and '
                    f"train.objective=dpo; to train on the others alone set data.source={source}"
                )
            return source, _prompt_column(rows) if source == "preference" else {}
    result = [
        (source, {field: name})
        for source, field, own in (("sharegpt", "conversations", "from"), ("messages", "messages", "role"))
        for name, value in rows[0].items()
        if lists_objects(value, own)
    ]
    if len(result) == 1:
        return result[0]
    if result:
        names = one_line(", ".join(name for _, rename in result for name in rename.values()), 300)
        source, rename = result[0]
        raise UserError(
            f"{printable(file)}: the columns {names} all hold conversations; name the one to train on, such as "
            f"data.source={source} data.columns={json.dumps(rename)}"
        )
    columns = one_line(", ".join(dict.fromkeys(name for fields in rows for name in fields)), 300)
    raise UserError(
        f"{printable(file)}: the columns {columns} match no known format; say what they are, such as "
        'data.source=prompt_completion data.columns={"prompt": "...", "completion": "..."} or data.source=jsonl '
        'data.columns={"text": "..."}'
    )


def _prompt_column(rows: list[dict[str, Any]]) -> dict[str, str]:
    """What to rename where pairs have a prompt by another name."""
    if any(fields.get(name) for fields in rows for name in ("prompt", "conversations")):
        return {}
    names = [name for name in QUESTIONS if any(fields.get(name) for fields in rows)]
    return {"prompt": names[0]} if len(names) == 1 else {}


def _rejected(fields: dict[str, Any]) -> str | None:
    """The field with the worse answer of a pair whose better one stands where answers do; None where there is none."""
    if "chosen" in fields:  # beside a conversation that may be there to be trained on
        return None
    said = (name for name, value in fields.items() if value and isinstance(value, str | list | dict))
    return next((name for name in said if name.startswith("rejected")), None)


def _plain_text(root: Path) -> Detected:
    """A folder or a file of texts. UserError for one that is none."""
    files = [root] if root.is_file() else sorted(file for file in below_data(root) if file.is_file())
    if not files:
        raise UserError(f"data.path: {printable(root)} is an empty folder; name one with files")
    if root.is_dir():
        require_of_data(files[:_TEXT_FILES], root)
    for file in files[:_TEXT_FILES]:
        with open_utf8(file) as stream:
            start = stream.read(_TEXT_BYTES)
        try:
            text = start.decode("utf-8", "strict" if len(start) < _TEXT_BYTES else "ignore")
        except UnicodeDecodeError:
            text = "\0"
        if "\0" in text:
            raise UserError(
                f"data.path: {printable(file)} is neither a supported file of rows (.json, .jsonl, .csv, .tsv, "
                ".parquet, .arrow) nor UTF-8 text; convert it, or name another path"
            )
    return Detected("text", None, {})


def found_source(data: DataConfig) -> tuple[DataConfig, list[str]]:
    """The data with the format, the split and the columns that are found where the source is auto; a line for each.

    Data without a path stay as they are. Raises UserError where nothing is there, or no format fits.
    """
    said: list[str] = []
    parts = [_found(part, said) for part in data.parts]
    if not data.mixture:
        return parts[0], said
    mixture = []
    for entry, before, part in zip(data.mixture, data.parts, parts, strict=True):
        result = {"source": part.source, "columns": part.columns, "split": part.split} if part != before else {}
        mixture.append(entry | {name: value for name, value in result.items() if value is not None})
    return (replace(data, mixture=mixture) if said else data), said


def _found(data: DataConfig, said: list[str]) -> DataConfig:
    if data.source != "auto" or data.path is None:
        return data
    result = detect(Path(data.path), data.split, data.columns)
    split = f", split {result.split}" if result.split else ""
    columns = "".join(f", {name} in column {column}" for name, column in result.rename.items())
    said.append(printable(f"data.source=auto: {result.source} is found in {data.path}{split}{columns}"))
    source: Any = result.source
    return replace(data, source=source, split=result.split or data.split, columns=data.columns | result.rename)
