"""A training run from a recipe to committed generations; `train_step` is the whole of one optimizer step."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.engine import reference_logps, rollouts, samples, validation
from penstock.engine.attention.select import chosen, installed
from penstock.engine.config import Recipe
from penstock.engine.events import WARMUP_STEPS, Observer, StepMetrics
from penstock.engine.forecast.flops import model_flops
from penstock.engine.gains import EarlyEnd
from penstock.engine.joining import join_session
from penstock.engine.machine.device import memory_use
from penstock.engine.objectives.sequences import Found
from penstock.engine.opening import open_session
from penstock.engine.optim.lr import learning_rate
from penstock.engine.preparing import Checklist
from penstock.engine.progress import Live, memory_peaks
from penstock.engine.ranks.observing import agreed
from penstock.engine.ranks.ranks import ALONE, Ranks
from penstock.engine.runtime.failures import DivergedError, explain
from penstock.engine.schedule.ops import Op
from penstock.engine.schedule.passes import training
from penstock.engine.session import Session
from penstock.storage.files.errors import UserError
from penstock.storage.tier.filesystem import percentage_used

POLL_S = 0.2
"""Between two looks of a paused run at what is wanted of it."""


@dataclass(slots=True, kw_only=True)
class TrainResult:
    """What a run, or this process's part of it, came to; a run on several machines has no figures of one machine."""

    steps: int
    """Steps of the whole run so far."""
    steps_done: int = 0
    """Steps of this process."""
    tokens: int = 0
    first_loss: float | None = None
    last_loss: float | None = None
    tiers: dict[str, dict[str, int]] = field(default_factory=dict)
    """gpu, ram, nvme -> budget_bytes, peak_bytes."""
    lanes: dict[str, dict[str, float]] = field(default_factory=dict)
    """lane -> busy_s, bytes."""
    drives: list[dict[str, Any]] = field(default_factory=list)
    """Per drive: path, bytes_read, bytes_written, bytes_written_per_step, percentage_used (None where unknown)."""
    gpu_memory: dict[str, int] | None = None
    """The GPU allocator's peaks: allocated_bytes, reserved_bytes, fragmentation_bytes between them; None without
    GPU."""
    attention: dict[str, Any] = field(default_factory=dict)
    """installed: kernels for CUDA -> null, or why they are not there for this GPU, null without a GPU; chosen: forward,
    backward -> kernels that ran."""
    stopped: bool
    """Whether the observer asked to stop before the last step."""
    early_end: EarlyEnd | None
    """Why it ended before the recipe's last step (train.early_stopping_patience); None: it did not."""


def train_step(session: Session) -> StepMetrics:
    """One optimizer step: fetch, forward and backward, then loss and gradient norm; the update is applied block by
    block under the next step's forward, or by `Session.finish`."""
    started = time.perf_counter()
    data = session.next_batch()
    session.begin_step(data)
    step = session.step
    ops: list[Op] = []
    commit = session.commit_due(step - 1)
    pass_ = training(session.plan, step, **data.extent)
    for ops in session.builder.stream(pass_, commit_previous=commit):
        session.executor.submit(ops)
    session.prefetch()
    session.executor.wait(ops[-1].id)  # the one synchronisation point: loss and gradient norm are known
    if session.objective.whole_sequences and session.ranks.count > 1:
        data.found = Found.of(session.ranks.all_of(data.found))
        data.loss = data.found.loss
    step_s, tokens = time.perf_counter() - started, session.trained_tokens(data)
    session.observe(step, data.loss)
    session.look_for_spike()
    session.look_for_outgrown()
    nvme_read, nvme_written = session.take_traffic()
    return StepMetrics(
        step=step,
        loss=data.loss,
        grad_norm=data.grad_norm,
        lr=learning_rate(session.recipe.train, step),
        tokens=tokens,
        step_s=step_s,
        tokens_per_s=tokens / step_s,
        measured=data.known | data.found.metrics,
        model_flops=model_flops(
            session.spec,
            [n for m in data.whole for n in m.lengths],
            [each for m in data.whole for each in m.continued],
        ),
        nvme_read_bytes=nvme_read,
        nvme_written_bytes=nvme_written,
    )


def train(
    recipe: Recipe,
    *,
    run_dir: Path,
    observer: Observer,
    resume: bool,
    checkpoint: str | None = None,
    ranks: Ranks = ALONE,
) -> TrainResult:
    """Train as the recipe says and commit the end; with `resume` from the run directory's last generation, or that of
    `checkpoint`. Each of its `ranks` calls it, with its own observer. Raises UserError for what the user can mend,
    before the first step where it can be known then."""
    collects_garbage = gc.isenabled()
    observer = agreed(observer, ranks)
    if ranks.first:
        opened = open_session(
            recipe, run_dir=run_dir, observer=observer, resume=resume, checkpoint=checkpoint, ranks=ranks
        )
    else:
        opened = join_session(ranks, recipe, run_dir=run_dir, observer=observer)
    with opened as session:
        try:
            result = _run(session, observer)
        except DivergedError as error:
            session.executor.close()  # a commit on its way ends first
            session.look_at_failure()
            _report_spikes(session, observer)
            if not (resume or session.steps_reported):
                raise
            raise DivergedError(
                f"{error}. {session.way_back()}, with a lower train.lr or more train.warmup_steps"
            ) from error
        except Exception as error:
            reason = error if isinstance(error, UserError) else explain(error, session.executor.failed_op, session.plan)
            if reason is None:
                raise
            session.executor.close()  # a commit on its way ends first
            if not (resume or session.steps_reported):
                raise UserError(str(reason)) from error
            store, step = session.store, session.store.meta["step"]
            raise UserError(
                f"{str(reason).rstrip('.?')}. Generation {store.generation} (step {step}) is intact: fix the cause, "
                "then resume"
            ) from error
        finally:
            gc.unfreeze()
            if collects_garbage:
                gc.enable()
        result.gpu_memory = memory_use(session.device)
        if result.gpu_memory is not None:
            observer.on_message(
                "GPU memory: {allocated_bytes:,} bytes in tensors at most, {reserved_bytes:,} held for them; "
                "{fragmentation_bytes:,} lost to fragmentation".format(**result.gpu_memory),
                detail=True,
            )
        idle = session.runtime.idle
        if idle is not None and (share := idle.share_used) is not None:
            observer.on_message(
                f"experts: {share:.1%} of their groups were needed in a step; nothing of the others was moved"
            )
        result.drives = _drives(session, result.steps_done)
    return result


