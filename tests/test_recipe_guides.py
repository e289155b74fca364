"""Every guide of recipes/guides/: its data and rewards are what it says, and the small model gets better."""

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from cli_process import REPOSITORY

from penstock import Run

FOLDER = REPOSITORY / "recipes" / "guides"


@pytest.fixture
def guides(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """As Python runs them, with their folder on the import path."""
    monkeypatch.syspath_prepend(FOLDER)
    names = sorted(path.stem for path in FOLDER.glob("*.py"))
    assert names == ["dpo", "grpo", "rewards"]
    yield {name: import_module(name) for name in names}
    for name in names:
        del sys.modules[name]


def rows(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_pairs_differ_in_their_tone_and_held_out_questions_are_in_no_row_of_the_base(
    guides: dict[str, ModuleType], tmp_path: Path
) -> None:
    dpo = guides["dpo"]
    held_out = dpo.write_data(tmp_path, seed=3)
    base, pairs = rows(tmp_path / "base.jsonl"), rows(tmp_path / "pairs.jsonl")
    assert [pair["prompt"] for pair in pairs[-dpo.HELD_OUT :]] == held_out
    assert not {row["prompt"] for row in base} & {pair["prompt"] for pair in pairs}
    assert len({pair["prompt"] for pair in pairs}) == len(pairs)
    for pair in pairs:
        assert pair["chosen"].removeprefix(" With pleasure: ") == pair["rejected"].removeprefix(" Obviously ")


def test_rewards_are_of_the_right_sums_and_held_out_questions_are_in_no_row(
    guides: dict[str, ModuleType], tmp_path: Path
) -> None:
    grpo, right_number = guides["grpo"], guides["rewards"].right_number
    grpo.write_data(tmp_path, seed=3)
    base, all_prompts = rows(tmp_path / "base.jsonl"), rows(tmp_path / "prompts.jsonl")
    prompts, held_out = all_prompts[: -grpo.HELD_OUT], all_prompts[-grpo.HELD_OUT :]
    assert not {row["prompt"] for row in held_out} & {row["prompt"] for row in [*base, *prompts]}
    data = grpo.grpo_recipe(tmp_path, steps=1, seed=3).data
    assert (data.order, data.validation_documents) == ("kept", grpo.HELD_OUT), "the last ones are held out"
    for row in held_out:
        numbers = [int(word) for word in row["prompt"].split() if word.isdigit()]
        assert int(row["answer"]) == sum(numbers)
    rewards = right_number([row["completion"] for row in base], answer=[row["answer"] for row in prompts])
    assert sum(rewards) / len(rewards) == pytest.approx(1 - grpo.WRONG * 16 / 17, abs=0.03)
    assert right_number([" 14 pens.", "14", " 15 pens.", "", " is 14"], answer=["14"] * 5) == [1, 1, 0, 0, 0]


@pytest.mark.long
def test_preferences_are_learned(guides: dict[str, ModuleType], tmp_path: Path) -> None:
    before, after = guides["dpo"].main(tmp_path, base_steps=100, dpo_steps=30, seed=1)
    assert after > before + 0.15
    first, *_, last = Run(tmp_path / "dpo").validations()
    assert first.measured["rewards/margins"] == 0
    assert last.measured["rewards/margins"] > 0.2
    assert last.measured["rewards/accuracies"] > 0.95


@pytest.mark.long
def test_rewards_rise(guides: dict[str, ModuleType], tmp_path: Path) -> None:
    before, after = guides["grpo"].main(tmp_path, base_steps=200, grpo_steps=50, seed=1)
    assert after > before + 0.1
    assert guides["grpo"].main(tmp_path, base_steps=200, grpo_steps=50, seed=1) == (before, after)  # the same runs
