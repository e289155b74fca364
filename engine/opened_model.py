"""A model opened to be queried: a plan without gradients or state, whose passes continue and score texts."""

from __future__ import annotations

import itertools
import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import torch

from penstock.engine.computing import Computing
from penstock.engine.config import DataConfig, Recipe, TrainConfig
from penstock.engine.forecast.problem import whole_buffers
from penstock.engine.forecast.query import Estimate, Query, sample_tier
from penstock.engine.generate.decode import Choose, Continuation, Decoding, OnToken, Row, decode
from penstock.engine.hf.weights import FLOAT_DTYPES
from penstock.engine.machine.budgets import free_budgets
from penstock.engine.machine.device import resolve_device
from penstock.engine.machine.limits import give_back_memory
from penstock.engine.machine.precision import usual_dtype
from penstock.engine.machine.presets import machine_here
from penstock.engine.model.anatomy import context_of
from penstock.engine.model.reward import is_reward
from penstock.engine.model.runner import ModelRunner
from penstock.engine.opened_texts import Texts
from penstock.engine.passes import Forward, evaluations, scored_stream
from penstock.engine.plan.plan import Plan
from penstock.engine.ranks.ranks import ALONE, Ranks
from penstock.engine.runtime.sources import AdapterSource, FolderSource, RunSource, Source
from penstock.storage.files.errors import UserError, ensure
from penstock.storage.files.model_folder import is_adapter_folder
from penstock.storage.files.units import bytes_text, params_text

_LEAST_CAPACITY = 1024
"""Tokens of keys and values that a chat has room for at first: growing by a little plans anew each time."""
SCORED_TOKENS = 32768
"""Of a batch of log-likelihoods, at most, unless one pair alone has more."""
_RAM_SHARE = 8
"""Without a GPU both tiers are the same memory: one part in so many of it is for what waits between two blocks."""


