"""Frozen weights at fewer bits: what is stored, what is computed with, and what a run makes of them."""

import hashlib
import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import adapted
import pytest
import tiny
import torch
from compiled import compiled_afresh
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from penstock.engine.config import ModelConfig
from penstock.engine.export import export
from penstock.engine.forecast.costs import Conditions
from penstock.engine.forecast.extrapolate import estimate
from penstock.engine.machine.presets import GENERIC
from penstock.engine.model.adapter_values import with_adapter
from penstock.engine.model.anatomy import Initializer, take_apart
from penstock.engine.model.quantise import NF4, Dequantiser, as_held, dequantised, quantised
from penstock.engine.model.spec import BufferSpec
from penstock.engine.model.stored import FORMATS
from penstock.engine.opened_model import OpenedModel
from penstock.engine.self_check import check_model
from penstock.engine.train import train_step
from penstock.storage.files.errors import UserError
from penstock.storage.generations.store import NvmeStore
from penstock.storage.tier.layout import ParamSpec

BLOCK = 64
SHAPES: dict[str, tuple[int, ...]] = {"matrix": (300, 100), "norm": (7,), "experts": (3, 25, 11), "row": (8, 64)}
SHAPES["stack"] = (2, 32, 24)  # by columns where a format is
ROOMY = {"gpu_bytes": 1 << 30, "ram_bytes": 1 << 30}


def buffer_of(format: str, shapes: dict[str, tuple[int, ...]]) -> BufferSpec:
    return BufferSpec(tuple(ParamSpec(name, shape, True) for name, shape in shapes.items()), frozen=True, format=format)


