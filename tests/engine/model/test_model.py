"""Taking models apart on the meta device; what their blocks are computed with, what backward's recomputation leaves
out, and which linear modules are one product. Gradients beside plain autograd's: test_check.py."""

import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import adapted
import pytest
import torch
from compiled import compiled_afresh
from samples import cases
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    GPT2Config,
    PretrainedConfig,
    Qwen3Config,
    T5Config,
    Trainer,
)
from transformers.activations import XIELUActivation
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from penstock.engine.attention import backends
from penstock.engine.attention.chunk import SavedAttention
from penstock.engine.model import graph_size, skeleton
from penstock.engine.model.anatomy import Initializer, initial_constants, take_apart
from penstock.engine.model.layers import LayerRunner
from penstock.engine.model.reference import in_buffers
from penstock.engine.model.runner import ModelRunner
from penstock.engine.model.shrink import fewer_layers, shrink
from penstock.engine.model.spec import BlockSpec, ModelSpec, graph_key
from penstock.engine.model.sums import GradientSums
from penstock.engine.model.tokens import ChunkTokens
from penstock.engine.model.trace import random_model
from penstock.engine.model.types import default_config
from penstock.storage.files.errors import UserError

VARIED = ("gemma3_text", "deepseek_v3", "qwen3_next", "llama4_text", "gpt_oss")
FIELDS: dict[str, dict[str, Any]] = {"cohere": {"use_qk_norm": True}}
"""What a default config does not show."""
SLOW = ("beam", "minicpm3", "minimax", "kimi_linear", "xlstm", "gemma3n_text", "gemma3n")
UNDROPPED = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATED = ("mlp.gate_proj", "mlp.up_proj")
DOWN = "mlp.down_proj"


def qwen3(**fields: Any) -> Qwen3Config:
    shape = {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "head_dim": 24, "vocab_size": 211, "max_position_embeddings": 128}
    return Qwen3Config(**shape | fields)


