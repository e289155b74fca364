"""A recipe being edited: texts by field, what is wrong with them, and the recipe they make."""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any, Literal

import numpy as np

from penstock.app.recipes.fields import RecipeField, field_type, fields, parse_value
from penstock.app.recipes.recipe import Recipe, apply_overrides, with_values
from penstock.storage.files.errors import UserError

Kind = Literal["text", "choice", "switch"]
PATHS = ("model.path", "data.path", "data.tokenizer", "storage.nvme")
"""Fields that name files or folders."""

_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\\": "\\\\"}
_UNESCAPES = {escaped: char for char, escaped in _ESCAPES.items()}


@cache
def field_table() -> dict[str, RecipeField]:
    """Key -> field, in a recipe's order."""
    return {item.key: item for item in fields()}


@cache
def kind_of(key: str) -> Kind:
    """What edits the field."""
    hint = field_type(key)
    if hint is bool:
        return "switch"
    return "choice" if typing.get_origin(hint) is Literal else "text"


@cache
def choices_of(key: str) -> tuple[str, ...]:
    """What a choice or a switch may be."""
    return ("false", "true") if kind_of(key) == "switch" else tuple(map(str, typing.get_args(field_type(key))))


@cache
def may_be_none(key: str) -> bool:
    """Whether an empty text stands for none."""
    return type(None) in typing.get_args(field_type(key))


def number_text(value: float) -> str:
    """3e-4 and 1e6 where that is shorter, else as Python writes it; either way the very same value."""
    short = np.format_float_scientific(value, trim="-", exp_digits=1).replace("+", "")
    return repr(value) if -3 < int(short.partition("e")[2]) < 5 else min(repr(value), short, key=len)


def value_text(value: Any) -> str:
    """How a value is shown and typed: on one line, none as nothing."""
    if value is None:
        return ""
    if isinstance(value, str):
        return "".join(_ESCAPES.get(char, char) for char in value)
    if isinstance(value, float):
        return number_text(value)
    return json.dumps(value, ensure_ascii=False)


def get(recipe: Recipe, key: str) -> Any:
    return attrgetter(key)(recipe)


@dataclass(frozen=True, slots=True)
class Difference:
    key: str
    before: str
    after: str


class Draft:
    """Edits of a base recipe. Each change is checked at once; `recipe` is there while nothing is wrong."""

    def __init__(self, base: Recipe) -> None:
        self.base = base
        self._texts: dict[str, str] = {}
        self.errors: dict[str, str] = {}
        self.recipe: Recipe | None = base
        """What the edits make; None while something is wrong."""

    def text(self, key: str) -> str:
        return self._texts.get(key, self.base_text(key))

    def base_text(self, key: str) -> str:
        """What the field shows in the base recipe."""
        return value_text(get(self.base, key))

    def set(self, key: str, text: str) -> None:
        """Change one field; what it was before is forgotten."""
        self._put(key, text)
        self._check()

    def reset(self, key: str) -> None:
        self._texts.pop(key, None)
        self._check()

    def reset_all(self) -> None:
        self._texts.clear()
        self._check()

    def cycle(self, key: str, by: int) -> None:
        choices = choices_of(key)
        now = self.text(key)
        index = choices.index(now) if now in choices else 0
        self.set(key, choices[(index + by) % len(choices)])

    def apply(self, settings: Sequence[str]) -> None:
        """Take `key=value` texts as `--set` takes them. Raises UserError where they make no recipe."""
        changed = apply_overrides(self.recipe or self.base, settings)
        if self.recipe is None:  # what is wrong elsewhere stays, to be mended
            keys = [setting.partition("=")[0].strip() for setting in settings]
        else:
            keys = list(field_table())
        for key in keys:
            self._put(key, value_text(get(changed, key)))
        self._check()

    def is_changed(self, key: str) -> bool:
        if key not in self._texts:
            return False
        try:
            return bool(self._value(key) != get(self.base, key))
        except UserError:
            return True

    @property
    def differences(self) -> list[Difference]:
        return [Difference(key, self.base_text(key), self.text(key)) for key in field_table() if self.is_changed(key)]

    def _put(self, key: str, text: str) -> None:
        if text == self.base_text(key):
            self._texts.pop(key, None)
        else:
            self._texts[key] = text

    def _value(self, key: str) -> Any:
        return parse_value(key, _typed(key, self._texts[key]))

    def _check(self) -> None:
        """Find all that is wrong: every field alone, then together, setting aside what was found wrong."""
        self.errors = {}
        values: dict[str, Any] = {}
        for key in self._texts:
            try:
                values[key] = self._value(key)
            except UserError as error:
                self.errors[key] = _said(str(error), key)
        recipe: Recipe | None = None
        while recipe is None:
            try:
                recipe = with_values(self.base, values)
            except UserError as error:
                named = _named(str(error))
                edited = [key for key in named if key in values] or list(values)
                for key in {*named[:1], edited[0]}:
                    self.errors.setdefault(key, _said(str(error), key))
                del values[edited[0]]
        self.recipe = None if self.errors else recipe


def _typed(key: str, text: str) -> str:
    """What `--set` would be given for what was typed."""
    if text.strip() == "" and may_be_none(key):
        return "none"
    members = (field_type(key), *typing.get_args(field_type(key)))
    is_json = text.lstrip().startswith(("[", "{")) and any(typing.get_origin(m) in (list, dict) for m in members)
    if is_json or str not in members:
        return text.strip()
    text = re.sub(r"\\[nrt\\]", lambda match: _UNESCAPES[match.group()], text)
    return json.dumps(text) if text.startswith('"') else text  # --set takes quotes off


def _named(message: str) -> list[str]:
    table = field_table()
    words = [word.rstrip(".") for word in re.findall(r"[a-z_][a-z_0-9]*(?:\.[a-z_0-9]+)*", message)]
    dotted = [word for word in words if word in table and "." in word]
    first = message.partition(":")[0].strip()
    return list(dict.fromkeys([first, *dotted] if first in table else dotted))


def _said(message: str, key: str) -> str:
    return message.removeprefix(f"{key}: ")


def error_field(message: str) -> str | None:
    """The field that a planner's message is about; None where it names none."""
    return next(iter(_named(message)), None)
