"""What is called a race of streams: two accesses of the same bytes, one of them a write, that nothing orders."""

from collections.abc import Callable

import pytest
import torch
from computes import emulator
from torch import Tensor

CUDA = torch.device("cuda", 0)
Work = Callable[[Tensor], object]


def add(x: Tensor) -> object:
    return x.add_(1)


def found(first: Work, second: Work, between: str, x: Tensor) -> list[str]:
    """Races of two streams' work on `x`."""
    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with emulator.races() as races:
        with torch.cuda.stream(one):
            first(x)
            event = torch.cuda.Event()
            event.record()
        if between == "a stream waits":
            two.wait_event(event)
        elif between == "the host waits":
            event.synchronize()
        elif between == "the host asks":
            while not event.query():
                pass
        with torch.cuda.stream(two):
            second(x)
        torch.cuda.synchronize()
    return races


@pytest.mark.parametrize("between", ["nothing", "a stream waits", "the host waits", "the host asks"])
def test_what_orders_two_streams(between: str) -> None:
    races = found(add, add, between, torch.zeros(100, device=CUDA))
    assert len(races) == (between == "nothing")
    assert all(line.startswith("1\taten::add_.Tensor of ") for line in races)


@pytest.mark.parametrize(
    ("first", "second", "count"),
    [
        (add, lambda x: x + 1, 1),
        (lambda x: x + 1, add, 1),
        (lambda x: x + 1, lambda x: x * 2, 0),
        (lambda x: add(x[:5]), lambda x: add(x[5:]), 0),
        (lambda x: add(x[:6]), lambda x: add(x[5:]), 1),
        (lambda x: add(x[:, :3]), lambda x: add(x[:, 3:]), 0),
        (lambda x: add(x.t()[2:4]), lambda x: x[9, 3].clone(), 1),
        (lambda x: x.copy_(torch.ones(10, 6).pin_memory(), non_blocking=True), lambda x: x[0].clone(), 1),
        (lambda x: x.zero_(), lambda x: torch.empty(6, pin_memory=True).copy_(x[4], non_blocking=True), 1),
    ],
)
def test_which_accesses_are_one(first: Work, second: Work, count: int) -> None:
    assert len(found(first, second, "nothing", torch.zeros(10, 6, device=CUDA))) == count


def test_kernels_of_inductor() -> None:
    step = torch.compile(lambda x: x.mul_(2).sin_())
    x = torch.zeros(100, device=CUDA)
    step(x.clone())
    assert len(found(step, lambda x: x + 1, "nothing", x)) == 1
    assert len(found(lambda x: x + 1, step, "nothing", x)) == 1
    assert found(step, step, "a stream waits", x) == []


@pytest.mark.parametrize("recorded", [False, True])
def test_memory_that_is_used_again_too_early(recorded: bool) -> None:
    stream, x = torch.cuda.Stream(), torch.zeros(1 << 20, device=CUDA)
    address = x.data_ptr()
    torch.cuda.synchronize()
    with emulator.races() as races:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10**8)
            read = x + 1
            if recorded:
                x.record_stream(stream)
        del x
        again = torch.zeros(1 << 20, device=CUDA)
        torch.cuda.synchronize()
    assert (again.data_ptr() == address) is not recorded
    assert len(races) == (not recorded)
    del read