class OpenedModel(Texts):
    """A causal language model that need not fit anywhere but on disk. Close it, or use it as a context manager.

    Attributes: `spec`, `device`, `context` (tokens that a sequence may have; None where the config does not say),
    `passes` (how often the weights have passed so far), `passes_s` (seconds of each of the last call), and of `Texts`.
    """

    def __init__(
        self,
        source: Source,
        where: Path,
        data: DataConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        gpu_bytes: int | None,
        ram_bytes: int | None,
        ranks: Ranks = ALONE,
    ) -> None:
        """Use `open`."""
        if is_reward(source.spec.config):
            raise UserError(
                f"{where}: a reward model, which has a value for a whole answer and no probabilities of tokens; load "
                "its export with transformers' AutoModelForSequenceClassification"
            )
        super().__init__(source, where, data)
        self.spec, self.device, self.dtype = source.spec.for_texts().all_frozen(), device, dtype
        self.context = context_of(self.spec)
        self.passes, self.passes_s = 0, list[float]()
        self._source = source
        self.ranks = ranks
        gpu, ram = _budgets(ranks, device, gpu_bytes, ram_bytes)
        self._query = Query(self.spec, str(dtype).removeprefix("torch."), device.type, gpu, ram, ranks.count)
        self._runner = ModelRunner(self.spec, device=device, dtype=dtype, constants=source.constants)
        self._computing: Computing | None = None
        self._forward: Forward | None = None

    @classmethod
    def open(
        cls,
        where: Path,
        *,
        recipe: Recipe | None = None,
        checkpoint: str | None = None,
        gpu_bytes: int | None = None,
        ram_bytes: int | None = None,
        device: str = "auto",
        dtype: str = "auto",
        base: Path | None = None,
        ranks: Ranks = ALONE,
    ) -> OpenedModel:
        """A Hugging Face folder; with a `recipe` the run directory of that: its last generation, or a checkpoint's.

        An adapter's folder is one as well, with the model in `base` (None: where the adapter says that it is).
        `gpu_bytes`, `ram_bytes`: what may be used of each; None: what is free. `device`: auto, cpu or cuda. `dtype`:
        auto, float32, bfloat16 or float16. `ranks`: each opens it, with a GPU of its own, and asks it in turns: see
        `share`. Raises UserError for what is no model, for a run that another process has
        open, and for budgets that are too small for anything.
        """
        requested = "bfloat16" if dtype == "bfloat16" else "float32"
        result = resolve_device(TrainConfig(steps=1, device=device, compute_dtype=requested))  # type: ignore[arg-type]
        source: Source
        if recipe is not None:
            source = RunSource(where, recipe, checkpoint, held=not ranks.first)
        else:
            source = AdapterSource(where, base) if is_adapter_folder(where) else FolderSource(where)
        data = DataConfig() if recipe is None else recipe.data
        try:
            chosen = FLOAT_DTYPES[dtype] if dtype != "auto" else source.usual_dtype
            slow = usual_dtype(result) == "float32" if chosen == torch.bfloat16 else result.type == "cpu"
            chosen = torch.float32 if dtype == "auto" and slow else chosen
            budgets = {"gpu_bytes": gpu_bytes, "ram_bytes": ram_bytes}
            model = cls(source, where, data, device=result, dtype=chosen, ranks=ranks, **budgets)
        except BaseException:
            source.close()
            raise
        try:
            model._query.plan([1], continued=True)  # says whether the budgets hold anything
        except BaseException:
            model.close()
            raise
        return model

    # ------------------------------------------------------------------ continuing

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        decoding: Decoding,
        on_token: OnToken | None = None,
        *,
        reuse: bool = False,
    ) -> list[Continuation]:
        """Continue token sequences, batched as far as their keys and values find room; at the context's end they end.

        `reuse`: of a single prompt that begins as the one before did, keys and values that are still there count; they
        are kept for the next. Raises UserError for a prompt that leaves no room in the context.
        """
        self.require_context(prompts)
        self.passes_s = []
        result: list[Continuation] = []
        for group in self._groups([len(prompt) + decoding.new_tokens for prompt in prompts], self._room):
            first = len(result)
            some = prompts[first : first + len(group)]
            forward, known = self._begin(some, group, reuse=reuse and len(prompts) == 1)

            def compute(rows: Sequence[Row], choose: Choose, forward: Forward = forward) -> list[int]:
                with self._pass():
                    return forward(rows, choose)

            def on_chosen(sequence: int, token: int, first: int = first, forward: Forward = forward) -> bool | None:
                ended = on_token(first + sequence, token) if on_token is not None else None
                length = len(forward.ids[sequence]) + 1
                return True if self.context is not None and length >= self.context else ended

            result += decode(compute, some, decoding, on_chosen, known=known, first=first)
        if not reuse:
            self._forward = None
        return result

    def require_context(self, prompts: Sequence[Sequence[int]]) -> None:
        """UserError for a prompt that leaves no room in the context."""
        for number, prompt in enumerate(prompts, 1):
            if self.context is not None and len(prompt) >= self.context:
                raise UserError(
                    f"prompt {number}: {len(prompt):,} tokens, and the model's context is {self.context:,}; shorten it"
                )

    def share(self, lengths: Sequence[Sequence[int]], *, continued: bool) -> None:
        """Have memory that holds each of these lists of sequences, of so many tokens, or so many of the longest as find
        room; each rank calls it alike, and until the next time asks for some of one list at a time."""
        ordered = [sorted(each, reverse=True) for each in lengths]
        bound = [max(column) for column in itertools.zip_longest(*ordered, fillvalue=0)]
        if continued:
            bound = list(next(self._groups(bound, self._caches)))
        self._prepare(bound, continued=continued, sharing=True)

    def _room(self, totals: Sequence[int]) -> bool:
        """Whether sequences can be read together: by another plan too, unless others share the memory of this one."""
        if self.ranks.count == 1:
            return self._caches(totals)
        return self._computing is not None and self._holds(self._computing.plan, totals, continued=True)

    def _groups(self, totals: Sequence[int], fits: Callable[[Sequence[int]], bool]) -> Iterator[Sequence[int]]:
        """Sequences that are read together: as many as find room for keys and values; one alone needs none."""
        while totals:
            sizes = range(2, len(totals) + 1)
            count = 1 + bisect_left(sizes, True, key=lambda size: not fits(totals[:size]))
            yield totals[:count]
            totals = totals[count:]

    def _caches(self, totals: Sequence[int]) -> bool:
        """Whether keys and values of sequences that are read together find room."""
        try:
            return sample_tier(self._query.plan(totals, continued=True)) != "nowhere" or self.spec.recurrent
        except UserError:
            return False

    def _begin(
        self, prompts: Sequence[Sequence[int]], totals: Sequence[int], *, reuse: bool
    ) -> tuple[Forward, list[int]]:
        """What reads the prompts, and how many tokens of each it has read already."""
        before = self._forward
        if reuse and before is not None and len(before.ids) == 1 and totals[0] <= before.lengths[0]:
            pairs = zip(before.ids[0], prompts[0], strict=False)
            same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            return before, [min(same, len(prompts[0]) - 1)]
        if reuse:
            totals = [max(_LEAST_CAPACITY, 1 << math.ceil(math.log2(totals[0])))]
        self._forward = Forward(self._prepare(totals, continued=True), totals)
        return self._forward, [0] * len(prompts)

    # ------------------------------------------------------------------ scoring

    def loglikelihoods(
        self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], *, batch_tokens: int = SCORED_TOKENS
    ) -> list[tuple[float, bool]]:
        """Per (context ids, continuation ids), neither empty: the natural logarithm of the continuation's probability
        behind the context, and whether greedy decoding would give it.

        Batched so that weights are streamed once for `batch_tokens` at most. Raises UserError for a pair beyond the
        context.
        """
        for number, (context, continuation) in enumerate(pairs, 1):
            assert context, "a pair without a context"
            if self.context is not None and len(context) + len(continuation) - 1 > self.context:
                raise UserError(
                    f"text {number}: {len(context) + len(continuation):,} tokens, and the model's context is "
                    f"{self.context:,}; shorten it"
                )
        self.passes_s = []
        if not pairs:
            return []
        sizes = [len(context) + len(continuation) for context, continuation in pairs]
        batches = list(batches_of(sizes, batch_tokens))
        # The last token of a text predicts nothing that is asked. The plan is that of the batch with most tokens.
        lengths = max(([sizes[i] - 1 for i in batch] for batch in batches), key=sum)
        texts = [[pairs[i] for i in batch] for batch in batches]
        streams = ([scored_stream(some)] for some in texts)
        if self.spec.whole_documents:  # a text is one chunk
            lengths = [max(sizes) - 1] * max(map(len, batches))
            streams = ([scored_stream([pair]) for pair in some] for some in texts)
        computing, result = self._prepare(lengths, continued=False), [(0.0, True)] * len(pairs)
        scored = evaluations(computing, streams, first=self.passes + 1)
        for batch in batches:
            with self._pass():
                data = next(scored)
            counts = [len(pairs[i][1]) for i in batch]
            for i, scores, right in zip(batch, data.scores.split(counts), data.right.split(counts), strict=True):
                result[i] = float(scores.sum()), bool(right.all())
        return result

    def take_remarks(self) -> list[str]:
        """What is to be said of its weights and memory since the last call, once each."""
        result, self._remarks = list(dict.fromkeys(self._remarks)), []
        return result

    # ------------------------------------------------------------------ memory and time

    def describe(self) -> str:
        """The model and what it is computed in, in words."""
        total = sum(buffer.nbytes for buffer in whole_buffers(self.spec, self._query.dtype))
        return f"{params_text(self.spec.num_params)} parameters in {self._query.dtype}, {bytes_text(total)}"

    def estimate(self, prompt_tokens: int, sequences: int, new_tokens: int) -> Estimate:
        """How long it would take to give `sequences` prompts, of `prompt_tokens` each, `new_tokens` more; 0: to score
        them."""
        totals = [prompt_tokens + new_tokens] * sequences
        groups = list(self._groups(totals, self._caches)) if new_tokens else [totals]
        plan, machine = self._query.plan(groups[0], continued=new_tokens > 0), machine_here(self._where)
        stored = {name: self._source.stored_bytes(name) for name in self.spec.buffers}

        def of(group: Sequence[int], filled: bool) -> Estimate:
            work = {"prompt_tokens": prompt_tokens, "sequences": len(group), "new_tokens": new_tokens}
            return self._query.estimate(plan, machine, stored, filled=filled, assumed=machine.is_assumed, **work)

        first, rest = of(groups[0], self._computing is not None), groups[1:]
        if not rest:
            return first
        full, last = of(groups[0], True), of(groups[-1], True)
        return replace(first, total_s=first.total_s + (len(rest) - 1) * full.total_s + last.total_s)

    def _prepare(self, totals: Sequence[int], *, continued: bool, sharing: bool = False) -> Computing:
        """What computes sequences of so many tokens: as it is where it is large enough, else by a new plan, in which
        weights that stay on the compute device are not read again."""
        self._forward = None
        if self._computing is not None and self._holds(self._computing.plan, totals, continued=continued):
            return self._computing
        ensure(self.ranks.count == 1 or sharing, "memory that ranks share does not hold what one of them asks")
        plan = self._query.plan(totals, continued=continued)
        space = plan.problem.samples
        logits_bytes = self._query.logits_bytes(plan.max_chunk_tokens if space is None else space.sequences)
        weights = {} if self._computing is None else self._computing.weights
        self._give_up()
        for name in [name for name in weights if plan.buffers[name].weights != "gpu"]:
            del weights[name]
        give_back_memory()
        self._computing = Computing(plan, self._runner, self._source, logits_bytes, weights, self.ranks)
        if self._computing.remark is not None:
            self._remarks.append(self._computing.remark)
        return self._computing

    def _holds(self, plan: Plan, totals: Sequence[int], *, continued: bool) -> bool:
        """Whether a plan has room for sequences of so many tokens."""
        p = plan.problem
        if continued != (p.samples is not None):
            return False
        if p.samples is not None and (len(totals) > p.samples.sequences or sum(totals) > p.samples.rows):
            return False
        if p.chunk_per_row:
            return max(totals) <= p.row_tokens and len(totals) <= p.micro_batches
        # Where keys and values are nowhere, fewer may find room.
        return sum(totals) <= p.row_tokens and (
            self.ranks.count > 1 or sample_tier(plan) != "nowhere" or 2 * sum(totals) > p.row_tokens
        )

    def _give_up(self) -> None:
        if self._computing is not None:
            self._computing.close()
        self._computing = self._forward = None

    @contextmanager
    def _pass(self) -> Iterator[None]:
        """Around what computes a pass, which is counted."""
        assert self._computing is not None
        began = time.perf_counter()
        try:
            yield
        except BaseException:
            self._computing.restart()
            raise
        self.passes += 1
        self.passes_s.append(time.perf_counter() - began)
        self._computing.executor.take_spans()

    def close(self) -> None:
        self._give_up()
        self._source.close()

    def __enter__(self) -> OpenedModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _budgets(ranks: Ranks, device: torch.device, gpu_bytes: int | None, ram_bytes: int | None) -> tuple[int, int]:
    """Bytes of the compute device and of RAM that each rank may use, where all together may use `ram_bytes`."""
    free = free_budgets(device, gpu=gpu_bytes, ram=ram_bytes)
    gpu, ram = min(ranks.all_of(free.gpu)), ranks.of_first(lambda: free.ram) // ranks.count
    if device.type == "cpu" and gpu_bytes is None:
        gpu //= ranks.count
        if ram_bytes is None:
            return gpu + ram - (gpu + ram) // _RAM_SHARE, (gpu + ram) // _RAM_SHARE
    return gpu, ram


def batches_of(sizes: Sequence[int], most: int) -> Iterator[list[int]]:
    """Indices of `sizes`, larger ones first, in groups that add up to `most` at most, or of one that is larger."""
    group: list[int] = []
    total = 0
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        if group and total + sizes[number] > most:
            yield group
            group, total = [], 0
        group.append(number)
        total += sizes[number]
    if group:
        yield group
