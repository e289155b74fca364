"""Several ranks of one machine beside one, on its CPU: time a step, and memory with one copy of the weights."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import psutil
import typer

from penstock.engine.config import BudgetConfig, DataConfig, ModelConfig, Recipe, StorageConfig, TrainConfig
from penstock.storage.files import child

RECIPE = Recipe(
    name="ranks",
    model=ModelConfig(num_layers=12, hidden_size=768, intermediate_size=2048, num_heads=12, num_kv_heads=4, head_dim=64,
                      vocab_size=16384),
    data=DataConfig(source="random", sequence_length=512, max_documents=200),
    train=TrainConfig(steps=6, global_batch_size=4, replicas=4, chunk_tokens=256, compute_dtype="float32",
                      compile="off", calibrate=False, activation_checkpointing="selective", kv_window="whole"),
    budgets=BudgetConfig(ram="8GiB", gpu="1GiB"),
    storage=StorageConfig(checkpoint_every=1000, part_bytes="4MiB"),
)  # fmt: skip
"""130 million parameters, whose state is in RAM; four replicas, on however many ranks."""
MIXTURE = ModelConfig(
    model_type="qwen3_moe", num_layers=6, hidden_size=512, num_heads=8, num_kv_heads=4, head_dim=64, vocab_size=16384,
    overrides={"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 768},
)  # fmt: skip


def main(
    folder: Annotated[Path, typer.Option(help="A new folder for the runs.")],
    ranks: Annotated[str, typer.Option(help="Numbers of ranks.")] = "1,2",
    one_sequence: Annotated[bool, typer.Option(help="Of as many tokens, which the ranks share.")] = False,
    experts: Annotated[bool, typer.Option(help="A mixture of as many parameters, experts spread and not.")] = False,
) -> None:
    """Print a table in Markdown."""
    from penstock.app.recipes.recipe import to_run_json

    folder.mkdir(parents=True)
    recipe = RECIPE
    if one_sequence:
        train = replace(recipe.train, global_batch_size=1, parallel="context", kv_window="auto")
        recipe = replace(recipe, train=train, data=replace(recipe.data, sequence_length=2048))
    if experts:
        recipe = replace(recipe, model=MIXTURE, train=replace(recipe.train, split_layers="experts", expert_groups=4))
    (folder / "recipe.json").write_text(to_run_json(recipe))
    figures = ("to the GPUs a step", "from the GPUs a step") if experts else ("private memory of all", "shared by all")
    print(f"| ranks | s a step | tokens/s | {' | '.join(figures)} |\n|---|---|---|---|---|")
    counts = list(map(int, ranks.split(",")))
    for count, spread in ((n, s) for n in counts for s in ([False, True] if experts and n > 1 else [False])):
        run = folder / f"on{count}{', experts spread' * spread}"
        arguments = ["train", str(folder / "recipe.json"), "--run-dir", str(run), "--gpus", str(count)]
        arguments += ["--set", f"train.spread_experts={str(spread).lower()}"] if experts else []
        process = subprocess.Popen(
            child.command("app.cli.main", *arguments), env=child.environment(), stdout=subprocess.DEVNULL
        )
        private = shared = 0
        while process.poll() is None:
            held = [_held(each) for each in [psutil.Process(process.pid), *psutil.Process(process.pid).children()]]
            private = max(private, sum(own for own, _ in held))
            shared = max(shared, max((mapped for _, mapped in held), default=0))
            time.sleep(0.5)
        if process.returncode:
            sys.exit(f"{run.name}: exit code {process.returncode}")
        found = json.loads((run / "summary.json").read_text())
        sizes = private, shared
        if experts:  # those of the first rank are counted, and the others' are as many
            sizes = tuple(count * found["lanes"][lane]["bytes"] / recipe.train.steps for lane in ("h2d", "d2h"))
        said = " | ".join(f"{size / 1e9:.2f} GB" for size in sizes)
        print(
            f"| {run.name[2:]} | {found['step_s_median']:.2f} | {found['mean_tokens_per_s']:,.0f} | {said} |",
            flush=True,
        )


def _held(process: psutil.Process) -> tuple[int, int]:
    """Bytes that a process has of its own, and that it has mapped of memory that processes share."""
    with suppress(OSError, psutil.Error):
        full = process.memory_full_info()
        status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        shared = next((int(line.split()[1]) * 1024 for line in status if line.startswith("RssShmem")), 0)
        return full.uss, shared
    return 0, 0
