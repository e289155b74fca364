"""A CUDA device that is only addresses: torch's own calls on it are noted and compute nothing.

Inside `pretended`, device memory, pinned memory and the host arena are ranges of address space that nobody has touched,
so that hundreds of GB of them cost nothing. A torch function mode sees every call: allocations on "cuda" and pinned
ones are served from these ranges, copies and the few kernels that the runtime itself launches are told to a Watch. A
call with device memory that is not known here is an error: nothing is skipped by mistake.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import mmap
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cuda_watch import Watch
from torch import Tensor
from torch.overrides import TorchFunctionMode

DEVICE = torch.device("cuda", 0)
ALLOCATOR_BYTES = 512
"""The caching allocator rounds sizes up to this, and promises no more of an address."""
SMALL_BYTES = 1 << 20
"""Sizes up to this come from segments of 2 MiB, larger ones from pages of 20 MiB, of each stream."""
SMALL_PAGE, LARGE_PAGE = 2 << 20, 20 << 20
_NORESERVE = 0x4000


def reserve(nbytes: int) -> mmap.mmap:
    """Address space that is counted against no memory until it is touched."""
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)


def up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple


class Space:
    """A range of addresses from which tensors of their own storage are given out."""

    def __init__(self, nbytes: int) -> None:
        self._map = reserve(nbytes)
        self.start = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()
        self.end = self.start + nbytes
        self._next = self.start
        self._free: dict[Any, list[int]] = {}

    def holds(self, address: int) -> bool:
        return self.start <= address < self.end

    def take(self, nbytes: int, pool: Any, on_free: Callable[[int], None]) -> Tensor:
        """uint8 [nbytes], where `pool` last gave as much back, or at new addresses."""
        key = (pool, nbytes)
        if self._free.get(key):
            start = self._free[key].pop()
        else:
            start, self._next = self._next, self._next + nbytes
            assert self._next <= self.end, "the pretended address space is used up"
        owner = (ctypes.c_char * nbytes).from_buffer(self._map, start - self.start)

        def freed() -> None:
            self._free.setdefault(key, []).append(start)
            on_free(start)

        weakref.finalize(owner, freed).atexit = False
        return torch.frombuffer(owner, dtype=torch.uint8)


class Stream:
    """torch.cuda.Stream, by name."""

    def __init__(self, cuda: Pretended, name: str) -> None:
        self.name = name
        self._cuda = cuda

    def synchronize(self) -> None:
        self._cuda.watch.settle(self.name)


class Event:
    """torch.cuda.Event that a thread waits for."""

    def __init__(self, cuda: Pretended) -> None:
        self._cuda, self._stream = cuda, ""

    def record(self, stream: Stream) -> None:
        self._stream = stream.name

    def synchronize(self) -> None:
        assert self._stream, "an event that was never recorded is waited for"
        self._cuda.watch.settle(self._stream)


class Pretended(TorchFunctionMode):
    """What torch does with the pretended device; use `pretended`."""

    def __init__(self, watch: Watch, device_bytes: int, pinned_bytes: int) -> None:
        super().__init__()
        self.watch = watch
        self._device, self._pinned = Space(device_bytes), Space(pinned_bytes)
        self._temporary = Space(device_bytes)
        """Of a running op: its content and its life are of no interest."""
        self._arenas: list[tuple[int, int]] = []
        self.streams = [Stream(self, "default")]
        """The current one is the last."""
        self._live: Counter[tuple[str, bool]] = Counter()
        self._peak: Counter[tuple[str, bool]] = Counter()
        self._live_pinned = self.peak_pinned_bytes = 0
        """Of torch's own allocator of pinned memory, which takes powers of two."""
        self._scratch: dict[tuple[Any, ...], Tensor] = {}
        self._handlers = self._table()

    # ------------------------------------------------------------------ figures

    def reserved_bytes(self) -> int:
        """Most that the caching allocator held: of each stream whole segments of small and of large pieces."""
        return sum(up(peak, SMALL_PAGE if small else LARGE_PAGE) for (_, small), peak in self._peak.items())

    def live_bytes(self) -> int:
        """What tensors on the device take now."""
        return sum(self._live.values())

    # ------------------------------------------------------------------ memory

    def allocate(self, nbytes: int) -> Tensor:
        """uint8 [nbytes] on the device, for the current stream; its address is only as aligned as the allocator's."""
        stream = self.streams[-1].name
        size = up(max(nbytes, 1), ALLOCATOR_BYTES)
        key = stream, size <= SMALL_BYTES

        def freed(start: int) -> None:
            self._live[key] -= size
            self.watch.free(start)

        with torch._C.DisableTorchFunction():
            tensor = self._device.take(size, key, freed)
            self.watch.allocate(tensor.data_ptr(), size, stream)
            self._live[key] += size
            self._peak[key] = max(self._peak[key], self._live[key])
            return tensor if size == nbytes else tensor.as_strided((nbytes,), (1,))

    def scratch(self, *size: int, dtype: torch.dtype) -> Tensor:
        """A temporary of a running op, on the device."""
        key = (*size, dtype)
        if key not in self._scratch:
            with torch._C.DisableTorchFunction():
                tensor = self._temporary.take(max(1, math.prod(size)) * dtype.itemsize, None, lambda start: None)
                self._scratch[key] = tensor[: math.prod(size) * dtype.itemsize].view(dtype).view(*size)
        return self._scratch[key]

    def misalign(self) -> None:
        """Let the next allocation begin where others' sizes have left the allocator: at no whole page."""
        self._device._next += ALLOCATOR_BYTES

    def _pin(self, nbytes: int) -> Tensor:
        size = 1 << max(0, nbytes - 1).bit_length()

        def freed(start: int) -> None:
            self._live_pinned -= size
            self.watch.unregister(start)
            self.watch.free(start)

        tensor = self._pinned.take(up(size, 4096), "pinned", freed)
        self.watch.register(tensor.data_ptr(), up(size, 4096))
        self.watch.allocate(tensor.data_ptr(), up(size, 4096))
        self._live_pinned += size
        self.peak_pinned_bytes = max(self.peak_pinned_bytes, self._live_pinned)
        return tensor[:nbytes]

    def arena(self, start: int, nbytes: int) -> None:
        """A range of host memory that is to be watched."""
        self._arenas.append((start, start + nbytes))

    def on_device(self, tensor: Any) -> bool:
        if not isinstance(tensor, Tensor):
            return False
        start = tensor.data_ptr()
        return self._device.holds(start) or self._temporary.holds(start)

    # ------------------------------------------------------------------ accesses

    def use(self, *tensors: Tensor, write: bool) -> None:
        """The current stream reads or writes all of these; of host memory what is pinned, or an arena's."""
        with torch._C.DisableTorchFunction():
            for tensor in tensors:
                start, nbytes = _extent(tensor)
                there = self._device.holds(start)
                if there or self._pinned.holds(start) or any(a <= start < b for a, b in self._arenas):
                    stream = self.streams[-1].name if there else None
                    self.watch.touch(start, start + nbytes, write=write, stream=stream)

    def use_at_once(self, *tensors: Tensor, write: bool) -> None:
        """Host code reads or writes all of these; it is over when the op is."""
        with torch._C.DisableTorchFunction():
            for tensor in tensors:
                start, nbytes = _extent(tensor)
                self.watch.touch(start, start + nbytes, write=write, stream=None)

    # ------------------------------------------------------------------ torch's calls

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = self._handlers.get(func)
        if handler is not None:
            return handler(*args, **kwargs)
        if func not in _HARMLESS:
            leaves = [leaf for arg in (*args, *kwargs.values()) for leaf in (arg if isinstance(arg, list) else [arg])]
            assert not any(self.on_device(leaf) for leaf in leaves), f"{func} computes on the pretended device"
        return func(*args, **kwargs)

    def _table(self) -> dict[Any, Callable[..., Any]]:
        found: dict[Any, Callable[..., Any]] = {
            Tensor.copy_: self._copy,
            Tensor.to: self._to,
            Tensor.cpu: self._cpu,
            Tensor.zero_: self._zero,
            Tensor.clone: self._clone,
            Tensor.__setitem__: self._set,
            Tensor.index_select: self._select,
            Tensor.index_copy_: self._index_copy,
            Tensor.float: self._float,
            Tensor.device.__get__: self._device_of,  # type: ignore[attr-defined]
        }
        found |= {make: self._maker(make) for make in (torch.empty, torch.zeros, torch.empty_like)}
        reads = (Tensor.double, Tensor.sum, Tensor.square, torch.linalg.vector_norm)
        return found | {func: self._reduce(func) for func in reads}

    def _device_of(self, tensor: Tensor) -> torch.device:
        return DEVICE if self.on_device(tensor) else torch.device("cpu")

    def _maker(self, make: Any) -> Callable[..., Any]:
        def made(*size: Any, **options: Any) -> Any:
            device, pinned = options.get("device"), options.pop("pin_memory", False)
            if not pinned and (device is None or torch.device(device).type == "cpu"):
                return make(*size, **options)
            like = make(*size, **(options | {"device": "meta"}))
            raw = self._pin(like.nbytes) if pinned else self.allocate(like.nbytes)
            tensor = raw.view(like.dtype).view(like.shape)
            if make is torch.zeros:
                self.use(tensor, write=True)
            return tensor

        return made

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        there, here = self.on_device(target), self.on_device(source)
        if there == here:
            self.use(source, write=False)
            self.use(target, write=True)
            return target if there else target.copy_(source)
        plain = target.dtype == source.dtype and target.shape == source.shape
        plain = plain and target.is_contiguous() and source.is_contiguous()
        host, device = (_extent(source), _extent(target)) if there else (_extent(target), _extent(source))
        how: dict[str, Any] = {"to_device": there, "stream": self.streams[-1].name, "waits": not non_blocking}
        self.watch.copied(host, device, plain=plain, **how)
        return target

    def _to(self, tensor: Tensor, *args: Any, non_blocking: bool = False, **kwargs: Any) -> Tensor:
        wanted = [*args, *kwargs.values()]
        device = next((torch.device(w) for w in wanted if isinstance(w, torch.device | str)), self._device_of(tensor))
        dtype = next((w for w in wanted if isinstance(w, torch.dtype)), tensor.dtype)
        here = self.on_device(tensor)
        if device.type == "cpu" and not here:
            return tensor.to(*args, **kwargs)
        assert device.type == "cuda", "to() brings device memory to the host"
        if here and dtype == tensor.dtype:
            return tensor
        made = self.allocate(tensor.numel() * dtype.itemsize).view(dtype).view(tensor.shape)
        return self._copy(made, tensor, non_blocking)

    def _cpu(self, tensor: Tensor) -> Tensor:
        if not self.on_device(tensor):
            return tensor.cpu()
        self.watch.synchronous.add(self.watch.current)
        self.use(tensor, write=False)
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    def _zero(self, tensor: Tensor) -> Tensor:
        self.use(tensor, write=True)
        return tensor if self.on_device(tensor) else tensor.zero_()

    def _clone(self, tensor: Tensor) -> Tensor:
        if not self.on_device(tensor):
            return tensor.clone()
        made = self.allocate(tensor.numel() * tensor.itemsize).view(tensor.dtype).view(tensor.shape)
        return self._copy(made, tensor)

    def _reduce(self, func: Any) -> Callable[..., Any]:
        """What reads a tensor; on the device its result is a number, or is made of one."""

        def reduced(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.use(tensor, write=False)
            if not self.on_device(tensor):
                return func(tensor, *args, **kwargs)
            return self.scratch(1, dtype=kwargs.get("dtype", tensor.dtype))[0]

        return reduced

    def _select(self, tensor: Tensor, dim: int, index: Tensor) -> Tensor:
        assert dim == 0
        assert self.on_device(tensor)
        self.use(tensor, index, write=False)
        return self.scratch(index.numel(), *tensor.shape[1:], dtype=tensor.dtype)

    def _index_copy(self, tensor: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
        assert self.on_device(tensor)
        self.use(index, source, write=False)
        self.use(tensor, write=True)
        return tensor

    def _float(self, tensor: Tensor) -> Tensor:
        if not self.on_device(tensor):
            return tensor.float()
        self.use(tensor, write=False)
        return self.scratch(*tensor.shape, dtype=torch.float32)

    def _set(self, tensor: Tensor, index: Any, value: Any) -> None:
        if not self.on_device(tensor):
            tensor[index] = value
            return
        self.use(*([value] if isinstance(value, Tensor) else []), write=False)
        self.use(tensor[index], write=True)


_VIEWS = ("__getitem__", "view", "view_as", "split", "unbind", "narrow", "detach", "untyped_storage")
_ASKED = ("data_ptr", "numel", "nelement", "element_size", "is_contiguous", "stride", "storage_offset", "size", "dim")
_FIELDS = ("shape", "dtype", "itemsize", "nbytes")
_HARMLESS = frozenset(
    [*(getattr(Tensor, name) for name in _VIEWS + _ASKED), *(getattr(Tensor, name).__get__ for name in _FIELDS)]
)
"""Views, and questions that are not about the content."""


def _extent(tensor: Tensor) -> tuple[int, int]:
    """First address and bytes between it and the end, gaps included."""
    if not tensor.numel():
        return tensor.data_ptr(), 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (last + 1) * tensor.element_size()


@contextlib.contextmanager
def pretended(watch: Watch, device_bytes: int = 1 << 39, pinned_bytes: int = 1 << 34) -> Iterator[Pretended]:
    """Inside the block "cuda" is the pretended device, for this thread."""
    cuda, numbers = Pretended(watch, device_bytes, pinned_bytes), itertools.count(1)

    @contextlib.contextmanager
    def stream(chosen: Stream) -> Iterator[None]:
        cuda.streams.append(chosen)
        try:
            yield
        finally:
            cuda.streams.pop()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Stream", lambda device=None: Stream(cuda, f"stream {next(numbers)}"))
        patch.setattr(torch.cuda, "Event", lambda blocking: Event(cuda))
        patch.setattr(torch.cuda, "stream", stream)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: cuda.streams[-1])
        patch.setattr(torch.cuda, "synchronize", lambda device=None: watch.settle())
        patch.setattr("penstock.storage.tier.arena._map_memory", reserve)
        with cuda:
            yield cuda
