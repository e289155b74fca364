"""The recipe: one typed object that says everything about a run, built by a Python file and saved as JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import traceback
import types
import typing
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from penstock.app.hub.names import is_hub, normal, parse_hub
from penstock.app.recipes import shipped
from penstock.app.recipes.fields import PATHS, checked, hints, nearest_key, parse, sections, top_level
from penstock.app.recipes.synonyms import hint
from penstock.engine.config import COMMAND, nearest, require_effect, reward_function
from penstock.engine.config import AfterConfig as AfterConfig
from penstock.engine.config import Recipe as Recipe
from penstock.storage.files import sealed
from penstock.storage.files.disk import atomic_write
from penstock.storage.files.errors import UserError
from penstock.storage.files.links import require_no_entry
from penstock.storage.files.untrusted import one_line, parse_json, read_regular, real_path
from penstock.storage.offsite.location import is_location

_FILE_BYTES = 1 << 24
"""Of a recipe file; those that people write have kilobytes."""


def to_dict(recipe: Recipe) -> dict[str, Any]:
    return dataclasses.asdict(recipe)


def from_dict(tree: Mapping[str, Any], where: str | None = None, *, is_run: bool = False) -> Recipe:
    """The recipe of nested dicts, all checked: UserError names `where`, the field, and for an unknown one the nearest
    name. `is_run`: of a run that goes on, in which fields without effect stay as they are."""
    try:
        recipe = _from_dict(tree)
        if not is_run:
            require_effect(recipe)
        return recipe
    except UserError as error:
        raise UserError(f"{where}: {error}" if where else str(error)) from None


def _from_dict(tree: Mapping[str, Any]) -> Recipe:
    values: dict[str, Any] = {}
    for name, value in tree.items():
        if name not in hints(Recipe):
            raise UserError(f"unknown field '{name}'; {hint(name) or nearest(name, hints(Recipe))}")
        section = sections().get(name)
        if section is None:
            values[name] = checked(value, hints(Recipe)[name], name)
            continue
        if not isinstance(value, Mapping):
            raise UserError(f"'{name}' must be an object with the fields of {section.__name__}")
        for key in value:
            if key not in hints(section):
                raise UserError(f"unknown field '{name}.{key}'; {nearest_key(f'{name}.{key}')}")
        fields = {key: checked(item, hints(section)[key], f"{name}.{key}") for key, item in value.items()}
        values[name] = section(**fields)
    if "name" not in values:
        raise UserError("the field 'name' is missing")
    return Recipe(**values)


def with_values(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """The recipe with these fields, by their dotted names: all replaced at once and checked together."""
    tree = to_dict(recipe)
    for key, value in values.items():
        section, _, name = key.partition(".")
        if name:
            tree[section][name] = value
        else:
            tree[section] = value
    return from_dict(tree)


def to_json(recipe: Recipe) -> str:
    """The recipe as readable JSON; `from_json` gives back an equal recipe."""
    return json.dumps(to_dict(recipe), indent=2, allow_nan=False) + "\n"


def changes(recipe: Recipe) -> dict[str, Any]:
    """The recipe's name, and of its sections what differs from the defaults, as nested dicts."""
    default = to_dict(Recipe(name=recipe.name))
    result: dict[str, Any] = {"name": recipe.name}
    for name, value in to_dict(recipe).items():
        if isinstance(value, dict):
            value = {key: item for key, item in value.items() if item != default[name][key]}
        if value and value != default[name]:
            result[name] = value
    return result


def save_recipe(path: Path, recipe: Recipe, *, overwrite: bool = False) -> None:
    """Write the recipe's `changes` as JSON; UserError as `write_text`."""
    if path.suffix != ".json":
        raise UserError(f"{path}: a recipe is saved as JSON; let its name end in .json")
    write_text(path, json.dumps(changes(recipe), indent=2, allow_nan=False) + "\n", overwrite=overwrite)


def write_text(path: Path, text: str, *, overwrite: bool = False) -> None:
    """Write the text of a recipe, whole or not at all. UserError where it exists, and where it cannot be written."""
    if os.path.lexists(path) and not overwrite:
        raise UserError(f"{path}: exists; choose another name")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None
    atomic_write(path, text)


def from_json(text: str, where: str = "recipe.json") -> Recipe:
    """The recipe of `to_json`'s text, or of a run's, edited or not. UserError for broken JSON or a wrong field."""
    return from_dict({key: value for key, value in _tree(text, where).items() if key != sealed.KEY}, where)


def to_run_json(recipe: Recipe) -> str:
    """What recipe.json of a run holds: the recipe, and a checksum by which `from_run_json` knows a change."""
    return json.dumps(sealed.seal(to_dict(recipe)), indent=2, allow_nan=False) + "\n"


def from_run_json(text: str, where: str) -> Recipe:
    """The recipe of a run; UserError naming `where` for broken JSON, a wrong field, or a change against its
    checksum."""
    try:
        return from_dict(sealed.unseal(_tree(text, where)).content, where, is_run=True)
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


