"""The model and the data of a fine-tune as they are: what kind each is, and the corpus that a run trains on."""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.app.console.loading import loading
from penstock.app.console.printing import short_path
from penstock.app.finetune.report import Document
from penstock.app.planning.opened import with_found_data
from penstock.engine.config import DataConfig, Recipe
from penstock.engine.preparing import Checklist
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import printable
from penstock.storage.files.user_cache import cache_folder

if TYPE_CHECKING:
    from penstock.engine.data.corpus.files import TokenCorpus
    from penstock.engine.data.text.tokenizer import TextTokenizer
    from penstock.engine.preparing import Listener

_TEXT = ("text", "jsonl", "python_stdlib", "tokens")
"""Sources of documents that may be split anywhere."""
_TRAINED = {"assistant": "all turns of the assistant", "last": "the last turn of the assistant", "all": "all tokens"}
_LOOKED_AT = 20
"""Documents held out of which the first fit for a prompt is taken."""


def look_at(data: DataConfig, given: Mapping[str, Any]) -> DataConfig:
    """The data with its format, its split and its columns' names, which are looked up unless they are given."""
    if given.get("data.source", "auto") != "auto":
        return data
    from penstock.app.hub.fetch import dataset_folder
    from penstock.engine.data.formats.detect import detect

    result = detect(dataset_folder(str(data.path)), given.get("data.split"), given.get("data.columns"))
    source: Any = result.source
    return replace(data, source=source, split=result.split, columns=result.rename)


class ModelFacts(NamedTuple):
    """What is said of a model."""

    type: str
    params: int
    context: int | None
    """Longest position that it is made for."""
    vocab_size: int
    path: str
    whole_documents: bool
    """It carries a state from token to token that it cannot hand from chunk to chunk."""
    shares_prompts: bool
    """Of pairs of answers their prompt is computed once."""


