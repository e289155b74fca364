"""CUDA's rules over the recorded ops of real-size plans: the real Runtime, on a device that is only addresses. And each
of the rules, broken on purpose: a checker that finds nothing is worth nothing."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from cuda_pretended import DEVICE, LARGE_PAGE, SMALL_PAGE, Pretended, Stream, pretended
from cuda_replay import Case, Replay, planned, replay
from cuda_watch import LARGEST_REGISTRATION, PAGE, Watch
from msgspec import structs
from small_problems import problem, some_plan
from some_ops import an_op

from penstock.engine.clock import wait_for_copies
from penstock.engine.forecast.problem import ALLOCATOR_SHARE, overhead_bytes
from penstock.engine.machine.limits import RAM_RESERVE
from penstock.engine.plan.plan import Plan
from penstock.engine.plan.problem import CUBLAS_WORKSPACE_BYTES, PlanOptions
from penstock.engine.runtime.batch import BatchCarrier
from penstock.engine.runtime.memory import DeviceArena
from penstock.engine.schedule.actions import ACTIONS, AWAIT_CHUNK, CLIP, LOAD, STORE
from penstock.engine.schedule.ops import Op
from penstock.storage.tier.arena import cut_pieces

RESIDENT_7B = Case("7b_512k", "gh200-480", PlanOptions(gpu_first="blocks"))
PROMPTED_7B = replace(RESIDENT_7B, prompt_tokens=(300, 40, 1))  # of unequal length, which lie end to end
KV_MOVES = {"load_sample_kv", "store_sample_kv"}
STREAMED = PlanOptions(streamed=True, gpu_first="graphs", ram_first="state", stages=4)
GROUPED = PlanOptions(group=2, offloaded_graphs="half", ram_first="activations")
RECORDS_HERE = PlanOptions(gpu_first="saved activations", recompute="all", ram_first="weights", stages=4)
WEIGHTS_ON_NVME = Case("32b_workstation", "rtx4090-64", RECORDS_HERE)
STAGED = replace(WEIGHTS_ON_NVME, device_reads=False)
ON_NVME_SMALL = "model.num_layers=4 train.global_batch_size=2 budgets.ram=8GiB"

ACTIVATIONS = {"load_x", "store_x", "load_dy", "store_dy", "load_saved", "store_saved", "load_kv", "store_kv"}
STATE = {"load_weights", "store_gradient", "update"}
SPILLS = {"spill_x", "peek_x", "discard_x"}
EVALUATED = {"embed_evaluate", "layer_evaluate", "head_evaluate", "evaluate"}
SAMPLES = {"embed_generate", "layer_generate", "head_generate", "choose", "load_sample_kv", "store_sample_kv"}
KV = {"load_dkv", "store_dkv", "spill_kv", "unspill_kv", "spill_saved", "unspill_saved"}
PARTS = {"load_weights", "store_gradient_part", "write_gradient", "read_state", "write_state", "layer_recompute"}


def second(run: Replay) -> None:
    """Another step, which commits the first one's state."""
    run.step(2, commit=True)


def sampled(run: Replay) -> None:
    run.sample(1)
    run.finish()


def validated(run: Replay) -> None:
    run.evaluate(1, 1)
    run.finish()


def on_nvme(plan: Plan) -> bool:
    return any(buffer.weights == "nvme" for buffer in plan.buffers.values())


@dataclass(frozen=True)
class Sort:
    """A plan of some sort, for a published model and for the same with few layers."""

    case: Case
    small: str
    """Settings of the small one: with less to train or less memory the plan is of the same sort."""
    layers: int | None
    """Carried out of the published model."""
    actions: set[str]
    """What it is there for."""
    holds: Callable[[Plan], bool] = lambda plan: True
    then: Callable[[Replay], None] = Replay.finish
    """What follows the first step."""
    least_ram: int = 0
    """GiB of the published model's arena, of more than six pieces."""


