"""What a run trains and is validated on."""

from __future__ import annotations

from penstock.engine.config import SAMPLED, Recipe
from penstock.engine.data.completions import CompletionLoader
from penstock.engine.data.corpus.files import TokenCorpus
from penstock.engine.data.loader import DataLoader, ValidationSet, require_kind
from penstock.engine.data.packing import split_documents
from penstock.engine.model.reward import padding_of
from penstock.engine.model.spec import ModelSpec
from penstock.engine.objectives.base import find_objective


def make_loader(corpus: TokenCorpus, spec: ModelSpec, recipe: Recipe, *, validation: bool = False) -> DataLoader:
    """The batches of a run, or of its `validation`, which end.

    Raises UserError when the corpus holds an id beyond the vocabulary, or fewer documents than are held out.
    """
    data, train, objective = recipe.data, recipe.train, find_objective(recipe)
    whole, documents, held_out = spec.whole_documents, None, None
    require_kind(corpus, train, objective)
    if data.validation_documents is not None:
        split = corpus.info.num_documents, data.validation_documents, data.seed, data.order
        documents, held_out = split_documents(*split)
    if objective.compares == "prompts":
        return CompletionLoader(
            corpus,
            recipe,
            vocab_size=spec.vocab_size,
            objective=objective,
            whole_documents=whole,
            share_prompts=shares_prompts(spec, recipe),
            documents=documents,
            held_out=held_out,
        )
    return DataLoader(
        corpus,
        data,
        train,
        vocab_size=spec.vocab_size,
        one_document_per_row=whole,
        documents=held_out if validation else documents,
        endless=not validation,
        objective=objective,
        padding=padding_of(spec.config),
        share_prompts=shares_prompts(spec, recipe),
    )


def shares_prompts(spec: ModelSpec, recipe: Recipe) -> bool:
    """Whether answers to a prompt can be computed behind one copy of it. A load-balancing loss counts all
    tokens of a batch, and of fewer it would be another."""
    return spec.takes_prefixes and not spec.balances_routers(recipe.train.router_aux_loss)


def make_validation(corpus: TokenCorpus, spec: ModelSpec, recipe: Recipe) -> ValidationSet | None:
    """What the validation loss is measured on; None where the recipe asks for none, or has no loss of prompts alone.

    Raises UserError when there is nothing to measure it on.
    """
    data, train = recipe.data, recipe.train
    if train.validate_every is None or data.validation_documents is None or train.objective in SAMPLED:
        return None
    rows = train.micro_batch_size
    return ValidationSet(
        make_loader(corpus, spec, recipe, validation=True),
        num_documents=data.validation_documents,
        most=(train.validation_sequences or train.global_batch_size) // rows,
    )
