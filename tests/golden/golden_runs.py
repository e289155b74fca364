"""Eight small runs, each of six steps with a resume after the third: digests of their state, and losses, as JSON.

Started as a program with its own environment (`ENVIRONMENT`), which makes torch compute the same bits on every x86 CPU.
"""

import contextlib
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RECIPES = sorted((HERE / "recipes").glob("*.json"))
EXPECTED = HERE / "digests.json"
ENVIRONMENT = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "COMPATIBLE"}
ENVIRONMENT |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1] / "src")}


def state_digest(run: Path, drives: list[Path]) -> str:
    """A hash of every byte of a run's committed generation."""
    import torch

    from penstock.storage.generations.store import NvmeStore

    total = hashlib.sha256()
    with contextlib.closing(NvmeStore.open(run / "state", drives=drives, read_only=True)) as store:
        for array in sorted(store.arrays(), key=lambda array: (array.buffer, array.kind)):
            total.update(f"{array.buffer} {array.kind} {array.numel}".encode())
            for part, (start, end) in enumerate(array.parts()):
                rows = torch.empty(end - start)
                store.read(array.buffer, array.kind, part, rows).result()
                total.update(rows.numpy().tobytes())
    return total.hexdigest()


def train(recipe_file: Path, folder: Path) -> dict[str, Any]:
    """Three steps of a recipe, then as a new session the other three: the state then, and the losses of all steps."""
    from penstock.app.launch.run import run_training
    from penstock.app.recipes.recipe import apply_overrides, load_recipe, resolve_paths
    from penstock.app.runs.directory import RunDir
    from penstock.engine.config import drive_folders

    recipe = resolve_paths(load_recipe(recipe_file), folder)
    path = folder / recipe_file.stem
    with RunDir.create(apply_overrides(recipe, ["train.steps=3"]), path) as run:
        run_training(run, resume=False)
    with RunDir.open(path) as run:
        recipe = run.recipe = apply_overrides(run.recipe, ["train.steps=6"])
        run_training(run, resume=True)
    losses = [json.loads(line)["loss"] for line in (path / "metrics.jsonl").read_text().splitlines()]
    return {"state": state_digest(path, drive_folders(path, recipe.storage)), "losses": losses}


def main() -> None:
    """Train the named recipes, or all, in the folder given first."""
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    os.environ["XDG_CONFIG_HOME"] = os.environ["XDG_RUNTIME_DIR"] = str(folder)
    # A cache of its own: the keys of the usual one do not say for which instructions code was made.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "compiled_code")
    with contextlib.redirect_stdout(sys.stderr):
        found = {file.stem: train(file, folder) for file in RECIPES if not names or file.stem in names}
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
