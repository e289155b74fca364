"""The recipe: one typed object that says everything about a run, built by a Python file and saved as JSON."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import importlib.util
import inspect
import itertools
import json
import math
import re
import sys
import traceback
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Literal, NamedTuple

from engine.config import AfterConfig as AfterConfig
from engine.config import Recipe as Recipe
from storage import sealed
from storage.errors import UserError
from storage.untrusted import one_line, parse_json, read_regular, real_path

_FILE_BYTES = 1 << 24
"""Of a recipe file; those that people write have kilobytes."""
_MOST_DIGITS = 40
_PATHS = (("model", "path"), ("data", "path"), ("data", "tokenizer"), ("storage", "nvme"))


class RecipeField(NamedTuple):
    """One settable value of a recipe, as `--set`, the documentation and the terminal UI name it."""

    key: str
    """Dotted name, for example model.num_layers."""
    type: Any
    """The resolved type annotation."""
    default: Any
    help: str


@functools.cache
def _hints(cls: type) -> Mapping[str, Any]:
    return typing.get_type_hints(cls)


def _sections() -> dict[str, type]:
    """The dataclasses of a recipe's sections, by name."""
    return {name: hint for name, hint in _hints(Recipe).items() if hint is not str}


def _type_name(hint: Any) -> str:
    """How a type reads in an error message: `int or none`, `one of cosine, linear`."""
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(hint)))
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return " or ".join(_type_name(arg) for arg in typing.get_args(hint))
    if hint is type(None):
        return "none"
    if typing.get_origin(hint) is dict:
        return "a JSON object"
    if typing.get_origin(hint) is list:
        return 'a list of texts such as ["a", "b"]'
    return {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}[hint]


def _nearest(word: str, names: Iterable[str]) -> str:
    """' Did you mean ...?' for the closest name, or the list of names when nothing is close."""
    names = list(names)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return f"did you mean '{close[0]}'?" if close else "valid names: " + ", ".join(names)


def _members(hint: Any) -> tuple[Any, ...]:
    is_union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    return typing.get_args(hint) if is_union else (hint,)


def _checked(value: Any, hint: Any, key: str) -> Any:
    """`value` if it has the field's type (an int becomes a float where a float is due); UserError otherwise."""
    for member in _members(hint):
        if typing.get_origin(member) is Literal:
            if isinstance(value, str) and value in typing.get_args(member):
                return value
        elif typing.get_origin(member) is dict:
            if isinstance(value, dict):
                return _checked_json(value, key)
        elif typing.get_origin(member) is list:
            if isinstance(value, list) and all(isinstance(item, str) for item in value):
                return [_checked_text(item, key) for item in value]
        elif member is float:
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                number = _as_float(value)
                if not math.isfinite(number):
                    raise UserError(f"{key}: {one_line(value, 40)} is not a finite number")
                return number
        elif member is int:
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        elif member is str and isinstance(value, str):
            return _checked_text(value, key)
        elif isinstance(value, member):
            return value
    hinted = ""
    choices = [name for member in _members(hint) if typing.get_origin(member) is Literal for name in _args(member)]
    if choices and isinstance(value, str):
        hinted = "; " + _nearest(value, choices)
    raise UserError(f"{key}: {one_line(repr(value))} must be {_type_name(hint)}{hinted}")


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _checked_text(text: str, key: str) -> str:
    """`text`; UserError where it holds half a character, which no file takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{key}: {one_line(repr(text))} is not UTF-8 text; use another") from None
    if "\0" in text and tuple(key.split(".")) in _PATHS:
        raise UserError(f"{key}: {one_line(repr(text))} holds a zero byte, which no path does")
    return text


def _args(literal: Any) -> list[str]:
    return [str(arg) for arg in typing.get_args(literal)]


def _checked_json(value: dict[str, Any], key: str) -> dict[str, Any]:
    """A deep copy of `value`; UserError if JSON would not give back the very same object."""
    try:
        copy = parse_json(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{key}: {one_line(error)}; use texts, numbers, true/false, lists and objects only") from None
    if copy != value:
        raise UserError(f"{key}: {one_line(value)} does not survive JSON; use text keys and lists instead of tuples")
    return typing.cast(dict[str, Any], copy)


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain nested dicts."""
    return dataclasses.asdict(recipe)


def from_dict(tree: Mapping[str, Any], where: str | None = None) -> Recipe:
    """The recipe of nested dicts, every name, type and value checked.

    Raises UserError naming `where` and the field, and the nearest valid name for an unknown one.
    """
    try:
        return _from_dict(tree)
    except UserError as error:
        raise UserError(f"{where}: {error}" if where else str(error)) from None


