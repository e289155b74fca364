"""The running interpreter's library, a document per file; no path is needed."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from penstock.engine.data.samples import Text


def files(path: Path) -> list[Path]:
    """Python files of the standard library; what is installed into it, which is far more, is not walked."""
    result: list[Path] = []
    for folder, below, names in os.walk(sysconfig.get_paths()["stdlib"]):
        below[:] = [name for name in below if name not in ("site-packages", "dist-packages")]
        result += (path for name in names if name.endswith(".py") and (path := Path(folder, name)).is_file())
    return result


def read(file: Path) -> Iterator[Text]:
    """One document; nothing of the few files of the library's own tests that are deliberately not UTF-8."""
    try:
        text = file.read_text("utf-8")
    except UnicodeDecodeError:
        return
    if text:
        yield Text(str(file), text)
