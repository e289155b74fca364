"""What gpu-check runs, in order of worth. A limit ends what hangs; it is no estimate of what a command takes."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

from penstock.app.bench.process import REPOSITORY
from penstock.storage.files import child


@dataclass(frozen=True, slots=True)
class Command:
    name: str
    about: str
    command: list[str]
    limit_s: float
    shows: str
    """Names in the JSON that it prints that go into the page, with all below them; gpu-check.json has everything."""


_STEP = "model label tokens_per_s step_s mfu hfu ratio ratio_once exposed_io compute_idle attention_tflops"
_STEP += " matmul_tflops attention_executed_over_once tiers"
_DEVICE = "machine packages memory matmul_flops links attention reads pinned compile_s"
_SMOKE = "model parameters state_bytes penstock plain wrong"
_DRIVE = "drives.1.read_bytes_per_s drives.1.write_bytes_per_s drives.1.size_bytes"
_TESTS = "collected passed failed error skipped failing"
TESTS = ("pinned_arena", "gpu_training", "gpu_readers", "gpu_attention", "gpu_validation", "gpu_bench")
"""Files of tests/gpu, test_*.py, most telling first."""


def commands(*, small: bool) -> list[Command]:
    """All of them; `small` gives each a size that takes seconds on any machine, and whose figures say nothing."""
    tiny = ["--small"] if small else []

    def step(case: str, about: str, limit_s: float, more: str = "") -> Command:
        command = child.command("app.cli.main", "bench", "step", "--suite", case, *tiny, "--json")
        return Command(case, about, command, limit_s, f"{_STEP} {more}")

    def plan(case: str, about: str) -> Command:
        command = child.command("app.cli.main", "bench", "plan", "--case", case, *tiny, "--json")
        return Command(f"plan-{case}", about, command, 60, "state bound_by tiers step_s")

    pytest = [sys.executable, "-P", "-m", "pytest", "-v", "-rfE", "--tb=short", "-p", "no:cacheprovider"]
    pytest += ["-o", "addopts=", "-o", "faulthandler_timeout=60", f"--rootdir={REPOSITORY}"]
    pytest += [str(REPOSITORY / "tests" / "gpu" / f"test_{name}.py") for name in (TESTS[:1] if small else TESTS)]
    device = child.command("app.gpu_check.device", *tiny)
    smoke = child.command("app.gpu_check.smoke", *tiny)
    size = ["--size", "64MiB", "--chunk", "1MiB"] if small else ["--size", "1GiB"]
    storage = child.command("app.cli.main", "bench", "storage", ".", *size, "--rounds", "1", "--json")
    listed = [
        Command("device", "what this machine is and what works on it", device, 100, _DEVICE),
        Command("smoke", "six steps through all three tiers beside plain PyTorch", smoke, 130, _SMOKE),
        Command("tests", "tests/gpu", pytest, 150, _TESTS),
        step("long-7b", "a step of Qwen2.5-7B's shape at 524,288 tokens against its kernels alone", 120),
        step("short", "a step of Llama-3-8B's shape at 8,192 tokens", 150, "kernel_idle best_plain_ratio plain"),
        plan("268m-tiers", "a plan against its run, state in all three tiers"),
        plan("268m-64k-streamed", "a plan against its run, long context with a streamed window"),
        Command("drive", "this folder's drive", [*device, "--drive"], 60, _DRIVE),
        Command("storage", "the NVMe tier against raw I/O", storage, 60, "read_ratio write_ratio"),
        # What is left of the time is for these; --only begins with them.
        step("tiers", "the largest model whose state this machine holds, spilled to NVMe", 150),
        step("short-24gb", "the same as short within 24 GiB", 120),
        step("long-24gb-7b", "the same as long-7b within 24 GiB", 120),
        step("long-8b", "a step of Llama-3-8B's shape at 524,288 tokens", 120),
        step("short-32b", "a step of Qwen3-32B's shape at 8,192 tokens", 150, "best_plain_ratio plain"),
        step("long-24gb-8b", "the same as long-8b within 24 GiB", 120),
        *(plan(case, "a plan against its run") for case in PLANS),
    ]
    # An emulated card and the compilers of two cores are slow.
    return [replace(each, limit_s=5 * each.limit_s) for each in listed] if small else listed


PLANS = ("268m-ram", "268m-nvme", "268m-gpu", "268m-64k", "moe", "218m-windowed", "268m-fp32")
"""Of `bench plan`'s cases, those at the end of the list."""