def _from_dict(tree: Mapping[str, Any]) -> Recipe:
    sections = _sections()
    values: dict[str, Any] = {}
    for name, value in tree.items():
        if name not in _hints(Recipe):
            raise UserError(f"unknown field '{name}'; {_nearest(name, _hints(Recipe))}")
        if name not in sections:
            values[name] = _checked(value, _hints(Recipe)[name], name)
            continue
        if not isinstance(value, Mapping):
            raise UserError(f"'{name}' must be an object with the fields of {sections[name].__name__}")
        hints = _hints(sections[name])
        for key in value:
            if key not in hints:
                raise UserError(f"unknown field '{name}.{key}'; {_nearest_key(f'{name}.{key}')}")
        checked = {key: _checked(item, hints[key], f"{name}.{key}") for key, item in value.items()}
        values[name] = sections[name](**checked)
    if "name" not in values:
        raise UserError("the field 'name' is missing")
    return Recipe(**values)


def to_json(recipe: Recipe) -> str:
    """The recipe as readable JSON; `from_json` gives back an equal recipe."""
    return json.dumps(to_dict(recipe), indent=2, allow_nan=False) + "\n"


def from_json(text: str, where: str = "recipe.json") -> Recipe:
    """The recipe of `to_json`'s text, or of a run's, edited or not.

    Raises UserError naming `where` for broken JSON or a wrong field.
    """
    return from_dict({key: value for key, value in _tree(text, where).items() if key != sealed.KEY}, where)


def to_run_json(recipe: Recipe) -> str:
    """What recipe.json of a run holds: the recipe, and a checksum by which `from_run_json` knows a change."""
    return json.dumps(sealed.seal(to_dict(recipe)), indent=2, allow_nan=False) + "\n"


def from_run_json(text: str, where: str) -> Recipe:
    """The recipe of a run; one without a checksum is taken as it is.

    Raises UserError naming `where` for broken JSON, a wrong field, or what was changed since it was written.
    """
    try:
        return from_dict(sealed.unseal(_tree(text, where)).content, where)
    except sealed.ChangedError as error:
        raise UserError(
            f"{where}: the file was changed or damaged since Penstock wrote it ({error}); restore it, and change "
            f'fields with `penstock resume RUN --set key=value`; removing its "{sealed.KEY}" line accepts an edit'
        ) from None


def _tree(text: str, where: str) -> dict[str, Any]:
    try:
        tree = parse_json(text, most_bytes=_FILE_BYTES)
    except ValueError as error:
        raise UserError(f"{where}: not JSON ({error})") from None
    if not isinstance(tree, dict):
        raise UserError(f"{where}: must hold one JSON object")
    return tree


def fields() -> list[RecipeField]:
    """Every settable field of a recipe, in order; the help text is the docstring under the field."""
    helps = _helps(Recipe)
    found = [RecipeField("name", str, None, helps["name"]), RecipeField("machine", str, "", helps["machine"])]
    for section, cls in _sections().items():
        helps = _helps(cls)
        for item in dataclasses.fields(cls):
            missing = item.default is dataclasses.MISSING
            default = {} if missing else item.default
            found.append(
                RecipeField(f"{section}.{item.name}", _hints(cls)[item.name], default, helps.get(item.name, ""))
            )
    return found


def _helps(cls: type) -> dict[str, str]:
    """The docstrings under a dataclass's fields, each in one line."""
    body = typing.cast(ast.ClassDef, ast.parse(inspect.getsource(cls)).body[0]).body
    return {
        node.target.id: " ".join(str(ast.literal_eval(after.value)).split())
        for node, after in itertools.pairwise(body)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(after, ast.Expr)
    }


def _keys() -> list[str]:
    return ["name", "machine"] + [
        f"{section}.{item.name}" for section, cls in _sections().items() for item in dataclasses.fields(cls)
    ]


def _nearest_key(key: str) -> str:
    """The hint for an unknown dotted key: the nearest full key, or a key whose last part is near."""
    keys = _keys()
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


def _parse(text: str, hint: Any, key: str) -> Any:
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
                raise UserError(f"{key}: a number of {len(word)} digits is a slip of the pen")
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
            return text
    raise UserError(f"{key}: '{one_line(text)}' must be {_type_name(hint)}")


def field_type(key: str) -> Any:
    """The type annotation of the field of that dotted name. Raises UserError for an unknown one."""
    section, _, name = key.partition(".")
    hint = _hints(_sections()[section]).get(name) if section in _sections() else None
    if hint is None and key in ("name", "machine"):
        hint = str
    if hint is None:
        raise UserError(f"no field '{key}'; {_nearest_key(key)}")
    return hint


def parse_value(key: str, text: str) -> Any:
    """The value that `text` means for the field `key` of a recipe, its type checked; UserError if it means none."""
    hint = field_type(key)
    return text if key in ("name", "machine") else _checked(_parse(text, hint, key), hint, key)


