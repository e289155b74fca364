"""A model as evaluations ask it: texts in, log-likelihoods and continuations out, in batches of so many tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from penstock.engine.data.text.tokenizer import TextTokenizer
from penstock.engine.forecast.query import Estimate
from penstock.engine.generate.decode import Decoding, OnToken
from penstock.engine.opened_model import SCORED_TOKENS, OpenedModel, batches_of
from penstock.storage.files.errors import UserError

_UNKNOWN_CONTEXT = 2048
"""Tokens of a window where a model names no limit, as lm-evaluation-harness has it."""
_TAIL_TOKENS = 16
"""Beside as many tokens as a stop text has characters: the end of a text in which a new stop text is looked for."""

Pair = tuple[Sequence[int], Sequence[int]]
OnDone = Callable[[int], None]
"""Told of how many requests more are done."""
Enough = Callable[[int, str], bool]


class Requests(NamedTuple):
    """What will be asked."""

    likelihoods: int = 0
    likelihood_tokens: int = 0
    texts: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    """At most of each text."""

    @property
    def total(self) -> int:
        return self.likelihoods + self.texts


class QueriedModel:
    """A model with its tokenizer: `limit` is the tokens that it takes (None: not known), `context` those of a window,
    `prefix_id` what stands before a text without context. Batches are taken by the model's ranks in turns."""

    def __init__(self, model: OpenedModel, *, batch_tokens: int = SCORED_TOKENS, seed: int = 0) -> None:
        """Raises UserError where the model has no tokenizer."""
        if model.tokenizer is None:
            raise UserError("the model has no tokenizer, which tasks need; put its tokenizer files next to the weights")
        self.model, self._seed = model, seed
        self.tokenizer: TextTokenizer = model.tokenizer
        self.template = model.template
        self.batch_tokens = batch_tokens
        self.limit = model.context
        self.context = _UNKNOWN_CONTEXT if model.context is None else model.context
        self.end_id = self.tokenizer.eos_id
        bos = self.tokenizer.bos_id
        self.prefix_id = self.end_id if bos is None else bos
        self._prefix = self.tokenizer.decode([self.prefix_id])

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids, behind a begin-of-text token where the tokenizer puts one and the text has none; not `special`."""
        ids = self.tokenizer.encode_batch([text])[0]
        if special and self.tokenizer.puts_bos and not (self._prefix and text.startswith(self._prefix)):
            assert self.tokenizer.bos_id is not None
            return [self.tokenizer.bos_id, *ids]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text, without special tokens."""
        special = self.tokenizer.special_ids
        return self.tokenizer.decode([token for token in ids if token not in special])

    def estimate(self, count: int, tokens: int, new_tokens: int) -> tuple[float, Estimate]:
        """Seconds that `count` requests of `tokens` tokens in all take, each continued by `new_tokens` (0: only read),
        and what one batch of them takes."""
        mean = max(1, round(tokens / count))
        each = max(1, min(count, self.batch_tokens // (mean + new_tokens)))
        one, turns = self.model.estimate(mean, each, new_tokens), -(-count // (each * self.model.ranks.count))
        return one.total_s + (turns - 1) * (one.total_s if new_tokens else one.pass_s), one

    def loglikelihoods(self, pairs: Sequence[Pair], on_done: OnDone) -> list[tuple[float, bool]]:
        """For each (context ids, continuation ids), neither empty: the sum of the continuation's log-probabilities, and
        whether it is what greedy decoding gives. A context that is too long loses its beginning."""
        cut = [self._cut(*pair) for pair in pairs]
        batches = batches_of([len(context) + len(continuation) for context, continuation in cut], self.batch_tokens)
        asked = ((batch, Scoring([cut[i] for i in batch], self.batch_tokens)) for batch in batches)
        result = self._in_turns(asked, on_done)
        return [result[i] for i in range(len(pairs))]

    def _in_turns(self, asked: Iterable[tuple[Sequence[int], Asked]], on_done: OnDone) -> dict[int, Any]:
        """What is found of each request, by its number: as many batches at a time as there are ranks."""
        result: dict[int, Any] = {}
        batches = iter(asked)
        while some := list(itertools.islice(batches, self.model.ranks.count)):
            self.model.ranks.tell([asks for _, asks in some])
            for (batch, _), found in zip(some, self._turn([asks for _, asks in some]), strict=True):
                result |= dict(zip(batch, found, strict=True))
                on_done(len(batch))
        return result

    def _turn(self, asks: Sequence[Asked]) -> list[list[Any]]:
        """What each rank finds of the batch that it takes, on all of them."""
        ranks = self.model.ranks
        if ranks.count > 1:
            self.model.share([each.lengths for each in asks], continued=isinstance(asks[0], Writing))
        own = asks[ranks.rank].of(self) if ranks.rank < len(asks) else []
        return ranks.all_of(own)[: len(asks)]

    def serve(self) -> None:
        """On other ranks than the first one: take part in what that asks, until it has asked all."""
        while asks := self.model.ranks.hear():
            self._turn(asks)

    def close(self) -> None:
        """All has been asked."""
        self.model.ranks.tell([])

    def _cut(self, context: Sequence[int], continuation: Sequence[int]) -> Pair:
        if len(continuation) > self.context:
            raise UserError(
                f"a continuation of {len(continuation):,} tokens is longer than the model's context of {self.context:,}"
            )
        # The last token is scored and not read, so that there is room for one more.
        return context[-(self.context + 1 - len(continuation)) :], continuation

    def write(
        self,
        prompts: Sequence[Sequence[int]],
        decoding: Decoding,
        on_done: OnDone,
        enough: Enough | None = None,
        until: Sequence[str] = (),
    ) -> list[str]:
        """Continue each prompt up to the first text of `until`, or until `enough` says so of (which prompt, its text so
        far); one that leaves no room loses its beginning. Raises UserError where the new tokens alone have no room."""
        space = self.context - decoding.new_tokens
        if space < 1:
            raise UserError(
                f"{decoding.new_tokens:,} new tokens leave no room for a prompt in a context of {self.context:,} tokens"
            )
        cut = [list(ids[-space:]) for ids in prompts]
        decoding = replace(decoding, stop_ids=self.model.stop_ids | {self.end_id})
        batches = enumerate(batches_of([len(ids) + decoding.new_tokens for ids in cut], self.batch_tokens))
        drawn = ((batch, replace(decoding, seed=self._seed + number)) for number, batch in batches)
        asked = ((batch, Writing(batch, [cut[i] for i in batch], how, tuple(until), enough)) for batch, how in drawn)
        result = self._in_turns(asked, on_done)
        return [result[i] for i in range(len(prompts))]


class Scoring(NamedTuple):
    """A batch of pairs whose likelihoods are asked."""

    pairs: Sequence[Pair]
    batch_tokens: int

    @property
    def lengths(self) -> list[int]:
        return [len(context) + len(continuation) - 1 for context, continuation in self.pairs]

    def of(self, queried: QueriedModel) -> list[tuple[float, bool]]:
        return queried.model.loglikelihoods(self.pairs, batch_tokens=self.batch_tokens)


class Writing(NamedTuple):
    """A batch of prompts to continue, of these numbers; the others as in `QueriedModel.write`."""

    numbers: Sequence[int]
    prompts: Sequence[Sequence[int]]
    decoding: Decoding
    until: Sequence[str]
    enough: Enough | None

    @property
    def lengths(self) -> list[int]:
        return [len(ids) + self.decoding.new_tokens for ids in self.prompts]

    def of(self, queried: QueriedModel) -> list[str]:
        on_token = _ends(queried, self.numbers, self.until, self.enough)
        made = queried.model.generate(self.prompts, self.decoding, on_token)
        return [before(queried.decode(one.ids), self.until) for one in made]


Asked = Scoring | Writing


def _ends(model: QueriedModel, numbers: Sequence[int], until: Sequence[str], enough: Enough | None) -> OnToken:
    """Ends sequences, each of the prompt of its number, once a text of `until` has come or `enough` says so."""
    written: list[list[int]] = [[] for _ in numbers]
    tail = max(map(len, until), default=0) + _TAIL_TOKENS

    def has_one(ids: Sequence[int]) -> bool:
        text = model.decode(ids) if until else ""
        return any(stop in text for stop in until)

    def on_token(sequence: int, token: int) -> bool:
        ids = written[sequence]
        ids.append(token)
        if enough is not None and enough(numbers[sequence], model.decode(ids)):
            return True
        return has_one(ids[-tail:]) and (len(ids) <= tail or has_one(ids))

    return on_token


def before(text: str, until: Sequence[str]) -> str:
    """The text up to the first of `until`."""
    return text[: min((at for stop in until if (at := text.find(stop)) >= 0), default=len(text))]