def apply_overrides(recipe: Recipe, overrides: Sequence[str], *, is_run: bool = False) -> Recipe:
    """A new recipe with `key=value` texts applied, as `model.num_layers=4`, in any order; `is_run` as for `from_dict`.

    A dict field takes a JSON object, or one entry as `model.overrides.rope_theta=1e6`. Raises UserError for an unknown
    key (with the nearest valid one) or a value of the wrong type.
    """
    tree = to_dict(recipe)
    classes = sections()
    for override in overrides:
        key, separator, text = override.partition("=")
        key = key.strip()
        if not separator or not key:
            raise UserError(f"--set {one_line(override)}: write key=value, for example --set model.num_layers=4")
        section, _, name = key.partition(".")
        name, _, entry = name.partition(".")
        if key in top_level():
            tree[key] = parse(text, hints(Recipe)[key], f"--set {key}")
            continue
        wanted = hints(classes[section]).get(name) if section in classes else None
        if wanted is None or (entry and typing.get_origin(wanted) is not dict):
            raise UserError(f"--set {one_line(override)}: no field '{one_line(key)}'; {nearest_key(key)}")
        if entry:
            tree[section][name][entry] = _json_or_text(text, f"--set {key}")
        else:
            tree[section][name] = parse(text, wanted, f"--set {key}")
    return from_dict(tree, is_run=is_run)


def _json_or_text(text: str, key: str) -> Any:
    try:
        return parse_json(text)
    except json.JSONDecodeError:
        return text
    except ValueError as error:
        raise UserError(f"{key}: '{one_line(text, 80)}' is not a value ({error})") from None


def change_run(recipe: Recipe, overrides: Sequence[str], folder: Path) -> Recipe:
    """The recipe with which a run goes on: `overrides` applied, their relative paths taken from `folder`. UserError for
    another name, model or data, to which the run's state belongs; and for a field that has no effect any more."""
    changed = resolve_paths(apply_overrides(recipe, overrides, is_run=True), folder, is_run=True)
    for section in ("name", "model", "data"):
        if getattr(changed, section) != getattr(recipe, section):
            raise UserError(f"--set {section}: cannot be changed in an existing run; start a new run instead")
    require_effect(changed, before=recipe)
    return changed


def resolve_paths(recipe: Recipe, folder: Path, *, is_run: bool = False) -> Recipe:
    """A new recipe whose relative paths are taken from `folder`, for a resume from anywhere; names on the hub stay.
    `is_run`: as for `from_dict`."""
    tree = to_dict(recipe)
    for section, name in PATHS:
        value = tree[section][name]
        if isinstance(value, list):
            tree[section][name] = [_absolute(folder, item) for item in value]
        elif value is not None:
            tree[section][name] = _absolute(folder, value)
    for part in tree["data"]["mixture"]:
        if "path" in part:
            part["path"] = _absolute(folder, part["path"])
    tree["grpo"]["reward"] = [_reward(folder, entry) for entry in tree["grpo"]["reward"]]
    return from_dict(tree, is_run=is_run)


def _reward(folder: Path, entry: str) -> str:
    """An entry of grpo.reward with the whole path of its file; a command stays."""
    if entry.startswith(COMMAND):
        return entry
    file, name = reward_function(entry)
    return f"{_absolute(folder, file)}:{name}"


def _absolute(folder: Path, path: str) -> str:
    if is_location(path):
        return path
    if is_hub(path):
        parse_hub(path)
        return normal(path)
    given = Path(path) if path.startswith("~") else folder / path
    real = real_path(given)
    require_no_entry(real)
    if (
        real.name != given.name and real.is_file()
    ):  # in the hub's cache, a link whose name says what its blob's does not
        real = real_path(given.parent) / given.name
    return str(real)


def load_recipe(path: str | Path) -> Recipe:
    """The `recipe` that a Python file builds, that of a recipe.json, or a shipped one by its name.

    The file's folder is not put on `sys.path`; what it prints goes to standard error, whose reader expects no JSON.
    Raises UserError naming the file, and the line where its code fails, ends the process or is interrupted.
    """
    path = shipped.find(path)
    text = _read_recipe(path)
    if path.suffix == ".json":
        return from_json(text, f"recipe {path}")
    module = types.ModuleType("penstock_recipe")
    module.__file__ = str(path)
    try:
        with redirect_stdout(sys.stderr):
            exec(compile(text, str(path), "exec"), module.__dict__)
            recipe = getattr(module, "recipe", None)
            tree = to_dict(recipe) if isinstance(recipe, Recipe) else None
    except BaseException as error:  # the file's own, whatever it derives from
        raise UserError(f"recipe {path}{_line_in(path, error)}: {_explain(error)}") from error
    if tree is None:
        raise UserError(f"recipe {path}: must set a global named 'recipe' to a penstock.Recipe")
    return from_dict(tree, f"recipe {path}")


def _read_recipe(path: Path) -> str:
    try:
        return read_regular(real_path(path), most_bytes=_FILE_BYTES).decode("utf-8")
    except FileNotFoundError:
        raise UserError(
            f"recipe {path}: no such file or shipped recipe; shipped recipes are {', '.join(shipped.names())}"
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
    if isinstance(error, SyntaxError):
        return f", line {error.lineno}" if error.lineno else ""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f", line {lines[-1]}" if lines else ""


def _explain(error: BaseException) -> str:
    """The error in one line; a misspelt field of a section comes with the nearest valid name."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, SyntaxError):
        return one_line(error.msg)
    if isinstance(error, KeyboardInterrupt):
        return "interrupted while the recipe was built"
    if isinstance(error, SystemExit):
        return "ends the process; it should only set a global named 'recipe'"
    try:
        said = one_line(error)
    except Exception:
        said = "an error that cannot be shown"
    match = re.search(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", said)
    classes = {cls.__name__: cls for cls in [Recipe, *sections().values()]}
    if match and match.group(1) in classes:
        cls, key = classes[match.group(1)], match.group(2)
        return f"{cls.__name__} has no field '{key}'; {hint(key) or nearest(key, hints(cls))}"
    return f"{type(error).__name__}: {said}"
