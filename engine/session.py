"""A session: a model, its state on all tiers and its lanes, opened from a recipe and ready to step."""

from __future__ import annotations

import gc
import math
import platform
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from penstock.engine.config import SAMPLED, Recipe, config_digest, given_fields
from penstock.engine.data.documents import step_documents
from penstock.engine.data.loader import DataLoader, ValidationSet
from penstock.engine.data.text.tokenizer import TextTokenizer
from penstock.engine.events import Spike, ValidationMetrics, step_name
from penstock.engine.forecast.problem import LOGITS_BYTES
from penstock.engine.gains import EarlyEnd, Gains
from penstock.engine.generate.prompts import Prompts, find_stops
from penstock.engine.machine.limits import give_back_memory
from penstock.engine.machine.reservations import Reservation
from penstock.engine.model.spec import ModelSpec
from penstock.engine.model.tokens import MicroBatch
from penstock.engine.objectives.base import find_objective
from penstock.engine.plan.plan import Plan
from penstock.engine.plan.problem import LAST_GOOD
from penstock.engine.preparing import Checklist
from penstock.engine.ranks.memory import shared_arena
from penstock.engine.ranks.ranks import ALONE, Ranks
from penstock.engine.rewards.rewards import Rewards
from penstock.engine.runtime.batch import BatchCarrier, StepData
from penstock.engine.runtime.compute import Compute
from penstock.engine.runtime.exchange import KINDS, TABLES, Committing, Exchange
from penstock.engine.runtime.executor import GPU_LANES
from penstock.engine.runtime.failures import explain
from penstock.engine.runtime.guard import MemoryGuard
from penstock.engine.runtime.handlers import Skipped
from penstock.engine.runtime.health import LossSpikes, LossWatch
from penstock.engine.runtime.lanes import Lanes
from penstock.engine.runtime.memory import GpuMemory, RamMemory, allocate_gpu, allocate_ram, shared_slots
from penstock.engine.runtime.past import StateReader
from penstock.engine.runtime.runtime import Runtime
from penstock.engine.runtime.state import load_memory, scratch_arrays
from penstock.engine.schedule.builder import ScheduleBuilder
from penstock.engine.schedule.ops import Op
from penstock.engine.uploads import Uploads
from penstock.engine.vision import Vision
from penstock.storage.files.errors import UserError, ensure
from penstock.storage.files.units import bytes_text
from penstock.storage.generations.checkpoints import BEST, read_checkpoint, resolve_checkpoint
from penstock.storage.generations.retention import Retention
from penstock.storage.generations.store import NvmeStore
from penstock.storage.tier.arena import HostArena
from penstock.storage.tier.drives import Traffic
from penstock.storage.tier.shared import Counters


