"""What `data.source=auto` stands for: found once, when a recipe is opened, and stored with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.engine.config import DataConfig
from penstock.engine.data.formats.detect import detect
from penstock.storage.files.untrusted import printable


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
        found = {"source": part.source, "columns": part.columns, "split": part.split} if part != before else {}
        mixture.append(entry | {name: value for name, value in found.items() if value is not None})
    return (replace(data, mixture=mixture) if said else data), said


def _found(data: DataConfig, said: list[str]) -> DataConfig:
    if data.source != "auto" or data.path is None:
        return data
    found = detect(Path(data.path), data.split, data.columns)
    split = f", split {found.split}" if found.split else ""
    columns = "".join(f", {name} in column {column}" for name, column in found.rename.items())
    said.append(printable(f"data.source=auto: {found.source} is found in {data.path}{split}{columns}"))
    source: Any = found.source
    return replace(data, source=source, split=found.split or data.split, columns=data.columns | found.rename)
