"""How a checkpoint's tensors map to the model's parameters, both ways.

transformers 5 renames, merges and splits tensors when it loads (Mixtral's `experts.0.w1` ... become one `gate_up_proj`)
and undoes that when it saves. The same conversions run here, a few tensors at a time, and are undone to exactly the
names that the checkpoint had. They are planned on the meta device: names and shapes are checked before any data moves.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from penstock.storage.files.errors import UserError
from penstock.storage.files.safetensors import CheckpointReader


@dataclass
class Conversion:
    """Checkpoint tensors that together make some of the model's tensors; mostly one that makes one."""

    sources: list[str] = field(default_factory=list)
    """Names in the checkpoint."""
    targets: list[str] = field(default_factory=list)
    """State-dict names of the model."""
    exported: dict[str, str] = field(default_factory=dict)
    """For a conversion that is more than a new name: what undoing it yields, and the checkpoint's name of that. Empty
    where the checkpoint's names cannot be had back: then the model's own are exported."""
    transform: WeightConverter | None = None
    patterns: list[str] = field(default_factory=list)


class ConversionPlan:
    """All conversions of one checkpoint for `model` (on the meta device).

    Attributes: `conversions`, in the checkpoint's natural order; `unused`, the tensors that the model has no use for;
    `shapes`, of the model's tensors by name. Raises UserError for the first that is missing or of another shape.
    """

    def __init__(self, model: PreTrainedModel, reader: CheckpointReader) -> None:
        self._model, self._reader = model, reader
        self._stored = {name: shape for name, (_, shape) in reader.tensors.items()}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self.unused: list[str] = []
        self.conversions = self._group(get_model_conversion_mapping(model))
        for conversion in self.conversions:
            self._check(conversion)

    def apply(self, conversion: Conversion, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The model's tensors, by state-dict name, from the checkpoint's `tensors`, by their names there."""
        if conversion.transform is None:
            return {conversion.targets[0]: tensors[conversion.sources[0]]}
        transform: Any = copy.deepcopy(conversion.transform)
        for name, pattern in zip(conversion.sources, conversion.patterns, strict=True):
            transform.add_tensor(conversion.targets[0], name, pattern, tensors[name])
        made = transform.convert(conversion.targets[0], model=self._model, config=self._model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def revert(self, conversion: Conversion, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What an export writes for the model's `tensors`, by the checkpoint's names, or by the model's."""
        if conversion.transform is None:
            return {conversion.sources[0]: tensors[conversion.targets[0]]}
        if not conversion.exported:
            return {name: tensors[name] for name in conversion.targets}
        reverted = self._reverted({name: tensors[name] for name in conversion.targets})
        return {conversion.exported[name]: tensor for name, tensor in reverted.items()}

    def _reverted(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        vars(self._model)["_weight_conversions"] = self._used
        made: dict[str, Tensor] = revert_weight_conversion(self._model, tensors)
        return made

    def _group(self, transforms: list[WeightTransform]) -> list[Conversion]:
        renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        converters = [t for t in transforms if isinstance(t, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        prefix = self._model.base_model_prefix
        meta = self._model.state_dict()
        groups: dict[str, Conversion] = {}
        for name in sorted(self._stored, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters, prefix, meta)
            if target not in meta and name in meta:
                target, pattern = rename_source_key(name, [], [], prefix, meta)
            if target not in meta:
                self.unused.append(name)
                continue
            group = groups.setdefault(target if pattern is not None else f"{target} <- {name}", Conversion())
            group.sources.append(name)
            group.targets = [target]
            if pattern is not None:
                group.patterns.append(pattern)
                group.transform = by_pattern[pattern]
        self._used = [transform for transform in transforms if transform.was_used()]
        return list(groups.values())

    def _check(self, conversion: Conversion) -> None:
        """Complete `conversion` by trying it on meta tensors, and refuse what does not give the model's shapes."""
        meta = {name: torch.empty(self._stored[name], device="meta") for name in conversion.sources}
        if conversion.transform is None:
            self._check_shape(conversion.sources[0], self.shapes[conversion.targets[0]])
            return
        made: dict[str, Tensor] = {}
        try:
            made = self.apply(conversion, meta)
            fits = all(self.shapes.get(name) == tuple(tensor.shape) for name, tensor in made.items())
        except (RuntimeError, ValueError, IndexError):
            fits = False
        if not fits:
            self._explain(conversion, [name for name in made if name in self.shapes] or conversion.targets)
        conversion.targets = list(made)
        empty = {name: torch.empty(self.shapes[name], device="meta") for name in conversion.targets}
        reverted = {name: tuple(tensor.shape) for name, tensor in self._reverted(empty).items()}
        names = _match(list(reverted), conversion.sources)
        if names is not None and all(reverted[made] == self._stored[name] for made, name in names.items()):
            conversion.exported = names

    def _check_shape(self, name: str, expected: tuple[int, ...]) -> None:
        if self._stored[name] != expected:
            raise UserError(
                f"{self._reader.file(name)}: tensor '{name}' has shape {list(self._stored[name])}, but "
                f"config.json implies {list(expected)}; the weights and the config do not match"
            )

    def _explain(self, conversion: Conversion, targets: list[str]) -> None:
        """Raise the UserError for a conversion of several tensors that does not give the model's shapes."""
        where = self._reader.file(conversion.sources[0])
        expected = self._reverted({name: torch.empty(self.shapes[name], device="meta") for name in targets})
        names = {made: made for made in expected}
        names |= _match(list(expected), conversion.sources) or {}
        for made, name in names.items():
            if name not in self._stored:
                raise UserError(f"{where}: tensor '{name}' is missing, from which '{targets[0]}' is made")
            self._check_shape(name, tuple(expected[made].shape))
        raise UserError(
            f"{where}: '{targets[0]}' of shape {list(self.shapes[targets[0]])} cannot be made of {conversion.sources}"
        )


def _match(made: list[str], names: list[str]) -> dict[str, str] | None:
    """Which of `names` each of `made` is: equal, or equal but for a leading part; None when that is no bijection."""
    if set(made) == set(names):
        return {name: name for name in made}
    matches = {m: [n for n in names if m.endswith(f".{n}") or n.endswith(f".{m}")] for m in made}
    unique = {m: result[0] for m, result in matches.items() if len(result) == 1}
    if len(unique) != len(made) or set(unique.values()) != set(names):
        return None
    return unique