SHORT = "data.sequence_length=65536"
RESIDENT_SMALL = f"model.num_layers=3 {SHORT} train.chunk_tokens=8192 budgets.gpu=36GiB"
SORTS = {
    "best": Sort(
        Case("7b_512k", "gh200-480"),
        f"model.num_layers=2 {SHORT} budgets.gpu=24GiB",
        None,
        (ACTIVATIONS - {"load_saved", "store_saved"}) | STATE | {"checkpoint_state", "commit"},
        lambda plan: bool(plan.saved_graphs),
        second,
    ),
    "replicas": Sort(
        Case("7b_512k", "gh200-480", settings=("train.global_batch_size=2", "train.replicas=2")),
        f"model.num_layers=2 {SHORT} budgets.gpu=24GiB train.global_batch_size=2 train.replicas=2",
        4,
        {"hand_over", "load_weights"},
        lambda plan: plan.problem.adds_replicas,
        second,
    ),
    "shards": Sort(
        Case("7b_512k", "gh200-480", settings=("train.replicas=2", "train.parallel=context")),
        f"model.num_layers=2 {SHORT} budgets.gpu=24GiB train.replicas=2 train.parallel=context",
        2,
        {"hand_over", "layer_publish", "add_dkv", "store_dq", "load_dq"},
        lambda plan: plan.problem.sharded,
        second,
    ),
    "resident": Sort(
        RESIDENT_7B,
        RESIDENT_SMALL,
        8,
        ACTIVATIONS | {"update_on_gpu", "stage_state", "checkpoint_staged"},
        lambda plan: not plan.saved_graphs and any(buffer.state == "gpu" for buffer in plan.buffers.values()),
        second,
    ),
    "validated": Sort(RESIDENT_7B, RESIDENT_SMALL, 2, EVALUATED, then=validated),
    "sampled": Sort(PROMPTED_7B, RESIDENT_SMALL, 4, SAMPLES - KV_MOVES, then=sampled),
    "sampled through RAM": Sort(replace(PROMPTED_7B, samples_in="ram"), RESIDENT_SMALL, 4, SAMPLES, then=sampled),
    "120b": Sort(
        Case("120b_gh200", "gh200-480"),
        "model.num_layers=6 train.global_batch_size=6 budgets.ram=18GiB budgets.gpu=36GiB",
        4,
        PARTS,
        lambda plan: bool(plan.recomputed),
        least_ram=400,
    ),
    "experts": Sort(
        Case("120b_moe", "gh200-480", settings=("train.split_layers=experts",)),
        "train.split_layers=experts model.num_layers=3 train.global_batch_size=8 budgets.ram=40GiB budgets.gpu=60GiB",
        2,
        {"load_sent", "store_sent", "load_dsent", "store_dsent"},
        lambda plan: any(block.kind == "experts" for block in plan.blocks),
    ),
    "states": Sort(
        Case("qwen3_next_80b_24gb", "rtx4090-64"),
        "model.num_layers=4 model.overrides.num_experts=32 train.global_batch_size=2 train.chunk_tokens=8192",
        None,
        {"load_recurrent", "store_recurrent"},
        lambda plan: any(block.recurrent for block in plan.blocks),
    ),
    "24gb": Sort(
        Case("7b_1m", "rtx4090-64", STREAMED, 16384),
        "model.num_layers=2 data.sequence_length=131072 budgets.ram=12GiB",
        2,
        ACTIVATIONS | STATE | KV,
        lambda plan: plan.streamed and bool(plan.spilled),
    ),
    "groups": Sort(
        Case("14b_workstation", "rtx4090-256", GROUPED),
        "model.num_layers=4",
        2,
        (ACTIVATIONS - {"load_dy"}) | STATE | {"load_graph", "store_graph", "load_sum", "store_sum"},
        lambda plan: plan.num_groups > 1 and bool(plan.offloaded_graphs),
    ),
    "weights here": Sort(
        Case("32b_workstation", "rtx4090-64", replace(RECORDS_HERE, gpu_first="weights")),
        "model.num_layers=6 train.global_batch_size=2 budgets.ram=24GiB",
        12,
        {"load_weights_part", "update", "write_state"},
        lambda plan: any(buffer.weights == "gpu" and buffer.state == "nvme" for buffer in plan.buffers.values()),
        second,
    ),
    "direct": Sort(WEIGHTS_ON_NVME, ON_NVME_SMALL, 12, {"read_weights_whole", "write_weights"}, on_nvme, second),
    "staged": Sort(STAGED, ON_NVME_SMALL, 12, {"read_weights", "load_weights_part"}, on_nvme, second),
}


