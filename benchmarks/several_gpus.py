"""What several GPUs of one machine would do, planned from data sheets."""

from __future__ import annotations

from dataclasses import replace

from penstock.app.planning.plan import machine_task
from penstock.app.recipes.recipe import apply_overrides, load_recipe
from penstock.engine.forecast.report import forecast
from penstock.engine.machine.presets import PRESETS
from penstock.storage.files.errors import BudgetError
from penstock.storage.files.units import bytes_text, seconds_text

YARN = '{"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 131072, "rope_theta": 500000.0}'
WORKSTATION, OLDER, EPYC, H200 = "4x-rtx4090-256", "2x-rtx3090-256", "8x-rtx4090-1000", "8x-h200-2000"
EXPERTS = ["train.split_layers=experts", "train.expert_groups=8", "data.sequence_length=8192"]
LONG = ["data.sequence_length=262144", "model.max_position=262144"]
LONG += [f"model.overrides.rope_parameters={YARN}"]
EVERY = {
    "all experts on every GPU": ["train.spread_experts=false"],
    "experts spread": ["train.spread_experts=true"],
}
CASES: list[tuple[str, str, int, str, list[str]]] = [
    ("Llama-3.1-8B at 8k", EPYC, 8, "8b_8k", ["train.global_batch_size=128"]),
    ("Qwen2.5-14B at 8k", WORKSTATION, 2, "14b_workstation", ["train.global_batch_size=32"]),
    ("Qwen2.5-14B at 8k", WORKSTATION, 4, "14b_workstation", ["train.global_batch_size=64"]),
    ("Qwen2.5-14B at 8k", OLDER, 2, "14b_workstation", ["train.global_batch_size=32"]),
    ("Qwen2.5-14B at 8k", OLDER, 4, "14b_workstation", ["train.global_batch_size=64"]),
    ("Qwen2.5-32B at 8k", WORKSTATION, 2, "32b_workstation", ["train.global_batch_size=32"]),
    ("Qwen2.5-32B at 8k", WORKSTATION, 4, "32b_workstation", ["train.global_batch_size=64"]),
    ("Qwen2.5-32B at 8k", OLDER, 4, "32b_workstation", ["train.global_batch_size=64"]),
    ("Qwen2.5-7B at 1M", H200, 8, "7b_1m", ["train.global_batch_size=8"]),
    ("Llama-3.3-70B at 256k", H200, 8, "70b_gh200", [*LONG, "train.global_batch_size=8"]),
    ("Qwen2.5-7B at 1M, one sequence", H200, 8, "7b_1m", ["train.global_batch_size=1"]),
    ("Llama-3.3-70B at 256k, one sequence", H200, 8, "70b_gh200", [*LONG, "train.global_batch_size=1"]),
    ("Qwen2.5-7B at 512k, one sequence", WORKSTATION, 4, "7b_512k", ["train.global_batch_size=1"]),
    *(
        (f"gpt-oss-120b at 8k, {n} sequences, {words}", H200, 8, "120b_moe", [*EXPERTS, *EVERY[words], batch])
        for n, batch in ((n, f"train.global_batch_size={n}") for n in (8, 16, 64))
        for words in EVERY
    ),
]


def main() -> None:
    """Print a table in Markdown; each case beside one GPU of the same machine with the same batch."""
    print(
        "| model | GPUs | machine | s a step | tokens/s | one GPU | bound by | RAM |\n|---|---|---|---|---|---|---|---|"
    )
    for name, server, count, recipe, settings in CASES:
        several, figures = _planned(server, count, recipe, settings)
        alone, _ = _planned(server, 1, recipe, settings)
        print(f"| {name} | {count} | {server} | {several} | {alone} | {figures} |", flush=True)


def _planned(server: str, count: int, recipe: str, settings: list[str]) -> tuple[str, str]:
    """Step time and speed, or speed alone of one GPU; what bounds it and the RAM that it takes."""
    machine = PRESETS[server]
    given = replace(apply_overrides(load_recipe(recipe), [*settings, f"train.gpus={count}"]), machine="")
    given = replace(given, train=replace(given.train, gradient_dtype="float32"))
    if count == 1:
        given = replace(given, train=replace(given.train, replicas=None))
    on, task = machine.of_rank(count), machine_task(given, machine)
    try:
        found = forecast(task, on, task.search(on))
    except BudgetError as error:
        return f"does not fit: {error}" if count > 1 else "does not fit", ""
    speed = f"{found['tokens_per_s']:,.0f}"
    ram = bytes_text(found["tiers"]["ram"]["peak_bytes"])
    return (f"{seconds_text(found['step_s'])} | {speed}" if count > 1 else speed), f"{found['bound_by']} | {ram}"
