"""Which device a run takes, why it refuses one, the settings of the process while it runs, and what is done with a CUDA
device outside of any lane, on a card that only answers questions. And machines that none of us has, as small trees that
look like /proc and /sys and as what their drivers would say."""

import gc
import itertools
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from some_ops import an_op
from streams_on_cpu import streams_on_cpu
from test_limits import group_v2, machine, write

from penstock.engine.clock import elapsed_s
from penstock.engine.config import BudgetConfig
from penstock.engine.events import StepMetrics
from penstock.engine.machine import limits, probe, probe_compute
from penstock.engine.machine.budgets import free_budgets, run_budgets
from penstock.engine.machine.device import (
    LEAST_LIMIT_BYTES,
    DeviceSettings,
    configure,
    memory_use,
    resolve_device,
    too_old,
    why_no_cuda,
)
from penstock.engine.machine.limits import GIB
from penstock.engine.machine.platforms import cpu_quota, gpu_memory, is_wsl, remarks, shares_memory, usable_cpus
from penstock.engine.machine.presets import this_machine
from penstock.engine.model.loss import _block_
from penstock.engine.optim.adamw import PIECE_NUMEL, AdamW, adamw
from penstock.engine.optim.base import UpdateRange
from penstock.engine.runtime.executor import Executor
from penstock.engine.train import train_step
from penstock.storage.files.errors import UserError
from penstock.storage.tier.arena import HostArena
from penstock.storage.tier.layout import FlatLayout, ParamSpec

CUDA = torch.device("cuda", 1)
WSL_RELEASE = "5.15.153.1-microsoft-standard-WSL2"


@dataclass
class Card:
    """A GPU of 24 GiB of which 2 are taken by others; counts what it is told."""

    name: str = "NVIDIA GeForce RTX 4090"
    capability: tuple[int, int] = (8, 9)
    is_integrated: bool = False
    total_memory: int = 24 * GIB
    uuid: str = "a0b1"
    reserved: int = GIB
    free: int | None = None
    fractions: list[tuple[float, torch.device]] = field(default_factory=list)
    settings: list[str] = field(default_factory=list)

    @property
    def free_bytes(self) -> int:
        return self.total_memory - 2 * GIB - self.reserved if self.free is None else self.free

    def become(self, name: str, free: int, total: int, *, integrated: bool = False) -> None:
        """Another card, of which this process has reserved nothing."""
        self.name, self.free, self.total_memory, self.is_integrated, self.reserved = name, free, total, integrated, 0


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card()
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "current_device": lambda: 1,
        "get_device_name": lambda device: card.name,
        "get_device_capability": lambda device: card.capability,
        "get_arch_list": lambda: ["sm_80", "sm_90"],
        "get_device_properties": lambda device: card,
        "mem_get_info": lambda device: (card.free_bytes, card.total_memory),
        "memory_reserved": lambda device: card.reserved,
        "get_per_process_memory_fraction": lambda device: 1.0,
        "set_per_process_memory_fraction": lambda share, device: card.fractions.append((share, device)),
        "reset_peak_memory_stats": lambda device: None,
        "max_memory_allocated": lambda device: 3 * GIB,
        "max_memory_reserved": lambda device: 4 * GIB,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", card.settings.append, raising=False)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    return card


def test_the_device_has_an_index_and_old_cards_are_refused(card: Card) -> None:
    """set_per_process_memory_fraction wants an index."""
    assert resolve_device(tiny.training(device="auto")) == CUDA
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    card.name, card.capability = "Tesla T4", (7, 5)
    with pytest.raises(UserError, match=r"train\.device: Tesla T4 has compute capability 7\.5"):
        resolve_device(tiny.training(device="cuda"))
    assert resolve_device(tiny.training(device="cpu")) == torch.device("cpu")