def values_of(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def nf4(values: Tensor) -> tuple[bytes, list[float], Tensor]:
    """What is stored of a matrix, its scales, and the matrix that this is."""
    buffer = buffer_of("nf4", {"w": tuple(values.shape)})
    assert buffer.stored is not None
    words, _ = quantised(buffer.stored, {"w": values})
    (param,), raw = buffer.stored.params, words.view(torch.uint8)
    scales = raw[slice(*param.scales)].view(torch.float32).tolist()
    return raw[slice(*param.values)].numpy().tobytes(), scales, dequantised(buffer, words)["w"]


def test_nf4_is_bitsandbytes_bit_for_bit() -> None:
    """As bitsandbytes 0.50.2 quantises and dequantises (quantize_4bit, blocksize 64) on a CPU."""
    values = (torch.arange(128) * 37 % 128 - 50).float().view(2, 64) / 32
    values[1] *= -0.01
    stored, scales, back = nf4(values)
    assert stored.hex() == (
        "15be38d16be39d26cf49e26cf4ae27cf4ae27df5ae38d15be38d26be39d26cf4"
        "51d730a51c720a41c720941c62d941b62d830b51d830a51d730a51c720a41c62"
    )
    assert scales == [2.375, 0.024062499403953552]
    assert hashlib.sha256(back.numpy().tobytes()).hexdigest()[:16] == "b382c8124618d83f"


def test_what_nf4_holds_it_gives_back() -> None:
    codes = torch.tensor(NF4).repeat(8).view(2, BLOCK) * torch.tensor([[3.0], [0.5]])
    assert torch.equal(nf4(codes)[2], codes)


def bits_of(value: Tensor) -> list[int]:
    return value.reshape(-1).view(torch.int32).tolist()


def test_what_a_checkpoint_has_in_fp8_is_kept_to_the_bit() -> None:
    """All codes, signs of zero too, times scales of any bits, rounded to bfloat16 as transformers does it."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    rows = torch.cat([codes[codes.isfinite()], torch.tensor([0.0, -0.0])]).view(4, 64).repeat(50, 1)
    scales = (
        torch.rand(200, 1, generator=torch.Generator().manual_seed(1)) + 2.0 ** torch.arange(-20, 0).repeat(10)[:, None]
    )
    values = {"w": (rows * scales).bfloat16().float(), "w.scales": scales}
    buffer = buffer_of("fp8", {"w": (200, 64)})
    assert buffer.stored is not None
    words, error = quantised(buffer.stored, values)
    assert error == 0
    assert bits_of(dequantised(buffer, words)["w"]) == bits_of(values["w"])
    assert buffer.stored.numel * 2 == 200 * 64 + 200 * 4 + 2 * (-(200 * 68 // 2) % 2048)


def test_what_a_checkpoint_has_in_mxfp4_is_kept_to_the_bit() -> None:
    """Whichever codes a block has: those of a block without the largest are larger ones times a smaller power."""
    halves = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    generator = torch.Generator().manual_seed(2)
    most = torch.arange(1, 9).repeat(16)  # of each column the codes below that
    codes = (torch.rand(3, 64, 128, generator=generator) * most).int()
    signs = torch.randint(2, codes.shape, generator=generator) * 2 - 1
    exponents = torch.randint(-100, 100, (3, 2, 1, 128), generator=generator).expand(3, 2, 32, 128).reshape(3, 64, 128)
    values = {"w": torch.ldexp(halves[codes] * signs, exponents)}
    buffer = buffer_of("mxfp4", {"w": (3, 64, 128)})
    assert buffer.stored is not None
    words, error = quantised(buffer.stored, values)
    assert error == 0
    assert bits_of(dequantised(buffer, words)["w"]) == bits_of(values["w"])
    (param,) = buffer.stored.params
    assert param.values[1] - param.values[0] + param.scales[1] - param.scales[0] == 3 * 64 * 128 * 4.25 / 8
    values["w"][1, 40, 7] = 0.3
    assert quantised(buffer.stored, values)[1] > 0


@pytest.mark.parametrize(("format", "least", "most"), [
    ("int8", 2e-3, 8e-3),
    ("nf4", 5e-2, 0.11),
    ("fp8", 2e-2, 4e-2),
    ("mxfp4", 8e-2, 0.16),
])  # fmt: skip
def test_the_error_of_the_worst_matrix_is_told(format: str, least: float, most: float) -> None:
    buffer, values = buffer_of(format, SHAPES), values_of(SHAPES)
    values["matrix"][:7] = 0  # blocks of nothing
    assert buffer.stored is not None
    words, error = quantised(buffer.stored, values)
    back = dequantised(buffer, words)
    errors = [float((back[name] - value).norm() / value.norm()) for name, value in values.items()]
    assert error == pytest.approx(max(errors), rel=1e-5)
    assert least < error < most
    assert not back["matrix"][:6].any()
    assert torch.equal(back["norm"], values["norm"]), "vectors stay as they are"
    # Bits of a value, a float32 scale for 64 of them, float32 vectors; whole pages.
    numel = sum(value.numel() for value in values.values())
    assert buffer.stored.numel * 2 < 1.1 * numel * (FORMATS[format].bits + 0.5) / 8 + 4096
    values["experts"][0, 0, 0] = torch.nan
    with pytest.raises(UserError, match=r"model\.frozen_format: 'experts' has a value that is not finite"):
        quantised(buffer.stored, values)


@pytest.mark.parametrize("format", sorted(FORMATS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_computed_with_is_rounded_once_and_the_same_in_pieces(
    format: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gaps between parameters stay zero: what lies side by side is one matrix."""
    buffer = buffer_of(format, SHAPES)
    assert buffer.stored is not None
    words, _ = quantised(buffer.stored, values_of(SHAPES))
    expected = {name: value.to(dtype) for name, value in dequantised(buffer, words).items()}
    for piece in (1 << 16, 5):
        monkeypatch.setattr("penstock.engine.model.quantise.PIECE_BLOCKS", piece)
        flat = torch.zeros(buffer.layout.numel, dtype=dtype)
        Dequantiser().fill(flat, words, buffer.layout, buffer.stored, compiled=False)
        assert all(torch.equal(view, expected[name]) for name, view in buffer.layout.views(flat).items())
        assert not any(flat[start:end].any() for start, end in buffer.layout.gaps)


@pytest.mark.long
@pytest.mark.parametrize("format", sorted(FORMATS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiled_it_has_the_same_bits(format: str, dtype: torch.dtype) -> None:
    buffer = buffer_of(format, SHAPES)
    assert buffer.stored is not None
    words, _ = quantised(buffer.stored, values_of(SHAPES))
    results = []
    with compiled_afresh() as counters:
        for compiled in (False, True):
            flat = torch.zeros(buffer.layout.numel, dtype=dtype)
            Dequantiser().fill(flat, words, buffer.layout, buffer.stored, compiled=compiled)
            results.append(flat)
        assert counters["unique_graphs"] > 0
    assert torch.equal(*results)


@pytest.mark.parametrize(("model_type", "method", "format"), [
    ("llama", "lora", "nf4"),
    ("qwen3_moe", "lora", "int8"),
    pytest.param("qwen3", "dora", "nf4", marks=pytest.mark.long),
])  # fmt: skip
def test_gradients_are_those_of_plain_peft_on_the_dequantised_model(model_type: str, method: str, format: str) -> None:
    found = check_model(adapted.config(model_type), adapter=adapted.section(method), frozen_format=format)
    assert found.ok, found.reason
    assert found.max_rel_error is not None
    assert found.max_rel_error <= 1e-5


def test_dora_begins_with_the_rows_that_the_base_has() -> None:
    adapter = adapted.section("dora")
    spec = take_apart(adapted.config("llama"), adapter=adapter, frozen_format="nf4")
    base = dict(Initializer(spec, seed=1).buffers())
    made = {n: v for _, of in with_adapter(spec, base.items(), seed=1, dtype=torch.bfloat16) for n, v in of.items()}
    module, buffer = "model.layers.1.mlp.up_proj", "layers.1.frozen"
    held = as_held(spec.buffers[buffer], base[buffer])[f"{module}.base_layer.weight"].bfloat16().float()
    assert not torch.equal(held, base[buffer][f"{module}.base_layer.weight"])
    assert torch.equal(made[f"{module}.lora_magnitude_vector.default.weight"], torch.linalg.norm(held, dim=1))


def test_what_is_small_beside_the_rest_stays_as_it_is() -> None:
    shapes: dict[str, tuple[int, ...]] = {"experts": (8, 64, 64), "router": (7, 64), "projection": (8, 64)}
    buffer, values = buffer_of("nf4", shapes), values_of(shapes)
    assert buffer.stored is not None
    assert [param.name for param in buffer.stored.quantised] == ["experts", "projection"]
    back = dequantised(buffer, quantised(buffer.stored, values)[0])
    assert {name: torch.equal(back[name], values[name]) for name in shapes} == {
        "experts": False, "router": True, "projection": False
    }  # fmt: skip


def test_beside_what_a_checkpoint_quantised_other_matrices_keep_their_width() -> None:
    shapes: dict[str, tuple[int, ...]] = {"experts": (8, 64, 64), "projection": (64, 64), "router": (1, 32)}
    shapes["norm"] = (64,)
    params = tuple(ParamSpec(name, shape, True) for name, shape in shapes.items())
    buffer = BufferSpec(params, frozen=True, format="mxfp4", quantised=("experts",))
    assert buffer.stored is not None
    assert {param.name: param.dtype for param in buffer.stored.params} == {
        "experts": None, "projection": "bfloat16", "router": "float32", "norm": "float32"
    }  # fmt: skip


def test_only_matrices_of_layers_that_are_frozen_are_quantised() -> None:
    config = adapted.config("llama")
    spec = take_apart(config, adapter=adapted.section("lora"), frozen_format="nf4")
    assert {name for name, buffer in spec.buffers.items() if buffer.format} == {"layers.0.frozen", "layers.1.frozen"}
    spec = take_apart(config, ["*.layers.0.*", "*norm*", "lm_head*"], frozen_format="int8")
    assert {name for name, buffer in spec.buffers.items() if buffer.format} == {"layers.0.frozen"}
    for freeze in ([], ["*norm*", "*embed*"]):
        with pytest.raises(UserError, match=r"model\.frozen_format: int8, but no matrix of a layer is frozen"):
            take_apart(config, freeze, frozen_format="int8")


def test_the_plan_counts_the_bytes_that_are_moved(tmp_path: Path) -> None:
    """Of a base that is streamed from NVMe, and what it takes there: about a quarter of it in bfloat16."""
    read, stored = {}, {}
    # Larger than what buffers are rounded up to.
    shape = tiny.model(hidden_size=128, intermediate_size=256, head_dim=32)
    for format in ("compute", "nf4"):
        m, t = replace(shape, frozen_format=format), tiny.training(compute_dtype="bfloat16")
        placed: dict[str, Any] = {"gpu": tiny.FLOOR, "ram": tiny.FLOOR, "adapter": adapted.section("lora")}
        with tiny.session(tmp_path / format, m=m, t=t, **placed) as session:
            plan = session.plan
            planned = estimate(plan, Conditions(GENERIC), full=True).bytes
            session.executor.take_spans()
            for _ in range(3):
                train_step(session)
            tiny.settle(session)
            spans = session.executor.take_spans()
            layers = {name for name, buffer in plan.buffers.items() if buffer.frozen and name.startswith("layers.")}
            assert {plan.buffers[name].weights for name in layers} == {"nvme"}
            for lane in ("nvme_read", "nvme_write"):
                measured = sum(span.bytes for span in spans if span.lane == lane) / 3
                assert measured == pytest.approx(planned[lane], rel=0.1, abs=1), lane
            read[format] = sum(span.bytes for span in spans if span.lane == "nvme_read" and span.block in layers)
            stored[format] = sum(plan.buffers[name].nbytes for name in layers)
            made = [span for span in spans if span.op == "dequantise"]
            # Once for all chunks; and at the top, and from one step to the next at the bottom, for both ways.
            assert len(made) == (0 if format == "compute" else 1 + 3 * 2 * (len(layers) - 1))
            parts = plan.tiers["gpu"].parts
            assert session.gpu.arena.used_bytes + parts["workspace"] <= sum(parts.values())
            largest = max(session.spec.buffers[name].layout.numel for name in layers) * 2
            assert parts.get("dequantised block", 0) == (0 if format == "compute" else largest)
    assert read["nf4"] / read["compute"] == pytest.approx(stored["nf4"] / stored["compute"])
    assert 0.27 < stored["nf4"] / stored["compute"] < 0.32


def run_on(model: Path, format: str, method: str = "lora", **changes: Any) -> dict[str, Any]:
    train = {"steps": 3, "lr": 2e-2, "global_batch_size": 1, "chunk_tokens": 24, "validate_every": 1} | changes
    section = ModelConfig(path=str(model), frozen_format=format)  # type: ignore[arg-type]
    data = tiny.data(validation_documents=4)
    return {"model": section, "adapter": adapted.section(method), "data": data, "train": tiny.training(**train)}


def base_of(spec: Any, folder: Path) -> dict[str, Tensor]:
    """The tensors of a model folder as a run that quantises them computes with them."""
    stored = load_file(folder / "model.safetensors")
    result = {}
    for buffer in spec.buffers.values():
        names = {param.name: param.name.replace(".base_layer", "") for param in buffer.params}
        if all(name in stored for name in names.values()):
            held = as_held(buffer, {param: stored[name].float() for param, name in names.items()})
            result |= {names[param]: value for param, value in held.items()}
    return result


@pytest.mark.parametrize(("format", "method"), [("nf4", "lora"), ("int8", "dora")])
def test_a_run_is_resumed_sampled_and_exported_with_the_base_that_it_has(
    tmp_path: Path, format: str, method: str
) -> None:
    """Merged: into the dequantised base, as peft does it; the adapter alone: as of any base."""
    model = tmp_path / "model"
    adapted.base(adapted.config("llama")).save_pretrained(model)
    run, observer = run_on(model, format, method), tiny.Silent()
    tiny.train_run(tmp_path / "whole", observer, **run)
    said = [message for message in observer.messages if message.startswith("model.frozen_format")]
    assert len(said) == 1
    assert said[0].startswith(
        f"model.frozen_format={format}: 14 frozen matrices are quantised in blocks of 64 values; "
    )
    assert any(message.startswith("self-check: gradients equal") for message in observer.messages)
    tiny.train_run(tmp_path / "run", tiny.Silent(stop_after=1), **run)
    resumed = tiny.Silent()
    tiny.train_run(tmp_path / "run", resumed, resume=True, **run)
    assert [m.loss for m in resumed.metrics] == [m.loss for m in observer.metrics[1:]]
    validated = [{v.step: v.loss for v in each.validations} for each in (resumed, observer)]
    assert len(validated[0]) > 1
    assert validated[0].items() <= validated[1].items()
    assert not any(message.startswith("model.frozen_format") for message in resumed.messages)
    assert tiny.digest_of(tmp_path / "run") == tiny.digest_of(tmp_path / "whole")

    export(tmp_path / "run", tiny.recipe(**run), out_dir=tmp_path / "adapter")
    export(tmp_path / "run", tiny.recipe(**run), out_dir=tmp_path / "merged", merged=True)
    spec = take_apart(adapted.config("llama"), adapter=run["adapter"], frozen_format=format)
    held = base_of(spec, model)
    base = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager").eval()
    base.load_state_dict(held)
    theirs = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
    ours = load_file(tmp_path / "merged" / "model.safetensors")
    for name, parameter in theirs.named_parameters():
        assert torch.equal(ours[name], parameter), name
    original = load_file(model / "model.safetensors")
    assert torch.equal(ours["model.embed_tokens.weight"], original["model.embed_tokens.weight"])
    ids = torch.randint(97, (1, 40), generator=torch.Generator().manual_seed(1))
    with OpenedModel.open(tmp_path / "run", recipe=tiny.recipe(**run), **ROOMY, device="cpu") as opened:
        assert "int16" not in opened.describe()
        found = opened.loglikelihoods([(ids[0, :30].tolist(), ids[0, 30:].tolist())])[0][0]
    with torch.no_grad():
        scores = theirs(ids).logits[0, 29:-1].double().log_softmax(-1)
    assert found == pytest.approx(float(scores.gather(1, ids[0, 30:, None]).sum()), abs=1e-3)

    other = run | {"model": replace(run["model"], frozen_format="compute")}
    with pytest.raises(
        UserError, match=rf"model\.frozen_format: compute in the recipe, {format} in the run"
    ) as refusal:
        tiny.train_run(tmp_path / "run", tiny.Silent(), resume=True, **other)
    assert "\n" not in str(refusal.value)


def test_what_is_frozen_without_an_adapter_is_quantised_too(tmp_path: Path) -> None:
    """And exported as it was computed with."""
    model = tmp_path / "model"
    adapted.base(adapted.config("llama")).save_pretrained(model)
    freeze = ["*.layers.0.*"]
    run = run_on(model, "int8", freeze=freeze) | {"adapter": adapted.section("none")}
    tiny.train_run(tmp_path / "run", tiny.Silent(), **run)
    export(tmp_path / "run", tiny.recipe(**run), out_dir=tmp_path / "out")
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "out"))
    held = base_of(take_apart(adapted.config("llama"), freeze, frozen_format="int8"), model)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "llama"
    for name, tensor in after.items():
        if ".layers.0." in name:
            assert torch.equal(tensor, held[name]), name
            assert ("proj" in name) != torch.equal(tensor, before[name]), name
    with closing(NvmeStore.open(tmp_path / "run" / "state")) as store:
        (array,) = (array for array in store.arrays() if array.fixed)
        assert (array.buffer, array.dtype) == ("layers.0.frozen", "int16")