class Session:
    """Close it, or use it as a context manager."""

    def __init__(
        self,
        *,
        spec: ModelSpec,
        plan: Plan,
        store: NvmeStore,
        loader: DataLoader,
        compute: Compute,
        recipe: Recipe,
        device: torch.device,
        identity: dict[str, Any],
        lanes: Lanes,
        validation: ValidationSet | None = None,
        prompts: Prompts | None = None,
        tokenizer: TextTokenizer | None = None,
        checklist: Checklist | None = None,
        reservation: Reservation | None = None,
        uploads: Uploads | None = None,
        vision: Vision | None = None,
        rewards: Rewards | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """`lanes`, `reservation`, `uploads` and `rewards` are closed with the session; whoever gets an error here
        closes them. `ranks`: each has a session of the same plan."""
        checklist, plan = checklist or Checklist(), plan.of_rank(ranks.rank)
        self.spec, self.plan, self.store, self.loader, self.recipe = spec, plan, store, loader, recipe
        self.validation, self.prompts, self.device, self.ranks = validation, prompts, device, ranks
        train = recipe.train
        self._identity = identity | {
            "plan": {
                "chunk_tokens": plan.problem.chunk_tokens,
                "compiled": compute.runner.compiled,
                "optimizer_mode": compute.optimizer.mode,
                **asdict(plan.choice),
            }
        }
        self.step = int(store.meta["step"])
        self.tokens = int(store.meta["tokens"])
        self.steps_reported = 0
        """Steps that have ended in this process, and the observer knows of."""
        self.resumed = self.step > 0
        self._next: StepData | None = None
        self._records: dict[int, dict[str, Any]] = {}
        """What the generations of the steps since the last commit would record."""
        self._requested: dict[int, list[str]] = {}
        """Step -> names of checkpoints to make of its generation."""
        self.checkpoints: deque[tuple[str, int, str | None]] = deque()
        """(name asked for, step, why not) of checkpoints asked for, as they are made."""
        # Losses of completions that were sampled are around 0 and say nothing of the weights.
        multiple = None if recipe.train.objective in SAMPLED else recipe.storage.keep_good
        self._watch = LossWatch(multiple, store.meta.get("loss_mean"))
        self._loss_was_good = True
        self._spikes = LossSpikes(store.meta.get("losses"))
        self.tokenizer, self.rewards = tokenizer, rewards
        self.stop_ids = frozenset[int]() if tokenizer is None else find_stops(recipe, spec, tokenizer)
        self._data: StepData | None = None
        self.spikes: deque[Spike] = deque()
        self._gains = Gains.of(store.meta.get("validation"))
        self.remeasures = False
        """Whether the step that this process began with is that of the checkpoint best: its validation, which its
        generation cannot tell, is made again, due or not."""
        self.notes: list[str] = []
        """What is to be reported of the steps so far; whoever reports it empties the list."""
        self._outgrown_reported = False
        self._moved: torch.Tensor | None = None
        """int64 [ranks, drives, 2]: bytes read and written; None: there is one rank."""
        self._proved: set[int] = set()
        """Steps of generations, committed or about to be, whose following step had a good loss."""
        if recipe.storage.keep_best:
            self._look_at_best()
        self._retention = Retention(
            store,
            checkpoint_every=recipe.storage.checkpoint_every,
            keep_last=recipe.storage.keep_last,
            keep_every=recipe.storage.keep_every,
            keep_good=recipe.storage.keep_good is not None,
            fits_good=LAST_GOOD in plan.tiers["nvme"].parts,
            report=lambda *checkpoint: self.checkpoints.append(checkpoint),
        )
        loader.seek(store.meta["cursor"])
        self.settings, self.executor = lanes.settings, lanes.executor
        self._lanes, self._reservation, self.uploads, self._vision = lanes, reservation, uploads, vision
        self.carrier = BatchCarrier(plan, device, compiled=compute.runner.compiled)
        with checklist.step("allocating memory"):
            give_back_memory()  # what compiling and timing the ops left
            store.add_scratch(scratch_arrays(plan))
            store.reserve_spill(plan.spill_bytes * ranks.count)
            try:
                self.gpu: GpuMemory = allocate_gpu(plan, device)
            except torch.OutOfMemoryError as error:
                raise explain(error, None, plan) or error from error
            counters: Counters | None = None
            shared: HostArena | None = None
            tables: dict[str, torch.Tensor] = {}
            of_chunks: Counters | None = None
            if ranks.count > 1:
                own = {"counters": 8 * len(KINDS) * ranks.count, "checksums": 16 * store.num_parts()}
                own |= {"chunks": 8 * ranks.count * len(plan.chunks)} if plan.choice.spread else {}
                own["traffic"] = 16 * ranks.count * len(store.drives)
                balance = compute.runner.layers.balance
                numbers = 0 if balance is None else balance.counts.numel(), plan.problem.micro_batches
                sizes = {name: 8 * ranks.count * wide for name, wide in zip(TABLES, numbers, strict=True) if wide}
                own |= sizes
                shared = shared_arena(ranks, own | shared_slots(plan))
                counters = Counters(shared.slot("counters", own["counters"]), ranks.check)
                if "chunks" in own:
                    of_chunks = Counters(shared.slot("chunks", own["chunks"]), ranks.check)
                checksums = shared.slot("checksums", own["checksums"]).view(torch.int64).view(2, -1)
                moved = shared.slot("traffic", own["traffic"]).view(torch.int64)
                self._moved = moved.view(ranks.count, len(store.drives), 2)
                for table, nbytes in sizes.items():  # in one order on all ranks
                    tables[table] = shared.slot(table, nbytes).view(torch.float64).view(ranks.count, -1)
            self.ram: RamMemory = allocate_ram(plan, shared)
            self.exchange = Exchange(plan, self.ram, counters, tables, self.executor.note_wait, of_chunks)
            if ranks.count > 1:
                store.share(Committing(self.exchange), checksums)
        if device.type == "cuda":
            near_gpu = nullcontext() if lanes.placement is None else lanes.placement.near_gpu()  # it touches all pages
            with checklist.step(f"pinning {self.ram.arena.used_bytes / 1e9:.3g} GB"), near_gpu:
                self.ram.arena.pin(on_progress=lambda done, total: checklist.progress(done / total))
                if shared is not None:
                    shared.pin(on_progress=lambda done, total: checklist.progress(done / total))
        if vision is not None:
            with checklist.step("loading the vision tower"):
                vision.open(device, compute.runner.dtype)
        with checklist.step("filling the tiers"):
            past = StateReader(store, spec, train).catch_up(plan.lazy)
            load_memory(store, plan, self.gpu, self.ram)
            ranks.meet()  # weights that others have read are there as well
        work = plan, compute.runner, compute.optimizer, store, self.gpu, self.ram
        self.objective = find_objective(recipe)
        self.runtime = Runtime(*work, train, LOGITS_BYTES[device.type], self._commit, self.objective, self.exchange)
        if self.runtime.idle is not None:
            self.runtime.idle.resume(self.step, past)
        self.builder = ScheduleBuilder(plan, behind_at=self.step if past.as_of else None)
        on_host = ("ram", "gpu") if device.type == "cpu" else ("ram",)
        guard = MemoryGuard(plan, sum(plan.tiers[tier].peak_bytes for tier in on_host))
        streams = GPU_LANES if device.type == "cuda" else frozenset[str]()

        def perform(op: Op) -> Future[Any] | Skipped | None:
            if op.lane not in streams:  # a look takes milliseconds, in which the GPU would wait for work
                guard.check(op)
            return self.runtime.perform(op)

        self.executor.attach(perform)
        self._traffic = self._traffic_before = self._all_traffic()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the lanes and free the memory; what was not committed is lost."""
        self.executor.close()  # before the memory that its ops use
        if self.uploads is not None:
            self.uploads.close(began=self.resumed or self.steps_reported > 0)
        self.store.close()
        self.ram.close()
        self._lanes.close()
        if self._reservation is not None:
            self._reservation.release()
        if self.rewards is not None:
            self.rewards.close()

    # ------------------------------------------------------------------ batches

    def fetch(self) -> StepData:
        known = dict(self.loader.measured)
        whole = self.loader.next_step()
        own = [whole[self.plan.in_step(i)] for i in range(self.plan.problem.micro_batches)]
        alone = len(own) == len(whole)
        return self.carrier.step(self.look(own), self.loader.cursor, known, None if alone else whole)

    def look(self, micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """The micro-batches with what there is of their images; the tower's work is done on the compute lane."""
        if self._vision is None:
            return micro_batches
        return self._vision.look(micro_batches, partial(self.executor.call, "compute"))

    def next_batch(self) -> StepData:
        """The batch of the step about to run, fetched while the step before ran."""
        data, self._next = self._next or self.fetch(), None
        return data

    @property
    def lacks_completions(self) -> bool:
        """Whether completions have to be sampled before there is a batch for another step."""
        return self._next is None and not self.loader.ready

    def prefetch(self) -> None:
        """Fetch the next step's batch, and look for garbage if Python does not: the main thread has time now."""
        if not gc.isenabled():
            gc.collect()
        if self._next is None and self.loader.ready and self.step < self.recipe.train.steps:
            self._next = self.fetch()

    # ------------------------------------------------------------------ generations

    def request_checkpoint(self, name: str) -> None:
        """Make a checkpoint of the step that has just ended, with the commit that this calls for."""
        self._requested.setdefault(self.step, []).append(name)

    def commit_due(self, step: int) -> bool:
        """Whether the generation after `step` is committed as the run goes on."""
        if self.recipe.storage.offsite is not None and self.ranks.of_first(lambda: self._upload_due(step)):
            return True
        return step > 0 and (step % self.recipe.storage.checkpoint_every == 0 or step in self._requested)

    def _upload_due(self, step: int) -> bool:
        return self.uploads is not None and self.uploads.due(step)

    def trained_tokens(self, data: StepData) -> int:
        """Tokens that a step trains on: those that carry a loss, but all of a reward model, where a text has one."""
        if self.objective.reward_model:
            return sum(n for stream in data.whole for n in stream.lengths)
        return data.num_trained

    def begin_step(self, data: StepData) -> None:
        self.step += 1
        self.tokens += self.trained_tokens(data)
        meta = run_meta(self.step, self.tokens, data.cursor, self._identity)
        if self.recipe.train.validate_every is not None:
            meta["validation"] = self._gains.to_json()
        self._records[self.step] = meta
        if not self.ranks.first:  # the first one commits them
            self._records = {self.step: meta}
        self._data = data
        self.remeasures = False
        self.runtime.begin(self.step, data)

    def _commit(self, step: int) -> None:
        """Commit the generation of `step` and make the checkpoints due; on the lane that writes to NVMe, maybe some
        steps behind the main thread."""
        if not self.ranks.first:
            self.store.commit({})
            return
        self._retention.before_commit(proved=int(self.store.meta["step"]) in self._proved)
        idle = self.runtime.idle
        self.store.commit(self._records[step] | ({} if idle is None else idle.record(step)))
        if idle is not None:
            idle.committed()
        for old in [other for other in list(self._records) if other <= step]:
            del self._records[old]
        for name in self._requested.pop(step, []):
            self.checkpoints.append((name, step, self._retention.checkpoint(step_name(name, step))))
        self._retention.after_commit(step)
        if self.uploads is not None:
            self.uploads.committed(step)

    def observe(self, step: int, loss: float) -> None:
        """Take the loss of a step that has ended: it says whether the generation before it is good."""
        before = self._loss_was_good
        good = self._loss_was_good = self._watch.is_good(loss)
        if before and not good:
            self.notes.append(
                f"step {step}: the loss, {loss:.4g}, is more than {self.recipe.storage.keep_good} times its running "
                "mean (storage.keep_good): no generation counts as good while it is. To go back: "
                "penstock resume RUN --checkpoint last-good, with a lower train.lr"
            )
        self._records[step]["loss_mean"] = self._watch.mean
        due = self.commit_due(step - 1)  # looked at before what it becomes
        committed = int(self.store.meta["step"])
        if good and (due or step - 1 == committed):
            self._proved = {step - 1, *(other for other in self._proved if other >= committed)}

    def _look_at_best(self) -> None:
        """What the checkpoint best, if there is one, means for a run that goes on from this step."""
        if not BEST.names(self.store.root):
            return
        try:
            name = resolve_checkpoint(self.store.root, "best")
            step = read_checkpoint(self.store.root, name).step or 0
        except UserError as error:
            self.notes.append(f"the checkpoint best cannot be read: {error}")
            return
        self.remeasures = step == self.step
        if step > self.step:
            self.notes.append(
                f"checkpoint {name} is of a step that is being repeated; the next best generation replaces it"
            )

    def take_notes(self) -> list[str]:
        """What is to be reported of the steps so far, once each."""
        notes = [*self._lanes.fallbacks.take(), *self.notes, *(self.uploads.take_messages() if self.uploads else [])]
        self.notes.clear()
        return notes

    def look_for_outgrown(self) -> None:
        """Tell, once, of saved graphs that were larger than planned."""
        outgrown = self.runtime.layer_ops.outgrown
        if outgrown and not self._outgrown_reported:
            self._outgrown_reported = True
            (block, chunk), nbytes = max(outgrown.items(), key=lambda result: result[1])
            self.notes.append(
                f"{len(outgrown):,} saved graphs are larger than planned (the largest: {block}, chunk {chunk}, "
                f"{bytes_text(nbytes)}), so backward recomputes these layers"
            )

    def look_for_spike(self) -> None:
        """Take the loss of the step that has ended: a spike is reported, with the step's documents."""
        data = self._data
        if data is None or not data.num_targets:
            return
        expected = self._spikes.expected
        if self._spikes.take(data.loss):
            self.spikes.append(self._spike(data, expected))
        self._records[self.step]["losses"] = self._spikes.to_json()

    def look_at_failure(self) -> None:
        """Where the step that was under way has a value that is not finite, its documents are reported."""
        data = self._data
        if data is not None and data.chunk_losses and math.isnan(data.loss):
            with suppress(UserError):  # what ends the run is reported, not what else is wrong
                self.spikes.append(self._spike(data, self._spikes.expected))

    def _spike(self, data: StepData, expected: float | None) -> Spike:
        documents, count = step_documents(
            self.loader.corpus, self.tokenizer, data.micro_batches, data.cut, data.chunk_losses
        )
        return Spike(
            step=self.step,
            loss=data.loss,
            expected=expected,
            documents=documents,
            num_documents=count,
            time=time.time(),
        )

    def take_validation(self, metrics: ValidationMetrics) -> None:
        """Take the validation loss or reward of the step that has ended; the best so far makes its generation the best
        one. A generation records what was known when its step began: a run resumed from it measures that again."""
        self.remeasures = False
        rises = metrics.loss is None
        measured_on = self.recipe.prompts_per_validation if rises else metrics.tokens
        gained = self._gains.take(metrics.step, metrics.value, measured_on, rises=rises)
        if gained and self.recipe.storage.keep_best:
            self.finish()
            if self.ranks.first:
                self._retention.keep_best()

    @property
    def early_end(self) -> EarlyEnd | None:
        """Why the run ends after this step (train.early_stopping_patience); None: it does not."""
        return self._gains.exhausted(self.recipe.train.early_stopping_patience)

    @property
    def is_over(self) -> bool:
        """Whether this is the run's last step."""
        return self.step == self.recipe.train.steps or self.early_end is not None

    def way_back(self) -> str:
        """What a run that has diverged can be resumed from, in words."""
        step = int(self.store.meta["step"])
        last = f"Generation {self.store.generation} (step {step}) is committed"
        if step in self._proved:
            return f"{last}, and the step after it had a normal loss: resume from it"
        try:
            name = resolve_checkpoint(self.store.root, "last-good")
        except UserError:
            return f"{last}, which no later step has confirmed as good, and no earlier good one is kept: resume from it"
        meta = read_checkpoint(self.store.root, name).meta
        return (
            f"{last}, which no later step has confirmed as good; the last good one is of step {meta['step']}: resume "
            "with --checkpoint last-good"
        )

    def checkpoint_now(self, name: str) -> None:
        """Make a checkpoint of the committed generation of this step; only between `finish` and the next step."""
        ensure(not self.builder.uncommitted, "the step is not committed")
        if not self.ranks.first:
            return
        self.checkpoints.append((name, self.step, self._retention.checkpoint(step_name(name, self.step))))

    def finish(self) -> None:
        """Apply the gradient that still waits, commit the generation, and wait for all of it; at the end of any step.
        Where the run is over, its last generation is uploaded, due or not."""
        if self.builder.uncommitted:
            self.executor.submit(self.builder.finish(commit=True))
        self.executor.drain()
        self._all_traffic()
        self.ranks.meet()
        if self.uploads is not None and self.is_over:
            self.uploads.ended(self.step)

    # ------------------------------------------------------------------ drives

    def traffic(self) -> dict[Path, Traffic]:
        """Bytes moved to and from each drive since the session was opened and its memory filled."""
        before, now = self._traffic_before, self._all_traffic()
        return {folder: now[folder] - before.get(folder, Traffic()) for folder in now}

    def _all_traffic(self) -> dict[Path, Traffic]:
        """Of all ranks, as far as they have said so: after each step."""
        own, moved = self.store.traffic(), self._moved
        if moved is None:
            return own
        folders = self.store.drives
        for number, folder in enumerate(folders):
            moved[self.ranks.rank, number] = torch.tensor([own[folder].bytes_read, own[folder].bytes_written])
        return own | {folder: Traffic(*of_all) for folder, of_all in zip(folders, moved.sum(0).tolist(), strict=True)}

    def take_traffic(self) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes read from and written to each drive folder since the last call."""
        before, self._traffic = self._traffic, self._all_traffic()
        moved = {str(folder): now - before.get(folder, Traffic()) for folder, now in self._traffic.items()}
        return {f: t.bytes_read for f, t in moved.items()}, {f: t.bytes_written for f, t in moved.items()}


def run_identity(recipe: Recipe) -> dict[str, Any]:
    """What a generation records of where it comes from, beside its step. Seeds and data cursor are the whole random
    state, as training itself draws no random numbers."""
    return {
        "recipe": config_digest(recipe),
        "fields": given_fields(recipe),
        "rng": {"train.seed": recipe.train.seed, "data.seed": recipe.data.seed},
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }


def run_meta(step: int, tokens: int, cursor: dict[str, Any], identity: dict[str, Any]) -> dict[str, Any]:
    """The manifest's record of a run at the end of `step`."""
    return {"step": step, "tokens": tokens, "cursor": cursor, **identity}
