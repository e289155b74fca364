"""The data of a run: corpus, batches, and what is held out for validation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.engine.config import Recipe
from penstock.engine.data.corpus.files import TokenCorpus
from penstock.engine.data.corpus.prepare import prepare_text, random_corpus
from penstock.engine.data.formats.detect import found_source
from penstock.engine.data.loader import DataLoader, ValidationSet
from penstock.engine.data.packing import split_documents
from penstock.engine.data.text.tokenizer import TextTokenizer
from penstock.engine.model.spec import ModelSpec
from penstock.storage.files.errors import UserError


@dataclass(frozen=True, slots=True)
class Data:
    """The tokenised corpus and what it was tokenised with (None for random tokens)."""

    corpus: TokenCorpus
    tokenizer: TextTokenizer | None


def prepare_data(recipe: Recipe, folder: Path, vocab_size: int | None = None) -> Data:
    """Tokenizer and tokenised corpus in `folder`, made unless they are there already.

    `vocab_size`: the model's, which random tokens need; None takes the recipe's.
    """
    model, data = recipe.model, found_source(recipe.data)[0]
    if data.source == "random":
        vocabulary = vocab_size or model.vocab_size
        if vocabulary is None:
            raise UserError("model.vocab_size: required with data.source=random; set it")
        return Data(random_corpus(data, vocabulary, folder / "corpus"), None)
    origin = Path(model.path).expanduser() if model.path is not None else None
    tokenizer, corpus = prepare_text(data, origin, folder, model.added_tokens)
    return Data(corpus, tokenizer)


def make_loader(corpus: TokenCorpus, spec: ModelSpec, recipe: Recipe, *, validation: bool = False) -> DataLoader:
    """The batches of a run, or of its `validation`, which end.

    Raises UserError when the corpus holds an id beyond the vocabulary, or fewer documents than are held out.
    """
    data, train, documents = recipe.data, recipe.train, None
    if data.validation_documents is not None:
        split = split_documents(corpus.info.num_documents, data.validation_documents, data.seed, data.order)
        documents = split[int(validation)]
    return DataLoader(
        corpus,
        vocab_size=spec.vocab_size,
        sequence_length=data.sequence_length,
        global_batch_size=train.global_batch_size,
        micro_batch_size=train.micro_batch_size,
        seed=data.seed,
        one_document_per_row=spec.recurrent,
        documents=documents,
        endless=not validation,
        packing=data.packing,
        long_documents=data.long_documents,
        order=data.order,
        weights=[] if validation else data.part_weights,
    )


def make_validation(corpus: TokenCorpus, spec: ModelSpec, recipe: Recipe) -> ValidationSet | None:
    """What the validation loss is measured on; None where the recipe asks for none.

    Raises UserError when there is nothing to measure it on.
    """
    data, train = recipe.data, recipe.train
    if train.validate_every is None or data.validation_documents is None:
        return None
    rows = train.micro_batch_size
    return ValidationSet(
        make_loader(corpus, spec, recipe, validation=True),
        num_documents=data.validation_documents,
        most=(train.validation_sequences or train.global_batch_size) // rows,
    )
