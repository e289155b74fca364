"""An exported folder, loaded by plain transformers: a model's, or an adapter's beside its base."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def load_exported(folder: Path, base: str | None) -> tuple[Any, Any]:
    """The tokenizer and the model of an exported folder; `base`: where the model is that an adapter stands beside."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    tokenizer = AutoTokenizer.from_pretrained(folder, **local)
    if not (folder / "adapter_config.json").exists():
        return tokenizer, AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True, **local)
    from peft import PeftModel

    assert base is not None, "an adapter's folder, and no base"
    model = AutoModelForCausalLM.from_pretrained(Path(base).expanduser(), use_safetensors=True, **local)
    return tokenizer, PeftModel.from_pretrained(model, str(folder)).eval()
