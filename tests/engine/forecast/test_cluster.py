"""FSDP2 on several machines: its forecast by sums worked by hand and by what others have published of theirs; and two
ranks against the engine: the same recipe, the same losses, step by step, in float32."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from chat_model import make_chat_model, write_talks
from cluster_ranks import train_on_ranks

from penstock.app.planning.catalogue import known_model
from penstock.app.recipes.recipe import to_dict
from penstock.engine.config import AdapterConfig, DataConfig, ModelConfig, Recipe, StorageConfig, TrainConfig
from penstock.engine.forecast.cluster import Recompute, cluster_forecast, collective
from penstock.engine.hf.config import model_config
from penstock.engine.machine.clusters import CLUSTER_GPUS, Cluster, ClusterGpu, cluster_gpu, parse_cluster
from penstock.engine.machine.profile import AttentionRate
from penstock.engine.model.anatomy import model_spec
from penstock.engine.model.spec import ModelSpec
from penstock.storage.files.errors import UserError

GIB = 2**30
ATTENTION = AttentionRate(head_dim=8, chunk_tokens=64, forward_flops=1e9, backward_flops=1e9)
SLOW = ClusterGpu(
    gpu="X", gpu_bytes=10**12, matmul_flops=1e9, attention=(ATTENTION,), copy_bytes_per_s=1e9, nvlink_bytes_per_s=1e6,
    network_gbit_per_s=0.08,  # 8.5e6 bytes/s
)  # fmt: skip
STEPS = 20
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SPREAD = ("plain", "masked", "lora", "balanced", "balanced padded", "capped")
"""Those that are also trained with each context spread over both ranks."""
TOKENS_OFF, MEMORY_OFF = 0.13, 0.06
"""How far the forecast may be off, of what was measured; docs/cluster.md says so."""
TITAN = cluster_gpu("NVIDIA H100", memory=(96, 2400), nvlink_gb_per_s=450)
"""Of Grand Teton: HBM2e of 96 GB and 2.4 TB/s, 400 Gbit/s a GPU; held to 500 W, of which no sheet has a rate."""
HALF = Recompute(matmul=0.5, attention=0.0, saved=(51 * 1024,) * 32)
"""torchtitan's selective checkpointing of then: every second matrix product is saved, and attention. Bytes a token of
the outputs of half of the seven products, and of attention, in bfloat16."""
VELA = cluster_gpu("NVIDIA H100 80GB HBM3", memory=(80, 3350), nvlink_gb_per_s=450, network_gbit_per_s=100)
"""IBM's: "800 Gbps", taken as a node's."""


def recipe(sequence: int, sequences: int, micro_batch: int, **train: Any) -> Recipe:
    made = TrainConfig(steps=10, global_batch_size=sequences, micro_batch_size=micro_batch, **train)
    data = DataConfig(source="random", sequence_length=sequence)
    return Recipe(name="x", model=ModelConfig(path="x"), data=data, train=made)


@pytest.fixture(scope="module")
def llama3_8b() -> ModelSpec:
    return known_model("Llama-3.1-8B").spec


def llama2(layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int) -> ModelSpec:
    sizes = {"num_layers": layers, "hidden_size": hidden, "intermediate_size": intermediate}
    sizes |= {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": 128, "vocab_size": 32_000}
    shape = ModelConfig(model_type="llama", **sizes)
    made = replace(recipe(4096, 1, 1), model=shape)
    return model_spec(model_config(made, None), made)


@pytest.mark.parametrize(
    ("nodes", "compiled", "tokens_per_s", "gib"),
    [(1, False, 5762, 82.4), (1, True, 6667, 77.0), (16, False, 5605, 67.0), (16, True, 6514, 62.0)],
)
def test_llama_8b_by_torchtitan(nodes: int, compiled: bool, tokens_per_s: int, gib: float, llama3_8b: Any) -> None:
    """github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3: FSDP, two sequences
    of 8,192 tokens a GPU."""
    cluster = Cluster(nodes, 8, TITAN)
    found = cluster_forecast(llama3_8b, recipe(8192, 2 * cluster.gpus, 2), cluster, compiled=compiled, recompute=HALF)
    assert found["tokens_per_s"] / cluster.gpus == pytest.approx(tokens_per_s, rel=TOKENS_OFF)
    assert found["peak_bytes"] / GIB == pytest.approx(gib, rel=MEMORY_OFF)
    assert found["fits"]
    assert found["bound_by"] == "compute"


@pytest.mark.parametrize(("shape", "tokens_per_s", "mfu", "hfu"), [
    ((40, 5120, 13_824, 40, 40), 4850, 0.43, 0.46),
    pytest.param((48, 8192, 22_016, 64, 8), 1830, 0.38, 0.49, marks=pytest.mark.long),
    pytest.param((80, 8192, 28_672, 64, 8), 890, 0.38, 0.47, marks=pytest.mark.long),
], ids=["13B", "34B", "70B"])  # fmt: skip
def test_llama_2_by_ibm(shape: tuple[int, int, int, int, int], tokens_per_s: int, mfu: float, hfu: float) -> None:
    """github.com/foundation-model-stack/fms-fsdp, README.md: FSDP with torch.compile on 96 H100, two sequences of 4,096
    tokens a GPU, of some blocks all recomputed: as many as HFU over MFU says, a third for all."""
    spec, share = llama2(*shape), 3 * (hfu / mfu - 1)
    again = Recompute(share, share, tuple(round((1 - share) * 24 * spec.hidden_size) for _ in spec.attention))
    found = cluster_forecast(spec, recipe(4096, 192, 2), Cluster(12, 8, VELA), compiled=True, recompute=again)
    assert found["tokens_per_s"] / 96 == pytest.approx(tokens_per_s, rel=TOKENS_OFF)
    assert found["mfu"] == pytest.approx(mfu, rel=TOKENS_OFF)
    assert found["fits"]


def test_a_ring() -> None:
    """12 MB to 8 GPUs: each sends 7/8 of them over NVLink; a node sends as much through the ports of all its GPUs."""
    inside = collective(Cluster(1, 8, SLOW), 12e6)
    assert inside.nvlink_s == pytest.approx(10.5, rel=1e-3)
    assert inside.network_s == 0
    across = collective(Cluster(2, 4, SLOW), 12e6)
    assert across.network_s == pytest.approx(10.5e6 / (4 * 8.5e6), rel=1e-3)
    assert across.seconds == across.nvlink_s
    assert collective(Cluster(8, 1, SLOW), 12e6).nvlink_s == 0
    assert collective(Cluster(1, 1, SLOW), 12e6).seconds == 0


def test_memory_by_hand(llama3_8b: ModelSpec) -> None:
    """Llama 3.1 8B on 16 GPUs, sequences of 8,192 tokens, one a micro-batch."""
    spec, work, cluster = llama3_8b, recipe(8192, 16, 1), parse_cluster("2x8")
    found = cluster_forecast(spec, work, cluster)
    params, ends, layer = 8_030_261_248, 2 * 128_256 * 4096 + 4096, 218_112_000
    parts = dict(found["parts"])
    assert spec.num_params == params == 32 * layer + ends
    assert parts.pop("master weights") == parts.pop("gradients") == params // 4
    assert parts.pop("moments") == params // 2
    assert parts.pop("gathered weights") == 2 * (2 * layer + ends)
    assert parts.pop("gradient to be reduced") == 6 * ends
    assert parts.pop("saved activations") == 32 * 8192 * 4096 * 2
    assert parts.pop("logits") == 8192 * 128_256 * 10
    assert list(parts) == ["CUDA, NCCL, allocator"]
    assert found["peak_bytes"] == sum(found["parts"].values())
    assert json.loads(json.dumps(found)) == found
    halves = cluster_forecast(spec, work, cluster, [4096] * 32)
    assert halves["compute_s"] < found["compute_s"], "short documents attend to less"
    assert halves["parts"] == found["parts"]


def test_routers_that_are_balanced_see_all_but_one_micro_batch_twice(llama3_8b: ModelSpec) -> None:
    cluster = parse_cluster("2x8")

    def computed(micro_batches: int, weight: float) -> float:
        work = recipe(8192, 16 * micro_batches, 1, router_aux_loss=weight)
        return float(cluster_forecast(llama3_8b, work, cluster)["compute_s"])

    assert computed(1, 0.1) == computed(1, 0.0)
    two, three = (computed(count, 0.1) - computed(count, 0.0) for count in (2, 3))
    assert three == pytest.approx(2 * two)
    assert 0.15 < two / computed(1, 0.0) < 0.25, "forward, of forward, what is recomputed, and backward"


def test_what_is_recomputed_is_not_saved(llama3_8b: ModelSpec) -> None:
    works = [recipe(8192, 16, 1, activation_checkpointing=how) for how in ("full", "selective", "none", "auto")]
    found = [cluster_forecast(llama3_8b, work, parse_cluster("2x8xb200")) for work in works]
    full, selective, none, auto = ((one["parts"]["saved activations"], -one["compute_s"]) for one in found)
    assert full[0] < selective[0] < none[0]
    assert full[1] < selective[1] < none[1]
    assert auto == full


def test_frozen_weights_are_gathered_and_never_reduced(llama3_8b: ModelSpec) -> None:
    spec = llama3_8b
    names = {f"layers.{index}": f"layers.{index}.frozen" for index in range(8)} | {"embed": "embed.frozen"}
    still = replace(
        spec,
        buffers={names.get(n, n): replace(each, frozen=n in names) for n, each in spec.buffers.items()},
        blocks=tuple(replace(b, buffers=tuple(names.get(name, name) for name in b.buffers)) for b in spec.blocks),
    )
    params, embedding = 8 * 218_112_000, 128_256 * 4096
    before, after = (cluster_forecast(s, recipe(8192, 16, 1), parse_cluster("2x8")) for s in (spec, still))
    assert after["parts"]["frozen weights"] == 2 * (params + embedding) // 16
    assert after["parts"]["master weights"] == (spec.num_params - params - embedding) // 4
    assert after["compute_s"] < before["compute_s"]
    assert after["nvlink_s"] < before["nvlink_s"]


def test_the_slower_of_the_two_counts(llama3_8b: ModelSpec) -> None:
    """And more GPUs finish sooner, by no more than their number."""
    spec, fast = llama3_8b, CLUSTER_GPUS["h100"]
    narrow = Cluster(2, 8, replace(fast, network_gbit_per_s=1))
    found = cluster_forecast(spec, recipe(2048, 16, 1), narrow)
    assert found["bound_by"] == "the network"
    assert found["network_s"] < found["step_s"] < found["network_s"] + found["compute_s"]
    wide = cluster_forecast(spec, recipe(2048, 16, 1), Cluster(2, 8, fast))
    assert wide["step_s"] < found["step_s"]
    assert wide["compute_s"] == found["compute_s"]
    work = recipe(8192, 128, 1)
    one, two, eight = (cluster_forecast(spec, work, parse_cluster(f"{nodes}x8"))["run_s"] for nodes in (1, 2, 8))
    assert one / 2.05 < two < one
    assert one / 8.2 < eight < two


def test_what_does_not_fit_is_told_what_would() -> None:
    spec = known_model("Llama-3.3-70B").spec

    def would_fit(micro_batch: int, cluster: str, **train: Any) -> list[str]:
        found = cluster_forecast(spec, recipe(8192, 256, micro_batch, **train), parse_cluster(cluster))
        assert found["fits"] == (found["peak_bytes"] <= found["budget_bytes"]) == (not found["would_fit"])
        return list(found["would_fit"])

    assert would_fit(1, "1x8") == ["8x8 GPUs"]
    assert would_fit(1, "8x8") == []
    assert would_fit(4, "1x8") == ["train.micro_batch_size=1 on 8x8 GPUs"]
    assert would_fit(4, "8x8")[0] == "train.micro_batch_size=1"
    assert would_fit(1, "8x8", activation_checkpointing="none")[0] == "train.activation_checkpointing=full"


def test_clusters_by_name() -> None:
    for text, nodes, name in (("2x8", 2, "h100"), ("1x8xh100", 1, "h100"), ("4X8xH200", 4, "h200")):
        assert parse_cluster(text) == Cluster(nodes, 8, CLUSTER_GPUS[name])
    for text in ("0x8", "8", "foo", "2x0", "2x8x", "2x8xh300", "-1x8", "2x99", "99999999x8", "2x8\n\nx", ""):
        with pytest.raises(UserError, match=r"^--cluster") as error:
            parse_cluster(text)
        assert "\n" not in str(error.value)


def test_micro_batches_that_do_not_divide(llama3_8b: ModelSpec) -> None:
    work = recipe(8192, 64, 2)
    with pytest.raises(UserError, match="the 32 micro-batches of a step") as error:
        cluster_forecast(llama3_8b, work, parse_cluster("3x8"))
    (better,) = re.findall(r"set train.global_batch_size=(\d+)", str(error.value))
    fixed = replace(work, train=replace(work.train, global_batch_size=int(better)))
    assert cluster_forecast(llama3_8b, fixed, parse_cluster("3x8"))["micro_batches_per_gpu"] == 1
    with pytest.raises(UserError, match=r"set train.micro_batch_size=1, or"):
        cluster_forecast(llama3_8b, work, parse_cluster("8x8"))
    with pytest.raises(UserError, match="only bfloat16"):
        cluster_forecast(llama3_8b, recipe(8192, 64, 2, compute_dtype="float32"), parse_cluster("2x8"))


def test_a_trained_vision_tower_is_for_one_machine(llama3_8b: ModelSpec) -> None:
    work = recipe(8192, 64, 2)
    work = replace(work, model=replace(work.model, path="model", train_vision="all"))
    with pytest.raises(UserError, match=r"model\.train_vision: all, but images are trained on one machine only"):
        cluster_forecast(llama3_8b, work, parse_cluster("2x8"))


def trained_recipes(folder: Path) -> dict[str, Recipe]:
    """Everything that decides what is trained on what, a few things at a time."""
    chat = make_chat_model(folder / "chat-model")
    talks = write_talks(folder / "talks.jsonl")

    def of(train: dict[str, Any], **sections: Any) -> Recipe:
        settings = {"steps": STEPS, "global_batch_size": 4, "chunk_tokens": 96, "lr": 3e-3, "warmup_steps": 3} | train
        whole = {"storage": StorageConfig(checkpoint_every=1000), **sections}
        return tiny.recipe(train=tiny.training(**settings), **whole)

    def masked(**changes: Any) -> dict[str, Any]:
        data = DataConfig(source="messages", path=str(talks), sequence_length=96, **changes)
        return {"model": ModelConfig(path=str(chat)), "data": data}

    experts = tiny.model(model_type="qwen3_moe", vocab_size=400, overrides=EXPERTS)
    return {
        "plain": of({"z_loss": 1e-2, "lr_schedule": "wsd", "activation_checkpointing": "full"}),
        "tied": of({"micro_batch_size": 2}, model=tiny.model(tie_embeddings=True)),
        "groups": of({"lr_groups": {"*embed_tokens*": 0.1}, "layer_lr_decay": 0.8, "freeze": ["*.layers.0.*"]}),
        "masked": of(
            {"validate_every": 8, "validate_first": True, "validation_sequences": 6},
            **masked(packing="best_fit", validation_documents=7),
        ),
        "unpacked": of({"clip_norm": None}, **masked(packing="none")),
        "lora": of({}, adapter=AdapterConfig(method="lora", rank=4), **masked(packing="best_fit")),
        "dora": of({"activation_checkpointing": "none"}, adapter=AdapterConfig(method="dora", rank=4)),
        "experts": of({}, model=experts),
        "balanced": of({"router_aux_loss": 0.1}, model=experts),
        "balanced padded": of(
            {"router_aux_loss": 0.1, "global_batch_size": 6},
            **masked(packing="none", tokenizer=str(chat)) | {"model": experts},
        ),
        "recurrent": of({}, model=tiny.model(model_type="qwen3_next", overrides=tiny.HYBRID)),
        "capped": of({}, model=tiny.model(model_type="gemma2", overrides={"sliding_window": 16})),
    }


@pytest.mark.long
def test_losses_are_those_of_the_engine(tmp_path: Path) -> None:
    whole = trained_recipes(tmp_path)
    cases = {name: (recipe, 1) for name, recipe in whole.items()}
    cases |= {f"{name} spread": (whole[name], 2) for name in SPREAD}
    found = train_on_ranks(tmp_path, {name: (to_dict(recipe), spread) for name, (recipe, spread) in cases.items()})
    alone: dict[str, tiny.Silent] = {}
    for name, (recipe, _) in cases.items():
        plain = name.removesuffix(" spread")
        if plain not in alone:
            alone[plain] = tiny.Silent()
            tiny.train(recipe, run_dir=tmp_path / f"{name} alone", observer=alone[plain], resume=False)
        here, there = alone[plain], found[name]
        assert len(there["losses"]) == STEPS
        losses = [m.loss for m in here.metrics]
        assert there["losses"] == pytest.approx(losses, abs=1e-4), name
        assert there["norms"] == pytest.approx([m.grad_norm for m in here.metrics], rel=1e-3), name
        assert there["tokens"] == [m.tokens for m in here.metrics], name
        validations = [(m.step, m.loss, m.accuracy) for m in here.validations]
        assert there["validations"] == [pytest.approx(each, abs=1e-4) for each in validations], name
        assert len(validations) == (4 if plain == "masked" else 0)
