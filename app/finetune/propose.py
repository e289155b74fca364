"""`penstock finetune`: from a model and a file to a recipe to plan, edit and train. The data is tokenised once: what
the report was made of is what the run trains on."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.app.console.loading import loading
from penstock.app.finetune.data import Source, look_at, open_source
from penstock.app.finetune.defaults import SAMPLE_TOKENS, Default, Found, choose
from penstock.app.finetune.report import SAMPLES, length_figures, sample
from penstock.app.recipes.fields import parse_value
from penstock.app.recipes.recipe import (
    apply_overrides,
    changes,
    resolve_paths,
    save_recipe,
    with_values,
    write_text,
)
from penstock.app.recipes.text import python_text
from penstock.app.trackers.require import require_trackers
from penstock.engine.config import DataConfig, ModelConfig, Recipe
from penstock.storage.files.errors import UserError
from penstock.storage.files.model_folder import remarks_on_weights
from penstock.storage.files.untrusted import one_line, shell

if TYPE_CHECKING:
    from penstock.engine.preparing import Listener

_DATA = ("name", "machine", "model.", "data.")
"""Fields that decide what is tokenised with what, but for `_OF_TRAINING`."""
_OF_TRAINING = "model.frozen_format"
_PROMPT_TOKENS = 400
"""Of a sample's prompt, at most."""
_TEXT_PROMPT_TOKENS = 24
"""Of a prompt that is the beginning of a text."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A fine-tune that can begin."""

    recipe: Recipe
    chosen: list[Default]
    report: dict[str, Any]
    """JSON: model, data, lengths, samples, what was chosen and why, and the recipe's `changes`."""


def propose(
    model: str,
    data: str,
    *,
    overrides: Sequence[str] = (),
    epochs: float | None = None,
    machine: str = "",
    listener: Listener | None = None,
) -> Proposal:
    """Look at a model and at data, and choose what `overrides`, as `--set` takes them, do not say. `machine`: what it
    is planned for. UserError for what cannot be trained."""
    if epochs is not None and not 0 < epochs <= 10_000:
        raise UserError(f"--epochs: {epochs:g} must be above 0, and 10,000 at most")
    given = given_values(overrides)
    if epochs is not None and "train.steps" in given:
        raise UserError(
            f"--epochs: {epochs:g} has no effect, as train.steps={given['train.steps']} says how long to train; leave "
            "one of them out"
        )
    recipe = first_recipe(model, data, overrides, machine=machine)
    recipe, source, fallback = _opened(recipe, given, listener)
    assert source.model is not None
    if source.corpus.comparison == "prompts":
        raise UserError(
            "data.source: these are prompts without answers; for train.objective=grpo or rloo write a recipe, which "
            "penstock train runs, or name the column with the answers: data.source=prompt_completion "
            'data.columns={"completion": "..."}'
        )
    facts = Found(
        num_params=source.model.params,
        context=source.model.context,
        whole_documents=source.model.whole_documents,
        text=source.is_text,
        images=source.corpus.images is not None,
        comparison=source.corpus.comparison,
        lengths=source.in_rows(),
        rows=lambda values: source.rows(with_values(recipe, values)),
    )
    chosen = [*fallback, *choose(facts, given, epochs)]
    recipe = apply_overrides(with_values(recipe, {item.key: item.value for item in chosen}), overrides)
    prompt = _prompt(source, recipe, given)
    recipe = with_values(recipe, {item.key: item.value for item in prompt})
    chosen += prompt
    source.require_trainable(recipe)
    _require_ready(recipe, source)
    report = data_report(source, recipe) | {"chosen": [item._asdict() for item in chosen], "recipe": changes(recipe)}
    return Proposal(recipe, chosen, report)


def _require_ready(recipe: Recipe, source: Source) -> None:
    """UserError for what a run of the recipe would refuse before its first step, when the recipe would be written."""
    if not recipe.machine:
        require_trackers(recipe.trackers)
    if recipe.adapter.start is None and recipe.samples.every is None:
        return
    with loading():
        from penstock.engine.generate.prompts import prepare_prompts
        from penstock.engine.hf.adapter_folder import open_start
        from penstock.engine.hf.config import model_config
        from penstock.engine.model.anatomy import take_apart

    adapter = recipe.adapter if recipe.adapter.is_used else None
    spec = take_apart(model_config(recipe, None), recipe.train.freeze, adapter)
    if recipe.adapter.start is not None:
        open_start(Path(recipe.adapter.start).expanduser(), spec, recipe.model.path)
    prepare_prompts(recipe, source.tokenizer, spec)


