"""What a run trains on what: its data tokenised, its model taken apart."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from penstock.engine.config import Recipe
from penstock.engine.data.corpus.prepare import Data, prepare_data
from penstock.engine.data.text.tokenizer import TextTokenizer, read_otherwise
from penstock.engine.events import Observer
from penstock.engine.hf import weights
from penstock.engine.hf.adapter_folder import Start, open_start
from penstock.engine.hf.config import model_config, random_vocabulary, with_vocabulary
from penstock.engine.model.anatomy import model_spec
from penstock.engine.model.router import router_coefficient
from penstock.engine.model.spec import ModelSpec
from penstock.engine.preparing import Checklist
from penstock.storage.files.model_folder import remarks_on_weights


class RunModel(NamedTuple):
    data: Data
    spec: ModelSpec
    new_rows: weights.NewRows | None
    """Of the tables by token id, where the recipe adds tokens to a model folder's."""


def describe_run(recipe: Recipe, run_dir: Path, checklist: Checklist) -> RunModel:
    """A run's data, made in `run_dir` unless they are there, and its model taken apart. Raises UserError."""
    with checklist.step("tokenizing the data"):
        prepared = prepare_data(recipe, run_dir / "data", random_vocabulary(recipe))
    vocabulary = prepared.tokenizer.vocab_size if prepared.tokenizer else None
    stored = model_config(recipe, vocabulary)
    config = with_vocabulary(stored, recipe, vocabulary)
    new_rows = None
    if recipe.model.added_tokens and recipe.model.path is not None and vocabulary is not None:
        new_rows = weights.NewRows.make(stored, len(recipe.model.added_tokens), vocabulary)
    with checklist.step("taking the model apart"):
        spec = model_spec(config, recipe)
        router_coefficient(
            spec.config, recipe.train.router_aux_loss, whole_documents=spec.whole_documents
        )  # or it is refused
    return RunModel(prepared, spec, new_rows)


def adapter_start(recipe: Recipe, spec: ModelSpec, observer: Observer) -> Start | None:
    """The adapter that a new run goes on with (adapter.start); None: a new one, or none."""
    if recipe.adapter.start is None:
        return None
    start = open_start(Path(recipe.adapter.start).expanduser(), spec, recipe.model.path)
    for said in start.said:
        observer.on_message(said)
    return start


def remarks_on_model(
    recipe: Recipe, tokenizer: TextTokenizer | None, spec: ModelSpec, new_rows: weights.NewRows | None
) -> list[str]:
    """What is to be said of a new run's model folder, and of a tokenizer that is not the model's own."""
    folder = None if recipe.model.path is None else Path(recipe.model.path).expanduser()
    said = []
    if folder is not None:
        tower = set() if spec.vision is None else {p.name for p in spec.params_of(spec.vision, trained=True)}
        unused = weights.remarks_on_tensors(folder, spec.config if new_rows is None else new_rows.stored, tower)
        said = [f"model.path: {remark}" for remark in (*remarks_on_weights(folder), *unused)]
    if tokenizer is not None and tokenizer.folder != folder:
        other = read_otherwise(tokenizer, spec.model_type)
        said += [] if other is None else [other]
    return said
