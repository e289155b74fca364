"""A small store whose content follows from the step: shared by the store's tests and their child processes."""

from __future__ import annotations

from concurrent.futures import wait

import torch

from storage.manifest import ArraySpec
from storage.nvme import NvmeStore

SPECS = [
    ArraySpec("layers.0", "master", 2048 * 5, "float32", 4096),
    ArraySpec("layers.0", "weights", 2048 * 5, "bfloat16", 4096),
    ArraySpec("embed", "master", 1000, "float32", 2048),
]


def content(spec: ArraySpec, step: int) -> torch.Tensor:
    """What `spec` holds after `step`: a flat tensor."""
    seed = step * 101 + SPECS.index(spec)
    return torch.rand(spec.numel, generator=torch.Generator().manual_seed(seed)).to(getattr(torch, spec.dtype))


def write_all(store: NvmeStore, step: int) -> None:
    futures = [
        store.write(spec.buffer, spec.kind, part, content(spec, step)[start:stop])
        for spec in store.arrays()
        for part, (start, stop) in enumerate(spec.parts())
    ]
    wait(futures)
    for future in futures:
        future.result()


def read_all(store: NvmeStore, spec: ArraySpec) -> torch.Tensor:
    out = torch.empty(spec.numel, dtype=getattr(torch, spec.dtype))
    for part, (start, stop) in enumerate(spec.parts()):
        store.read(spec.buffer, spec.kind, part, out[start:stop]).result()
    return out


def assert_holds(store: NvmeStore, step: int) -> None:
    for spec in store.arrays():
        assert torch.equal(read_all(store, spec), content(spec, step)), (spec, step)