def check(run: Replay) -> None:
    """What holds for every plan."""
    watch, cuda, plan = run.watch, run.cuda, run.plan
    assert watch.violations == []
    assert watch.copies > 100
    assert watch.synchronous == set()
    tier = plan.tiers["gpu"]
    slots = sum(tier.parts.values()) - tier.parts["workspace"] - tier.parts["saved graphs"]
    dynamic = cuda.reserved_bytes() - run.slot_bytes - tier.parts["saved graphs"]
    tokens = plan.problem.micro_batches * plan.window_tokens
    beside = overhead_bytes(tokens) - CUBLAS_WORKSPACE_BYTES + plan.problem.gpu_budget // ALLOCATOR_SHARE
    assert run.slot_bytes <= slots + plan.problem.gpu_budget // ALLOCATOR_SHARE // 4
    # A graph that is about to leave is part of its op's temporaries.
    temporaries = tier.parts["workspace"] if plan.offloaded_graphs else 0
    assert 0 < dynamic <= beside + temporaries
    assert cuda.reserved_bytes() + tier.parts["workspace"] - temporaries - beside <= tier.budget_bytes
    # torch's pinned allocator takes powers of two; the reserve of RAM is what they come from.
    assert run.ram.arena.used_bytes <= plan.tiers["ram"].peak_bytes - plan.problem.reader_bytes
    assert 0 < cuda.peak_pinned_bytes <= RAM_RESERVE[0] // 4


@pytest.mark.parametrize("published", [False, pytest.param(True, marks=pytest.mark.long)], ids=["small", "published"])
@pytest.mark.parametrize("name", SORTS)
def test_a_plan_keeps_the_rules(name: str, published: bool) -> None:
    sort = SORTS[name]
    small = replace(sort.case, settings=("train.compile=off", *sort.small.split()))
    with replay(sort.case if published else small, sort.layers if published else None) as run:
        plan, arena = run.plan, run.ram.arena
        assert sort.holds(plan)
        if published and sort.least_ram:
            assert plan.saved_on_gpu
            assert plan.spilled
            assert arena.used_bytes > sort.least_ram << 30
            assert len(cut_pieces([*arena.slots.values()])) > 6
        run.step(1)
        sort.then(run)
        check(run)
        assert run.watch.actions >= (sort.actions | SPILLS if published and sort.least_ram else sort.actions)
        absent = {"direct": {"read_weights"}, "staged": {"read_weights_whole"}}.get(name, set())
        assert absent.isdisjoint(run.watch.actions)


@pytest.mark.long
def test_an_adapter_on_70b_with_24_gb() -> None:
    """Frozen weights from NVMe, in slots of their own beside the adapter's, which is in RAM."""
    with replay(Case("70b_lora_24gb", "rtx4090-128", device_reads=False), 3) as run:
        plan = run.plan
        stays = [buffer for buffer in plan.buffers.values() if buffer.frozen]
        assert "nvme" in {buffer.weights for buffer in stays}
        assert plan.weight_slot_bytes["frozen layer"] > 100 * plan.weight_slot_bytes["layer"]
        run.step(1)
        run.finish()
        check(run)
        assert run.watch.actions >= ACTIVATIONS | STATE | {"read_weights", "load_weights_part"}


@pytest.mark.long
def test_a_quantised_base_is_dequantised_on_the_device_a_layer_at_a_time() -> None:
    settings = ("train.activation_checkpointing=selective",)
    with replay(Case("70b_qlora_24gb", "rtx4090-64", device_reads=False, settings=settings), 3) as run:
        plan = run.plan
        stays = {name: buffer for name, buffer in plan.buffers.items() if buffer.copy_numel}
        assert plan.weight_slot_bytes["frozen layer"] == max(buffer.nbytes for buffer in stays.values())
        assert plan.problem.copy_bytes > 3 * plan.weight_slot_bytes["frozen layer"]
        run.step(1)
        run.finish()
        check(run)
        assert run.watch.actions >= STATE | {"dequantise", "load_weights"}


def test_every_copy_between_host_and_device_is_in_some_plan() -> None:
    """But those of states' gradients from rank to rank, and what waits for a rank: see tests/emulated/test_ranks.py."""
    copies = {action.name for action in ACTIONS.values() if action.lane in ("h2d", "d2h")}
    copies -= {LOAD["drecurrent"].name, STORE["drecurrent"].name, AWAIT_CHUNK.name}
    assert copies <= set().union(*(sort.actions for sort in SORTS.values()))


# ---------------------------------------------------------------------- rules that are broken

SMALL = Case("7b_512k", "gh200-480", settings=("train.compile=off", "model.num_layers=8"))
BASE = 1 << 40


@pytest.fixture
def cuda() -> Iterator[Pretended]:
    with pretended(Watch(), 1 << 34, 1 << 30) as cuda:
        yield cuda


