"""The cards that the stand-in can be and what they refuse, as torch meets it: the settings of README.md."""

import os
import subprocess
import sys

import pytest
import standin
import torch

CUDA = torch.device("cuda", 0)
MIB = 1 << 20
CARDS = {
    "t4": (7, 5),
    "a100": (8, 0),
    "rtx3090": (8, 6),
    "rtx4090": (8, 9),
    "l40s": (8, 9),
    "h100": (9, 0),
    "h200": (9, 0),
    "gh200": (9, 0),
    "b200": (10, 0),
    "rtx5090": (12, 0),
    "gb10": (12, 1),
}
OUT_OF_MEMORY, NOT_SUPPORTED = 2, 801


def output(program: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=os.environ | variables, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("card", CARDS)
def test_a_card_by_its_name(card: str) -> None:
    """Name, compute capability, memory and the rest agree in torch's properties and in the driver's attributes."""
    program = """
import torch
p = torch.cuda.get_device_properties(0)
free, total = torch.cuda.mem_get_info()
x = torch.ones(1000, device="cuda", dtype=torch.bfloat16) * 2
print(p.name, (p.major, p.minor), total == free == p.total_memory, bool(p.is_integrated), sep="|")
"""
    name, capability, whole, integrated = output(program, STANDIN_CARD=card).strip().split("|")
    assert capability == str(CARDS[card])
    assert name.lower().replace(" ", "").find(card) > 0
    assert (whole, integrated) == ("True", str(card == "gb10"))


def test_an_unknown_card_is_named() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import torch; torch.cuda.init()"],
        capture_output=True,
        text=True,
        env=os.environ | {"STANDIN_CARD": "voodoo"},
    )
    assert done.returncode != 0
    assert "there is no voodoo" in done.stderr


def test_other_processes_take_of_the_card() -> None:
    """What they take is neither free nor to be had."""
    total = torch.cuda.mem_get_info()[1]
    with standin.setting("STANDIN_TAKEN_MIB", total // MIB - 512, after=0):
        free = torch.cuda.mem_get_info()[0]
        assert 0 < free <= 512 * MIB
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(600 * MIB, dtype=torch.uint8, device=CUDA)
        assert torch.empty(100 * MIB, dtype=torch.uint8, device=CUDA).numel() == 100 * MIB
    assert torch.cuda.mem_get_info()[0] > free


def test_pinned_memory_has_a_limit() -> None:
    """Of registrations and allocations together; what is given back can be pinned again."""
    cudart = torch.cuda.cudart()
    memory = torch.empty(64 * MIB, dtype=torch.uint8)
    at = -(-memory.data_ptr() // 4096) * 4096
    program = """
import torch
held = torch.empty(24 << 20, dtype=torch.uint8, pin_memory=True)  # torch takes a power of two
try:
    torch.empty(40 << 20, dtype=torch.uint8, pin_memory=True)
except torch.AcceleratorError as error:
    print("out of memory" in str(error))
"""
    assert output(program, STANDIN_PINNED_MIB="64") == "True\n"
    before = standin.pinned_mib()
    with standin.setting("STANDIN_PINNED_MIB", before + 32, after=-1):
        assert int(cudart.cudaHostRegister(at, 20 * MIB, 0)) == 0
        assert int(cudart.cudaHostRegister(at + 20 * MIB, 20 * MIB, 0)) == OUT_OF_MEMORY
        assert int(cudart.cudaHostUnregister(at)) == 0
        assert int(cudart.cudaHostRegister(at + 20 * MIB, 20 * MIB, 0)) == 0
        assert int(cudart.cudaHostUnregister(at + 20 * MIB)) == 0
    with standin.setting("STANDIN_REGISTER", 0, after=1):
        assert int(cudart.cudaHostRegister(at, MIB, 0)) == NOT_SUPPORTED
    standin.forget_error()


FAILURES = {
    "launch": ({"STANDIN_FAIL_LAUNCH": "3"}, "unspecified launch failure"),
    "lost": ({"STANDIN_FAIL_LAUNCH": "3", "STANDIN_FAIL_WITH": "999"}, "unknown error"),
    "copy": ({"STANDIN_FAIL_COPY": "3"}, "uncorrectable ECC error encountered"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_a_card_that_fails_has_failed_for_good(case: str) -> None:
    """The call after which it fails succeeds, as on a card; from the next wait on every call has the error."""
    variables, words = FAILURES[case]
    program = """
import torch
here, there = torch.ones(1000), torch.zeros(1000, device="cuda")
for _ in range(3):
    try:
        there.copy_(here, non_blocking=True).add_(1)
    except torch.AcceleratorError:
        break
calls = [torch.cuda.synchronize, torch.cuda.mem_get_info, lambda: there.add_(1), lambda: there.cpu(),
    torch.cuda.Event().record, lambda: torch.empty(1 << 30, device="cuda"), torch.cuda.Stream]
for call in calls:
    try:
        call()
        print("works")
    except torch.AcceleratorError as error:
        print(str(error).splitlines()[0])
"""
    lines = output(program, **variables).splitlines()
    assert lines == [f"CUDA error: {words}"] * 7


def test_a_failure_ends_waits_and_is_undone() -> None:
    """What a stream has still to do is dropped, so nobody waits for it; tests go on in the same process."""
    here = torch.ones(1 << 20, pin_memory=True)
    there = torch.zeros(1 << 20, device=CUDA)
    with standin.failed_device(710), pytest.raises(torch.AcceleratorError, match="device-side assert triggered"):
        there.copy_(here, non_blocking=True)
    assert float(there.copy_(here).cpu().sum()) == 1 << 20
