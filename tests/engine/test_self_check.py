"""The self-check: what passes, what is refused and how. Models of which a part is frozen: their buffers, and gradients
of the rest against plain autograd. Adapters: what they stand beside, their gradients and first values, against plain
peft. The engine against the step in plain words, bit by bit, and that step against plain PyTorch."""

import json
import random
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import adapted
import pytest
import tiny
import torch
from compiled import compiled_afresh
from plain_training import plain_training
from samples import cases
from transformers import CONFIG_MAPPING, PretrainedConfig, Qwen3Config, T5Config
from transformers.models.qwen3 import modeling_qwen3

from penstock.engine.attention import chunk as attention
from penstock.engine.attention import select as attention_select
from penstock.engine.attention.spans import Span
from penstock.engine.config import AdapterConfig
from penstock.engine.forecast.problem import LOGITS_BYTES
from penstock.engine.machine.device import compute_dtype
from penstock.engine.model import skeleton
from penstock.engine.model.adapter_values import AdapterLayers, with_adapter
from penstock.engine.model.adapters import is_adapter, plain_name
from penstock.engine.model.anatomy import Initializer, take_apart
from penstock.engine.model.reference import Training, forward_backward, in_buffers
from penstock.engine.model.runner import ModelRunner
from penstock.engine.model.shrink import shrink
from penstock.engine.model.tokens import MicroBatch
from penstock.engine.model.trace import random_model
from penstock.engine.model.types import default_config
from penstock.engine.optim.base import MASTER
from penstock.engine.runtime.views import Views
from penstock.engine.self_check import CheckResult, check_model, reference_gradients, relative_errors
from penstock.engine.session import Session
from penstock.storage.files.errors import UserError

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + 0.01 * i for i in range(48)],
    "long_factor": [2.0 + i for i in range(48)],
    "original_max_position_embeddings": 4096,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
MINISTRAL = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384}
MINISTRAL |= {"llama_4_scaling_beta": 0.1}
# Fields that default configs have not: those are in test_architectures.py.
OFTEN: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "pad_token_id": 3}),
    ("llama", {"rope_parameters": DYNAMIC}),
    ("phi3", {"max_position_embeddings": 131072, "rope_parameters": LONGROPE}),
    ("apertus", {"num_key_value_heads": 8}),  # rounding takes an input over the kink of its activation
    ("minimax", {"num_hidden_layers": 4}),  # buffers that are masks, and differ from layer to layer
    ("gpt2", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),  # learned positions
    ("gemma4_text", {"hidden_size_per_layer_input": 0}),  # layers of different widths, badly conditioned
]
RARE: list[tuple[str, dict[str, Any]]] = [
    ("qwen2", {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 2, "num_hidden_layers": 4}),
    ("qwen3", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}}),
    ("gemma3_text", {"rope_parameters": {"full_attention": DYNAMIC, "sliding_attention": DYNAMIC}}),
    ("mixtral", {"sliding_window": 1024}),
    ("ministral3", {"rope_parameters": MINISTRAL}),
]
RARELY = [pytest.param(*case, marks=pytest.mark.long) for case in RARE]
HALVES = ["*embed_tokens*", "*.layers.0.*", "*.mlp.*", "*.norm.weight"]
TARGETS = {"llama": ["all-linear", "embed_tokens", "lm_head"], "gemma3_text": ["all-linear", "embed_tokens"]}
"""Beside all linear modules of the layers, of shapes where that says something more."""
COMPILED = [("llama", "dora"), ("gemma3_text", "rslora"), ("qwen3_moe", "lora")]
"""Each takes a minute."""


@pytest.mark.parametrize("pieces", cases([False, True], True), ids=["whole", "pieces"])
@pytest.mark.parametrize(("model_type", "fields"), [*OFTEN, *RARELY], ids=str)
def test_models_pass(model_type: str, fields: dict[str, Any], pieces: bool) -> None:
    result = check_model(CONFIG_MAPPING[model_type](**fields), pieces=pieces)
    assert result.ok, result.reason
    assert result.max_rel_error <= 1e-5
    assert result.worst_parameter
    assert result.reason is None


IN_SHARDS = ["cohere", "gpt_oss", "qwen3_next"]
IN_SHARDS_RARELY = ["deepseek_v3", "gemma3_text", "lfm2", "mamba2", "llama4_text"]