def test_the_allocator_gets_the_budget_and_no_more(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    matmul = torch.backends.cuda.matmul
    before = torch.get_float32_matmul_precision(), matmul.allow_bf16_reduced_precision_reduction
    with pytest.raises(UserError, match=r"budgets\.gpu: 23,622,320,129 bytes, but 2,147,483,648 of the GPU's"):
        configure(CUDA, 22 * GIB + 1, deterministic=True)  # others have taken it
    assert card.fractions == []
    assert not torch.are_deterministic_algorithms_enabled()
    configure(CUDA, 22 * GIB, deterministic=False).restore()
    card.fractions.clear()
    card.settings.clear()
    settings = configure(CUDA, 12 * GIB, deterministic=False)
    try:
        assert card.fractions == [(0.5, CUDA)]
        assert card.settings == ["expandable_segments:True"]
        assert torch.get_float32_matmul_precision() == "highest"
        assert not matmul.allow_bf16_reduced_precision_reduction
        said = "12.0 GiB of 24.0 GiB are this run's budget; other processes and CUDA itself use 2.0 GiB"
        assert said in settings.message
    finally:
        settings.restore()
    assert card.fractions.pop() == (1.0, CUDA)
    assert (torch.get_float32_matmul_precision(), matmul.allow_bf16_reduced_precision_reduction) == before
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")  # a given setting stays
    configure(CUDA, 1, deterministic=False).restore()  # and so small a budget is not enforced
    assert card.fractions[1] == (LEAST_LIMIT_BYTES / card.total_memory, CUDA)
    assert card.settings == ["expandable_segments:True"]


def test_the_probe_asks_for_gpu_memory_and_finds_both_tiers(card: Card) -> None:
    assert memory_use(CUDA) == {"allocated_bytes": 3 * GIB, "reserved_bytes": 4 * GIB, "fragmentation_bytes": GIB}
    assert this_machine(CUDA).source.startswith(f"assumed: {card.name}"), "never probed: planned by its GPU's name"
    probe._require_memory(CUDA, probe_compute.CPU_SIZES)
    name, gpu, ram = probe.memories(CUDA)
    assert (name, gpu) == (card.name, 24 * GIB)
    card.is_integrated = True  # one memory: each tier has a part of what the machine has
    assert probe.memories(CUDA)[0] == card.name
    assert sum(probe.memories(CUDA)[1:]) == pytest.approx(ram, rel=0.01)
    card.is_integrated, card.total_memory = False, 2 * GIB  # nothing is left
    with pytest.raises(UserError, match="bytes of GPU memory and -"):
        probe._require_memory(CUDA, probe_compute.CPU_SIZES)


def test_the_boards_power_limit_is_nvidia_smis(card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert probe.power_limit_w(CUDA) is None  # there is none
    smi = tmp_path / "nvidia-smi"
    for said, watts in (("450.00", 450.0), ("[N/A]", None), ("nan", None)):
        smi.write_text(f'#!/bin/sh\ncase "$*" in *--id=GPU-*power.limit*) echo "{said}";; esac\n')
        smi.chmod(0o755)
        assert probe.power_limit_w(CUDA) == watts


def test_work_is_timed_between_two_events_and_copies_go_through_a_stream_each() -> None:
    counted: list[None] = []
    here, there, back = torch.arange(64), torch.zeros(64, dtype=torch.int64), torch.zeros(64, dtype=torch.int64)
    with streams_on_cpu():
        assert 0 <= elapsed_s(lambda: counted.append(None), CUDA, 5) < 20
    threads = threading.active_count()
    with streams_on_cpu():
        rates = probe_compute._copies(HostArena(4096, budget_bytes=4096), [[(there, here)], [(back, here)]], CUDA, 0.0)
    assert len(counted) == 5
    assert torch.equal(there, here)
    assert torch.equal(back, here)
    assert min(rates) > 0
    assert threading.active_count() <= threads + 4


def test_the_kernel_of_wsl_is_known_by_its_release(tmp_path: Path) -> None:
    limits.ROOT = tmp_path
    osrelease, version = tmp_path / "proc/sys/kernel/osrelease", tmp_path / "proc/version"
    assert not is_wsl()
    for file, text, wsl in (
        (version, "Linux version 6.8.0-1014-azure (buildd@lcy02)", False),
        (version, "Linux version 4.4.0-19041-Microsoft (Microsoft@Microsoft.com)", True),
        (osrelease, "6.1.0-18-amd64", False),
        (osrelease, WSL_RELEASE, True),
    ):
        version.unlink(missing_ok=True)
        write(file, text)
        assert is_wsl() is wsl


def test_budgets_with_a_gpu(card: Card, tmp_path: Path) -> None:
    machine(tmp_path)
    card.free = 10 * GIB
    free = free_budgets(CUDA)
    assert (free.gpu, free.ram) == (11 * GIB - 768 * 2**20, 20 * GIB - int(2.56 * GIB))
    assert "13.0 GiB of 24.0 GiB taken by other processes" in free.why["gpu"]
    card.is_integrated = True
    free = free_budgets(CUDA)
    assert free.gpu + free.ram == 16 * GIB  # the host's 20 free, whatever its cache holds, less a reserve


@pytest.mark.parametrize(("available", "expected"), [(30 * GIB, 16 * GIB), (10 * GIB, 10 * GIB - int(2.56 * GIB))])
def test_wsl_gives_ram_what_it_can_pin(card: Card, tmp_path: Path, available: int, expected: int) -> None:
    write(machine(tmp_path, available=available) / "proc/sys/kernel/osrelease", WSL_RELEASE)
    free = free_budgets(CUDA)
    assert free.ram == expected
    assert ("about what WSL2 can pin" in free.why["ram"]) is (expected == 16 * GIB)
    assert free_budgets(CUDA, ram=24 * GIB).ram == 24 * GIB  # who says so has it tried
    both = free_budgets(torch.device("cpu"))  # nothing is pinned without a GPU
    assert both.ram + both.gpu == available - int(2.56 * GIB)
    (remark,) = [text for text in remarks(CUDA) if "WSL2" in text]
    assert "about half" in remark


def test_one_memory_is_counted_once(card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A DGX Spark: 119 GiB, of which the driver calls 80 taken, 70 of them file cache. Such a GPU is known by what
    torch says, and by name where it says nothing."""
    for name in ("NVIDIA GB10", "Orin", "NVIDIA GH200 480GB", "NVIDIA GB100", "NVIDIA GeForce RTX 4090"):
        for says in ({}, {"is_integrated": False}):
            assert shares_memory(SimpleNamespace(name=name, **says)) is (name in ("NVIDIA GB10", "Orin"))
    for integrated in (True, False):
        assert shares_memory(SimpleNamespace(name="AMD Radeon 8060S", is_integrated=integrated)) is integrated
    total, available = 119 * GIB, 110 * GIB
    machine(tmp_path, available=available, total=total)
    card.become("NVIDIA GB10", 39 * GIB, total, integrated=True)
    assert gpu_memory(CUDA) == (available, total)
    free = free_budgets(CUDA)
    reserve = int(total * 0.12)
    assert free.gpu + free.ram == available - reserve
    assert free.gpu == pytest.approx(0.4 * (available - reserve), abs=1)
    assert "both tiers share it" in free.why["gpu"]
    given = free_budgets(CUDA, gpu=60 * GIB)
    assert (given.gpu, given.ram) == (60 * GIB, available - reserve - 60 * GIB)
    with pytest.raises(UserError, match="both tiers share"):
        run_budgets(BudgetConfig(gpu="80GiB", ram="80GiB"), CUDA, [tmp_path], new=True)
    run_budgets(BudgetConfig(gpu="40GiB", ram="40GiB"), CUDA, [tmp_path], new=True)
    machine(tmp_path / "small", available=6 * GIB, total=8 * GIB)  # file cache does not refuse a budget
    card.become("NVIDIA GB10", GIB, 8 * GIB, integrated=True)
    configure(CUDA, 4 * GIB, deterministic=False).restore()
    assert card.fractions[0] == (0.5, CUDA)
    with pytest.raises(UserError, match=r"budgets\.gpu"):
        configure(CUDA, 7 * GIB, deterministic=False)


def test_an_amd_gpu_is_said_to_be_untried(card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card.become("AMD Instinct MI300X", 190 * GIB, 192 * GIB)
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    configure(CUDA, 100 * GIB, deterministic=False).restore()
    assert card.settings == []  # expandable segments are for NVIDIA's driver alone
    machine(tmp_path)
    (remark,) = remarks(CUDA)
    assert "never been tested" in remark
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "rocminfo" in why_no_cuda()
    monkeypatch.setattr(torch.version, "hip", None)
    assert "built without CUDA" in why_no_cuda()


def test_the_quota_of_a_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    machine(tmp_path, cgroup="0::/a/b")
    assert cpu_quota() is None
    assert usable_cpus() == 64
    assert remarks(torch.device("cpu")) == []
    top = tmp_path / "sys/fs/cgroup"
    for folder, text in ((top / "a", "350000 100000"), (top / "a/b", "max 100000")):
        group_v2(folder, "max", 0)
        write(folder / "cpu.max", text)
    assert cpu_quota() == 3.5
    assert usable_cpus() == 4
    said = "a control group limits this process to 4 of the 64 CPUs that it sees; 4 are used"
    assert remarks(torch.device("cpu")) == [said]
    machine(tmp_path / "v1", cgroup="3:cpu,cpuacct:/x/y\n4:memory:/x/y")
    top = tmp_path / "v1/sys/fs/cgroup/cpu,cpuacct"
    for folder, quota in ((top, -1), (top / "x", 250_000), (top / "x/y", -1)):
        write(folder / "cpu.cfs_quota_us", quota)
        write(folder / "cpu.cfs_period_us", 100_000)
    assert cpu_quota() == 2.5


H100 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]


@pytest.mark.parametrize(
    ("name", "capability", "dtype", "reason"),
    [
        ("NVIDIA H100", (9, 0), "bfloat16", None),
        ("NVIDIA GeForce RTX 4090", (8, 9), "bfloat16", None),
        ("Tesla T4", (7, 5), "float32", None),
        ("Tesla T4", (7, 5), "bfloat16", "Tesla T4 has compute capability 7.5, and bfloat16 needs 8.0"),
        ("Tesla V100", (7, 0), "float32", "built for 7.5 and newer"),
    ],
)
def test_a_gpu_too_old_is_refused(name: str, capability: tuple[int, int], dtype: str, reason: str | None) -> None:
    found = too_old(name, capability, H100, dtype)
    assert found is None if reason is None else reason in str(found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_that_is_not_there_is_explained() -> None:
    with pytest.raises(UserError, match=r"train\.device: .* no CUDA device: .+; use auto or cpu") as caught:
        resolve_device(tiny.training(device="cuda"))
    if torch.version.cuda is None:
        assert f"this torch ({torch.__version__}) is built without CUDA" in str(caught.value)
    assert resolve_device(tiny.training(device="auto")) == torch.device("cpu")


def test_deterministic_lasts_as_long_as_the_session(tmp_path: Path) -> None:
    class Owner:
        value = 1

    log: list[int] = []
    settings = DeviceSettings()
    settings.set(Owner, "value", 2)
    settings.call(log.append, 10, 20)
    settings.set(Owner, "value", 3)
    assert (Owner.value, log) == (3, [20])
    settings.restore()  # in reverse
    assert (Owner.value, log) == (1, [20, 10])

    def state() -> tuple[bool, ...]:
        filled = torch.utils.deterministic.fill_uninitialized_memory
        ways = torch.backends.cudnn.benchmark, torch._inductor.config.deterministic
        return torch.are_deterministic_algorithms_enabled(), filled, *ways

    before = state()
    with tiny.session(tmp_path, t=tiny.training(deterministic=True)) as session:
        assert state() == (True, False, False, True)
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] in (":4096:8", ":16:8")
        train_step(session)
    assert state() == before
    assert configure(torch.device("cpu"), 1, deterministic=False).message is None
    assert memory_use(torch.device("cpu")) is None


def test_what_is_compiled_beside_other_lanes_is_one_graph_each() -> None:
    """Without torch.compile's fullgraph, which would say so itself."""
    t = tiny.training()
    state = [torch.rand(64) for _ in range(5)]
    values = AdamW.scalars(t, t.lr, 1, 0.5, torch.device("cpu"))
    update = torch._dynamo.explain(adamw)(*state, values.decayed)
    assert (update.graph_count, update.graph_break_count) == (1, 0)
    rows, labels, weights = torch.rand(2, 8), torch.tensor([1, 5]), torch.ones(2, 1)
    loss = torch._dynamo.explain(_block_)(rows, labels, weights, torch.tensor(0.1), torch.tensor(1e-4))
    assert (loss.graph_count, loss.graph_break_count) == (1, 0)


def test_state_on_the_gpu_is_updated_by_the_same_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit-equal results of the same AdamW object, called by the optimizer lane or by the compute lane."""
    calls: dict[str, set[str]] = {}
    step, digests = AdamW.step, set()
    for gpu in ("1GiB", tiny.FLOOR):
        lanes = calls.setdefault(gpu, set())

        def update(self: AdamW, *args: Any, lanes: set[str] = lanes) -> None:
            lanes.add(threading.current_thread().name)
            step(self, *args)

        monkeypatch.setattr(AdamW, "step", update)
        with tiny.session(tmp_path / gpu, gpu=gpu) as session:
            tiny.steps(session, 2)
            digests.add(tiny.digest(session.store))
    assert calls == {"1GiB": {"compute"}, tiny.FLOOR: {"optimizer"}}
    assert len(digests) == 1


@pytest.mark.long
def test_compiled_runs_are_equal_and_nearly_those_of_eager_ones(tmp_path: Path) -> None:
    losses, digests = [], set()
    for number, how in enumerate(("off", "on", "on")):
        with tiny.session(tmp_path / str(number), t=tiny.training(compile=how, deterministic=True)) as session:
            losses.append([metrics.loss for metrics in tiny.steps(session, 2)])
            digests.add(tiny.digest(session.store))
    assert len(digests) == 2
    assert losses[1] == losses[2] == pytest.approx(losses[0], rel=1e-5)


def test_garbage_is_looked_for_once_a_step(tmp_path: Path) -> None:
    counts: list[int] = []

    class Collections(tiny.Silent):
        def on_step(self, metrics: StepMetrics) -> None:
            counts.append(sum(generation["collections"] for generation in gc.get_stats()))

    tiny.train_run(tmp_path, Collections(), train=tiny.training(steps=3), storage=tiny.storage())
    assert [after - before for before, after in itertools.pairwise(counts)] == [1, 1]
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_a_dependency_that_nobody_submitted_is_an_error() -> None:
    for missing in (1, 7):
        executor = Executor(lambda op: None, torch.device("cpu"))
        executor.submit([an_op(0, "compute"), an_op(2, "h2d", 0)])
        executor.drain()
        executor.submit([an_op(3, "compute", missing)])
        with pytest.raises(AssertionError, match=f"op 3 depends on op {missing}, which was never submitted"):
            executor.wait(3)
        executor.close()


def test_an_update_in_pieces_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    values = AdamW.scalars(tiny.training(), 1e-2, 3, 0.7, torch.device("cpu"))
    start = [torch.rand(1000, generator=generator) for _ in range(5)]
    results = []
    for piece in (1 << 24, 64, 320):  # whole vectors, as is the real one
        monkeypatch.setitem(PIECE_NUMEL, "cpu", piece)
        master, first, second, gradient, weights = (t.clone() for t in start)
        state = {"master": master, "exp_avg": first, "exp_avg_sq": second}
        params = ParamSpec("decayed", (600,), True), ParamSpec("other", (400,), False)
        where = UpdateRange(FlatLayout(params, {"decayed": 0, "other": 600}, 1000), 0, 1000)
        AdamW("fused").step(state, gradient, weights, where, values)
        results.append(torch.cat([master, first, second, weights]))
    assert all(torch.equal(results[0], other) for other in results[1:])
