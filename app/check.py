"""`penstock check`: the self-check on a Hugging Face folder or a config.json."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any


def check_model_file(path: Path) -> dict[str, Any]:
    """The self-check's result: model_type, ok, max_rel_error, worst_parameter, reason.

    Raises UserError for a file that is no config, an unknown architecture, or a model that is no causal LM.
    """
    from engine.hf.prepare import read_config
    from engine.model.check import check_model  # loads torch: seconds

    result = dataclasses.asdict(check_model(read_config(path)))
    error = result["max_rel_error"]
    if error is not None and not math.isfinite(error):  # JSON has no infinity
        result["max_rel_error"] = None
    return result
