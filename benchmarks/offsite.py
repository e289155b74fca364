"""The time of a step with an upload beside it, and without, in one run: docs/results/offsite.md.

One small run on the CPU steps on and on. Rounds of steps take turns: alone; beside an upload that is limited to a
network's rate; beside one that takes what the drive gives. An upload is that of `storage.offsite`, a process of its own
that sends a checkpoint to a folder, and it is under way for all of a round: where one ends, the next begins.
"""

from __future__ import annotations

import statistics
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.parts.cases import shape
from benchmarks.parts.session import NOBODY
from benchmarks.parts.setup import random_model
from penstock.app.bench.process import scratch, show
from penstock.app.console.working import Working
from penstock.engine.config import (
    BudgetConfig,
    Recipe,
    StorageConfig,
    parse_bytes,
)
from penstock.engine.opening import open_session
from penstock.engine.session import Session
from penstock.engine.train import train_step
from penstock.storage.files.units import bytes_text
from penstock.storage.offsite.index import Claim
from penstock.storage.offsite.link import Link
from penstock.storage.offsite.location import parse_location
from penstock.storage.offsite.send import send_checkpoint

WARMUP_STEPS = 3
_NAME = "sent"
WAYS = ("alone", "limited", "unlimited")


def main(
    rounds: int = 5,
    steps: int = 8,
    rate: str = "50MB",
    on_drive: bool = False,
    layers: int = 4,
    hidden: int = 512,
    folder: Path | None = None,
    json: bool = False,
) -> dict[str, Any]:
    """Time --rounds times --steps steps of each of WAYS, in turn; print the ratios, medians of the rounds.

    --rate: bytes a second of the limited upload. --on-drive: the run's state lives on the drive that the upload reads
    from, not in memory. --folder: where the run and the place it uploads to are made.
    """
    bytes_per_s = parse_bytes(rate, "--rate")
    times: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    moved = dict.fromkeys(WAYS, 0)
    with scratch(folder) as path, Working() as shown:
        recipe = _recipe(layers, hidden, on_drive=on_drive)
        with open_session(recipe, run_dir=Path(path, "run"), observer=NOBODY, resume=False) as session:
            with shown.step("preparing"):
                for _ in range(WARMUP_STEPS):
                    train_step(session)
                session.finish()
                session.store.checkpoint(_NAME)
            state_bytes = session.store.disk_bytes() // 2
            for number in range(rounds):
                for way in (*WAYS[number % 3 :], *WAYS[: number % 3]):
                    rate_s = float(bytes_per_s) if way == "limited" else None
                    upload = None if way == "alone" else _Upload(session, Path(path), rate_s)
                    about = f"round {number + 1} of {rounds}: {steps} steps, upload {way}"
                    with shown.step(about), upload or nullcontext():
                        times[way].append([train_step(session).step_s for _ in range(steps)])
                    moved[way] += upload.moved if upload else 0
    medians = {way: [statistics.median(of_round) for of_round in result] for way, result in times.items()}
    ratios = {
        way: statistics.median(b / a for a, b in zip(medians["alone"], medians[way], strict=True)) for way in WAYS[1:]
    }
    step_s = {way: statistics.median(result) for way, result in medians.items()}
    report = {
        "ratios": ratios,
        "parameters": session.spec.num_params,
        "state_bytes": state_bytes,
        "step_s": step_s,
        "steps_s": times,
        "moved_bytes": moved,
    }
    line = (
        f"a step takes {step_s['alone']:.3f} s alone; x {ratios['limited']:.3f} beside an upload of at "
        f"most {bytes_text(bytes_per_s)}/s, x {ratios['unlimited']:.3f} beside one without a limit (state "
        f"{'on the drive' if on_drive else 'in memory'}, {bytes_text(state_bytes)} of it)"
    )
    show(report, line, as_json=json)
    return report


class _Upload:
    """Uploads of one checkpoint, one after the other, until it has to end."""

    def __init__(self, session: Session, folder: Path, bytes_per_s: float | None) -> None:
        self.moved = 0
        self._session, self._rate, self._ends = session, bytes_per_s, False
        self._link = Link(parse_location(str(folder / "place"), "--folder"))
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._work, name="upload", daemon=True)

    def __enter__(self) -> _Upload:
        self._thread.start()
        self._begun.wait(60.0)  # what is timed is beside bytes that move
        return self

    def __exit__(self, *exc: object) -> None:
        self._ends = True
        self._link.close()
        self._thread.join()

    def _moved(self, moved: int) -> None:
        self.moved += moved
        if moved:
            self._begun.set()

    def _work(self) -> None:
        store, number = self._session.store, 0
        while not self._ends:
            claim, number = Claim(self._link, store.root, store.id, "bench"), number + 1
            try:
                send_checkpoint(
                    claim,
                    store.root,
                    store.drives,
                    _NAME,
                    {},
                    name=f"{_NAME}-{number % 2}-{id(self)}",
                    automatic=True,
                    keep=1,
                    bytes_per_s=self._rate,
                    report=self._moved,
                )
            except Exception:
                if not self._ends:
                    raise


def _recipe(layers: int, hidden: int, *, on_drive: bool) -> Recipe:
    model = shape("qwen3", layers, hidden, 3 * hidden, (hidden // 64, hidden // 64), 64, 4096)
    train: dict[str, Any] = {"compute_dtype": "float32", "compile": "off", "calibrate": False, "device": "cpu"}
    recipe, _ = random_model(model, 256, 100, steps=10**6, global_batch_size=2, chunk_tokens=256, **train)
    return replace(
        recipe,
        budgets=BudgetConfig(gpu="160MiB" if on_drive else "2GiB", ram="192MiB" if on_drive else "2GiB"),
        storage=StorageConfig(checkpoint_every=10**6, keep_good=None, part_bytes="8MiB"),
    )
