"""What of a language model's checkpoint a reward model leaves out."""

from __future__ import annotations

from transformers import PretrainedConfig

from penstock.engine.hf.conversion import ConversionPlan
from penstock.engine.model import skeleton
from penstock.engine.model.reward import as_language_model
from penstock.storage.files.safetensors import CheckpointReader


def tensors_of_head(config: PretrainedConfig, reader: CheckpointReader) -> set[str]:
    """Tensors of a language model's checkpoint that the reward model of `config` has no use for: those of its head."""
    language_model = ConversionPlan(skeleton.build(as_language_model(config)), reader)
    used = {name for conversion in language_model.conversions for name in conversion.sources}
    return used & {*ConversionPlan(skeleton.build(config), reader).unused}
