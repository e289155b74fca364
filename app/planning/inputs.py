"""What a run needs before it begins: weights, or a shape to begin with, data, trackers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from penstock.app.console.loading import loading
from penstock.app.hub.names import is_hub
from penstock.app.planning.opened import with_found_data
from penstock.app.trackers.require import require_trackers
from penstock.engine.config import Recipe
from penstock.storage.files.errors import UserError
from penstock.storage.files.model_folder import linked_files, tensor_names

_HEADS = ("lm_head.weight", "embed_out.weight", "output.weight", "output_layer.weight")
"""Ends of the names under which a checkpoint has a head of its own."""


def from_scratch(recipe: Recipe) -> Recipe:
    """The recipe with random weights of its own shape, or its model folder's where it gives none. A tokenizer in the
    folder is still used; else one is trained on the data, and the vocabulary stays the model's."""
    if recipe.model.path is None:
        return recipe
    folder, model, data = Path(recipe.model.path).expanduser(), recipe.model, recipe.data
    if not model.has_shape:
        if not folder.exists():
            raise UserError(
                f"--from-scratch: the recipe gives no shape, and model.path {folder} does not exist; set "
                "model.num_layers, model.hidden_size and the rest, or name a folder or a config.json with "
                "--set model.path=..."
            )
        from penstock.engine.hf.config import read_config, require_overrides

        require_overrides(recipe, None)
        config = read_config(folder, model.overrides)
        values = json.loads(config.to_json_string(use_diff=False))
        model = replace(
            model,
            model_type=config.model_type,
            vocab_size=config.get_text_config(decoder=True).vocab_size,
            overrides=values,
        )
    has_text = data.source != "random" or recipe.samples.every is not None
    if data.tokenizer is None and has_text and (folder / "tokenizer_config.json").is_file():
        data = replace(data, tokenizer=str(folder))
    return replace(recipe, model=replace(model, path=None), data=data)


def require_weights(recipe: Recipe) -> None:
    """Raise UserError when the recipe names a model folder that is not there or holds no weights."""
    if recipe.model.path is None or is_hub(recipe.model.path):  # that is fetched before the run
        return
    folder = Path(recipe.model.path).expanduser()
    if any(folder.glob("*.safetensors")):
        linked_files(folder)  # that none is refused at the end, by the export
        return _require_tied(recipe, folder)
    if any(folder.glob("*.bin")):
        raise UserError(
            f"model.path: {folder} has weights as *.bin, which can run code and are not read, and no *.safetensors; "
            "load the model with transformers and save it with save_pretrained, which writes safetensors"
        )
    reason = (
        "is not a folder" if folder.is_file() else "contains no *.safetensors" if folder.exists() else "does not exist"
    )
    raise UserError(
        f"model.path: {folder} {reason}; put the model's Hugging Face folder there, name another with "
        "--set model.path=..., or add --from-scratch to start with random weights"
    )


def _require_tied(recipe: Recipe, folder: Path) -> None:
    """UserError for a head that is stored, differs from the embedding, and is tied to it by the config."""
    try:
        names = tensor_names(folder)
    except (OSError, ValueError, KeyError, TypeError):
        return  # whoever reads the weights says what is wrong with them
    if not any(name.endswith(_HEADS) for name in names):
        return
    with loading():
        from penstock.engine.hf.config import read_config
        from penstock.engine.hf.weights import require_tied

    require_tied(folder, read_config(folder, recipe.model.overrides))


def require_data(recipe: Recipe) -> None:
    """UserError when the recipe names no text, or some that cannot be read: of each file up to its first text."""
    from penstock.engine.data.corpus.prepare import require_readable

    data = recipe.data
    if data.source == "random" and recipe.model.path is None and recipe.model.vocab_size is None:
        raise UserError("model.vocab_size: data.source=random needs it; set it")
    if is_hub(data.path) or any(is_hub(part.get("path")) for part in data.mixture):
        return
    if data.lacks_path:
        reason = "the recipe names no data" + ("" if data.source == "auto" else f" for data.source={data.source}")
    elif data.path is not None and not Path(data.path).expanduser().exists():
        reason = f"{data.path} does not exist"
    else:
        return require_readable(with_found_data(recipe)[0].data)
    pathless = "" if data.path is None else " --set data.path=none"
    raise UserError(
        f"data.path: {reason}; name your data with --set data.path=..., or train on random tokens, for a speed test, "
        f"with --set data.source=random{pathless} (python_stdlib is Python's own library, needles are generated tasks)"
    )


def require_inputs(recipe: Recipe) -> None:
    """Raise UserError, one line, for all that a run of the recipe needs and lacks: weights, text and trackers."""
    missing = []
    for require in (require_weights, require_data, lambda recipe: require_trackers(recipe.trackers)):
        try:
            require(recipe)
        except UserError as error:
            missing.append(str(error))
    if missing:
        raise UserError("; ".join(missing))
