"""The types of models that transformers knows, and a config of each."""

from __future__ import annotations

from collections.abc import Iterator

from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from penstock.storage.files.errors import refused


def model_types() -> list[str]:
    """All types of causal language models and of models that read images and write text, in alphabetical order."""
    return sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) | set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES))


def default_config(model_type: str) -> PretrainedConfig:
    """The config of a type as transformers makes it, without dropout, and a decoder where it could be an encoder too.
    Raises UserError for a type that has none."""
    with refused("transformers has no default config of this type"):
        config = CONFIG_MAPPING[model_type]()
    for part, name in dropouts(config):
        setattr(part, name, 0.0)
    if getattr(config, "is_decoder", None) is False:
        config.is_decoder = True
    return config


def dropouts(config: PretrainedConfig) -> Iterator[tuple[PretrainedConfig, str]]:
    """The fields of a config, and of its text model's, that switch dropout or other noise on in training."""
    for part in (config, config.get_text_config(decoder=True)):
        for name, value in list(vars(part).items()):
            noise = "dropout" in name or name.endswith(("pdrop", "_drop", "jitter_noise")) or name == "layerdrop"
            if noise and not name.startswith(("summary_", "classifier_")) and isinstance(value, float) and value > 0:
                yield part, name
