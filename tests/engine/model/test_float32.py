"""What transformers keeps in float32 in a bfloat16 model is computed with in float32: the same dtypes, by its own
loading; the same outputs; and the same bits of training on every tier, frozen or not, and after a restart."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.distributed as dist
from samples import cases
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

from penstock.engine.cluster.model import make_sharded, rounded_alike
from penstock.engine.export import export
from penstock.engine.hf.config import model_config
from penstock.engine.model.anatomy import Initializer
from penstock.engine.model.reference import in_buffers
from penstock.engine.model.runner import ModelRunner
from penstock.engine.model.skeleton import weight_dtype
from penstock.engine.model.tokens import MicroBatch, last_positions
from penstock.engine.model.trace import random_model
from penstock.engine.runtime.sources import FolderSource
from penstock.engine.session import Session
from penstock.storage.generations.store import NvmeStore

ERNIE = {"moe_intermediate_size": 24, "moe_num_experts": 8, "moe_k": 2, "moe_layer_start_index": 0}
FLINT = {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [0]}
FLINT |= {"shared_expert_intermediate_size": 16}
DEEPSEEK = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
DEEPSEEK |= {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
DEEPSEEK |= {"moe_intermediate_size": 24, "n_shared_experts": 1, "num_key_value_heads": 4}
HYBRID = {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4, "linear_num_key_heads": 4}
HYBRID |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "pad_token_id": None}
KINDS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "ernie4_5_moe": (ERNIE, {"mlp.gate.weight"}),
    "flint": (FLINT, {"mlp.gate.weight", "self_attn.sinks"}),
    "olmo_hybrid": (HYBRID, {"linear_attn.A_log"}),
    "deepseek_v3": (DEEPSEEK, set()),
    "qwen3": ({}, set()),
}
"""Overrides, and the ends of the names of parameters that are kept: by their class's word, olmo_hybrid's by its own
constructor. deepseek_v3's is a buffer."""
HALVES = ["*embed_tokens*", "*.layers.0.*", "*.gate.*"]


def model(kind: str = "flint", **overrides: Any) -> tiny.ModelConfig:
    return tiny.model(model_type=kind, num_layers=2, overrides=KINDS[kind][0] | overrides)


def training(**changes: Any) -> tiny.TrainConfig:
    return tiny.training(**{"compute_dtype": "bfloat16", "steps": 3} | changes)


