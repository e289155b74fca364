"""Runs a recipe in this process: the run directory around it, signals, the terminal, what happens afterwards."""

from __future__ import annotations

import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console

from penstock.app.console.loading import loading
from penstock.app.console.printing import short_path
from penstock.app.console.working import working
from penstock.app.launch.callbacks import CallbackError, Callbacks
from penstock.app.launch.progress import Display, StepLanes, item_line, plan_line, summary_lines
from penstock.app.launch.signals import StopRequested, StopSignals
from penstock.app.runs import control, samples_view
from penstock.app.runs.checkpoints import CheckpointRequests, committed_step, export_folder
from penstock.app.runs.directory import RunDir, read_info
from penstock.app.runs.early_end import nothing_left
from penstock.app.runs.files import JsonLines, json_text, number, whole
from penstock.app.runs.log import Level, RunLog
from penstock.app.runs.measured import add_first_and_last, measured_text
from penstock.app.runs.model_card import write_card
from penstock.app.runs.recall_view import RecallMap, recall_of
from penstock.app.runs.speed import MeanSpeed
from penstock.app.trackers.attach import Trackers
from penstock.app.trackers.require import require_trackers
from penstock.engine.config import AfterConfig, Recipe, dcp_folders, drive_folders, parse_bytes
from penstock.engine.events import (
    Preparing,
    Progress,
    SampleMetrics,
    Span,
    Spike,
    StepMetrics,
    ValidationMetrics,
    Want,
    step_name,
)
from penstock.engine.preparing import Checklist
from penstock.storage.files import child
from penstock.storage.files.disk import atomic_write
from penstock.storage.files.errors import UserError, not_ours
from penstock.storage.files.untrusted import shell

if TYPE_CHECKING:
    from penstock.engine.train import TrainResult

_LAST_STEPS = 5


