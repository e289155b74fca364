"""DPO makes a small model polite, in minutes on 2 cores and without a download: `python recipes/guides/dpo.py`.

A model of 0.4 million parameters first learns both tones from rows of prompts and answers, half of them gruff. Then it
is trained on pairs, in which the polite answer is preferred. Before and after, questions are put to it that are in no
row, and the pairs of these questions are compared. Called again after an interruption, it goes on.

For data of your own, write pairs.jsonl and let `model.path` be your model: `dpo_recipe` is all that it takes.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

from penstock import (
    AfterConfig,
    DataConfig,
    ModelConfig,
    PreferenceConfig,
    Recipe,
    Run,
    TrainConfig,
    resume,
    sample,
    train,
)

WORDS = {
    "tea": "hot",
    "soup": "warm",
    "pool": "deep",
    "mill": "old",
    "train": "late",
    "museum": "free",
    "bread": "fresh",
}
PLACES = ("Rome", "Oslo", "Lima", "Bern", "Kyoto", "Paris", "Quito", "Cairo", "Delhi", "Turin", "Porto", "Perth")
TIMES = ("today", "tonight", "tomorrow", "on Monday", "on Friday", "in May", "in June", "in winter")
QUESTIONS = [
    (f"Is the {noun} in {place} {word} {time}?", f"the {noun} in {place} is {word} {time}")
    for noun, word in WORDS.items()
    for place in PLACES
    for time in TIMES
]
HELD_OUT = 64
"""Questions that no model is trained on."""


def polite(fact: str) -> str:
    return f" With pleasure: {fact}."


def gruff(fact: str) -> str:
    return f" Obviously {fact}."


def write_data(folder: Path, seed: int) -> list[str]:
    """Write base.jsonl and pairs.jsonl, whose last pairs are held out; the questions of these."""
    chance = random.Random(seed)
    questions = chance.sample(QUESTIONS, len(QUESTIONS))
    half = len(questions) // 2
    base = [{"prompt": q, "completion": tone(fact)} for q, fact in questions[:half] for tone in (polite, gruff)]
    pairs = [{"prompt": q, "chosen": polite(fact), "rejected": gruff(fact)} for q, fact in questions[half:]]
    for name, rows in (("base", base), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [question for question, _ in questions[-HELD_OUT:]]


def base_recipe(folder: Path, steps: int, seed: int) -> Recipe:
    """Next-token training from scratch."""
    return Recipe(
        name="tones",
        model=ModelConfig(
            num_layers=2,
            hidden_size=128,
            intermediate_size=256,
            num_heads=4,
            num_kv_heads=4,
            head_dim=32,
            max_position=128,
        ),
        data=DataConfig(
            source="prompt_completion",
            path=str(folder / "base.jsonl"),
            tokenizer_vocab_size=400,
            sequence_length=64,
            packing="none",
        ),
        train=TrainConfig(steps=steps, lr=4e-3, warmup_steps=10, seed=seed, **ON_A_CPU),
        after=AfterConfig(export=True),
    )


def dpo_recipe(folder: Path, steps: int, seed: int) -> Recipe:
    """Preference training of that model."""
    return Recipe(
        name="polite",
        model=ModelConfig(path=str(folder / "base" / "export")),
        data=DataConfig(
            source="preference",
            path=str(folder / "pairs.jsonl"),
            sequence_length=128,
            packing="none",
            order="kept",
            validation_documents=HELD_OUT,
        ),
        train=TrainConfig(
            objective="dpo", steps=steps, lr=1e-4, validate_every=steps, validate_first=True, seed=seed, **ON_A_CPU
        ),
        preference=PreferenceConfig(beta=0.5),
    )


ON_A_CPU: dict[str, Any] = {
    "global_batch_size": 32,
    "micro_batch_size": 32,
    "compute_dtype": "float32",
    "compile": "off",  # which takes longer than the run
    "calibrate": False,
}


def finished(recipe: Recipe, run_dir: Path) -> Path:
    """The run, trained to its end from where it is."""
    if not run_dir.exists():
        return train(recipe, run_dir=run_dir)
    return run_dir if Run(run_dir).state == "finished" else resume(run_dir)


def share_of_polite(model: Path, questions: list[str]) -> float:
    answers = sample(model, questions, tokens=24, temperature=1.0)
    return sum(answer.startswith(" With pleasure") for answer in answers) / len(answers)


def main(folder: Path, base_steps: int, dpo_steps: int, seed: int) -> tuple[float, float]:
    """The shares of polite answers before and after."""
    folder.mkdir(parents=True, exist_ok=True)
    questions = write_data(folder, seed)
    base = finished(base_recipe(folder, base_steps, seed), folder / "base")
    run = finished(dpo_recipe(folder, dpo_steps, seed), folder / "dpo")
    first, *_, last = (validation.measured for validation in Run(run).validations())
    before, after = share_of_polite(base, questions), share_of_polite(run, questions)
    margins, preferred = ([one[f"rewards/{name}"] for one in (first, last)] for name in ("margins", "accuracies"))
    print(f"\n{HELD_OUT} questions that no model was trained on, before and after DPO:")
    print(f"  margin of the polite answer over the gruff one   {margins[0]:.2f} -> {margins[1]:.2f}")
    print(f"  pairs in which it has become the likelier one    {preferred[0]:.0%} -> {preferred[1]:.0%}")
    print(f"  sampled answers that are polite                  {before:.0%} -> {after:.0%}")
    return before, after


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("folder", nargs="?", type=Path, default=Path("guide-dpo"))
    arguments.add_argument("--base-steps", type=int, default=120)
    arguments.add_argument("--dpo-steps", type=int, default=60)
    arguments.add_argument("--seed", type=int, default=0)
    main(**vars(arguments.parse_args()))
