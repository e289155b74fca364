"""Exported folders: a model's, or an adapter's beside its base."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

from penstock.app.model_card import adapter_config


def base_folder(folder: Path) -> Path | None:
    """The folder of the model that an adapter's folder belongs to, from the hub where it is one of its names; None
    where `folder` is no adapter's, or says no base. Raises UserError where it cannot be had."""
    from penstock.app.hub import model_folder

    config = adapter_config(folder)
    name = None if config is None else config.get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        return None
    path = Path(name).expanduser()
    if path.is_dir() or not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return path
    return model_folder(f"hf://{name}")


def load_exported(folder: Path, base: str | None) -> tuple[Any, Any]:
    """Tokenizer and model of an exported folder, by plain transformers; `base`: what an adapter belongs to."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    tokenizer = AutoTokenizer.from_pretrained(folder, **local)
    if adapter_config(folder) is None:
        return tokenizer, AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True, **local)
    from peft import PeftModel

    assert base is not None, "an adapter's folder, and no base"
    model = AutoModelForCausalLM.from_pretrained(Path(base).expanduser(), use_safetensors=True, **local)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of what one of the two libraries asks the other
        return tokenizer, PeftModel.from_pretrained(model, str(folder)).eval()
