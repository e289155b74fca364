"""Adapters in models: what they stand beside, their gradients, first values and merge, each against plain peft."""

import copy
from contextlib import nullcontext
from typing import Any

import adapted
import pytest
import torch
from compiled import compiled_afresh

from penstock.engine.config import AdapterConfig
from penstock.engine.model import skeleton
from penstock.engine.model.adapter_values import AdapterLayers, with_adapter
from penstock.engine.model.adapters import is_adapter, plain_name
from penstock.engine.model.anatomy import take_apart
from penstock.engine.model.check import TokenStream, check_model, relative_errors
from penstock.engine.model.reference import forward_backward, in_buffers
from penstock.engine.model.runner import ModelRunner
from penstock.storage.errors import UserError

TARGETS = {"llama": ["all-linear", "embed_tokens", "lm_head"], "gemma3_text": ["all-linear", "embed_tokens"]}
"""Beside all linear modules of the layers, of shapes where that says something more."""


def _documents() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(97, (length,), generator=generator) for length in (41, 22)]


def linear_of(model: Any) -> list[str]:
    """Names of the linear modules of the layers."""
    layers = model.model.layers.named_modules()
    return sorted({name.rpartition(".")[2] for name, module in layers if isinstance(module, torch.nn.Linear)})


COMPILED = [("llama", "dora"), ("gemma3_text", "rslora"), ("qwen3_moe", "lora")]
"""Each takes a minute."""


@pytest.mark.parametrize(
    ("model_type", "method", "compile"),
    [
        *(("llama", "dora", False), ("qwen3", "rslora", False), ("qwen3_moe", "lora", False)),
        *(pytest.param(*case, False, marks=pytest.mark.long) for case in [("llama", "lora"), ("gemma3_text", "dora")]),
        *(pytest.param(*case, True, marks=pytest.mark.long) for case in COMPILED),
    ],
)
def test_gradients_are_those_of_plain_peft(model_type: str, method: str, compile: bool) -> None:
    shape = adapted.config(model_type)
    targets = ["all-linear"] if method == "dora" else TARGETS.get(model_type, ["all-linear"])
    adapter = adapted.section(method, targets=targets)
    ends = [name for name in targets if name != "all-linear"]
    model = adapted.base(shape)
    theirs = adapted.adapted(model, adapted.peft_config(adapter, [*linear_of(model), *ends]))
    documents = _documents()
    total = sum(len(document) - 1 for document in documents)
    for document in documents:
        loss = theirs(input_ids=document[None], labels=document[None], use_cache=False).loss
        (loss * ((len(document) - 1) / total)).backward()
    values = adapted.by_our_names(theirs)
    expected = {name: p.grad for name, p in values.items() if is_adapter(name)}
    assert all(gradient is not None and gradient.any() for gradient in expected.values())

    spec = take_apart(shape, adapter=adapter)
    assert {p.name for params in spec.buffers.values() for p in params} == values.keys()
    assert {p.name for b, params in spec.buffers.items() if b not in spec.frozen for p in params} == expected.keys()
    runner = ModelRunner(spec, device="cpu", dtype=torch.float32, compile=compile)
    weights = in_buffers(spec, {name: parameter.detach() for name, parameter in values.items()})
    gradients = in_buffers(spec, {name: torch.zeros_like(weights[name]) for name in expected})
    with compiled_afresh() if compile else nullcontext({"unique_graphs": 0}) as counters:
        forward_backward(runner, weights, gradients, [TokenStream.of(documents)], 19, 1 << 14)
        assert (counters["unique_graphs"] > 0) is compile
    errors = relative_errors(gradients, expected)
    assert max(errors.values()) < 1e-5, max(errors.items(), key=lambda item: item[1])


def test_the_self_check_is_of_the_adapter() -> None:
    """Here of parameters that are no linear module."""
    adapter = adapted.section("lora", targets=["gate", "gate_up_proj", "down_proj"], rank=2)
    result = check_model(adapted.config("qwen3_moe"), adapter=adapter)
    assert result.ok, result.reason
    assert is_adapter(result.worst_parameter) or result.worst_parameter == "loss"


