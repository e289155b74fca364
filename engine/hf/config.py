"""A model's transformers config: read from its folder or made from a recipe's shape, and looked at first."""

from __future__ import annotations

import copy
import difflib
import json
import logging
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, PretrainedConfig

from penstock.engine.config import MOST_LAYERS, MOST_SIZE, ModelConfig, Recipe
from penstock.engine.hf.quantised import drop_quantisation
from penstock.engine.model.reward import as_reward, is_reward
from penstock.engine.objectives.base import find_objective
from penstock.storage.files.errors import UserError
from penstock.storage.files.model_folder import read_config_file
from penstock.storage.files.untrusted import one_line, parse_object, printable

_SHAPE_FIELDS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "max_position": "max_position_embeddings",
}
"""Recipe field -> transformers config field."""

_HOW = {"_attn_implementation", "attn_implementation", "_experts_implementation", "experts_implementation"}
_HOW |= {"transformers_weights"}

_SIZES = (
    r"(?P<depth>(num_|n_)(hidden_|decoder_)?layers?|n_layer|depth)|vocab_size|hidden_size|n_embd|d_model|head_dim|"
    r"n_inner|(\w+_)?intermediate_size|((num|n)_\w*|\w+_)?(heads|head|experts|groups)|(\w+_)?max_position_embeddings|"
    r"(\w+_)?lora_rank|ffn_dim|num_experts_per_tok"
)
"""Fields of configs that are sizes or counts, of whatever model; a depth has fewer."""


def read_config(path: Path, overrides: dict[str, Any] | None = None) -> PretrainedConfig:
    """The transformers config of a model folder or of a JSON file, with `overrides` replacing fields of it.

    No code of a folder is run. Raises UserError naming a file that is missing or no JSON; an unknown architecture.
    """
    file, content = read_config_file(path)
    try:
        values: dict[str, Any] = with_floats(parse_object(content))
    except ValueError as error:
        raise UserError(f"{file}: not JSON ({error}); give the config.json of a transformers model") from None
    if "model_type" not in values:
        raise UserError(f"{file}: has no 'model_type'; is it the config.json of a transformers model?")
    overrides = overrides or {}
    if "rope_parameters" in overrides:
        values.pop("rope_scaling", None)  # its former name, which transformers would prefer
    with _rope_checked(overrides):
        return make_config(values | overrides, str(file))


@contextmanager
def _rope_checked(overrides: dict[str, Any]) -> Iterator[None]:
    """UserError for a slip in the recipe's own rope_parameters that transformers only warns of."""
    if "rope_parameters" not in overrides:
        yield
        return
    if not isinstance(overrides["rope_parameters"], dict):
        raise UserError('model.overrides: rope_parameters must be an object, as {"rope_type": "yarn", "factor": 4.0}')
    said: list[str] = []

    def collect(record: logging.LogRecord) -> bool:
        said.append(record.getMessage())
        return False  # nobody else shows it

    logger = logging.getLogger("transformers.modeling_rope_utils")
    logger.addFilter(collect)
    try:
        yield
    finally:
        logger.removeFilter(collect)
    wrong = next((text for text in said if "must be" in text or "nrecognized" in text), None)
    if wrong is not None:
        raise UserError(f"model.overrides: {one_line(wrong, 300)}")


with_floats = PretrainedConfig._decode_special_floats
"""A config's values with the floats that transformers writes as {"__float__": "Infinity"}, since JSON has none."""
without_floats = PretrainedConfig._encode_special_floats
"""The reverse, for what is written as JSON."""


def make_config(values: dict[str, Any], where: str) -> PretrainedConfig:
    """The transformers config with these values. Raises UserError naming `where` for unknown types and bad values."""
    values = with_floats(values)
    model_type = values["model_type"]
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise UserError(
            f"{where}: unknown architecture '{one_line(model_type)}'; transformers {transformers.__version__} has no "
            "such type"
        )
    _require_sane(values, where)
    try:
        config = CONFIG_MAPPING[model_type].from_dict(copy.deepcopy(values))  # it completes nested values in place
    except Exception as error:  # transformers validates with errors of many types
        raise UserError(f"{where}: transformers refuses this config: {one_line(error)}") from error
    drop_implementation(config)
    drop_quantisation(config, where)
    return config


