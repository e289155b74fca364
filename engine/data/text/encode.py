"""Samples to token ids, and how much each token counts as a target."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from penstock.engine.config import CONVERSATIONS, DataConfig
from penstock.engine.data.samples import (
    BadRows,
    Comparison,
    Completion,
    Conversation,
    Encoded,
    Ids,
    Prompt,
    RowError,
    Sample,
    Text,
    content_texts,
)
from penstock.engine.data.text.chat import ChatTemplate, Rendered, Span, find_template
from penstock.engine.data.text.images import ImageProcessor
from penstock.engine.data.text.tokenizer import TextTokenizer
from penstock.storage.files.errors import UserError

Single = Text | Conversation | Completion | Prompt | Ids
_ALWAYS = ("messages", "sharegpt")
"""Sources whose every row is a conversation."""
_VERSION = 5  # of what the same files become
_IMAGE_BYTES = 1 << 19
"""About what a file with an image has."""


class Encoder:
    """Samples to tokens, by the data section of a recipe and a tokenizer. It can be pickled.

    A Text begins with the begin-of-text token where `adds_bos`, and ends with the end-of-text token, which are added
    unless it has them; so does a Completion, of which the prompt counts nothing. A Conversation is what the chat
    template makes of it: nothing is put before it, and the end-of-text token behind it only where the template ends an
    assistant's last turn with no special token at all. Ids are taken as they are. A Comparison's sides are each made by
    itself, one behind the other. A Prompt begins as a Completion does and has no end, or is what the chat template
    makes of it with the generation prompt.

    Attributes: `bad`, the samples that were left out, counted (or refused); `unread`, what `noticed` conversations have
    and the chat template does not read; `adds_bos`.
    """

    def __init__(self, config: DataConfig, tokenizer: TextTokenizer, images: ImageProcessor | None = None) -> None:
        """`images`: the model's; None: it takes none. Raises UserError where data.bos asks for a token that the
        tokenizer does not have."""
        self._config, self._tokenizer, self._images = config, tokenizer, images
        self.has_fast_tokenizer = tokenizer.is_fast
        self.unread: set[str] = set()
        self.bad = BadRows(config.bad_rows)
        self.adds_bos = config.bos == "on" or (config.bos == "auto" and tokenizer.puts_bos)
        if self.adds_bos and tokenizer.bos_id is None:
            raise UserError("data.bos: on, but the tokenizer has no begin-of-text token; leave it at auto")

    @cached_property
    def template(self) -> ChatTemplate | None:
        """What renders conversations. UserError where it cannot be read."""
        return find_template(self._config, self._tokenizer)

    @property
    def _turn_ends(self) -> frozenset[int]:
        return self._tokenizer.special_ids if self.template is None else self.template.end_ids

    @property
    def fingerprint(self) -> str:
        """Changes with whatever changes the ids or weights of a sample, but for the tokenizer's own files."""
        chosen: list[object] = [_VERSION, self.adds_bos and self._config.source != "tokens"]
        if self._config.source in CONVERSATIONS:
            chosen += [None if self.template is None else self.template.texts, self._config.trained_tokens]
            chosen += [] if self._images is None else [self._images.fingerprint]
        return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()

    def noticed(self, sample: Sample) -> Sample:
        """The sample itself, looked at for `unread`."""
        for side in (sample.side,) if isinstance(sample, Prompt) else sides_of(sample):
            if isinstance(side, Conversation) and self.template is not None:
                self.unread |= self.template.unread(side)
        return sample

    def encode(self, samples: Sequence[Sample]) -> list[Encoded]:
        """The tokens of the samples in order; what cannot be used goes to `bad`.

        Raises UserError where conversations come and there is no chat template.
        """
        alone = self._alone([side for sample in samples for side in sides_of(sample)])
        result: list[Encoded] = []
        for sample in samples:
            sides = [next(alone) for _ in sides_of(sample)]
            try:
                if (wrong := next((side for side in sides if isinstance(side, RowError)), None)) is not None:
                    raise wrong
                whole = [side for side in sides if isinstance(side, Encoded)]
                result.append(_compared(sample, whole) if isinstance(sample, Comparison) else whole[0])
            except RowError as error:
                self.bad.add(error)
        return result

    def _alone(self, samples: Sequence[Single]) -> Iterator[Encoded | RowError]:
        """Each by itself, or what is wrong with it."""
        ready = [self._prepare(sample) for sample in samples]
        texts = [one.text for one in ready if isinstance(one, Text)]
        of_text = iter(self._tokenizer.encode_batch(texts) if texts else [])
        spanned = [one.text for one in ready if isinstance(one, Rendered)]
        of_span = iter(self._tokenizer.encode_spans(spanned) if spanned else [])
        for sample, one in zip(samples, ready, strict=True):
            try:
                if isinstance(one, Text):
                    yield self._text(one, next(of_text))
                elif isinstance(one, Rendered):
                    encoded = self._finish(sample.where, one, *next(of_span))
                    yield _asked(encoded, sample) if isinstance(sample, Prompt) else _trained(encoded)
                else:
                    yield _trained(one) if isinstance(one, Encoded) else one
            except RowError as error:
                yield error

    def _prepare(self, sample: Single) -> Text | Rendered | Encoded | RowError:
        """What is to be tokenised, or is tokens already; what is wrong with a bad sample."""
        try:
            if isinstance(sample, Text):
                return sample
            if isinstance(sample, Ids):
                return self._ids(sample)
            if isinstance(sample, Prompt) and isinstance(sample.side, Completion):
                return Rendered(sample.side.prompt, None, 0.0, self.adds_bos)
            asked = isinstance(sample, Prompt)
            sample = sample.side if isinstance(sample, Prompt) else sample
            if isinstance(sample, Conversation):
                if self.template is not None:
                    if asked:
                        return Rendered(self.template.request(sample), None, 0.0)
                    rendered = self.template.render(sample, self._config.trained_tokens)
                    return self._with_images(rendered, sample) if sample.images else rendered
                if sample.plain is None:
                    raise UserError(
                        f"data.chat_template: {sample.where} is a conversation, and the tokenizer has no chat "
                        "template; give a file with one, such as the chat_template.jinja of this family's instruct "
                        "model"
                    )
                sample = sample.plain
        except RowError as error:
            return error
        start, stop = len(sample.prompt), len(sample.prompt) + len(sample.completion)
        spans = None if self._config.trained_tokens == "all" else [Span(start, stop, 1.0)]
        return Rendered(sample.prompt + sample.completion, spans, 1.0, self.adds_bos, True)

    def _with_images(self, rendered: Rendered, sample: Conversation) -> Rendered:
        if self._images is None:
            raise UserError(
                f"{sample.where}: the row has images, and the model takes none (its folder has no "
                "preprocessor_config.json or processor_config.json); train one that does, or remove the images"
            )
        # What transformers' processors make of a conversation begins as a text does.
        return self._images.expand(rendered._replace(bos=self._tokenizer.puts_bos), sample.images, sample.where)

    def _text(self, sample: Text, ids: list[int]) -> Encoded:
        begin = self._begin(ids) if self.adds_bos and sample.first else []
        end = self._end(ids) if sample.last else []
        return Encoded(sample.where, np.asarray([*begin, *ids, *end], dtype=np.int64), None, sample.last)

    def _begin(self, ids: list[int]) -> list[int]:
        """The begin-of-text token, unless the ids have it."""
        bos = self._tokenizer.bos_id
        return [] if bos is None or ids[:1] == [bos] else [bos]

    def _end(self, ids: list[int]) -> list[int]:
        """The end-of-text token, unless the ids end with it, or with it and white space."""
        return [] if self._last(ids) == self._tokenizer.eos_id else [self._tokenizer.eos_id]

    def _last(self, ids: list[int]) -> int | None:
        """The last token that is no white space."""
        tokenizer = self._tokenizer
        shown = (id for id in reversed(ids) if id in tokenizer.special_ids or tokenizer.decode([id]).strip())
        return next(shown, None)

    def _ids(self, sample: Ids) -> Encoded:
        ids = np.asarray(sample.ids, dtype=np.int64)
        if len(ids) and ids.max() >= self._tokenizer.vocab_size:
            raise RowError(
                f"{sample.where}: token id {ids.max()} is beyond the tokenizer's vocabulary of "
                f"{self._tokenizer.vocab_size:,}; name the tokenizer that made it with data.tokenizer"
            )
        weights = None if sample.weights is None else np.asarray(sample.weights, dtype=np.float32)
        return Encoded(sample.where, ids, weights, True)

    def _finish(self, where: str, one: Rendered, ids: list[int], offsets: NDArray[np.int64] | None) -> Encoded:
        weights = None
        if one.spans is not None:
            offsets = self._offsets(where, one, ids) if offsets is None else offsets
            self._narrow(one.text, ids, offsets)
            weights = np.zeros(len(ids), dtype=np.float32)
            for span in one.spans:
                weights[(offsets[:, 0] < span.stop) & (offsets[:, 1] > span.start)] = span.weight
        begin = self._begin(ids) if one.bos else []
        end = self._end(ids) if one.eos or (one.end_weight > 0 and self._last(ids) not in self._turn_ends) else []
        if weights is not None:
            weights = np.concatenate(
                [np.zeros(len(begin), np.float32), weights, np.full(len(end), one.end_weight, np.float32)]
            )
        whole = np.asarray([*begin, *ids, *end], dtype=np.int64)
        if one.images and self._images is not None:
            of_images = whole == self._images.token_id
            if of_images.sum() != sum(image.tokens for image in one.images):
                raise RowError(f"{where}: a text has the token that stands for images; remove it there")
            weights = np.ones(len(whole), dtype=np.float32) if weights is None else weights
            weights[of_images] = 0
        return Encoded(where, whole, weights, True, one.images)

    def _narrow(self, text: str, ids: list[int], offsets: NDArray[np.int64]) -> None:
        """Take the white space that added tokens swallow out of their offsets [tokens, 2]: whether such a token is
        trained is a matter of where its own text is."""
        for index in [i for i, token in enumerate(ids) if token in self._tokenizer.stripping_ids]:
            start, stop = offsets[index].tolist()
            if own := text[start:stop].strip():
                start = text.index(own, start)
                offsets[index] = start, start + len(own)

    def _offsets(self, where: str, one: Rendered, ids: list[int]) -> NDArray[np.int64]:
        """Offsets [tokens, 2] that are right at the ends of the spans, from a tokenizer that reports none.

        The text up to there is tokenised by itself; where that does not begin the whole's tokens, RowError.
        """
        spans = one.spans or []
        ends = sorted({0, len(one.text), *(at for span in spans for at in (span.start, span.stop))})
        starts = np.zeros(len(ids), dtype=np.int64)
        stops = np.zeros(len(ids), dtype=np.int64)
        done = 0
        for begin, end in itertools.pairwise(ends):
            part = self._tokenizer.encode_batch([one.text[:end]])[0]
            if part != ids[: len(part)]:
                raise RowError(
                    f"{where}: the tokenizer merges trained with untrained text (around character {end:,}) and "
                    "reports no offsets; use a tokenizer with a tokenizer.json, or data.trained_tokens=all"
                )
            starts[done : len(part)], stops[done : len(part)] = begin, end
            done = len(part)
        return np.stack([starts, stops], axis=1)


