"""What `data.source=auto` stands for: found once, when a recipe is opened, and written down with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.engine.config import DataConfig
from penstock.engine.data.formats.detect import Detected, detect
from penstock.storage.files.untrusted import printable

AUTO = "auto"


def found_source(data: DataConfig) -> tuple[DataConfig, list[str]]:
    """The data with the format, the split and the columns that are found where the source is auto; a line for each.

    Data without a path stay as they are. Raises UserError where nothing is there, or no format fits.
    """
    said: list[str] = []
    if data.mixture:
        mixture = [_found_part(part, data, said) for part in data.mixture]
        return (replace(data, mixture=mixture) if said else data), said
    if data.source != AUTO or data.path is None:
        return data, said
    found = detect(Path(data.path), data.split, data.columns)
    said.append(_words(data.path, found))
    source: Any = found.source
    return replace(data, source=source, split=found.split or data.split, columns=data.columns | found.rename), said


def _found_part(part: dict[str, Any], data: DataConfig, said: list[str]) -> dict[str, Any]:
    if part.get("source", data.source) != AUTO or "path" not in part:
        return part
    split, columns = part.get("split", data.split), part.get("columns", data.columns)
    found = detect(Path(part["path"]), split, columns)
    said.append(_words(part["path"], found))
    made: dict[str, Any] = {"source": found.source, "columns": columns | found.rename}
    if (split := found.split or split) is not None:
        made["split"] = split
    return part | made


def _words(path: str, found: Detected) -> str:
    split = f", split {found.split}" if found.split else ""
    columns = "".join(f", {name} in column {column}" for name, column in found.rename.items())
    return printable(f"data.source=auto: {found.source} is found in {path}{split}{columns}")
