"""Models of which a part is frozen: their buffers, and gradients of the rest against plain autograd."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, PretrainedConfig

from penstock.engine.model.anatomy import Initializer, take_apart
from penstock.engine.model.check import TokenStream, reference_gradients, relative_errors
from penstock.engine.model.reference import forward_backward, in_buffers
from penstock.engine.model.runner import ModelRunner
from penstock.engine.model.shrink import shrink
from penstock.engine.model.spec import layouts
from penstock.engine.model.trace import random_model
from penstock.storage.errors import UserError

HALVES = ["*embed_tokens*", "*.layers.0.*", "*.mlp.*", "*.norm.weight"]


def small(model_type: str, **fields: Any) -> PretrainedConfig:
    if model_type == "gpt2":
        fields |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = CONFIG_MAPPING[model_type](num_hidden_layers=3, **fields)
    return shrink(config)[0]


@pytest.mark.parametrize("tied", [False, True])
def test_buffers_are_split_by_what_is_frozen(tied: bool) -> None:
    config = small("llama", tie_word_embeddings=tied)
    whole, spec = take_apart(config), take_apart(config, HALVES)
    assert {param.name for params in whole.buffers.values() for param in params} == {
        param.name for params in spec.buffers.values() for param in params
    }
    blocks = {block.name: block.buffers for block in spec.blocks}
    assert blocks["embed"] == ("embed.frozen",)
    assert blocks["layers.0"] == ("layers.0.frozen",)
    assert blocks["layers.1"] == ("layers.1", "layers.1.frozen")
    assert blocks["head"] == (("head.frozen", "embed.frozen") if tied else ("head", "head.frozen"))
    assert spec.frozen == {name for name in spec.buffers if name.endswith(".frozen")}
    assert all("mlp" in param.name for param in spec.buffers["layers.1.frozen"])
    assert not any("mlp" in param.name for param in spec.buffers["layers.1"])
    assert (spec.structures, spec.lowest_trained) == ((0, 1), 2)
    assert (whole.lowest_trained, whole.frozen, whole.num_trained) == (0, frozenset(), whole.num_params)
    assert spec.num_params == whole.num_params
    assert spec.num_trained == sum(p.numel for n, ps in spec.buffers.items() if n not in spec.frozen for p in ps)


def test_what_is_initialised_does_not_depend_on_what_is_frozen() -> None:
    config = small("qwen3")
    values = []
    for freeze in ([], HALVES):
        spec = take_apart(config, freeze)
        initializer = Initializer(spec, seed=3)
        values.append({n: t for buffer in spec.buffers for n, t in initializer.values(buffer).items()})
    assert values[0].keys() == values[1].keys()
    assert all(torch.equal(values[0][name], values[1][name]) for name in values[0])


@pytest.mark.parametrize(
    ("patterns", "said"),
    [
        (["*.mpl.*"], "train.freeze: '*.mpl.*' matches no parameter; the nearest are"),
        (["*embed*", "*"], "train.freeze: all .* parameters are frozen"),
    ],
)
def test_patterns_that_leave_nothing_to_do_are_refused(patterns: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said.replace("*.mpl.*", r"\*\.mpl\.\*")):
        take_apart(small("llama"), patterns)


@pytest.mark.parametrize(
    ("model_type", "freeze", "pieces"),
    [
        ("llama", HALVES, True),
        ("gpt2", ["*wte*", "*.h.0.attn*"], True),
        ("llama", ["*.layers.*", "*embed*"], False),
        pytest.param("qwen3", ["*.self_attn.*"], False, marks=pytest.mark.long),
        pytest.param("gemma3_text", ["*embed*", "*_proj.weight"], True, marks=pytest.mark.long),
        pytest.param("qwen3_moe", ["*.experts.*", "*.gate.*", "*.layers.0.*"], False, marks=pytest.mark.long),
    ],
)
def test_gradients_of_the_rest_are_those_of_plain_autograd(model_type: str, freeze: list[str], pieces: bool) -> None:
    config = small(model_type)
    spec = take_apart(config, freeze)
    source = random_model(config)
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(spec.vocab_size, (n,), generator=generator) for n in (61, 35, 17)]
    stays = spec.frozen_params
    assert stays
    aux = 0.1 if model_type == "qwen3_moe" else 0.0
    loss, reference = reference_gradients(config, source, documents, router_aux_loss=aux)
    reference = {name: gradient for name, gradient in reference.items() if name not in stays}
    weights = in_buffers(spec, {name: parameter.detach() for name, parameter in source.named_parameters()})
    gradients = in_buffers(spec, {name: torch.zeros_like(weights[name]) for name in weights if name not in stays})
    runner = ModelRunner(spec, device="cpu", dtype=torch.float32, router_aux_loss=aux)
    streams = [TokenStream.of(documents)]
    found = forward_backward(runner, weights, gradients, streams, 29, 1 << 14, in_pieces=pieces)
    assert found == pytest.approx(loss, rel=1e-5)
    assert gradients.keys() == reference.keys()
    assert max(relative_errors(gradients, reference).values()) < 1e-5


@pytest.mark.parametrize("freeze", [["*.mlp.*"], ["*.layers.*norm*"], ["*.layers.*"]])
def test_a_graph_that_is_kept_finds_both_buffers_of_its_weights_where_they_are_later(freeze: list[str]) -> None:
    config = small("llama")
    spec = take_apart(config, freeze)
    source = {name: p.detach() for name, p in random_model(config).named_parameters()}
    runner = ModelRunner(spec, device="cpu", dtype=torch.float32)
    flat = layouts(spec)

    def slots() -> dict[str, torch.Tensor]:
        found = {}
        for name in spec.blocks[2].buffers:
            for param, view in flat[name].views(torch.zeros(flat[name].numel)).items():
                found[param] = view.copy_(source[param])
        return found

    x, dy = torch.randn(2, 20, spec.hidden_size, generator=torch.Generator().manual_seed(0))
    inputs = runner.inputs(torch.arange(20), 19)
    now, later = slots(), slots()
    results = []
    for keep in (False, True):
        trained = [name for name in now if name not in spec.frozen_params]
        gradients = in_buffers(spec, {name: torch.zeros_like(now[name]) for name in trained})
        (state,) = runner.layers.states(1, [0], [(0, 20)])
        out = runner.layers.project(1, now, x, inputs)
        attended = torch.zeros_like(state.out)
        graph = runner.layers.graph(1, now, x, inputs, lambda p, attended=attended: attended, keep=keep)
        if keep:
            for view in now.values():
                view.fill_(float("nan"))
        weights = later if keep else now
        dout = graph.top(weights, dy, gradients)
        dx = graph.bottom(weights, [torch.ones_like(t) for t in out[:3]], gradients, None)
        results.append([dx, dout, *gradients.values()])
    assert all(torch.equal(a, b) for a, b in itertools.zip_longest(*results))
