"""The export of a run's generation as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from penstock.engine.config import Recipe, drive_folders, state_folder
from penstock.engine.data.corpus import kept_tokenizer
from penstock.engine.hf import weights
from penstock.engine.hf.config import model_config
from penstock.engine.hf.constants import CONSTANTS_FILE, read_constants_file
from penstock.engine.model.anatomy import take_apart
from penstock.engine.model.spec import layouts
from penstock.engine.runtime.state import read_parameters
from penstock.storage.checkpoints import checkpoint_folder, read_checkpoint
from penstock.storage.layout import FlatLayout
from penstock.storage.nvme import NvmeStore


def export(run_dir: Path, recipe: Recipe, *, out_dir: Path, checkpoint: str | None = None) -> None:
    """Write the last committed generation of a run, or a checkpoint's, as a Hugging Face folder, block by block.

    Nothing is written to the run directory or its drives. A checkpoint may be read while the run is running.
    Raises UserError when the run has no generation yet or `out_dir` cannot be written.
    """
    root = state_folder(run_dir)
    folder = root
    if checkpoint is not None:
        read_checkpoint(root, checkpoint)
        folder = checkpoint_folder(root, checkpoint)
    store = NvmeStore.open(folder, drives=drive_folders(run_dir, recipe.storage), read_only=True)
    try:
        origin = None if recipe.model.path is None else Path(recipe.model.path).expanduser()
        tokenizer = kept_tokenizer(recipe.data, origin, run_dir / "data" / "tokenizer")
        config = model_config(recipe, tokenizer.vocab_size if tokenizer else None)
        spec = take_apart(config)
        flat: dict[str, FlatLayout] = layouts(spec)
        weights.export_folder(
            out_dir,
            spec,
            lambda name: read_parameters(store, name, flat[name]),
            constants=read_constants_file(root / CONSTANTS_FILE, store.meta.get("constants"), spec.constants),
            origin=origin,
            tokenizer=tokenizer,
            dtype="float32" if recipe.train.compute_dtype == "float32" else "bfloat16",
        )
    finally:
        store.close()