def _trained(encoded: Encoded) -> Encoded:
    """RowError where no token of a whole document has one before it and counts."""
    weights = encoded.weights
    if len(encoded.ids) < 2 or (weights is not None and not (weights[1:] > 0).any()):
        raise RowError(f"{encoded.where}: no token to train among {len(encoded.ids):,}; leave the row out")
    return encoded


def _asked(encoded: Encoded, prompt: Prompt) -> Encoded:
    """With the prompt's row. RowError where it has no tokens."""
    if not len(encoded.ids):
        raise RowError(f"{encoded.where}: `prompt` has no tokens; give it a text, or remove the row")
    return encoded._replace(row=prompt.row)


def sides_of(sample: Sample) -> tuple[Single, ...]:
    """What is tokenised by itself: the sides of a comparison, else the sample."""
    return sample.sides if isinstance(sample, Comparison) else (sample,)


def _compared(sample: Comparison, sides: Sequence[Encoded]) -> Encoded:
    """The document of a comparison. RowError for a pair of which both sides are the same tokens."""
    if len(sides) == 2 and np.array_equal(sides[0].ids, sides[1].ids):
        raise RowError(
            f"{sample.where}: `chosen` and `rejected` are the same tokens, so neither can be preferred; remove the row"
        )
    weights = [np.ones(len(side.ids), np.float32) if side.weights is None else side.weights for side in sides]
    for of_side in weights:
        of_side[0] = 0  # no token comes before it
    ids, first = np.concatenate([side.ids for side in sides]), int(np.argmax(weights[0] > 0))
    second = len(sides[0].ids) if sample.wanted is None else int(sample.wanted)
    return Encoded(sample.where, ids, np.concatenate(weights), True, sides=(first, second))