def apply_overrides(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """A new recipe with `key=value` texts applied, for example `model.num_layers=4`; `recipe` stays as it is.

    A dict field takes a JSON object, or one entry as `model.overrides.rope_theta=1e6`. All overrides are applied before
    the whole recipe is validated again, so their order does not matter.
    Raises UserError for an unknown key (with the nearest valid one) or a value of the wrong type.
    """
    tree = to_dict(recipe)
    sections = _sections()
    for override in overrides:
        key, separator, text = override.partition("=")
        key = key.strip()
        if not separator or not key:
            raise UserError(f"--set {one_line(override)}: write key=value, for example --set model.num_layers=4")
        section, _, name = key.partition(".")
        name, _, entry = name.partition(".")
        if key in ("name", "machine"):
            tree[key] = text
            continue
        hint = _hints(sections[section]).get(name) if section in sections else None
        if hint is None or (entry and typing.get_origin(hint) is not dict):
            raise UserError(f"--set {one_line(override)}: no field '{one_line(key)}'; {_nearest_key(key)}")
        if entry:
            tree[section][name][entry] = _json_or_text(text, f"--set {key}")
        else:
            tree[section][name] = _parse(text, hint, f"--set {key}")
    return from_dict(tree)


def _json_or_text(text: str, key: str) -> Any:
    try:
        return parse_json(text)
    except json.JSONDecodeError:
        return text
    except ValueError as error:
        raise UserError(f"{key}: '{one_line(text, 80)}' is no value ({error})") from None


def change_run(recipe: Recipe, overrides: Sequence[str], folder: Path) -> Recipe:
    """The recipe with which a run goes on: `overrides` applied, their relative paths taken from `folder`.

    Raises UserError for a change of name, model or data: the run's state and its place in the data belong to these.
    """
    changed = resolve_paths(apply_overrides(recipe, overrides), folder)
    for section in ("name", "model", "data"):
        if getattr(changed, section) != getattr(recipe, section):
            raise UserError(f"--set {section}: a run keeps its {section}; start a new run to change it")
    return changed


def resolve_paths(recipe: Recipe, folder: Path) -> Recipe:
    """A new recipe whose relative paths are absolute, taken from `folder`, so that a resume works from anywhere."""
    tree = to_dict(recipe)
    for section, name in _PATHS:
        value = tree[section][name]
        if isinstance(value, list):
            tree[section][name] = [_absolute(folder, item) for item in value]
        elif value is not None:
            tree[section][name] = _absolute(folder, value)
    return from_dict(tree)


def _absolute(folder: Path, path: str) -> str:
    return str(real_path(Path(path) if path.startswith("~") else folder / path))


def load_recipe(path: str | Path) -> Recipe:
    """The `recipe` that a Python file builds, or that of a recipe.json. The file's folder is not put on `sys.path`.

    What a Python file prints goes to standard error, whose reader expects no JSON. Raises UserError naming the file,
    and the line where its code fails, ends the process or is interrupted.
    """
    path = Path(path)
    text = _read_recipe(path)
    if path.suffix == ".json":
        return from_json(text, f"recipe {path}")
    spec = importlib.util.spec_from_loader("penstock_recipe", loader=None, origin=str(path))
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(path)
    try:
        with redirect_stdout(sys.stderr):
            exec(compile(text, str(path), "exec"), module.__dict__)
            recipe = getattr(module, "recipe", None)
            tree = to_dict(recipe) if isinstance(recipe, Recipe) else None
    except UserError as error:
        raise UserError(f"recipe {path}{_line_in(path, error)}: {error}") from None
    except SyntaxError as error:
        line = f", line {error.lineno}" if error.lineno else ""
        raise UserError(f"recipe {path}{line}: {one_line(error.msg)}") from None
    except KeyboardInterrupt as error:
        raise UserError(f"recipe {path}{_line_in(path, error)}: interrupted while the recipe was built") from None
    except SystemExit as error:
        raise UserError(
            f"recipe {path}{_line_in(path, error)}: ends the process; let it only set a global named 'recipe'"
        ) from None
    except BaseException as error:  # the file's own, whatever it derives from
        raise UserError(f"recipe {path}{_line_in(path, error)}: {_explain(error)}") from error
    if tree is None:
        raise UserError(f"recipe {path}: must set a global named 'recipe' to an app.recipe.Recipe")
    return from_dict(tree, f"recipe {path}")


def _read_recipe(path: Path) -> str:
    try:
        return read_regular(real_path(path), most_bytes=_FILE_BYTES).decode("utf-8")
    except FileNotFoundError:
        raise UserError(
            f"recipe {path}: no such file; recipes are Python files such as recipes/quickstart.py"
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(f"recipe {path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    except OSError as error:
        raise UserError(f"recipe {path}: cannot be read ({error.strerror}); give a file") from None
    except UserError as error:
        raise UserError(f"recipe {error}") from None
    except ValueError as error:
        raise UserError(f"recipe {path}: cannot be read ({error}); give a file") from None


def _line_in(path: Path, error: BaseException) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f", line {lines[-1]}" if lines else ""


def _explain(error: BaseException) -> str:
    """The error in one line; a misspelt field of a section comes with the nearest valid name."""
    try:
        said = one_line(error)
    except Exception:
        said = "an error that cannot be shown"
    match = re.search(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", said)
    classes = {cls.__name__: cls for cls in [Recipe, *_sections().values()]}
    if match and match.group(1) in classes:
        cls, key = classes[match.group(1)], match.group(2)
        return f"{cls.__name__} has no field '{key}'; {_nearest(key, _hints(cls))}"
    return f"{type(error).__name__}: {said}"
