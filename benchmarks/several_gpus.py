"""What several GPUs of one machine would do, planned from data sheets."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from msgspec import structs

from penstock.app.planning.plan import machine_task
from penstock.app.recipes.recipe import apply_overrides, load_recipe
from penstock.engine.forecast.report import forecast
from penstock.engine.machine.presets import PRESETS
from penstock.engine.machine.profile import Machine
from penstock.storage.files.errors import BudgetError
from penstock.storage.files.units import bytes_text, seconds_text

STREAM = 0.85
"""Share of its RAM's data-sheet rate that passes over it reach, as in the presets."""
UPDATE_BYTES = 30
"""That AdamW reads and writes for a parameter."""


class Server(NamedTuple):
    """A preset's GPU and drives, with a server's RAM."""

    preset: str
    ram_gb: int
    ram_gb_per_s: float
    """By its data sheet."""
    drives: int
    says: str

    def machine(self) -> Machine:
        base, moved = PRESETS[self.preset], STREAM * self.ram_gb_per_s * 1e9
        return structs.replace(
            base,
            ram_bytes=self.ram_gb * 10**9,
            ram_copy_bytes_per_s=moved,
            optimizer_params_per_s=moved / UPDATE_BYTES,
            drives=base.drives[:1] * self.drives,
        )


YARN = '{"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 131072, "rope_theta": 500000.0}'
WORKSTATION = Server("rtx4090-128", 256, 204.8, 2, "256 GB of DDR4-3200 in 8 channels, two drives")
OLDER = Server("rtx3090-64", 256, 204.8, 2, "256 GB of DDR4-3200 in 8 channels, two drives")
EPYC = Server("rtx4090-128", 1024, 409.6, 4, "1 TB of DDR4-3200 in 16 channels, four drives")
H200 = Server("h200-1500", 2048, 614.4, 8, "2 TB of DDR5-4800 in 16 channels, eight drives")
LONG = ["data.sequence_length=262144", "model.max_position=262144"]
LONG += [f"model.overrides.rope_parameters={YARN}"]
CASES: list[tuple[str, Server, int, str, list[str]]] = [
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
]


def main() -> None:
    """Print a table in Markdown; each case beside one GPU of the same machine with the same batch."""
    print(
        "| model | GPUs | machine | s a step | tokens/s | one GPU | bound by | RAM |\n|---|---|---|---|---|---|---|---|"
    )
    for name, server, count, recipe, settings in CASES:
        several, figures = _planned(server, count, recipe, settings)
        alone, _ = _planned(server, 1, recipe, settings)
        gpu = (PRESETS[server.preset].gpu or "").removeprefix("NVIDIA ").removeprefix("GeForce ")
        print(f"| {name} | {count} x {gpu} | {server.says} | {several} | {alone} | {figures} |", flush=True)


def _planned(server: Server, count: int, recipe: str, settings: list[str]) -> tuple[str, str]:
    """Step time and speed, or speed alone of one GPU; what bounds it and the RAM that it takes."""
    machine = server.machine()
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
