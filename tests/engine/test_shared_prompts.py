"""A pair's prompt that both answers go on from: where it is laid once, and that all is as if it were laid twice."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import comparisons
import numpy as np
import pytest
import tiny
import torch
from samples import cases
from torch import Tensor

from penstock.engine.attention.chunk import COUNTS
from penstock.engine.attention.spans import prefixes_of
from penstock.engine.config import PreferenceConfig, Recipe
from penstock.engine.data import pairs
from penstock.engine.data.corpus.files import TokenCorpus
from penstock.engine.data.corpus.prepare import prepare_data
from penstock.engine.data.loader import DataLoader
from penstock.engine.data.loading import make_loader, shares_prompts
from penstock.engine.data.pairs import shared_tokens
from penstock.engine.forecast.flops import model_flops, pair_flops
from penstock.engine.hf.config import model_config
from penstock.engine.model.reference import forward_backward, in_buffers
from penstock.engine.model.reward import padding_of
from penstock.engine.model.runner import ModelRunner
from penstock.engine.model.spec import ModelSpec
from penstock.engine.model.tokens import IGNORE_LABEL, MicroBatch
from penstock.engine.model.trace import random_model
from penstock.engine.self_check import _InFloat64, relative_errors

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma2": {"sliding_window": 9},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
"""Model type -> what makes it small: soft-caps, attention sinks, windows shorter than a prompt, experts."""
WAYS = {
    f"{family}, {objective}, {packing}": (family, objective, packing)
    for family in FAMILIES
    for objective in ("dpo", "orpo", "reward", "simpo")
    for packing in ("none", "best_fit")
}
OFTEN = ("llama, reward, best_fit", "qwen3, orpo, none", "gemma2, dpo, best_fit", "gpt_oss, simpo, none")


def rows() -> list[dict[str, Any]]:
    """Pairs, some of whose answers begin alike, or are the beginning of one another, or have next to no prompt."""
    prompt = "the mill at the weir grinds the grain of the whole valley and"
    alike = [
        {"prompt": prompt, "chosen": " the river turns its wheel", "rejected": " the river turns its back"},
        {"prompt": prompt, "chosen": " flour", "rejected": " flour and water"},
        {"prompt": prompt, "chosen": " stone and flour", "rejected": " stone"},
        {"prompt": "m", "chosen": "ill", "rejected": "eal"},
    ]
    return comparisons.pairs(8) + alike


def made(folder: Path, family: str, objective: str, packing: str = "none") -> tuple[Recipe, ModelSpec, TokenCorpus]:
    path = comparisons.write(folder / "rows.jsonl", rows())
    batch = {"global_batch_size": 12, "micro_batch_size": 2} if packing == "none" else {"global_batch_size": 1}
    model = tiny.model(model_type=family, vocab_size=None, overrides=FAMILIES.get(family, {}))
    recipe = tiny.recipe(
        model=model,
        data=comparisons.data(path, sequence_length=192 if packing == "none" else 900, packing=packing),
        train=tiny.training(objective=objective, **batch),
        preference=PreferenceConfig(beta=0.4, simpo_gamma=0.5) if objective == "simpo" else PreferenceConfig(),
    )
    prepared = prepare_data(recipe, folder / "data")
    assert prepared.tokenizer is not None
    return recipe, tiny.spec_of(model_config(recipe, prepared.tokenizer.vocab_size)), prepared.corpus


def laid_twice(corpus: TokenCorpus, recipe: Recipe, spec: ModelSpec, like: DataLoader) -> DataLoader:
    """A loader such as `like`, which shares prompts, but for that."""
    padding = padding_of(spec.config)
    return DataLoader(
        corpus, recipe.data, recipe.train, vocab_size=spec.vocab_size, objective=like.objective, padding=padding
    )


def laid(loader: DataLoader, *, twice: bool) -> list[MicroBatch]:
    """The batches of an epoch of a loader that shares prompts, or of one that does not."""
    return [trimmed(stream, twice) for stream in loader.next_step()]


def trimmed(stream: MicroBatch, twice: bool) -> MicroBatch:
    """Without padding."""
    assert bool(prefixes_of(stream.documents)) != twice
    if stream.filled is None:
        return stream
    named = {name: getattr(stream, name) for name in ("ids", "labels", "positions", "weights", "prompts")}
    cut = {name: None if tensor is None else tensor[: stream.filled] for name, tensor in named.items()}
    documents = stream.documents
    documents.remove(stream.filled)
    return replace(stream, documents=documents, filled=None, **cut)


@pytest.mark.parametrize("name", cases(WAYS, *OFTEN))
def test_loss_and_gradients_are_as_of_prompts_laid_twice(tmp_path: Path, name: str) -> None:
    """In float64, however chunks cut prompts and answers."""
    family, objective, packing = WAYS[name]
    recipe, spec, corpus = made(tmp_path, family, objective, packing)
    spec.config._experts_implementation = "eager"  # the others compute in at most float32
    once = make_loader(corpus, spec, recipe)
    two = laid_twice(corpus, recipe, spec, once)
    assert once.shares_prompts
    reference = np.random.default_rng(1).normal(-20, 3, (corpus.info.num_documents, 2))
    once.reference = two.reference = reference if objective == "dpo" else None
    streams, expected = laid(once, twice=False), laid(two, twice=True)
    assert sum(len(s.lengths) for s in streams) == sum(len(s.lengths) for s in expected) == 2 * len(corpus.starts) - 2
    saved = int(shared_tokens(corpus, once._target).sum())
    assert sum(s.num_filled for s in expected) - sum(s.num_filled for s in streams) == saved > 100
    assert sum(s.num_targets for s in expected) == sum(s.num_targets for s in streams)

    parameters = {n: p.detach().double() for n, p in random_model(spec.config, 3).named_parameters()}
    weights = in_buffers(spec, parameters)

    def computed(batch: list[MicroBatch], chunk: int, pieces: bool) -> tuple[float, dict[str, Tensor]]:
        gradients = in_buffers(spec, {n: torch.zeros_like(p) for n, p in parameters.items()})
        with _InFloat64():
            runner = ModelRunner(spec, device="cpu", dtype=torch.float64)
            loss = forward_backward(
                runner, weights, gradients, batch, chunk, 1 << 20, in_pieces=pieces, objective=once.objective
            )
        return loss, gradients

    loss, gradients = computed(expected, 10**6, False)
    for chunk, pieces in ((11, False), (7, True), (10**6, False)):
        COUNTS.reset()
        found, of_parameters = computed(streams, chunk, pieces)
        assert found == pytest.approx(loss, rel=1e-12)
        assert max(relative_errors(of_parameters, gradients).values()) < 1e-10
    if all(shape is not None and shape.window is None for shape in spec.attention):  # no tile is masked
        lengths = [n for stream in streams for n in stream.lengths], [n for s in streams for n in s.continued]
        assert COUNTS.forward_flops == sum(pair_flops(s, lengths[0], 1, 1, lengths[1]) for s in spec.attention)
        assert COUNTS.backward_flops == sum(pair_flops(s, lengths[0], 3, 2, lengths[1]) for s in spec.attention)


@pytest.mark.parametrize("objective", ["dpo", "orpo", "reward"])
def test_what_is_shared_is_equal_and_has_no_target_of_the_second(
    tmp_path: Path, objective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it is as long as can be, but for what lies behind the second answer's first target."""
    monkeypatch.setattr(pairs, "_AT_ONCE", 150)  # tokens of a few pairs, where the corpus is read
    recipe, spec, corpus = made(tmp_path, "llama", objective)
    once = make_loader(corpus, spec, recipe)
    two = laid_twice(corpus, recipe, spec, once)
    shared = shared_tokens(corpus, once._target).tolist()
    document = 0
    for _ in range(6):
        here, there = once.next_micro_batch(), two.next_micro_batch()
        prefixes = {prefix.document: prefix for prefix in prefixes_of(here.documents)}
        for number, at in enumerate(there.documents[: len(there.lengths)]):
            whole = slice(at, at + there.lengths[number])
            left_out = shared[document] if number % 2 else 0
            begin = here.documents[number]
            own = slice(begin, begin + here.lengths[number])
            assert here.lengths[number] == there.lengths[number] - left_out
            assert here.positions[own].tolist() == list(range(left_out, there.lengths[number]))
            assert torch.equal(here.ids[own], there.ids[whole][left_out:])
            assert torch.equal(here.labels[own], there.labels[whole][left_out:])
            assert (there.labels[whole][:left_out] == IGNORE_LABEL).all()
            assert here.sources[number] == there.sources[number] + left_out
            assert (begin in prefixes) == (left_out > 0)
            if left_out:
                first, end = prefixes[begin][1:]
                assert (first, end) == (here.documents[number - 1], here.documents[number - 1] + left_out)
                assert torch.equal(here.ids[first:end], there.ids[whole][:left_out])
            if number % 2:
                more, before = left_out + 1, slice(there.documents[number - 1], at)
                alike = torch.equal(there.ids[whole][:more], there.ids[before][:more])
                assert not alike or (there.labels[whole][left_out] != IGNORE_LABEL).item()
                document += 1
    assert document == corpus.info.num_documents


