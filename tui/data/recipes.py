"""The recipes that there are, shipped and the user's own, listed from their text without running it."""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.app.recipes import shipped
from penstock.storage.files.untrusted import parse_object, printable, read_regular
from penstock.tui.data.fields import text, whole
from penstock.tui.data.outline import outline, outline_of_json

_NEEDS = re.compile(r"(GPU|RAM|NVMe|Model|Use) {2,}(\S.*)")
_SIZE = re.compile(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)([BM])(?![A-Za-z0-9])", re.IGNORECASE)
"""A model's size in the name of its folder: 7B of Qwen2.5-7B."""
_RECIPE_BYTES = 1 << 20
_SAVED = "a saved recipe"
"""Title of a JSON file, which has no docstring."""


@dataclass(frozen=True, slots=True)
class RecipeEntry:
    """A recipe file."""

    path: Path
    name: str
    title: str
    """The first paragraph of its docstring, in one line."""
    needs: dict[str, str]
    """GPU, RAM, NVMe, Model, Use -> what its docstring says."""
    text: str
    """The docstring."""
    own: bool
    """Whether it is the user's, not shipped."""
    problem: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Dotted name -> value, as far as its text says them in plain literals."""
    digest: str = ""
    """Of its content; empty where it cannot be read."""

    @property
    def is_program(self) -> bool:
        """Whether loading it runs code of the user's."""
        return self.own and self.path.suffix != ".json"

    @property
    def size_text(self) -> str:
        """The model's size as the name of its folder has it: 7B; empty where it has none."""
        match = _SIZE.search((text(self.fields, "model.path") or "").rpartition("/")[2])
        return f"{match[1]}{match[2].upper()}" if match else ""

    @property
    def context(self) -> int | None:
        """Tokens of a sequence, where the text says them."""
        return whole(self.fields, "data.sequence_length")


_Stamp = tuple[int, int]


@dataclass(slots=True)
class RecipeCatalog:
    """The user's recipes below `root`/recipes, then the shipped ones, the quickstart first; read where they changed."""

    root: Path
    _known: dict[Path, tuple[_Stamp, RecipeEntry]] = field(default_factory=dict)

    def read(self) -> list[RecipeEntry]:
        """What there is now; never raises."""
        own = self.root / "recipes"
        folders = [own, shipped.FOLDER] if own.resolve() != shipped.FOLDER else [own]
        found = {}
        for folder in folders:
            is_own = folder.resolve() != shipped.FOLDER
            for path in _recipe_files(folder):
                found[path] = self._entry(path, is_own)
        self._known = found
        return [entry for _, entry in found.values()]

    def _entry(self, path: Path, own: bool) -> tuple[_Stamp, RecipeEntry]:
        try:
            stat = path.stat()
            stamp = (stat.st_mtime_ns, stat.st_size)
        except OSError:
            stamp = (0, 0)
        known = self._known.get(path)
        return known if known is not None and known[0] == stamp else (stamp, read_recipe_entry(path, own=own))


def find_recipes(root: Path) -> list[RecipeEntry]:
    """The user's recipes below `root`, then the shipped ones."""
    return RecipeCatalog(root).read()


def _recipe_files(folder: Path) -> list[Path]:
    try:
        found = [path for path in folder.iterdir() if path.suffix in (".py", ".json") and path.name[0] not in "._"]
    except OSError:
        return []
    return sorted(found, key=lambda path: (path.stem != "quickstart", _natural(path.stem)))


def _natural(name: str) -> list[tuple[int, str]]:
    """Numbers in a name count as numbers: 7b comes before 14b."""
    return [(int(digits or 0), text) for digits, text in re.findall(r"(\d*)(\D*)", name)]


def read_recipe_entry(path: Path, *, own: bool) -> RecipeEntry:
    """A recipe file's entry from its text; `problem` says why where it cannot be read."""
    name = printable(path.stem)
    try:
        content = read_regular(path.resolve(), most_bytes=_RECIPE_BYTES)
        digest = hashlib.sha256(content).hexdigest()
        if path.suffix == ".json":
            fields = outline_of_json(parse_object(content.decode()))
            return RecipeEntry(path, name, _SAVED, {}, _SAVED, own, fields=fields, digest=digest)
        tree = ast.parse(content.decode())
        fields = outline(tree)
    except (OSError, ValueError, SyntaxError, RuntimeError, MemoryError) as error:
        reason = f"line {error.lineno}: {error.msg}" if isinstance(error, SyntaxError) else str(error)
        return RecipeEntry(path, name, "", {}, "", own, printable(f"{path.name} cannot be read: {reason}"))
    about = printable(ast.get_docstring(tree) or "")
    found = (_NEEDS.fullmatch(line.strip()) for line in about.splitlines())
    needs = {match[1]: match[2] for match in found if match}
    title = about.split("\n\n")[0].replace("\n", " ")
    return RecipeEntry(path, name, title, needs, about, own, fields=fields, digest=digest)


def content_digest(path: Path) -> str:
    """`RecipeEntry.digest` of a file as it is now; empty where it cannot be read."""
    try:
        return hashlib.sha256(read_regular(path.resolve(), most_bytes=_RECIPE_BYTES)).hexdigest()
    except (OSError, ValueError, RuntimeError):
        return ""


def describe(entry: RecipeEntry) -> dict[str, str]:
    """What a recipe trains, as text by label, as far as its text says it in plain literals."""
    fields, found = entry.fields, {}
    if "model.path" in fields and "model.model_type" in fields:
        layers, width = whole(fields, "model.num_layers"), whole(fields, "model.hidden_size")
        shape = "shape of the folder" if layers is None or width is None else f"{layers} layers, width {width:,}"
        found["model"] = f"{fields['model.path'] or fields['model.model_type']}, {shape}"
    context, batch = entry.context, whole(fields, "train.global_batch_size")
    if context is not None:
        found["context"] = f"{context:,} tokens"
    if context is not None and batch is not None and (steps := whole(fields, "train.steps")) is not None:
        found["batch"] = f"{context * batch:,} tokens a step, {steps:,} steps"
    if (source := text(fields, "data.source")) is not None and "data.path" in fields:
        found["data"] = f"{'' if source == 'auto' else source} {fields['data.path'] or ''}".strip() or "none"
    if (machine := text(fields, "machine")) is not None:
        found["machine"] = machine or "any"
    return {label: printable(value) for label, value in found.items()}


def matches(words: str, *texts: str) -> bool:
    """Whether every word of `words` is in one of the texts, whatever its case."""
    found = "\n".join(texts).lower()
    return all(word in found for word in words.lower().split())
