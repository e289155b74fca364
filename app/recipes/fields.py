"""The fields of a recipe: their names, types and help, and whether a value or a text that is typed fits one."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import functools
import inspect
import itertools
import json
import math
import re
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from penstock.app.recipes import synonyms
from penstock.engine.config import Recipe, nearest
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import one_line, parse_json

PATHS = (
    ("model", "path"),
    ("adapter", "start"),
    ("data", "path"),
    ("data", "tokenizer"),
    ("storage", "nvme"),
    ("storage", "offsite"),
)
"""Section and name of the fields that hold paths."""
_MOST_DIGITS = 40


class RecipeField(NamedTuple):
    """One settable value of a recipe, as `--set`, the documentation and the terminal UI name it."""

    key: str
    """Dotted name, for example model.num_layers."""
    type: Any
    """The resolved type annotation."""
    default: Any
    help: str


def fields() -> list[RecipeField]:
    """Every settable field of a recipe, in order; the help text is the docstring under the field."""
    helps = _helps(Recipe)
    defaults = dataclasses.asdict(Recipe(name="name")) | {"name": None}
    result = [RecipeField(key, hints(Recipe)[key], defaults[key], helps[key]) for key in top_level()]
    for section, cls in sections().items():
        helps = _helps(cls)
        for name, hint in hints(cls).items():
            result.append(RecipeField(f"{section}.{name}", hint, defaults[section][name], helps.get(name, "")))
    return result


def _helps(cls: type) -> dict[str, str]:
    """The docstrings under a dataclass's fields, each in one line."""
    body = typing.cast(ast.ClassDef, ast.parse(inspect.getsource(cls)).body[0]).body
    return {
        node.target.id: " ".join(str(ast.literal_eval(after.value)).split())
        for node, after in itertools.pairwise(body)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(after, ast.Expr)
    }


def field_type(key: str) -> Any:
    """The type annotation of the field of that dotted name. Raises UserError for an unknown one."""
    section, _, name = key.partition(".")
    hint = hints(sections()[section]).get(name) if section in sections() else None
    if key in top_level():
        hint = hints(Recipe)[key]
    if hint is None:
        raise UserError(f"no field '{key}'; {nearest_key(key)}")
    return hint


def parse_value(key: str, text: str) -> Any:
    """The value that `text` means for the field `key` of a recipe, its type checked; UserError if it means none."""
    hint = field_type(key)
    return unquoted(text) if hint is str else checked(parse(text, hint, key), hint, key)


def parse(text: str, hint: Any, key: str) -> Any:
    """The value that a `--set` text means for a field of type `hint`; UserError if it means none."""
    members = _members(hint)
    word = text.strip().lower()
    if type(None) in members and word in ("none", "null"):
        return None
    for member in sorted(members, key=lambda member: member is str):  # a text is the last resort
        if member is bool and word in ("true", "yes", "on", "1", "false", "no", "off", "0"):
            return word in ("true", "yes", "on", "1")
        if member is int and re.fullmatch(r"[+-]?[0-9]+(_[0-9]+)*", word):
            if len(word) > _MOST_DIGITS:
                raise UserError(f"{key}: a number of {len(word)} digits is too long")
            return int(word)
        if member is float:
            try:
                return float(word)
            except ValueError:
                continue
        is_list = typing.get_origin(member) is list
        if typing.get_origin(member) is dict or (is_list and word.startswith("[")):
            try:
                return parse_json(text)
            except ValueError as error:
                raise UserError(f"{key}: '{one_line(text)}' is not {_type_name(member)} ({error})") from None
        if member is str or typing.get_origin(member) is Literal:
            return unquoted(text)
    raise UserError(f"{key}: '{one_line(text)}' must be {_type_name(hint)}")


def unquoted(text: str) -> str:
    """The text that a JSON string in double quotes means, its escapes too; any other text as it is."""
    if len(text) >= 2 and text[0] == text[-1] == '"':
        with contextlib.suppress(ValueError):
            return str(json.loads(text))
    return text


