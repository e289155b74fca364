"""Memory and counters that processes share: what one writes the other sees, whoever waits wakes, nothing is left."""

import contextlib
import ctypes
import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from cli_process import REPOSITORY

from penstock.storage.files.errors import BudgetError, UserError
from penstock.storage.generations.members import SharedChecksums
from penstock.storage.tier.shared import Counters, SharedMemory, interleave, memory_nodes

OTHER = """
import sys, torch
from penstock.storage.tier.shared import Counters, SharedMemory
memory = SharedMemory.open(sys.argv[1], 8192)
counters = Counters(torch.frombuffer(memory.map, dtype=torch.uint8, count=16), lambda: None)
values = torch.frombuffer(memory.map, dtype=torch.int64, offset=4096, count=512)
for turn in range(1, 201):
    counters.wait(0, turn)
    assert (values == turn).all()
    values.fill_(-turn)
    counters.post(1, turn)
"""


def test_processes_take_turns() -> None:
    """Each sees all that the other wrote before it told."""
    memory = SharedMemory.create(8192)
    counters = Counters(torch.frombuffer(memory.map, dtype=torch.uint8, count=16), lambda: None)
    values = torch.frombuffer(memory.map, dtype=torch.int64, offset=4096, count=512)
    path = {"PYTHONPATH": str(REPOSITORY / "src")}
    other = subprocess.Popen([sys.executable, "-c", OTHER, memory.name], env=os.environ | path)
    for turn in range(1, 201):
        values.fill_(turn)
        counters.post(0, turn)
        counters.wait(1, turn)
        assert (values == -turn).all()
    assert other.wait() == 0
    memory.close()


def test_it_is_of_huge_pages_where_they_are_reserved() -> None:
    """And of ordinary ones where they are not, or the test may not reserve any."""
    reserved = Path("/proc/sys/vm/nr_hugepages")
    before = int(reserved.read_text())
    try:
        with contextlib.suppress(OSError):
            reserved.write_text(str(before + 3))
        more = int(reserved.read_text()) - before
        memory = SharedMemory.create(5 << 20)
        assert (len(memory.map) == 6 << 20) == (more >= 3), "three pages of 2 MiB"
        assert memory.nbytes == 5 << 20
        other = SharedMemory.open(memory.name, 5 << 20)
        memory.map[-1:] = b"x"
        assert (len(other.map), other.map[-1:]) == (len(memory.map), b"x")
        beyond = SharedMemory.create(64 << 20)  # more than is reserved
        assert len(beyond.map) == 64 << 20
    finally:
        with contextlib.suppress(OSError):
            reserved.write_text(str(before))


def test_pages_are_taken_from_all_nodes_in_turns() -> None:
    memory = SharedMemory.create(1 << 20)
    nodes = memory_nodes()
    assert nodes == sorted(set(nodes))
    assert nodes
    assert interleave(memory.map, nodes) or ctypes.get_errno() == errno.EPERM, "a container may forbid it"
    assert not interleave(memory.map, [1000])
    assert not interleave(memory.map, [])


def test_who_waits_in_vain_is_told() -> None:
    def check() -> None:
        if time.monotonic() > end:
            raise UserError("the other has ended")

    end = time.monotonic() + 0.3
    counters = Counters(torch.zeros(8, dtype=torch.uint8), check)
    with pytest.raises(UserError, match="the other has ended"):
        counters.wait(0, 1)


def test_a_thread_wakes_on_a_machine_without_futexes() -> None:
    counters = Counters(torch.zeros(8, dtype=torch.uint8), lambda: None)
    counters._number = None
    waiting = threading.Thread(target=counters.wait, args=(0, 5))
    waiting.start()
    counters.post(0, 4)
    counters.post(0, 5)
    waiting.join(10)
    assert not waiting.is_alive()
    assert counters[0] == 5


def test_memory_that_is_not_there_is_refused() -> None:
    with pytest.raises(BudgetError, match=r"budgets\.ram: .* of memory that GPUs share cannot be had"):
        SharedMemory.create(1 << 50)
    with pytest.raises(UserError, match="cannot be opened"):
        SharedMemory.open(f"/proc/{os.getpid()}/fd/99999", 4096)


def test_nothing_has_a_name_in_dev_shm() -> None:
    before = set(Path("/dev/shm").iterdir())
    memory = SharedMemory.create(1 << 20)
    assert set(Path("/dev/shm").iterdir()) == before
    memory.close()


def test_checksums_of_two_generations() -> None:
    """Who has not heard of a commit finds what was written before it; who has, nothing."""
    rows = torch.zeros(2, 3, dtype=torch.int64)
    first, other = SharedChecksums(rows), SharedChecksums(rows)
    first[0], other[2] = 0, 2**32 - 1
    assert dict(first) == dict(other) == {0: 0, 2: 2**32 - 1}
    first.forget()
    first.clear()
    assert not first
    assert dict(other) == {0: 0, 2: 2**32 - 1}
    other.clear()
    first[1] = 7
    assert dict(other) == {1: 7}
    first.forget()
    first.clear()
    assert not first
    with pytest.raises(KeyError):
        del first[1]