@pytest.mark.parametrize(
    "model_type", [*IN_SHARDS, *(pytest.param(kind, marks=pytest.mark.long) for kind in IN_SHARDS_RARELY)]
)
def test_models_pass_in_shards(model_type: str) -> None:
    """What follows attention beside it, sinks, heads of two widths, windows, states, blocks of tokens."""
    result = check_model(default_config(model_type), shards=3)
    assert result.ok, result.reason


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


def test_a_mistake_of_the_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here that documents see those before them: layers, attention and the step in plain words are right."""
    monkeypatch.setattr(Views, "documents", lambda self, op, chunk: [0])
    result = check_model(Qwen3Config())
    assert not result.ok
    assert result.max_rel_error > 1e-2


def test_a_mistake_in_float32_alone_is_no_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    original = modeling_qwen3.Qwen3MLP.forward

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        streamed = self.config._attn_implementation == attention.NAME
        return original(self, x.detach() if streamed and x.dtype == torch.float32 else x)

    monkeypatch.setattr(modeling_qwen3.Qwen3MLP, "forward", forward)
    result = check_model(Qwen3Config())
    assert not result.ok
    assert result.max_rel_error > 1e-2


def test_attention_that_forgets_the_past_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def own_part_only(start: int, end: int, key_start: int, key_end: int, *others: Any) -> Any:
        return [Span(start, end, start, end, None)] if key_start <= start and end <= key_end else []

    monkeypatch.setattr(attention_select, "spans", own_part_only)
    monkeypatch.setattr(attention_select, "_launches", {})  # else what other tests have found
    result = check_model(Qwen3Config())
    assert not result.ok
    assert result.reason is not None


def test_an_error_while_streaming_or_taking_apart_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("kernel exploded")

    def used_up(*args: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(attention, "_chunk_forward", fail)
    assert check_model(Qwen3Config()) == CheckResult(
        "qwen3", False, None, None, "streaming fails: RuntimeError: kernel exploded", "chunks"
    )
    monkeypatch.setattr(attention, "_chunk_forward", used_up)
    with pytest.raises(MemoryError):  # the machine's fault, not the model's
        check_model(Qwen3Config())
    with pytest.raises(UserError, match="encoder-decoder") as refusal:
        take_apart(T5Config())
    assert check_model(T5Config()) == CheckResult("t5", False, None, None, str(refusal.value))


def small(model_type: str, **fields: Any) -> PretrainedConfig:
    if model_type == "gpt2":
        fields |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = CONFIG_MAPPING[model_type](num_hidden_layers=3, **fields)
    return shrink(config)[0]


def documents_of(vocabulary: int, *lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(vocabulary, (length,), generator=generator) for length in lengths]


@pytest.mark.parametrize("tied", [False, True])
def test_buffers_are_split_by_what_is_frozen(tied: bool) -> None:
    config = small("llama", tie_word_embeddings=tied)
    whole, spec = take_apart(config), take_apart(config, HALVES)
    names = [{param.name for param in of.params} for of in (whole, spec)]
    assert names[0] == names[1]
    blocks = {block.name: block.buffers for block in spec.blocks}
    assert blocks["embed"] == ("embed.frozen",)
    assert blocks["layers.0"] == ("layers.0.frozen",)
    assert blocks["layers.1"] == ("layers.1", "layers.1.frozen")
    assert blocks["head"] == (("head.frozen", "embed.frozen") if tied else ("head", "head.frozen"))
    assert all(buffer.frozen == name.endswith(".frozen") for name, buffer in spec.buffers.items())
    assert all("mlp" in param.name for param in spec.buffers["layers.1.frozen"].params)
    assert not any("mlp" in param.name for param in spec.buffers["layers.1"].params)
    assert (spec.structures, spec.lowest_trained) == ((0, 1), 2)
    assert (whole.lowest_trained, whole.frozen_params, whole.num_trained) == (0, frozenset(), whole.num_params)
    assert spec.num_params == whole.num_params
    assert spec.num_trained == sum(p.numel for p in spec.params if p.name not in spec.frozen_params)


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


@pytest.mark.parametrize(("model_type", "freeze", "pieces"), [
    ("llama", HALVES, True),
    ("gpt2", ["*wte*", "*.h.0.attn*"], True),
    ("llama", ["*.layers.*", "*embed*"], False),
    pytest.param("qwen3", ["*.self_attn.*"], False, marks=pytest.mark.long),
    pytest.param("gemma3_text", ["*embed*", "*_proj.weight"], True, marks=pytest.mark.long),
    pytest.param("qwen3_moe", ["*.experts.*", "*.gate.*", "*.layers.0.*"], False, marks=pytest.mark.long),
])  # fmt: skip
def test_gradients_of_the_rest_are_those_of_plain_autograd(model_type: str, freeze: list[str], pieces: bool) -> None:
    config = small(model_type)
    spec = take_apart(config, freeze)
    source = random_model(config)
    documents = documents_of(spec.vocab_size, 61, 35, 17)
    stays = spec.frozen_params
    assert stays
    aux = 0.1 if model_type == "qwen3_moe" else 0.0
    loss, reference = reference_gradients(config, source, documents, router_aux_loss=aux)
    reference = {name: gradient for name, gradient in reference.items() if name not in stays}
    weights = in_buffers(spec, {name: parameter.detach() for name, parameter in source.named_parameters()})
    gradients = in_buffers(spec, {name: torch.zeros_like(weights[name]) for name in weights if name not in stays})
    runner = ModelRunner(spec, device="cpu", dtype=torch.float32, router_aux_loss=aux)
    streams = [MicroBatch.of(documents)]
    found = forward_backward(runner, weights, gradients, streams, 29, 1 << 14, in_pieces=pieces)
    assert found == pytest.approx(loss, rel=1e-5)
    assert gradients.keys() == reference.keys()
    assert max(relative_errors(gradients, reference).values()) < 1e-5


def linear_of(model: Any) -> list[str]:
    """Names of the linear modules of the layers."""
    layers = model.model.layers.named_modules()
    return sorted({name.rpartition(".")[2] for name, module in layers if isinstance(module, torch.nn.Linear)})


@pytest.mark.parametrize(("model_type", "method", "compile"), [
    *(("llama", "dora", False), ("qwen3", "rslora", False), ("qwen3_moe", "lora", False)),
    *(pytest.param(*case, False, marks=pytest.mark.long) for case in [("llama", "lora"), ("gemma3_text", "dora")]),
    *(pytest.param(*case, True, marks=pytest.mark.long) for case in COMPILED),
])  # fmt: skip
def test_gradients_are_those_of_plain_peft(model_type: str, method: str, compile: bool) -> None:
    shape = adapted.config(model_type)
    targets = ["all-linear"] if method == "dora" else TARGETS.get(model_type, ["all-linear"])
    adapter = adapted.section(method, targets=targets)
    ends = [name for name in targets if name != "all-linear"]
    model = adapted.base(shape)
    theirs = adapted.adapted(model, adapted.peft_config(adapter, [*linear_of(model), *ends]))
    documents = documents_of(97, 41, 22)
    total = sum(len(document) - 1 for document in documents)
    for document in documents:
        loss = theirs(input_ids=document[None], labels=document[None], use_cache=False).loss
        (loss * ((len(document) - 1) / total)).backward()
    values = adapted.by_our_names(theirs)
    expected = {name: p.grad for name, p in values.items() if is_adapter(name)}
    assert all(gradient is not None and gradient.any() for gradient in expected.values())

    spec = take_apart(shape, adapter=adapter)
    assert {p.name for p in spec.params} == values.keys()
    assert {p.name for buffer in spec.trained.values() for p in buffer.params} == expected.keys()
    runner = ModelRunner(spec, device="cpu", dtype=torch.float32, compile=compile)
    weights = in_buffers(spec, {name: parameter.detach() for name, parameter in values.items()})
    gradients = in_buffers(spec, {name: torch.zeros_like(weights[name]) for name in expected})
    with compiled_afresh() if compile else nullcontext({"unique_graphs": 0}) as counters:
        forward_backward(runner, weights, gradients, [MicroBatch.of(documents)], 19, 1 << 14)
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
    shape, adapter, (ids,) = adapted.config("llama"), adapted.section("dora"), documents_of(97, 41)
    model = adapted.base(shape)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    logits = model(input_ids=ids[None]).logits
    spec = take_apart(shape, adapter=adapter)
    blocks = [(n, {p.name: before[plain_name(p.name)] for p in b.params}) for n, b in spec.buffers.items() if b.frozen]
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
    assert torch.allclose(built(input_ids=ids[None]).logits, logits, atol=1e-5)


def test_a_rank_that_fits_the_model_fits_its_small_copy() -> None:
    """Whose narrowest projection has eight rows."""
    result = check_model(CONFIG_MAPPING["qwen3_next"](num_hidden_layers=2), adapter=adapted.section("lora", rank=16))
    assert result.ok, result.reason


def test_targets_by_pattern_make_layers_of_two_structures() -> None:
    """And a tied embedding is not merged."""
    spec = take_apart(adapted.config("qwen3"), adapter=adapted.section("lora", targets=["model.layers.1.*"]))
    assert spec.structures == (0, 1)
    assert {"layers.0", "layers.1"} & spec.buffers.keys() == {"layers.1"}
    spec = take_apart(adapted.config("qwen3"), adapter=adapted.section("lora", targets=["embed_tokens"]))
    with pytest.raises(UserError, match=r"'model.embed_tokens' has an adapter, but the embedding and"):
        AdapterLayers(spec).require_mergeable()


@pytest.mark.parametrize(("changes", "message"), [
    ({"targets": ["q_proj", "w1"]}, "'w1' matches no module of the model; it has "),
    ({"targets": ["mlp"]}, "'mlp' is not a linear module or an embedding; name the modules in it: down_proj, gate"),
    ({"rank": 17}, "17 is larger than the smallest side of 'model.layers.0.self_attn.k_proj.weight' (16 x 32)"),
    ({"method": "dora", "targets": ["embed_tokens"]}, "'model.embed_tokens' is an embedding"),
])  # fmt: skip
def test_sections_that_do_not_fit_the_model(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as refusal:
        take_apart(adapted.config("llama"), adapter=AdapterConfig(**({"method": "lora", "rank": 4} | changes)))
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)
    with pytest.raises(UserError, match=r"peft adapts 'model.layers.0.mlp.gate.weight' as a parameter, which has no"):
        take_apart(adapted.config("qwen3_moe"), adapter=adapted.section("dora", targets=["gate"]))


WIDE = tiny.model(hidden_size=64, intermediate_size=96, head_dim=16, num_layers=2)
"""All its weights are multiples of what a flat buffer aligns to: linear modules of one input are one product."""
TIED = tiny.model(tie_embeddings=True)
PLAIN: dict[str, Any] = {}
BFLOAT16 = {"compute_dtype": "bfloat16"}
NVME: dict[str, Any] = {"gpu": tiny.FLOOR, "ram": tiny.FLOOR}
MIXED: dict[str, Any] = {"gpu": 1_000_000, "ram": 1_500_000}
SOME_FROZEN: dict[str, Any] = {"gpu": 700_000, "ram": 420_000}
RECORDS: dict[str, Any] = {"gpu": 620_000, "ram": tiny.FLOOR, "gpu_first": "saved activations"}
STATES = RECORDS | {"gpu": 880_000}
LEAVING: dict[str, Any] = {"gpu": tiny.FLOOR, "group": 1, "offloaded_graphs": "all"}
STREAMED: dict[str, Any] = {"gpu": tiny.FLOOR, "ram": tiny.FLOOR, "streamed": True}
MOE = tiny.model(model_type="qwen3_moe", num_layers=2, overrides=tiny.EXPERTS)
HYBRID = tiny.model(model_type="qwen3_next", overrides=tiny.HYBRID)
FALCON = tiny.model(model_type="falcon_h1", num_layers=2, overrides=tiny.FALCON)
APART = {"split_layers": "experts"}
FLINT = tiny.EXPERTS | {"shared_expert_intermediate_size": 16, "mlp_only_layers": [0]}
KEPT = tiny.model(model_type="flint", num_layers=2, overrides=FLINT)
"""A router and attention sinks are kept in float32."""
NF4, INT8 = (tiny.model(frozen_format=name) for name in ("nf4", "int8"))
INT8_MOE = replace(MOE, frozen_format="int8")
NF4_TIERS: dict[str, Any] = {"gpu": tiny.FLOOR, "ram": 580_000, "ram_first": "weights"}
HALF_FROZEN = {"freeze": ["*embed_tokens*", "*.layers.0.*", "*.mlp.*"]}
"""Half of every layer, and of the lowest blocks everything."""
TOP = {"freeze": ["*embed_tokens*", "*.layers.*"]}
"""All but the head and the norm before it."""


class Case(NamedTuple):
    train: dict[str, Any] = PLAIN
    placed: dict[str, Any] = NVME
    model: Any = tiny.model()
    adapter: AdapterConfig | None = None


CASES = {
    "plain": Case(),
    "some on every tier": Case(placed=MIXED),
    "some on every tier, tied, bfloat16": Case(BFLOAT16, MIXED, TIED),
    "halves frozen, tied, bfloat16": Case(HALF_FROZEN | BFLOAT16, model=TIED),
    "halves frozen on every tier, recomputed": Case(HALF_FROZEN | {"activation_checkpointing": "full"}, SOME_FROZEN),
    "halves frozen, graphs leave": Case(HALF_FROZEN | {"activation_checkpointing": "auto"}, LEAVING),
    "frozen but for the head": Case(TOP),
    "norms frozen, bfloat16": Case({"freeze": ["*norm*"]} | BFLOAT16),
    "lora": Case(adapter=adapted.section("lora")),
    "dora in RAM": Case(placed={"gpu": tiny.FLOOR}, adapter=adapted.section("dora")),
    "lora, graphs leave": Case({"activation_checkpointing": "auto"}, LEAVING, adapter=adapted.section("lora")),
    "dora, recomputed": Case({"activation_checkpointing": "full"}, adapter=adapted.section("dora")),
    "lora on nf4": Case(model=NF4, adapter=adapted.section("lora")),
    "lora on nf4 on two tiers, bfloat16": Case(BFLOAT16, NF4_TIERS, NF4, adapted.section("lora")),
    "lora on nf4, graphs leave": Case({"activation_checkpointing": "auto"}, LEAVING, NF4, adapted.section("lora")),
    "dora on int8, recomputed, streamed": Case(
        {"activation_checkpointing": "full"}, STREAMED, INT8, adapted.section("dora")
    ),
    "lora on int8 experts apart, bfloat16": Case(APART | BFLOAT16, model=INT8_MOE, adapter=adapted.section("lora")),
    "halves frozen as nf4": Case(HALF_FROZEN, model=NF4),
    "joined in RAM, bfloat16": Case(BFLOAT16, {"gpu": tiny.FLOOR}, WIDE),
    "joined, graphs leave": Case({"activation_checkpointing": "auto"}, LEAVING, WIDE),
    "joined, recomputed": Case({"activation_checkpointing": "full"}, model=WIDE),
    "records on the GPU, not clipped": Case({"clip_norm": None}, RECORDS),
    "means of sequences": Case({"objective": "sequence_mean"}),
    "means of sequences, in groups": Case({"objective": "sequence_mean"}, {"gpu": tiny.FLOOR, "group": 1}),
    "experts apart": Case(APART, model=MOE),
    "experts apart on two tiers, bfloat16": Case(APART | BFLOAT16, {"gpu": 1_000_000, "ram": 1_500_000}, MOE),
    "experts apart, recomputed, streamed": Case(APART | {"activation_checkpointing": "full"}, STREAMED, MOE),
    "experts in groups": Case(tiny.GROUPS, model=MOE),
    "experts in groups on two tiers, bfloat16": Case(tiny.GROUPS | BFLOAT16, {"gpu": 1_000_000, "ram": 1_500_000}, MOE),
    "experts in groups, recomputed, streamed": Case(tiny.GROUPS | {"activation_checkpointing": "full"}, STREAMED, MOE),
    "experts in groups, frozen": Case(tiny.GROUPS | {"freeze": ["*.experts.*"]}, model=MOE),
    "experts apart, frozen": Case(APART | {"freeze": ["*.experts.*"]}, model=MOE),
    "hybrid": Case(model=HYBRID),
    "hybrid on two tiers, bfloat16": Case(BFLOAT16, {"gpu": 1_000_000, "ram": 1_500_000}, HYBRID),
    "hybrid, in groups, recomputed": Case(
        {"activation_checkpointing": "full"}, {"gpu": tiny.FLOOR, "group": 1}, HYBRID
    ),
    "hybrid, streamed, halves frozen": Case(HALF_FROZEN, STREAMED, HYBRID),
    "hybrid, states on the GPU and on NVMe": Case(placed=STATES, model=HYBRID),
    "attention and state at once": Case(model=FALCON),
    "some kept in float32": Case(BFLOAT16, model=KEPT),
    "some kept in float32, on two tiers": Case(BFLOAT16, {"gpu": 1_000_000, "ram": 1_500_000}, KEPT),
    "some kept in float32, halves frozen": Case(HALF_FROZEN | BFLOAT16, model=KEPT),
    "some kept in float32, graphs leave": Case({"activation_checkpointing": "auto"} | BFLOAT16, LEAVING, KEPT),
    "some kept in float32, streamed": Case({"activation_checkpointing": "full"} | BFLOAT16, STREAMED, KEPT),
    "some kept in float32, experts apart": Case(APART | BFLOAT16, model=KEPT),
    "some kept in float32, lora": Case(BFLOAT16, model=KEPT, adapter=adapted.section("lora")),
    "joined, graphs, bfloat16": Case({"activation_checkpointing": "none"} | BFLOAT16, {}, WIDE),
}
CHECKED_OFTEN = ("hybrid, in groups, recomputed", "attention and state at once", "hybrid on two tiers, bfloat16",
         "means of sequences, in groups", "some kept in float32", "some kept in float32, halves frozen",
         "some kept in float32, graphs leave", "experts apart", "experts apart on two tiers, bfloat16",
         "some on every tier, tied, bfloat16", "halves frozen, tied, bfloat16", "joined, graphs leave",
         "joined, graphs, bfloat16", "joined, recomputed", "records on the GPU, not clipped",
         "halves frozen, graphs leave", "frozen but for the head", "lora on nf4 on two tiers, bfloat16",
         "dora on int8, recomputed, streamed", "lora on int8 experts apart, bfloat16")  # fmt: skip


def reference(session: Session, steps: int) -> tuple[Training, list[tuple[float, float]]]:
    train, cursor = session.recipe.train, session.loader.cursor
    runner = ModelRunner(session.spec, device="cpu", dtype=compute_dtype(train))
    training = Training(runner, train, tiny.parameters(session.store, session.spec))
    chunk, logits_bytes = session.plan.max_chunk_tokens, LOGITS_BYTES["cpu"]
    results = [training.step(session.loader.next_step(), chunk, logits_bytes) for _ in range(steps)]
    session.loader.seek(cursor)
    return training, results


@pytest.mark.parametrize("name", cases(CASES, *CHECKED_OFTEN))
def test_the_engine_gives_the_references_bits(tmp_path: Path, name: str) -> None:
    """Wherever state lives and however lanes are delayed; of what is frozen the weights that there were."""
    case = CASES[name]
    t = tiny.training(**{"micro_batch_size": 1, "chunk_tokens": 20, "clip_norm": 1e-3} | case.train)
    with tiny.session(tmp_path, m=case.model, t=t, adapter=case.adapter, **case.placed) as session:
        spec, plan = session.spec, session.plan
        assert len({chunk.micro_batch for chunk in plan.chunks}) == 2
        assert case.placed is not MIXED or {b.state for b in plan.buffers.values()} == {"gpu", "ram", "nvme"}
        assert case.placed is not LEAVING or plan.offloaded_graphs
        assert case.placed not in (RECORDS, STATES) or (plan.saved_on_gpu and plan.spilled)
        assert name != "joined, recomputed" or len(plan.recomputed) == 2
        stays = {b.weights for b in plan.buffers.values() if b.copy_numel}
        assert case.placed is not NF4_TIERS or stays == {"ram", "nvme"}
        assert case.model is not WIDE or all(len(groups) == 2 for groups in spec.joined)
        held = {array.buffer for array in session.store.arrays() if array.kind == MASTER}
        assert held == spec.trained.keys()
        training, expected = reference(session, 2)
        tiny.delay(session, random.Random(name))
        steps = tiny.steps(session, 2)
        copies = [buffer.layout.numel for buffer in spec.buffers.values() if buffer.stored]
        assert copies or session.gpu.copy is None
        assert not copies or session.gpu.copy.numel() == max(copies)  # of one block, never more
        used = session.gpu.arena.used_bytes + plan.tiers["gpu"].parts["workspace"]
        assert used <= plan.tiers["gpu"].budget_bytes
        weights = tiny.parameters(session.store, spec)
    assert [(m.loss, m.grad_norm) for m in steps] == [pytest.approx(pair, rel=1e-6) for pair in expected]
    assert all(norm > 1e-3 for _, norm in expected), "nothing to clip"
    masters = training.by_name({buffer: kinds[MASTER] for buffer, kinds in training.state.items()})
    stays = {name: weight.float() for name, weight in training.by_name(training.weights).items()}
    assert weights.keys() == stays.keys() >= masters.keys()
    assert (masters.keys() < stays.keys()) == bool(spec.frozen_params)
    for parameter, weight in weights.items():
        if parameter not in masters and parameter not in spec.float32_params:  # float32 where it is quantised
            weight = weight.to(compute_dtype(t)).float()
        assert torch.equal(weight, masters.get(parameter, stays[parameter])), parameter


def short(**rope: Any) -> Any:
    """A model whose rotary tables change at 16 tokens; most documents are longer, and many are not."""
    return tiny.model(max_position=16, overrides={"rope_parameters": {"rope_theta": 1e4, **rope}})


OF_A_LENGTH = {
    "hybrid": HYBRID,
    "attention and state at once": FALCON,
    "dynamic": short(rope_type="dynamic", factor=4.0),
    "longrope": short(
        rope_type="longrope", short_factor=[1.0] * 4, long_factor=[3.0] * 4, factor=2.0,
        original_max_position_embeddings=16,
    ),
    "temperature": tiny.model(
        model_type="llama4_text",
        overrides={"floor_scale": 8, "num_local_experts": 2, "intermediate_size_mlp": 48, "no_rope_layers": [1, 0, 1]},
    ),
    "experts' biases": tiny.model(model_type="gpt_oss", overrides={"num_local_experts": 4, "num_experts_per_tok": 2}),
}  # fmt: skip


def documents_of_many_lengths(folder: Path) -> Any:
    chance = random.Random(1)
    rows = [{"input_ids": chance.choices(range(3, 250), k=chance.randint(4, 44))} for _ in range(60)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tiny.data(source="tokens", path=str(folder / "rows.jsonl"), max_documents=None)


@pytest.mark.parametrize("name", cases(OF_A_LENGTH, "hybrid", "dynamic", "temperature"))
def test_each_document_of_a_row_is_by_itself(tmp_path: Path, name: str) -> None:
    """Rotary tables by its length, a temperature by its positions, a state that begins with it, as in plain PyTorch one
    document at a time."""
    t = tiny.training(lr=3e-3, eps=1e-5, weight_decay=0.5, chunk_tokens=20)
    with tiny.session(tmp_path, m=OF_A_LENGTH[name], t=t, d=documents_of_many_lengths(tmp_path)) as session:
        cursor = session.loader.cursor
        lengths = [length for m in session.loader.next_step() for length in m.lengths]
        assert min(lengths) < 16 < max(lengths)
        session.loader.seek(cursor)
        losses, expected, _ = plain_training(session, 3)
        session.loader.seek(cursor)
        metrics = tiny.steps(session, 3)
        weights = tiny.parameters(session.store, session.spec)
    assert [m.loss for m in metrics] == pytest.approx(losses, rel=1e-5)
    for name, weight in weights.items():
        assert (weight - expected[name]).norm() <= 1e-5 * expected[name].norm(), name


@pytest.mark.parametrize("model", [TIED, WIDE], ids=["tied", "joined"])
@pytest.mark.parametrize("policy", [{"chunk_tokens": 7}, {"chunk_tokens": 96, "micro_batch_size": 2}], ids=str)
def test_the_reference_is_plain_pytorch(tmp_path: Path, policy: dict[str, Any], model: Any) -> None:
    # An epsilon above the rounding of a gradient, which it would else make a whole step of.
    t = tiny.training(clip_norm=0.5, warmup_steps=2, lr=3e-3, eps=1e-5, **policy)
    with tiny.session(tmp_path, m=model, t=t) as session:
        training, results = reference(session, 3)
        losses, expected, _ = plain_training(session, 3)
    assert [loss for loss, _ in results] == pytest.approx(losses, rel=1e-5)
    weights = training.by_name(training.weights)
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        assert (weight - expected[name]).norm() <= 1e-5 * expected[name].norm(), name
