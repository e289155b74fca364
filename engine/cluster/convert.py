"""From a run directory to a DCP checkpoint and back: a tensor or a flat buffer at a time, whatever the model's size."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex

from penstock.engine import preparing
from penstock.engine.cluster import layout
from penstock.engine.config import Recipe, drive_folders, parse_bytes, state_folder
from penstock.engine.export import RunState
from penstock.engine.forecast.cluster import require_whole
from penstock.engine.forecast.request import buffer_shapes
from penstock.engine.hf.constants import CONSTANTS_FILE, write_constants
from penstock.engine.model.spec import ModelSpec, layouts
from penstock.engine.optim.base import find_optimizer
from penstock.engine.run_files import with_saved_inputs
from penstock.engine.runtime.state import arrays_of
from penstock.storage.files.disk import disk_error
from penstock.storage.generations.store import NvmeStore
from penstock.storage.tier.arena import empty_aligned
from penstock.storage.tier.manifest import ArraySpec


def write_dcp(run_dir: Path, recipe: Recipe, folder: Path, checkpoint: str | None = None) -> tuple[int, int]:
    """Write a run's last committed generation, or a checkpoint's, as a DCP checkpoint; its step and tensors' bytes.

    `folder` is new or empty, or a whole checkpoint that is replaced.
    Raises UserError when there is no generation, or the disk fails; then nothing of it is left.
    """
    require_whole(with_saved_inputs(recipe, run_dir))
    with closing(RunState(run_dir, recipe, checkpoint)) as run:
        planner = _Streaming(run, find_optimizer(recipe.train).kinds)
        meta = {name: value for name, value in run.store.meta.items() if name not in ("plan", "constants")}
        try:
            partial = layout.begin_folder(folder, recipe, meta)
            layout.save(partial, planner.shapes, planner)
            layout.end_folder(folder, layout.checksums_of(partial))
        except BaseException as error:
            shutil.rmtree(layout.partial_folder(folder), ignore_errors=True)
            if isinstance(error, OSError):
                raise disk_error(error, folder, "writing a DCP checkpoint") from error
            raise
        return int(meta["step"]), sum(t.numel() * t.element_size() for t in planner.shapes.values())


class _Streaming(DefaultSavePlanner):
    """Tensors of a checkpoint, each read from the run's state when it is about to be written."""

    def __init__(self, run: RunState, kinds: tuple[str, ...]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._run, self._layouts = run, layouts(run.spec)
        self._arrays = {(array.buffer, array.kind): array for array in run.store.arrays()}
        self._locations = layout.locations(run.spec, kinds)
        step = torch.tensor(float(run.store.meta["step"]))
        self._small = dict(run.constants) | {layout.moment(n, "step"): step for n in layout.trained_names(run.spec)}
        self.shapes: dict[str, Tensor] = dict(self._small)
        """All of them by name, without memory where they are large."""
        for name, (buffer, kind, param) in self._locations.items():
            dtype = getattr(torch, self._arrays[buffer, kind].dtype)
            self.shapes[name] = torch.empty(param.shape, dtype=dtype, device="meta")

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """The values of one; any thread may ask."""
        if index.fqn in self._small:
            return self._small[index.fqn]
        buffer, kind, param = self._locations[index.fqn]
        start = self._layouts[buffer].offsets[param.name]
        return _read(self._run.store, self._arrays[buffer, kind], start, param.numel).view(param.shape)


def _read(store: NvmeStore, array: ArraySpec, start: int, numel: int) -> Tensor:
    """`numel` elements of an array of the committed generation from `start` on."""
    end, dtype = start + numel, getattr(torch, array.dtype)
    values = torch.empty(numel, dtype=dtype)
    for part, (first, last) in enumerate(array.parts()):
        if first < end and last > start:
            rows = empty_aligned(last - first, dtype)
            store.read(array.buffer, array.kind, part, rows).result()
            low, high = max(first, start), min(last, end)
            values[low - start : high - start] = rows[low - first : high - first]
    return values


def read_dcp(folder: Path, record: layout.Record, spec: ModelSpec, recipe: Recipe, run_dir: Path) -> int:
    """Make the state of a new run in `run_dir` from the DCP checkpoint in `folder`; the step that it is at.

    Raises UserError for another model's or a damaged checkpoint, and for a full disk; then no generation is there.
    """
    optimizer = find_optimizer(recipe.train)
    require_whole(recipe)
    layout.require_intact(folder)
    layout.require_same_model(folder, spec, optimizer.kinds)
    arrays = arrays_of(buffer_shapes(spec, recipe), optimizer.state_kinds)
    budget = None if recipe.budgets.nvme is None else parse_bytes(recipe.budgets.nvme, "budgets.nvme")
    root = state_folder(run_dir)
    store = NvmeStore.create(root, arrays, budget_bytes=budget, drives=drive_folders(run_dir, recipe.storage))
    try:
        result = layout.locations(spec, optimizer.kinds)
        flat, total, written = layouts(spec), sum(array.numel for array in arrays), 0
        for array in arrays:
            values = empty_aligned(array.numel, getattr(torch, array.dtype)).zero_()
            views = flat[array.buffer].views(values)
            own = {n: at for n, at in result.items() if (at.buffer, at.kind) == (array.buffer, array.kind)}
            layout.load(folder, {n: views[at.param.name] for n, at in own.items()}, no_dist=True)
            parts = [store.write(array.buffer, array.kind, i, values[a:b]) for i, (a, b) in enumerate(array.parts())]
            for part in parts:
                part.result()
            written += array.numel
            preparing.report(written / total, f"{array.buffer} {array.kind}")
        held = layout.held_tensors(folder)
        constants = {
            name: torch.empty(shape, dtype=held[name].properties.dtype) for name, shape in spec.constants.items()
        }
        if constants:
            layout.load(folder, constants, no_dist=True)
        crc = write_constants(root / CONSTANTS_FILE, constants)
        store.commit({**record.meta, "constants": crc})
    finally:
        store.close()
    return record.step
