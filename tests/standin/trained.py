"""Train a run in this process and print what became of it, as JSON: `python tests/standin/trained.py FOLDER JSON`.

JSON: {"model": {...}, "data": {...}, "train": {...}, "budgets": {...}, "storage": {...}}, all optional;
fields of small_model's and the recipe's sections. A run that FOLDER holds already is resumed. Printed: the
steps done, a digest of the committed state, the plan and peaks of the tiers, the GPU's memory, the validations, and
what CUDA refused.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import small_model
import standin
import tiny

from penstock.engine.config import BudgetConfig, state_folder
from penstock.engine.train import train
from penstock.storage.tier.manifest import Manifest


def main(folder: Path, wanted: dict[str, dict[str, Any]]) -> dict[str, Any]:
    observer = tiny.Silent()
    recipe = tiny.recipe(
        model=small_model.model(**wanted.get("model", {})),
        data=tiny.data(**({"sequence_length": 512} | wanted.get("data", {}))),
        train=replace(small_model.training(device="cuda", calibrate=True), **wanted.get("train", {})),
        budgets=BudgetConfig(**wanted.get("budgets", {})),
        storage=tiny.storage(**({"part_bytes": "256KiB", "checkpoint_every": 2} | wanted.get("storage", {}))),
    )
    resume = (state_folder(folder) / "manifest.json").exists()
    result = train(recipe, run_dir=folder, observer=observer, resume=resume)
    return {
        "steps": result.steps,
        "steps_done": result.steps_done,
        "committed_step": Manifest.read(state_folder(folder)).meta["step"],
        "digest": tiny.digest_of(folder),
        "tiers": result.tiers,
        "planned": {tier: part["peak_bytes"] for tier, part in observer.plan["tiers"].items()},
        "spilled": observer.plan["tiers"]["nvme"]["parts"].get("spilled activations", 0),
        "gpu_memory": result.gpu_memory,
        "validations": len(observer.validations),
        "lanes": sorted({span.lane for span in observer.spans}),
        "messages": observer.messages,
        "refusals": standin.counts().total("refusal"),
    }


if __name__ == "__main__":
    standin.name_threads()
    print(json.dumps(main(Path(sys.argv[1]), json.loads(sys.argv[2]))))
