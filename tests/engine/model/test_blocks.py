"""Blocks computed chunk by chunk against plain autograd, and what backward's recomputation leaves out."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from compiled import compiled_afresh
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PretrainedConfig

from penstock.engine.model.anatomy import take_apart
from penstock.engine.model.check import TokenStream, reference_gradients, relative_errors
from penstock.engine.model.recompute import GradientOnlyLinear, unread_linear
from penstock.engine.model.reference import forward_backward, in_buffers
from penstock.engine.model.runner import ModelRunner
from penstock.engine.model.shrink import shrink
from penstock.engine.model.tokens import ChunkTokens
from penstock.engine.model.trace import random_model


def tiny(model_type: str = "qwen3", **fields: Any) -> PretrainedConfig:
    shape = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 101, "max_position_embeddings": 256}
    return CONFIG_MAPPING[model_type](**shape | {"pad_token_id": 5} | fields)


def documents(lengths: list[int], vocabulary: int = 101) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(vocabulary, (length,), generator=generator) for length in lengths]


def gradients(
    runner: ModelRunner, weights: dict[str, Tensor], streams: list[TokenStream], chunk: int
) -> tuple[float, dict[str, Tensor]]:
    sums = in_buffers(runner.spec, {name: torch.zeros_like(weight) for name, weight in weights.items()})
    return forward_backward(runner, weights, sums, streams, chunk, 1 << 14), sums


@pytest.fixture(scope="module")
def qwen3() -> tuple[PretrainedConfig, Any, ModelRunner, dict[str, Tensor]]:
    config = tiny()
    model = random_model(config)
    runner = ModelRunner(take_apart(config), device="cpu", dtype=torch.float32)
    return config, model, runner, in_buffers(runner.spec, {name: p.detach() for name, p in model.named_parameters()})


@pytest.mark.parametrize(("chunk", "num_micro_batches"), [(128, 1), (32, 2), (8, 2), (45, 5)])
def test_chunks_and_micro_batches_are_exact(qwen3: Any, chunk: int, num_micro_batches: int) -> None:
    config, model, runner, weights = qwen3
    rows = [documents([60 - i, 5 + i, 63]) for i in range(num_micro_batches)]
    loss, reference = reference_gradients(config, model, [d for row in rows for d in row])
    streamed_loss, grads = gradients(runner, weights, [TokenStream.of(row) for row in rows], chunk)
    assert streamed_loss == pytest.approx(loss, rel=1e-5)
    assert max(relative_errors(grads, reference).values()) <= 1e-5


def test_gradients_are_added_to_what_is_there_and_weights_used_in_place(qwen3: Any) -> None:
    _, _, runner, weights = qwen3
    stream = TokenStream.of(documents([40]))
    (state,) = runner.layers.states(0, stream.documents, [(0, 40)])
    inputs, x = runner.inputs(stream.positions, 39), torch.randn(40, 64)
    layer = in_buffers(runner.spec, {name: tensor for name, tensor in weights.items() if ".layers.0." in name})
    before = runner.layers.forward(0, layer, x, inputs, state)
    sums = []
    for base in (0.0, 1.0):
        grads = in_buffers(runner.spec, {name: torch.full_like(tensor, base) for name, tensor in layer.items()})
        state.dk, state.dv = torch.zeros_like(state.k), torch.zeros_like(state.v)
        runner.layers.backward(0, layer, x, torch.ones(40, 64), inputs, state, grads)
        sums.append(grads)
    for name in layer:
        torch.testing.assert_close(sums[1][name], sums[0][name] + 1.0)
    # Changing the buffer that a layer was given changes the next result: nothing was copied.
    for tensor in layer.values():
        tensor.zero_()
    assert torch.equal(runner.layers.forward(0, layer, x, inputs, state), x)
    assert not torch.equal(before, x)


def test_head_in_sub_chunks_is_autograds(qwen3: Any) -> None:
    _, model, runner, weights = qwen3
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    labels = torch.arange(20)
    labels[[3, 19]] = -100
    head = {name: weights[name] for name in ("model.norm.weight", "lm_head.weight")}
    logits = model.lm_head(model.model.norm(x))
    expected = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    reference = torch.autograd.grad(expected * 0.5, [x, *(model.get_parameter(name) for name in head)])
    grads = {name: torch.zeros_like(tensor) for name, tensor in head.items()}
    tokens = ChunkTokens.of(torch.zeros_like(labels), labels, torch.arange(20))
    loss, dx = runner.head(head, x.detach(), tokens, 0.5, grads, 101 * 4 * 3)
    torch.testing.assert_close(loss, expected.detach().double())
    torch.testing.assert_close(dx, reference[0])
    for computed, expected_grad in zip(grads.values(), reference[1:], strict=True):
        torch.testing.assert_close(computed, expected_grad)


def test_head_without_targets_gives_zero(qwen3: Any) -> None:
    _, _, runner, weights = qwen3
    head = {name: weights[name] for name in ("model.norm.weight", "lm_head.weight")}
    tokens = ChunkTokens.of(torch.arange(4), torch.full((4,), -100), torch.arange(4))
    loss, dx = runner.head(head, torch.randn(4, 64), tokens, 1.0, {}, 1 << 20)
    assert loss == 0
    assert torch.equal(dx, torch.zeros(4, 64))


def test_embedding_gradient_skips_the_padding_id(qwen3: Any) -> None:
    _, _, runner, weights = qwen3
    name = "model.embed_tokens.weight"
    ids, positions = torch.tensor([9, 5, 9, 100]), torch.arange(4)
    dx = torch.randn(4, 64)
    grads = {name: torch.zeros_like(weights[name])}
    table = {name: weights[name]}
    assert torch.equal(runner.embed(table, ids, positions), weights[name][ids])
    runner.embed_backward(table, ChunkTokens.of(ids, ids, positions), dx, grads)
    expected = torch.zeros_like(weights[name])
    expected[9], expected[100] = dx[0] + dx[2], dx[3]
    torch.testing.assert_close(grads[name], expected)
    assert torch.equal(runner.embed(table, ids, positions), weights[name][ids]), "the padding id must be restored"


def test_rotary_tables_come_from_the_longest_position() -> None:
    """Tables of one chunk do not depend on the chunk, nor on which lengths were asked for before."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    spec = take_apart(tiny("llama", max_position_embeddings=32, rope_parameters=rope))
    assert spec.length_dependent_rotary
    runner = ModelRunner(spec, device="cpu", dtype=torch.float32)

    def tables(start: int, end: int, longest: int) -> Tensor:
        (call, _) = runner.inputs(torch.arange(start, end), longest).calls
        cos, _ = call.kwargs["position_embeddings"]
        assert cos.shape[1] == end - start
        return cos

    whole = tables(0, 100, 99)
    short = tables(0, 20, 19)
    assert not torch.equal(whole[:, :20], short)
    assert torch.equal(tables(0, 20, 99), whole[:, :20])
    assert torch.equal(tables(60, 100, 99), whole[:, 60:])
    assert torch.equal(tables(0, 20, 19), short)