@dataclass(slots=True)
class Source:
    """The data tokenised for a model, and what is known of both."""

    recipe: Recipe
    """With local folders in place of names of the hub."""
    tokenizer: TextTokenizer
    corpus: TokenCorpus
    model: ModelFacts | None
    lengths: NDArray[np.int64] = field(init=False)
    """[documents] tokens of each."""
    trained: NDArray[np.int64] = field(init=False)
    """[documents] tokens of each that have a loss."""

    def __post_init__(self) -> None:
        self.lengths = np.diff(self.corpus.starts)
        self.trained = np.full_like(self.lengths, 2) if self._rewards else _trained(self.corpus)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def _rewards(self) -> bool:
        """A reward model is trained, on one value of each answer."""
        return self.corpus.comparison == "pairs" and self.recipe.train.objective == "reward"

    @property
    def is_text(self) -> bool:
        return all(part.source in _TEXT for part in self.recipe.data.parts)

    def documents(self) -> Iterator[Document]:
        """The documents as training reads them, one after the other."""
        for number, (start, stop) in enumerate(itertools.pairwise(self.corpus.starts.tolist())):
            where = self.corpus.origins.where(number) or f"document {number:,}"
            weights = None if self.corpus.weights is None else self.corpus.weights[start:stop]
            if self.corpus.comparison == "prompts":
                weights = np.zeros(stop - start, dtype=np.float32)
            sides = None if self.corpus.sides is None else tuple(self.corpus.sides[number].tolist())
            ids = self.corpus.tokens[start:stop].astype(np.int64)
            if sides is not None and self._rewards:
                weights = np.zeros(len(ids), dtype=np.float32)
                weights[[sides[1] - 1, -1]] = 1
            yield Document(where, ids, weights, self.corpus.comparison, sides)

    def short(self, where: str) -> str:
        """Where a document comes from, from the current folder where that is shorter."""
        paths = [part.path for part in self.recipe.data.parts if part.path and where.startswith(part.path)]
        return short_path(paths[0]) + where[len(paths[0]) :] if paths else where

    def in_rows(self) -> NDArray[np.int64]:
        """[documents] tokens that each takes of a row. An answer with a verdict is followed by its prompt with the
        answer before, by which KTO estimates how far the model went. A pair's prompt comes once where it can."""
        from penstock.engine.data.pairs import shared_tokens

        if self.corpus.comparison == "pairs" and self.model is not None and self.model.shares_prompts:
            return self.lengths - shared_tokens(self.corpus, None)
        if self.corpus.sides is None or self.corpus.comparison != "unpaired":
            return self.lengths
        prompts = self.corpus.sides[:, 0]
        return self.lengths + prompts + np.roll(self.lengths - prompts, 1)

    def rows(self, recipe: Recipe) -> int:
        """Rows that an epoch fills. UserError for none, and where the objective takes other data."""
        from penstock.engine.data.loader import DataLoader, require_kind
        from penstock.engine.data.packing import rows_per_epoch, split_documents
        from penstock.engine.objectives.base import find_objective

        data, objective = recipe.data, find_objective(recipe)
        alone = self.model is not None and self.model.whole_documents
        if self.corpus.comparison or objective.compares:
            require_kind(self.corpus, recipe.train, objective)
            held = data.validation_documents
            return DataLoader(
                self.corpus,
                data,
                recipe.train,
                vocab_size=self.corpus.info.max_token_id + 1,
                one_document_per_row=alone,
                documents=None if held is None else split_documents(len(self), held, data.seed, data.order)[0],
                objective=objective,
                share_prompts=self.model is not None and self.model.shares_prompts,
            ).num_rows
        result = rows_per_epoch(self.corpus, data, data.sequence_length, one_document_per_row=alone)
        if not result:
            raise UserError(
                f"data.long_documents: {data.long_documents} leaves nothing to train on, as the shortest document has "
                f"{int(self.lengths.min()):,} tokens; raise data.sequence_length {data.sequence_length:,}, or cut them"
            )
        return result

    def prompts(self, data: DataConfig, text_tokens: int, most: int) -> Iterator[tuple[str, int]]:
        """What comes before the first answer of documents held out, or of the first ones where none are, and that
        answer's tokens; of a text its beginning, and 0. One of more than `most` tokens is left out, and
        so is one with images, as a prompt is text."""
        from penstock.engine.data.packing import split_documents

        numbers = np.arange(min(_LOOKED_AT, len(self)))
        if data.validation_documents is not None:
            numbers = split_documents(len(self), data.validation_documents, data.seed)[1][:_LOOKED_AT]
        images = self.corpus.images
        for number in numbers.tolist():
            if images is not None and images.of_document(number):
                continue
            start, stop = (int(offset) for offset in self.corpus.starts[number : number + 2])
            first, answer = text_tokens, 0
            if self.corpus.weights is not None:
                counted = self.corpus.weights[start:stop] > 0
                if not counted[1:].all():
                    first = int(np.argmax(counted))
                    answer = int(np.argmin(np.append(counted[first:], False)))
            if 1 < first <= most and first < stop - start:
                ids = self.corpus.tokens[start : start + first].astype(np.int64).tolist()
                if ids[0] == self.tokenizer.bos_id:  # the tokenizer puts it there again
                    del ids[0]
                yield self.tokenizer.decode(ids), answer

    def lines(self) -> list[str]:
        """What was found of the data, a sentence a line."""
        from penstock.engine.data.formats.reading import source_files
        from penstock.engine.data.text.chat import find_template
        from penstock.engine.data.text.encode import describe_specials

        result = []
        for part in self.recipe.data.parts:
            files = source_files(part)
            location = short_path(part.path) if part.path else part.source
            many = f", {len(files):,} files" if len(files) > 1 else ""
            split = f", split {part.split}" if part.split else ""
            columns = "".join(f", {name} in column {column}" for name, column in part.columns.items())
            result.append(printable(f"{part.source}: {location}{many}{split}{columns}"))
        if (said := self._compared()) is not None:
            result.append(said)
        data = self.recipe.data
        found_templates = (find_template(part, self.tokenizer) for part in data.parts if part.source not in _TEXT)
        templates = [template for template in found_templates if template is not None]
        if templates:
            how = "its generation markers" if templates[0].has_markers else "rendering each turn's prefix"
            words = [
                _TRAINED[data.trained_tokens] + (" in the answers" if self.corpus.comparison else ""),
                *([] if data.trained_tokens == "all" else [f"found by {how}"]),
            ]
            words = ["what the model answers"] if self.corpus.comparison == "prompts" else words
            if self._rewards:
                words = ["the reward at the last token of each answer"]
            name = "the tokenizer's own" if data.chat_template is None else printable(data.chat_template)
            result.append(f"chat template: {name}; trained: {', '.join(words)}")
        return [*result, *dict.fromkeys(describe_specials(self.tokenizer, part) for part in data.parts)]

    def _compared(self) -> str | None:
        """What the comparisons are, if the documents are such."""
        if self.corpus.sides is None:
            return None
        if self.corpus.comparison == "pairs":
            return f"{len(self):,} pairs: a prompt with the chosen answer, and again with the rejected one"
        return f"{len(self):,} answers with a verdict: {self._wanted():,} wanted, {len(self) - self._wanted():,} not"

    def _wanted(self) -> int:
        """Answers that are wanted, of those with a verdict."""
        return 0 if self.corpus.sides is None else int(self.corpus.sides[:, 1].sum())

    def warnings(self, recipe: Recipe) -> list[str]:
        """What may not be as the user thinks."""
        result = []
        if skipped := self.corpus.info.skipped_rows:
            result.append(f"{skipped:,} bad {'row is' if skipped == 1 else 'rows are'} skipped (data.bad_rows)")
        result += self.corpus.notes
        if self.corpus.comparison == "unpaired" and self._wanted() in (0, len(self)):
            result.append(
                f"{'all' if self._wanted() else 'none'} of the answers are wanted; add some of the other kind"
            )
        if lost := self._lost(recipe.data):
            result.append(
                f"{lost:,} of the documents that are cut have no trained tokens left; raise data.sequence_length"
            )
        return result

    def require_trainable(self, recipe: Recipe) -> None:
        """UserError where nothing of the data has a loss once it is in rows, or the objective takes other data."""
        from penstock.engine.objectives.base import find_objective

        if find_objective(recipe).compares:
            self.rows(recipe)
        data = recipe.data
        if data.long_documents == "cut" and self._lost(data) == len(self):
            raise UserError(
                f"data.sequence_length: every document is cut to {data.sequence_length:,} tokens, before its first "
                f"trained token; raise it (the longest has {int(self.lengths.max()):,})"
            )

    def _lost(self, data: DataConfig) -> int:
        """Documents of which a row's length has no token to train."""
        if data.long_documents != "cut" or self.corpus.weights is None:
            return 0
        from penstock.engine.data.packing import count_trained

        starts = self.corpus.starts[:-1][self.lengths > data.sequence_length]
        left = count_trained(self.corpus.weights, starts + 1, starts + data.sequence_length)
        return int((left == 0).sum())


