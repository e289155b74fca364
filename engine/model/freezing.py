"""Which parameters of a model are never trained, by patterns of their names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from penstock.engine.model import skeleton
from penstock.engine.model.spec import ModelSpec
from penstock.engine.optim.groups import nearest
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import one_line


def frozen_names(names: Sequence[str], patterns: Iterable[str]) -> frozenset[str]:
    """Those of a model's parameters `names` that a pattern of train.freeze fits. UserError for one that fits none."""
    result: set[str] = set()
    for pattern in patterns:
        fitting = [name for name in names if fnmatchcase(name, pattern)]
        if not fitting:
            raise UserError(
                f"train.freeze: '{one_line(pattern)}' matches no parameter; the nearest are {nearest(pattern, names)}"
            )
        result.update(fitting)
    return frozenset(result)


def require_rows_trained(spec: ModelSpec) -> None:
    """UserError where the rows that added tokens get would stay what they begin as."""
    for name in sorted(skeleton.vocabulary_tables(skeleton.build(spec.config)) & spec.frozen_params):
        raise UserError(
            f"model.added_tokens: the rows of new tokens must be trained, but train.freeze freezes {name}; leave it "
            "out, or add no tokens"
        )


def require_some_trained(spec: ModelSpec) -> None:
    """UserError where every parameter is frozen."""
    if not spec.num_trained:
        raise UserError(
            f"train.freeze: all {spec.num_params:,} parameters are frozen, so nothing is left to train; remove a "
            "pattern"
        )
