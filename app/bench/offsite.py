"""`penstock bench offsite`: the time of a step with an upload beside it, and without, in one run.

One small run on the CPU steps on and on. Rounds of steps take turns: alone; beside an upload that is limited to a
network's rate; beside one that takes what the drive gives. An upload is that of `storage.offsite`, a process of its own
that sends a checkpoint to a folder, and it is under way for all of a round: where one ends, the next begins.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.app.bench.process import scratch, show
from penstock.app.console.working import Working
from penstock.engine.config import BudgetConfig, DataConfig, ModelConfig, Recipe, StorageConfig, TrainConfig
from penstock.engine.events import Observer, Want
from penstock.engine.opening import open_session
from penstock.engine.session import Session
from penstock.engine.train import train_step
from penstock.storage.files.units import bytes_text
from penstock.storage.offsite.index import Claim
from penstock.storage.offsite.link import PlaceLink
from penstock.storage.offsite.place import parse_place
from penstock.storage.offsite.send import send_checkpoint

WARMUP_STEPS = 3
_NAME = "sent"
WAYS = ("alone", "limited", "unlimited")


class _Nobody(Observer):
    """Observes nothing."""

    def wanted(self) -> Want:
        return "run"


def bench_offsite(
    *,
    rounds: int = 5,
    steps: int = 8,
    bytes_per_s: int = 50_000_000,
    on_drive: bool = False,
    layers: int = 4,
    hidden: int = 512,
    folder: Path | None = None,
    json: bool = False,
) -> dict[str, Any]:
    """Time `rounds` times `steps` steps of each of WAYS, in turn; print the ratios, or JSON with `json`.

    `bytes_per_s`: of the limited upload. `on_drive`: the run's state lives on the drive that the upload reads from, not
    in memory. `folder`: where the run and the place it uploads to are made. Returns, for each way, the median step time
    WAY_step_s, all of them, and the bytes that moved meanwhile; `limited_ratio` and `unlimited_ratio` are over `alone`,
    the median of the rounds.
    """
    times: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    moved = dict.fromkeys(WAYS, 0)
    with scratch(folder) as path, Working() as shown:
        recipe = _recipe(layers, hidden, on_drive=on_drive)
        observer = _Nobody()  # type: ignore[abstract]  # what it does not define does nothing
        with open_session(recipe, run_dir=Path(path, "run"), observer=observer, resume=False) as session:
            with shown.step("preparing"):
                for _ in range(WARMUP_STEPS):
                    train_step(session)
                session.finish()
                session.store.checkpoint(_NAME)
            state_bytes = session.store.disk_bytes() // 2
            for number in range(rounds):
                for way in (*WAYS[number % 3 :], *WAYS[: number % 3]):
                    rate = float(bytes_per_s) if way == "limited" else None
                    about = f"round {number + 1} of {rounds}: {steps} steps, upload {way}"
                    uploading = _uploading(session, Path(path), rate if way != "alone" else 0.0)
                    with shown.step(about), uploading as upload:
                        times[way].append([train_step(session).step_s for _ in range(steps)])
                    moved[way] += upload.moved
    medians = {way: [statistics.median(of_round) for of_round in found] for way, found in times.items()}
    ratios = {
        f"{way}_ratio": statistics.median(b / a for a, b in zip(medians["alone"], medians[way], strict=True))
        for way in WAYS[1:]
    }
    report = {
        **ratios,
        "parameters": session.spec.num_params,
        "state_bytes": state_bytes,
        "bytes_per_s": bytes_per_s,
        "state_on_drive": on_drive,
        "rounds": rounds,
        **{f"{way}_step_s": statistics.median(found) for way, found in medians.items()},
        **{f"{way}_steps_s": found for way, found in times.items()},
        **{f"{way}_moved_bytes": size for way, size in moved.items()},
    }
    line = (
        f"a step takes {report['alone_step_s']:.3f} s alone; x {ratios['limited_ratio']:.3f} beside an upload of at "
        f"most {bytes_text(bytes_per_s)}/s, x {ratios['unlimited_ratio']:.3f} beside one without a limit (state "
        f"{'on the drive' if on_drive else 'in memory'}, {bytes_text(state_bytes)} of it)"
    )
    show(report, line, as_json=json)
    return report


class _Upload:
    """Uploads of one checkpoint, one after the other, until it is told to end."""

    def __init__(self, session: Session, folder: Path, bytes_per_s: float | None) -> None:
        self.moved = 0
        self._session, self._rate, self._ends = session, bytes_per_s, False
        self._link = PlaceLink(parse_place(str(folder / "place"), "--folder"))
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

    def _told(self, moved: int) -> None:
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
                    told=self._told,
                )
            except Exception:
                if not self._ends:
                    raise


class _Nothing:
    moved = 0


@contextmanager
def _uploading(session: Session, folder: Path, bytes_per_s: float | None) -> Iterator[_Upload | _Nothing]:
    """Uploads for as long as the block runs; none where `bytes_per_s` is 0."""
    if bytes_per_s == 0:
        yield _Nothing()
        return
    with _Upload(session, folder, bytes_per_s) as upload:
        yield upload


def _recipe(layers: int, hidden: int, *, on_drive: bool) -> Recipe:
    return Recipe(
        name="bench",
        model=ModelConfig(
            model_type="qwen3",
            num_layers=layers,
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_heads=hidden // 64,
            num_kv_heads=hidden // 64,
            head_dim=64,
            vocab_size=4096,
        ),
        data=DataConfig(source="random", sequence_length=256),
        train=TrainConfig(
            steps=10**6,
            global_batch_size=2,
            chunk_tokens=256,
            lr=1e-5,
            compute_dtype="float32",
            compile="off",
            calibrate=False,
            device="cpu",
        ),
        budgets=BudgetConfig(gpu="160MiB" if on_drive else "2GiB", ram="192MiB" if on_drive else "2GiB"),
        storage=StorageConfig(checkpoint_every=10**6, keep_good=None, part_bytes="8MiB"),
    )
