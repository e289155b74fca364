"""A run on several machines, from a recipe or from where it was, to its last step, with torch's own checkpoints."""

from __future__ import annotations

import math
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from penstock.engine.cluster import layout
from penstock.engine.cluster.check import choose_attention
from penstock.engine.cluster.context import NAME as GATHERED
from penstock.engine.cluster.context import Context
from penstock.engine.cluster.convert import write_dcp
from penstock.engine.cluster.model import Sharded, make_sharded, rounded_alike
from penstock.engine.cluster.ranks import Ranks
from penstock.engine.cluster.step import Share, train_step, validate
from penstock.engine.config import Recipe, changed_fields, dcp_folder, dcp_folders, state_folder, whole_document_notes
from penstock.engine.data.corpus.files import TokenCorpus
from penstock.engine.data.loader import DataLoader, ValidationSet
from penstock.engine.data.loading import make_loader, make_validation
from penstock.engine.events import WARMUP_STEPS, Observer, StepMetrics
from penstock.engine.forecast.cluster import require_whole
from penstock.engine.forecast.flops import model_flops
from penstock.engine.gains import EarlyEnd, Gains
from penstock.engine.hf.config import require_overrides
from penstock.engine.machine.device import compute_dtype, resolve_device
from penstock.engine.machine.precision import with_compute_dtype
from penstock.engine.opening import first_values
from penstock.engine.optim.base import find_optimizer
from penstock.engine.optim.lr import learning_rate
from penstock.engine.preparing import Checklist
from penstock.engine.run_files import with_saved_inputs
from penstock.engine.run_model import adapter_start, describe_run
from penstock.engine.runtime.failures import DivergedError
from penstock.engine.session import run_identity, run_meta
from penstock.storage.files.errors import UserError
from penstock.storage.tier.manifest import Manifest

_KEPT = 2
"""Checkpoints that stay at least: the newest, and the one before it while a newer one is written."""


class ClusterObserver(Observer, Protocol):
    """An observer of a run on several machines, on every rank."""

    def on_begin(self) -> None:
        """All is prepared: the first step comes next."""


class ClusterResult(NamedTuple):
    """What a run, or these processes' part of it, came to."""

    step: int
    folder: Path | None
    """The last checkpoint; None: there is none."""
    stopped: bool
    """Whether it was asked to stop before the last step."""
    early_end: EarlyEnd | None