class RunObserver:
    """Passes the engine's events to the run's log and to the terminal, and what is wanted of the run to the engine."""

    def __init__(self, run: RunDir, step: int, console: Console, guest: Callbacks | None = None) -> None:
        """`step`: the last one that has ended; `guest`: of a run in somebody else's program."""
        self.signals = StopSignals(self._on_first_signal, self._on_abort if guest is None else None)
        self._callbacks = guest or Callbacks()
        self._run = run
        self._requests = CheckpointRequests(run.path)
        self.log = RunLog(run.path, run.recipe.train.steps, step)
        self.display = Display(console, run.recipe.train.steps, step)
        self._began = time.perf_counter()
        self._stepped = False
        self._first_s: float | None = None
        self._last_s = 0.0
        self._step_spans = StepLanes()
        self.trackers = Trackers(run.path, run.recipe.trackers, self.report)

    @property
    def wall_s(self) -> float:
        """Seconds from the first span's start to the last span's end in this process."""
        return self._last_s - self._first_s if self._first_s is not None else 0.0

    def on_prepare(self, item: Preparing) -> None:
        self.log.prepare(item)
        if item.state == "done":
            self.log.message(item_line(item))
        self.display.prepare(item)
        if item.state == "begun" and self._callbacks.stopping and not self._stepped:
            raise StopRequested

    def on_plan(self, plan: dict[str, Any], predicted: list[Span]) -> None:
        self.signals.interrupts_main = False
        self._run.write_plan(plan, predicted)
        self.report(plan_line(plan))
        self.log.watch_drives(drive_folders(self._run.path, self._run.recipe.storage))
        self.on_begin()

    def on_begin(self) -> None:
        """All is prepared: the first step comes next."""
        self.signals.interrupts_main = False
        self._run.save_recipe()
        self.log.set_state("running")
        self.trackers.begin()

    def on_progress(self, progress: Progress) -> None:
        self.log.progress(progress)
        for span in progress.spans:
            self._first_s = span.start_s if self._first_s is None else min(self._first_s, span.start_s)
            self._last_s = max(self._last_s, span.end_s)
            self._step_spans.add(span)

    def on_step(self, metrics: StepMetrics) -> None:
        if not self._stepped:
            self._stepped = True
            text = f"the first step ended {time.perf_counter() - self._began:.1f} s after the start"
            self.log.message(text)
            self.display.detail(text)
        mean = self.log.step(metrics)
        self.display.step(metrics, self._step_spans.busiest(), mean.tokens_per_s)
        self._step_spans = StepLanes()
        self._callbacks.call(self._callbacks.on_step, metrics)

    def on_validation(self, metrics: ValidationMetrics) -> None:
        self.log.validation(metrics)
        more = f"  {measured_text(metrics.measured)}".rstrip()
        loss = "" if metrics.loss is None else f" loss {metrics.loss:.4f}"
        self.log.message(f"step {metrics.step}: validation{loss}{more} ({metrics.seconds:.1f} s)")
        self.display.validation(metrics)
        self._callbacks.call(self._callbacks.on_validation, metrics)

    def on_sample(self, metrics: SampleMetrics) -> None:
        self.log.samples(metrics)
        for sample in metrics.samples:
            self.log.message(samples_view.sample_text(metrics.step, sample))
        for line in samples_view.console_lines(metrics):
            self.display.message(line)
        self._callbacks.call(self._callbacks.on_sample, metrics)

    def on_spike(self, spike: Spike) -> None:
        self.log.spike(spike)
        self.report(spike.words(), "warning")

    def on_message(self, text: str, *, detail: bool = False) -> None:
        self.log.message(text)
        if not detail:
            self.display.message(text)

    def report(self, text: str, level: Level = "info") -> None:
        self.log.message(text, level)
        self.display.message(text)

    def _on_first_signal(self, number: int) -> None:
        self._callbacks.signal = number
        self.report("stopping after this step is committed; a second signal aborts at once")

    def _on_abort(self) -> None:
        self.log.set_state("stopped")
        self.display.abandon()
        print("aborted; the last committed generation is intact", file=sys.stderr, flush=True)

    def checkpoint_requests(self) -> list[str]:
        return self._requests.take()

    def on_checkpoint(self, name: str, step: int, error: str | None) -> None:
        unreported = self._requests.answer(name, step, error)
        if unreported is not None:
            self.report(unreported, "warning")
        if error is None:
            self.report(f"checkpoint {step_name(name, step)}: step {step}")
        else:
            self.report(f"no checkpoint {step_name(name, step)}: {error}", "warning")

    def wanted(self) -> Want:
        if self.signals.requested.is_set() or self._callbacks.stopping:
            return "stop"
        return control.wanted(self._run.path)

    def train(
        self, work: Callable[[], tuple[TrainResult, str]], said: Sequence[str], again: str
    ) -> tuple[TrainResult, str, dict[str, Any]] | None:
        """Train by `work`, which returns how it ended, also in words; these and summary.json, None where no step began.
        `again`: how to go on; `said`: of the recipe. Errors leave state `failed` and are raised again."""
        path = self._run.path
        for line in (f"run directory {short_path(path)}", *said):
            self.report(line)
        with self.signals:
            try:
                result, ended = work()
                self.log.message(ended)
                self.log.flush()
                self.log.check()
                summary, last_losses, warnings = summary_of(path, result)
                atomic_write(path / "summary.json", json_text(summary, indent=2))
                self.close("stopped" if result.stopped else "finished")
            except StopRequested:
                self.report(f"stopped before the first step; {again}")
                self.close("stopped")
                return None
            except KeyboardInterrupt:
                self.log.message("interrupted; the last committed generation is intact")
                self.close("stopped")
                raise
            except CallbackError as failed:
                self.log.message(failed.text(), "error")
                self.close("failed", f"a callback raised {type(failed.error).__name__}: {failed.error}")
                failed.error.add_note(f"the generation of step {committed_step(path) or 0:,} is intact; {again}")
                raise failed.error from failed.error.__cause__
            except BaseException as error:
                self.fail(error)
                raise
            finally:
                self.display.close()
        if self.log.dropped_spans:
            self.display.message(f"{self.log.dropped_spans:,} spans were dropped because the disk was too slow")
        for line in (*warnings, *summary_lines(summary, last_losses, self.wall_s)):
            self.display.message(line)
        return result, ended, summary

    def fail(self, error: BaseException) -> None:
        """Say what has ended the run: a message for the user, or where it was."""
        known = error if isinstance(error, UserError) else not_ours(error)
        self.log.message(str(known) if known else traceback.format_exc(), "error")
        self.close("failed", str(known) if known else f"{type(error).__name__}: {error}")

    def close(self, state: Literal["finished", "stopped", "failed"], error: str | None = None) -> None:
        """Tell the run's end, once the trackers have been given what is in its files."""
        self.log.flush()
        self.trackers.finish(state)
        self.log.close(state, error)

    def on_pause(self, paused: bool) -> None:
        self.log.set_state("paused" if paused else "running")
        self.report("paused; the step is committed" if paused else "continuing")


