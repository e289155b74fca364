"""Every recipe, cut to two layers and to sizes that a few GB hold: its own model type, heads, rotary tables, windows,
experts and settings of the run, from random weights to a commit.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.app.recipe import load_recipe

REPOSITORY = Path(__file__).parents[2]
RECIPES = sorted((REPOSITORY / "recipes").glob("*.py"))

WIDEST = 2048
"""Wider models are cut to a fourth in width, heads and MLP; heads keep their size."""

WIDER = {"70b_gh200": "1100MiB", "120b_gh200": "1600MiB", "qwen_1_5b_4gib": "1200MiB"}
"""Budgets of what is still wide then: one block's working set is more than 1 GiB."""


def cut(path: Path) -> dict[str, object]:
    """The recipe's fields that are changed."""
    recipe = load_recipe(path)
    model, fourth = recipe.model, 4
    changes: dict[str, object] = {
        "model.num_layers": 2,
        "model.vocab_size": 2048,
        "data.source": "random",
        "data.sequence_length": 4096,
        "data.max_documents": 16,
        "data.validation_documents": 2,
        "train.steps": 2,
        "train.warmup_steps": 0,
        "train.decay_steps": "none",
        "train.global_batch_size": 2,
        "train.validate_every": 2,
        "train.validation_sequences": "none",
        "train.device": "cuda",
        "budgets.gpu": WIDER.get(path.stem, "1GiB"),
        "budgets.ram": "2GiB",
        "budgets.nvme": "12GiB",
        "storage.checkpoint_every": 1,
        "after.sample_prompt": "none",
        "after.export": "false",
    }
    if model.hidden_size >= WIDEST:
        changes |= {
            "model.hidden_size": model.hidden_size // fourth,
            "model.intermediate_size": model.intermediate_size // fourth,
            "model.num_heads": model.num_heads // fourth,
            "model.num_kv_heads": max(1, model.num_kv_heads // fourth),
            "model.head_dim": model.head_dim or model.hidden_size // model.num_heads,
        }
    if "num_local_experts" in model.overrides:
        changes["model.overrides.num_local_experts"] = 8
    return changes


def test_all_recipes_are_here() -> None:
    assert len(RECIPES) == 14


@pytest.mark.parametrize("path", RECIPES, ids=[path.stem for path in RECIPES])
def test_a_recipe_runs_when_cut(path: Path, tmp_path: Path) -> None:
    options = [part for key, value in cut(path).items() for part in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "penstock.app.cli", "train", str(path), "--from-scratch", "--run-dir", "run"]
    env = os.environ | {"PYTHONPATH": str(REPOSITORY), "XDG_CONFIG_HOME": str(tmp_path), "STANDIN_SUMMARY": "1"}
    done = subprocess.run([*command, *options], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    counts = done.stderr.rpartition("[standin] ")[2].split()
    found = dict(zip(counts[::2], map(int, counts[1::2]), strict=False))
    assert found["refusal"] == 0
    assert found["launch"] > 100
    manifest = json.loads((tmp_path / "run" / "state" / "manifest.json").read_text())
    assert manifest["meta"]["step"] == 2