@pytest.mark.parametrize(
    ("error", "known"),
    [
        (NotImplementedError("Cannot copy out of meta tensor; no data!"), False),
        (RuntimeError("Tensor.item() cannot be called on meta tensors"), False),
        (TypeError("can't convert meta device type tensor to numpy"), False),
        (RuntimeError("Expected inputs of BF16 type but got mat_a.dtype=torch.float32"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), True),
        (KeyError("a slip of ours"), True),
        (AssertionError("and another"), True),
    ],
)
def test_what_a_graph_takes_is_unknown_only_without_data(
    monkeypatch: pytest.MonkeyPatch, error: Exception, known: bool
) -> None:
    """Any other failure of a layer is no size that is not known."""
    spec, dtype = take_apart(qwen3(vocab_size=97)), "float32"
    monkeypatch.setattr(graph_size, "_measured", {})

    def fails(*given: Any, **named: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(LayerRunner, "save_graph", fails)
        if known:
            with pytest.raises(type(error)) as caught:
                graph_size.find_graph_bytes(spec, dtype)
            assert caught.value is error
            assert spec.graph_bytes == {}
        else:
            graph_size.find_graph_bytes(spec, dtype)
            assert spec.graph_bytes == {graph_key(dtype, False): (None, None, None)}
    graph_size._measured.clear()
    graph_size.find_graph_bytes(spec, dtype)
    assert all(size and size > 0 for size in spec.graph_bytes[graph_key(dtype, False)])


def test_what_fails_without_data_really_does() -> None:
    """The words by which it is known are torch's."""
    values = torch.empty(3, device="meta")
    asked: list[Callable[[], Any]] = [values[0].item, values.tolist, values.cpu, values.numpy, values.nonzero]
    asked += [lambda: bool(values[0]), lambda: torch.repeat_interleave(values.long())]
    for ask in asked:
        with pytest.raises((RuntimeError, TypeError), match=graph_size._NEEDS_DATA):
            ask()


def test_qwen3_blocks_and_buffers() -> None:
    spec = take_apart(qwen3())
    assert [block.name for block in spec.blocks] == ["embed", "layers.0", "layers.1", "layers.2", "head"]
    assert spec.blocks[-1] == BlockSpec("head", "head", ("head",), (spec.blocks[-2].name,))
    assert [p.name for p in spec.buffers["embed"].params] == ["model.embed_tokens.weight"]
    assert {p.name: p.decay for p in spec.buffers["head"].params} == {
        "model.norm.weight": False,
        "lm_head.weight": True,
    }
    assert spec.structures == (0, 0, 0)
    shape = spec.attention[2]
    assert (shape.heads, shape.kv_heads, shape.qk_dim, shape.v_dim, shape.window) == (4, 2, 24, 24, None)
    assert not spec.recurrent
    assert not spec.length_dependent_rotary
    model = AutoModelForCausalLM.from_config(qwen3())
    shapes = {p.name: p.shape for p in spec.params}
    assert shapes == {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert spec.num_params == sum(p.numel() for p in model.parameters())
    tied = take_apart(qwen3(tie_word_embeddings=True))
    assert tied.blocks[-1].buffers == ("head", "embed")
    assert [p.name for p in tied.buffers["head"].params] == ["model.norm.weight"]
    # Learned positions belong to the embedding.
    gpt2 = take_apart(GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=211, **NO_DROPOUT))
    assert {p.name for p in gpt2.buffers["embed"].params} == {"transformer.wte.weight", "transformer.wpe.weight"}
    assert {p.name for p in gpt2.buffers["head"].params} == {"transformer.ln_f.weight", "transformer.ln_f.bias"}


def test_windows_chunks_wide_heads_and_state_are_read_from_the_layers() -> None:
    gemma = take_apart(CONFIG_MAPPING["gemma3_text"](num_hidden_layers=7, sliding_window=512))
    assert [s.window for s in gemma.attention if s] == [512, 512, 512, 512, 512, None, 512]
    assert len(set(gemma.structures)) == 2
    llama4 = take_apart(CONFIG_MAPPING["llama4_text"](num_hidden_layers=4))
    assert [(s.chunk, s.window) for s in llama4.attention if s] == [(8192, None)] * 3 + [(None, None)]
    deepseek = take_apart(CONFIG_MAPPING["deepseek_v3"](num_hidden_layers=5))
    assert all((s.qk_dim, s.v_dim, s.kv_heads) == (192, 128, 128) for s in deepseek.attention if s)
    assert deepseek.structures == (0, 0, 0, 3, 3)
    assert list(deepseek.constants) == [f"model.layers.{i}.mlp.gate.e_score_correction_bias" for i in (3, 4)]
    carrying = take_apart(CONFIG_MAPPING["qwen3_next"](num_hidden_layers=4))
    assert carrying.recurrent
    assert [shape is None for shape in carrying.attention] == [True, True, True, False]


@pytest.mark.parametrize("model_type", ["deepseek_v3", "ernie4_5_moe"])
def test_initial_constants_are_the_models_own(model_type: str) -> None:
    """Ernie's are parameters, which the model never trains."""
    config = shrink(CONFIG_MAPPING[model_type]())[0]
    spec, model = take_apart(config), AutoModelForCausalLM.from_config(config)
    constants = initial_constants(spec)
    assert constants.keys() == spec.constants.keys()
    assert constants.keys().isdisjoint(param.name for param in spec.params)
    expected = {n: t for n, t in [*model.named_buffers(), *model.named_parameters()] if n in constants}
    assert len(constants) == len(expected) == 1
    assert all(torch.equal(constants[name], expected[name]) for name in constants)


def undropped(model_type: str, **fields: Any) -> PretrainedConfig:
    """A small config of the type, without dropout."""
    config = default_config(model_type)
    for name, value in fields.items():
        setattr(config, name, value)
    return shrink(config)[0]


def small_models(model_types: Iterable[str]) -> Iterator[tuple[str, PretrainedConfig, ModelSpec]]:
    """Those of the types that can be taken apart."""
    for model_type in model_types:
        with suppress(Exception):  # many are no decoders, or want a config that is no default
            config = undropped(model_type, **FIELDS.get(model_type, {}))
            yield model_type, config, take_apart(config)


EVERY = sorted({name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in SLOW})
SOME = ["gpt_oss", "cohere", "deepseek_v3", "falcon_h1", "apertus", "gpt2", "qwen3_next"]


@pytest.mark.parametrize(("model_types", "least"), [
    (SOME, len(SOME)), pytest.param(EVERY, 85, marks=pytest.mark.long),
], ids=["some", "every"])  # fmt: skip
def test_norms_and_biases_are_never_decayed_and_matrices_are(model_types: list[str], least: int) -> None:
    """As by Hugging Face's Trainer, which goes by names, but for vectors, of which it decays those that are none of
    both, and for what lies inside a module that is named after its norms (`norm_attn_norm.attn`, `prelayernorm`)."""
    seen = 0
    for model_type, config, spec in small_models(model_types):
        params = list(spec.params)
        model = AutoModelForCausalLM.from_config(config)
        theirs = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
        matrices = {param.name for param in params if len(param.shape) > 1}
        owners = {name: model.get_submodule(name.rpartition(".")[0]) for name in matrices}
        plain = {name for name, owner in owners.items() if isinstance(owner, torch.nn.Linear | torch.nn.Embedding)}
        assert {param.name for param in params if param.decay} == (theirs | plain) & matrices, model_type
        norms = {name for name, owner in owners.items() if "norm" in type(owner).__name__.lower()}
        assert norms.isdisjoint(param.name for param in params if param.decay), model_type
        assert norms or model_type != "cohere"
        seen += 1
    assert seen >= least


@pytest.mark.parametrize(("model_types", "least"), [
    (SOME, len(SOME)), pytest.param(EVERY, 85, marks=pytest.mark.long),
], ids=["some", "every"])  # fmt: skip
def test_buffers_are_those_of_a_model_that_is_really_built(model_types: list[str], least: int) -> None:
    seen = 0
    for model_type, config, _ in small_models(model_types):
        model, expected = (skeleton.build(config, device=device) for device in ("meta", "cpu"))
        skeleton.materialise_buffers(model, model.named_modules(), torch.device("cpu"))
        found = dict(model.named_buffers())
        for name, buffer in expected.named_buffers():
            assert found[name].dtype == buffer.dtype
            assert torch.equal(found[name], buffer), (model_type, name)
        seen += 1
    assert seen >= least


def test_what_only_a_constructor_sets_is_initialised() -> None:
    config = undropped("apertus")
    spec, model = take_apart(config), AutoModelForCausalLM.from_config(config)
    values = {name: value for _, of in Initializer(spec, seed=1).buffers() for name, value in of.items()}
    learnt = [name for name in values if "act_fn" in name]
    assert len(learnt) == 4
    assert all(torch.equal(values[name], model.get_parameter(name).float()) for name in learnt)


def test_an_activation_is_computed_without_its_optional_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-check, on the CPU, would not see what the package's CUDA kernel computes."""
    constructed = XIELUActivation.__init__

    def installed(self: Any, *args: Any, **named: Any) -> None:
        constructed(self, *args, **named)
        self._xielu_cuda_obj = object()

    monkeypatch.setattr(XIELUActivation, "__init__", installed)
    model = skeleton.build(undropped("apertus"))
    activations = [part for part in model.modules() if isinstance(part, XIELUActivation)]
    assert [each._xielu_cuda_obj for each in activations] == [None, None]


@pytest.mark.parametrize(("config", "message"), [
    (T5Config(), "encoder-decoder"),
    (PretrainedConfig(), "not a causal language model"),
    (CONFIG_MAPPING["vit"](hidden_dropout_prob=0.0), "not a causal language model"),
    (qwen3(attention_dropout=0.1), "attention_dropout is 0.1"),
    (GPT2Config(), "resid_pdrop is 0.1"),
    (CONFIG_MAPPING["bert"](num_hidden_layers=2, **UNDROPPED), "not causal"),
    (CONFIG_MAPPING["gptj"](n_layer=2, **NO_DROPOUT), "attention interface"),
    (CONFIG_MAPPING["gemma3n_text"](num_hidden_layers=5, num_kv_shared_layers=0), r"given \['per_layer_input'\]"),
    (CONFIG_MAPPING["recurrent_gemma"](num_hidden_layers=3), "kept tensors of its last call"),
    (CONFIG_MAPPING["jetmoe"](num_hidden_layers=2), "looks at values before it attends"),
    (CONFIG_MAPPING["gemma4_unified"](), "mask depends on what the tokens are"),
], ids=lambda value: value.model_type if isinstance(value, PretrainedConfig) else None)  # fmt: skip
def test_untrainable_models_are_refused(config: PretrainedConfig, message: str) -> None:
    with pytest.raises(UserError, match=message):
        take_apart(config)


def test_initialisation_is_the_models_own_and_repeats() -> None:
    spec = take_apart(qwen3(initializer_range=0.03, pad_token_id=7))
    initializer = Initializer(spec, seed=3)
    first = initializer.values("layers.1")
    initializer.values("embed")
    for again in (initializer.values("layers.1"), Initializer(spec, seed=3).values("layers.1")):
        assert all(torch.equal(first[name], again[name]) for name in first)
    assert {name: tuple(t.shape) for name, t in first.items()} == {
        p.name: p.shape for p in spec.buffers["layers.1"].params
    }
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


@pytest.mark.parametrize("model_type", cases(VARIED, "gemma3_text", "deepseek_v3"))
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
    model = skeleton.build(qwen3(num_hidden_layers=2))
    assert skeleton.find_layers(model)[0] == "model.layers"
    model.model.layers = torch.nn.ModuleList(list(model.model.layers)[:1])
    with pytest.raises(UserError, match="found 0 lists of 2 layers"):
        skeleton.find_layers(model)


def runner_of(config: PretrainedConfig) -> ModelRunner:
    return ModelRunner(take_apart(config), device="cpu", dtype=torch.float32)


def test_embedding_gradient_skips_the_padding_id() -> None:
    runner, name = runner_of(qwen3(pad_token_id=5)), "model.embed_tokens.weight"
    weights = {name: torch.randn(211, 64)}
    ids, positions = torch.tensor([9, 5, 9, 100]), torch.arange(4)
    dx = torch.randn(4, 64)
    grads = {name: torch.zeros_like(weights[name])}
    table = {name: weights[name].clone()}
    assert torch.equal(runner.embed(table, ids, positions), weights[name][ids])
    runner.embed_backward(table, ChunkTokens.of(ids, ids, positions), dx, grads)
    expected = torch.zeros_like(weights[name])
    expected[9], expected[100] = dx[0] + dx[2], dx[3]
    torch.testing.assert_close(grads[name], expected)
    assert torch.equal(runner.embed(table, ids, positions), weights[name][ids]), "the padding id must be restored"


def test_rotary_tables_come_from_the_longest_position() -> None:
    """Tables of one chunk do not depend on the chunk, nor on which lengths were asked for before."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    runner = runner_of(qwen3(num_hidden_layers=2, max_position_embeddings=32, rope_parameters=rope))
    assert runner.spec.length_dependent_rotary

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
    inputs = runner_of(qwen3()).inputs(torch.arange(10), 9)
    cos, sin = inputs.calls[0].kwargs["position_embeddings"]
    assert inputs.nbytes == cos.nbytes + sin.nbytes + 10 * 8, "shared tables are counted once"


def small(model_type: str) -> PretrainedConfig:
    fields = NO_DROPOUT if model_type == "gpt2" else {}
    return shrink(CONFIG_MAPPING[model_type](num_hidden_layers=2, **fields))[0]


def apart(spec: ModelSpec) -> ModelSpec:
    return replace(spec, joined=((),) * len(spec.joined))


@pytest.mark.parametrize(("model_type", "groups", "last"), [
    ("llama", (QKV, GATED), DOWN),
    ("qwen2", (QKV, GATED), DOWN),  # with biases
    ("cohere", (QKV, GATED), DOWN),  # all five read one tensor
    ("qwen3_moe", (QKV,), None),
    ("qwen2_moe", (QKV, ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")), None),
    ("starcoder2", (QKV,), "mlp.c_proj"),
    ("phi3", (), DOWN),  # stored as one matrix
    ("gpt2", (), None),
    ("gemma2", (QKV, GATED), None),
    ("mixtral", (QKV,), None),
])  # fmt: skip
def test_which_linear_modules_are_joined_and_which_is_last(model_type: str, groups: Any, last: str | None) -> None:
    spec = take_apart(small(model_type))
    assert (set(spec.joined), set(spec.unread)) == ({groups}, {last})


def test_what_is_not_trained_or_padded_in_the_buffer_or_has_an_adapter_takes_no_part() -> None:
    for freeze, groups in (
        ("*.k_proj.*", (GATED,)),
        ("*.q_proj.*", (QKV[1:], GATED)),
        ("*.v_proj.bias", (QKV[:2], GATED)),
        ("*.mlp.*", (QKV,)),
    ):
        assert set(take_apart(small("qwen2"), [freeze]).joined) == {groups}, freeze
    assert set(take_apart(adapted.config("llama"), adapter=adapted.section("lora")).joined) == {()}
    config = small("llama")
    config.hidden_size, config.head_dim = 48, 12  # a weight of 96 x 48 elements does not end where the next begins
    assert set(take_apart(config).joined) == {()}


def layer_run(spec: ModelSpec, weights: dict[str, Tensor], keep: bool, **more: Any) -> list[Tensor]:
    """Output, gradient of the input and gradients of the parameters of layer 1 on two chunks of 24 tokens."""
    runner, ranges = ModelRunner(spec, device="cpu", **{"dtype": torch.float32} | more), [(0, 24), (24, 48)]
    x, dy = torch.randn(2, 48, spec.hidden_size, generator=torch.Generator().manual_seed(0)).to(runner.dtype)
    inputs = [runner.inputs(torch.arange(*of), 47) for of in ranges]
    states = runner.layers.states(1, [0], ranges)
    own = {p.name for p in spec.buffers["layers.1"].params}
    here = in_buffers(spec, {name: weights[name].to(runner.dtype) for name in own})
    sums = GradientSums(in_buffers(spec, {n: torch.full_like(t, 7, dtype=torch.float32) for n, t in here.items()}), own)
    outputs, graphs = [], []
    for i, (start, end) in enumerate(ranges):
        if keep:
            graph, y = runner.layers.save_graph(
                1, here, x[start:end].clone(), inputs[i], SavedAttention(states[i]).forward
            )
            graphs.append(graph)
        else:
            y = runner.layers.forward(1, here, x[start:end], inputs[i], states[i])
        outputs.append(y)
    for i in (1, 0):
        start, end = ranges[i]
        if keep:
            graphs[i].top(here, dy[start:end], sums)
            outputs.append(graphs[i].dx())
        else:
            outputs.append(runner.layers.backward(1, here, x[start:end], dy[start:end], inputs[i], states[i], sums))
    return [*outputs, *(sums[name] for name in sorted(own))]


@pytest.mark.parametrize("multiplies", [True, False])
def test_joined_layers_compute_what_they_do_apart(monkeypatch: pytest.MonkeyPatch, multiplies: bool) -> None:
    """In bfloat16, whether or not the CPU multiplies it."""
    config = small("qwen3")
    weights = {name: p.detach() for name, p in random_model(config).named_parameters()}
    spec = take_apart(config)
    alone = layer_run(apart(spec), weights, keep=False, dtype=torch.bfloat16)
    monkeypatch.setattr(backends, "_CPU_MULTIPLIES_BFLOAT16", multiplies)
    joined = layer_run(spec, weights, keep=False, dtype=torch.bfloat16)
    for one, other in zip(joined, alone, strict=True):
        assert (one - other).float().norm() <= 2e-2 * other.float().norm()


class Products(TorchDispatchMode):
    calls = 0

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
            layer_run(of, weights, keep=True)
        flops.append(counter.get_total_flops())
        with Products() as products:
            layer_run(of, weights, keep=True)
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
            results = [layer_run(of, weights, keep, compile=True) for keep in (False, True)]
            found.append((counters["unique_graphs"], results))
    assert found[0][0] == found[1][0]
    for joined, alone in zip(found[0][1], found[1][1], strict=True):
        assert all((a - b).norm() <= 1e-5 * b.norm() for a, b in zip(joined, alone, strict=True))
