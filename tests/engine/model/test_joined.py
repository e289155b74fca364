"""Linear modules that are one product: which ones are, and that they compute what they compute apart."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

import adapted
import pytest
import torch
from compiled import compiled_afresh
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, PretrainedConfig

from penstock.engine.attention.chunk import KeptAttention
from penstock.engine.model.anatomy import take_apart
from penstock.engine.model.joined import JoinedTwin, readers_of_one, side_by_side
from penstock.engine.model.reference import in_buffers
from penstock.engine.model.runner import ModelRunner
from penstock.engine.model.shrink import shrink
from penstock.engine.model.spec import ModelSpec
from penstock.engine.model.sums import GradientSums
from penstock.engine.model.trace import random_model

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATED = ("mlp.gate_proj", "mlp.up_proj")
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def small(model_type: str) -> PretrainedConfig:
    fields = NO_DROPOUT if model_type == "gpt2" else {}
    return shrink(CONFIG_MAPPING[model_type](num_hidden_layers=2, **fields))[0]


def apart(spec: ModelSpec) -> ModelSpec:
    return replace(spec, joined=((),) * len(spec.joined))


@pytest.mark.parametrize(
    ("model_type", "groups"),
    [
        ("llama", (QKV, GATED)),
        ("qwen2", (QKV, GATED)),  # with biases
        ("cohere", (QKV, GATED)),  # all five read one tensor
        ("qwen3_moe", (QKV,)),
        ("qwen2_moe", (QKV, ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"))),
        ("starcoder2", (QKV,)),
        ("phi3", ()),  # stored as one matrix
        ("gpt2", ()),
    ],
)
def test_which_linear_modules_of_architectures_are_one_product(model_type: str, groups: Any) -> None:
    assert set(take_apart(small(model_type)).joined) == {groups}


@pytest.mark.parametrize(
    ("freeze", "groups"),
    [
        (["*.k_proj.*"], (GATED,)),
        (["*.q_proj.*"], (QKV[1:], GATED)),
        (["*.v_proj.bias"], (QKV[:2], GATED)),
        (["*.mlp.*"], (QKV,)),
    ],
)
def test_what_is_not_trained_takes_no_part(freeze: list[str], groups: Any) -> None:
    assert set(take_apart(small("qwen2"), freeze).joined) == {groups}


def test_what_is_padded_in_the_buffer_is_not_joined() -> None:
    """A weight of 96 x 48 elements does not end where the next one begins."""
    config = small("llama")
    config.hidden_size, config.head_dim = 48, 12
    assert set(take_apart(config).joined) == {()}


def test_an_adapters_layers_stay_apart() -> None:
    assert set(take_apart(adapted.config("llama"), adapter=adapted.section("lora")).joined) == {()}


class _Layer(nn.Module):
    """Three linear modules, two of which read the same tensor and one a tensor like it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(8, width, bias=False) for width in (4, 6, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.two(x), self.one(x), self.three(x.clone())], dim=-1)


def test_only_what_reads_the_very_same_tensor_is_found() -> None:
    x = torch.randn(5, 8)
    assert readers_of_one(_Layer(), ["one", "two", "three"], lambda layer: layer(x)) == (("two", "one"),)


def test_a_joined_layer_has_the_parameters_of_the_layer_and_computes_one_product() -> None:
    layer, x = _Layer(), torch.randn(5, 8)
    flat = torch.randn(10 * 8)
    views = {"two.weight": flat[:48].view(6, 8), "one.weight": flat[48:].view(4, 8)}
    for name, view in views.items():
        layer.get_parameter(name).data = view
    twin = JoinedTwin(layer, [("two", "one")])
    twin.bind(views.__getitem__)
    seen: list[Tensor] = []
    whole = twin.module.get_submodule("two.whole")
    whole.register_forward_hook(lambda _, args, y: seen.append(y))
    torch.testing.assert_close(twin.module(x), layer(x))  # some CPUs' kernels round a wider product otherwise
    assert [y.shape for y in seen] == [(5, 10)]
    assert whole.weight.data_ptr() == flat.data_ptr()
    assert side_by_side(list(views.values())).data_ptr() == flat.data_ptr()
    assert type(layer.two) is nn.Linear


def test_matrices_apart_are_never_taken_for_one() -> None:
    a, b = torch.zeros(2, 4), torch.zeros(2, 4)
    with pytest.raises(AssertionError, match="one behind the other"):
        side_by_side([a, b])
    flat = torch.zeros(24)
    with pytest.raises(AssertionError, match="one behind the other"):
        side_by_side([flat[:8].view(2, 4), flat[16:].view(2, 4)])


