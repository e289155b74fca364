"""Which matrices a quantised checkpoint holds in a format of model/stored.py: by its config.json, as transformers would
load it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedModel
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from penstock.engine.config import ModelConfig
from penstock.engine.model.stored import FORMATS
from penstock.storage.files.errors import UserError
from penstock.storage.files.model_folder import read_config_file
from penstock.storage.files.untrusted import one_line, parse_object

FIELD = "quantization_config"
"""Of a config.json."""
OTHERS = "set int8, nf4 or compute"
"""What a folder that cannot be trained so is answered with."""


class CheckpointFormat(NamedTuple):
    """How a checkpoint holds what of its model."""

    name: str
    """A format of model/stored.py."""
    values: Mapping[str, Any]
    """Its quantization_config."""

    def quantizer(self) -> Any:
        """transformers' own for it."""
        try:
            return AutoHfQuantizer.from_config(copy.deepcopy(dict(self.values)), pre_quantized=True)
        except Exception as error:  # of many types
            raise UserError(f"{FIELD} is not one that transformers reads: {one_line(error, 300)}") from None

    def names(self, model: PreTrainedModel) -> frozenset[str]:
        """Parameters of `model`, on meta and without an adapter, that are held so; the model is of no use then."""
        quantizer = self.quantizer()
        if self.name == "mxfp4":  # for its own modules transformers wants kernels
            skipped = quantizer.get_modules_to_not_convert(model, quantizer.quantization_config.modules_to_not_convert)
            return frozenset(
                f"{module}.{name}"
                for module, experts in model.named_modules()
                if module.endswith(".experts") and should_convert_module(module, skipped)
                for name in quantizer.serialized_names
                if name in experts._parameters
            )
        quantizer._process_model_before_weight_loading(model)
        names = {name for name, _ in model.named_parameters()}
        return frozenset(name for name in names if f"{name}_scale_inv" in names)


def frozen_format(model: ModelConfig) -> str | CheckpointFormat:
    """model.frozen_format, or what `stored` is for the recipe's folder. UserError where it has no such format."""
    if model.frozen_format != "stored":
        return model.frozen_format
    if model.path is None or not (path := Path(model.path).expanduser()).exists():
        raise UserError(
            f"model.frozen_format: stored, but there is no model folder at model.path ({model.path}); name one, or "
            f"{OTHERS}"
        )
    file, content = read_config_file(path)
    values = quantisation(parse_object(content))
    if not values:
        raise UserError(f"model.frozen_format: stored, but the weights of {file} are not quantised; {OTHERS}")
    method = values.get("quant_method") if isinstance(values, dict) else values
    if method not in ("mxfp4", "fp8"):
        raise UserError(
            f"model.frozen_format: stored, but the weights of {file} are quantised as {one_line(method, 40)}; only "
            f"MXFP4 and FP8 stay as they are; {OTHERS}"
        )
    result = CheckpointFormat(method, values)
    size = getattr(result.quantizer().quantization_config, "weight_block_size", None)
    if size is not None and size[1] % FORMATS[method].block:
        raise UserError(
            f"model.frozen_format: stored, but the weights of {file} have a scale for every {size[1]} columns "
            f"(weight_block_size), not for a multiple of {FORMATS[method].block}; {OTHERS}"
        )
    return result


def quantisation(config: Mapping[str, Any]) -> Any:
    """What a config.json says of how weights are stored; nothing where they are plain."""
    text = config.get("text_config")
    return config.get(FIELD) or (text.get(FIELD) if isinstance(text, dict) else None)
