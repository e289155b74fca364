"""What the stand-in holds like CUDA does."""

import ctypes
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import standin
import torch

CUDA = torch.device("cuda", 0)
MIB = 1 << 20
INVALID_VALUE, ALREADY_REGISTERED = 1, 712


@pytest.fixture
def pinned() -> Iterator[torch.Tensor]:
    """uint8 [2 MiB] of anonymous memory, with two registrations that meet at its middle."""
    memory = torch.frombuffer(mmap.mmap(-1, 2 * MIB), dtype=torch.uint8)
    starts = [memory.data_ptr(), memory.data_ptr() + MIB]
    for at in starts:
        assert int(torch.cuda.cudart().cudaHostRegister(at, MIB, 0)) == 0
    yield memory
    for at in starts:
        assert int(torch.cuda.cudart().cudaHostUnregister(at)) == 0


@pytest.fixture(autouse=True)
def _no_error_is_left() -> Iterator[None]:
    """An error that a call returned is also the thread's last one, which torch would raise at its next call."""
    yield
    ctypes.CDLL(None).cudaGetLastError()


def test_a_copy_across_registrations_is_refused(pinned: torch.Tensor) -> None:
    """As CUDA does, with error 1, although both halves are pinned and lie side by side."""
    there = torch.zeros(MIB, dtype=torch.uint8, device=CUDA)
    there.copy_(pinned[:MIB], non_blocking=True)
    there.copy_(pinned[MIB:], non_blocking=True)
    with pytest.raises(torch.AcceleratorError, match="invalid argument"):
        there.copy_(pinned[MIB // 2 : 3 * MIB // 2], non_blocking=True)
    torch.cuda.synchronize()


def test_memory_is_registered_once_and_not_half_a_terabyte_in_one_call(pinned: torch.Tensor) -> None:
    start = pinned.data_ptr()
    assert int(torch.cuda.cudart().cudaHostRegister(start + MIB // 2, MIB, 0)) == ALREADY_REGISTERED
    assert int(torch.cuda.cudart().cudaHostRegister(4096, 512 << 30, 0)) == INVALID_VALUE


@pytest.mark.parametrize("pinned", [True, False])
def test_pageable_copies_are_counted(pinned: bool) -> None:
    here = torch.arange(1000, pin_memory=pinned)
    before = standin.counts()
    with standin.watched("pageable_copy") as seen:
        there = here.to(CUDA, non_blocking=True)
        torch.cuda.synchronize()
    made = standin.counts() - before
    assert (made.total("copy"), made.total("pageable_copy")) == (1, 0 if pinned else 1)
    assert [call.nbytes for call in seen] == ([] if pinned else [8000])
    assert all("test_laws.py" in call.stack[-1] for call in seen)
    assert there.cpu().tolist() == list(range(1000))


def test_streams_keep_their_order_and_events_theirs() -> None:
    """A chain of copies over two streams, each link waiting for the one before through an event."""
    here = torch.arange(1 << 16, pin_memory=True)
    back = torch.zeros(1 << 16, dtype=torch.int64, pin_memory=True)
    streams = [torch.cuda.Stream(CUDA) for _ in range(2)]
    links = [torch.empty(1 << 16, dtype=torch.int64, device=CUDA) for _ in range(50)]
    torch.cuda.synchronize()
    source = here
    for i, link in enumerate([*links, back]):
        with torch.cuda.stream(streams[i % 2]):
            link.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        streams[(i + 1) % 2].wait_event(event)
        source = link
    event.synchronize()
    assert torch.equal(back, here)


@pytest.mark.parametrize("expandable", ["False", "True"])
def test_a_card_is_full_when_it_is_full(expandable: str) -> None:
    """Then torch gives back what it caches, and says so only where that is not enough."""
    program = f"""
import torch
torch._C._accelerator_setAllocatorSettings("expandable_segments:{expandable}")
total = torch.cuda.mem_get_info()[0]
cached = [torch.empty(total // 4, dtype=torch.uint8, device="cuda") for _ in range(3)]
try:
    torch.empty(total // 2, dtype=torch.uint8, device="cuda")
    print("more than there is")
except torch.OutOfMemoryError:
    del cached
    print(torch.empty(total // 2, dtype=torch.uint8, device="cuda").numel() == total // 2)
"""
    env = os.environ | {"STANDIN_GPU_GIB": "4"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env)
    assert done.stdout == "True\n", done.stderr
