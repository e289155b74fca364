"""Kill -9 at random moments: whatever is on disk then, a run ends in an uninterrupted one's bits, and no half export
passes for a model. A disk that fails in the middle of training, and no memory, threads or open files left: one clear
message, nothing lost, and the same bits once it is mended."""

import dataclasses
import errno
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from samples import cases, samples
from torch import Tensor
from transformers import AutoModelForCausalLM
from used_up import SHORTAGES

from penstock.engine import kernels as engine_kernels
from penstock.engine import opening, validation
from penstock.engine.attention import select as attention_select
from penstock.engine.attention.backends import Backend, Gradients, Operands, Problem, TiledReference, TorchCpuFlash
from penstock.engine.attention.spans import Geometry
from penstock.engine.config import AdapterConfig, ModelConfig
from penstock.engine.events import StepMetrics
from penstock.engine.export import export
from penstock.engine.gains import EarlyEnd
from penstock.engine.hf import weights
from penstock.engine.hf.config import model_config
from penstock.engine.runtime.runtime import Runtime
from penstock.engine.schedule.ops import Op
from penstock.engine.self_check import CheckResult
from penstock.engine.session import Session
from penstock.storage.files.errors import UserError
from penstock.storage.generations.checkpoints import AUTOMATIC, GOOD, checkpoint_folder, list_checkpoints
from penstock.storage.generations.store import NvmeStore
from penstock.storage.tier.manifest import Manifest

STEPS = 5
FEW_KILLS, BEST_KILLS = samples(1, 3), 8
"""Of an import, and of an export; of a run that keeps its best generation."""
CHANGING = ("open", "write", "pwrite", "pwritev", "fsync", "replace", "mkdir")
MOVING = ("link", "rename", "replace", "remove", "unlink", "mkdir", "rmdir")
PHASES = {
    "forward": ("embed_forward", "layer_forward"),
    "head": ("head",),
    "backward": ("layer_backward", "embed_backward"),
    "activations": (
        "spill_x",
        "spill_kv",
        "unspill_saved",
        "unspill_kv",
        "spill_graph",
        "unspill_graph",
        "spill_recurrent",
        "unspill_recurrent",
    ),
    "groups": ("store_sum", "load_sum"),
    "update": ("read_state", "update", "write_state", "write_weights", "checkpoint_state"),
    "commit": ("commit",),
}
"""Phase -> actions at one of which the process dies; "opening" is the time before the first op."""
HALVES = ["*embed_tokens*", "*.layers.0.*", "*.mlp.*"]
FLINT = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
KEPT = tiny.model(model_type="flint", num_layers=2, overrides=FLINT)
PLACEMENTS = [
    pytest.param(1_100_000, 1_000_000, 1, [], 18, marks=pytest.mark.long),
    pytest.param(tiny.FLOOR, tiny.FLOOR, 1, [], 18, marks=pytest.mark.long),
    (tiny.FLOOR, tiny.FLOOR, 2, [], samples(3, 18)),
    pytest.param(tiny.FLOOR, tiny.FLOOR, 2, HALVES, 30, marks=pytest.mark.long),
    pytest.param(tiny.FLOOR, tiny.FLOOR, 2, AdapterConfig(method="dora", rank=2), 30, marks=pytest.mark.long),
    pytest.param(tiny.FLOOR, tiny.FLOOR, 1, "groups", 30, marks=pytest.mark.long),
    (tiny.FLOOR, tiny.FLOOR, 1, "hybrid", samples(2, 30)),
    (tiny.FLOOR, tiny.FLOOR, 1, "experts", samples(2, 30)),
    (tiny.FLOOR, tiny.FLOOR, 1, "idle experts", samples(2, 30)),
    pytest.param(tiny.FLOOR, tiny.FLOOR, 2, "float32", 30, marks=pytest.mark.long),
    pytest.param(tiny.FLOOR, tiny.FLOOR, 1, "nf4", 30, marks=pytest.mark.long),
]
"""Budgets, drives, how, and kills."""
How = list[str] | AdapterConfig | str
TRAINING = tiny.training(steps=3, global_batch_size=1, chunk_tokens=24)
MOMENTS = samples(1, 4)
"""Random moments at which each fault is tried, on each of two placements."""
BUDGETS = {"nvme": (tiny.FLOOR, tiny.FLOOR), "mixed": (1_100_000, 1_000_000)}
Patch = Callable[[pytest.MonkeyPatch, Path], None]


