"""The first two recipes start, train, survive their kill and export on any CPU, in any environment."""

from __future__ import annotations

from pathlib import Path

import pytest
from starts import STARTS, TOGETHER, Commands, combined
from transformers import AutoModelForCausalLM

from penstock.app.plan import plan_recipe
from penstock.app.recipe import apply_overrides, load_recipe

SMALL = {
    "quickstart": ["train.chunk_tokens=128", "data.sequence_length=512", "data.validation_documents=4"],
    "text_small": [
        "model.num_layers=2",
        "model.hidden_size=64",
        "model.intermediate_size=96",
        "data.max_documents=12",
        "data.validation_documents=2",
        "data.sequence_length=256",
        "data.tokenizer_vocab_size=400",
        "after.sample_tokens=4",
        "train.chunk_tokens=64",
        "train.compile=auto",
    ],
}
STEPS = ["train.steps=3", "train.warmup_steps=1", "train.decay_steps=none", "train.validate_every=3"]
STEPS += ["train.validation_sequences=1", "storage.checkpoint_every=1", "storage.part_bytes=64KiB"]


def survives(recipe: str, folder: Path, *names: str) -> None:
    commands = Commands(combined(names), folder)
    settings = SMALL[recipe] + [text for text in STEPS if recipe == "quickstart" or "decay" not in text]
    commands.train_killed(recipe, settings, kill_after=1)
    assert commands.steps == 3
    assert AutoModelForCausalLM.from_pretrained(commands.run / "export").num_parameters() > 0


def test_every_start_is_one_of_those_together() -> None:
    together = [name for names in TOGETHER.values() for name in names]
    assert sorted([*together, "as it is", "no terminal"]) == sorted(STARTS)  # the others have no terminal either


@pytest.mark.parametrize("names", TOGETHER.values(), ids=TOGETHER.keys())
def test_it_starts_anywhere(tmp_path: Path, names: tuple[str, ...]) -> None:
    survives("quickstart" if "read-only home" not in names else "text_small", tmp_path, *names)


@pytest.mark.long
@pytest.mark.parametrize("recipe", SMALL)
@pytest.mark.parametrize("name", STARTS)
def test_each_recipe_starts_anywhere(tmp_path: Path, recipe: str, name: str) -> None:
    survives(recipe, tmp_path, name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recipe", SMALL)
def test_the_recipes_as_they_are_fit_in_either_dtype(recipe: str, dtype: str) -> None:
    wanted = apply_overrides(load_recipe(recipe), [f"train.compute_dtype={dtype}"])
    found = plan_recipe(wanted, advice=False)
    assert found["fits"]
    assert all(found["tiers"][tier]["peak_bytes"] <= found["tiers"][tier]["budget_bytes"] for tier in ("gpu", "ram"))
