"""Where the weights of a model are read from: a Hugging Face folder, an adapter's beside its base, a run's state."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from penstock.engine.config import AdapterConfig, Recipe, drive_folders, state_folder
from penstock.engine.data.corpus.prepare import saved_tokenizer
from penstock.engine.data.text.tokenizer import TextTokenizer, has_tokenizer, load_tokenizer
from penstock.engine.hf.adapter_folder import StoredAdapter, open_start
from penstock.engine.hf.config import model_config, read_config, with_vocabulary
from penstock.engine.hf.constants import CONSTANTS_FILE, read_constants_file
from penstock.engine.hf.conversion import Conversion
from penstock.engine.hf.quantised import open_checkpoint
from penstock.engine.hf.weights import FLOAT_DTYPES, CheckpointLayout, require_same_twice
from penstock.engine.model.adapters import is_adapter
from penstock.engine.model.anatomy import spec_of_recipe, take_apart
from penstock.engine.model.spec import ModelSpec, block_of, layouts
from penstock.engine.optim.base import MASTER
from penstock.engine.runtime.handlers import gather
from penstock.engine.runtime.past import StateReader
from penstock.storage.files.errors import UserError
from penstock.storage.generations.checkpoints import checkpoint_folder, read_checkpoint
from penstock.storage.generations.store import NvmeStore
from penstock.storage.tier.arena import empty_aligned
from penstock.storage.tier.manifest import ArraySpec

_THREADS = 4
"""Tensors read from a folder at once: one thread does not keep a fast drive busy."""
_PARTS_AT_ONCE = 4
WEIGHTS = "weights"
"""Kind of what is computed with: committed of a frozen buffer, scratch of any other on NVMe."""


class Weights(Protocol):
    """In the place of the NVMe tier of a plan that updates nothing."""

    def read(self, buffer: str, kind: str, part: int, out: Tensor) -> Future[None]:
        """Fill `out` [numel of the buffer], on the host, with its parameters rounded to the dtype of `out`, or as they
        are stored where it is quantised; the gaps between parameters are left as they are. Each buffer has one part."""


class Source(Weights, Protocol):
    """A model's parameters on disk, by flat buffer."""

    spec: ModelSpec
    constants: dict[str, Tensor]
    """Values of `spec.constants`, those that are known."""
    tokenizer: TextTokenizer | None
    origin: Path | None
    """The folder of the model, or of the one that a run began with."""
    usual_dtype: torch.dtype
    """What the parameters are computed with if nobody says otherwise."""

    def stored_bytes(self, buffer: str) -> int:
        """Bytes that are read from disk for a buffer."""

    def close(self) -> None: ...


class FolderSource:
    """A Hugging Face folder, read tensor by tensor; what layout the model wants is made on the way."""

    def __init__(self, folder: Path, adapter: AdapterConfig | None = None) -> None:
        """`adapter`: part of the model, and not in the folder. Raises UserError for a folder that is no model, or none
        that can be read exactly."""
        self.origin: Path | None = folder
        self.spec = take_apart(read_config(folder), adapter=adapter)
        self._reader = open_checkpoint(folder)
        self._layout = CheckpointLayout(self.spec, self._reader)
        self._flat = layouts(self.spec)
        stored = {name: self._reader.tensors[name][0] for name in self._layout.trained}
        for name, dtype in stored.items():
            if dtype not in FLOAT_DTYPES:
                raise UserError(
                    f"{self._reader.file(name)}: tensor '{name}' is {dtype}; convert it to one of "
                    f"{', '.join(FLOAT_DTYPES)}"
                )
        sizes = Counter[str]()
        for name, dtype in stored.items():
            sizes[dtype] += self._reader.stored_bytes(name)
        require_same_twice(self._reader, self._layout.plan, self._layout.canonical)
        self.usual_dtype = FLOAT_DTYPES[sizes.most_common(1)[0][0]]
        self.constants = self._layout.read_constants()
        self.tokenizer = load_tokenizer(folder) if has_tokenizer(folder) else None
        self._threads = ThreadPoolExecutor(_THREADS, "tensors")

    def stored_bytes(self, buffer: str) -> int:
        sources = (name for one in self._conversions(buffer) for name in one.sources)
        return sum(map(self._reader.stored_bytes, sources))

    def _conversions(self, buffer: str) -> list[Conversion]:
        """Those that make parameters of the buffer."""
        own, canonical = self._flat[buffer].offsets, self._layout.canonical
        of_block = self._layout.of_block[block_of(buffer)]
        return [one for one in of_block if any(canonical[target] in own for target in one.targets)]

    def read(self, buffer: str, kind: str, part: int, out: Tensor) -> Future[None]:
        views = self._flat[buffer].views(out)
        return gather([self._threads.submit(self._convert, one, views) for one in self._conversions(buffer)])

    def _convert(self, conversion: Conversion, views: dict[str, Tensor]) -> None:
        """Put what one conversion makes where it belongs; a tied tensor that is stored twice is the same twice."""
        canonical, reader = self._layout.canonical, self._reader
        if conversion.transform is None:
            name, view = conversion.sources[0], views[canonical[conversion.targets[0]]]
            if FLOAT_DTYPES[reader.tensors[name][0]] == view.dtype:
                reader.read_into(name, view)
            else:
                view.copy_(reader.read(name))
            return
        tensors = {name: reader.read(name).to(next(iter(views.values())).dtype) for name in conversion.sources}
        for target, tensor in self._layout.plan.apply(conversion, tensors).items():
            if canonical[target] in views:  # else it is another buffer's
                views[canonical[target]].copy_(tensor)

    def close(self) -> None:
        self._threads.shutdown()