def describe_specials(tokenizer: TextTokenizer, config: DataConfig) -> str:
    """Whether begin- and end-of-text tokens are added, and why, in one line."""
    if config.source == "tokens":
        return "tokens are used as given: no begin- or end-of-text tokens are added"
    encoder = Encoder(config, tokenizer)
    adds = encoder.adds_bos
    bos = tokenizer.decode([tokenizer.bos_id]) if tokenizer.bos_id is not None else None
    eos = tokenizer.decode([tokenizer.eos_id])
    why = "data.bos says so" if config.bos != "auto" else "as the tokenizer does" if adds else "the tokenizer adds none"
    begins = f"{bos} begins each document ({why})" if adds else f"no begin-of-text token ({why})"
    if config.source == "prompts":
        what = "each document" if encoder.template is None else "prompts that are texts"
        return f"{begins.replace('each document', what)}; nothing is put behind a prompt"
    if config.source in CONVERSATIONS and encoder.template is not None:
        own = (
            f"conversations follow the chat template, with {eos} after those that it does not end with a special token"
        )
        if config.source in _ALWAYS:
            return own
        return f"{own}; other rows: {begins}, {eos} ends each document"
    return f"{begins}, {eos} ends each document"


def batches(samples: Iterator[Sample], most_chars: int) -> Iterator[list[Sample]]:
    """The samples in batches of about so many characters."""
    batch: list[Sample] = []
    chars = 0
    for sample in samples:
        batch.append(sample)
        chars += size_of(sample)
        if chars >= most_chars:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def size_of(sample: Sample) -> int:
    """About how many characters a sample has, or bytes with its images."""
    if isinstance(sample, Text):
        return len(sample.text)
    if isinstance(sample, Completion):
        return len(sample.prompt) + len(sample.completion)
    if isinstance(sample, Comparison):
        return sum(map(size_of, sample.sides))
    if isinstance(sample, Prompt):
        return size_of(sample.side) + len(sample.row)
    if isinstance(sample, Ids):
        return 4 * len(sample.ids)
    texts = sum(100 + sum(map(len, content_texts(message.get("content")))) for message in sample.messages)
    return texts + sum(len(image) if isinstance(image, bytes) else _IMAGE_BYTES for image in sample.images)