def _run(session: Session, observer: Observer) -> TrainResult:
    """Step until the recipe's last step or until the observer asks to stop; then commit."""
    steps: list[StepMetrics] = []
    checklist, device = Checklist(observer), session.device
    with Live(session, observer) as live:
        ready = reference_logps.complete(session, observer)
        while ready and session.step < session.recipe.train.steps and _goes_on(session, observer):
            with checklist.step("validation", when=not steps and validation.due(session)):
                _validate(session, observer)
            with checklist.step("samples", when=not steps and samples.due(session)):
                _sample(session, observer)
            if session.early_end is not None:
                break
            if session.lacks_completions:
                with checklist.step("first completions", when=not steps):
                    rollouts.sample(session, observer)
            with checklist.step("first step", when=not steps):
                metrics = train_step(session)
            live.report()
            metrics.time, metrics.tier_bytes = time.time(), live.tier_bytes()
            metrics.warmup = len(steps) < WARMUP_STEPS
            observer.on_step(metrics)
            _report_spikes(session, observer)
            session.steps_reported += 1
            steps.append(metrics)
            if len(steps) == 1:
                # Everything long-lived exists now. From here on garbage is looked for once a step (Session.prefetch).
                gc.freeze()
                gc.disable()
            for message in session.take_notes():
                observer.on_message(message)
            for name in observer.checkpoint_requests():
                session.request_checkpoint(name)
            _report_checkpoints(session, observer)
        if session.step == session.recipe.train.steps:
            _validate(session, observer)
            _sample(session, observer)
        session.finish()
    _report_checkpoints(session, observer)
    if session.uploads is not None:
        session.uploads.finish(observer.on_message)
    early_end = session.early_end if session.step < session.recipe.train.steps else None
    if early_end is not None:
        observer.on_message(early_end.words(session.step))
    return TrainResult(
        steps=session.step,
        steps_done=len(steps),
        tokens=sum(m.tokens for m in steps),
        first_loss=steps[0].loss if steps else None,
        last_loss=steps[-1].loss if steps else None,
        tiers=_tiers(session, live.tier_bytes()),
        lanes=live.lanes,
        attention={"installed": installed(device) if device.type == "cuda" else None, "chosen": chosen(device.type)},
        stopped=not session.is_over,
        early_end=early_end,
    )


def _validate(session: Session, observer: Observer) -> None:
    """Make a validation of the step that has ended, if it is due; right before the next step, so that a stop
    or a pause does not wait for it."""
    if validation.due(session):
        metrics = validation.validate(session)
        observer.on_validation(metrics)
        session.take_validation(metrics)
        _report_checkpoints(session, observer)


def _sample(session: Session, observer: Observer) -> None:
    """Write samples with the weights of the step that has ended, if they are due: when a validation would be made."""
    if samples.due(session):
        observer.on_sample(samples.write(session))


def _goes_on(session: Session, observer: Observer) -> bool:
    """Whether another step is wanted; returns only then where the observer wants a pause, with the step committed."""
    want = observer.wanted()
    if want == "pause":
        session.finish()
        _report_checkpoints(session, observer)
        observer.on_pause(True)
        with session.executor.clock_stopped():
            while (want := observer.wanted()) == "pause":
                for name in observer.checkpoint_requests():
                    session.checkpoint_now(name)
                _report_checkpoints(session, observer)
                time.sleep(POLL_S)
        if want == "run":
            observer.on_pause(False)
    return want == "run"


def _report_spikes(session: Session, observer: Observer) -> None:
    while session.spikes:
        observer.on_spike(session.spikes.popleft())


def _report_checkpoints(session: Session, observer: Observer) -> None:
    while session.checkpoints:
        observer.on_checkpoint(*session.checkpoints.popleft())


def _drives(session: Session, steps: int) -> list[dict[str, Any]]:
    """What the steps of this process moved to and from each drive, and the drive's own word on its wear."""
    return [
        {
            "path": str(folder),
            "bytes_read": traffic.bytes_read,
            "bytes_written": traffic.bytes_written,
            "bytes_written_per_step": traffic.bytes_written / steps if steps else None,
            "percentage_used": percentage_used(folder),
        }
        for folder, traffic in session.traffic().items()
    ]


def _tiers(session: Session, reported: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """What the tiers hold now, or what was reported of them if that was more: a drive may have held a commit then."""
    now = memory_peaks(session) | {"nvme": session.store.peak_disk_bytes()}
    peaks = {tier: max(now[tier], reported[tier]) for tier in now}
    budgets = session.plan.to_json()["tiers"]
    return {tier: {"budget_bytes": budgets[tier]["budget_bytes"], "peak_bytes": peaks[tier]} for tier in peaks}