@pytest.mark.parametrize("kind", cases(KINDS, "ernie4_5_moe", "flint", "deepseek_v3"))
def test_dtypes_and_outputs_are_those_that_transformers_loads(tmp_path: Path, kind: str) -> None:
    """Of routers that bfloat16 would make all alike, so that other experts would be chosen."""
    config = model_config(tiny.recipe(model=model(kind)), None)
    spec, source = tiny.spec_of(config), random_model(config, 1)
    named = dict(source.named_parameters())
    for name, parameter in named.items():
        if name.endswith("mlp.gate.weight"):
            parameter.data.mul_(1e-3).add_(1)
        if ".experts." in name:
            parameter.data.mul_(10)
    for name in spec.constants:
        source.get_buffer(name).zero_()  # which would choose in the router's place
    source.save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation="eager").eval()
    dtypes = {name: tensor.dtype for name, tensor in theirs.state_dict().items()}
    trained = {param.name for param in spec.params}
    assert {name for name in trained if dtypes[name] == torch.float32} == spec.float32_params
    assert {name.split(".", 3)[3] for name in spec.float32_params} == KINDS[kind][1]
    ids = torch.randint(300, (40,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs(input_ids=ids[None], use_cache=False).logits[0].float()

    def error(*, kept: bool) -> float:
        constants = {name: buffer for name, buffer in source.named_buffers() if name in spec.constants}
        runner = ModelRunner(spec, device="cpu", dtype=torch.bfloat16, constants=constants)
        for name in spec.constants:
            assert runner._skeleton.model.get_buffer(name).dtype == dtypes[name]
        values = {p.name: named[p.name].detach() for p in spec.params}
        rounded = {name: value.to(torch.bfloat16) for name, value in values.items()}
        kept_in = {name: weight_dtype(torch.bfloat16, float32=name in spec.float32_params) for name in values}
        given = {n: (values if kept else rounded)[n].to(kept_in[n]) for n in values}
        found = logits(runner, in_buffers(spec, given), ids)
        # Of most tokens: rounding elsewhere may change a close choice of experts.
        return float(((found - expected).norm(dim=1) / expected.norm(dim=1)).median())

    assert error(kept=True) < 0.02
    if any(name.endswith("gate.weight") for name in spec.float32_params):
        assert error(kept=False) > 0.5, "rounded first"


def logits(runner: ModelRunner, weights: dict[str, Tensor], ids: Tensor) -> Tensor:
    """[tokens, vocabulary] of one document, float32."""
    stream, layers = MicroBatch.of([ids]), runner.layers
    inputs = runner.inputs(stream.positions, last_positions(stream.positions, stream.documents))
    x = runner.embed(weights, ids, stream.positions)
    for index in range(len(runner.spec.attention)):
        (state,) = layers.states(index, stream.documents, [(0, len(ids))])
        x = layers.forward(index, weights, x, inputs, state)
    return runner.logits(weights, x).float()


@pytest.mark.parametrize("freeze", [[], HALVES], ids=["all", "halves"])
def test_a_run_that_goes_on_has_the_bits_of_one_that_was_not_stopped(tmp_path: Path, freeze: list[str]) -> None:
    """With all else on NVMe, what is kept stays on the GPU as its master weights say."""
    floors: dict[str, Any] = {"gpu": tiny.FLOOR, "ram": tiny.FLOOR}
    options: dict[str, Any] = {"m": model(), "t": training(freeze=freeze), **floors}
    for count in (1, 2):
        with tiny.session(tmp_path / "stopped", **options) as session:
            require_kept(session)
            tiny.steps(session, count)
            require_kept(session)
    with tiny.session(tmp_path / "straight", **options) as session:
        before = tiny.parameters(session.store, session.spec)
        tiny.steps(session)
        after, frozen = tiny.parameters(session.store, session.spec), session.spec.frozen_params
    assert tiny.digest_of(tmp_path / "straight") == tiny.digest_of(tmp_path / "stopped")
    for name in KEPT:
        assert torch.equal(before[name], after[name]) is (name in frozen), name
    assert any(name in frozen for name in KEPT) is bool(freeze)


KEPT = ("model.layers.0.self_attn.sinks", "model.layers.1.self_attn.sinks", "model.layers.1.mlp.gate.weight")


def require_kept(session: Session) -> None:
    parameters, seen = tiny.parameters(session.store, session.spec), set()
    for name, buffer in session.plan.buffers.items():
        if buffer.float32:
            assert (buffer.weights, buffer.state) == ("gpu", None if buffer.frozen else "nvme")
            views = session.spec.buffers[name].layout.views(session.gpu.buffers[name]["weights"])
            assert all(torch.equal(view, parameters[param]) for param, view in views.items())
            assert {view.dtype for view in views.values()} == {torch.float32}
            seen |= views.keys()
    assert seen == set(KEPT) == session.spec.float32_params


@pytest.mark.parametrize("begins", ["from scratch", "with a folder"])
def test_an_export_has_the_bits_that_were_trained(tmp_path: Path, begins: str) -> None:
    """Where all else is rounded to bfloat16, as in the folder that the run began with."""
    m, run = model(), tmp_path / "run"
    if begins == "with a folder":
        random_model(model_config(tiny.recipe(model=m), None), 1).to(torch.bfloat16).save_pretrained(tmp_path / "first")
        m = tiny.ModelConfig(path=str(tmp_path / "first"))
    recipe = tiny.recipe(model=m, train=training(steps=1))
    tiny.train(recipe, run_dir=run, observer=tiny.Silent(), resume=False)
    export(run, recipe, out_dir=tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16).state_dict()
    spec = tiny.spec_of(model_config(recipe, None))
    with closing(NvmeStore.open(run / "state", read_only=True)) as store:
        trained = tiny.parameters(store, spec)
    for name, values in trained.items():
        dtype = torch.float32 if name in KEPT else torch.bfloat16
        assert loaded[name].dtype == dtype
        assert torch.equal(loaded[name], values.to(dtype)), name
    assert any(not torch.equal(trained[name], trained[name].bfloat16().float()) for name in KEPT)


def test_a_merged_adapter_leaves_the_base_s_bits(tmp_path: Path) -> None:
    recipe = tiny.recipe(
        model=model("ernie4_5_moe"), adapter=tiny.AdapterConfig(method="lora", rank=2), train=training(steps=1)
    )
    tiny.train(recipe, run_dir=tmp_path / "run", observer=tiny.Silent(), resume=False)
    export(tmp_path / "run", recipe, out_dir=tmp_path / "out", merged=True)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16).state_dict()
    spec = tiny.spec_of(model_config(recipe, None))
    initial = {n: value for _, values in Initializer(spec, recipe.train.seed).buffers() for n, value in values.items()}
    assert len(spec.float32_params) == 2
    assert all(torch.equal(loaded[name], initial[name]) for name in spec.float32_params)


def test_a_folder_is_read_into_the_dtypes_that_are_computed_with(tmp_path: Path) -> None:
    """Each of its tensors once."""
    config = model_config(tiny.recipe(model=model()), None)
    named = dict(random_model(config, 1).named_parameters())
    random_model(config, 1).save_pretrained(tmp_path)
    with closing(FolderSource(tmp_path)) as source:
        buffers = source.spec.all_frozen().buffers
        assert sum(map(source.stored_bytes, buffers)) == 4 * source.spec.num_params
        for name, buffer in buffers.items():
            flat = torch.zeros(buffer.layout.numel, dtype=weight_dtype(torch.bfloat16, float32=buffer.float32))
            source.read(name, "weights", 0, flat).result()
            for param, view in buffer.layout.views(flat).items():
                assert torch.equal(view, named[param].to(flat.dtype)), param


def test_on_several_machines_modules_of_their_own_are_kept() -> None:
    """Routers are, but with selective checkpointing; sinks lie beside matrices, so they are rounded, and named."""
    spec = tiny.spec_of(model_config(tiny.recipe(model=model()), None), HALVES)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sharded = make_sharded(spec, training(activation_checkpointing="full"), init_device_mesh("cpu", (1,)), "eager")
        initial = dict(Initializer(spec, 0).buffers())
        sharded.load(initial.items(), {})
        seen: dict[str, torch.dtype] = {}
        for name in ("layers.1.mlp.gate", "layers.1.self_attn", "layers.1.mlp.experts"):
            module = sharded.model.get_submodule(f"model.{name}")
            for key in dict(module.named_parameters(recurse=False)):
                module.register_forward_pre_hook(
                    lambda m, _, name=f"{name}.{key}", key=key: seen.update({name: getattr(m, key).dtype})
                )
        sharded.model(input_ids=torch.arange(9)[None], use_cache=False).logits.sum().backward()
    finally:
        dist.destroy_process_group()
    assert seen == {
        "layers.1.mlp.gate.weight": torch.float32,
        "layers.1.self_attn.sinks": torch.bfloat16,
        "layers.1.mlp.experts.gate_up_proj": torch.bfloat16,
        "layers.1.mlp.experts.down_proj": torch.bfloat16,
    }
    assert rounded_alike(spec, training(activation_checkpointing="full")) == [*KEPT[:2]]
    assert rounded_alike(spec, training(activation_checkpointing="selective")) == [*KEPT[:2], KEPT[2]]
