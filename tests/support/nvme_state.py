"""A small store whose content follows from the step: shared by the store's tests and their child processes."""

from concurrent.futures import wait
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from penstock.storage.generations.store import NvmeStore
from penstock.storage.tier.manifest import ArraySpec

SPECS = [
    ArraySpec("layers.0", "master", 2048 * 5, "float32", 4096),
    ArraySpec("layers.0", "weights", 2048 * 5, "bfloat16", 4096),
    ArraySpec("embed", "master", 1000, "float32", 2048),
]


def content(spec: ArraySpec, step: int) -> torch.Tensor:
    """What `spec` holds after `step`: a flat tensor."""
    seed = step * 101 + SPECS.index(spec)
    return torch.rand(spec.numel, generator=torch.Generator().manual_seed(seed)).to(getattr(torch, spec.dtype))


def moved_bytes(store: NvmeStore) -> tuple[int, int]:
    """Bytes (read, written) since the store was opened, on all drives."""
    traffic = store.traffic().values()
    return sum(each.bytes_read for each in traffic), sum(each.bytes_written for each in traffic)


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


def advance(store: NvmeStore, *steps: int, **meta: Any) -> None:
    for step in steps:
        write_all(store, step)
        store.commit({"step": step, **meta})


def make(root: Path, *steps: int, drives: list[Path] | None = None) -> NvmeStore:
    """A new store that has committed these steps."""
    store = NvmeStore.create(root, SPECS, budget_bytes=None, drives=drives)
    advance(store, *steps)
    return store


def assert_whole(root: Path, step: int, *, generation: int | None = None, drives: list[Path] | None = None) -> None:
    """Opening finds the generation of `step`, every bit of it."""
    with closing(NvmeStore.open(root, drives=drives)) as store:
        assert store.meta == {"step": step}
        assert generation is None or store.generation == generation
        assert_holds(store, step)
        store.verify()


def assert_sound(root: Path, step: int, *, generation: int | None = None) -> None:
    """It is whole, and training can go on from it."""
    assert_whole(root, step, generation=generation)
    with closing(NvmeStore.open(root)) as store:
        advance(store, step + 100)
        assert_holds(store, step + 100)


def committed_files(store: NvmeStore) -> list[Path]:
    """The chunk files of the committed generation."""
    return [array.committed(part)[1] for array in store._committable() for part in range(len(array.parts))]
