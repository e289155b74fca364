"""Keys and values of sequences that are being read: on the compute device, in RAM, or for one layer at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.engine.generate.attend import KeysValues, Place
from penstock.engine.generate.placement import KeysValuesTier
from penstock.engine.model.spec import AttentionShape, ModelSpec
from penstock.storage.tier.arena import HostArena


class Kept:
    """Of several sequences, each with room for a number of tokens; a sequence's rows follow one another."""

    def __init__(
        self,
        spec: ModelSpec,
        capacities: Sequence[int],
        where: KeysValuesTier,
        *,
        dtype: torch.dtype,
        device: torch.device,
        apart: bool,
    ) -> None:
        """`apart`: the device does not compute with what is in RAM."""
        self.where: KeysValuesTier = where
        self.capacities = list(capacities)
        self._shapes, self._dtype, self._device, self._apart = spec.attention, dtype, device, apart
        self._bases = [sum(self.capacities[:i]) for i in range(len(self.capacities))]
        self._total = sum(self.capacities)
        sizes = [self._numel(shape) for shape in self._shapes]
        self._arena: HostArena | None = None
        self._flats: list[Tensor] | None = None
        self._slab: Tensor | None = None
        if where == "gpu" or (where == "ram" and not apart):
            self._flats = [torch.empty(size, dtype=dtype, device=device) for size in sizes]
        else:
            self._slab = torch.empty(max(sizes, default=0), dtype=dtype, device=device)
        if where == "ram" and self._flats is None:
            self._flats = self._pinned(sizes)

    def _numel(self, shape: AttentionShape | None) -> int:
        return 0 if shape is None else self._total * shape.kv_heads * (shape.qk_dim + shape.v_dim)

    def _pinned(self, sizes: Sequence[int]) -> list[Tensor]:
        pages = sum(-(-max(1, size) * self._dtype.itemsize // 4096) * 4096 for size in sizes)
        self._arena = HostArena(pages, budget_bytes=pages)
        flats = [
            self._arena.slot(f"layer {i}", max(1, size) * self._dtype.itemsize).view(self._dtype)[:size]
            for i, size in enumerate(sizes)
        ]
        self._arena.pin()
        return flats

    @property
    def remark(self) -> str | None:
        """What is to be told of its memory."""
        return None if self._arena is None else self._arena.remark

    def of(self, layer: int, sequence: int) -> KeysValues:
        """A sequence's rows in a layer, on the compute device."""
        flat = self._slab if self._slab is not None else self._flats[layer] if self._flats is not None else None
        assert flat is not None
        return self._rows(layer, sequence, flat)

    def _rows(self, layer: int, sequence: int, flat: Tensor) -> KeysValues:
        shape = self._shapes[layer]
        assert shape is not None
        rows = slice(self._bases[sequence], self._bases[sequence] + self.capacities[sequence])
        split = self._total * shape.kv_heads * shape.qk_dim
        k = flat[:split].view(self._total, shape.kv_heads, shape.qk_dim)
        v = flat[split : self._numel(shape)].view(self._total, shape.kv_heads, shape.v_dim)
        return KeysValues(k[rows], v[rows])

    def _passes(self, layer: int) -> bool:
        """Whether a layer's keys and values are brought and taken away again."""
        return self._slab is not None and self._flats is not None and self._shapes[layer] is not None

    def bring(self, layer: int, places: Sequence[tuple[int, Place]]) -> None:
        """Have what was kept of these (sequence, new tokens) in `layer` where `of` says, on the current stream."""
        if self._passes(layer):
            self._move(layer, [(sequence, 0, place.start) for sequence, place in places], out=False)

    def take(self, layer: int, places: Sequence[tuple[int, Place]]) -> None:
        """Keep the new tokens' rows, which `of` has now."""
        if self._passes(layer):
            self._move(layer, [(sequence, place.start, place.end) for sequence, place in places], out=True)

    def _move(self, layer: int, ranges: Sequence[tuple[int, int, int]], *, out: bool) -> None:
        assert self._flats is not None
        assert self._arena is not None
        for sequence, start, end in ranges:
            pair = zip(self.of(layer, sequence), self._rows(layer, sequence, self._flats[layer]), strict=True)
            for here, there in pair:
                target, origin = (there, here) if out else (here, there)
                self._arena.copy(target[start:end], origin[start:end])

    def close(self) -> None:
        if self._apart:
            torch.cuda.synchronize(self._device)
        self._flats = self._slab = None
        if self._arena is not None:
            self._arena.close()
