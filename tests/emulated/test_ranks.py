"""Runs on several emulated cards of one machine: the same bits on any number of them, on every tier."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import comparisons
import pytest
from recipe_texts import recipe_text

from penstock.storage.generations.store import NvmeStore

REPOSITORY = Path(__file__).parents[2]
SHARED = {"parallel": "context", "global_batch_size": 1, "kv_window": "auto"}
BUDGETS = {"in RAM": {"gpu": "1GiB", "ram": "1GiB"}, "on NVMe": {"gpu": "least", "ram": "least"}}


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
HYBRID: dict[str, Any] = EXPERTS | {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 16,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip


def recipe(budgets: dict[str, Any], shared: dict[str, Any], model: dict[str, Any] | None = None) -> str:
    train: dict[str, Any] = {"device": "cuda", "steps": 3, "global_batch_size": 6, "replicas": 6, "lr": 1e-2}
    train |= {"compute_dtype": "bfloat16", "deterministic": True} | shared
    random = {"source": "random", "path": None, "tokenizer_vocab_size": 4096, "max_documents": 60}
    return recipe_text(
        data=random, model={"vocab_size": 300} | (model or {}), train=train, budgets=budgets | {"nvme": "1GiB"}
    )


def checksums(run: Path) -> list[tuple[str, tuple[int, ...]]]:
    store = NvmeStore.open(run / "state", read_only=True)
    try:
        return sorted((f"{spec.buffer} {spec.kind}", crcs) for spec, crcs in store.checksums().items())
    finally:
        store.close()


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").open()]


def variables(cards: str) -> dict[str, str]:
    """Of processes that see these cards, which compute as this one's does."""
    path = os.pathsep.join((str(REPOSITORY / "src"), os.environ["PYTHONPATH"]))
    return os.environ | {"CUDA_VISIBLE_DEVICES": cards, "PYTHONPATH": path}


HOW: dict[str, dict[str, Any]] = {
    "data": {"shared": {}},
    "context": {"shared": SHARED},
    "balanced routers": {
        "shared": SHARED | {"router_aux_loss": 0.5},
        "model": {"model_type": "qwen3_moe", "overrides": EXPERTS},
    },
    "spread experts": {
        "shared": {"split_layers": "experts", "expert_groups": 4, "spread_experts": True},
        "model": {"model_type": "qwen3_moe", "overrides": EXPERTS},
    },
    "context with states": {"shared": SHARED, "model": {"model_type": "qwen3_next", "overrides": HYBRID}},
}


def trained(folder: Path, count: int) -> Path:
    """The run directory of tiny.py in `folder`, trained on so many cards."""
    environment = variables("0,1,2") | {"OMP_NUM_THREADS": "1", "STANDIN_DELAY_US": "200"}
    command = [sys.executable, "-m", "penstock.app.cli.main", "train", "tiny.py", "--run-dir", f"on{count}"]
    ended = subprocess.run(
        [*command, "--gpus", str(count)], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert count == 1 or f"{count} GPUs train this run together" in ended.stdout
    return folder / f"on{count}"


REWARD = "def letters(completions, **_):\n    return [float(text.count('e')) for text in completions]\n"


def test_completions_are_sampled_by_all_cards(tmp_path: Path) -> None:
    path = comparisons.write(tmp_path / "rows.jsonl", [{"prompt": row["prompt"]} for row in comparisons.pairs(6)])
    (tmp_path / "reward.py").write_text(REWARD)
    grpo = {"reward": [f"{tmp_path}/reward.py:letters"], "beta": 0.1, "num_generations": 2, "num_iterations": 2}
    grpo |= {"max_completion_length": 5}
    train = {"device": "cuda", "steps": 3, "objective": "grpo", "global_batch_size": 6, "micro_batch_size": 2}
    train |= {"replicas": 3, "lr": 1e-2, "compute_dtype": "bfloat16", "deterministic": True}
    data = {"source": "prompts", "path": str(path), "tokenizer_vocab_size": 300, "sequence_length": 40}
    text = recipe_text(data=data, model={"vocab_size": None}, train=train, budgets=BUDGETS["in RAM"], grpo=grpo)
    (tmp_path / "tiny.py").write_text(text)
    found = [(checksums(run), losses(run)) for run in (trained(tmp_path, count) for count in (1, 3))]
    assert found[0] == found[1]
    assert found[0][1][-1] > 1e-9, "the divergence from the reference"


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("where", BUDGETS)
def test_any_number_of_cards_gives_the_same_bits(where: str, how: str, tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(recipe(BUDGETS[where], **HOW[how]))
    runs = [trained(tmp_path, count) for count in (1, 2, 3)]
    assert all(5 < losses(run)[0] < 7 for run in runs), "that of guesses among 300 tokens: kernels compute"
    found = [checksums(run) for run in runs]
    assert found[0] == found[1] == found[2]


def test_a_card_less_than_wanted_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(recipe(BUDGETS["in RAM"], {}))
    environment = variables("0")
    command = [sys.executable, "-m", "penstock.app.cli.main", "train", "tiny.py", "--run-dir", "run", "--gpus", "2"]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith(
        "error: train.gpus: 2 GPUs are wanted and this machine has 1; set train.gpus to what there is"
    )
    assert not (tmp_path / "run").exists()
