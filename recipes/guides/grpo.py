"""GRPO makes a small model add right, in minutes on 2 cores and without a download: `python recipes/guides/grpo.py`.

A model of 0.4 million parameters first learns sums from rows of which half are wrong, so that it is right less than
half of the time. Then it is trained on questions alone: it samples answers, rewards.py says which are right, and these
become more likely. Validations put questions to it that no model is trained on. Called again after an interruption, it
goes on.

For data of your own, write prompts.jsonl and a reward function, and let `model.path` be your model: `grpo_recipe` is
all that it takes.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

from penstock import AfterConfig, DataConfig, GrpoConfig, ModelConfig, Recipe, Run, TrainConfig, resume, train

NAMES = ("Ann", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ivo", "Jan", "Kim", "Leo")
THINGS = ("apples", "books", "cards", "coins", "pens", "shells", "stamps", "stones")
SUMS = [(name, things, a, b) for name in NAMES for things in THINGS for a in range(1, 10) for b in range(1, 10)]
WRONG = 0.5
"""Share of the rows with any number as the answer."""
HELD_OUT = 200
"""Questions that no model is trained on."""
ON_A_CPU: dict[str, Any] = {
    "global_batch_size": 128,
    "micro_batch_size": 128,
    "compute_dtype": "float32",
    "compile": "off",  # which takes longer than the run
    "calibrate": False,
}


def write_data(folder: Path, seed: int) -> None:
    """Write base.jsonl, without the questions that are held out, and prompts.jsonl, in which they are the last ones."""
    chance = random.Random(seed)
    base, prompts = [], []
    for name, things, a, b in chance.sample(SUMS, len(SUMS)):
        question = f"{name} has {a} {things} and gets {b} more. Now {name} has"
        said = chance.randint(2, 18) if chance.random() < WRONG else a + b
        base.append({"prompt": question, "completion": f" {said} {things}."})
        prompts.append({"prompt": question, "answer": str(a + b)})
    for file, rows in (("base", base[:-HELD_OUT]), ("prompts", prompts)):
        (folder / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def base_recipe(folder: Path, steps: int, seed: int) -> Recipe:
    """Next-token training from scratch."""
    return Recipe(
        name="sums",
        model=ModelConfig(
            num_layers=2,
            hidden_size=128,
            intermediate_size=256,
            num_heads=4,
            num_kv_heads=4,
            head_dim=32,
            max_position=64,
        ),
        data=DataConfig(
            source="prompt_completion",
            path=str(folder / "base.jsonl"),
            tokenizer_vocab_size=400,
            sequence_length=32,
            packing="none",
        ),
        train=TrainConfig(steps=steps, lr=4e-3, warmup_steps=10, seed=seed, **ON_A_CPU),
        after=AfterConfig(export=True),
    )


def grpo_recipe(folder: Path, steps: int, seed: int) -> Recipe:
    """That model samples eight answers to each of 16 questions a step, and is trained on them; before the first step
    and after every 20 it samples one to each question held out."""
    return Recipe(
        name="sums-grpo",
        model=ModelConfig(path=str(folder / "base" / "export")),
        data=DataConfig(
            source="prompts",
            path=str(folder / "prompts.jsonl"),
            order="kept",
            sequence_length=32,
            validation_documents=HELD_OUT,
        ),
        train=TrainConfig(
            objective="grpo",
            steps=steps,
            lr=1e-3,
            seed=seed,
            validate_every=20,
            validate_first=True,
            validation_sequences=256,
            **ON_A_CPU,
        ),
        grpo=GrpoConfig(
            reward=[f"{Path(__file__).with_name('rewards.py')}:right_number"],
            num_generations=8,
            num_generations_eval=1,
            max_completion_length=6,
        ),
    )


def finished(recipe: Recipe, run_dir: Path) -> Path:
    """The run, trained to its end from where it is."""
    if not run_dir.exists():
        return train(recipe, run_dir=run_dir)
    return run_dir if Run(run_dir).state == "finished" else resume(run_dir)


def main(folder: Path, base_steps: int, grpo_steps: int, seed: int) -> tuple[float, float]:
    """The mean rewards before and after."""
    folder.mkdir(parents=True, exist_ok=True)
    write_data(folder, seed)
    finished(base_recipe(folder, base_steps, seed), folder / "base")
    run = finished(grpo_recipe(folder, grpo_steps, seed), folder / "grpo")
    before, *_, after = (made.value for made in Run(run).validations())
    print(f"\nmean reward on {HELD_OUT} questions that no model was trained on: {before:.2f} -> {after:.2f}")
    return before, after


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("folder", nargs="?", type=Path, default=Path("guide-grpo"))
    arguments.add_argument("--base-steps", type=int, default=250)
    arguments.add_argument("--grpo-steps", type=int, default=80)
    arguments.add_argument("--seed", type=int, default=0)
    main(**vars(arguments.parse_args()))