def run_training(
    run: RunDir,
    *,
    resume: bool,
    checkpoint: str | None = None,
    guest: Callbacks | None = None,
    said: Sequence[str] = (),
) -> None:
    """Train the run's recipe to its end, or until a signal stops it; then export and sample as the recipe says.

    A resumed run goes on from its last generation, or from that of `checkpoint`. `guest`: somebody else's program, in
    which the run is; without it, the process is the run's own. `said`: what to report about the recipe. Errors leave
    state `failed` behind and are raised again.
    """
    recipe = run.recipe
    info = read_info(run.path)
    step = info.step if resume else 0
    if checkpoint is not None:
        from penstock.storage.generations.checkpoints import read_checkpoint

        step = read_checkpoint(run.path / "state", checkpoint).step or 0
    elif resume and info.state == "finished":
        if step >= recipe.train.steps:
            raise UserError(f"{run.path}: has finished its {info.total_steps} steps; there is nothing to resume")
        if (why := nothing_left(run.path, step, recipe.train.early_stopping_patience)) is not None:
            raise UserError(why)
    if checkpoint is None:
        _require_newest(run.path)
    require_trackers(recipe.trackers)
    control.forget(run.path)
    observer = RunObserver(run, step, Console() if guest is None else guest.console(), guest)
    display = observer.display
    again = f"continue with: {shell('penstock', 'resume', run.path)}"

    def work() -> tuple[TrainResult, str]:
        result = _train(run, observer, resume, checkpoint)
        stopped = f"stopped after step {result.steps}; {again}"
        return result, stopped if result.stopped else f"finished after step {result.steps}"

    if (trained := observer.train(work, said, again)) is None:
        return
    result, ended, summary = trained
    display.recall([RecallMap(**one) for one in summary.get("recall", [])])
    if result.stopped:
        display.message(ended)
        return
    if recipe.after.export:
        folder = export_folder(run.path, result.steps)
        with working(f"exporting to {short_path(folder)}"):
            exported = export_run(run.path, recipe, folder)
        for line in exported:
            display.message(line)
        if recipe.after.sample_prompt is not None:
            most = recipe.after.sample_tokens
            with working("writing a sample with plain transformers"):
                text = sample_text(folder, recipe.after.sample_prompt, most, recipe.model.path)
            display.message(f"sample, at most {most} tokens by transformers after the prompt: {text!r}")
        if recipe.data.source == "needles":
            from penstock.app.sampling.haystack import haystack_line

            with working("testing retrieval with plain transformers"):
                line = haystack_line(folder, recipe.data.sequence_length, recipe.data.seed, recipe.model.path)
            display.message(line)
    look = shell("penstock", "watch", short_path(run.path))
    display.message(
        f"look closer with: {look}; all figures and messages are in its summary.json, metrics.jsonl and log.jsonl"
    )


def _require_newest(path: Path) -> None:
    """UserError where the run has gone on on several machines since its last generation."""
    folders = dcp_folders(path)
    newest = max(folders, default=0)
    if newest > (committed_step(path) or 0):
        folder = folders[newest]
        raise UserError(
            f"{path}: was continued on several machines, up to step {newest:,}; turn that into a run with "
            f"`{shell('penstock', 'import-dcp', folder, '--run-dir', 'DIR')}` and resume it, or continue there with "
            "penstock cluster"
        )


def _train(run: RunDir, observer: RunObserver, resume: bool, checkpoint: str | None) -> TrainResult:
    recipe, path = run.recipe, run.path
    from penstock.engine.data.corpus.prepare import cancel_text_ahead, prepare_text_ahead

    try:
        with Checklist(observer).step("loading PyTorch"):
            own = recipe.model.path is None and recipe.data.tokenizer is None and not recipe.model.added_tokens
            if own and recipe.data.source != "random":
                prepare_text_ahead(recipe.data, path / "data")
            if recipe.train.compile != "off":
                from penstock.engine.machine.compilers import compile_headers

                compile_headers()
            with loading():
                from penstock.engine.ranks.count import rank_count, with_replicas
                from penstock.engine.ranks.processes import Processes
                from penstock.engine.train import train

        count, visible = rank_count(recipe)
        if count == 1:
            return train(recipe, run_dir=path, observer=observer, resume=resume, checkpoint=checkpoint)
        recipe = run.recipe = with_replicas(recipe, count)
        observer.on_message(f"{count} {'GPUs' if visible else 'processes on the CPU'} train this run together")
        with Processes(child.command("app.launch.rank"), count, visible) as ranks:
            ranks.tell(("train", (recipe, path, resume)))
            return train(recipe, run_dir=path, observer=observer, resume=resume, checkpoint=checkpoint, ranks=ranks)
    finally:
        cancel_text_ahead()