def test_slots_over_registrations_of_one_gib_are_found() -> None:
    """The 7B model's weights end to end, registered without regard to where they end: copies cross borders."""
    plan = planned(SMALL).plan
    watch, end = Watch(), BASE
    sizes = [buffer.numel * 2 for buffer in plan.buffers.values()]
    for start in range(0, sum(sizes), 1 << 30):
        watch.register(BASE + start, min(1 << 30, sum(sizes) - start))
    for nbytes in sizes:
        watch.require_pinned(end, nbytes)
        end += nbytes
    assert watch.rules() == {"one registration"}
    assert len(watch.violations) >= len(sizes) // 3
    assert "cross the end of a registration" in watch.violations[0].what


def finds(watch: Watch, act: Callable[[], object]) -> set[str]:
    """The rules that this breaks."""
    watch.violations.clear()
    act()
    return watch.rules()


def test_a_registration_is_whole_pages_once_and_below_512_gib() -> None:
    watch = Watch()
    assert finds(watch, lambda: watch.register(BASE, LARGEST_REGISTRATION - PAGE)) == set()
    for place in ((2 * BASE, LARGEST_REGISTRATION), (4 * BASE + 512, PAGE), (BASE + PAGE, PAGE)):
        assert finds(watch, partial(watch.register, *place)) == {"registration"}


def test_copies_that_the_driver_would_not_make_at_once_are_found(cuda: Pretended) -> None:
    """From pageable memory, or through a temporary; those that wait are counted by their op."""
    there, pageable = torch.empty(64, 64, device=DEVICE), torch.empty(64, 64)
    pinned, half = (torch.empty(64, 64, dtype=kind, pin_memory=True) for kind in (torch.float32, torch.bfloat16))
    wide = torch.empty(64, 128, pin_memory=True)
    plain = {"plain copy"}
    for source, rules in ((pinned, set()), (pageable, {"pinned"}), (half, plain), (wide[:, :64], plain)):
        assert finds(cuda.watch, partial(there.copy_, source, non_blocking=True)) == rules
    copies = cuda.watch.copies
    for number, (action, copy) in enumerate(((LOAD["x"], partial(there.copy_, pinned)), (CLIP, there.cpu))):
        cuda.watch.begin(an_op(number, action))
        copy()
        cuda.watch.end()
    assert cuda.watch.synchronous == {"load_x", "clip"}
    assert cuda.watch.copies == copies
    with pytest.raises(AssertionError, match="computes on the pretended device"):
        there.exp()


@pytest.mark.parametrize("lane", ["h2d", "nvme_read"])
def test_an_access_that_nothing_orders_is_found(lane: str) -> None:
    """A write by d2h, then accesses by another lane: with the dependency, without, and through a third op."""

    def run(*ops: tuple[Op, int, int, bool]) -> set[str]:
        watch = Watch()
        watch.allocate(BASE, 4 * PAGE)
        for each, start, end, write in ops:
            watch.begin(each)
            watch.touch(BASE + start, BASE + end, write=write, stream=None)
            watch.end()
        return watch.rules()

    written = an_op(0, "d2h"), 0, 2 * PAGE, True
    assert run(written, (an_op(1, lane, 0), 0, PAGE, False)) == set()
    assert run(written, (an_op(1, lane), 0, PAGE, False)) == {"order"}
    assert run(written, (an_op(1, lane), 2 * PAGE, 3 * PAGE, True)) == set()
    between = an_op(1, "compute", 0), 3 * PAGE, 4 * PAGE, False
    assert run(written, between, (an_op(2, lane, 1), PAGE, 2 * PAGE, True)) == set()
    read = an_op(0, lane), 0, PAGE, False
    assert run(read, (an_op(1, "compute"), 0, PAGE, False)) == set()
    assert run(read, (an_op(1, "compute"), 0, PAGE, True)) == {"order"}
    # Ops of a stream end in their order; those of a disk's lane in any.
    again = an_op(1, lane), 0, PAGE, True
    assert run(read, again) == (set() if lane == "h2d" else {"order"})


def test_a_stream_that_nobody_waits_for_is_found(monkeypatch: pytest.MonkeyPatch, cuda: Pretended) -> None:
    """Tokens that the carrier brings are read by compute; without its wait they may not be there."""
    plan = some_plan(problem(micro_batches=1, row_tokens=64), PlanOptions())
    for waits in (True, False):
        if not waits:
            monkeypatch.setattr(Stream, "synchronize", lambda self: None)
        tokens = BatchCarrier(plan, DEVICE).step([Replay.batch_of(64, 64, 1, 100)], {}).chunks[0]
        cuda.watch.begin(an_op(int(not waits), "compute"))
        cuda.use(tokens.ids, write=False)
        cuda.watch.end()
        assert ("order" in cuda.watch.rules()) != waits
        assert not (waits and cuda.watch.violations)
        del tokens


