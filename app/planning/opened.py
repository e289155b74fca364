"""A recipe as a run or a plan opens it: what its data are is found, and what has no effect is refused or reported."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from penstock.app.hub.names import is_hub
from penstock.engine.config import Recipe, idle_notes, require_effect
from penstock.storage.files.model_folder import linked_files
from penstock.storage.files.untrusted import printable


def opened(recipe: Recipe) -> tuple[Recipe, list[str]]:
    """The recipe with the formats that data.source=auto stands for, and lines to tell once of these and of fields
    without effect. UserError for data of no known format, and for a field that contradicts what is trained."""
    recipe, said = with_found_data(recipe)
    require_effect(recipe)
    return recipe, [*said, *_linked(recipe), *idle_notes(recipe)]


def _linked(recipe: Recipe) -> Iterator[str]:
    """A line for each folder that lies elsewhere in part."""
    for key, path in (("model.path", recipe.model.path), ("data.tokenizer", recipe.data.tokenizer)):
        if path is not None and not is_hub(path) and (result := linked_files(Path(path).expanduser())):
            name, source = next(iter(result.items()))
            more = f" and {len(result) - 1:,} more" if len(result) > 1 else ""
            yield printable(f"{key}: {name} ({source}){more} are read through links that lead out of the folder")


def with_found_data(recipe: Recipe) -> tuple[Recipe, list[str]]:
    """The recipe with the formats of its data, and a line for each that was found."""
    data = recipe.data
    sources = [part.get("source", data.source) for part in data.mixture] or [data.source]
    paths = [part.get("path") for part in data.mixture] or [data.path]
    if "auto" not in sources or any(map(is_hub, paths)):
        return recipe, []
    from penstock.engine.data.formats.detect import found_source

    data, said = found_source(data)
    return replace(recipe, data=data), said
