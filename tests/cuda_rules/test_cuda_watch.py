"""Each of CUDA's rules, broken on purpose: a checker that finds nothing is worth nothing."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from cuda_pretended import DEVICE, LARGE_PAGE, SMALL_PAGE, Pretended, Stream, pretended
from cuda_replay import Case, Replay, planned, replay
from cuda_watch import LARGEST_REGISTRATION, PAGE, Watch
from msgspec import structs
from some_ops import an_op

from penstock.engine.clock import wait_for_copies
from penstock.engine.plan.plan import cut_chunks
from penstock.engine.runtime.batch import BatchCarrier
from penstock.engine.runtime.memory import DeviceArena
from penstock.engine.schedule.actions import CLIP, LOAD
from penstock.engine.schedule.ops import Op

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
    chunks = cut_chunks(1, 1, 64, 64, False)
    for waits in (True, False):
        if not waits:
            monkeypatch.setattr(Stream, "synchronize", lambda self: None)
        tokens = BatchCarrier(chunks, DEVICE).step([Replay.batch_of(64, 64, 1, 100)], {}).chunks[0]
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
        with torch.cuda.stream(streams["d2h"]):  # type: ignore[arg-type]
            made = torch.empty(4096, dtype=torch.uint8, device=DEVICE)
        cuda.watch.end()
        cuda.watch.begin(an_op(number + 1, other, number))
        with torch.cuda.stream(streams[other]):  # type: ignore[arg-type]
            cuda.use(made, write=False)
            del made
        cuda.watch.end()
        assert cuda.watch.rules() == rules


def test_memory_freed_by_the_main_thread_must_have_been_waited_for(cuda: Pretended) -> None:
    for waits, rules in ((True, set()), (False, {"temporary"})):
        number = int(not waits)
        made = torch.empty(4096, dtype=torch.uint8, device=DEVICE)
        cuda.watch.begin(an_op(number, "compute"))
        with torch.cuda.stream(Stream(cuda, "compute")):  # type: ignore[arg-type]
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
    with torch.cuda.stream(Stream(cuda, "compute")):  # type: ignore[arg-type]
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