def _opened(
    recipe: Recipe, given: Mapping[str, Any], listener: Listener | None
) -> tuple[Recipe, Source, list[Default]]:
    """The recipe and its tokenised data. Where the template does not show earlier turns, the last one is trained."""
    from penstock.engine.data.samples import TurnsError

    try:
        return recipe, open_source(recipe, listener), []
    except TurnsError:
        if "data.trained_tokens" in given:
            raise
    why = "the chat template renders earlier turns differently from the turn to be answered"
    made = Default("data.trained_tokens", "last", why)
    recipe = with_values(recipe, {made.key: made.value})
    return recipe, open_source(recipe, listener), [made]


def first_recipe(model: str, data: str, overrides: Sequence[str], *, machine: str = "") -> Recipe:
    """The model and the data alone, with what the user says of them."""
    model_path, data_path = _location(model), _location(data)
    recipe = Recipe(
        name=run_name(model, data),
        machine=machine,
        model=ModelConfig(path=model_path),
        data=look_at(DataConfig(path=data_path), given_values(overrides)),
    )
    own = [text for text in overrides if _is_of_data(text.partition("=")[0].strip())]
    return resolve_paths(apply_overrides(recipe, own), Path.cwd())


def _is_of_data(key: str) -> bool:
    return key.startswith(_DATA) and key != _OF_TRAINING


def require_of_data(overrides: Sequence[str]) -> None:
    """UserError for a field that says nothing of how data is read."""
    for text in overrides:
        key = text.partition("=")[0].strip()
        if not _is_of_data(key):
            raise UserError(f"--set {one_line(key, 60)}: has no effect on how data is read; leave it out")


def given_values(overrides: Sequence[str]) -> dict[str, Any]:
    """What `--set` texts say, by dotted field. UserError for what is no field or no value."""
    values: dict[str, Any] = {}
    for text in overrides:
        key, separator, value = text.partition("=")
        key = key.strip()
        if not separator:
            raise UserError(f"--set {one_line(text)}: write key=value, for example --set train.lr=1e-5")
        if key.count(".") > 1:  # an entry of a field that is an object
            values[key] = value
            continue
        try:
            values[key] = parse_value(key, value)
        except UserError as error:
            raise UserError(f"--set: {error}") from None
    return values


def run_name(model: str, data: str) -> str:
    """A run's name of the last parts of both names."""
    words = []
    for name in (model, data):
        last = re.split(r"[/\\]", name.rstrip("/\\"))[-1].partition("@")[0]
        last = re.sub(r"(\.(jsonl?|parquet|csv|txt|md|arrow|gz|zst|bz2|xz|zip))+$", "", last, flags=re.IGNORECASE)
        words.append(re.sub(r"[^A-Za-z0-9._]+", "-", last).strip("-._") or "x")
    return "-".join(words)[:80].rstrip("-._").lower()


def _location(name: str) -> str:
    """A path as it is, a name of the hub as hf://OWNER/NAME."""
    from penstock.app.hub.names import on_hub

    hub = on_hub(name)
    return name if hub is None else str(hub)


def _prompt(source: Source, recipe: Recipe, given: Mapping[str, Any]) -> list[Default]:
    """The prompt of the sample at the end: what comes before the first answer of a document held out."""
    if not recipe.after.export or "after.sample_prompt" in given or recipe.train.objective == "reward":
        return []
    result = next(source.prompts(recipe.data, _TEXT_PROMPT_TOKENS, _PROMPT_TOKENS), None)
    if result is None:
        return []
    prompt, answer = result
    where = "from the first validation document" if recipe.data.validation_documents else "from the first document"
    made = [Default("after.sample_prompt", prompt, where)]
    if "after.sample_tokens" not in given:
        tokens = min(SAMPLE_TOKENS[1], 2 * answer) if answer else SAMPLE_TOKENS[0]
        made.append(
            Default(
                "after.sample_tokens",
                tokens,
                "twice the length of the answer in the data" if answer else "a short sample",
            )
        )
    return made


