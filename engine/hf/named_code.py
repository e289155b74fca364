"""Python files that the JSON files of a model folder name: an export takes them along, and nothing here runs them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.storage.files.model_folder import has_model_file, is_plain_name, read_model_file
from penstock.storage.files.untrusted import parse_object

_BYTES = 1 << 24
_MOST = 64
_RELATIVE = re.compile(rb"^\s*(?:import\s+\.(\w+)\s*$|from\s+\.(\w+)\s+import\b)", re.MULTILINE)
"""As transformers looks for what a file needs beside it."""


def named_code(folder: Path, files: Mapping[str, bytes]) -> tuple[dict[str, bytes], list[str]]:
    """The files of `folder` that `auto_map` in `files` names, or these import, by name; and names of missing ones."""
    texts = [content for name, content in files.items() if name.endswith(".json")]
    wanted = [f"{module}.py" for content in texts for module in _modules(content)]
    result: dict[str, bytes] = {}
    missing = []
    while wanted and len(result) < _MOST:
        name = wanted.pop(0)
        if name in result or name in missing:
            continue
        if not is_plain_name(name) or not has_model_file(folder, name):
            missing.append(name)
            continue
        result[name] = read_model_file(folder, name, _BYTES)
        wanted += [f"{(a or b).decode()}.py" for a, b in _RELATIVE.findall(result[name])]
    return result, missing


def _modules(content: bytes) -> list[str]:
    """What `auto_map` names in the folder itself: of `module.Class`, not of `OWNER/NAME--module.Class`."""
    try:
        named: Any = parse_object(content).get("auto_map")
    except ValueError:
        return []
    if not isinstance(named, dict):
        return []
    references = [one for value in named.values() for one in (value if isinstance(value, list) else [value])]
    return [one.partition(".")[0] for one in references if isinstance(one, str) and "--" not in one and "." in one]
