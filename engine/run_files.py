"""The files of a run beside its state that a resume on another machine needs: what they are, and where they serve."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from penstock.engine.config import Recipe, state_folder
from penstock.storage.files.model_folder import MORE_TEMPLATES, is_followed, more_templates
from penstock.storage.offsite.location import may_be_named
from penstock.storage.tier.manifest import FILE_NAME, Manifest

INPUTS = "inputs"
"""Folder of a run directory: what the recipe names elsewhere, saved for a machine that does not have it."""
_MODEL, _TOKENIZER = "model", "tokenizer"
RECIPE = "recipe.json"
STEP_FILES = ("metrics.jsonl", "validation.jsonl", "samples.jsonl", "spikes.jsonl")
"""What a run has reported of its steps; lines of steps that a resumed run repeats are removed then."""
HISTORY = (*STEP_FILES, "log.jsonl")
"""All that a run has reported."""
_SMALL_BYTES = 1 << 28
_SMALL = re.compile(
    r"((generation_|processor_|preprocessor_|tokenizer_)?config|tokenizer|special_tokens_map|added_tokens|vocab|chat_template)\.json|"
    r"(merges|vocab)\.txt|chat_template\.jinja|[A-Za-z0-9_-]+\.(model|tiktoken)"
)


def run_files(run_dir: Path, recipe: Recipe) -> dict[str, Path]:
    """The files by their paths within a run directory: recipe, history, data, and the small ones of what it names."""
    result = {name: run_dir / name for name in (RECIPE, *HISTORY)}
    result |= {f"data/{name}": path for name, path in _below(run_dir / "data")}
    named = with_saved_inputs(recipe, run_dir)
    for folder, saved in ((named.model.path, _MODEL), (named.data.tokenizer, _TOKENIZER)):
        if folder is not None and (source := Path(folder).expanduser()).exists():
            result |= {f"{INPUTS}/{saved}/{name}": path for name, path in _small(source)}
    if named.data.chat_template is not None:
        result[f"{INPUTS}/{_template_name(recipe)}"] = Path(named.data.chat_template).expanduser()
    return {name: path for name, path in result.items() if path.is_file()}


def with_saved_inputs(recipe: Recipe, run_dir: Path) -> Recipe:
    """The recipe with what was saved of its model's folder, tokenizer and chat template, where these are not here. Of
    the model there are no weights then. And with the groups of experts that the run began with."""
    saved = run_dir / INPUTS
    model = replace(recipe.model, path=_here(recipe.model.path, saved / _MODEL))
    data = replace(
        recipe.data,
        tokenizer=_here(recipe.data.tokenizer, saved / _TOKENIZER),
        chat_template=_here(recipe.data.chat_template, saved / _template_name(recipe)),
    )
    train = recipe.train
    if train.split_layers is not None and train.expert_groups is None:
        train = replace(train, expert_groups=_stored_groups(state_folder(run_dir)))
    if (model, data, train) == (recipe.model, recipe.data, recipe.train):
        return recipe
    return replace(recipe, model=model, data=data, train=train)


def _stored_groups(state: Path) -> int | None:
    """Into how many groups the experts of a layer are cut in a run's state; None where there is none yet."""
    if not (state / FILE_NAME).exists():
        return None
    numbers = (re.search(r"\.experts\.(\d+)", array.buffer) for array in Manifest.read(state).arrays)
    return 1 + max((int(number[1]) for number in numbers if number is not None), default=0)


def _template_name(recipe: Recipe) -> str:
    """What a chat template is called among the inputs: JSON and Jinja differ in the name's end."""
    return f"chat_template.{'json' if str(recipe.data.chat_template).endswith('.json') else 'jinja'}"


def _here(named: str | None, saved: Path) -> str | None:
    """What the recipe names, or what was saved of it where that is not here."""
    missing = named is not None and not Path(named).expanduser().exists()
    return str(saved) if missing and saved.exists() else named


def _below(folder: Path) -> Iterator[tuple[str, Path]]:
    """(path within it, path) of all files below a folder of ours, links left out."""
    for folder_path, _, names in os.walk(folder):
        for name in sorted(names):
            path = Path(folder_path, name)
            if not path.is_symlink() and may_be_named(inner := path.relative_to(folder).as_posix()):
                yield inner, path


def _small(source: Path) -> Iterator[tuple[str, Path]]:
    """The small files of a model's or tokenizer's folder, by their usual names; of links those that a run follows."""
    more = more_templates(source) if source.is_dir() else []
    for path in [source] if source.is_file() else [*sorted(source.iterdir()), *more]:
        fits = path in more or _SMALL.fullmatch(path.name)
        followed = path == source or is_followed(path.parent, path.name)
        if fits and followed and path.is_file() and path.stat().st_size <= _SMALL_BYTES:
            yield f"{MORE_TEMPLATES}/{path.name}" if path in more else path.name, path
