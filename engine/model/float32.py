"""Parameters that transformers keeps in float32 when it loads a model in bfloat16."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import build_glob_alternation

from penstock.engine.model import skeleton
from penstock.engine.model.adapters import is_adapter, plain_name


def float32_names(
    model: PreTrainedModel, prefix: str, names: Collection[str], small: PretrainedConfig, stand_ins: Sequence[int]
) -> frozenset[str]:
    """Those of the parameters `names` of a model whose layers' names begin with `prefix`.

    They are what the model's class names (`_keep_in_fp32_modules_strict`; its `_keep_in_fp32_modules` are for float16
    alone), and what the model itself makes in float32 whatever it is loaded in. `small`: a copy with few layers, of
    which `stand_ins[i]` is like layer i. An adapter's parameters are never among them.
    """
    patterns = list(model._get_dtype_plan(torch.bfloat16))
    named = build_glob_alternation(patterns)[0] if patterns else None
    made = skeleton.build(small, dtype=torch.bfloat16).named_parameters(remove_duplicate=False)
    own = {name for name, parameter in made if parameter.dtype == torch.float32}

    def is_kept(name: str) -> bool:
        name = plain_name(name)
        if named is not None and named.search(name):
            return True
        if name.startswith(f"{prefix}."):
            layer, rest = name.removeprefix(f"{prefix}.").split(".", 1)
            name = f"{prefix}.{stand_ins[int(layer)]}.{rest}"
        return name in own

    return frozenset(name for name in names if not is_adapter(name) and is_kept(name))
