"""From `data.source` and `data.path` to samples: which files, and what each of their rows says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.engine.config import DataConfig
from penstock.engine.config.data import PATHLESS
from penstock.engine.data.files.base import Progress, read_rows
from penstock.engine.data.files.splits import split_files
from penstock.engine.data.formats.base import FileFormat, RowFormat, find_format, require_wanted
from penstock.engine.data.needles import haystacks
from penstock.engine.data.samples import (
    BadRows,
    Comparison,
    Completion,
    Conversation,
    Ids,
    Prompt,
    RowError,
    Sample,
    Text,
    content_texts,
)
from penstock.storage.files.errors import UserError
from penstock.storage.files.links import below_data, require_of_data, require_shown
from penstock.storage.files.untrusted import printable


def source_files(config: DataConfig) -> list[Path]:
    """The files that `config.source`, no mixture, reads, in order. UserError when the path is missing or not there."""
    assert not config.mixture
    if config.source in ("random", "needles"):
        return []
    if config.lacks_path:
        raise UserError(f"data.path: required with data.source={config.source}; set it")
    reader, root = find_format(config.source), Path(config.path or "").expanduser()
    try:
        if isinstance(reader, FileFormat) and config.source in PATHLESS:
            return sorted(reader.files(root))
        if not root.exists():
            raise UserError(
                f"data.path: {root} does not exist; name a file or a folder that data.source={config.source} reads"
            )
        if isinstance(reader, RowFormat):
            files = _row_files(config, root)
        elif config.split is not None:
            raise UserError(f"data.split: data.source={config.source} has no splits; leave it out")
        else:
            files = [root] if root.is_file() else sorted(reader.files(root))
        if root.is_dir():
            require_of_data(files, root)
        return files
    except OSError as error:
        raise UserError(f"data.path: {error.filename or root} cannot be read: {error.strerror}") from error


def _row_files(config: DataConfig, root: Path) -> list[Path]:
    """A folder of `.jsonl` files with texts is read whole, as it was before there were splits; else a split's files."""
    if config.source == "jsonl" and config.split is None and root.is_dir():
        files = sorted(file for file in below_data(root) if file.suffix == ".jsonl" and file.is_file())
        if files:
            return files
    return split_files(root, config.split)


def read_samples(config: DataConfig, bad: BadRows | None = None, progress: Progress | None = None) -> Iterator[Sample]:
    """The source's samples in order, at most `config.max_documents` documents; texts that are empty are skipped.

    Of a mixture those of its parts, one after the other. What becomes of a bad row is `bad`'s to say, without it
    `config.bad_rows`. `progress` follows the reader. Raises UserError naming file (and line) of what cannot be read.
    """
    bad = bad or BadRows(config.bad_rows)
    for part in config.parts:
        if part.source == "needles":
            yield from haystacks.documents(part)
        documents = 0
        for file in source_files(part):
            if progress is not None:
                progress.begin(file)
            for sample in read_file(part, file, bad):
                if part.max_documents is not None and documents >= part.max_documents:
                    break
                yield sample
                documents += getattr(sample, "last", True)
                if progress is not None:
                    progress.documents = documents
            else:
                continue
            break


def read_file(config: DataConfig, file: Path, bad: BadRows) -> Iterator[Sample]:
    """The samples of one of `source_files`."""
    reader = find_format(config.source)
    try:
        if isinstance(reader, RowFormat):
            for sample in _converted(reader, config.columns, file, bad):
                if config.comparison == "unpaired" and isinstance(sample, Comparison):
                    yield from sample.apart
                else:
                    yield sample
        else:
            yield from reader.read(file)
    except OSError as error:
        raise UserError(f"{printable(file)}: cannot be read: {error.strerror or error}") from error


def _converted(reader: RowFormat, columns: dict[str, str], file: Path, bad: BadRows) -> Iterator[Sample]:
    unknown = sorted(columns.keys() - set(reader.FIELDS))
    if unknown:
        raise UserError(
            f"data.columns: '{printable(unknown[0])}' is not a field of the format; it reads {', '.join(reader.FIELDS)}"
        )
    for where, fields in read_rows(file, bad):
        try:
            row = renamed(fields, columns)
            sample = reader.convert(row, where)
            if isinstance(sample, Conversation | Completion):
                require_wanted(row, where)
            if isinstance(sample, Conversation) and sample.images:
                sample = replace(sample, images=tuple(_located(image, file, where) for image in sample.images))
        except RowError as error:
            bad.add(error)
            continue
        if sample is not None:
            yield sample


def _located(image: str | bytes, file: Path, where: str) -> str | bytes:
    """An image's path from the folder of the file that names it. RowError for one that a stranger's data may not."""
    if isinstance(image, bytes):
        return image
    path = file.parent / image
    try:
        require_shown(path, file.parent)
    except UserError as error:
        raise RowError(f"{where}: image {error}") from error
    return str(path)


def renamed(fields: dict[str, Any], columns: dict[str, str]) -> dict[str, Any]:
    """A row's fields by the names that the format has for them."""
    if not columns:
        return fields
    taken = {column: name for name, column in columns.items()}
    rest = {column: value for column, value in fields.items() if column not in taken and column not in columns}
    return rest | {taken[column]: value for column, value in fields.items() if column in taken}


def texts_of(sample: Sample) -> Iterator[str]:
    """What people wrote in a sample: what a tokenizer can be trained on. Nothing for tokens."""
    if isinstance(sample, Text):
        yield sample.text
    elif isinstance(sample, Completion):
        yield from (sample.prompt, sample.completion)
    elif isinstance(sample, Conversation):
        for message in sample.messages:
            yield from filter(None, content_texts(message.get("content")))
    elif isinstance(sample, Comparison):
        for side in sample.sides:
            yield from texts_of(side)
    elif isinstance(sample, Prompt):
        yield from texts_of(sample.side)


def is_empty(sample: Sample) -> bool:
    """Whether a sample has nothing but white space."""
    return not sample.ids if isinstance(sample, Ids) else not any(text.strip() for text in texts_of(sample))
