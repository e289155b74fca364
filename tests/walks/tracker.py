"""A tracker: a run is sent to it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from recipe_texts import tiny_recipe

import penstock


def test_a_run_is_sent_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = {"source": "random", "path": None, "tokenizer_vocab_size": 300}
    recipe = replace(tiny_recipe(train={"steps": 3}, model={"vocab_size": 300}, data=data), trackers=["csv"])
    run = penstock.train(recipe, run_dir="run")
    losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [float(line.split(",")[1]) for line in (run / "losses.csv").read_text().splitlines()] == losses
