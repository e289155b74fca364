"""What a missing wait changes: scenarios.py NAME FOLDER EXPECTED SEEDS prints what each seed's delays made of one.

It stops at the first result that is not EXPECTED (an empty text: any is). Results are texts: a digest, tokens, or what
was raised. Each is the work of a process of its own, which test_waits.py lets find a package without one wait.
"""

from __future__ import annotations

import functools
import gc
import random
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import adapted
import pytest
import some_ops
import standin
import tiny
import torch
from computes import emulator
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.engine import session as session_module
from penstock.engine.config import SamplesConfig
from penstock.engine.forecast import query
from penstock.engine.generate.decode import Decoding
from penstock.engine.opened_model import OpenedModel
from penstock.engine.optim.lr import on_device
from penstock.engine.runtime.executor import GPU_LANES, Executor
from penstock.engine.samples import write
from penstock.engine.schedule.action import LANES
from penstock.engine.schedule.ops import Op
from penstock.engine.train import train_step
from penstock.engine.validation import validate
from penstock.storage.tier import arena as arena_module
from penstock.storage.tier.arena import HostArena, pinned_empty
from penstock.storage.tier.readers import select_readers

CUDA = torch.device("cuda", 0)
DELAY_US, COPY_US = 400, 20_000
PLANS: list[dict[str, Any]] = [
    {"gpu": tiny.FLOOR, "ram": tiny.FLOOR},
    {"gpu": 1_100_000, "ram": 750_000},
    {"gpu": tiny.FLOOR, "ram": "1GiB", "group": 1, "offloaded_graphs": "all"},
    {"gpu": "1GiB", "ram": "1GiB"},
]


def _settings(**changes: Any) -> Any:
    return tiny.training(steps=3, deterministic=True, validation_sequences=2, validate_every=3, **changes)


def resident(folder: Path, seed: int) -> str:
    """Steps with everything on the GPU, where few copies are left and all of them may come very late."""
    with emulator.delays(seed, DELAY_US, 20 * COPY_US if seed else 0):
        settings = _settings(warmup_steps=3)  # another learning rate at each step
        with tiny.session(folder / str(seed), t=settings, device=CUDA) as session:
            metrics = [train_step(session) for _ in range(3)]
            session.finish()
            return f"{tiny.digest(session.store)[:16]} {[(m.loss, m.grad_norm) for m in metrics]}"


def scalars(folder: Path, seed: int) -> str:
    """Values on their way to the GPU behind a slow kernel, and the next that are pinned."""
    del folder
    values = torch.arange(8.0) + seed
    torch.cuda._sleep(int(3e8))
    there = on_device(values, CUDA)
    for _ in range(4):
        pinned_empty(8, torch.float32).fill_(-1)
    torch.cuda.synchronize()
    return f"copied: {torch.equal(there.cpu(), values)}"


def ops(folder: Path, seed: int) -> str:
    """Ops of all lanes that add up what they depend on, in memory of the GPU and of the host: which sums are wrong."""
    del folder
    chance, count = random.Random(seed), 120
    there = torch.zeros(count, dtype=torch.float64, device=CUDA)
    here = torch.zeros(count, dtype=torch.float64, pin_memory=True)
    arrived = torch.zeros(count, dtype=torch.float64, device=CUDA)
    torch.cuda.synchronize()

    def perform(op: Op) -> None:
        if op.lane not in GPU_LANES:
            here[op.index] = op.index + float(sum(here[dep] for dep in op.deps)) % 1e6
            return
        there[op.index] = op.index
        for dep in op.deps:
            if lanes[dep] not in GPU_LANES:
                arrived[op.index].copy_(here[dep], non_blocking=True)
            there[op.index].add_(there[dep] if lanes[dep] in GPU_LANES else arrived[op.index])
        there[op.index].sub_(op.index).remainder_(1e6).add_(op.index)
        here[op.index].copy_(there[op.index], non_blocking=True)

    lanes = [chance.choice(LANES) for _ in range(count)]
    deps = [chance.sample(range(max(0, n - 9), n), min(n, 3)) for n in range(count)]
    made = [some_ops.an_op(n, lanes[n], *deps[n], index=n) for n in range(count)]
    right: list[float] = []
    for op in made:
        right.append(op.index + sum(right[dep] for dep in op.deps) % 1e6)
    executor, wrong = Executor(perform, CUDA), []
    for first in range(0, count, 30):
        executor.submit(made[first : first + 30])
        last = max(op.id for op in made[: first + 30] if op.lane in GPU_LANES)
        executor.wait(last)
        wrong += [f"{last} at once"] if float(here[last]) != right[last] else []
    executor.drain()
    wrong += [str(n) for n in range(count) if float(here[n]) != right[n]]
    executor.close()
    return f"wrong: {' '.join(wrong) or 'none'}"


