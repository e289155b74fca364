"""The model and the data of a fine-tune as they are: what kind each is, and the corpus that a run trains on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.app.finetune_report import Document
from penstock.app.loading import loading
from penstock.engine.config import DataConfig, Recipe
from penstock.engine.preparing import Checklist
from penstock.storage.errors import UserError

if TYPE_CHECKING:
    from penstock.engine.data.corpus_files import TokenCorpus
    from penstock.engine.data.tokenizer import TextTokenizer
    from penstock.engine.preparing import Listener

TEXT_SOURCES = ("text", "jsonl", "python_stdlib")
"""All of a document is trained, and it may be split anywhere."""
_LOOKED_AT = 20
"""Documents held out of which the first fit for a prompt is taken."""


def look_at(data: DataConfig, given: Mapping[str, Any]) -> DataConfig:
    """The data with its format and its split, which are looked up unless they are given."""
    if "data.source" in given:
        return data
    try:
        from penstock.engine.data.formats.detect import detect
    except ImportError:
        return replace(data, source="jsonl" if str(data.path).endswith(".jsonl") else "text")
    found = detect(Path(str(data.path)), given.get("data.split"))
    return replace(data, source=found.source)


class ModelFacts(NamedTuple):
    """What is said of a model."""

    type: str
    params: int
    context: int | None
    """Longest position that it is made for."""
    vocab_size: int
    path: str


@dataclass(slots=True)
class Source:
    """A model's tokenizer, the data tokenised with it, and what is known of both."""

    recipe: Recipe
    tokenizer: TextTokenizer
    corpus: TokenCorpus
    model: ModelFacts | None
    lengths: NDArray[np.int64] = field(init=False)
    """[documents] tokens of each."""
    trained: NDArray[np.int64] = field(init=False)
    """[documents] tokens of each that have a loss."""

    def __post_init__(self) -> None:
        self.lengths = np.diff(self.corpus.starts)
        self.trained = self.lengths

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def is_text(self) -> bool:
        return self.recipe.data.source in TEXT_SOURCES

    def document(self, number: int) -> Document:
        """A document as it is trained."""
        start, stop = (int(offset) for offset in self.corpus.starts[number : number + 2])
        return Document(f"document {number:,}", self.corpus.tokens[start:stop].astype(np.int64), None)

    def rows(self, data: DataConfig) -> int:
        """Rows that an epoch fills."""
        return max(1, -(-int(self.lengths.sum()) // data.sequence_length))

    def held_out(self, data: DataConfig) -> Sequence[int]:
        """Some of the documents held out, or of all where none are."""
        from penstock.engine.data.packing import split_documents

        if data.validation_documents is None:
            return range(min(_LOOKED_AT, len(self)))
        return split_documents(len(self), data.validation_documents, data.seed)[1][:_LOOKED_AT].tolist()

    def prompt(self, number: int, text_tokens: int, most: int) -> str:
        """What comes before the first trained token of a document; of a text, its beginning. Empty: it is too long."""
        found = self.document(number)
        if found.weights is None or found.weights[1:].all():
            ids = found.ids[:text_tokens]
        else:
            ids = found.ids[: int(np.argmax(found.weights > 0))]
        if not 1 < len(ids) <= most:
            return ""
        return self.tokenizer.decode(ids.tolist())

    def lines(self) -> list[str]:
        """What was found of the data, a sentence a line."""
        data = self.recipe.data
        return [f"{data.source}: {len(self):,} documents of {data.path}"]

    def warnings(self, recipe: Recipe) -> list[str]:
        return []

    def require_trainable(self, recipe: Recipe) -> None:
        """UserError where nothing of the data has a loss once it is in rows."""


def open_source(recipe: Recipe, listener: Listener | None, *, with_model: bool = True) -> Source:
    """Tokenise the data of a recipe with its model's tokenizer, or open what is kept of it.

    `with_model` False: of the model only the tokenizer is looked at.
    """
    from penstock.app.launch import require_data, require_inputs

    if recipe.data.source == "random":
        raise UserError("data.source: random has no text to look at; name a recipe with data")
    (require_inputs if with_model else require_data)(recipe)
    checklist = Checklist(listener)
    model = None
    if with_model:
        with checklist.step("looking at the model"):
            model = _look_at_model(recipe)
    with checklist.step("tokenizing the data"):
        with loading():
            from penstock.engine.data.prepare import prepare_data

        found = prepare_data(recipe, _folder(recipe))
    assert found.tokenizer is not None
    if model is not None:
        found.corpus.require_vocabulary(model.vocab_size)
    return Source(recipe, found.tokenizer, found.corpus, model)


def _look_at_model(recipe: Recipe) -> ModelFacts:
    from penstock.app.model_cache import kept_spec

    with loading():
        from penstock.engine.hf.config import model_config
        from penstock.engine.model.anatomy import model_spec

    config = model_config(recipe, None)
    context = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if context is not None and recipe.data.sequence_length == DataConfig().sequence_length > context:
        recipe = replace(recipe, data=replace(recipe.data, sequence_length=context))  # nobody has said it yet
    spec = kept_spec(recipe, lambda: model_spec(config, recipe))
    return ModelFacts(spec.model_type, spec.num_params, context, spec.vocab_size, str(recipe.model.path))


def _folder(recipe: Recipe) -> Path:
    import tempfile

    return Path(tempfile.mkdtemp())
