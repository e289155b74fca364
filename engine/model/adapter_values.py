"""An adapter's first values, as peft gives them, and its end: the base's matrices with the adapter merged into them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from penstock.engine.model import skeleton
from penstock.engine.model.adapters import MAGNITUDE, adapted_module, is_adapter, plain_name
from penstock.engine.model.quantise import as_held
from penstock.engine.model.skeleton import Tensors
from penstock.engine.model.spec import BufferSpec, ModelSpec
from penstock.storage.files.errors import UserError
from penstock.storage.tier.layout import ParamSpec


class AdapterLayers:
    """peft's layers of a model on the meta device, into which values are put for as long as they are needed. `bases`:
    adapted module -> the parameter of the base that its adapter adds to."""

    def __init__(self, spec: ModelSpec) -> None:
        from peft.tuners.lora import LoraLayer

        assert spec.adapter is not None
        self._spec = spec
        self._model = skeleton.build(spec.config, adapter=spec.adapter)
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        self._layers: dict[str, Any] = {n: m for n, m in self._model.named_modules() if isinstance(m, LoraLayer)}
        self.bases = {name: names[id(_base_of(layer)[0])] for name, layer in self._layers.items()}

    def row_norms(self, buffer: BufferSpec, values: Tensors, dtype: torch.dtype) -> dict[str, Tensor]:
        """The first magnitudes of dora, float32: lengths of the rows of the matrices among the `values` of a buffer,
        which count as it stores them and `dtype` holds them; by the magnitude's name."""
        values = as_held(buffer, values)
        result = {}
        for module, base in self.bases.items():
            if base in values:
                magnitude = self._layers[module].lora_magnitude_vector["default"]
                matrix = values[base].to(dtype).float()
                matrix = matrix.T if magnitude.fan_in_fan_out else matrix
                result[f"{module}.{MAGNITUDE}.default.weight"] = torch.linalg.norm(matrix, dim=1)
        return result

    def require_mergeable(self) -> None:
        """Raise UserError where two blocks compute with a matrix that one of them has an adapter beside."""
        users: dict[str, int] = {}
        for block in self._spec.blocks:
            for buffer in block.buffers:
                users[buffer] = users.get(buffer, 0) + 1
        shared = {p.name for name, buffer in self._spec.buffers.items() if users[name] > 1 for p in buffer.params}
        for module, base in self.bases.items():
            if base in shared:
                raise UserError(
                    f"'{plain_name(module)}' has an adapter, but the embedding and the head share its matrix, and "
                    "merging would change both; export the adapter without --merged"
                )

    def merged(self, values: Tensors, dtypes: Callable[[str], torch.dtype]) -> dict[str, Tensor]:
        """The base's parameters of a block, float32 by plain names, with the adapter in them; `values`: both, float32.
        `dtypes`: what peft's layers merge each in. Raises UserError where that does not hold a sum."""
        result = {plain_name(name): tensor for name, tensor in values.items() if not is_adapter(name)}
        of_module: dict[str, dict[str, Tensor]] = {}
        for name, tensor in values.items():
            if is_adapter(name):
                of_module.setdefault(adapted_module(name), {})[name] = tensor
        for module, own in of_module.items():
            base = plain_name(self.bases[module])
            sums = self._merge(module, own, result[base].to(dtypes(base), copy=True))
            if not sums.isfinite().all():
                raise UserError(
                    f"export: '{base}' with its adapter has a value that {str(sums.dtype).removeprefix('torch.')} "
                    "cannot represent; export as bfloat16 or float32"
                )
            result[base] = sums.float()
        return result

    def _merge(self, module: str, own: Tensors, base: Tensor) -> Tensor:
        layer = self._layers[module]
        sites = [(*_base_of(layer)[1:], base)]
        for name, tensor in own.items():
            owner, _, key = name.rpartition(".")
            sites.append((self._model.get_submodule(owner), key, tensor))
        on_meta = [part._parameters[key] for part, key, _ in sites]
        try:
            for part, key, tensor in sites:
                part._parameters[key] = nn.Parameter(tensor, requires_grad=False)
            with torch.no_grad():
                layer.merge()
            merged: Tensor = _base_of(layer)[0].detach()
        finally:
            for (part, key, _), parameter in zip(sites, on_meta, strict=True):
                part._parameters[key] = parameter
            layer.merged_adapters.clear()
            layer._caches.clear()
        return merged


def _base_of(layer: Any) -> tuple[Tensor, nn.Module, str]:
    """The parameter that one of peft's layers adds to, its module and its name there."""
    module = layer.get_base_layer()
    key = getattr(layer, "parameter_name", "weight")
    return getattr(module, key), module, key


def with_adapter(
    spec: ModelSpec,
    base: Iterable[tuple[str, dict[str, Tensor]]],
    *,
    seed: int,
    dtype: torch.dtype,
    start: Tensors | None = None,
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """The buffers of `base`, each followed by those of the adapter that are known by then; all float32. Values are of
    `start`, which may have some in place of the base's, or drawn by `seed`, dora's magnitudes as lengths of the rows of
    the base as it is stored and as `dtype` holds it."""
    adapter = spec.adapter
    assert adapter is not None
    waiting = {n: b.params for n, b in spec.buffers.items() if all(is_adapter(p.name) for p in b.params)}
    known = dict(start or {})
    measured = AdapterLayers(spec) if start is None and adapter.method == "dora" else None
    if start is None:
        known |= {p.name: v for params in waiting.values() for p in params if (v := _drawn(p, seed)) is not None}
    for buffer, values in base:
        if measured is not None:
            known |= measured.row_norms(spec.buffers[buffer], values, dtype)
        yield buffer, values | {name: known.pop(name) for name in values.keys() & known.keys()}
        del values
        for name in [name for name, params in waiting.items() if all(p.name in known for p in params)]:
            yield name, {param.name: known.pop(param.name) for param in waiting.pop(name)}
    assert not waiting, f"no values for {sorted(waiting)}"


def _drawn(param: ParamSpec, seed: int) -> Tensor | None:
    """First values of a parameter that do not depend on the base; None where they do."""
    kind = param.name[len(adapted_module(param.name)) + 1 :].partition(".")[0]
    if kind == MAGNITUDE:
        return None
    values = torch.zeros(param.shape)
    if kind in ("lora_A", "lora_embedding_B"):
        digest = hashlib.sha256(f"{seed}/{param.name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        if kind == "lora_A":
            nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
        else:
            nn.init.normal_(values, generator=generator)
    return values
