"""What is free, and the CPUs of a run's threads, on small trees that look like /proc and /sys; lanes bound to CPUs."""

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from cli_process import REPOSITORY, done, started
from hypothesis import given
from hypothesis import strategies as st
from some_ops import an_op
from used_up import files_used_up

from penstock.engine.machine import limits
from penstock.engine.machine.affinity import Placement, parse_cpu_list, place_threads, placement
from penstock.engine.machine.budgets import free_budgets, split_shared
from penstock.engine.machine.limits import DISK_RESERVE, GIB, RAM_RESERVE, free_memory, memory_groups, total_memory
from penstock.engine.runtime.executor import Executor
from penstock.engine.schedule.action import LANES
from penstock.engine.schedule.ops import Op

UNLIMITED_V1 = 9223372036854771712


def machine(root: Path, *, available: int = 20 * GIB, total: int = 32 * GIB, cgroup: str = "") -> Path:
    """A tree with /proc only, which is this machine's from now on; `cgroup` is the content of /proc/self/cgroup."""
    limits.ROOT = root
    rows = {"MemTotal": total, "MemAvailable": available, "CommitLimit": total // 2, "Committed_AS": GIB}
    lines = [f"{name}: {size // 1024} kB" for name, size in rows.items()]
    write(root / "proc/meminfo", "\n".join([*lines, "HugePages_Total:  0"]))
    write(root / "proc/self/cgroup", cgroup)
    write(root / "proc/sys/vm/overcommit_memory", 0)
    (root / "sys/fs/cgroup").mkdir(parents=True)
    return root


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def group_v2(folder: Path, limit: object, used: int, *, high: object = "max", stat: str = "") -> None:
    write(folder / "memory.max", limit)
    write(folder / "memory.high", high)
    write(folder / "memory.current", used)
    write(folder / "memory.stat", stat)


PARENT = {"batch.slice/job.scope": ("max", GIB), "batch.slice": (8 * GIB, 3 * GIB)}
GROUPS: dict[str, tuple[str, dict[str, tuple[object, int]], int, int, str]] = {
    "a parent's limit": ("/batch.slice/job.scope", PARENT, 5 * GIB, 8 * GIB, "batch.slice"),
    # The path is the host's, the mounted folder the container's own.
    "a container": ("/system.slice/docker-0123.scope", {"": (4 * GIB, GIB)}, 3 * GIB, 4 * GIB, "cgroup"),
    "more used than allowed": ("/", {"": (GIB, 2 * GIB)}, 0, GIB, "cgroup"),
}
"""Of version 2: the process's group, limit and use of folders, what is then free, of how much, by which folder."""


@pytest.mark.parametrize("name", GROUPS)
def test_limits_of_groups(tmp_path: Path, name: str) -> None:
    cgroup, folders, free, total, where = GROUPS[name]
    machine(tmp_path, cgroup=f"0::{cgroup}")
    for folder, (limit, used) in folders.items():
        group_v2(tmp_path / "sys/fs/cgroup" / folder, limit, used)
    memory = free_memory()
    assert (memory.free_bytes, memory.total_bytes) == (free, total)
    assert memory.where.endswith(where)


def test_limits_of_version_1(tmp_path: Path) -> None:
    machine(tmp_path, cgroup="5:cpu,cpuacct:/a\n4:memory:/a/b\n1:name=systemd:/\n0::/")
    top = tmp_path / "sys/fs/cgroup/memory"
    for folder, limit, used in ((top, UNLIMITED_V1, 0), (top / "a", 10 * GIB, 6 * GIB), (top / "a/b", UNLIMITED_V1, 0)):
        write(folder / "memory.limit_in_bytes", limit)
        write(folder / "memory.usage_in_bytes", used)
        write(folder / "memory.stat", f"inactive_file 7\ntotal_inactive_file {GIB}\ntotal_active_file 0\ntotal_dirty 0")
    memory = free_memory()
    assert (memory.free_bytes, memory.total_bytes) == (5 * GIB, 10 * GIB)
    assert memory.where.endswith("/a")
    machine(tmp_path / "strict")  # a kernel that promises no more than it has
    write(tmp_path / "strict/proc/sys/vm/overcommit_memory", 2)
    memory = free_memory()
    assert memory.free_bytes == 15 * GIB  # CommitLimit of 16 GiB, 1 GiB promised
    assert "overcommit" in memory.where


def test_memory_high_is_a_limit_and_clean_cache_is_free(tmp_path: Path) -> None:
    top = machine(tmp_path, cgroup="0::/") / "sys/fs/cgroup"
    stat = f"anon {GIB}\ninactive_file {3 * GIB}\nactive_file {GIB}\nfile_dirty {GIB}\nfile_writeback 0"
    group_v2(top, 16 * GIB, 6 * GIB, high=8 * GIB, stat=stat)
    assert free_memory().free_bytes == (8 - 6 + 3) * GIB
    write(tmp_path / "proc/self/cgroup", "0::/../../..")  # a path out of the tree is not followed
    assert [group.folder for group in memory_groups()] == [top]
    # The cache is not looked at where enough is free without it.
    assert [free_memory(enough_bytes=n * GIB).free_bytes for n in (1, 3)] == [2 * GIB, 5 * GIB]


def node(root: Path, number: int, cpus: str, total: int, **parts: int) -> None:
    """A NUMA node; `parts`: what else its meminfo says, in bytes."""
    folder = root / f"sys/devices/system/node/node{number}"
    write(folder / "cpulist", cpus)
    names = {"free": "MemFree", "active_file": "Active(file)", "inactive_file": "Inactive(file)"}
    names["slab"] = "SReclaimable"
    rows = {"MemTotal": total, "Active": 5 * GIB} | {names[name]: size for name, size in parts.items()}
    lines = [f"Node {number} {name}: {size // 1024:>12} kB" for name, size in rows.items()]
    write(folder / "meminfo", "\n".join([*lines, f"Node {number} HugePages_Total:     7"]))


def test_a_gpus_memory_that_the_kernel_counts_is_no_ram(tmp_path: Path) -> None:
    """GH200: one node with all CPUs, the GPU's memory as a second one, and nodes for partitions that hold nothing."""
    machine(tmp_path, available=(400 + 90) * GIB, total=(480 + 96) * GIB, cgroup="0::/")
    node(tmp_path, 0, "0-71", 480 * GIB, free=350 * GIB, active_file=30 * GIB, inactive_file=30 * GIB)
    node(tmp_path, 1, "", 96 * GIB, free=86 * GIB, active_file=GIB, inactive_file=2 * GIB, slab=GIB)
    for number in (2, 10):
        node(tmp_path, number, "", 0)
    memory = free_memory()
    assert (memory.free_bytes, memory.total_bytes) == (400 * GIB, 480 * GIB)
    assert memory.where == "this machine's memory without the NUMA node that no CPU is on"
    assert total_memory() == limits.machine_memory() == 480 * GIB
    group_v2(tmp_path / "sys/fs/cgroup", 200 * GIB, 50 * GIB)  # a limit binds as before
    assert free_memory().free_bytes == 150 * GIB
    assert (total_memory(), limits.machine_memory()) == (200 * GIB, 480 * GIB)
    machine(tmp_path / "full", available=400 * GIB, total=576 * GIB)  # a full GPU takes nothing from RAM
    node(tmp_path / "full", 0, "0-71", 480 * GIB, free=400 * GIB)
    node(tmp_path / "full", 1, "", 96 * GIB, free=0)
    assert free_memory().free_bytes == 400 * GIB


@pytest.mark.parametrize("nodes", [[], ["0-7"], ["0-7", "8-15"], ["0-15", None], ["", ""]])
def test_ordinary_machines_count_as_the_kernel_does(tmp_path: Path, nodes: list[str | None]) -> None:
    """One node, two with CPUs each, a kernel that does not say, and a tree in which no node has a CPU."""
    machine(tmp_path)
    for number, cpus in enumerate(nodes):
        node(tmp_path, number, cpus or "", 16 * GIB, free=10 * GIB)
        if cpus is None:
            (tmp_path / f"sys/devices/system/node/node{number}/cpulist").unlink()
    memory = free_memory()
    assert (memory.free_bytes, memory.total_bytes, memory.where) == (20 * GIB, 32 * GIB, "this machine's memory")
    assert total_memory() == 32 * GIB


def test_an_address_space_limit_counts() -> None:
    code = "from penstock.engine.machine.limits import free_memory; m = free_memory(); print(m.free_bytes, m.where)"
    limit = 2 * GIB
    command = ["prlimit", f"--as={limit}", sys.executable, "-c", code]
    free, _, where = done(started(REPOSITORY, *command)).stdout.strip().partition(" ")
    assert where == "ulimit -v"
    assert 0 < int(free) < limit


@given(st.integers(0, 2**45), st.integers(0, 2**45))
def test_a_reserve_leaves_half(total: int, free: int) -> None:
    free = min(free, total)
    kept = limits.reserve_bytes(RAM_RESERVE, total, free)
    assert 0 <= kept <= free // 2
    assert kept <= 48 * GIB
    if free >= 4 * GIB:
        assert kept >= 2 * GIB
    assert limits.reserve_bytes(RAM_RESERVE, 64 * GIB, 60 * GIB) == int(5.12 * GIB)  # 8 %
    assert limits.reserve_bytes(RAM_RESERVE, 2 * GIB, GIB) == GIB // 2


@given(st.integers(0, 2**45), st.none() | st.integers(1, 2**45), st.none() | st.integers(1, 2**45))
def test_shared_memory_is_given_once(total: int, gpu: int | None, ram: int | None) -> None:
    found_gpu, found_ram = split_shared(total, gpu, ram)
    assert found_gpu == gpu or gpu is None
    assert found_ram == ram or ram is None
    if (gpu or 0) <= total and (ram or 0) <= total and (gpu is None or ram is None):
        assert found_gpu + found_ram == total


def test_budgets_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(tmp_path)
    free = free_budgets(torch.device("cpu"))
    usable = 20 * GIB - int(2.56 * GIB)
    assert free.gpu + free.ram == usable
    assert free.gpu == int(usable * 0.4)
    why = "20.0 GiB free (this machine's memory), less 2.6 GiB for the system; without a GPU both tiers share it"
    assert free.why["ram"] == why
    free = free_budgets(torch.device("cpu"), gpu=GIB)
    assert (free.gpu, free.ram) == (GIB, usable - GIB)
    status = os.statvfs(tmp_path)  # as the file system says it now: others write there meanwhile
    monkeypatch.setattr(os, "statvfs", lambda place: status)
    room = status.f_bavail * status.f_frsize
    found = limits.free_disk(tmp_path / "not/made/yet")
    assert room // 2 <= found <= room
    assert room - found <= DISK_RESERVE[2]
    limits.ROOT = Path("/")
    groups = memory_groups()  # a limit that cannot be read is not taken for none
    with files_used_up(), pytest.raises(OSError, match="Too many open files"):
        free_memory(groups=groups)


GPU = "0000:3b:00.0"


def sockets(root: Path, nodes: dict[int, str], node_of_gpu: int, siblings: dict[int, str] | None = None) -> Path:
    """A sysfs tree: CPU lists of NUMA nodes, the GPU's node, and each CPU's hyperthreads."""
    write(root / f"bus/pci/devices/{GPU}/numa_node", node_of_gpu)
    for node, cpus in nodes.items():
        write(root / f"devices/system/node/node{node}/cpulist", cpus)
    for cpu, text in (siblings or {}).items():
        write(root / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", text)
    return root


def cpus(*ranges: range) -> frozenset[int]:
    return frozenset(cpu for part in ranges for cpu in part)


def test_two_sockets_with_hyperthreads(tmp_path: Path) -> None:
    assert [parse_cpu_list(text) for text in ("0-2\n", "0,2-3,8\n", "5", "\n")] == [{0, 1, 2}, {0, 2, 3, 8}, {5}, set()]
    siblings = {cpu: f"{cpu % 64},{cpu % 64 + 64}" for cpu in range(128)}
    root = sockets(tmp_path, {0: "0-31,64-95", 1: "32-63,96-127"}, 1, siblings)
    lanes, drives = cpus(range(32, 36), range(96, 100)), cpus(range(60, 64), range(124, 128))
    optimizer = cpus(range(36, 60), range(100, 124))
    assert placement(GPU, cpus(range(128)), root) == Placement(lanes, drives, optimizer, optimizer_threads=24)


def test_ranks_on_one_node_share_its_cores(tmp_path: Path) -> None:
    siblings = {cpu: f"{cpu % 64},{cpu % 64 + 64}" for cpu in range(128)}
    root = sockets(tmp_path, {0: "0-31,64-95", 1: "32-63,96-127"}, 1, siblings)
    found = [placement(GPU, cpus(range(128)), root, part=(number, 3)) for number in range(3)]
    parts = [one.lanes | one.drives | one.optimizer for one in found]
    assert [len(part) for part in parts] == [20, 22, 22]
    assert frozenset().union(*parts) == cpus(range(32, 64), range(96, 128))
    assert found[0].lanes == cpus(range(32, 34), range(96, 98)), "of ten cores"
    assert found[2].optimizer == cpus(range(55, 63), range(119, 127))


def test_only_cpus_that_the_process_may_use(tmp_path: Path) -> None:
    root = sockets(tmp_path / "two", {0: "0-7", 1: "8-15"}, 0)
    found = placement(GPU, cpus(range(4, 12)), root)
    assert found == Placement(cpus(range(4, 5)), cpus(range(5, 8)), cpus(range(5, 8)), optimizer_threads=3)
    for allowed in (cpus(range(8, 16)), cpus(range(100, 108))):  # kept off the GPU's node
        found = placement(GPU, allowed, root)
        assert found.lanes | found.drives | found.optimizer == allowed
        assert len(found.lanes) == 2
    found = placement(GPU, cpus(range(16)), tmp_path)  # a machine that does not say
    assert found == Placement(cpus(range(4)), cpus(range(14, 16)), cpus(range(4, 14)), optimizer_threads=10)
    assert placement(GPU, cpus(range(16)), sockets(tmp_path, {}, -1)) == found
    assert placement(GPU, cpus(range(3)), tmp_path) is None, "too few to share out"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_lanes_run_where_they_are_placed() -> None:
    assert place_threads(torch.device("cpu")) is None, "on CPU nothing is bound"
    before = os.sched_getaffinity(0)
    one, other = frozenset({min(before)}), frozenset({max(before)})
    where = Placement(lanes=one, drives=other, optimizer=other, optimizer_threads=3)
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
