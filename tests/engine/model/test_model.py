"""Taking models apart on the meta device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from samples import cases
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3NextConfig,
    T5Config,
)

from penstock.engine.model import skeleton
from penstock.engine.model.anatomy import Initializer, initial_constants, take_apart, validate_context
from penstock.engine.model.shrink import fewer_layers, shrink
from penstock.engine.model.spec import BlockSpec
from penstock.storage.errors import UserError


def qwen3(**fields: Any) -> Qwen3Config:
    shape = {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "head_dim": 24, "vocab_size": 211, "max_position_embeddings": 128}
    return Qwen3Config(**shape | fields)


def test_qwen3_blocks_and_buffers() -> None:
    spec = take_apart(qwen3())
    assert [block.name for block in spec.blocks] == ["embed", "layers.0", "layers.1", "layers.2", "head"]
    assert spec.blocks[-1] == BlockSpec("head", "head", ("head",))
    assert [p.name for p in spec.buffers["embed"]] == ["model.embed_tokens.weight"]
    assert {p.name: p.decay for p in spec.buffers["head"]} == {"model.norm.weight": False, "lm_head.weight": True}
    assert spec.structures == (0, 0, 0)
    shape = spec.attention[2]
    assert (shape.heads, shape.kv_heads, shape.qk_dim, shape.v_dim, shape.window) == (4, 2, 24, 24, None)
    assert not spec.recurrent
    assert not spec.length_dependent_rotary
    model = AutoModelForCausalLM.from_config(qwen3())
    shapes = {p.name: p.shape for params in spec.buffers.values() for p in params}
    assert shapes == {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert spec.num_params == sum(p.numel() for p in model.parameters())


def test_tied_parameters_are_the_embeddings() -> None:
    spec = take_apart(qwen3(tie_word_embeddings=True))
    assert spec.blocks[-1].buffers == ("head", "embed")
    assert [p.name for p in spec.buffers["head"]] == ["model.norm.weight"]


def test_learned_positions_belong_to_the_embedding() -> None:
    spec = take_apart(
        GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=211, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    )
    assert {p.name for p in spec.buffers["embed"]} == {"transformer.wte.weight", "transformer.wpe.weight"}
    assert {p.name for p in spec.buffers["head"]} == {"transformer.ln_f.weight", "transformer.ln_f.bias"}


def test_windows_chunks_and_wide_heads_are_read_from_the_layers() -> None:
    gemma = take_apart(Gemma3TextConfig(num_hidden_layers=7, sliding_window=512))
    assert [s.window for s in gemma.attention if s] == [512, 512, 512, 512, 512, None, 512]
    assert len(set(gemma.structures)) == 2
    llama4 = take_apart(CONFIG_MAPPING["llama4_text"](num_hidden_layers=4))
    assert [(s.chunk, s.window) for s in llama4.attention if s] == [(8192, None)] * 3 + [(None, None)]
    deepseek = take_apart(DeepseekV3Config(num_hidden_layers=5))
    assert all((s.qk_dim, s.v_dim, s.kv_heads) == (192, 128, 128) for s in deepseek.attention if s)
    assert deepseek.structures == (0, 0, 0, 3, 3)
    assert list(deepseek.constants) == [f"model.layers.{i}.mlp.gate.e_score_correction_bias" for i in (3, 4)]


def test_parameters_that_the_model_never_trains_are_constants() -> None:
    config = shrink(CONFIG_MAPPING["ernie4_5_moe"]())[0]
    spec = take_apart(config)
    name = "model.layers.1.mlp.gate.moe_statics.e_score_correction_bias"
    assert name in spec.constants
    assert all(param.name != name for params in spec.buffers.values() for param in params)
    assert torch.equal(initial_constants(spec)[name], torch.zeros(spec.constants[name]))


def test_layers_that_carry_state_are_found() -> None:
    spec = take_apart(Qwen3NextConfig(num_hidden_layers=4))
    assert spec.recurrent
    assert [shape is None for shape in spec.attention] == [True, True, True, False]


UNDROPPED = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (T5Config(), "encoder-decoder"),
        (PretrainedConfig(), "not a causal language model"),
        (CONFIG_MAPPING["vit"](hidden_dropout_prob=0.0), "not a causal language model"),
        (qwen3(attention_dropout=0.1), "attention_dropout is 0.1"),
        (GPT2Config(), "resid_pdrop is 0.1"),
        (qwen3(quantization_config={"quant_method": "fp8"}), "quantised"),
        (CONFIG_MAPPING["bert"](num_hidden_layers=2, **UNDROPPED), "not causal"),
        (CONFIG_MAPPING["gptj"](n_layer=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0), "attention interface"),
        (
            CONFIG_MAPPING["gemma3n_text"](num_hidden_layers=5, num_kv_shared_layers=0),
            "in addition to its hidden state",
        ),
    ],
    ids=lambda value: value.model_type if isinstance(value, PretrainedConfig) else None,
)
def test_untrainable_models_are_refused(config: PretrainedConfig, message: str) -> None:
    with pytest.raises(UserError, match=message):
        take_apart(config)


def test_context_must_be_reachable() -> None:
    spec = take_apart(qwen3())
    validate_context(spec, 128)
    with pytest.raises(UserError, match=r"129 tokens .* max_position_embeddings 128 .* yarn"):
        validate_context(spec, 129)
    dynamic = qwen3(rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4})
    validate_context(take_apart(dynamic), 512)


def test_initialisation_is_the_models_own_and_repeats() -> None:
    spec = take_apart(qwen3(initializer_range=0.03, pad_token_id=7))
    initializer = Initializer(spec, seed=3)
    first = initializer.values("layers.1")
    initializer.values("embed")
    for again in (initializer.values("layers.1"), Initializer(spec, seed=3).values("layers.1")):
        assert all(torch.equal(first[name], again[name]) for name in first)
    assert {name: tuple(t.shape) for name, t in first.items()} == {p.name: p.shape for p in spec.buffers["layers.1"]}
    assert all(t.dtype == torch.float32 for t in first.values())
    weight = first["model.layers.1.mlp.up_proj.weight"]
    assert abs(weight.std() - 0.03) < 0.002
    assert torch.equal(first["model.layers.1.input_layernorm.weight"], torch.ones(64))
    assert not torch.equal(weight, Initializer(spec, seed=4).values("layers.1")["model.layers.1.mlp.up_proj.weight"])
    other = initializer.values("layers.2")["model.layers.2.mlp.up_proj.weight"]
    assert not torch.equal(weight, other)
    table = initializer.values("embed")["model.embed_tokens.weight"]
    assert torch.equal(table[7], torch.zeros(64))


def test_initialisation_builds_the_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Building one of a thousand layers takes seconds; for each of them, a start took over 9 minutes."""
    spec, built = take_apart(qwen3()), []
    build = skeleton.build
    monkeypatch.setattr(skeleton, "build", lambda *args, **named: built.append(args) or build(*args, **named))
    initializer = Initializer(spec, seed=3)
    assert all(initializer.values(name) for name in spec.buffers)
    assert len(built) == 1


