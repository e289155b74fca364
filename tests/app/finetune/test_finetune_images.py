"""`penstock finetune` of a vision-language model on rows with images."""

import json
from pathlib import Path

import pytest
from cli_process import json_lines
from image_models import COLOURS, make_image_model, write_image

from penstock.app.cli.main import main
from penstock.app.recipes.recipe import load_recipe

FAST = ["--set", "train.compile=off", "--set", "train.calibrate=false", "--set", "train.device=cpu"]


def test_one_line_trains_on_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    make_image_model(tmp_path / "llava", "llava")
    rows = []
    for number in range(40):
        colour = [*COLOURS][number % 2]
        write_image(tmp_path / f"{number}.png", colour)
        turns = [("human", "<image>What colour is it?"), ("gpt", f"It is {colour}.")]
        talk = [{"from": who, "value": text} for who, text in turns]
        rows.append({"conversations": talk, "images": [f"{number}.png"]})
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    command = ["finetune", "llava", "rows.json", "--yes", "--run-dir", "run", "--set", "train.steps=2", *FAST]
    assert main(command) == 0
    recipe = load_recipe("llava_rows.py")
    assert (recipe.data.source, recipe.data.packing, recipe.data.long_documents) == ("sharegpt", "best_fit", "drop")
    assert recipe.after.sample_prompt is None
    assert len(json_lines(tmp_path / "run" / "metrics.jsonl")) == 2
    assert len(json_lines(tmp_path / "run" / "validation.jsonl")) == 2
    parts = json_lines(tmp_path / "run" / "log.jsonl")
    assert any("40 images" in json.dumps(part) for part in parts)
    assert main(["data", "llava", "rows.json"]) == 0
    assert "It is red." in capsys.readouterr().out