def test_a_copy_to_the_host_that_is_read_too_early_is_found(cuda: Pretended) -> None:
    """As "clip" reads a step's report: after waiting for an event behind the copy, and without."""
    there, here = torch.zeros(16, device=DEVICE), torch.empty(16, pin_memory=True)
    torch.cuda.synchronize(DEVICE)
    for waits, rules in ((True, set()), (False, {"order"})):
        cuda.watch.begin(an_op(int(not waits), "optimizer"))
        here.copy_(there, non_blocking=True)
        if waits:
            wait_for_copies(DEVICE)
        here.double()
        cuda.watch.end()
        assert cuda.watch.rules() == rules


def test_memory_that_another_stream_may_still_use_is_found(cuda: Pretended) -> None:
    """A temporary made on d2h and used there, or also by compute, which the host does not wait for."""
    streams = {name: Stream(cuda, name) for name in ("d2h", "compute")}
    for other, rules in (("d2h", set()), ("compute", {"temporary"})):
        number = 2 * (other == "compute")
        cuda.watch.begin(an_op(number, "d2h"))
        with torch.cuda.stream(streams["d2h"]):
            made = torch.empty(4096, dtype=torch.uint8, device=DEVICE)
        cuda.watch.end()
        cuda.watch.begin(an_op(number + 1, other, number))
        with torch.cuda.stream(streams[other]):
            cuda.use(made, write=False)
            del made
        cuda.watch.end()
        assert cuda.watch.rules() == rules


def test_memory_freed_by_the_main_thread_must_have_been_waited_for(cuda: Pretended) -> None:
    for waits, rules in ((True, set()), (False, {"temporary"})):
        number = int(not waits)
        made = torch.empty(4096, dtype=torch.uint8, device=DEVICE)
        cuda.watch.begin(an_op(number, "compute"))
        with torch.cuda.stream(Stream(cuda, "compute")):
            cuda.use(made, write=False)
        cuda.watch.end()
        if waits:
            cuda.watch.wait(number)
        del made
        assert cuda.watch.rules() == rules


def test_a_direct_read_that_would_bounce_is_found(cuda: Pretended) -> None:
    """The allocator's addresses are multiples of 512; a slot's are whole pages all the same."""
    read, where = cuda.watch.read_direct, cuda.watch
    assert finds(where, partial(read, BASE, PAGE, 0)) == set()
    cuda.misalign()
    plain = torch.empty(3 * PAGE, dtype=torch.uint8, device=DEVICE)
    for place in ((BASE + 512, PAGE, 0), (BASE, PAGE + 2, 0), (BASE, PAGE, 512), (plain.data_ptr(), 3 * PAGE, 0)):
        assert finds(where, partial(read, *place)) == {"direct"}
    arena = DeviceArena(1 << 24, DEVICE)
    sizes = [3 * PAGE, 1000, 2 << 20, 5 << 20]
    slots = [arena.slot(nbytes) for nbytes in sizes]
    assert [slot.numel() for slot in slots] == sizes
    for slot in slots:
        assert finds(where, partial(read, slot.data_ptr(), 0, 0)) == set()


def test_peaks_of_the_allocators(cuda: Pretended) -> None:
    """The caching allocator holds whole segments of each stream; pinned memory comes in powers of two."""
    kept = [torch.empty(size, dtype=torch.uint8, device=DEVICE) for size in (100, 21 << 20)]
    with torch.cuda.stream(Stream(cuda, "compute")):
        for _ in range(3):
            torch.empty(5 << 20, dtype=torch.uint8, device=DEVICE)  # freed at once
    assert cuda.live_bytes() == 512 + (21 << 20)
    assert cuda.reserved_bytes() == SMALL_PAGE + 2 * LARGE_PAGE + LARGE_PAGE
    pinned = torch.empty(5 << 20, dtype=torch.uint8, pin_memory=True)
    assert pinned.numel() == 5 << 20
    assert cuda.peak_pinned_bytes == 8 << 20
    del kept


@pytest.mark.parametrize("lane", ["h2d", "d2h", "optimizer", None])
def test_dependencies_left_out_of_a_real_schedule_are_found(lane: str | None) -> None:
    """The same run twice: with its dependencies, and with those of one lane's ops left out."""
    with replay(SMALL, 4) as run:
        for ops in itertools.chain(run.streamed(1), [run.builder.finish(commit=True)]):
            run.perform([structs.replace(each, deps=()) if each.lane == lane else each for each in ops])
        assert run.watch.rules() == (set() if lane is None else {"order"})
