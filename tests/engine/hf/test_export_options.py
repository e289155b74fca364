"""Exports in another dtype, in small files, with the files that transformers writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from model_folders import as_users_have_it
from safetensors.torch import load_file
from samples import cases
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from penstock.engine.data.tokenizer import load_tokenizer
from penstock.engine.hf.weights import export_folder, import_blocks
from penstock.storage.errors import UserError
from penstock.storage.safetensors_io import CheckpointReader

MODELS = [("llama", False), ("gemma3_text", True)]


def exported(folder: Path, out: Path, change: Any = None, **options: Any) -> tuple[Path, list[str], dict[str, Tensor]]:
    """Import a folder and export it; the remarks and what was exported of, fp32."""
    spec = tiny.spec_of(AutoConfig.from_pretrained(folder))
    buffers = dict(import_blocks(CheckpointReader(folder), spec))
    values = {name: tensor for buffer in buffers.values() for name, tensor in buffer.items()}
    if change is not None:
        change(values)
    options = {"constants": {}, "origin": folder, "tokenizer": load_tokenizer(folder), "dtype": "bfloat16"} | options
    return out, export_folder(out, spec, buffers.__getitem__, **options), values


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize(("model_type", "tied"), MODELS)
def test_the_files_are_those_that_transformers_saves(tmp_path: Path, model_type: str, tied: bool) -> None:
    origin = as_users_have_it(tmp_path / "origin", model_type, tied)
    out, remarks, _ = exported(origin, tmp_path / "out")
    AutoModelForCausalLM.from_pretrained(origin).save_pretrained(tmp_path / "saved")
    AutoTokenizer.from_pretrained(origin).save_pretrained(tmp_path / "saved")
    assert files(out).keys() == files(tmp_path / "saved").keys()
    before = files(origin)
    assert all(content == before[name] for name, content in files(out).items() if not name.endswith(".safetensors"))
    assert load_file(out / "model.safetensors").keys() == load_file(tmp_path / "saved" / "model.safetensors").keys()
    assert remarks == []


@pytest.mark.parametrize("name", cases(["float32", "float16"], "float16"))
def test_another_dtype_is_in_tensors_and_config(tmp_path: Path, name: str) -> None:
    origin = as_users_have_it(tmp_path / "origin", "qwen3", True)
    out, _, values = exported(origin, tmp_path / "out", dtype=name, convert=True)
    dtype = getattr(torch, name)
    found = load_file(out / "model.safetensors")
    assert {tensor.dtype for tensor in found.values()} == {dtype}
    assert all(torch.equal(tensor, values[key].to(dtype)) for key, tensor in found.items())
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (origin, out))
    assert after == before | {"dtype": name}
    assert AutoModelForCausalLM.from_pretrained(out).dtype == dtype


def test_float16_refuses_what_it_does_not_hold_and_leaves_nothing(tmp_path: Path) -> None:
    origin = as_users_have_it(tmp_path / "origin", "llama", False)

    def change(values: dict[str, Tensor]) -> None:
        values["model.layers.1.mlp.up_proj.weight"][3, 4] = -65536.0

    with pytest.raises(
        UserError, match=r"1\.mlp\.up_proj\.weight' holds -65536, but the largest float16 value is 65504"
    ):
        exported(origin, tmp_path / "out", change, dtype="float16", convert=True)
    assert not (tmp_path / "out").exists()
    exported(origin, tmp_path / "out", change, dtype="bfloat16", convert=True)


def test_float16_counts_what_became_zero(tmp_path: Path) -> None:
    origin = as_users_have_it(tmp_path / "origin", "llama", False)

    def change(values: dict[str, Tensor]) -> None:
        values["lm_head.weight"][:2, 0] = 1e-9
        values["lm_head.weight"][2, 0] = float("inf")

    _, remarks, _ = exported(origin, tmp_path / "out", change, dtype="float16", convert=True)
    assert len(remarks) == 1
    assert remarks[0].startswith("float16: 2 of ")


def test_files_of_weights_are_at_most_so_large(tmp_path: Path) -> None:
    origin = as_users_have_it(tmp_path / "origin", "llama", False)
    out, _, values = exported(origin, tmp_path / "out", max_shard_bytes=20_000)
    shards = sorted(file for file in out.iterdir() if file.suffix == ".safetensors")
    assert [file.name for file in shards] == [
        f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)
    ]
    assert len(shards) > 2
    AutoModelForCausalLM.from_pretrained(origin).save_pretrained(tmp_path / "saved", max_shard_size=20_000)
    index, reference = (json.loads((f / "model.safetensors.index.json").read_text()) for f in (out, tmp_path / "saved"))
    assert index["weight_map"].keys() == reference["weight_map"].keys()
    assert index["metadata"]["total_size"] == reference["metadata"]["total_size"]
    assert all(sum(t.nbytes for t in load_file(file).values()) <= 20_000 for file in shards)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert all(torch.equal(model.state_dict()[key], tensor) for key, tensor in values.items())
