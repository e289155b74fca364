"""Tokens that somebody else made: `input_ids` (or `ids`, `tokens`), and what of them is trained.

That is said by `labels` (-100 where a token is not trained, else its id), and by `weights`, `loss_mask`,
`completion_mask` and `assistant_masks` (0 or 1, or how much a token counts): of several the product. `attention_mask` 0
is padding, left out. A row is one document.
"""

from __future__ import annotations

from typing import Any

from penstock.engine.data.formats.base import WEIGHTS, is_weight, list_field, unpacked
from penstock.engine.data.samples import Ids, RowError
from penstock.storage.files.untrusted import is_whole, one_line, printable

_IDS = ("input_ids", "ids", "tokens")
_MASKS = ("weights", "loss_mask", "completion_mask", "assistant_masks")
FIELDS = (*_IDS, "labels", *_MASKS, "attention_mask")
_KNOWN = (*FIELDS, "special_tokens_mask")
IGNORED = -100
_MOST_ID = 2**32 - 1


def matches(fields: dict[str, Any]) -> bool:
    values = [unpacked(fields.get(name)) for name in _IDS]
    return any(isinstance(value, list) and value and all(map(is_whole, value[:8])) for value in values)


def convert(fields: dict[str, Any], where: str) -> Ids:
    name = next((name for name in _IDS if fields.get(name) is not None), _IDS[0])
    ids = list_field(fields, name, where)
    wrong = next((i for i, token in enumerate(ids) if not is_whole(token) or not 0 <= token <= _MOST_ID), None)
    if wrong is not None:
        raise RowError(f"{where}: {name}[{wrong}] is {one_line(ids[wrong], 40)}, which is not a token id")
    there = _there(fields, ids, where)
    weights = _weights(fields, ids, where)
    _require_alone(fields, there, where)
    for other, values in fields.items():
        if other.endswith(("mask", "masks")) and other not in _KNOWN and isinstance(values, list):
            raise RowError(
                f"{where}: `{printable(other)}` is not read; if it says which tokens are trained, name it with "
                f'data.columns={{"loss_mask": "{printable(other)}"}}, else leave the column out'
            )
    ids = [token for token, is_there in zip(ids, there, strict=True) if is_there]
    weights = weights and [weight for weight, is_there in zip(weights, there, strict=True) if is_there]
    return Ids(where, ids, weights)


def _there(fields: dict[str, Any], ids: list[int], where: str) -> list[bool]:
    """Of each token whether it is no padding."""
    if fields.get("attention_mask") is None:
        return [True] * len(ids)
    values = _aligned(fields, "attention_mask", ids, where)
    odd = next((i for i, value in enumerate(values) if isinstance(value, str) or value not in (0, 1)), None)
    if odd is not None:
        raise RowError(f"{where}: attention_mask[{odd}] is {one_line(values[odd], 40)}; expected 0 or 1")
    return [value == 1 for value in values]


def _require_alone(fields: dict[str, Any], there: list[bool], where: str) -> None:
    """RowError where a row has several documents."""
    lengths, positions = (unpacked(fields.get(name)) for name in ("seq_lengths", "position_ids"))
    if isinstance(positions, list) and len(positions) == len(there):
        positions = [position for position, is_there in zip(positions, there, strict=True) if is_there]
    for name, several in (
        ("seq_lengths", isinstance(lengths, list) and len(lengths) > 1),
        ("position_ids", isinstance(positions, list) and 0 in positions[1:]),
    ):
        if several:
            raise RowError(
                f"{where}: `{name}` says that the row has several documents, which would be trained as one; give each "
                "a row of its own: Penstock packs them itself"
            )


def _weights(fields: dict[str, Any], ids: list[int], where: str) -> list[float] | None:
    result: list[float] | None = None
    if fields.get("labels") is not None:
        labels = _aligned(fields, "labels", ids, where)
        for index, (token, label) in enumerate(zip(ids, labels, strict=True)):
            if label not in (token, IGNORED):
                raise RowError(
                    f"{where}: labels[{index}] is {one_line(label, 40)} where the id is {token}; labels are the ids "
                    f"themselves (not shifted), or {IGNORED}"
                )
        result = [float(label != IGNORED) for label in labels]
    for name in _MASKS:
        if fields.get(name) is None:
            continue
        values = _aligned(fields, name, ids, where)
        for index, value in enumerate(values):
            if not is_weight(value):
                raise RowError(f"{where}: {name}[{index}] is {one_line(value, 40)}; {WEIGHTS}")
        result = [one * value for one, value in zip(result or [1.0] * len(ids), values, strict=True)]
    return result


def _aligned(fields: dict[str, Any], name: str, ids: list[int], where: str) -> list[Any]:
    values = list_field(fields, name, where)
    if len(values) != len(ids):
        raise RowError(f"{where}: `{name}` has {len(values):,} values for {len(ids):,} ids; expected one for each")
    return values
