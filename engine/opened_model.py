"""A model opened to be queried: a plan without gradients or state, whose passes continue and score texts."""

from __future__ import annotations

import itertools
import math
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from penstock.engine.computing import Computing
from penstock.engine.config import DataConfig, Recipe, TrainConfig
from penstock.engine.data.loader import MicroBatch
from penstock.engine.data.text.chat import ChatTemplate, find_template
from penstock.engine.data.text.saved_template import load_template, trained_ends
from penstock.engine.data.text.tokenizer import TextTokenizer
from penstock.engine.data.text.turn_ends import turn_ends
from penstock.engine.forecast.query import Estimate, Query, sample_tier
from penstock.engine.generate.decode import Continuation, Decoding, OnToken, Row, decode
from penstock.engine.hf.generation import stop_ids
from penstock.engine.hf.weights import FLOAT_DTYPES
from penstock.engine.machine.budgets import free_budgets
from penstock.engine.machine.device import resolve_device
from penstock.engine.machine.here import is_assumed, machine_here
from penstock.engine.machine.limits import give_back_memory
from penstock.engine.machine.precision import usual_dtype
from penstock.engine.model.anatomy import context_of
from penstock.engine.model.runner import ModelRunner
from penstock.engine.model.spec import layouts
from penstock.engine.model.tokens import IGNORE_LABEL
from penstock.engine.passes import Forward, evaluations
from penstock.engine.plan.plan import Plan
from penstock.engine.runtime.sources import AdapterSource, FolderSource, RunSource, Source
from penstock.storage.files.errors import UserError
from penstock.storage.files.model_folder import is_adapter_folder, remarks_on_weights
from penstock.storage.files.units import bytes_text, params_text

_LEAST_CAPACITY = 1024
"""Tokens of keys and values that a chat has room for at first: growing by a little plans anew each time."""
SCORED_TOKENS = 32768
"""Of a batch of log-likelihoods, at most, unless one pair alone has more."""
_RAM_SHARE = 8
"""Without a GPU both tiers are the same memory: one part in so many of it is for what waits between two blocks."""


