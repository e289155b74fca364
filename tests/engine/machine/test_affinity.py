"""CPUs of a run's threads, shared out from what sysfs says; lanes are bound where they are told to be."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from some_ops import an_op

from penstock.engine.machine.affinity import Placement, gpu_node, parse_cpu_list, place_threads, placement
from penstock.engine.runtime.executor import Executor
from penstock.engine.schedule.actions import LANES
from penstock.engine.schedule.ops import Op

GPU = "0000:3b:00.0"


def machine(root: Path, nodes: dict[int, str], node_of_gpu: int, siblings: dict[int, str] | None = None) -> Path:
    """A sysfs tree: CPU lists of NUMA nodes, the GPU's node, and each CPU's hyperthreads."""
    files = {f"bus/pci/devices/{GPU}/numa_node": str(node_of_gpu)}
    files |= {f"devices/system/node/node{node}/cpulist": cpus for node, cpus in nodes.items()}
    for cpu, text in (siblings or {}).items():
        files[f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = text
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True)
        (root / name).write_text(f"{text}\n")
    return root


def cpus(*ranges: range) -> frozenset[int]:
    return frozenset(cpu for part in ranges for cpu in part)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0-3\n", {0, 1, 2, 3}), ("0,2-3,8\n", {0, 2, 3, 8}), ("5", {5}), ("\n", set()), ("0-1,64-65", {0, 1, 64, 65})],
)
def test_the_kernels_lists_are_read(text: str, expected: set[int]) -> None:
    assert parse_cpu_list(text) == expected


def test_two_sockets_with_hyperthreads(tmp_path: Path) -> None:
    siblings = {cpu: f"{cpu % 64},{cpu % 64 + 64}" for cpu in range(128)}
    root = machine(tmp_path, {0: "0-31,64-95", 1: "32-63,96-127"}, 1, siblings)
    found = placement(GPU, cpus(range(128)), root)
    assert found == Placement(
        1,
        lanes=cpus(range(32, 36), range(96, 100)),
        drives=cpus(range(60, 64), range(124, 128)),
        optimizer=cpus(range(36, 60), range(100, 124)),
        optimizer_threads=24,
    )


def test_only_cpus_that_the_process_may_use(tmp_path: Path) -> None:
    root = machine(tmp_path, {0: "0-7", 1: "8-15"}, 0)
    found = placement(GPU, cpus(range(4, 12)), root)
    assert found == Placement(0, cpus(range(4, 5)), cpus(range(5, 8)), cpus(range(5, 8)), optimizer_threads=3)


@pytest.mark.parametrize("allowed", [cpus(range(8, 16)), cpus(range(100, 108))])
def test_a_process_kept_off_the_gpus_node_uses_what_it_may(tmp_path: Path, allowed: frozenset[int]) -> None:
    found = placement(GPU, allowed, machine(tmp_path, {0: "0-7", 1: "8-15"}, 0))
    assert found.node is None
    assert found.lanes | found.drives | found.optimizer == allowed
    assert len(found.lanes) == 2


def test_a_machine_that_does_not_say(tmp_path: Path) -> None:
    found = placement(GPU, cpus(range(16)), tmp_path)
    assert found == Placement(None, cpus(range(4)), cpus(range(14, 16)), cpus(range(4, 14)), optimizer_threads=10)
    assert gpu_node(GPU, machine(tmp_path, {}, -1)) is None
    assert placement(GPU, cpus(range(3)), tmp_path) is None, "too few to share out"


def test_on_cpu_nothing_is_bound() -> None:
    assert place_threads(torch.device("cpu")) is None


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_lanes_run_where_they_are_placed() -> None:
    before = os.sched_getaffinity(0)
    one = frozenset({min(before)})
    other = frozenset({max(before)})
    where = Placement(None, lanes=one, drives=other, optimizer=other, optimizer_threads=3)
    seen: dict[str, tuple[set[int], int]] = {}

    def perform(op: Op) -> None:
        seen[threading.current_thread().name] = (os.sched_getaffinity(0), torch.get_num_threads())

    threads = torch.get_num_threads()
    executor = Executor(perform, torch.device("cpu"), on_start=where.enter_lane)
    executor.submit(an_op(i, lane) for i, lane in enumerate(LANES))
    executor.drain()
    executor.close()
    assert seen["optimizer"] == (other, 3)
    assert all(seen[lane][0] == one for lane in LANES if lane != "optimizer")
    assert os.sched_getaffinity(0) == before
    with where.near_gpu():
        assert os.sched_getaffinity(0) == one | other
    assert os.sched_getaffinity(0) == before
    with ThreadPoolExecutor(1, initializer=where.enter_drive) as drive:
        assert drive.submit(os.sched_getaffinity, 0).result() == other
    torch.set_num_threads(threads)