def resume(folder: Path, seed: int) -> str:
    """A step from a state that is read into RAM and onto the GPU: its digest."""
    made = folder / "made"
    frozen = _settings(freeze=["*layers.0.*"])
    found = []
    for number, t in enumerate((_settings(), frozen)):
        for gpu, ram in (("1GiB", "1GiB"), (1_100_000, 750_000), (tiny.FLOOR, tiny.FLOOR)):
            where = made / str(number)
            # Weights come through stages, whether or not kvikio is installed.
            sections = {"t": t, "gpu": gpu, "ram": ram, "device": CUDA, "device_reads": False}
            with tiny.session(where, **sections) as session:
                found.append(str([train_step(session).loss for _ in range(2)]))
    return " ".join(found)


def drain(folder: Path, seed: int) -> str:
    """What an op on a slow stream leaves to whoever drains the lanes once all ops have been issued."""
    del folder, seed
    here, there = torch.zeros(1, pin_memory=True), torch.ones(1, device=CUDA)

    def perform(op: Op) -> None:
        if op.lane == "d2h":
            torch.cuda._sleep(int(3e8))
            here.copy_(there, non_blocking=True)

    executor = Executor(perform, CUDA)
    executor.submit([some_ops.an_op(0, "d2h"), some_ops.an_op(1, "compute")])
    while any(ticket.event is None for ticket in executor._tickets.values()):
        time.sleep(0.001)
    executor.drain()
    found = float(here)
    executor.close()
    return f"copied: {found}"


def begin(folder: Path, seed: int) -> str:
    """Steps of a session whose own stream is still behind with what it prepared when the lanes begin."""
    late = functools.partial(_late, session_module.Runtime)
    found = []
    for number, plan in enumerate(PLANS):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(session_module, "Runtime", late)
            t = _settings(activation_checkpointing="auto", chunk_tokens=7)
            sections = plan | {"t": t, "d": tiny.data(validation_documents=4)}
            with tiny.session(folder / f"{seed}-{number}", **sections, device=CUDA) as session:
                found.append(f"{train_step(session).loss} {validate(session).loss} {train_step(session).grad_norm}")
    return " ".join(found)


def _late(make: Callable[..., Any], *arguments: Any) -> Any:
    torch.cuda._sleep(int(1e9))
    return make(*arguments)


