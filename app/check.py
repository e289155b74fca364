"""`penstock check`: the self-check on a Hugging Face folder or a config.json."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from storage.errors import UserError


def load_config(path: Path) -> Any:
    """The transformers config of a model folder or of a JSON file.

    Raises UserError naming the file when it is missing, is not JSON, or names an architecture that this transformers
    does not know. Code that a model folder brings along is never run.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"{file}: no such file; give a Hugging Face folder or a config.json")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file}: not JSON ({error})") from None
    if not isinstance(values, dict) or "model_type" not in values:
        raise UserError(f"{file}: has no 'model_type'; is it the config.json of a transformers model?")
    import transformers
    from transformers import CONFIG_MAPPING

    model_type = values["model_type"]
    if model_type not in CONFIG_MAPPING:
        raise UserError(
            f"{file}: unknown architecture '{model_type}'; transformers {transformers.__version__} has no such type"
        )
    try:
        return CONFIG_MAPPING[model_type].from_dict(values)
    except Exception as error:  # transformers validates with errors of many types
        raise UserError(f"{file}: transformers refuses this config: {error}") from error


def check_model_file(path: Path) -> dict[str, Any]:
    """The self-check's result: model_type, ok, max_rel_error, worst_parameter, reason.

    Raises UserError for bad input, as `load_config` and `ModelSpec.from_config` do.
    """
    config = load_config(path)
    from engine.check import check_model

    result = check_model(config)
    error = result.max_rel_error
    return {
        "model_type": result.model_type,
        "ok": result.ok,
        "max_rel_error": error if error is not None and math.isfinite(error) else None,
        "worst_parameter": result.worst_parameter,
        "reason": result.reason,
    }