def test_inputs_count_shared_tables_once(qwen3: Any) -> None:
    _, _, runner, _ = qwen3
    inputs = runner.inputs(torch.arange(10), 9)
    cos, sin = inputs.calls[0].kwargs["position_embeddings"]
    assert inputs.nbytes == cos.nbytes + sin.nbytes + 10 * 8


@pytest.mark.long
@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="needs a C++ compiler")
def test_compiled_template_serves_every_layer_without_recompiling() -> None:
    config = tiny(num_hidden_layers=3)
    model = random_model(config)
    spec = take_apart(config)
    weights = in_buffers(spec, {name: p.detach() for name, p in model.named_parameters()})
    stream = [TokenStream.of(documents([64]))]
    eager = gradients(ModelRunner(spec, device="cpu", dtype=torch.float32), weights, stream, 32)
    with compiled_afresh() as counters:
        runner = ModelRunner(spec, device="cpu", dtype=torch.float32, compile=True)
        compiled = gradients(runner, weights, stream, 32)
        graphs = counters["unique_graphs"]
        again = gradients(runner, in_buffers(spec, weights), stream, 32)
        assert graphs > 0
        assert counters["unique_graphs"] == graphs
    assert compiled[0] == again[0] == pytest.approx(eager[0], rel=1e-5)
    assert max(relative_errors(compiled[1], eager[1]).values()) <= 1e-5


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_for_gradients_only_gives_those_of_the_linear_layer(bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(6, 4, bias=bias, dtype=torch.float64)
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(2, 3, 4, dtype=torch.float64)
    expected = torch.autograd.grad(linear(x), [x, *linear.parameters()], dy)
    y = GradientOnlyLinear(linear)(x)
    assert torch.equal(y, torch.zeros_like(dy))
    computed = torch.autograd.grad(y, [x, *linear.parameters()], dy)
    torch.testing.assert_close(computed, expected)


class _Layer(nn.Module):
    """`residual + up` with something done to the sum."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(8, 4), nn.Linear(4, 8)
        self.norm = nn.LayerNorm(8) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x + self.up(torch.tanh(self.down(x))))
        return out


@pytest.mark.parametrize(("norm", "expected"), [(False, "up"), (True, None)])
def test_last_projection_is_left_out_only_if_nothing_reads_it(norm: bool, expected: str | None) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 8, requires_grad=True)
    layer = _Layer(norm)
    assert unread_linear(layer, lambda module: module(x), x) == expected
    assert isinstance(layer.up, nn.Linear)


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [("llama", "mlp.down_proj"), ("cohere", "mlp.down_proj"), ("gemma2", None), ("mixtral", None)],
)
def test_what_the_last_projection_of_architectures_is(model_type: str, expected: str | None) -> None:
    spec = take_apart(shrink(CONFIG_MAPPING[model_type]())[0])
    assert set(spec.unread) == {expected}