def train_killed(folder: Path, seed: int | None, gpu: str | int, ram: str | int, num_drives: int, how: How) -> None:
    """Train to the end, committing every other step; with a seed, die by SIGKILL at a moment drawn from it.

    `how`: patterns of what is not trained, or an adapter beside which nothing is, or "groups": of micro-batches, with
    graphs that leave, or "hybrid": layers with a recurrent state, or "experts": in groups, or "float32": in bfloat16,
    with half of what is kept in float32 frozen, or "idle experts": groups that nothing is sent to are skipped, or
    "nf4": an adapter on a base that is quantised.
    """
    chance, groups = random.Random(seed), how == "groups"
    phase = chance.choice([*(name for name in PHASES if groups or name != "groups"), "commit", "opening"])
    often = {"commit": 3, "head": 4, "forward": 40, "activations": 40}.get(phase, 30)
    countdown, delay_s = chance.randrange(1, often), chance.random() * 3e-3
    if seed is not None and phase == "opening":
        threading.Thread(target=_die, args=(folder, phase, chance.random() * 0.4), daemon=True).start()
    model = tiny.model(model_type="qwen3_next", overrides=tiny.HYBRID) if how == "hybrid" else tiny.model()
    if how == "nf4":
        model, how = tiny.model(frozen_format="nf4"), AdapterConfig(method="lora", rank=2)
    adapter, freeze = how if isinstance(how, AdapterConfig) else None, how if isinstance(how, list) else []
    policy = {"global_batch_size": 3, "activation_checkpointing": "auto"} if groups else {"global_batch_size": 1}
    if how == "experts":
        model, policy = tiny.model(model_type="qwen3_moe", overrides=tiny.EXPERTS), policy | tiny.GROUPS
    if how == "idle experts":
        overrides = {"num_experts": 8, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
        model, freeze = tiny.model(model_type="qwen3_moe", overrides=overrides), ["*.mlp.gate.*"]
        policy |= {"split_layers": "experts", "expert_groups": 4, "skip_idle_experts": True}
    if how == "float32":
        freeze, policy = HALVES, policy | {"compute_dtype": "bfloat16"}
    settings = tiny.training(steps=STEPS, freeze=freeze, **policy)
    plan: dict[str, Any] = {"group": 1, "offloaded_graphs": "all"} if groups else {}
    drives = [folder / "state", folder / "second"][:num_drives]
    options = {"gpu": gpu, "ram": ram, "drives": drives, "adapter": adapter, "m": model} | plan
    options |= {"m": KEPT} if how == "float32" else {"d": tiny.data(sequence_length=4)} if how == "idle experts" else {}
    with tiny.session(folder, t=settings, s=tiny.storage(checkpoint_every=2, keep_last=2), **options) as session:
        lock = threading.Lock()

        def watched(op: Op) -> None:
            nonlocal countdown
            with lock:
                countdown -= op.action.name in PHASES.get(phase, ())
                due = countdown == 0
                countdown -= due
            if due:
                threading.Thread(target=_die, args=(folder, phase, delay_s), daemon=True).start()

        if seed is not None:
            tiny.before_ops(session, watched)
        tiny.steps(session)


def _die(folder: Path, phase: str, delay_s: float) -> None:
    time.sleep(delay_s)
    (folder / "died-in").write_text(phase)
    os.kill(os.getpid(), signal.SIGKILL)


def run_child(act: Callable[..., None], *args: Any) -> int | None:
    """In a child of a server that has imported everything and computed nothing."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["tiny", "penstock.engine.train"])
    child = processes.Process(target=act, args=args)
    child.start()
    child.join(600)
    return child.exitcode


@pytest.mark.sampled
@pytest.mark.parametrize(("gpu", "ram", "drives", "how", "kills"), PLACEMENTS)
def test_kill_9_at_random_moments_resumes_bit_for_bit(
    tmp_path: Path, gpu: str | int, ram: str | int, drives: int, how: How, kills: int
) -> None:
    train_killed(tmp_path / "straight", None, gpu, ram, drives, how)
    expected = tiny.digest_of(tmp_path / "straight")
    died: Counter[str] = Counter()
    finished = seed = 0
    while died.total() < kills or not finished:
        folder = tmp_path / f"run{finished}"
        folder.mkdir(exist_ok=True)
        before = committed_step(folder)
        # Every run gets through in the end: past some kills it is left alone.
        kill = seed if died.total() < kills else None
        exitcode = run_child(train_killed, folder, kill, gpu, ram, drives, how)
        seed += 1
        assert exitcode in (0, -signal.SIGKILL), exitcode
        if exitcode:
            died[(folder / "died-in").read_text()] += 1
            assert committed_step(folder) >= before
            continue
        assert committed_step(folder) == STEPS
        assert tiny.digest_of(folder) == expected
        for name in list_checkpoints(folder / "state"):  # every one that survived the kills is whole
            with closing(NvmeStore.open(folder / "state" / "checkpoints" / name)) as store:
                assert store.verify() > 0
                assert name in (AUTOMATIC.name(step := store.meta["step"]), GOOD.name(step))
        finished += 1
    print(f"killed in {dict(died)}; {finished} runs finished")
    assert len(died) >= samples(2, 4), died


class Timed(TiledReference):
    """A kernel of either order of sums, which takes long where it is the slow one."""

    def __init__(self, name: str, backend: Backend, slow: str) -> None:
        self.name, self._backend, self._slow = name, backend, name == slow
        self.masks_tiles = backend.masks_tiles

    def refusal(self, problem: Problem) -> str | None:
        return self._backend.refusal(problem)

    def forward(self, x: Operands, geometry: Geometry) -> tuple[Tensor, Tensor]:
        time.sleep(0.002 * self._slow)
        return self._backend.forward(x, geometry)

    def backward(self, x: Operands, given: Gradients, geometry: Geometry) -> tuple[Tensor, Tensor, Tensor]:
        time.sleep(0.002 * self._slow)
        return self._backend.backward(x, given, geometry)


class Dying(tiny.Silent):
    """Kills its process with SIGKILL behind a step."""

    def __init__(self, step: int | None) -> None:
        super().__init__()
        self._step = step

    def on_step(self, metrics: StepMetrics) -> None:
        if metrics.step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


def train_by_time(folder: Path, slow: str, die: int | None, version: str = "1") -> None:
    """Train, or resume, where the faster of two kernels is chosen; what was said goes to a file."""
    kernels = Timed("fused", TorchCpuFlash(), slow), Timed("tiled", TiledReference(), slow)
    attention_select.MEASURED = frozenset({"cpu"})
    attention_select.BACKENDS = (*kernels, TiledReference())
    here = attention_select.environment(tiny.CPU)
    engine_kernels.environment = lambda device: here | {"GPU": f"card {version}"}  # type: ignore[attr-defined]
    observer = Dying(die)
    resume = committed_step(folder) >= 0
    tiny.train_run(folder, observer, resume=resume, model=tiny.model(num_layers=1), train=tiny.training(steps=4))
    (folder / "said").write_text("\n".join(observer.messages))


def test_a_run_that_is_killed_goes_on_with_its_kernels_though_others_would_be_faster_now(tmp_path: Path) -> None:
    """Until the card is another one: then they are chosen anew, and the run says so."""
    straight, same, other = (tmp_path / name for name in ("straight", "same", "other"))
    assert run_child(train_by_time, straight, "tiled", None) == 0
    assert run_child(train_by_time, same, "tiled", 3) == -signal.SIGKILL
    assert 0 < committed_step(same) < 4
    shutil.copytree(same, other)
    assert run_child(train_by_time, same, "fused", None) == 0
    assert tiny.digest_of(same) == tiny.digest_of(straight)
    assert "chosen anew" not in (same / "said").read_text()
    assert run_child(train_by_time, other, "fused", None, "2") == 0
    assert tiny.digest_of(other) != tiny.digest_of(straight), "or any choice would do"
    (line,) = (line for line in (other / "said").read_text().splitlines() if "chosen anew" in line)
    assert "(GPU card 1, now card 2): kernels are chosen anew, and from here on results may differ" in line


def committed_step(folder: Path) -> int:
    """Step of the committed generation; -1 before the first."""
    if not (folder / "state" / "manifest.json").exists():
        return -1
    return int(Manifest.read(folder / "state").meta["step"])


def die_at(moment: int, during: Callable[..., Any], changing: tuple[str, ...] = CHANGING) -> Callable[..., Any]:
    """`during`, in which this process dies by SIGKILL before the call number `moment` that changes the disk.

    It leaves their number in the file "calls" where it lives through it.
    """

    def watched(*args: Any, **options: Any) -> Any:
        calls = 0

        def count(call: Callable[..., Any]) -> Callable[..., Any]:
            def counted(*args: Any, **options: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == moment:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*args, **options)

            return counted

        with pytest.MonkeyPatch.context() as patch:
            for name in changing:
                patch.setattr(os, name, count(getattr(os, name)))
            result = during(*args, **options)
        Path("calls").write_text(str(calls))
        return result

    return watched


def import_and_train(folder: Path, model: ModelConfig, moment: int, resume: bool) -> None:
    os.chdir(folder.parent)
    opening._fill_new = die_at(moment, opening._fill_new)
    opening._refuse_unless_exact = lambda *args: None  # takes seconds, and changes nothing on the disk
    train = tiny.training(steps=1, global_batch_size=1, chunk_tokens=48)
    tiny.train_run(folder, tiny.Silent(), model=model, resume=resume, train=train)


def export_to(out_dir: Path, folder: Path, model: ModelConfig, moment: int) -> None:
    os.chdir(folder.parent)
    weights.export_folder = die_at(moment, weights.export_folder)
    export(folder, tiny.recipe(model=model), out_dir=out_dir)


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.long
@pytest.mark.sampled
def test_a_killed_import_begins_again_and_a_killed_export_is_no_model(tmp_path: Path) -> None:
    source = tmp_path / "model"
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(model_config(tiny.recipe(), None)).save_pretrained(source)
    model, chance = ModelConfig(path=str(source)), random.Random(0)
    straight, whole = tmp_path / "straight", tmp_path / "whole"
    assert run_child(import_and_train, straight, model, 0, False) == 0
    calls = int((tmp_path / "calls").read_text())
    for number in range(FEW_KILLS):
        folder = tmp_path / f"run{number}"
        assert run_child(import_and_train, folder, model, chance.randint(1, calls), False) == -signal.SIGKILL
        assert run_child(import_and_train, folder, model, 0, number % 2 == 1) == 0
        assert tiny.digest_of(folder) == tiny.digest_of(straight)

    assert run_child(export_to, whole, straight, model, 0) == 0
    calls, expected = int((tmp_path / "calls").read_text()), content(whole)
    assert "config.json" in expected
    for number in range(FEW_KILLS):
        out = tmp_path / f"out{number}"
        assert run_child(export_to, out, straight, model, chance.randint(1, calls)) == -signal.SIGKILL
        left = content(out) if out.exists() else {}
        assert "config.json" not in left or left.items() >= expected.items()


def train_with_a_best_one(folder: Path, moment: int) -> None:
    """With patience, and losses of which the sixth is the lowest."""
    os.chdir(folder.parent)
    losses = {1: 5.0, 2: 4.0, 3: 4.5, 4: 3.0, 5: 3.5, 6: 2.0, 7: 2.5, 8: 2.5, 9: 2.0}
    real = validation.validate
    validation.validate = lambda session: dataclasses.replace(real(session), loss=losses[session.step])
    opening._refuse_unless_exact = lambda *args: None
    patience = {"validate_every": 1, "validation_sequences": 2, "early_stopping_patience": 3}
    result = die_at(moment, tiny.train_run, MOVING)(
        folder,
        tiny.Silent(),
        resume=(folder / "state" / "manifest.json").exists(),
        data=tiny.data(validation_documents=7),
        train=tiny.training(steps=20, global_batch_size=1, chunk_tokens=48, **patience),
        storage=tiny.storage(checkpoint_every=3, keep_good=2.0, keep_best=True),
    )
    assert (result.steps, result.early_end) == (9, EarlyEnd(3, 2.0, 6))


@pytest.mark.long
def test_kill_9_leaves_the_best_of_a_straight_run(tmp_path: Path) -> None:
    def left(folder: Path) -> tuple[list[str], str, str]:
        with closing(NvmeStore.open(checkpoint_folder(folder / "state", "best-000006"))) as best:
            return tiny.kept(folder), tiny.digest(best), tiny.digest_of(folder)

    assert run_child(train_with_a_best_one, tmp_path / "straight", 0) == 0
    expected, calls, chance = left(tmp_path / "straight"), int((tmp_path / "calls").read_text()), random.Random(7)
    died = 0
    for number in range(BEST_KILLS):
        folder = tmp_path / str(number)
        for most in (calls, calls // 2):
            died += run_child(train_with_a_best_one, folder, chance.randrange(1, most)) == -signal.SIGKILL
        assert run_child(train_with_a_best_one, folder, 0) == 0
        assert left(folder) == expected
    assert died >= BEST_KILLS


def failing(code: int, *functions: str) -> Patch:
    """From now on the system calls behind os.FUNCTION fail with `code`."""

    def fail(*args: Any) -> int:
        raise OSError(code, os.strerror(code))

    def strike(patch: pytest.MonkeyPatch, drive: Path) -> None:
        for function in functions:
            patch.setattr(os, function, fail)

    return strike


def drive_goes(patch: pytest.MonkeyPatch, drive: Path) -> None:
    """The drive's folder is not there any more, as after an unmount or a pulled plug."""
    drive.rename(drive.with_name("unmounted"))


FAULTS: dict[str, tuple[Patch, str]] = {
    "disk full": (failing(errno.ENOSPC, "pwritev", "pwrite"), "No space left on device.*free some"),
    "write error": (failing(errno.EIO, "pwritev", "pwrite"), "Input/output error"),
    "read error": (failing(errno.EIO, "preadv"), "reading .*Input/output error"),
    "sync error": (failing(errno.EIO, "fsync"), "Input/output error"),
    "drive gone": (drive_goes, "No such file or directory|missing|is it mounted"),
}


def open_run(folder: Path, gpu: str | int, ram: str | int) -> Session:
    s = tiny.storage(checkpoint_every=1)
    return tiny.session(folder, t=TRAINING, s=s, gpu=gpu, ram=ram, drives=[folder / "drive"])


def at_op(countdown: int, strike: Callable[[], None]) -> Callable[[Op], None]:
    """What is called as each op begins, and calls `strike` at the `countdown`th."""
    lock = threading.Lock()

    def watched(op: Op) -> None:
        nonlocal countdown
        with lock:
            countdown -= 1
            if countdown == 0:
                strike()

    return watched


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("straight")
    with open_run(folder, tiny.FLOOR, tiny.FLOOR) as session:
        tiny.steps(session)
        return tiny.digest(session.store)


CASES = [(name, placement) for name in FAULTS for placement in BUDGETS]


@pytest.mark.sampled
@pytest.mark.parametrize("case", cases(CASES, *CASES[0::4], *CASES[3::4]), ids=" ".join)
def test_a_failing_disk_loses_nothing(tmp_path: Path, straight: str, case: tuple[str, str]) -> None:
    (fault, message), placement = FAULTS[case[0]], BUDGETS[case[1]]
    chance = random.Random(" ".join(case))
    for number in range(MOMENTS):
        folder = tmp_path / str(number)
        with pytest.MonkeyPatch.context() as patch, open_run(folder, *placement) as session:
            drive = folder / "drive"
            moment = chance.randrange(1, 400)
            tiny.before_ops(session, at_op(moment, lambda patch=patch, drive=drive: fault(patch, drive)))  # type: ignore[misc]
            with pytest.raises(UserError, match=message) as failure:
                tiny.steps(session)
            before = session.store.generation
        assert str(folder) in str(failure.value), "the message names the file"
        if (folder / "unmounted").exists():
            with pytest.raises(UserError, match=rf"generation {before}.*mounted|mounted.*generation {before}"):
                open_run(folder, *placement)
            (folder / "unmounted").rename(folder / "drive")
        with open_run(folder, *placement) as session:
            assert session.store.generation >= before
            tiny.steps(session)
            assert tiny.digest(session.store) == straight


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own."""
    (folder := tmp_path / "drive").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root; the patched faults run anywhere")
@pytest.mark.parametrize("moment", [30, 200])
def test_a_disk_that_really_fills_up(tmp_path: Path, small_disk: Path, straight: str, moment: int) -> None:
    """Something else takes the last byte in the middle of a step, when activations and new slots still need room."""
    ballast = small_disk / "ballast"
    with open_run(tmp_path, tiny.FLOOR, tiny.FLOOR) as session:
        tiny.before_ops(session, at_op(moment, lambda: fill(ballast)))
        with pytest.raises(UserError, match=rf"{small_disk}.*No space left on device"):
            tiny.steps(session)
    ballast.unlink()
    with open_run(tmp_path, tiny.FLOOR, tiny.FLOOR) as session:
        tiny.steps(session)
        assert tiny.digest(session.store) == straight


def fill(path: Path) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    with suppress(OSError):
        while True:
            os.write(fd, bytes(1 << 16))
    os.close(fd)
    assert shutil.disk_usage(path).free == 0


def trained(folder: Path, observer: tiny.Silent, *, resume: bool = False) -> str:
    tiny.train_run(folder, observer, resume=resume, train=TRAINING)
    return tiny.digest_of(folder)


@pytest.mark.parametrize(("name", "moment"), [(name, 60 + 90 * i) for i, name in enumerate(SHORTAGES)])
def test_a_step_in_which_something_is_used_up(tmp_path: Path, straight: str, name: str, moment: int) -> None:
    cause, message = SHORTAGES[name]
    perform, watch = Runtime.perform, at_op(moment, cause)

    def short(self: Runtime, op: Op) -> Any:
        watch(op)
        return perform(self, op)

    observer, checked = tiny.Silent(), CheckResult("qwen3", True, 0.0, "loss", None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "check_model", lambda *model, **how: checked)  # whose ops are not counted
        patch.setattr(Runtime, "perform", short)
        with pytest.raises(UserError, match=rf"in op \w+ \S+ .*: {message}") as caught:
            trained(tmp_path, observer)
    intact = re.search(r"Generation \d+ \(step \d\) is intact: fix the cause, then resume", str(caught.value))
    assert (intact is not None) == bool(observer.metrics), "a run without a step has nothing to resume from"
    assert trained(tmp_path, tiny.Silent(), resume=True) == straight