def test_initial_constants_are_the_models_own() -> None:
    config = shrink(DeepseekV3Config())[0]
    constants = initial_constants(take_apart(config))
    expected = {n: b for n, b in AutoModelForCausalLM.from_config(config).named_buffers() if n in constants}
    assert constants.keys() == expected.keys()
    assert len(constants) == 1
    assert all(torch.equal(constants[name], expected[name]) for name in constants)


@pytest.mark.parametrize(
    "model_type",
    cases(["gemma3_text", "deepseek_v3", "qwen3_next", "llama4_text", "gpt_oss"], "gemma3_text", "deepseek_v3"),
)
def test_shrunk_model_has_every_kind_of_layer(model_type: str) -> None:
    config = CONFIG_MAPPING[model_type]()
    small, stand_ins = fewer_layers(config)
    layers = skeleton.find_layers(skeleton.build(config))[1]
    small_layers = skeleton.find_layers(skeleton.build(small))[1]
    assert len(small_layers) < len(layers)
    for index, stand_in in enumerate(stand_ins):
        assert skeleton.structure_key(layers[index]) == skeleton.structure_key(small_layers[stand_in])
    tiny = skeleton.build(shrink(config)[0])
    assert sum(p.numel() for p in tiny.parameters()) < 2_000_000


def test_layer_lists_of_the_right_length_are_told_apart() -> None:
    model = skeleton.build(LlamaConfig(num_hidden_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=99))
    assert skeleton.find_layers(model)[0] == "model.layers"
    model.model.layers = torch.nn.ModuleList(list(model.model.layers)[:1])
    with pytest.raises(UserError, match="found 0 lists of 2 layers"):
        skeleton.find_layers(model)