def summary_of(path: Path, result: TrainResult) -> tuple[dict[str, Any], list[float], list[str]]:
    """summary.json, of the whole run, resumed or not; the losses of the last steps; what to say of damaged lines."""
    log = JsonLines(path / "metrics.jsonl")
    losses, tokens, steps_s, last_step, mean = [], 0, [], None, MeanSpeed()
    measured: dict[str, dict[str, float]] = {}
    for line in log.steps():
        last_step = line["step"]
        mean.add(line)
        tokens += whole(line.get("tokens")) or 0
        if (loss := number(line.get("loss"))) is not None:
            losses.append(loss)
        if (step_s := number(line.get("step_s"))) is not None:
            steps_s.append(step_s)
        add_first_and_last(measured, line)
    validation, validated, maps, damaged = _validation(path)
    samples, damaged_samples = samples_view.first_and_last(path)
    summary = {
        "steps": result.steps if last_step is None else last_step,
        "tokens": tokens,
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
        "validation_loss": validation,
        **({"measured": measured} if measured else {}),
        **({"validation_measured": validated} if validated else {}),
        **({"recall": [found._asdict() for found in maps]} if maps else {}),
        **({} if samples is None else {"samples": samples}),
        **mean.fields(),
        "step_s_median": statistics.median(steps_s) if steps_s else None,
        "tiers": result.tiers,
        "lanes": result.lanes,
        "drives": result.drives,
        "gpu_memory": result.gpu_memory,
        "attention": result.attention,
        "ended_early": None if result.early_end is None else result.early_end._asdict(),
    }
    warnings = [f"warning: {text}" for text in (log.warning(), damaged, damaged_samples) if text is not None]
    return summary, losses[-_LAST_STEPS:], warnings


def _validation(
    path: Path,
) -> tuple[dict[str, Any] | None, dict[str, dict[str, float]], list[RecallMap], str | None]:
    """The last and the best validation loss, None where none was measured; the first and the last of what else was
    measured, and of the maps of recall; what to say of damaged lines."""
    lines = JsonLines(path / "validation.jsonl")
    result: list[tuple[float, int]] = []
    maps: list[RecallMap] = []
    measured: dict[str, dict[str, float]] = {}
    for line in lines.steps():
        add_first_and_last(measured, line)
        if (loss := number(line.get("loss"))) is not None:
            result.append((loss, line["step"]))
        if (recall := recall_of(line)) is not None:
            maps = [*maps[:1], recall]
    if not result:
        return None, measured, [], lines.warning()
    best, best_step = min(result)
    return {"last": result[-1][0], "best": best, "best_step": best_step}, measured, maps, lines.warning()


def export_run(
    path: Path, recipe: Recipe, folder: Path, checkpoint: str | None = None, after: AfterConfig | None = None
) -> list[str]:
    """Write a run's last committed generation, or a checkpoint's, as a Hugging Face folder with a model card; what to
    say.

    `after`: dtype, shards, merging and pushing, in place of the recipe's. Nobody else may be working on the run, unless
    it is a checkpoint's. Raises UserError when `folder` already holds something.
    """
    after = after or recipe.after
    require_new_folder(folder)
    if after.push is not None:
        from penstock.app.hub.push import require_push

        require_push(after.push)
    with loading():
        from penstock.engine.export import export

    size = parse_bytes(after.export_shard, "after.export_shard")
    done = export(
        path,
        recipe,
        out_dir=folder,
        checkpoint=checkpoint,
        dtype=after.export_dtype,
        max_shard_bytes=size,
        merged=after.export_merged,
    )
    write_card(folder, path, recipe, done)
    said = [*done.remarks, f"exported to {short_path(folder)}"]
    if after.push is not None:
        from penstock.app.hub.push import push_folder

        said.append(push_folder(folder, after.push))
    return said


def require_new_folder(folder: Path) -> None:
    """Raise UserError when `folder` already holds something."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: exists and is not empty; choose another folder for the export")


def sample_text(folder: Path, prompt: str, num_tokens: int, base: str | None = None) -> str:
    """`prompt` and at most `num_tokens` more by plain transformers from a model folder, or an adapter's with its
    `base`. The draw is seeded (temperature 0.7, the 40 likeliest): most likely are newlines after minutes of
    training."""
    import torch

    from penstock.app.sampling.exported import load_exported

    tokenizer, model = load_exported(folder, base)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    torch.manual_seed(0)
    with torch.no_grad():
        ids = model.generate(
            **inputs,
            max_new_tokens=num_tokens,
            do_sample=True,
            temperature=0.7,
            top_k=40,
            pad_token_id=tokenizer.eos_token_id,
        )
    return str(tokenizer.decode(ids[0], skip_special_tokens=True))
