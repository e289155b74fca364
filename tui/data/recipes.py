"""The recipes that there are, shipped and the user's own. A program of the user's is listed by its docstring and not
run: nothing is known of its fields.
"""

from __future__ import annotations

import ast
import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path

from penstock.app.recipes import shipped
from penstock.app.recipes.recipe import Recipe, load_recipe
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import printable, read_regular
from penstock.tui.data.catalog import stamp_of

_GPU = re.compile(r"^[ \t]*GPU {2,}(\S.*?)[ \t]*$", re.MULTILINE)
_SIZE = re.compile(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)([BM])(?![A-Za-z0-9])", re.IGNORECASE)
"""A model's size in the name of its folder: 7B of Qwen2.5-7B."""
_RECIPE_BYTES = 1 << 20
_SAVED = "a saved recipe"
"""Title of a JSON file, which has no docstring."""


@dataclass(frozen=True, slots=True)
class RecipeEntry:
    path: Path
    name: str
    own: bool
    """Whether it is the user's, not shipped."""
    text: str = ""
    gpu: str = ""
    """What its docstring says of the GPU that it needs."""
    problem: str | None = None
    digest: str = ""
    """Of its content; empty where it cannot be read."""
    recipe: Recipe | None = None

    @property
    def title(self) -> str:
        """The first paragraph of its docstring, in one line."""
        return self.text.split("\n\n")[0].replace("\n", " ")

    @property
    def is_program(self) -> bool:
        """Whether loading it runs code of the user's."""
        return self.own and self.path.suffix != ".json"

    @property
    def size_text(self) -> str:
        """The model's size as the name of its folder has it: 7B; empty where it has none."""
        path = (self.recipe.model.path or "") if self.recipe else ""
        match = _SIZE.search(path.rpartition("/")[2])
        return f"{match[1]}{match[2].upper()}" if match else ""

    @property
    def context(self) -> int | None:
        return self.recipe.data.sequence_length if self.recipe else None


@dataclass(slots=True)
class RecipeCatalog:
    """The user's recipes below `root`/recipes, then the shipped ones, the quickstart first; read where they changed."""

    root: Path
    _known: dict[Path, tuple[tuple[int, ...], RecipeEntry]] = field(default_factory=dict)

    def read(self) -> list[RecipeEntry]:
        """What there is now; never raises."""
        own = self.root / "recipes"
        folders = [own, shipped.FOLDER] if own.resolve() != shipped.FOLDER else [own]
        result = {}
        for folder in folders:
            is_own = folder.resolve() != shipped.FOLDER
            for path in _recipe_files(folder):
                result[path] = self._entry(path, is_own)
        self._known = result
        return [entry for _, entry in result.values()]

    def _entry(self, path: Path, own: bool) -> tuple[tuple[int, ...], RecipeEntry]:
        stamp = stamp_of(path)
        known = self._known.get(path)
        return known if known is not None and known[0] == stamp else (stamp, read_recipe_entry(path, own=own))


def _recipe_files(folder: Path) -> list[Path]:
    try:
        result = [path for path in folder.iterdir() if path.suffix in (".py", ".json") and path.name[0] not in "._"]
    except OSError:
        return []
    return sorted(result, key=lambda path: (path.stem != "quickstart", _natural(path.stem)))


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(digits or 0), text) for digits, text in re.findall(r"(\d*)(\D*)", name)]


def read_recipe_entry(path: Path, *, own: bool) -> RecipeEntry:
    """A recipe file's entry; `problem` says why where it cannot be read."""
    name = printable(path.stem)
    try:
        content = read_regular(path.resolve(), most_bytes=_RECIPE_BYTES)
        is_json = path.suffix == ".json"
        about = _SAVED if is_json else printable(ast.get_docstring(ast.parse(content.decode())) or "")
        recipe = load_recipe(path) if is_json or not own else None
    except (OSError, ValueError, SyntaxError, RuntimeError, MemoryError, UserError) as error:
        reason = f"line {error.lineno}: {error.msg}" if isinstance(error, SyntaxError) else str(error)
        return RecipeEntry(path, name, own, problem=printable(f"{path.name} cannot be read: {reason}"))
    gpu = match[1] if (match := _GPU.search(about)) else ""
    return RecipeEntry(path, name, own, about, gpu, digest=hashlib.sha256(content).hexdigest(), recipe=recipe)


def content_digest(path: Path) -> str:
    """`RecipeEntry.digest` of a file as it is now; empty where it cannot be read."""
    try:
        return hashlib.sha256(read_regular(path.resolve(), most_bytes=_RECIPE_BYTES)).hexdigest()
    except (OSError, ValueError, RuntimeError):
        return ""


def describe(recipe: Recipe) -> dict[str, str]:
    """What a recipe trains, as text by label."""
    model, data, train = recipe.model, recipe.data, recipe.train
    shape = "shape of the folder"
    if model.num_layers is not None and model.hidden_size is not None:
        shape = f"{model.num_layers} layers, width {model.hidden_size:,}"
    tokens = data.sequence_length * train.global_batch_size
    source = f"{'' if data.source == 'auto' else data.source} {data.path or ''}".strip()
    result = {
        "model": f"{model.path or model.model_type}, {shape}",
        "context": f"{data.sequence_length:,} tokens",
        "batch": f"{tokens:,} tokens a step, {train.steps:,} steps",
        "data": source or "none",
        "machine": recipe.machine or "any",
    }
    return {label: printable(value) for label, value in result.items()}


def matches(words: str, *texts: str) -> bool:
    """Whether every word of `words` is in one of the texts, whatever its case."""
    result = "\n".join(texts).lower()
    return all(word in result for word in words.lower().split())