NEVER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a state from token to token": ({"model_type": "qwen3_next", "overrides": tiny.HYBRID}, {}),
    "attention in blocks": (
        {
            "model_type": "llama4_text",
            "overrides": {"num_local_experts": 2, "intermediate_size_mlp": 48, "no_rope_layers": [1, 0, 1]},
        },
        {},
    ),
    "tables by length": (
        {
            "max_position": 64,
            "overrides": {"rope_parameters": {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 4.0}},
        },
        {},
    ),
    "balanced routers": ({"model_type": "qwen3_moe", "overrides": tiny.EXPERTS}, {"router_aux_loss": 0.01}),
}  # fmt: skip


@pytest.mark.parametrize("why", NEVER)
def test_prompts_are_laid_twice_where_once_would_be_something_else(why: str) -> None:
    model, train = NEVER[why]
    recipe = tiny.recipe(model=tiny.model(**model), train=tiny.training(objective="dpo", **train))
    assert not shares_prompts(tiny.spec_of(model_config(recipe, None)), recipe)


def test_objectives_without_pairs_share_nothing(tmp_path: Path) -> None:
    path = comparisons.write(tmp_path / "rows.jsonl", comparisons.verdicts(8))
    recipe = tiny.recipe(
        model=tiny.model(vocab_size=None), data=comparisons.data(path), train=tiny.training(objective="kto")
    )
    prepared = prepare_data(recipe, tmp_path / "data")
    assert prepared.tokenizer is not None
    loader = make_loader(prepared.corpus, tiny.spec_of(model_config(recipe, prepared.tokenizer.vocab_size)), recipe)
    assert not loader.shares_prompts
    assert not any(prefixes_of(stream.documents) for stream in loader.next_step())


def test_model_flops_are_those_of_tokens_and_pairs_that_there_are(tmp_path: Path) -> None:
    """Attention of a document behind a prefix is that of both together without that of the prefix."""
    _, spec, _ = made(tmp_path, "gemma2", "dpo")
    whole = model_flops(spec, [20 + 13]) - model_flops(spec, [20])
    assert model_flops(spec, [40, 13], [(20, 13)]) == model_flops(spec, [40]) + whole
