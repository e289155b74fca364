"""Weights on their way: block after block to the compute device, the next one arriving while one computes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock.engine.generate.placement import Placement, Sizes
from penstock.engine.generate.sources import Source
from penstock.engine.model.spec import layouts
from penstock.storage.tier.arena import HostArena, empty_aligned


@dataclass(slots=True)
class _Place:
    """Memory that one block after another passes through, with what has to be over before it is written again."""

    flat: Tensor
    over: torch.cuda.Event | None = None


@dataclass(slots=True)
class _Coming:
    """A block on its way, or here."""

    fetched: Future[torch.cuda.Event | None]
    slot: _Place | None
    flats: dict[str, Tensor] = field(default_factory=dict)
    """By buffer, on the compute device."""


class Weights:
    """The blocks of a source in turn, in `dtype` on `device`. Calls come from one thread; `close` it.

    Memory of the compute device is written by a thread of its own, on CUDA on a stream of its own: a slot is filled
    once the kernels that read it are over, and read once its copy is.
    """

    def __init__(self, source: Source, sizes: Sizes, *, device: torch.device, dtype: torch.dtype, apart: bool) -> None:
        """`apart`: the device does not compute with what is in RAM."""
        self._source, self._sizes, self._device, self._dtype = source, sizes, device, dtype
        self._layouts = layouts(source.spec)
        self._thread = ThreadPoolExecutor(1, "weights")
        self._stream = torch.cuda.Stream(device) if apart else None
        self._placement: Placement | None = None
        self._gpu: dict[str, Tensor] = {}
        self._ram: dict[str, Tensor] = {}
        self._filled: set[str] = set()
        """Buffers in RAM that hold their weights."""
        self._arena: HostArena | None = None
        self._stages: list[_Place] = []
        self._free: list[_Place] = []
        self._coming: dict[int, _Coming] = {}
        self._closing = threading.Event()
        self.bytes_read = 0
        """From disk so far."""

    def place(self, placement: Placement) -> None:
        """Let everything live where `placement` says; what moves is read again when it is next needed."""
        before, self._placement = self._placement, placement
        if before is not None and (before.tiers, before.slots) == (placement.tiers, placement.slots):
            return
        self._settle()
        tiers, sizes = placement.tiers, self._sizes.buffers
        self._gpu = {name: flat for name, flat in self._gpu.items() if tiers[name] == "gpu"}
        self._free = []  # before the new ones are made
        self._free = [_Place(self._empty(placement.slot_bytes)) for _ in range(placement.slots)]
        resident = [name for name, where in tiers.items() if where == "ram"]
        staging = 0
        if self._stream is not None:
            staging = max((sizes[name] for name, where in tiers.items() if where == "disk"), default=0)
        if list(self._ram) != resident or staging != (self._stages[0].flat.nbytes if self._stages else 0):
            self._make_host(resident, staging)

    @property
    def remark(self) -> str | None:
        """What is to be told of its memory."""
        return None if self._arena is None else self._arena.remark

    @contextmanager
    def block(self, index: int) -> Iterator[dict[str, Tensor]]:
        """The parameters of a block by state-dict name, on the device; inside the block only."""
        coming = self._ask(index)
        if coming is None:
            self._make_room(index)
            coming = self._ask(index)
        assert coming is not None
        ready = coming.fetched.result()
        if ready is not None:
            torch.cuda.current_stream(self._device).wait_event(ready)
        self._ask_next(index)
        try:
            yield {
                name: view for buffer, flat in coming.flats.items() for name, view in self._views(buffer, flat).items()
            }
        finally:
            self._release(index)
            self._ask_next(index)

    def close(self) -> None:
        self._closing.set()
        self._settle()
        self._thread.shutdown()
        self._gpu, self._ram, self._stages, self._free = {}, {}, [], []
        if self._arena is not None:
            self._arena.close()

    # ------------------------------------------------------------------ memory

    def _empty(self, nbytes: int) -> Tensor:
        numel = nbytes // self._dtype.itemsize
        if self._device.type == "cpu":
            return empty_aligned(numel, self._dtype)
        return torch.empty(numel, dtype=self._dtype, device=self._device)

    def _make_host(self, resident: list[str], staging: int) -> None:
        """RAM for the buffers that live there, and for what passes through; pinned where there is a GPU."""
        self._ram, self._stages, self._filled = {}, [], set()
        if self._arena is not None:
            self._arena.close()
            self._arena = None
        needs = {name: self._sizes.buffers[name] for name in resident}
        needs |= {f"stage {i}": staging for i in range(2)} if staging else {}
        if not needs:
            return
        pages = sum(-(-nbytes // 4096) * 4096 for nbytes in needs.values())
        self._arena = HostArena(pages, budget_bytes=pages)
        slots = {name: self._arena.slot(name, nbytes).view(self._dtype) for name, nbytes in needs.items()}
        if self._stream is not None:
            self._arena.pin()
        self._ram = {name: slots[name] for name in resident}
        self._stages = [_Place(slots[name]) for name in needs if name not in self._ram]

    def _views(self, buffer: str, flat: Tensor) -> dict[str, Tensor]:
        return self._layouts[buffer].views(flat)

    # ------------------------------------------------------------------ asking

    def _needs_slot(self, index: int) -> bool:
        assert self._placement is not None
        streamed = ("ram", "disk") if self._stream is not None else ("disk",)
        return any(self._placement.tiers[name] in streamed for name in self._sizes.blocks[index])

    def _is_here(self, index: int) -> bool:
        """All of a block lives where the device reads it, and has its weights."""
        if self._needs_slot(index):
            return False
        return all(name in self._gpu or name in self._filled for name in self._sizes.blocks[index])

    def _ask(self, index: int) -> _Coming | None:
        """The block on its way; None where there is no room for it now."""
        found = self._coming.get(index)
        if found is not None:
            return found
        slot = None
        if self._needs_slot(index):
            if not self._free:
                return None
            slot = self._free.pop()
        coming = _Coming(Future(), slot)
        if self._is_here(index):
            coming.flats = {name: self._gpu.get(name, self._ram.get(name)) for name in self._sizes.blocks[index]}  # type: ignore[misc]
            coming.fetched.set_result(None)
        else:
            coming.fetched = self._thread.submit(self._fetch, index, coming)
        self._coming[index] = coming
        return coming

    def _ask_next(self, index: int) -> None:
        """Have the next blocks that are not here fetched, as many as there is room for."""
        count = len(self._sizes.blocks)
        for other in ((index + step) % count for step in range(1, count)):
            if not self._is_here(other) and other not in self._coming:
                waiting = sum(not coming.fetched.done() for coming in self._coming.values())
                if waiting >= 2 or self._ask(other) is None:
                    return

    def _release(self, index: int) -> None:
        coming = self._coming.pop(index)
        if coming.slot is not None:
            if self._stream is not None:
                coming.slot.over = torch.cuda.Event(blocking=True)
                coming.slot.over.record(torch.cuda.current_stream(self._device))
            self._free.append(coming.slot)

    def _make_room(self, index: int) -> None:
        """Give up blocks that were fetched ahead and are not the next after all: a pass was broken off."""
        for other in [i for i, coming in self._coming.items() if i != index and coming.slot is not None]:
            self._coming[other].fetched.exception()
            self._release(other)

    def _settle(self) -> None:
        """Wait for all that is under way, and let go of it."""
        for index in list(self._coming):
            self._coming[index].fetched.exception()
            self._release(index)
        if self._stream is not None:
            torch.cuda.synchronize(self._device)

    # ------------------------------------------------------------------ fetching, in the thread

    def _fetch(self, index: int, coming: _Coming) -> torch.cuda.Event | None:
        """Bring the buffers of a block; what to wait for on the device before they are read."""
        assert self._placement is not None
        if self._closing.is_set():
            return None
        where: Any = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        with where:
            if self._stream is not None and coming.slot is not None and coming.slot.over is not None:
                self._stream.wait_event(coming.slot.over)
            offset = 0
            for name in self._sizes.blocks[index]:
                tier, numel = self._placement.tiers[name], self._layouts[name].numel
                if tier == "gpu":
                    coming.flats[name] = self._living(name, numel)
                    continue
                if tier == "ram":
                    self._fill(name)
                    if self._stream is None:
                        coming.flats[name] = self._ram[name]
                        continue
                assert coming.slot is not None
                target = coming.flats[name] = coming.slot.flat[offset : offset + numel]
                offset += numel
                if tier == "ram":
                    self._to_device(target, self._ram[name])
                else:
                    self._read(name, target)
            if self._stream is None:
                return None
            ready = torch.cuda.Event(blocking=True)
            ready.record(self._stream)
            return ready

    def _living(self, name: str, numel: int) -> Tensor:
        """A buffer that lives on the device, read where it was not yet."""
        if name not in self._gpu:
            flat = self._empty(numel * self._dtype.itemsize)
            self._read(name, flat)
            self._gpu[name] = flat
        return self._gpu[name]

    def _fill(self, name: str) -> None:
        if name not in self._filled:
            self._from_disk(name, self._ram[name])
            self._filled.add(name)

    def _read(self, name: str, target: Tensor) -> None:
        """From disk to memory of the device."""
        if self._stream is None:
            self._from_disk(name, target)
            return
        if self._stages and self._stages[0].flat.numel() >= target.numel():
            stage = self._stages.pop(0)
            self._stages.append(stage)
            if stage.over is not None:
                stage.over.synchronize()
            rows = stage.flat[: target.numel()]
            self._from_disk(name, rows)
            self._to_device(target, rows)
            stage.over = torch.cuda.Event(blocking=True)
            stage.over.record(self._stream)
        else:  # once, of what lives on the device
            rows = empty_aligned(target.numel(), self._dtype)
            self._from_disk(name, rows)
            target.copy_(rows)

    def _to_device(self, target: Tensor, rows: Tensor) -> None:
        assert self._arena is not None
        self._arena.copy(target, rows)

    def _from_disk(self, name: str, rows: Tensor) -> None:
        self._source.read(name, rows)
        self.bytes_read += self._source.stored_bytes(name)
