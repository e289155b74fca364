"""docs/cluster.md: its commands exist, its plan is the plan's, and what it says of checkpoints and files is so."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cli_process import REPOSITORY
from cluster_files import FILES
from pages import require_command
from recipe_texts import recipe_text
from safetensors.torch import load_file

from penstock.app.cli import main

PAGE = (REPOSITORY / "docs" / "cluster.md").read_text()
BLOCKS = PAGE.split("```")[1::2]
TINY_LLAMA = recipe_text(
    model={
        **{"model_type": "llama", "num_layers": 2, "hidden_size": 32, "intermediate_size": 48},
        **{"num_heads": 4, "num_kv_heads": 4, "head_dim": 8, "vocab_size": 200},
    },
    data={"source": "random"},
    train={"steps": 1, "compute_dtype": "float32"},
)


def test_commands_and_links_exist() -> None:
    lines = re.findall(r"^(?:\$ )?penstock (.+)$|`penstock ([^`\n]+)`|-m penstock (cluster [^`\n]+)", PAGE, re.M)
    found = ["".join(groups) for groups in lines]
    assert len(found) >= 9
    for line in found:
        require_command("cluster.md", line)
    for link in re.findall(r"\]\(([^)#:]+)\)", PAGE):
        assert (REPOSITORY / "docs" / link).exists(), link
    for name in ("guide.md", "guide/100b.md"):
        assert "cluster.md" in (REPOSITORY / "docs" / name).read_text(), "a page leads to it"


@pytest.mark.long
def test_the_plan_is_printed_as_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = [block for block in BLOCKS if "$ penstock plan" in block]
    command, *printed = block.strip().splitlines()
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(REPOSITORY)
    assert main(command.split()[2:]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[-len(printed) :] == printed


def test_every_launch_file_is_on_it() -> None:
    table = PAGE.partition("## Launch files")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"^\| `(\w+\.\w+)` \|", table, re.M)) == [file.name for file in FILES]


def test_what_it_says_that_the_files_set_they_set() -> None:
    assert "`OMP_NUM_THREADS`" in PAGE
    for file in FILES:
        assert "export OMP_NUM_THREADS=" in file.read_text(), file.name
    assert (
        "export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=" in (REPOSITORY / "docker" / "cluster" / "cluster.sbatch").read_text()
    )


LLAMA = """
# By transformers' name the one that torchtitan 0.3.0 has (torchtitan/models/llama3/state_dict_adapter.py).
NAMES = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.layers.{}.self_attn.q_proj.weight": "layers.{}.attention.qkv_linear.wq.weight",
    "model.layers.{}.self_attn.k_proj.weight": "layers.{}.attention.qkv_linear.wk.weight",
    "model.layers.{}.self_attn.v_proj.weight": "layers.{}.attention.qkv_linear.wv.weight",
    "model.layers.{}.self_attn.o_proj.weight": "layers.{}.attention.wo.weight",
    "model.layers.{}.mlp.gate_proj.weight": "layers.{}.feed_forward.w1.weight",
    "model.layers.{}.mlp.up_proj.weight": "layers.{}.feed_forward.w3.weight",
    "model.layers.{}.mlp.down_proj.weight": "layers.{}.feed_forward.w2.weight",
    "model.layers.{}.input_layernorm.weight": "layers.{}.attention_norm.weight",
    "model.layers.{}.post_attention_layernorm.weight": "layers.{}.ffn_norm.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "lm_head.weight",
}
"""
STAND_IN = """
from types import SimpleNamespace

import torch

HEADS, SIZE, INNER, VOCABULARY, LAYERS = 4, 32, 48, 200, 2
FLAT = {o.format(i): n.format(i) for o, n in NAMES.items() for i in range(LAYERS if "{}" in o else 1)}


def shape(name):
    if "norm" in name:
        return (SIZE,)
    if "mlp" in name:
        return (SIZE, INNER) if "down" in name else (INNER, SIZE)
    return (SIZE, SIZE) if "self_attn" in name else (VOCABULARY, SIZE)


def turned(name, rows, split):
    turns = name.endswith(("q_proj.weight", "k_proj.weight"))
    return rows.view(HEADS, *split, SIZE).transpose(1, 2).reshape(SIZE, SIZE) if turns else rows


class Adapter:
    def __init__(self, config, assets):
        pass

    def to_hf(self, native):
        return {old: turned(old, native[new], (SIZE // HEADS // 2, 2)).clone() for old, new in FLAT.items()}

    def from_hf(self, weights):
        assert weights.keys() == FLAT.keys()
        return {FLAT[old]: turned(old, rows, (2, SIZE // HEADS // 2)) for old, rows in weights.items()}


class ModelWrapper:
    def __init__(self, model):
        pass

    def _get_state_dict(self):
        return {new: torch.zeros(shape(old)) for old, new in FLAT.items()}


def model_registry(flavor):
    return SimpleNamespace(model=SimpleNamespace(build=lambda: None), state_dict_adapter=Adapter)
"""


def test_torchtitans_adapter_takes_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script of the page on a stand-in that has torchtitan's names and its order of rows."""
    monkeypatch.chdir(tmp_path)
    Path("tiny.py").write_text(TINY_LLAMA)
    for command in ("train tiny.py --run-dir run", "export run ours --format dcp", "export run hf"):
        assert main(command.split()) == 0
    (script,) = [block.removeprefix("python\n") for block in BLOCKS if "torchtitan" in block and "import" in block]
    (tmp_path / "script.py").write_text(script)
    for name in ("components/checkpointer.py", "models/llama3.py"):
        path = tmp_path / "torchtitan" / name
        path.parent.mkdir(parents=True)
        path.write_text(LLAMA + STAND_IN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["script.py", "ours", "theirs", "8B"])
    runpy.run_path("script.py")
    found = {"layers.1.attention.qkv_linear.wk.weight": torch.zeros(32, 32), "norm.weight": torch.zeros(32)}
    dcp.load(found, checkpoint_id=tmp_path / "theirs", no_dist=True)
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert torch.equal(found["norm.weight"], exported["model.norm.weight"])
    # Pairs of a head's rows that rotate together lie half a head apart in transformers, and side by side there.
    rows = exported["model.layers.1.self_attn.k_proj.weight"].view(4, 2, 4, 32)
    assert torch.equal(found["layers.1.attention.qkv_linear.wk.weight"].view(4, 4, 2, 32), rows.transpose(1, 2))
