"""Commands on a card that takes no time: those that measure a machine end, and say what they are to say; every recipe
trains, cut to two layers and to sizes that a few GB hold: its own model type, heads, rotary tables, windows, experts
and settings of the run, from random weights to a commit.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import shapes
from benchmarks.gpu_check import commands
from benchmarks.parts.cases import CASES, Case
from benchmarks.parts.process import call
from penstock.app.recipes.recipe import load_recipe
from penstock.engine.config import ModelConfig

REPOSITORY = Path(__file__).parents[2]
RECIPES = sorted(path for path in (REPOSITORY / "recipes").glob("*.py") if path.stem != "qwen3_next_80b_24gb")
"""Without hybrids, which are checked on the GPU too: here its kernels compute nothing (tests/emulated has them)."""
WIDER = {"70b_gh200": "1100MiB", "120b_gh200": "1600MiB", "qwen_1_5b_4gib": "1200MiB"}
"""Budgets of recipes of which one block's working set is more than 1 GiB, cut as they are."""


def run(*arguments: str, cwd: Path, limit_s: float | None = None, **more: str) -> subprocess.CompletedProcess[str]:
    """`more`: variables. The card is ordinary memory here: on a small one commands choose small models."""
    path = os.pathsep.join((str(REPOSITORY / "src"), str(REPOSITORY), os.environ.get("PYTHONPATH", "")))
    env = os.environ | {"PYTHONPATH": path, "XDG_CONFIG_HOME": str(cwd / "config")} | more
    return subprocess.run(
        [sys.executable, "-m", *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=limit_s
    )


def test_probe(tmp_path: Path) -> None:
    done = run("penstock.app.cli.main", "probe", str(tmp_path), "--seconds", "20", cwd=tmp_path, limit_s=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Stand-in H200" in done.stdout


def test_probe_measures_the_links_of_all_cards_at_once(tmp_path: Path) -> None:
    arguments = ("probe", str(tmp_path), "--seconds", "20", "--save", "found.json")
    done = run("penstock.app.cli.main", *arguments, cwd=tmp_path, limit_s=300, CUDA_VISIBLE_DEVICES="0,1")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "2 x " in done.stdout
    assert "links of 2 GPUs at once" in done.stdout
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["gpus"] == 2
    assert all(rate > 0 for rate in found["all_links_bytes_per_s"])


def gpu_check(folder: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    """Records by name."""
    options = ("--results", "found", "--limit-s", "3000", *arguments)
    done = run("benchmarks", "gpu_check", *options, cwd=folder, limit_s=3100, STANDIN_GPU_GIB="8")
    assert done.returncode == 1, done.stderr[-4000:]
    records = json.loads((folder / "found" / "gpu-check.json").read_text())["commands"]
    return {record["name"]: record for record in records}


def test_gpu_check(tmp_path: Path) -> None:
    """Sizes of a small card. The smoke compares losses, which here are all zero, and says so."""
    found = gpu_check(tmp_path, "--only", "device,smoke,drive,storage")
    assert [found[name]["status"] for name in ("smoke", "drive", "storage")] == ["failed", "done", "done"]
    smoke = found["smoke"]
    assert "loss does not fall (0.0000 to 0.0000)" in smoke["reason"]
    assert all(len(smoke["figures"][run]["losses"]) == 6 for run in ("penstock", "plain"))
    device = found["device"][
        "figures"
    ]  # compiling comes last, and meets the limit where other work keeps the cores busy
    assert set(commands(small=False)[0].shows.split()) - {"compile_s"} <= set(device)
    assert device["pinned"]["most_bytes"] >= 512 << 20


NAMES = [command.name for command in commands(small=False) if command.name in CASES]


def cut(shape: ModelConfig) -> ModelConfig:
    """A fourth of the width, with heads as wide as they are, and fewer words."""
    smaller = replace(
        shape, hidden_size=shape.hidden_size // 4, intermediate_size=shape.intermediate_size // 4, vocab_size=8192
    )
    return replace(smaller, num_heads=shape.num_heads // 4, num_kv_heads=max(1, shape.num_kv_heads // 4))


@pytest.mark.parametrize("name", NAMES)
def test_a_case_cut_to_size(name: str, tmp_path: Path) -> None:
    """Every shape of gpu-check through its own worker: fewer tokens, a fourth of the width, a small GPU."""
    case: Case = CASES[name]
    small = replace(case, shapes={"cut": cut([*case.shapes.values()][-1])}, layers=(2,), rows=2, gpu="2GiB")
    small = replace(small, row_tokens=min(case.row_tokens, 8192), chunk_tokens=min(case.chunk_tokens, 2048))
    outcome = call(shapes.run, asdict(small), str(tmp_path), None)
    assert outcome["status"] == "done", outcome.get("reason")
    assert outcome["step_s"] > 0


def cut_recipe(path: Path) -> list[str]:
    """Options for a recipe; wide models have a fourth of the width, and heads as wide as they are."""
    model = load_recipe(path).model
    shape: dict[str, Any] = {"num_layers": 2, "vocab_size": 2048}
    if model.hidden_size >= 2048:
        shape |= {"hidden_size": model.hidden_size // 4, "intermediate_size": model.intermediate_size // 4}
        shape |= {"num_heads": model.num_heads // 4, "num_kv_heads": max(1, model.num_kv_heads // 4)}
        shape["head_dim"] = model.head_dim or model.hidden_size // model.num_heads
    if "num_local_experts" in model.overrides:
        shape["overrides.num_local_experts"] = 8
    sections = {
        "model": shape,
        "data": {"source": "random", "sequence_length": 4096, "max_documents": 16, "validation_documents": 2},
        "train": {"steps": 2, "warmup_steps": 0, "decay_steps": "none", "global_batch_size": 2, "device": "cuda"}
        | {"validate_every": 2, "validation_sequences": "none"},
        "budgets": {"gpu": WIDER.get(path.stem, "1GiB"), "ram": "2GiB", "nvme": "12GiB"},
        "storage": {"checkpoint_every": 1},
        "after": {"sample_prompt": "none", "export": "false"},
    }
    texts = [f"{section}.{name}={value}" for section, values in sections.items() for name, value in values.items()]
    return [word for text in texts for word in ("--set", text)]


@pytest.mark.parametrize("path", RECIPES, ids=[path.stem for path in RECIPES])
def test_a_recipe_runs_when_cut(path: Path, tmp_path: Path) -> None:
    arguments = ("train", str(path), "--from-scratch", "--run-dir", "run", *cut_recipe(path))
    done = run("penstock.app.cli.main", *arguments, cwd=tmp_path, STANDIN_SUMMARY="1")
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    counts = done.stderr.rpartition("[standin] ")[2].split()
    found = dict(zip(counts[::2], map(int, counts[1::2]), strict=False))
    assert found["refusal"] == 0
    assert found["launch"] > 100
    manifest = json.loads((tmp_path / "run" / "state" / "manifest.json").read_text())
    assert manifest["meta"]["step"] == 2
