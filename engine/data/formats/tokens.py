"""Tokens that somebody else made: `input_ids` (or `ids`, `tokens`), and what of them is trained.

That is said by `labels` (-100 where a token is not trained, else its id), or by `weights`, `loss_mask`,
`completion_mask` or `assistant_masks` (0 or 1, or how much a token counts). `attention_mask` 0 is padding, left out.
"""

from __future__ import annotations

from typing import Any

from penstock.engine.data.formats.base import WEIGHTS, is_weight, list_field, required, unpacked
from penstock.engine.data.rows import RowError
from penstock.engine.data.samples import Ids
from penstock.storage.untrusted import is_whole, one_line

_IDS = ("input_ids", "ids", "tokens")
_MASKS = ("weights", "loss_mask", "completion_mask", "assistant_masks")
FIELDS = (*_IDS, "labels", *_MASKS, "attention_mask")
IGNORED = -100
_MOST_ID = 2**32 - 1


def matches(fields: dict[str, Any]) -> bool:
    values = [unpacked(fields.get(name)) for name in _IDS]
    return any(isinstance(value, list) and value and all(map(is_whole, value[:8])) for value in values)


def convert(fields: dict[str, Any], where: str) -> Ids:
    name = next((name for name in _IDS if fields.get(name) is not None), _IDS[0])
    required(fields, name, where)
    ids = list_field(fields, name, where)
    wrong = next((i for i, token in enumerate(ids) if not is_whole(token) or not 0 <= token <= _MOST_ID), None)
    if wrong is not None:
        raise RowError(f"{where}: {name}[{wrong}] is {one_line(ids[wrong], 40)}, which is not a token id")
    weights = _weights(fields, ids, where)
    if fields.get("attention_mask") is not None:
        there = _aligned(fields, "attention_mask", ids, where)
        ids = [token for token, is_there in zip(ids, there, strict=True) if is_there]
        weights = weights and [weight for weight, is_there in zip(weights, there, strict=True) if is_there]
    return Ids(where, ids, weights)


def _weights(fields: dict[str, Any], ids: list[int], where: str) -> list[float] | None:
    if fields.get("labels") is not None:
        labels = _aligned(fields, "labels", ids, where)
        for index, (token, label) in enumerate(zip(ids, labels, strict=True)):
            if label not in (token, IGNORED):
                raise RowError(
                    f"{where}: labels[{index}] is {one_line(label, 40)} where the id is {token}; labels are the ids "
                    f"themselves (not shifted), or {IGNORED}"
                )
        return [float(label != IGNORED) for label in labels]
    name = next((name for name in _MASKS if fields.get(name) is not None), None)
    if name is None:
        return None
    values = _aligned(fields, name, ids, where)
    for index, value in enumerate(values):
        if not is_weight(value):
            raise RowError(f"{where}: {name}[{index}] is {one_line(value, 40)}; {WEIGHTS}")
    return [float(value) for value in values]


def _aligned(fields: dict[str, Any], name: str, ids: list[int], where: str) -> list[Any]:
    values = list_field(fields, name, where)
    if len(values) != len(ids):
        raise RowError(f"{where}: `{name}` has {len(values):,} values for {len(ids):,} ids; expected one for each")
    return values