def open_source(recipe: Recipe, listener: Listener | None, *, with_model: bool = True) -> Source:
    """Tokenise the data of a recipe with its model's tokenizer, or open what is cached of it; `with_model` False:
    nothing else of the model is looked at."""
    from penstock.app.hub.fetch import fetched
    from penstock.app.planning.inputs import require_data, require_inputs

    if recipe.data.source == "random":
        raise UserError("data.source: random has no text to show; give a recipe with data")
    recipe, _ = with_found_data(fetched(recipe, weights=with_model))
    (require_inputs if with_model else require_data)(recipe)
    checklist = Checklist(listener)
    model = None
    if with_model:
        with checklist.step("looking at the model"):
            model = _look_at_model(recipe)
    with checklist.step("tokenizing the data"):
        with loading():
            from penstock.engine.data.corpus.prepare import prepare_data

        with _location() as folder:
            result = prepare_data(recipe, folder)
            _ = result.corpus.origins  # read while its file is there
    assert result.tokenizer is not None
    if model is not None:
        grown = result.tokenizer.vocab_size if recipe.model.added_tokens else 0
        result.corpus.require_vocabulary(max(model.vocab_size, grown))
    return Source(recipe, result.tokenizer, result.corpus, model)


@contextmanager
def _location() -> Iterator[Path]:
    """A folder for a corpus, which goes at the end: its files are open, and cached for this user where that is worth it
    (engine/data/corpus/cache.py), best on the file system of the cache."""
    cache = cache_folder("looking")
    with contextlib.suppress(OSError):
        if cache is not None:
            cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache if cache is not None and os.access(cache, os.W_OK) else None) as folder:
        yield Path(folder)


def _look_at_model(recipe: Recipe) -> ModelFacts:
    from penstock.app.planning.model_cache import cached_spec

    with loading():
        from penstock.engine.data.loading import shares_prompts
        from penstock.engine.hf.config import model_config, require_overrides
        from penstock.engine.model.anatomy import model_spec

    require_overrides(recipe, None)
    config = model_config(recipe, None)
    context = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if context is not None and recipe.data.sequence_length == DataConfig().sequence_length > context:
        recipe = replace(recipe, data=replace(recipe.data, sequence_length=context))  # nobody has said it yet
    spec = cached_spec(recipe, lambda: model_spec(config, recipe))
    path = short_path(str(recipe.model.path))
    return ModelFacts(
        spec.model_type,
        spec.num_params,
        context,
        spec.vocab_size,
        path,
        spec.whole_documents,
        shares_prompts(spec, recipe),
    )


def _trained(corpus: TokenCorpus) -> NDArray[np.int64]:
    """[documents] tokens of each that count as targets: not the first, before which there is none."""
    from penstock.engine.data.packing import count_trained

    starts, stops = corpus.starts[:-1], corpus.starts[1:]
    if corpus.comparison == "prompts":
        return np.zeros(len(starts), dtype=np.int64)
    if corpus.weights is None:
        return np.maximum(0, stops - starts - 1)
    return count_trained(corpus.weights, starts + 1, stops)
