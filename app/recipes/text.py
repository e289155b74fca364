"""A recipe as the Python file that a person would write: what differs from the defaults, with comments."""

from __future__ import annotations

import pprint
import re
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.app.recipes.fields import sections
from penstock.app.recipes.recipe import changes
from penstock.engine.config import Recipe
from penstock.storage.files.untrusted import one_line, printable

_WIDTH = 120
_COMMENT = 90
"""Most characters of a comment."""


def python_text(recipe: Recipe, about: Sequence[str], comments: Mapping[str, str]) -> str:
    """A file that builds the recipe, and trains it where it is run. `about`: lines of its docstring; `comments`: by
    dotted field."""
    tree = changes(recipe)
    classes = sections()
    used = sorted({"Recipe", *(classes[name].__name__ for name in tree if name in classes)})
    lines = [
        f'"""{_quoted(about[0])}',
        *(_quoted(line) for line in about[1:]),
        '"""',
        "",
        f"from penstock import {', '.join(used)}, run_recipe",
        "",
        "recipe = Recipe(",
    ]
    for name, value in tree.items():
        if name not in classes:
            lines += _field(name, value, comments.get(name, ""), 4)
            continue
        lines.append(f"    {name}={classes[name].__name__}(")
        for key, item in value.items():
            lines += _field(key, item, comments.get(f"{name}.{key}", ""), 8)
        lines.append("    ),")
    return "\n".join([*lines, ")", "", 'if __name__ == "__main__":', "    run_recipe(__file__)", ""])


def _field(name: str, value: Any, comment: str, indent: int) -> list[str]:
    pad = " " * indent
    field = f"{pad}{name}={_literal(value, indent)},"
    if not comment:
        return [field]
    remark = f"# {one_line(comment, _COMMENT)}"
    short = "\n" not in field and len(field) + 2 + len(remark) <= _WIDTH
    return [f"{field}  {remark}"] if short else [f"{pad}{remark}", field]


def _literal(value: Any, indent: int) -> str:
    """The value as Python source."""
    if isinstance(value, str):
        text = repr(value)
        return f'"{text[1:-1]}"' if text[0] == "'" and '"' not in value else text
    if isinstance(value, dict | list):
        text = pprint.pformat(value, width=_WIDTH - indent, sort_dicts=False)
        return text.replace("\n", "\n" + " " * indent)
    return repr(value)


def _quoted(line: str) -> str:
    """Text inside a docstring."""
    return re.sub(r"[^\S ]", " ", printable(line)).replace("\\", "\\\\").replace('"""', "'''").rstrip()
