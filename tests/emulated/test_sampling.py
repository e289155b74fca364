"""Text from a model that passes through a GPU, on cards that refuse something."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from chat_model import make_chat_model
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parents[2]
BUDGETS = ("--gpu", "114MiB", "--ram", "1GiB")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 MB, of which the GPU's budget holds a few."""
    folder = tmp_path_factory.mktemp("model")
    return make_chat_model(folder, hidden_size=192, intermediate_size=512, num_hidden_layers=16)


def penstock(*words: str, **settings: str) -> tuple[str, str]:
    """What a command prints, and what it says on the way."""
    path = os.pathsep.join((str(ROOT / "src"), os.environ["PYTHONPATH"]))
    command = [sys.executable, "-m", "penstock.app.cli.main", *words]
    variables = os.environ | {"PYTHONPATH": path} | settings
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_memory_that_cannot_be_pinned_changes_no_answer_and_is_told(model: Path, tmp_path: Path) -> None:
    sampled = ("sample", str(model), "--prompt", "What colour", "--prompt", "has", "--tokens", "4", "--json", *BUDGETS)
    needles = ("eval", str(model), "--tasks", "needles_single", "--lengths", "300", "--depths", "1", "--samples", "2")
    for number, words in enumerate((sampled, (*needles, "--answer-tokens", "4", "--json", *BUDGETS))):
        found = []
        for limit in ("-1", "16"):
            out, said = penstock(*words, STANDIN_PINNED_MIB=limit)
            assert said.count("cannot pin") == (limit == "16"), said
            answers = json.loads(out)
            found.append(answers["samples"] if number == 0 else answers["needles"])
        assert found[0] == found[1]
        assert found[0]


def test_a_card_without_bfloat16_reads_a_bfloat16_model_in_float32(model: Path, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).save_pretrained(tmp_path)
    for file in model.glob("*token*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    words = ("sample", str(tmp_path), "--prompt", "What colour", "--tokens", "2", *BUDGETS)
    for card, dtype in (("t4", "float32"), ("a100", "bfloat16")):
        assert f"parameters in {dtype}" in penstock(*words, STANDIN_CARD=card)[1]
