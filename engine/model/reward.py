"""Reward models: a decoder and `score`, a linear layer without bias, whose one value at the last token of a text is the
text's reward. In transformers it is the model for sequence classification with one label, which is what a config says
that makes one here."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, PretrainedConfig, PreTrainedModel

from penstock.storage.files.errors import UserError

SCORE_MODULE = "score"
SCORE = f"{SCORE_MODULE}.weight"
"""The parameter [1, hidden] that a reward model has in the place of a language model's head."""
_CLASS = "ForSequenceClassification"


def is_reward(config: PretrainedConfig) -> bool:
    """Whether `config` is that of a reward model."""
    return _is_classifier(config) and config.num_labels == 1


def trained_whole(config: PretrainedConfig) -> frozenset[str]:
    """Parameters that are trained as they are beside an adapter, whose base is frozen: a base has no `score` yet."""
    return frozenset({SCORE} if is_reward(config) else ())


def _is_classifier(config: PretrainedConfig) -> bool:
    named = getattr(config, "architectures", None) or []
    return len(named) == 1 and isinstance(named[0], str) and named[0].endswith(_CLASS)


def as_reward(config: PretrainedConfig) -> PretrainedConfig:
    """`config`, of a language model or a reward model, as that of a reward model. Raises UserError where transformers
    has none of its kind, and for a classifier of other labels."""
    kind = f"train.objective: reward, but model type '{config.model_type}'"
    if config.get_text_config(decoder=True) is not config:
        raise UserError(f"{kind} is more than a decoder of text; give the text model alone")
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise UserError(f"{kind} has no model for sequence classification in transformers; use another model")
    if _is_classifier(config) and config.num_labels != 1:
        raise UserError(
            f"train.objective: reward, but model.path is a classifier of {config.num_labels} labels; give a language "
            "model, or a reward model, which has one"
        )
    result = copy.deepcopy(config)
    made: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]
    result.architectures, result.num_labels = [made.__name__], 1
    return result


def as_language_model(config: PretrainedConfig) -> PretrainedConfig:
    """The config of a reward model as that of the language model which it was made from."""
    result = copy.deepcopy(config)
    result.architectures = None
    return result


def score_layer(model: PreTrainedModel) -> nn.Linear:
    """The layer that gives a reward model's value. Raises UserError where a model has another in its place."""
    layer = getattr(model, SCORE_MODULE, None)
    if not isinstance(layer, nn.Linear) or layer.bias is not None or layer.out_features != 1:
        raise UserError(
            f"model type '{model.config.model_type}': {type(model).__name__} has no linear layer 'score' without bias; "
            "a reward model of this type cannot be trained"
        )
    return layer


def padding_of(config: PretrainedConfig) -> int | None:
    """The token id that a reward model takes for padding behind a text; None: it knows none."""
    padding: int | None = config.get_text_config(decoder=True).pad_token_id
    return padding


def last_token(ids: NDArray[np.int64], padding: int | None) -> int:
    """Place in `ids` [n] of the token at which transformers reads a reward model's value: the last that is no
    padding."""
    if padding is None:
        return len(ids) - 1
    return int(np.flatnonzero(np.append(True, ids[1:] != padding))[-1])