def train_cluster(
    recipe: Recipe,
    ranks: Ranks,
    *,
    run_dir: Path,
    observer: ClusterObserver,
    context_parallel: int = 1,
) -> ClusterResult:
    """Train as the recipe says on all `ranks`, from the newest state in `run_dir` on.

    That is its newest DCP checkpoint, or its newer generation, which becomes one; or the recipe's first step. Every
    rank sees `run_dir` on a shared file system. `context_parallel`: ranks that share each micro-batch's tokens. Raises
    UserError on all ranks for what the user can mend, SaidElsewhereError on all but the one that says it.
    """
    given, device = recipe, ranks.together(lambda: resolve_device(recipe.train))
    recipe = replace(recipe, train=with_compute_dtype(recipe.train, device))
    identity, recipe = run_identity(recipe), with_saved_inputs(recipe, run_dir)
    if recipe.train.deterministic:
        torch.use_deterministic_algorithms(True)
    ranks.together(lambda: require_whole(recipe))
    ranks.together(lambda: require_next_token(recipe))
    ranks.together(lambda: require_even(recipe, ranks.count, context_parallel))
    mesh = ranks.together(lambda: ranks.mesh(device))
    group = ranks.neighbours(device, context_parallel)
    for left_out in not_done(recipe):
        observer.on_message(left_out)
    checklist = Checklist(observer)
    start = ranks.of_first(lambda: _newest(run_dir, given, observer))
    described = ranks.first_then_all(lambda: describe_run(recipe, run_dir, checklist))
    if start is None:
        tokenizer = described.data.tokenizer
        ranks.together(lambda: require_overrides(recipe, tokenizer.vocab_size if tokenizer else None))
    ranks.together(lambda: require_texts(described.data.corpus))
    spec, kinds = described.spec, find_optimizer(recipe.train).kinds
    with checklist.step("self-check"):
        dtype = compute_dtype(recipe.train)
        attention = ranks.together(lambda: choose_attention(spec, device, dtype, recipe.data.sequence_length, group))
        context = None
        if group is not None:
            # A dense mask of this rank's queries and all keys would be larger than what it masks.
            attention = "flex_attention" if device.type == "cuda" else attention
            context = Context(spec, group, attention)
    count = f"{ranks.count} rank{'s' * (ranks.count != 1)}"
    count += f", {context_parallel} for each context" if context_parallel > 1 else ""
    observer.on_message(f"FSDP2: {count}, {spec.num_params:,} parameters, attention {attention}")
    if dtype != torch.float32 and (rounded := rounded_alike(spec, recipe.train)):
        observer.on_message(
            f"{rounded[0]} ({len(rounded)} such parameters) would be computed with in float32 on one machine; on "
            f"several, in {recipe.train.compute_dtype}"
        )
    with checklist.step("sharding the model"):
        sharded = make_sharded(spec, recipe.train, mesh, attention if context is None else GATHERED)
    with checklist.step("reading its state"):
        if start is None:
            adapter = ranks.together(lambda: adapter_start(recipe, spec, observer))
            constants, buffers = ranks.together(lambda: first_values(spec, recipe, described.new_rows, adapter))
            ranks.together(lambda: sharded.load(buffers, constants))
        else:
            folder = start
            ranks.together(lambda: layout.require_intact(folder, (ranks.rank, ranks.count)))
            ranks.together(lambda: layout.require_same_model(folder, spec, kinds))
            ranks.together(lambda: layout.load(folder, sharded.tensors()))
    # A whole row goes through layers that would carry their state from document to document.
    alone = replace(spec, whole_documents=spec.recurrent)
    loader = ranks.together(lambda: make_loader(described.data.corpus, alone, recipe))
    validation = ranks.together(lambda: make_validation(described.data.corpus, alone, recipe))
    if spec.recurrent and not spec.whole_documents:
        for note in whole_document_notes(recipe):
            observer.on_message(note)
    record = ranks.together(lambda: None if start is None else layout.read_record(start))
    if record is not None:
        ranks.together(lambda: loader.seek(record.meta["cursor"]))
        observer.on_message(f"continues from step {record.step:,} ({start})")
        before, now = record.meta.get("fields"), identity["fields"]
        if isinstance(before, dict) and (changed := changed_fields(before, now)):
            observer.on_message(f"the recipe has changed since then: {changed}; continuing with the new recipe")
    share = Share(ranks.rank // context_parallel, ranks.count // context_parallel, context)
    meta = {} if record is None else record.meta
    step, tokens, gains = int(meta.get("step", 0)), int(meta.get("tokens", 0)), Gains.of(meta.get("validation"))
    where = (recipe, given, identity, run_dir, observer, ranks)
    run = _ClusterRun(*where, sharded, share, loader, validation, step, tokens, gains, start)
    observer.on_begin()
    return run.train()


def require_even(recipe: Recipe, ranks: int, spread: int = 1) -> None:
    """UserError unless every group of `spread` ranks gets as many micro-batches of a step as any other."""
    train = recipe.train
    if ranks % spread:
        raise UserError(f"--context-parallel {spread}: {ranks:,} ranks cannot be divided by it; give a divisor of them")
    groups, count = ranks // spread, train.micro_batches
    if count % groups:
        fix = f"train.global_batch_size to a multiple of {groups:,}"
        if train.global_batch_size % groups == 0:
            fix = f"train.micro_batch_size to {train.global_batch_size // groups}"
        who = f"{groups:,} ranks" if spread == 1 else f"{groups:,} groups of {spread} ranks"
        raise UserError(
            f"train.global_batch_size {train.global_batch_size} is {count:,} micro-batches of "
            f"{train.micro_batch_size}, which {who} cannot share evenly; set {fix}, or start a different number of "
            "processes"
        )


def require_next_token(recipe: Recipe) -> None:
    """UserError for an objective that several machines do not have."""
    if recipe.train.objective != "next_token":
        raise UserError(
            f"train.objective: {recipe.train.objective} is trained on one machine only; start the run on one, without "
            "torchrun, or set train.objective=next_token"
        )


def require_texts(corpus: TokenCorpus) -> None:
    """UserError where the data has images."""
    if corpus.images is not None:
        raise UserError(
            f"{corpus.folder}: the data has images, which are trained on one machine only; start the run on one, "
            "without torchrun, or remove the images"
        )


def not_done(recipe: Recipe) -> list[str]:
    """What the recipe asks for that a run on several machines leaves out, in words."""
    result = []
    if recipe.samples.every is not None:
        result.append("samples are not generated on several machines")
    if recipe.storage.keep_best:
        result.append(
            "storage.keep_best: on several machines, the checkpoint with the best validation loss is not kept"
        )
    if recipe.storage.offsite is not None:
        result.append("storage.offsite: on several machines, nothing is uploaded")
    if recipe.after.export:
        result.append(
            "after.export: the last checkpoint stays a DCP checkpoint; penstock import-dcp turns it into a run, which "
            "penstock export writes as a Hugging Face folder"
        )
    return result


def _newest(run_dir: Path, recipe: Recipe, observer: Observer) -> Path | None:
    """The DCP checkpoint that a run goes on from, made of its generation where that is newer; None: it begins."""
    root = state_folder(run_dir)
    folders = dcp_folders(run_dir)
    newest = max(folders, default=-1)
    if (root / "manifest.json").exists():
        step = Manifest.read(root).step
        if step is not None and step > newest:
            observer.on_message(f"writing the state of step {step:,} as a DCP checkpoint")
            folder = dcp_folder(run_dir, step)
            write_dcp(run_dir, recipe, folder)
            return folder
    return folders.get(newest)


@dataclass(slots=True)
class _ClusterRun:
    """A run that is prepared: model, data and where it is."""

    recipe: Recipe
    given: Recipe
    """As the user gave it: what checkpoints record."""
    identity: dict[str, Any]
    run_dir: Path
    observer: ClusterObserver
    ranks: Ranks
    sharded: Sharded
    share: Share
    loader: DataLoader
    validation: ValidationSet | None
    step: int
    tokens: int
    gains: Gains
    saved: Path | None
    """The last checkpoint."""

    def train(self) -> ClusterResult:
        """Step until the last step, or until a stop is wanted; then write a checkpoint."""
        train, done, stopped = self.recipe.train, 0, False
        while self.step < train.steps:
            if done == 0 and train.validate_first and self.step == 0:
                self._validate()
            if self._early_end is not None:
                break
            stopped = self._stop_wanted()
            if stopped:
                break
            self._one_step(warmup=done < WARMUP_STEPS)
            done += 1
            every = train.validate_every
            if every is not None and (self.step % every == 0 or self.step == train.steps):
                self._validate()
            if self.step % self.recipe.storage.checkpoint_every == 0:
                self._save()
        if done and self.saved != dcp_folder(self.run_dir, self.step):
            self._save()
        early_end = self._early_end if self.step < train.steps else None
        if early_end is not None:
            self.observer.on_message(early_end.words(self.step))
        return ClusterResult(self.step, self.saved, stopped, early_end)

    def _one_step(self, *, warmup: bool) -> None:
        started = time.perf_counter()
        batch = self.loader.next_step()
        train, step = self.recipe.train, self.step + 1
        loss, norm = train_step(self.sharded, train, step, batch, self.share)
        self.ranks.together(lambda: self._require_finite(step, loss, norm))
        self.step, tokens = step, sum(m.num_targets for m in batch)
        self.tokens += tokens
        step_s = time.perf_counter() - started
        self.observer.on_step(
            StepMetrics(
                step=step,
                loss=loss,
                grad_norm=norm,
                lr=learning_rate(train, step),
                tokens=tokens,
                step_s=step_s,
                tokens_per_s=tokens / step_s,
                warmup=warmup,
                model_flops=model_flops(self.sharded.spec, [n for m in batch for n in m.lengths]),
                time=time.time(),
            )
        )

    def _require_finite(self, step: int, loss: float, norm: float) -> None:
        if not (math.isfinite(loss) and math.isfinite(norm)):
            last = "no checkpoint was written yet" if self.saved is None else f"the last checkpoint is {self.saved}"
            raise DivergedError(
                f"step {step}: loss {loss:.4g}, gradient norm {norm:.4g}: not finite. Its state was not saved; "
                f"{last}. Resume with a lower train.lr or more train.warmup_steps"
            )

    def _validate(self) -> None:
        if self.validation is not None:
            metrics = validate(self.sharded, self.validation, self.step, self.share)
            self.observer.on_validation(metrics)
            self.gains.take(metrics.step, metrics.value, metrics.tokens)

    @property
    def _early_end(self) -> EarlyEnd | None:
        return self.gains.exhausted(self.recipe.train.early_stopping_patience)

    def _stop_wanted(self) -> bool:
        """Whether any rank is asked to stop: a scheduler may signal one machine only. A pause is a stop here."""
        wanted = torch.tensor(self.observer.wanted() != "run", dtype=torch.int32)
        dist.all_reduce(wanted, op=dist.ReduceOp.MAX)
        return bool(wanted)

    def _save(self) -> None:
        """Write the step's checkpoint, whole or not at all, and remove older ones."""
        meta = run_meta(self.step, self.tokens, self.loader.cursor, self.identity)
        if self.recipe.train.validate_every is not None:
            meta["validation"] = self.gains.to_json()
        folder, ranks = dcp_folder(self.run_dir, self.step), self.ranks
        ranks.together(lambda: self._on_first(lambda: layout.begin_folder(folder, self.given, meta)))
        partial = layout.partial_folder(folder)
        ranks.together(lambda: layout.save(partial, self.sharded.tensors()))
        own = ranks.together(lambda: layout.checksums_of(partial, (ranks.rank, ranks.count)))
        checksums = {name: result for rank in ranks.all_of(own) for name, result in rank.items()}
        ranks.together(lambda: self._on_first(lambda: layout.end_folder(folder, checksums)))
        self.saved = folder
        self._on_first(self._prune)
        self.observer.on_message(f"checkpoint {folder}", detail=True)

    def _on_first(self, act: Any) -> None:
        if self.ranks.first:
            try:
                act()
            except OSError as error:
                raise UserError(
                    f"{error.filename}: {error.strerror}; free some disk space, or choose another disk"
                ) from error

    def _prune(self) -> None:
        storage, folders = self.recipe.storage, dcp_folders(self.run_dir)
        for step, folder in list(folders.items())[: -max(_KEPT, storage.keep_last)]:
            if storage.keep_every is None or step % storage.keep_every:
                shutil.rmtree(folder, ignore_errors=True)