def layer_run(
    spec: ModelSpec, weights: dict[str, Tensor], dtype: torch.dtype, *, keep: bool, compile: bool = False
) -> list[Tensor]:
    """Output, gradient of the input and gradients of the parameters of layer 1 on two chunks of 24 tokens."""
    runner, tokens = ModelRunner(spec, device="cpu", dtype=dtype, compile=compile), 24
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(2 * tokens, spec.hidden_size, generator=generator).to(dtype) for _ in range(2))
    ranges = [(0, tokens), (tokens, 2 * tokens)]
    inputs = [runner.inputs(torch.arange(*of), 2 * tokens - 1) for of in ranges]
    states = runner.layers.states(1, [0], ranges)
    own = {p.name for p in spec.buffers["layers.1"]}
    here = in_buffers(spec, {name: weights[name].to(dtype) for name in own})
    sums = GradientSums(in_buffers(spec, {n: torch.full_like(t, 7, dtype=torch.float32) for n, t in here.items()}), own)
    outputs, graphs = [], []
    for i, (start, end) in enumerate(ranges):
        if keep:
            graph, y = runner.layers.keep(1, here, x[start:end].clone(), inputs[i], KeptAttention(states[i]).forward)
            graphs.append(graph)
        else:
            y = runner.layers.forward(1, here, x[start:end], inputs[i], states[i])
        outputs.append(y)
    if keep:  # backward finds the weights in another slot
        before, here = here, in_buffers(spec, here)
        for tensor in before.values():
            tensor.fill_(float("nan"))
    for i in (1, 0):
        start, end = ranges[i]
        if keep:
            graphs[i].top(here, dy[start:end], sums)
            outputs.append(graphs[i].dx())
        else:
            outputs.append(runner.layers.backward(1, here, x[start:end], dy[start:end], inputs[i], states[i], sums))
    return [*outputs, *(sums[name] for name in sorted(own))]


@pytest.mark.parametrize(
    ("model_type", "dtype"), [("qwen3", torch.bfloat16), pytest.param("cohere", torch.float32, marks=pytest.mark.long)]
)
def test_joined_layers_compute_what_they_compute_apart(model_type: str, dtype: torch.dtype) -> None:
    """Recomputed or with a graph that is kept, whose weights are in another slot in backward: the same bits."""
    config = small(model_type)
    weights = {name: p.detach() for name, p in random_model(config).named_parameters()}
    spec = take_apart(config)
    assert len(spec.joined[1]) == 2
    results = [layer_run(of, weights, dtype, keep=keep) for of in (spec, apart(spec)) for keep in (False, True)]
    assert all(torch.equal(a, b) for a, b in zip(results[0], results[1], strict=True))
    close = 1e-5 if dtype == torch.float32 else 2e-2
    for joined, alone in zip(results[0], results[2], strict=True):
        assert (joined - alone).float().norm() <= close * alone.float().norm()


class Products(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **(kwargs or {}))


def test_products_are_fewer_and_no_larger_in_sum() -> None:
    """Of a layer of nine modules with seven matrices four products are left, with the FLOPs that seven had."""
    config = small("llama")
    weights = {name: p.detach() for name, p in random_model(config).named_parameters()}
    spec = take_apart(config)
    flops, calls = [], []
    for of in (spec, apart(spec)):
        with FlopCounterMode(display=False) as counter:
            layer_run(of, weights, torch.float32, keep=True)
        flops.append(counter.get_total_flops())
        with Products() as products:
            layer_run(of, weights, torch.float32, keep=True)
        calls.append(products.calls)
    assert flops[0] == flops[1]
    # On two chunks: forward, back to the input, and the gradient of the weights.
    assert calls[1] - calls[0] == 2 * 3 * (7 - 4)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_compiled_layers_are_joined_in_one_graph(model_type: str) -> None:
    """No graph more than apart, and the same gradients but for rounding."""
    config = small(model_type)
    weights = {name: p.detach() for name, p in random_model(config).named_parameters()}
    spec = take_apart(config)
    found = []
    for of in (spec, apart(spec)):
        with compiled_afresh() as counters:
            results = [layer_run(of, weights, torch.float32, keep=keep, compile=True) for keep in (False, True)]
            found.append((counters["unique_graphs"], results))
    assert found[0][0] == found[1][0]
    for joined, alone in zip(found[0][1], found[1][1], strict=True):
        assert all((a - b).norm() <= 1e-5 * b.norm() for a, b in zip(joined, alone, strict=True))