class OpenedModel:
    """A causal language model that need not fit anywhere but on disk. Close it, or use it as a context manager.

    Attributes: `spec`, `device`, `tokenizer` (None: there is none), `template` (for chats; None likewise), `stop_ids`
    (tokens that end a text), `context` (tokens that a sequence may have; None where the config does not say),
    `passes` (how often the weights have passed so far), `passes_s` (seconds of each of the last call).
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
    ) -> None:
        """Use `open`."""
        self.spec, self.device, self.dtype = Query.frozen(source.spec), device, dtype
        self.tokenizer: TextTokenizer | None = source.tokenizer
        self.template: ChatTemplate | None = None
        self.stop_ids = stop_ids(source.origin, self.spec.config, self.tokenizer)
        if isinstance(source, AdapterSource):
            self.stop_ids |= stop_ids(where, self.spec.config, self.tokenizer)
        if self.tokenizer is not None and isinstance(source, RunSource):
            self.template = load_template(data, self.tokenizer, where / "data")
            self.stop_ids |= trained_ends(data, self.tokenizer, self.template)
        elif self.tokenizer is not None:
            self.template = find_template(data, self.tokenizer)
        self.context = context_of(self.spec)
        self._remarks = list[str]()
        if source.origin is not None and not isinstance(source, RunSource):
            self._remarks = remarks_on_weights(source.origin)
        self.passes, self.passes_s = 0, list[float]()
        self._where, self._source, self._data = where, source, data
        budgets = free_budgets(device, gpu=gpu_bytes, ram=ram_bytes)
        gpu, ram = budgets.gpu, budgets.ram
        if device.type == "cpu" and gpu_bytes is None and ram_bytes is None:
            gpu, ram = gpu + ram - (gpu + ram) // _RAM_SHARE, (gpu + ram) // _RAM_SHARE
        self._query = Query(self.spec, str(dtype).removeprefix("torch."), device.type, gpu, ram)
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
    ) -> OpenedModel:
        """A Hugging Face folder; with a `recipe` the run directory of that: its last generation, or a checkpoint's.

        An adapter's folder is one as well, with the model in `base` (None: where the adapter says that it is).
        `gpu_bytes`, `ram_bytes`: what may be used of each; None: what is free. `device`: auto, cpu or cuda. `dtype`:
        auto, float32, bfloat16 or float16. Raises UserError for what is no model, for a run that another process has
        open, and for budgets that are too small for anything.
        """
        asked = "bfloat16" if dtype == "bfloat16" else "float32"
        found = resolve_device(TrainConfig(steps=1, device=device, compute_dtype=asked))  # type: ignore[arg-type]
        source: Source
        if recipe is not None:
            source = RunSource(where, recipe, checkpoint)
        else:
            source = AdapterSource(where, base) if is_adapter_folder(where) else FolderSource(where)
        data = DataConfig() if recipe is None else recipe.data
        try:
            chosen = FLOAT_DTYPES[dtype] if dtype != "auto" else source.usual_dtype
            slow = usual_dtype(found) == "float32" if chosen == torch.bfloat16 else found.type == "cpu"
            chosen = torch.float32 if dtype == "auto" and slow else chosen
            model = cls(source, where, data, device=found, dtype=chosen, gpu_bytes=gpu_bytes, ram_bytes=ram_bytes)
        except BaseException:
            source.close()
            raise
        try:
            model._query.plan([1], continued=True)  # says whether the budgets hold anything
        except BaseException:
            model.close()
            raise
        return model

    def encode(self, text: str) -> list[int]:
        """A prompt's token ids, begun as the tokenizer begins a text, or the run's recipe. Raises UserError where there
        is no tokenizer."""
        tokenizer = self._tokenizer()
        ids = tokenizer.encode_batch([text])[0]
        if self._data.bos == "on" or (self._data.bos == "auto" and tokenizer.puts_bos):
            ids = [*([] if tokenizer.bos_id is None else [tokenizer.bos_id]), *ids]
        if not ids:
            raise UserError(
                "an empty prompt: this tokenizer does not begin a text with a token; give at least one character"
            )
        return ids

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """A conversation, each message with `role` and `content`, up to where the assistant is to write."""
        tokenizer = self._tokenizer()
        if self.template is None:
            raise UserError(
                f"{tokenizer.folder}: the tokenizer has no chat template; use --prompt, or a model that can chat"
            )
        return tokenizer.encode_batch([self.template.prompt(messages)])[0]

    @cached_property
    def chat_stop_ids(self) -> frozenset[int]:
        """Tokens that end an answer: `stop_ids`, and what ends a turn under the chat template."""
        if self.template is None or self.tokenizer is None:
            return self.stop_ids
        return self.stop_ids | turn_ends(self.template.texts, self.tokenizer)

    def _tokenizer(self) -> TextTokenizer:
        if self.tokenizer is None:
            raise UserError(f"{self._where}: it has no tokenizer, so no text can be read; give a model with one")
        return self.tokenizer

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
        found: list[Continuation] = []
        for group in self._groups([len(prompt) + decoding.new_tokens for prompt in prompts]):
            first = len(found)
            some = prompts[first : first + len(group)]
            forward, known = self._begin(some, group, reuse=reuse and len(prompts) == 1)

            def compute(rows: Sequence[Row], forward: Forward = forward) -> Tensor:
                with self._pass():
                    return forward(rows)

            def on_chosen(sequence: int, token: int, first: int = first, forward: Forward = forward) -> bool | None:
                ended = on_token(first + sequence, token) if on_token is not None else None
                length = len(forward.ids[sequence]) + 1
                return True if self.context is not None and length >= self.context else ended

            found += decode(compute, some, decoding, on_chosen, known=known, first=first)
        if not reuse:
            self._forward = None
        return found

    def require_context(self, prompts: Sequence[Sequence[int]]) -> None:
        """UserError for a prompt that leaves no room in the context."""
        for number, prompt in enumerate(prompts, 1):
            if self.context is not None and len(prompt) >= self.context:
                raise UserError(
                    f"prompt {number}: {len(prompt):,} tokens, and the model's context is {self.context:,}; shorten it"
                )

    def _groups(self, totals: Sequence[int]) -> Iterator[Sequence[int]]:
        """Sequences that are read together: as many as find room for keys and values; one alone needs none."""
        while totals:
            sizes = range(2, len(totals) + 1)
            count = 1 + bisect_left(sizes, True, key=lambda size: not self._caches(totals[:size]))
            yield totals[:count]
            totals = totals[count:]

    def _caches(self, totals: Sequence[int]) -> bool:
        """Whether keys and values of sequences that are read together find room."""
        try:
            return self.spec.recurrent or sample_tier(self._query.plan(totals, continued=True)) != "nowhere"
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
        batches: list[list[int]] = [[]]
        sizes = [len(context) + len(continuation) for context, continuation in pairs]
        for i in sorted(range(len(pairs)), key=lambda i: -sizes[i]):
            if batches[-1] and sum(sizes[j] for j in (*batches[-1], i)) > batch_tokens:
                batches.append([])
            batches[-1].append(i)
        # The last token of a text predicts nothing that is asked. The plan is that of the batch with most tokens.
        lengths = max(([sizes[i] - 1 for i in batch] for batch in batches), key=sum)
        computing, found = self._prepare(lengths, continued=False), [(0.0, True)] * len(pairs)
        texts = ([pairs[i] for i in batch] for batch in batches)
        streams = ([_stream([pair]) for pair in some] if self.spec.recurrent else [_stream(some)] for some in texts)
        scored = evaluations(computing, streams, first=self.passes + 1)
        for batch in batches:
            with self._pass():
                data = next(scored)
            counts = [len(pairs[i][1]) for i in batch]
            for i, scores, right in zip(batch, data.scores.split(counts), data.right.split(counts), strict=True):
                found[i] = float(scores.sum()), bool(right.all())
        return found

    def take_remarks(self) -> list[str]:
        """What is to be said of its weights and memory since the last call, once each."""
        said, self._remarks = list(dict.fromkeys(self._remarks)), []
        return said

    # ------------------------------------------------------------------ memory and time

    def describe(self) -> str:
        """The model and what it is computed in, in words."""
        total = sum(layout.numel for layout in layouts(self.spec).values()) * self.dtype.itemsize
        return f"{params_text(self.spec.num_params)} parameters in {self._query.dtype}, {bytes_text(total)}"

    def estimate(self, prompt_tokens: int, sequences: int, new_tokens: int) -> Estimate:
        """How long it would take to give `sequences` prompts, of `prompt_tokens` each, `new_tokens` more."""
        groups = list(self._groups([prompt_tokens + new_tokens] * sequences))
        plan, machine = self._query.plan(groups[0], continued=True), machine_here(self._where)

        def of(group: Sequence[int], filled: bool) -> Estimate:
            return self._query.estimate(
                plan,
                machine,
                {name: self._source.stored_bytes(name) for name in self.spec.buffers},
                prompt_tokens=prompt_tokens,
                sequences=len(group),
                new_tokens=new_tokens,
                filled=filled,
                assumed=is_assumed(machine),
            )

        first, rest = of(groups[0], self._computing is not None), groups[1:]
        if not rest:
            return first
        full, last = of(groups[0], True), of(groups[-1], True)
        return replace(first, total_s=first.total_s + (len(rest) - 1) * full.total_s + last.total_s)

    def _prepare(self, totals: Sequence[int], *, continued: bool) -> Computing:
        """What computes sequences of so many tokens: as it is where it is large enough, else by a new plan, in which
        weights that stay on the compute device are not read again."""
        self._forward = None
        if self._computing is not None and _holds(self._computing.plan, totals, continued=continued):
            return self._computing
        plan = self._query.plan(totals, continued=continued)
        space = plan.problem.samples
        logits_bytes = self._query.logits_bytes(plan.max_chunk_tokens if space is None else len(space.lengths))
        weights = {} if self._computing is None else self._computing.weights
        self._give_up()
        for name in [name for name in weights if plan.buffers[name].weights != "gpu"]:
            del weights[name]
        give_back_memory()
        self._computing = Computing(plan, self._runner, self._source, logits_bytes, weights)
        if self._computing.remark is not None:
            self._remarks.append(self._computing.remark)
        return self._computing

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


def _holds(plan: Plan, totals: Sequence[int], *, continued: bool) -> bool:
    """Whether a plan has room for sequences of so many tokens."""
    p = plan.problem
    if continued != (p.samples is not None):
        return False
    if p.samples is not None and (len(totals) > len(p.samples.lengths) or sum(totals) > sum(p.samples.lengths)):
        return False
    if p.chunk_per_row:
        return max(totals) <= p.row_tokens and len(totals) <= p.micro_batches
    # Where keys and values are nowhere, fewer may find room.
    return sum(totals) <= p.row_tokens and (sample_tier(plan) != "nowhere" or 2 * sum(totals) > p.row_tokens)


def _stream(pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> MicroBatch:
    """Texts end to end, a document each; targets are the tokens of continuations."""
    ids, labels, positions, documents = list[int](), list[int](), list[Tensor](), list[int]()
    for context, continuation in pairs:
        documents.append(len(ids))
        text = [*context, *continuation][:-1]
        ids += text
        labels += [*[IGNORE_LABEL] * (len(text) - len(continuation)), *continuation]
        positions.append(torch.arange(len(text)))
    return MicroBatch(
        ids=torch.tensor(ids),
        labels=torch.tensor(labels),
        positions=torch.cat(positions),
        documents=documents,
        num_targets=sum(len(continuation) for _, continuation in pairs),
        lengths=[len(each) for each in positions],
        filled=len(ids),
    )