def drop_implementation(config: PretrainedConfig) -> None:
    """Forget how a config wants its model run, which is not what the model is: by kernels that may not be installed
    here, and with tuples for results, in which transformers' own models do not find what they look for."""
    for one in (config, config.get_text_config(decoder=True)):
        one.return_dict = True
        one._attn_implementation = None
        one._experts_implementation = None


def without_implementation(values: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The values of a config.json without what `drop_implementation` drops and files of weights; the names left out."""
    left = [name for name, value in values.items() if name in _HOW or (name == "return_dict" and value is False)]
    kept = {name: value for name, value in values.items() if name not in left}
    for name, value in kept.items():
        if name.endswith("_config") and isinstance(value, dict):
            kept[name], more = without_implementation(value)
            left += [f"{name}.{inner}" for inner in more]
    return kept, left


def _require_sane(values: Any, where: str, name: str = "") -> None:
    """UserError for a number in a config that no model has, or a text that no terminal should see."""
    if isinstance(values, dict):
        for key, value in values.items():
            _require_sane(str(key), where, "a name")
            _require_sane(value, where, str(key))
    elif isinstance(values, str) and printable(values) != values:  # transformers' warnings would show them as they are
        raise UserError(f"{where}: {printable(name)} contains control characters; remove them")
    elif isinstance(values, list | tuple):
        for value in values:
            if not (isinstance(value, float) and math.isinf(value)):  # ranges of some models are open
                _require_sane(value, where, name)
    elif isinstance(values, float) and not math.isfinite(values):
        raise UserError(f"{where}: {name} is {values}, which is not a number; correct it")
    elif is_size := re.fullmatch(_SIZES, name):
        if isinstance(values, str) or (isinstance(values, float) and not values.is_integer()):
            raise UserError(f"{where}: {name} is {one_line(repr(values), 80)}, but must be a whole number; correct it")
        most = MOST_LAYERS if is_size.group("depth") else MOST_SIZE
        if isinstance(values, int | float) and not isinstance(values, bool) and not 0 <= values <= most:
            raise UserError(f"{where}: {name} is {values}, but must be from 0 to {most:,}; correct it")


def model_config(recipe: Recipe, vocab_size: int | None) -> PretrainedConfig:
    """The transformers config that a recipe describes, `model.overrides` on top; of a reward model, where its objective
    trains one.

    Where `model.path` exists, that is its config.json, and shape fields beside it must agree with it; else it is made
    from the shape. `vocab_size` is the tokenizer's. Raises UserError naming the field and both values.
    """
    config = _model_config(recipe, vocab_size)
    if find_objective(recipe).reward_model:
        return as_reward(config)
    if is_reward(config):
        raise UserError(
            f"model.path: {one_line(str(recipe.model.path))} is a reward model, which has no probabilities of "
            "tokens; give a language model, or set train.objective=reward"
        )
    return config


def _model_config(recipe: Recipe, vocab_size: int | None) -> PretrainedConfig:
    model = recipe.model
    if model.path is not None:
        folder = Path(model.path).expanduser()
        if folder.exists():
            _require_agreement(model, read_config(folder), folder)
            return read_config(folder, model.overrides)
        if not model.has_shape:
            raise UserError(
                f"model.path: {folder} does not exist, and the recipe gives no shape; give a Hugging Face model "
                "folder or its config.json with --set model.path=..."
            )
    vocabulary = model.vocab_size or vocab_size
    if vocabulary is None:
        raise UserError("model.vocab_size: there is no tokenizer to take it from; set it")
    values: dict[str, Any] = {"model_type": model.model_type, "vocab_size": vocabulary}
    values["tie_word_embeddings"] = model.tie_embeddings
    values["max_position_embeddings"] = recipe.data.sequence_length
    values |= {theirs: value for ours, theirs in _SHAPE_FIELDS.items() if (value := getattr(model, ours)) is not None}
    with _rope_checked(model.overrides):
        return make_config(values | model.overrides, "model")


def require_overrides(recipe: Recipe, vocab_size: int | None) -> None:
    """UserError for an entry of `model.overrides` that says other than the recipe or the folder, or has no effect."""
    model = recipe.model
    if _WHOLE in model.overrides:  # a folder's config.json with random weights: it has what it has
        return
    for name, value in model.overrides.items():
        if (why := _contradiction(model, name, value) or _idle(recipe, vocab_size, name)) is not None:
            raise UserError(f"model.overrides: {one_line(name, 60)} {why}")


_WHOLE = "transformers_version"
"""Field that config.json has and nobody sets."""


def _contradiction(model: ModelConfig, name: str, value: Any) -> str | None:
    """What else says what an override says, and differs."""
    if model.path is not None and (folder := Path(model.path).expanduser()).exists():
        kind = read_config(folder).model_type
        if name == "model_type" and value != kind:
            return f"is {one_line(value, 60)}, but {kind} in {folder}, whose weights are of that type; leave it out"
        return None
    names = {"model_type": "model_type"} | {theirs: ours for ours, theirs in _SHAPE_FIELDS.items()}
    given = getattr(model, names[name]) if name in names else None
    if given is None or given == value:
        return None
    return f"is {one_line(value, 60)}, but model.{names[name]} is {given}; set that, and leave this out"


def _idle(recipe: Recipe, vocab_size: int | None, name: str) -> str | None:
    """Why an override has no effect: the config is the same without it."""
    if name in _HOW:
        return "has no effect, as Penstock chooses how a model is computed; leave it out"
    overrides = dict(recipe.model.overrides)
    given = with_floats(overrides.pop(name))
    config = model_config(recipe, vocab_size)
    try:
        before = model_config(replace(recipe, model=replace(recipe.model, overrides=overrides)), vocab_size)
    except UserError:
        return None
    values, others = config.to_dict(), before.to_dict()
    own, other = values.pop(name, None), others.pop(name, None)
    if values != others:
        return None
    if not hasattr(type(config)(), name):
        rope = others.get("rope_parameters")
        if isinstance(rope, dict) and (name in rope or "rope_theta" in name):
            whole = one_line(json.dumps(rope), 200)
            return f"has no effect, as the config has rope_parameters; set all of them, here {whole}, with your value"
        near = difflib.get_close_matches(name, values, n=1)
        advice = f"did you mean {near[0]}?" if near else "correct its name, or leave it out"
        return f"has no effect, as the config of model type '{config.model_type}' has no such field; {advice}"
    if own == other and not isinstance(given, dict) and given not in (own, getattr(config, name, None)):
        left = json.dumps(without_floats(own), default=str)
        why = f"transformers leaves it at {one_line(left, 60)}, by the config's other fields"
        return f"has no effect, as {why}; set those, or leave it out"
    return None


def with_vocabulary(config: PretrainedConfig, recipe: Recipe, tokenizer_size: int | None) -> PretrainedConfig:
    """The config with rows for all ids of the tokenizer, where the recipe adds tokens; else as it is."""
    text = config.get_text_config(decoder=True)
    if not recipe.model.added_tokens or tokenizer_size is None or tokenizer_size <= text.vocab_size:
        return config
    grown = copy.deepcopy(config)
    grown.get_text_config(decoder=True).vocab_size = tokenizer_size
    return grown


def random_vocabulary(recipe: Recipe) -> int | None:
    """Ids that random tokens may have: as many as the recipe says, or its model folder; None for data that is text."""
    model = recipe.model
    if recipe.data.source != "random":
        return None
    if model.vocab_size is None and model.path is not None:
        size: int = read_config(Path(model.path).expanduser()).get_text_config(decoder=True).vocab_size
        return size
    return model.vocab_size


def _require_agreement(model: ModelConfig, config: PretrainedConfig, folder: Path) -> None:
    """UserError unless the shape that a recipe gives beside a folder is that of the folder's `config`."""
    text = config.get_text_config(decoder=True)
    given = {ours: value for ours in _SHAPE_FIELDS if (value := getattr(model, ours)) is not None}
    result = {ours: getattr(text, _SHAPE_FIELDS[ours], None) for ours in given}
    if result.get("head_dim", 0) is None:
        result["head_dim"] = text.hidden_size // text.num_attention_heads
    if result.get("num_kv_heads", 0) is None:
        result["num_kv_heads"] = text.num_attention_heads
    theirs = {"model_type": config.model_type, "tie_embeddings": getattr(config, "tie_word_embeddings", None)}
    for name in theirs:
        value = getattr(model, name)
        if model.has_shape or value != getattr(ModelConfig(), name):
            given[name], result[name] = value, theirs[name]
    for name, value in given.items():
        if result[name] != value:
            raise UserError(
                f"model.{name}: {value} in the recipe, but {result[name]} in {folder}; set model.path to the recipe's "
                f"model with --set model.path=..., or correct model.{name}"
            )