def test_new_adapters_begin_as_pefts_do() -> None:
    """The model computes what it did; A is drawn between the same bounds, dora's magnitudes are peft's."""
    shape, adapter = adapted.config("llama"), adapted.section("dora")
    model = adapted.base(shape)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    logits = model(input_ids=_documents()[0][None]).logits
    spec = take_apart(shape, adapter=adapter)
    blocks = [
        (buffer, {p.name: before[plain_name(p.name)] for p in spec.buffers[buffer]})
        for buffer in spec.buffers
        if buffer in spec.frozen
    ]
    values, again, other = (
        {n: v for _, of in with_adapter(spec, blocks, seed=seed, dtype=torch.float32) for n, v in of.items()}
        for seed in (1, 1, 2)
    )
    theirs = adapted.by_our_names(adapted.get_peft_model(model, adapted.peft_config(adapter, "all-linear")))
    assert values.keys() == theirs.keys()
    for name, value in values.items():
        assert torch.equal(value, again[name])
        if "lora_A" in name:
            bound = value.shape[1] ** -0.5
            assert 0.8 * bound < float(value.abs().max()) <= bound
            assert not torch.equal(value, other[name])
        elif "magnitude" in name:
            assert torch.allclose(value, theirs[name], rtol=1e-6)
        else:
            assert torch.equal(value, theirs[name]), name
    built = skeleton.build(shape, device="cpu", adapter=adapter)
    built.set_attn_implementation("eager")
    built.load_state_dict(values)
    assert torch.allclose(built(input_ids=_documents()[0][None]).logits, logits, atol=1e-5)


@pytest.mark.parametrize(
    ("model_type", "method", "targets", "dtype"),
    [
        ("llama", "lora", ["all-linear", "embed_tokens", "lm_head"], torch.bfloat16),
        ("llama", "dora", ["all-linear"], torch.bfloat16),
        ("gemma3_text", "rslora", ["q_proj"], torch.float32),
        ("qwen3_moe", "lora", ["q_proj", "gate", "gate_up_proj", "experts.down_proj"], torch.float32),
    ],
    ids=["lora", "dora", "rslora", "experts"],
)
def test_the_merge_is_pefts(model_type: str, method: str, targets: list[str], dtype: torch.dtype) -> None:
    shape = adapted.config(model_type)
    adapter = adapted.section(method, targets=targets)
    model = adapted.base(shape).to(dtype)
    if model_type == "qwen3_moe":
        parameters = ["gate.weight", "gate_up_proj", "experts.down_proj"]
        config = adapted.peft_config(adapter, ["q_proj"], target_parameters=parameters)
    else:
        linear = linear_of(model) if "all-linear" in targets else []
        config = adapted.peft_config(adapter, [*linear, *(name for name in targets if name != "all-linear")])
    theirs = adapted.adapted(model, config)
    spec = take_apart(shape, adapter=adapter)
    values = {name: p.detach().float() for name, p in copy.deepcopy(adapted.by_our_names(theirs)).items()}
    merged = theirs.merge_and_unload()
    layers = AdapterLayers(spec)
    layers.require_mergeable()
    found = {}
    for block in spec.blocks:
        own = [p.name for b in block.buffers if b.removesuffix(".frozen") == block.name for p in spec.buffers[b]]
        found |= layers.merged({name: values[name] for name in own}, lambda name: dtype)
    expected = {name: p.detach() for name, p in merged.named_parameters()}
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name].float()), name


def test_targets_by_pattern_make_layers_of_two_structures() -> None:
    """And a tied embedding is not merged."""
    spec = take_apart(adapted.config("qwen3"), adapter=adapted.section("lora", targets=["model.layers.1.*"]))
    assert spec.structures == (0, 1)
    assert {"layers.0", "layers.1"} & spec.buffers.keys() == {"layers.1"}
    spec = take_apart(adapted.config("qwen3"), adapter=adapted.section("lora", targets=["embed_tokens"]))
    with pytest.raises(UserError, match=r"'model.embed_tokens' has an adapter, but the embedding and"):
        AdapterLayers(spec).require_mergeable()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"targets": ["q_porj"]}, "'q_porj' matches no module of the model; the nearest are q_proj"),
        ({"targets": ["q_proj", "w1"]}, "'w1' matches no module of the model; it has "),
        (
            {"targets": ["mlp"]},
            "'mlp' is not a linear module or an embedding; name the modules in it: down_proj, gate_",
        ),
        ({"rank": 17}, "17 is larger than the smallest side of 'model.layers.0.self_attn.k_proj.weight' (16 x 32)"),
        ({"method": "dora", "targets": ["embed_tokens"]}, "'model.embed_tokens' is an embedding"),
    ],
)
def test_sections_that_do_not_fit_the_model(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as refusal:
        take_apart(adapted.config("llama"), adapter=AdapterConfig(**({"method": "lora", "rank": 4} | changes)))
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)
    with pytest.raises(UserError, match=r"peft adapts 'model.layers.0.mlp.gate.weight' as a parameter, which has no"):
        take_apart(adapted.config("qwen3_moe"), adapter=adapted.section("dora", targets=["gate"]))
