"""The self-check: what passes, what is refused and how. And models of which a part is frozen: their buffers, and
gradients of the rest against plain autograd."""

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, PretrainedConfig, Qwen3Config, T5Config
from transformers.models.qwen3 import modeling_qwen3

from penstock.engine.attention import chunk as attention
from penstock.engine.attention import select as attention_select
from penstock.engine.attention.spans import Span
from penstock.engine.model.anatomy import Initializer, take_apart
from penstock.engine.model.check import CheckResult, TokenStream, check_model, reference_gradients, relative_errors
from penstock.engine.model.reference import forward_backward, in_buffers
from penstock.engine.model.runner import ModelRunner
from penstock.engine.model.shrink import shrink
from penstock.engine.model.trace import random_model
from penstock.storage.errors import UserError

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + 0.01 * i for i in range(48)],
    "long_factor": [2.0 + i for i in range(48)],
    "original_max_position_embeddings": 4096,
}
OFTEN: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "pad_token_id": 3}),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}),
    ("phi3", {"max_position_embeddings": 131072, "rope_parameters": LONGROPE}),
    ("gpt_oss", {}),
    ("deepseek_v3", {}),
    ("qwen3_next", {}),
    ("gpt2", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),  # learned positions
]
RARELY: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ("llama", "mistral", "qwen2", "qwen3", "phi3", "olmo2", "gemma2", "gemma3_text")),
    *((name, {}) for name in ("cohere", "mixtral", "qwen2_moe", "qwen3_moe")),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 2, "num_hidden_layers": 4}),
    ("qwen3", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}}),
    ("mixtral", {"sliding_window": 1024}),
    ("llama4_text", {}),  # chunked attention
    ("mamba2", {}),  # no attention
    ("gemma4_text", {"hidden_size_per_layer_input": 0}),  # layers of different widths, badly conditioned
]


@pytest.mark.parametrize(
    "pieces", [pytest.param(False, id="whole", marks=pytest.mark.long), pytest.param(True, id="pieces")]
)
@pytest.mark.parametrize(
    ("model_type", "fields"), [*OFTEN, *(pytest.param(*case, marks=pytest.mark.long) for case in RARELY)], ids=str
)
def test_models_pass(model_type: str, fields: dict[str, Any], pieces: bool) -> None:
    result = check_model(CONFIG_MAPPING[model_type](**fields), pieces=pieces)
    assert result.ok, result.reason
    assert result.max_rel_error <= 1e-5
    assert result.worst_parameter
    assert result.reason is None


def test_broken_layer_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    original = modeling_qwen3.Qwen3MLP.forward

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        streamed = self.config._attn_implementation == attention.NAME
        if not streamed:
            return original(self, x)
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x).detach())

    monkeypatch.setattr(modeling_qwen3.Qwen3MLP, "forward", forward)
    result = check_model(Qwen3Config())
    assert not result.ok
    assert result.worst_parameter.endswith("mlp.up_proj.weight")
    assert result.max_rel_error > 0.5
    assert result.worst_parameter in result.reason


def test_attention_that_forgets_the_past_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def own_part_only(start: int, end: int, *others: Any) -> Any:
        return [Span(start, end, start, end, None)]

    monkeypatch.setattr(attention_select, "spans", own_part_only)
    monkeypatch.setattr(attention_select, "_launches", {})  # else what other tests have found
    result = check_model(Qwen3Config())
    assert not result.ok
    assert result.reason is not None


def test_an_error_while_streaming_or_taking_apart_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("kernel exploded")

    monkeypatch.setattr(attention, "_chunk_forward", fail)
    assert check_model(Qwen3Config()) == CheckResult(
        "qwen3", False, None, None, "streaming fails: RuntimeError: kernel exploded"
    )
    with pytest.raises(UserError, match="encoder-decoder") as refusal:
        take_apart(T5Config())
    assert check_model(T5Config()) == CheckResult("t5", False, None, None, str(refusal.value))


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
    names = [{param.name for params in of.buffers.values() for param in params} for of in (whole, spec)]
    assert names[0] == names[1]
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
    specs = (take_apart(config, freeze) for freeze in ([], HALVES))
    one, other = ({n: t for _, of in Initializer(spec, seed=3).buffers() for n, t in of.items()} for spec in specs)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_patterns_that_leave_nothing_to_do_are_refused() -> None:
    with pytest.raises(UserError, match=r"train\.freeze: '\*\.mpl\.\*' matches no parameter; the nearest are"):
        take_apart(small("llama"), ["*.mpl.*"])
    with pytest.raises(UserError, match=r"train\.freeze: all .* parameters are frozen"):
        take_apart(small("llama"), ["*embed*", "*"])


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
