"""Frozen bases that stay as their checkpoint stores them: the bits of the dequantised ones at fewer bytes."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import adapted
import pytest
import tiny
import torch
from peft import PeftModel
from quantised_folders import fp8, mxfp4, plain, write
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

from penstock.engine.config import BudgetConfig, ModelConfig
from penstock.engine.export import export
from penstock.engine.hf.config import read_config
from penstock.engine.hf.quantised import DequantisingReader, open_checkpoint
from penstock.engine.hf.stored import with_scales
from penstock.engine.hf.weights import CheckpointLayout, import_blocks
from penstock.engine.model.adapters import plain_name
from penstock.engine.model.anatomy import spec_of_recipe
from penstock.engine.model.groups import joined
from penstock.engine.model.quantise import Dequantiser, quantised
from penstock.engine.model.spec import ModelSpec
from penstock.engine.opening import open_session
from penstock.engine.run_files import run_files
from penstock.engine.train import train_step
from penstock.storage.files.errors import UserError

LEAST = BudgetConfig(gpu="least", ram="least")
WIDE = {"hidden_size": 128, "intermediate_size": 192, "moe_intermediate_size": 64}
DEEPSEEK = {"q_lora_rank": 64, "kv_lora_rank": 64, **WIDE}
FOLDERS: dict[str, tuple[Callable[[Path], Path], Any, dict[str, Any]]] = {
    "mxfp4": (mxfp4, Mxfp4Config, {}),
    "mxfp4 in groups": (mxfp4, Mxfp4Config, tiny.GROUPS),
    "fp8": (lambda f: fp8(f, block=(16, 64), sizes=WIDE), FineGrainedFP8Config, {}),
    "fp8 with one scale": (lambda f: fp8(f, block=None, sizes=WIDE), FineGrainedFP8Config, {}),
    "fp8 of a mixture": (lambda f: fp8(f, "qwen3_moe", block=(32, 64), sizes=WIDE), FineGrainedFP8Config, {}),
    "fp8 of deepseek, in groups": (
        lambda f: fp8(f, "deepseek_v3", block=(16, 64), sizes=DEEPSEEK),
        FineGrainedFP8Config,
        tiny.GROUPS,
    ),
}


def sections(folder: Path, format: str = "stored", method: str = "lora", **train: Any) -> dict[str, Any]:
    model = ModelConfig(path=str(folder), frozen_format=format)  # type: ignore[arg-type]
    return {"model": model, "adapter": adapted.section(method), "train": tiny.training(**train)}


def spec_of(folder: Path, **train: Any) -> ModelSpec:
    return spec_of_recipe(read_config(folder), tiny.recipe(**sections(folder, **train)))


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def changed(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("name", FOLDERS)
def test_what_is_streamed_is_what_transformers_dequantises(tmp_path: Path, name: str) -> None:
    make, config, train = FOLDERS[name]
    folder = make(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config(dequantize=True)).state_dict()
    spec = spec_of(folder, **train)
    layout = CheckpointLayout(spec, open_checkpoint(folder))
    found: dict[str, Tensor] = {}
    held, nbytes, numel = set(), 0, 0
    for buffer, values in with_scales(layout, import_blocks(layout)):
        one = spec.buffers[buffer]
        if one.stored is None:
            continue
        words, error = quantised(one.stored, values)
        assert error == 0
        for dtype in (torch.float32, torch.bfloat16):
            flat = torch.zeros(one.layout.numel, dtype=dtype)
            Dequantiser().fill(flat, words, one.layout, one.stored, compiled=False)
            found |= {(param, dtype): view for param, view in one.layout.views(flat).items()}
        for param in one.stored.quantised:
            held.add(param.name)
            nbytes += sum(end - start for start, end in (param.values, param.scales))
            numel += param.numel
    for dtype in (torch.float32, torch.bfloat16):
        values = joined(spec.params, {param: value for (param, of), value in found.items() if of == dtype})
        for param, value in values.items():
            assert torch.equal(bits(value), bits(theirs[plain_name(param)].to(dtype))), param
    assert nbytes * 8 == numel * (4.25 if "mxfp4" in name else 8.5)
    stored = load_file(folder / "model.safetensors")
    stacks = ("experts.gate_up_proj", "experts.down_proj")
    expected = {name for name in theirs if f"{name}_scale_inv" in stored or name.endswith(stacks)}
    assert {plain_name(n) for n in joined(spec.params, dict.fromkeys(held, torch.empty(1)))} == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu, torch.uint8])
def test_last_blocks_may_stick_out_and_scales_be_exponents(tmp_path: Path, dtype: torch.dtype) -> None:
    def rescale(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_scale_inv")]:
            rows, columns = tensors[name.removesuffix("_scale_inv")].shape
            exponents = torch.randint(110, 130, (-(-rows // 40), columns // 64), dtype=torch.uint8)
            scales = 1.3 * torch.exp2(exponents.float() - 127)
            tensors[name] = exponents.view(dtype) if dtype.itemsize == 1 else scales.to(dtype)

    folder = changed(fp8(tmp_path, block=(16, 64), sizes=WIDE), rescale)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [40, 64]
    (folder / "config.json").write_text(json.dumps(config))
    spec = spec_of(folder)
    layout = CheckpointLayout(spec, open_checkpoint(folder))
    stored = {name: buffer.stored for name, buffer in spec.buffers.items() if buffer.stored is not None}
    buffers = {name: values for name, values in with_scales(layout, import_blocks(layout)) if name in stored}
    assert {name: quantised(layout, buffers[name])[1] for name, layout in stored.items()} == dict.fromkeys(stored, 0)


RUNS: dict[str, tuple[Callable[[Path], Path], dict[str, Any], str]] = {
    "mxfp4": (lambda f: mxfp4(f, 110), {}, "4 frozen matrices are kept as mxfp4, to the bit"),
    "mxfp4 in groups, bfloat16": (
        lambda f: mxfp4(f, 110),
        {**tiny.GROUPS, "compute_dtype": "bfloat16"},
        "8 frozen matrices are kept as mxfp4, to the bit",
    ),
    "fp8": (
        lambda f: fp8(f, block=(16, 64), sizes=WIDE),
        {"method": "dora"},
        "14 frozen matrices are kept as fp8, to the bit",
    ),
    "fp8 of deepseek, bfloat16": (
        lambda f: fp8(f, "deepseek_v3", block=(16, 64), sizes=DEEPSEEK),
        {"compute_dtype": "bfloat16"},
        "18 frozen matrices are kept as fp8, to the bit",
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_to_the_bit_the_one_on_the_dequantised_base(tmp_path: Path, name: str) -> None:
    """Interrupted and resumed, its losses, its adapter and the base with that merged into it."""
    make, train, said = RUNS[name]
    folder = make(tmp_path / "model")
    train = {"steps": 3, "lr": 2e-2, "chunk_tokens": 24} | train
    losses: dict[str, list[float]] = {}
    for format in ("compute", "stored"):
        run, out = sections(folder, format, **train), tmp_path / format
        first, rest = tiny.Silent(stop_after=1), tiny.Silent()
        tiny.train_run(out, first, **run)
        tiny.train_run(out, rest, resume=True, **run)
        losses[format] = [step.loss for step in (*first.metrics, *rest.metrics)]
        export(out, tiny.recipe(**run), out_dir=out / "adapter")
        export(out, tiny.recipe(**run), out_dir=out / "merged", merged=True)
        found = [message for message in first.messages if message.startswith("model.frozen_format")]
        assert found == ([] if format == "compute" else [f"model.frozen_format=stored: {said}"])
    assert len(losses["stored"]) == 3
    assert losses["stored"] == losses["compute"]
    for file in ("adapter/adapter_model.safetensors", "merged/model.safetensors"):
        ours, expected = (load_file(tmp_path / format / file) for format in ("stored", "compute"))
        assert ours.keys() == expected.keys()
        for key, tensor in ours.items():
            assert torch.equal(bits(tensor), bits(expected[key])), key


def test_one_block_at_a_time_is_dequantised(tmp_path: Path) -> None:
    """Of a base that is streamed from NVMe."""
    folder, read, held = fp8(tmp_path / "model", block=(16, 64), sizes=WIDE), dict[str, int](), dict[str, int]()
    for format in ("compute", "stored"):
        run = tiny.recipe(**sections(folder, format, compute_dtype="bfloat16", steps=2), budgets=LEAST)
        with open_session(run, run_dir=tmp_path / format, observer=tiny.Silent(), resume=False) as session:
            plan, copies = session.plan, session.plan.tiers["gpu"].parts.get("dequantised block", 0)
            layers = [name for name in plan.buffers if name.startswith("layers.") and plan.buffers[name].frozen]
            assert {plan.buffers[name].weights for name in layers} == {"nvme"}
            largest = max(session.spec.buffers[name].layout.numel for name in layers) * 2
            assert copies == (0 if format == "compute" else largest)
            assert session.gpu.arena.used_bytes <= sum(plan.tiers["gpu"].parts.values())
            session.executor.take_spans()
            train_step(session)
            spans = session.executor.take_spans()
            read[format] = sum(span.bytes for span in spans if span.lane == "nvme_read" and span.block in layers)
            held[format] = sum(plan.buffers[name].nbytes for name in layers)
            assert any(span.op == "dequantise" for span in spans) == (format == "stored")
    assert read["stored"] / read["compute"] == pytest.approx(held["stored"] / held["compute"])
    assert held["stored"] < 0.55 * held["compute"]


def test_a_run_whose_model_folder_has_gone_goes_on_and_exports(tmp_path: Path) -> None:
    folder = mxfp4(tmp_path / "model", 110)
    whole = AutoModelForCausalLM.from_pretrained(folder, quantization_config=Mxfp4Config(dequantize=True))
    run = sections(folder, steps=2, compute_dtype="bfloat16")
    tiny.train_run(tmp_path / "run", tiny.Silent(stop_after=1), **run)
    saved = run_files(tmp_path / "run", tiny.recipe(**run))
    for name in [name for name in saved if name.startswith("inputs/")]:
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        saved[name].rename(tmp_path / "run" / name)
    shutil.rmtree(folder)
    resumed = tiny.Silent()
    tiny.train_run(tmp_path / "run", resumed, resume=True, **run)
    assert [step.step for step in resumed.metrics] == [2]
    for merged in (False, True):
        export(tmp_path / "run", tiny.recipe(**run), out_dir=tmp_path / f"{merged}", merged=merged)
    loaded = PeftModel.from_pretrained(whole, tmp_path / "False").merge_and_unload().state_dict()
    ours = load_file(tmp_path / "True" / "model.safetensors")
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in ours.items())


def in_float16(folder: Path) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float16"}))
    return folder


def unquantised(folder: Path) -> Path:
    plain(folder, "qwen3")
    return folder


def one_plain(tensors: dict[str, Tensor]) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    del tensors[f"{name}_scale_inv"]
    tensors[name] = tensors[name].bfloat16()


REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "plain": (unquantised, r"config\.json are not quantised; set int8, nf4 or compute"),
    "mxfp8": (
        lambda f: fp8(f, block=(1, 32), quant_method="mxfp8", scale_fmt="ue8m0"),
        "quantised as mxfp8; only MXFP4 and FP8 stay as they are; set int8, nf4 or compute",
    ),
    "small blocks": (fp8, r"a scale for every 16 columns \(weight_block_size\), not for a multiple of 64; set int8"),
    "short rows": (
        lambda f: fp8(f, block=None),
        r"'model\.layers\.0\.mlp\.down_proj\.weight' makes rows of 96 values, not of a multiple of 64; set int8",
    ),
    "a plain matrix": (
        lambda f: changed(fp8(f, block=(16, 64), sizes=WIDE), one_plain),
        r"tensor 'model\.layers\.1\.mlp\.up_proj\.weight' is not stored as fp8 of a bfloat16 model; set int8",
    ),
    "float16": (lambda f: in_float16(fp8(f, block=(16, 64), sizes=WIDE)), "is not stored as fp8 of a bfloat16 model"),
    "no config": (lambda f: write(f, plain(f, "qwen3"), {"quant_method": "fp8", "weight_block_size": [64]}), "transf"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_stay_as_it_is_stored_is_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    make, message = REFUSED[name]
    folder = make(tmp_path / "model")
    with pytest.raises(UserError, match=message) as refusal:
        tiny.train_run(tmp_path / "run", tiny.Silent(), **sections(folder))
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "run" / "state").exists()


def test_what_is_not_frozen_or_not_of_a_folder_is_refused(tmp_path: Path) -> None:
    run = sections(mxfp4(tmp_path / "model")) | {"adapter": adapted.section("none")}
    with pytest.raises(
        UserError, match="stored, but no matrix of a layer that the checkpoint holds quantised is frozen"
    ):
        tiny.train_run(tmp_path / "run", tiny.Silent(), **run)
    run = {"model": tiny.model(frozen_format="stored"), "adapter": adapted.section("lora")}
    with pytest.raises(UserError, match=r"stored, but there is no model folder at model\.path \(None\)"):
        tiny.train_run(tmp_path / "run", tiny.Silent(), **run)


def test_several_scales_in_a_block_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a layout would have it that puts columns of blocks beside each other."""
    folder = fp8(tmp_path, block=(16, 64), sizes=WIDE)
    layout, scales = CheckpointLayout(spec_of(folder), open_checkpoint(folder)), DequantisingReader.scales
    monkeypatch.setattr(DequantisingReader, "scales", lambda reader, name: scales(reader, name).roll(1, dims=-1))
    with pytest.raises(UserError, match="has several scales for 64 values of a row of"):
        list(with_scales(layout, import_blocks(layout)))
