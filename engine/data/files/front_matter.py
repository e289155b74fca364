"""The head of a hub's README.md: YAML between two lines of dashes. Of it only `configs` is read, which is short.

A reference of YAML to another part of it can make a few lines into gigabytes, so there may be none.
"""

from __future__ import annotations

import re
from typing import Any

_LINE = re.compile(r"^---[ \t\r]*$", re.MULTILINE)
_CONFIGS = re.compile(r"^configs[ \t]*:.*\n?(?:(?:[ \t\-#\]}].*|\r?)(?:\n|\Z))*", re.MULTILINE)
"""The field, and the lines behind it that belong to it: what is indented, and items of its list."""
_BEYOND = {"AnchorToken": "an anchor of YAML", "AliasToken": "an alias of YAML", "TagToken": "a tag of YAML"}
_MOST_BYTES = 1 << 20
_MOST_DEPTH = 12
_MOST_TOKENS = 200_000


def read_configs(text: str) -> list[Any]:
    """The list `configs` in the head of a README.md; empty where there is none or it is not YAML.

    Raises ValueError for a head that goes beyond what a list of data sets and their files has.
    """
    lines = _configs(text[: 4 * _MOST_BYTES].removeprefix("\ufeff"))
    if not lines:
        return []
    if len(lines) > _MOST_BYTES:
        raise ValueError(f"`configs` is longer than {_MOST_BYTES >> 20} MiB")
    import yaml  # comes with huggingface_hub

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _require_simple(yaml.scan(lines, Loader=loader))
        configs = yaml.load(lines, Loader=loader)["configs"]
    except (yaml.YAMLError, RecursionError, TypeError, AttributeError, KeyError):
        return []
    return configs if isinstance(configs, list) else []


def _configs(text: str) -> str:
    """The lines of the head's `configs`; empty where there is no head, no end of it, or none in it."""
    begin = _LINE.match(text)
    end = begin and _LINE.search(text, begin.end())
    if begin is None or end is None:
        return ""
    result = _CONFIGS.search(text, begin.end(), end.start())
    return result[0] if result else ""


def _require_simple(tokens: Any) -> None:
    """ValueError for references, tags, and what is nested or long."""
    depth = 0
    for count, token in enumerate(tokens):
        kind = type(token).__name__
        if kind in _BEYOND:
            raise ValueError(f"`configs` has {_BEYOND[kind]}")
        depth += kind.endswith("StartToken") and not kind.startswith("Stream")
        depth -= kind.endswith("EndToken") and not kind.startswith("Stream")
        if depth > _MOST_DEPTH or count > _MOST_TOKENS:
            raise ValueError("`configs` is nested too deep, or has too many fields")