class AdapterSource(FolderSource):
    """A model with an adapter beside it: the base tensor by tensor as a folder's, the adapter held in memory."""

    def __init__(self, folder: Path, base: Path | None = None) -> None:
        """`base`: the model's folder; None: where the adapter says that it is. Raises UserError as for any adapter to
        go on from, and where there is no base."""
        stored = StoredAdapter.open(folder)
        folder_of_base = Path(stored.base or "").expanduser() if base is None else base
        if base is None and (stored.base is None or not folder_of_base.is_dir()):
            raise UserError(f"{folder}: the adapter's base model {stored.base} is missing; copy or download it there")
        super().__init__(folder_of_base, stored.section)
        if has_tokenizer(folder):
            self.tokenizer = load_tokenizer(folder)
        self._values = open_start(folder, self.spec, None).values()

    def stored_bytes(self, buffer: str) -> int:
        return 0 if self._is_adapter(buffer) else super().stored_bytes(buffer)

    def read(self, buffer: str, kind: str, part: int, out: Tensor) -> Future[None]:
        if not self._is_adapter(buffer):
            return super().read(buffer, kind, part, out)
        for name, view in self._flat[buffer].views(out).items():
            view.copy_(self._values[name])
        return gather([])

    def _is_adapter(self, buffer: str) -> bool:
        return all(is_adapter(param.name) for param in self.spec.buffers[buffer].params)


class RunSource:
    """A run's last committed generation, or a checkpoint's: the rounded master weights; frozen weights as they are,
    quantised ones too."""

    def __init__(self, run_dir: Path, recipe: Recipe, checkpoint: str | None, *, held: bool = False) -> None:
        """`held`: another process of this program has opened it. Raises UserError when there is no such generation, or
        another program has the run open."""
        folder = root = state_folder(run_dir)
        if checkpoint is not None:
            read_checkpoint(root, checkpoint)
            folder = checkpoint_folder(root, checkpoint)
        self.store = NvmeStore.open(folder, drives=drive_folders(run_dir, recipe.storage), read_only=True, held=held)
        try:
            self.origin = None if recipe.model.path is None else Path(recipe.model.path).expanduser()
            self.tokenizer = saved_tokenizer(recipe, run_dir / "data")
            vocabulary = self.tokenizer.vocab_size if self.tokenizer else None
            self.stored = model_config(recipe, vocabulary)
            """The config of the model folder that the run began with, or of the recipe's shape."""
            self.spec = spec_of_recipe(with_vocabulary(self.stored, recipe, vocabulary), recipe)
            checksum = self.store.meta.get("constants")
            self.constants = read_constants_file(root / CONSTANTS_FILE, checksum, self.spec.constants)
        except BaseException:
            self.store.close()
            raise
        self.usual_dtype = torch.float32 if recipe.train.compute_dtype == "float32" else torch.bfloat16
        self._state = StateReader(self.store, self.spec, recipe.train)
        self._arrays = {spec.buffer: spec for spec in self.store.arrays() if spec.kind in (MASTER, WEIGHTS)}
        self._threads = ThreadPoolExecutor(_THREADS, "buffers")

    def stored_bytes(self, buffer: str) -> int:
        array = self._arrays[buffer]
        return array.numel * array.item_bytes

    def read(self, buffer: str, kind: str, part: int, out: Tensor) -> Future[None]:
        return self._threads.submit(self._read, buffer, out)

    def _read(self, buffer: str, out: Tensor) -> None:
        array = self._arrays[buffer]
        parts = array.parts()
        if self._state.is_behind(buffer):
            for part, (start, end) in enumerate(parts):
                out[start:end].copy_(self._state.part(buffer, part)[array.kind])
        elif str(out.dtype).removeprefix("torch.") == array.dtype:  # straight to where it belongs
            futures = [self.store.read(buffer, array.kind, part, out[a:b]) for part, (a, b) in enumerate(parts)]
            for future in futures:
                future.result()
        else:
            self._read_rounded(array, parts, out)

    def _read_rounded(self, array: ArraySpec, parts: list[tuple[int, int]], out: Tensor) -> None:
        longest, dtype = max(end - start for start, end in parts), FLOAT_DTYPES[array.dtype]
        stages = [empty_aligned(longest, dtype) for _ in range(min(_PARTS_AT_ONCE, len(parts)))]
        reading: deque[Callable[[], None]] = deque()
        for part, (start, end) in enumerate(parts):
            if len(reading) == len(stages):
                reading.popleft()()
            rows = stages[part % len(stages)][: end - start]
            future = self.store.read(array.buffer, array.kind, part, rows)

            def finish(future: Future[None] = future, rows: Tensor = rows, start: int = start, end: int = end) -> None:
                future.result()
                out[start:end].copy_(rows)

            reading.append(finish)
        while reading:
            reading.popleft()()

    def close(self) -> None:
        self._threads.shutdown()
        self.store.close()
