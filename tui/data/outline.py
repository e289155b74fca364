"""What a recipe's text says in plain literals. A file in Python is not run: a field that it computes is absent."""

from __future__ import annotations

import ast
import dataclasses
from typing import Any

from penstock.app.recipes import shapes
from penstock.app.recipes.fields import default_of, sections, top_level
from penstock.app.recipes.recipe import Recipe
from penstock.storage.files.errors import UserError

_SHAPES = ("qwen25", "llama3")
"""Functions of app/recipes/shapes.py that a recipe may take its model from."""


def outline(tree: ast.Module) -> dict[str, Any]:
    """Dotted name -> value of the fields that the module's one `recipe = Recipe(...)` is known to have."""
    call = _recipe_call(tree)
    if call is None or not _is_ours(tree, call.func, "Recipe"):
        return {}
    found = _arguments(call)
    if found is None:
        return {}
    classes = sections()
    values = {key: default for key in top_level() if (default := default_of(Recipe, key)) is not None}
    for name in classes:
        if name not in found:
            values |= _fields(name, classes[name], {})
    for name, node in found.items():
        if name in classes:
            values |= _section(tree, name, classes[name], node)
        elif (literal := _literal(node)) is not _COMPUTED:
            values[name] = literal
        else:
            values.pop(name, None)
    return values


_COMPUTED = object()


def _recipe_call(tree: ast.Module) -> ast.Call | None:
    """The call that makes `recipe`; None where it is made otherwise, or changed afterwards."""
    calls: list[ast.expr] = []
    num_stores = 0
    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)) and isinstance(node.ctx, (ast.Store, ast.Del)):
            num_stores += _root(node) == "recipe"
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and [_root(target) for target in statement.targets] == ["recipe"]:
            calls.append(statement.value)
    one = num_stores == 1 and len(calls) == 1
    return calls[0] if one and isinstance(calls[0], ast.Call) else None


def _root(node: ast.expr) -> str:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _is_ours(tree: ast.Module, function: ast.expr, name: str) -> bool:
    """Whether `function` is the name `name`, and the module has it from penstock alone."""
    if not isinstance(function, ast.Name) or function.id != name:
        return False
    imported = False
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and {alias.asname or alias.name for alias in node.names} & {name, "*"}:
            if (node.module or "").partition(".")[0] != "penstock" or any(alias.asname for alias in node.names):
                return False
            imported = True
        elif name in _made(node):
            return False
    return imported


def _made(node: ast.AST) -> tuple[str, ...]:
    """The name that a statement of the module itself gives to something."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return (node.name,)
    return (node.id,) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else ()


def _arguments(call: ast.Call) -> dict[str, ast.expr] | None:
    """A call's arguments by name; None where they are not all to be seen."""
    if call.args or any(keyword.arg is None for keyword in call.keywords):
        return None
    return {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return _COMPUTED


def _section(tree: ast.Module, name: str, kind: Any, node: ast.expr) -> dict[str, Any]:
    """The fields of one section, of the expression that makes it."""
    if not isinstance(node, ast.Call):
        return {}
    if name == "model" and isinstance(node.func, ast.Name) and node.func.id in _SHAPES:
        return _shape(tree, node, node.func.id)
    found = _arguments(node)
    if found is None or not _is_ours(tree, node.func, kind.__name__):
        return {}
    return _fields(name, kind, {key: _literal(value) for key, value in found.items()})


def _shape(tree: ast.Module, call: ast.Call, function: str) -> dict[str, Any]:
    positional = [_literal(node) for node in call.args]
    named = {keyword.arg or "": _literal(keyword.value) for keyword in call.keywords}
    if "" in named or _COMPUTED in (*positional, *named.values()) or not _is_ours(tree, call.func, function):
        return {}
    try:
        model = getattr(shapes, function)(*positional, **named)
    except (KeyError, TypeError, ValueError, ArithmeticError, UserError):
        return {}
    return {f"model.{key}": value for key, value in dataclasses.asdict(model).items()}


def _fields(name: str, kind: Any, given: dict[str, Any]) -> dict[str, Any]:
    """All fields of a section: those given where they are literals, the others by default."""
    values = {field.name: given.get(field.name, default_of(kind, field.name)) for field in dataclasses.fields(kind)}
    return {f"{name}.{key}": value for key, value in values.items() if value is not _COMPUTED}


def outline_of_json(tree: dict[str, Any]) -> dict[str, Any]:
    """The same of a recipe in JSON; values of any type, as anybody may have written them."""
    values = {key: tree.get(key, default_of(Recipe, key)) for key in top_level()}
    for name, kind in sections().items():
        given = tree.get(name, {})
        values |= _fields(name, kind, given) if isinstance(given, dict) else {}
    return values
