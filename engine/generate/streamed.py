"""A model opened to be asked: its weights pass through the compute device block by block, forward only."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.engine.config import DataConfig, Recipe, TrainConfig
from penstock.engine.data.text.chat import ChatTemplate, find_template
from penstock.engine.data.text.saved_template import load_template, trained_ends
from penstock.engine.data.text.tokenizer import TextTokenizer
from penstock.engine.data.text.turn_ends import turn_ends
from penstock.engine.generate.adapter_source import AdapterSource
from penstock.engine.generate.attend import Place
from penstock.engine.generate.decode import Continuation, Decoding, OnToken, Row, decode
from penstock.engine.generate.forecast import Estimate, forecast
from penstock.engine.generate.kept import Kept
from penstock.engine.generate.passes import run_pass
from penstock.engine.generate.placement import Placement, Sizes, describe, place
from penstock.engine.generate.sources import FolderSource, RunSource, Source
from penstock.engine.generate.weights import Weights
from penstock.engine.hf.generation import stop_ids
from penstock.engine.hf.weights import FLOAT_DTYPES
from penstock.engine.machine.budgets import free_budgets
from penstock.engine.machine.device import configure, resolve_device
from penstock.engine.machine.here import is_assumed, machine_here
from penstock.engine.machine.platforms import usable_cpus
from penstock.engine.machine.precision import usual_dtype
from penstock.engine.model.anatomy import context_of
from penstock.engine.model.runner import ModelRunner
from penstock.storage.files.errors import UserError
from penstock.storage.files.model_folder import is_adapter_folder, remarks_on_weights
from penstock.storage.files.units import bytes_text, params_text

_LEAST_ROOM = 1024
"""Tokens of keys and values that a chat has room for at first: growing by a little moves weights each time."""
SCORED_TOKENS = 32768
"""Of a batch of log-likelihoods, at most, unless one pair alone has more."""


class StreamedModel:
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
        self._cleanup = ExitStack()
        self._cleanup.callback(source.close)
        self.spec, self.device, self.dtype = source.spec, device, dtype
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
        self._apart = memory_is_apart(device)
        self._sizes = Sizes.of(self.spec, dtype.itemsize)
        budgets = free_budgets(device, gpu=gpu_bytes, ram=ram_bytes)
        self._gpu_bytes, self._ram_bytes = budgets.gpu, budgets.ram
        self._cleanup.callback(configure(device, budgets.gpu, deterministic=False).restore)
        if (cpus := usable_cpus()) < torch.get_num_threads():
            self._cleanup.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(cpus)
        self._runner = ModelRunner(self.spec, device=device, dtype=dtype, constants=source.constants)
        self._weights = Weights(source, self._sizes, device=device, dtype=dtype, apart=self._apart)
        self._cleanup.callback(self._weights.close)
        self._placement: Placement | None = None
        self._reading: _Reading | None = None

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
    ) -> StreamedModel:
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
            model._try_place(1)  # says whether the budgets hold anything
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

            def told(sequence: int, token: int, first: int = first, forward: _Reading = forward) -> bool | None:
                ended = on_token(first + sequence, token) if on_token is not None else None
                length = len(forward.ids[sequence]) + 1
                return True if self.context is not None and length >= self.context else ended

            found += decode(forward, some, decoding, told, known=known, first=first)
        if not reuse:
            self._forget()
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
        group: list[int] = []
        for total in totals:
            if group and not self._keeps(sum(group) + total):
                yield group
                group = []
            group.append(total)
        if group:
            yield group

    def _keeps(self, kv_tokens: int) -> bool:
        """Whether so many tokens, of sequences that are read together, find room."""
        try:
            return self.spec.recurrent or self._try_place(kv_tokens).keys_values != "nowhere"
        except UserError:
            return False

    def _begin(
        self, prompts: Sequence[Sequence[int]], totals: Sequence[int], *, reuse: bool
    ) -> tuple[_Reading, list[int]]:
        """What reads the prompts, and how many tokens of each it has read already."""
        before = self._reading
        if reuse and before is not None and len(before.ids) == 1 and totals[0] <= before.kept.capacities[0]:
            pairs = zip(before.ids[0], prompts[0], strict=False)
            same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            return before, [min(same, len(prompts[0]) - 1)]
        self._forget()
        totals = [max(totals[0], _room(totals[0]))] if reuse else list(totals)
        placement = self._place(sum(totals))
        kept = Kept(self.spec, totals, placement.keys_values, dtype=self.dtype, device=self.device, apart=self._apart)
        self._remark(kept.remark)
        self._reading = _Reading(self, kept, placement.chunk_tokens, self._logits_rows(placement), len(prompts))
        return self._reading, [0] * len(prompts)

    def _forget(self) -> None:
        if self._reading is not None:
            self._reading.kept.close()
            self._reading = None

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
        self._forget()
        self.passes_s = []
        # Of similar lengths together: the room for keys and values is that of the longest batch.
        order = sorted(range(len(pairs)), key=lambda i: -sum(map(len, pairs[i])))
        found: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
        batch: list[int] = []
        for i in order:
            size = sum(len(pairs[j][0]) + len(pairs[j][1]) for j in (*batch, i))
            if batch and size > batch_tokens:
                self._score(pairs, batch, found)
                batch = []
            batch.append(i)
        if batch:
            self._score(pairs, batch, found)
        return found

    def _score(
        self,
        pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
        batch: Sequence[int],
        found: list[tuple[float, bool]],
    ) -> None:
        # The last token predicts nothing that is asked.
        texts = [[*pairs[i][0], *pairs[i][1]][:-1] for i in batch]
        rows = [Row(number, 0, ids) for number, ids in enumerate(texts)]
        lengths = [len(ids) for ids in texts]
        placement = self._place(sum(lengths), keeps=False)
        at_once = self._logits_rows(placement)

        def finish(x: Tensor, pieces: Sequence[tuple[int, int, Place]], logits: Callable[[Tensor], Tensor]) -> None:
            wanted, targets, owners = [], [], []
            for row, first, piece in pieces:
                context, continuation = pairs[batch[row]]
                for position in range(max(piece.start, len(context) - 1), piece.end):
                    wanted.append(first + position - piece.start)
                    targets.append(continuation[position + 1 - len(context)])
                    owners.append(batch[row])
            for start in range(0, len(wanted), at_once):
                some = slice(start, start + at_once)
                scores = logits(x[torch.tensor(wanted[some], device=x.device)]).float()
                target = torch.tensor(targets[some], device=x.device)
                chosen = scores.gather(1, target[:, None])[:, 0]
                each = (chosen - scores.logsumexp(dim=-1)).double().tolist()
                right = (scores.argmax(dim=-1) == target).tolist()
                for owner, value, greedy in zip(owners[some], each, right, strict=True):
                    total, all_right = found[owner]
                    found[owner] = (total + value, all_right and greedy)

        kept = Kept(self.spec, lengths, "nowhere", dtype=self.dtype, device=self.device, apart=self._apart)
        try:
            self._pass(rows, kept, placement.chunk_tokens, finish)
        finally:
            kept.close()

    def _logits_rows(self, placement: Placement) -> int:
        """Rows of logits in the memory that a chunk's activations had."""
        return max(1, placement.chunk_tokens * self._sizes.token_bytes // self._sizes.logits_bytes)

    def take_remarks(self) -> list[str]:
        """What is to be said of its weights and memory since the last call, once each."""
        said, self._remarks = list(dict.fromkeys(self._remarks)), []
        return said

    # ------------------------------------------------------------------ room and time

    def describe(self) -> str:
        """The model and what it is computed in, in words."""
        dtype, total = str(self.dtype).removeprefix("torch."), sum(self._sizes.buffers.values())
        return f"{params_text(self.spec.num_params)} parameters in {dtype}, {bytes_text(total)}"

    def estimate(self, prompt_tokens: int, sequences: int, new_tokens: int) -> Estimate:
        """How long it would take to give `sequences` prompts, of `prompt_tokens` each, `new_tokens` more."""
        groups = list(self._groups([prompt_tokens + new_tokens] * sequences))
        placement = self._try_place(sum(groups[0]))
        machine = machine_here(self._where)

        def of(group: Sequence[int], filled: bool) -> Estimate:
            return forecast(
                self.spec,
                self._sizes,
                placement,
                {name: self._source.stored_bytes(name) for name in self.spec.buffers},
                machine,
                cuda=self._apart,
                where=describe(placement, self._sizes, self.device.type),
                assumed=is_assumed(machine),
                filled=filled,
                prompt_tokens=prompt_tokens,
                sequences=len(group),
                new_tokens=new_tokens,
            )

        first = of(groups[0], self.passes > 0)
        return replace(first, total_s=first.total_s + sum(of(group, True).total_s for group in groups[1:]))

    def _try_place(self, kv_tokens: int, *, keeps: bool = True) -> Placement:
        return place(
            self._sizes,
            kv_tokens,
            gpu_bytes=self._gpu_bytes,
            ram_bytes=self._ram_bytes,
            staged=self._apart,
            keeps=keeps and not self.spec.recurrent,
        )

    def _place(self, kv_tokens: int, *, keeps: bool = True) -> Placement:
        """Make the room: as it is, where it is enough, as what moves is read again."""
        now = self._placement
        if now is None or now.kv_tokens < kv_tokens or (keeps and now.keys_values == "nowhere"):
            now = self._placement = self._try_place(kv_tokens, keeps=keeps)
            self._weights.place(now)
            self._remark(self._weights.remark)
        return now

    def _remark(self, text: str | None) -> None:
        if text is not None:
            self._remarks.append(text)

    def _pass(self, rows: Sequence[Row], kept: Kept, chunk_tokens: int, finish: object) -> None:
        began = time.perf_counter()
        run_pass(self._runner, self._weights, rows, kept, chunk_tokens, finish)  # type: ignore[arg-type]
        self.passes += 1
        self.passes_s.append(time.perf_counter() - began)

    def table(self, length: int) -> list[bytes]:
        """Equal for two lengths of a sequence exactly when its rotary tables are."""
        calls = self._runner.inputs(torch.ones(1, dtype=torch.int64), length - 1).calls
        leaves = {id(leaf): leaf for leaf in pytree.tree_leaves([(call.args, call.kwargs) for call in calls])}
        return [leaf.cpu().float().numpy().tobytes() for leaf in leaves.values() if isinstance(leaf, Tensor)]

    def close(self) -> None:
        self._forget()
        self._cleanup.close()

    def __enter__(self) -> StreamedModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def memory_is_apart(device: torch.device) -> bool:
    """Whether a device does not compute with what is in RAM: weights, keys and values are copied to it."""
    return device.type == "cuda"


def _room(tokens: int) -> int:
    """Room for a sequence that will grow."""
    return max(_LEAST_ROOM, 1 << math.ceil(math.log2(tokens)))


class _Reading:
    """A Forward over some sequences: what has been read of each, and their keys and values where they are kept."""

    def __init__(self, model: StreamedModel, kept: Kept, chunk_tokens: int, logits_rows: int, sequences: int) -> None:
        self.kept = kept
        self.ids: list[list[int]] = [[] for _ in range(sequences)]
        """What has been read of each."""
        self._model, self._chunk_tokens, self._logits_rows = model, chunk_tokens, logits_rows
        self._tables: list[list[bytes]] = [[] for _ in range(sequences)]
        """Of models whose rotary tables depend on the length: those that each sequence's keys were turned by."""

    def __call__(self, rows: Sequence[Row]) -> Tensor:
        work = [self._extend(row) for row in rows]
        # What a broken pass leaves behind is not counted as read.
        ids = [self.ids[row.sequence] for row in rows]
        found: dict[int, Tensor] = {}

        def finish(x: Tensor, pieces: Sequence[tuple[int, int, Place]], logits: Callable[[Tensor], Tensor]) -> None:
            last = [(row, first + place.length - 1) for row, first, place in pieces if place.end == len(ids[row])]
            for start in range(0, len(last), self._logits_rows):
                some = last[start : start + self._logits_rows]
                made = logits(x[torch.tensor([at for _, at in some], device=x.device)]).float()
                found.update(zip((row for row, _ in some), made, strict=True))

        try:
            self._model._pass(work, self.kept, self._chunk_tokens, finish)
        except BaseException:
            for row in work:
                del self.ids[row.sequence][row.start :]
            raise
        return torch.stack([found[row] for row in range(len(rows))])

    def _extend(self, row: Row) -> Row:
        """Note the row's tokens; what has to be read for it: all of its sequence where nothing is kept."""
        known = self.ids[row.sequence]
        del known[row.start :]
        assert len(known) == row.start, "tokens that were never read"
        known += row.ids
        again = self.kept.where == "nowhere"
        if self._model.spec.length_dependent_rotary:
            table = self._model.table(len(known))
            again = again or table != self._tables[row.sequence]
            self._tables[row.sequence] = table
        return Row(row.sequence, 0, list(known)) if again else row