def close(folder: Path, seed: int) -> str:
    """A session without pinned memory that is closed while a kernel has yet to write, and who has its memory then."""
    with standin.setting("STANDIN_REGISTER", 0, after=1):
        with tiny.session(folder / str(seed), gpu=tiny.FLOOR, t=_settings(), device=CUDA) as session:
            train_step(session)
            session.executor.drain()
            slots = session.gpu.slots["gpu.hidden"][:1]
            size = slots[0].nbytes

            def write() -> None:
                torch.cuda._sleep(int(3e9))
                slots[0].fill_(7)

            session.executor.call("compute", write)
        slots.clear()
        del session
        gc.collect()
        others = [torch.zeros(size, dtype=torch.uint8, device=CUDA) for _ in range((8 << 20) // size)]
        torch.cuda.synchronize()
        return f"whole: {not any(bool(other.any()) for other in others)}"


def unpinned(folder: Path, seed: int) -> str:
    """Copies through the ring of an arena that the driver does not pin, each piece many times."""
    nbytes = 40 * 4096
    with pytest.MonkeyPatch.context() as patch, standin.setting("STANDIN_REGISTER", 0, after=1):
        patch.setattr(arena_module, "RING_PIECE_BYTES", 4096)
        arena = HostArena(2 * nbytes, budget_bytes=2 * nbytes)
        here, back = arena.slot("here", nbytes), arena.slot("back", nbytes)
        here.copy_(torch.arange(nbytes, dtype=torch.int64).remainder(251 + seed % 4).byte())
        arena.pin()
        there = torch.zeros(nbytes, dtype=torch.uint8, device=CUDA)
        for _ in range(3):
            back.zero_()
            there.zero_()
            arena.copy(there, here)
            arena.copy(back, there)
        right = torch.equal(here, back)
        torch.cuda.synchronize()
        arena.close()
    return f"copied: {right}"


def samples(folder: Path, seed: int) -> str:
    """What a run writes between two steps."""
    prompts = SamplesConfig(every=1, prompts=["the mill", "a"], tokens=4)
    text = folder / "a.txt"
    text.write_text("the mill turns the stone and the stone turns a wheel of the mill\n" * 300)
    data = tiny.data(source="text", path=str(text), tokenizer_vocab_size=300, max_documents=None)
    sections: dict[str, Any] = {"samples": prompts, "d": data, "m": tiny.model(vocab_size=None), "gpu": tiny.FLOOR}
    sections |= {"t": tiny.training(steps=3, deterministic=True)}
    with tiny.session(folder / str(seed), **sections, ram=tiny.FLOOR, device=CUDA) as session:
        if seed:
            tiny.delay(session, random.Random(seed))
        texts = []
        for _ in range(2):
            train_step(session)
            texts.append(str([sample.text for sample in write(session).samples]))
        return " ".join(texts)


@functools.cache
def _model(folder: Path) -> Path:
    """A small model; planned from now on as if nothing else took memory, which is more than all of it."""
    query.temporaries_bytes = lambda *given, **named: 0
    query.CHUNKS = (3,)  # type: ignore[assignment]
    sizes: dict[str, Any] = adapted.SIZES | {"num_hidden_layers": 5, "vocab_size": 211, "pad_token_id": 0}
    config = AutoConfig.for_model("qwen3", **sizes, bos_token_id=None, eos_token_id=None)
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(3) if parameter.dim() > 1 else None
    made.save_pretrained(folder / "model")
    return folder / "model"


def generate(folder: Path, seed: int) -> str:
    """Tokens of a model whose weights pass through the GPU: from RAM, from disk, from both, and from the GPU itself."""
    path, found = _model(folder), []
    prompts = [[5, 9, 2, 44, 7], [3], [7, 7, 9, 12, 100, 4, 8]]
    for gpu, ram in BUDGETS:
        with OpenedModel.open(path, gpu_bytes=gpu, ram_bytes=ram, device="cuda", dtype="float32") as model:
            for _ in range(2):
                found.append(str([one.ids for one in model.generate(prompts, Decoding(new_tokens=4))]))
    return " ".join(found)


def from_disk(folder: Path, seed: int) -> str:
    """Tokens of a model that is read from disk again and again, while copies to the GPU come very late."""
    path, found = _model(folder), []
    with OpenedModel.open(path, gpu_bytes=330_000, ram_bytes=300_000, device="cuda", dtype="float32") as model:
        with emulator.delays(seed, 0, 20 * COPY_US if seed else 0):
            for _ in range(3):
                found.append(str([one.ids for one in model.generate([[5, 9, 2]], Decoding(new_tokens=2))]))
        weights = model.estimate(3, 1, 2).weights
    assert weights["disk"] > weights["gpu"] + weights["ram"], weights
    return " ".join(found)


BUDGETS = [(1 << 30, 1 << 30), (330_000, 1 << 30), (330_000, 320_000), (500_000, 300_000)]


def choose(folder: Path, seed: int) -> str:
    """Which readers a probe of this folder finds."""
    torch.cuda._sleep(int(3e8) if seed else 0)
    readers = select_readers("auto", CUDA, [folder])
    return f"{readers.device and readers.device.name} {readers.warning}"


SCENARIOS: dict[str, Callable[[Path, int], str]] = {
    scenario.__name__: scenario
    for scenario in (
        ops,
        drain,
        scalars,
        resident,
        begin,
        resume,
        close,
        unpinned,
        samples,
        generate,
        from_disk,
        choose,
    )
}


def main(name: str, folder: str, expected: str, seeds: str) -> None:
    standin.name_threads()
    for seed in range(int(seeds)):
        try:
            with emulator.delays(seed, *((DELAY_US, COPY_US) if seed else (0, 0))), emulator.races() as races:
                found = SCENARIOS[name](Path(folder), seed)
            if races:
                found += f" unordered: {races}"
        except Exception as error:
            found = f"{type(error).__name__}: {error}".replace("\n", " ")
            traceback.print_exc()
        print(f"{seed}\t{found}", flush=True)
        if expected and found != expected:
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
