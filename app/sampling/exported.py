"""Exported folders: a model's, or an adapter's beside its base."""

from __future__ import annotations

import re
import warnings
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from penstock.app.runs.model_card import adapter_config
from penstock.storage.files.model_folder import ADAPTER_CONFIG_NAME

_LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


def base_folder(folder: Path) -> Path | None:
    """The folder of the model that an adapter's folder belongs to, from the hub where it is one of its names; None
    where `folder` is no adapter's, or says no base. Raises UserError where it cannot be had."""
    from penstock.app.hub.fetch import model_folder

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
    from transformers import AutoTokenizer, GenerationConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, **_LOCAL)
    if adapter_config(folder) is None:
        return tokenizer, _whole_model(folder)
    from peft import PeftModel

    assert base is not None, "an adapter's folder, and no base"
    model = _whole_model(Path(base).expanduser())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of what one of the two libraries asks the other
        adapted: Any = PeftModel.from_pretrained(model, str(folder)).eval()
    if (folder / "generation_config.json").is_file():
        adapted.generation_config = GenerationConfig.from_pretrained(folder)
    return tokenizer, adapted


def _whole_model(folder: Path) -> Any:
    """Run as suits this machine, whatever its config asks for, and without an adapter that was left beside it."""
    from transformers import AutoConfig

    from penstock.engine.hf.config import drop_implementation
    from penstock.engine.model.skeleton import auto_class

    config = AutoConfig.from_pretrained(folder, **_LOCAL)
    drop_implementation(config)
    with ExitStack() as stack:
        if (folder / ADAPTER_CONFIG_NAME).is_file():
            alone = Path(stack.enter_context(TemporaryDirectory()))
            for file in folder.resolve().iterdir():
                if not file.name.startswith("adapter_"):
                    (alone / file.name).symlink_to(file)
            folder = alone
        return auto_class(config).from_pretrained(folder, config=config, use_safetensors=True, **_LOCAL)
