"""What a format is to the rest: a module named in `FORMATS`, of rows (`convert`) or of whole files (`read`)."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

from penstock.engine.data.samples import RowError, Sample, Text
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import one_line, parse_json


@runtime_checkable
class RowFormat(Protocol):
    """What the module of a format of rows has; which container the rows come in is not its business."""

    FIELDS: tuple[str, ...]
    """Names of the fields that it reads, those without which there is no sample first; `data.columns` renames them."""

    def matches(self, fields: dict[str, Any]) -> bool:
        """Whether a row looks like one of these, for a file of which nobody said what it is."""
        ...

    def convert(self, fields: dict[str, Any], where: str) -> Sample | None:
        """The sample of a row; None for one that is empty and so left out.

        Raises RowError naming `where`, the field and the fix for what is none.
        """
        ...


@runtime_checkable
class FileFormat(Protocol):
    """What the module of a format of whole files has."""

    def files(self, path: Path) -> list[Path]:
        """The files to read in the folder `path`; a file is read itself. Sources without a path ignore it."""
        ...

    def read(self, file: Path) -> Iterator[Text]:
        """The documents of a file in order. Raises UserError naming the file that cannot be read."""
        ...


FORMATS = {
    "python_stdlib": "penstock.engine.data.formats.python_stdlib",
    "text": "penstock.engine.data.formats.text",
    "tokens": "penstock.engine.data.formats.tokens",
    "preference": "penstock.engine.data.formats.preference",
    "unpaired_preference": "penstock.engine.data.formats.unpaired_preference",
    "messages": "penstock.engine.data.formats.messages",
    "sharegpt": "penstock.engine.data.formats.sharegpt",
    "alpaca": "penstock.engine.data.formats.alpaca",
    "prompt_completion": "penstock.engine.data.formats.prompt_completion",
    "jsonl": "penstock.engine.data.formats.jsonl",
    "prompts": "penstock.engine.data.formats.prompts",
}
"""data.source -> the module of its format; `random` has no files. Rows are tried by `matches` in this order."""


def find_format(source: str) -> RowFormat | FileFormat:
    """The format of `source`. Raises UserError for one that there is not."""
    if source == "auto":
        raise UserError("data.source: auto has no data to be found from; name a file or a folder with data.path")
    if source not in FORMATS:
        raise UserError(f"data.source: '{source}' is unknown; valid names: {', '.join([*FORMATS, 'random'])}")
    return cast("RowFormat | FileFormat", importlib.import_module(FORMATS[source]))


def required(fields: dict[str, Any], name: str, where: str) -> Any:
    """The value of a field. RowError naming those that there are where it is missing, or null."""
    value = fields.get(name)
    if value is None:
        if is_preference(fields):
            raise RowError(f"{where}: {PREFERENCE}")
        there = ", ".join(sorted(key for key, value in fields.items() if value is not None)) or "none"
        raise RowError(
            f"{where}: no `{name}` field; the row has {one_line(there, 200)}; name the one that holds it with "
            f'data.columns={{"{name}": "..."}}'
        )
    return value


PREFERENCE = (
    "this is a preference pair (`chosen` and `rejected`); to train on pairs set data.source=preference and "
    "train.objective=dpo; to train on the chosen answers alone name the column: data.source=prompt_completion "
    'data.columns={"completion": "chosen"}, or where it holds whole conversations data.source=messages data.columns='
    '{"messages": "chosen"}'
)


def is_preference(fields: dict[str, Any]) -> bool:
    """Whether a row is a pair of a better and a worse answer."""
    return fields.get("chosen") is not None and fields.get("rejected") is not None


VERDICTS = ("label", "kto_tag")
"""Fields that say whether an answer is wanted."""


def require_wanted(fields: dict[str, Any], where: str) -> None:
    """RowError where a row says that its answer is one that nobody wants, as unpaired preferences have them."""
    for name in VERDICTS:
        value = fields.get(name)
        if value is False or str(value).lower() == "false" or (name == "kto_tag" and value in (0, "0")):
            raise RowError(
                f"{where}: `{name}` is false: its answer is not wanted; to train on wanted and unwanted answers set "
                "data.source=unpaired_preference and train.objective=kto; else remove the rows of such answers; or, "
                f'where the column means something else, set data.columns={{"{name}": "not read"}}'
            )


def text_field(fields: dict[str, Any], name: str, where: str) -> str:
    """A field that is text. RowError where it is missing, or anything else."""
    value = required(fields, name, where)
    if not isinstance(value, str):
        raise RowError(f"{where}: no `{name}` field that is a string; it holds {kind(value)}")
    return value


def optional_text(fields: dict[str, Any], name: str, where: str) -> str:
    """The same; empty where it is missing."""
    return "" if fields.get(name) is None else text_field(fields, name, where)


def unpacked(value: Any) -> Any:
    """A list or an object that comes as its JSON, as in a column of CSV; any other value as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return parse_json(value)
        except ValueError:
            return value
    return value


def list_field(fields: dict[str, Any], name: str, where: str) -> list[Any]:
    """A field that is a list, or the JSON of one. RowError where it is missing, empty or anything else."""
    value = unpacked(required(fields, name, where))
    if not isinstance(value, list):
        raise RowError(f"{where}: `{name}` is {kind(value)}; expected a list")
    if not value:
        raise RowError(f"{where}: `{name}` is empty")
    return value


def lists_objects(value: Any, field: str) -> bool:
    """Whether a value is a list of objects with such a field, or the JSON of one, by the first of them."""
    value = unpacked(value)
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and field in value[0]


WEIGHTS = "expected 0, or a number from 1e-6 to 1e6"


def is_weight(value: Any) -> bool:
    """Whether a value can be how much a token counts, of which fp32 sums millions."""
    return isinstance(value, int | float) and (value == 0 or 1e-6 <= value <= 1e6)


def kind(value: object) -> str:
    """What a value is, for a message."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    for types, name in ((str, "a text"), (dict, "an object"), (list, "a list"), ((int, float), "a number")):
        if isinstance(value, types):
            return name
    return type(value).__name__