def checked(value: Any, hint: Any, key: str) -> Any:
    """`value` if it has the field's type (an int becomes a float where a float is due); UserError otherwise."""
    try:
        result = msgspec.convert(value, hint)
    except msgspec.ValidationError:
        literals = [member for member in _members(hint) if typing.get_origin(member) is Literal]
        choices = [str(arg) for member in literals for arg in typing.get_args(member)]
        hinted = "; " + nearest(value, choices) if choices and isinstance(value, str) else ""
        raise UserError(f"{key}: {one_line(repr(value))} must be {_type_name(hint)}{hinted}") from None
    if isinstance(result, float) and not math.isfinite(result):
        raise UserError(f"{key}: {one_line(value, 40)} is not a finite number")
    if isinstance(result, dict):
        return _checked_json(result, key)
    for text in result if isinstance(result, list) else [result]:
        if isinstance(text, dict):
            _checked_json(text, key)
        if isinstance(text, str):
            _require_text(text, key)
    return result


def _require_text(text: str, key: str) -> None:
    """UserError where the text holds half a character, which no file takes, or a zero byte, which no path does."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{key}: {one_line(repr(text))} is not UTF-8 text; use another") from None
    if "\0" in text and tuple(key.split(".")) in PATHS:
        raise UserError(f"{key}: {one_line(repr(text))} contains a zero byte, which a path cannot")


def _checked_json(value: dict[str, Any], key: str) -> dict[str, Any]:
    """A deep copy of `value`; UserError if JSON would not give back the very same object."""
    try:
        copy = parse_json(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{key}: {one_line(error)}; use texts, numbers, true/false, lists and objects only") from None
    if copy != value:
        raise UserError(f"{key}: {one_line(value)} cannot be stored as JSON; use text keys and lists instead of tuples")
    return typing.cast(dict[str, Any], copy)


@functools.cache
def hints(cls: type) -> Mapping[str, Any]:
    """Field -> its type, resolved."""
    return typing.get_type_hints(cls)


def sections() -> dict[str, type]:
    """The dataclasses of a recipe's sections, by name."""
    return {
        name: hint for name, hint in hints(Recipe).items() if isinstance(hint, type) and dataclasses.is_dataclass(hint)
    }


def top_level() -> list[str]:
    """The fields of a recipe that are in no section."""
    return [name for name in hints(Recipe) if name not in sections()]


def _type_name(hint: Any) -> str:
    """How a type reads in an error message: `int or none`, `one of cosine, linear`."""
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(hint)))
    if len(members := _members(hint)) > 1:
        return " or ".join(map(_type_name, members))
    if hint is type(None):
        return "none"
    if typing.get_origin(hint) is dict:
        return "a JSON object"
    if typing.get_origin(hint) is list:
        (inner,) = typing.get_args(hint)
        if inner is float:
            return "a list of numbers such as [1, 0.5]"
        return "a list of JSON objects" if typing.get_origin(inner) is dict else 'a list of texts such as ["a", "b"]'
    return {str: "text", int: "a whole number", float: "a number", bool: "true or false"}[hint]


def _members(hint: Any) -> tuple[Any, ...]:
    is_union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    return typing.get_args(hint) if is_union else (hint,)


def nearest_key(key: str) -> str:
    """The hint for an unknown dotted key: what another trainer means by it, the nearest key, or one that ends so."""
    if (synonym := synonyms.hint(key)) is not None:
        return synonym
    keys = [field.key for field in fields()]
    close = difflib.get_close_matches(key, keys, n=1, cutoff=0.6)
    if not close:
        last = key.rsplit(".", 1)[-1]
        ends = {name.rsplit(".", 1)[-1]: name for name in keys}
        close = [ends[end] for end in difflib.get_close_matches(last, ends, n=1, cutoff=0.6)]
    if close:
        return f"did you mean '{close[0]}'?"
    section = key.split(".", 1)[0]
    inside = [name for name in keys if name.startswith(section + ".")]
    return "valid names: " + ", ".join(inside or keys)
