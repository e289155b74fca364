"""A recipe as a Python file like those in recipes/: what differs from the defaults, and the lines that run it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from decimal import Decimal
from pathlib import Path
from typing import Any

from engine.config import Recipe
from storage.errors import UserError
from storage.untrusted import printable

_WIDTH = 120
_INDENT = 4
_GROUP_DIGITS_FROM = 100_000
"""Whole numbers from here on are written with underscores."""

_RUN = """
if __name__ == "__main__":
    from app.cli import run_recipe

    run_recipe(__file__)
"""


def to_python(recipe: Recipe, doc: str) -> str:
    """A recipe file whose recipe is equal to `recipe`, laid out as `ruff format` would; `doc` becomes its docstring."""
    sections = [type(value).__name__ for name, value in _changed(recipe).items() if dataclasses.is_dataclass(value)]
    own = ["Recipe", *(name for name in sections if name == "AfterConfig")]
    engine = [name for name in sections if name != "AfterConfig"]
    lines = [_docstring(doc), "", f"from app.recipe import {', '.join(sorted(own))}"]
    if engine:
        lines.append(f"from engine.config import {', '.join(sorted(engine))}")
    arguments = "".join(_argument(name, value, _INDENT) for name, value in _changed(recipe).items())
    return "\n".join([*lines, "", f"recipe = Recipe(\n{arguments})", _RUN])


def save_recipe(path: Path, recipe: Recipe, doc: str, *, overwrite: bool = False) -> None:
    """Write the recipe file, whole or not at all. Raises UserError where it exists and where it cannot be written."""
    if path.suffix != ".py":
        raise UserError(f"{path}: a recipe is a Python file; let its name end in .py")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, made = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(to_python(recipe, doc))
                file.flush()
                os.fsync(file.fileno())
            os.chmod(made, 0o644)
            if overwrite:
                os.replace(made, path)
            else:
                _link(made, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(made)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None


def _link(made: str, path: Path) -> None:
    try:
        os.link(made, path)  # unlike a replacement, refused where the name is taken
    except FileExistsError:
        raise UserError(f"{path}: exists; choose another name") from None


def _changed(config: Any) -> dict[str, Any]:
    """Field -> value where it is not the default; sections of which nothing is changed are left out."""
    found = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            if _changed(value):
                found[field.name] = value
            continue
        default = field.default_factory() if callable(field.default_factory) else field.default
        if (value, type(value)) != (default, type(default)):
            found[field.name] = value
    return found


def _argument(name: str, value: Any, indent: int) -> str:
    return f"{' ' * indent}{_value(value, indent, len(name) + 1, prefix=f'{name}=')},\n"


def _value(value: Any, indent: int, taken: int, prefix: str = "") -> str:
    """`prefix` and the value: on one line where it and a comma fit, else an item a line with a comma behind each.

    The last item's comma keeps `ruff format` from joining the lines.
    """
    flat = _flat(value)
    if indent + taken + _cells(flat) + 1 <= _WIDTH or not _is_open(value):
        return prefix + flat
    inner, pad = indent + _INDENT, " " * indent
    if dataclasses.is_dataclass(value):
        items = "".join(_argument(name, item, inner) for name, item in _changed(value).items())
        return f"{prefix}{type(value).__name__}(\n{items}{pad})"
    if isinstance(value, dict):
        items = "".join(
            f"{' ' * inner}{_value(item, inner, _cells(_text(key)) + 2, prefix=f'{_text(key)}: ')},\n"
            for key, item in value.items()
        )
        return f"{prefix}{{\n{items}{pad}}}"
    items = "".join(f"{' ' * inner}{_value(item, inner, 0)},\n" for item in value)
    return f"{prefix}[\n{items}{pad}]"


def _is_open(value: Any) -> bool:
    """Whether there is something inside to lay out."""
    return dataclasses.is_dataclass(value) or (isinstance(value, (dict, list)) and bool(value))


def _flat(value: Any) -> str:
    if dataclasses.is_dataclass(value):
        arguments = ", ".join(f"{name}={_flat(item)}" for name, item in _changed(value).items())
        return f"{type(value).__name__}({arguments})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_text(key)}: {_flat(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_flat, value)) + "]"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, bool) or value is None:
        return repr(value)
    if isinstance(value, int):
        return f"{value:_}" if abs(value) >= _GROUP_DIGITS_FROM else str(value)
    return number_text(value)


def number_text(value: float) -> str:
    """3e-4 and 1e6 where that is shorter, else as Python writes it; either way the very same value."""
    sign, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    assert isinstance(exponent, int)
    power = exponent + len(digits) - 1
    if not any(digits) or -3 < power < 5:
        return repr(value)
    first, rest = str(digits[0]), "".join(map(str, digits[1:]))
    short = f"{'-' if sign else ''}{first}{'.' + rest if rest else ''}e{power}"
    return min(repr(value), short, key=len)


def _text(text: str) -> str:
    """A string literal with the quotes that need fewer escapes, double ones where that is the same."""
    quote = "'" if text.count('"') > text.count("'") else '"'
    body = "".join(
        "\\" + char if char in (quote, "\\") else char if char.isprintable() else repr(char)[1:-1] for char in text
    )
    return quote + body + quote


def _docstring(doc: str) -> str:
    lines = [line.rstrip() for line in printable(doc).strip().splitlines()] or ["A recipe."]
    text = "\n".join(lines).replace("\\", "\\\\").replace('"', "'")
    return f'"""{text}{"" if len(lines) == 1 else chr(10)}"""'


def _cells(text: str) -> int:
    """At least the width that any formatter counts."""
    return sum(1 if char.isascii() else 2 for char in text)