def data_report(source: Source, recipe: Recipe, samples: int = SAMPLES) -> dict[str, Any]:
    """What there is of the data, as JSON."""
    row = recipe.data.sequence_length
    figures = length_figures(source.lengths, source.trained, row)
    return {
        "model": None if source.model is None else source.model._asdict(),
        "data": {"source": source.recipe.data.source, "path": recipe.data.path, "lines": source.lines()}
        | ({"comparison": source.corpus.comparison} if source.corpus.comparison else {}),
        "lengths": figures | {"long_documents": recipe.data.long_documents},
        "row": row,
        "samples": [
            sample(side, source.tokenizer)
            for document in itertools.islice(source.documents(), samples)
            for side in document._replace(where=source.short(document.where)).apart()
        ],
        "warnings": [*_of_weights(recipe), *source.warnings(recipe)],
    }


def _of_weights(recipe: Recipe) -> list[str]:
    """Which of the weights in the model's folder are taken, where that is to be said."""
    folder = Path(str(recipe.model.path)).expanduser()
    return [f"model.path: {remark}" for remark in remarks_on_weights(folder)] if folder.is_dir() else []


def recipe_file(recipe: Recipe) -> Path:
    """Where the recipe is written if nothing is said: beside the user, under a name that is free."""
    stem = re.sub(r"[^A-Za-z0-9_]+", "_", recipe.name)
    names = [f"{stem}.py", *(f"{stem}_{number}.py" for number in range(2, 1000))]
    return next((Path(name) for name in names if not os.path.lexists(name)), Path(names[0]))


def write_recipe(proposal: Proposal, path: Path, words: Sequence[str], *, overwrite: bool = False) -> None:
    """Write the recipe as Python, or as JSON where the name ends so. UserError where that cannot be done, or the file
    is there, unless `overwrite`."""
    if path.suffix == ".json":
        save_recipe(path, proposal.recipe, overwrite=overwrite)
        return
    require_new(path, overwrite=overwrite)
    text = python_text(proposal.recipe, _about(proposal, path, words), {i.key: i.why for i in proposal.chosen})
    write_text(path, text, overwrite=overwrite)


def require_new(path: Path, *, overwrite: bool = False) -> None:
    """UserError for a name that no recipe has, or that is taken."""
    if path.suffix not in (".py", ".json"):
        raise UserError(f"--out: {path}: a recipe's name must end in .py or .json")
    if path.is_dir() or (os.path.lexists(path) and not overwrite):
        raise UserError(f"--out: {path} exists; choose another name, or remove it")


def require_new_run(run_dir: Path | None) -> None:
    """UserError for a directory in which no new run can be made."""
    if run_dir is None or not os.path.lexists(run_dir):
        return
    if not run_dir.is_dir():
        what = "a link that leads to no folder" if run_dir.is_symlink() else "not a folder"
        raise UserError(f"run directory {run_dir}: is {what}; choose another --run-dir")
    if any(run_dir.iterdir()):
        raise UserError(f"run directory {run_dir}: is not empty; choose another --run-dir")


def command(
    model: str, data: str, overrides: Sequence[str], epochs: float | None = None, machine: str | None = None
) -> list[str]:
    """The command that finds the same."""
    words = ["finetune", model, data]
    for text in overrides:
        words += ["--set", text]
    words += [] if epochs is None else ["--epochs", f"{epochs:g}"]
    return words + ([] if machine is None else ["--machine", machine])


def _about(proposal: Proposal, path: Path, words: Sequence[str]) -> list[str]:
    recipe, lengths = proposal.recipe, proposal.report["lengths"]
    trained = "parameters that are not in train.freeze" if recipe.train.freeze else "every parameter"
    if recipe.adapter.is_used:
        trained = f"an adapter ({recipe.adapter.method})"
    return [
        f"Fine-tunes {trained} of {recipe.model.path} on {recipe.data.path}.",
        "",
        f"Data   {lengths['documents']:,} documents ({recipe.data.source}), {lengths['tokens']:,} tokens, of which "
        f"{lengths['trained_tokens']:,} are trained",
        f"Use    {shell('penstock', 'train', path.name)} trains it again; change any field first",
        f"Made   by {shell('penstock', *words)}",
    ]
