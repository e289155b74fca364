"""The export of a run's generation as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from penstock.engine.config import Recipe, drive_folders, state_folder
from penstock.engine.data.corpus import kept_tokenizer
from penstock.engine.hf import weights
from penstock.engine.hf.config import model_config, with_vocabulary
from penstock.engine.hf.constants import CONSTANTS_FILE, read_constants_file
from penstock.engine.model.anatomy import take_apart
from penstock.engine.model.spec import layouts
from penstock.engine.runtime.state import read_parameters
from penstock.storage.checkpoints import checkpoint_folder, read_checkpoint
from penstock.storage.layout import FlatLayout
from penstock.storage.nvme import NvmeStore

SHARD_BYTES = 5 * 10**9


class Exported(NamedTuple):
    """What an export came to."""

    step: int | None
    """Whose state it is."""
    num_params: int
    model_type: str
    remarks: list[str]
    """What is to be said of it."""


def export(
    run_dir: Path,
    recipe: Recipe,
    *,
    out_dir: Path,
    checkpoint: str | None = None,
    dtype: str = "auto",
    max_shard_bytes: int = SHARD_BYTES,
) -> Exported:
    """Write the last committed generation of a run, or a checkpoint's, as a Hugging Face folder, block by block.

    `dtype` of the trained tensors: a torch dtype's name, or auto: each as in the model that the run began with.
    Nothing is written to the run directory or its drives. A checkpoint may be read while the run is running.
    Raises UserError when the run has no generation yet, `out_dir` cannot be written, or float16 holds a value not.
    """
    root = state_folder(run_dir)
    folder = root
    if checkpoint is not None:
        read_checkpoint(root, checkpoint)
        folder = checkpoint_folder(root, checkpoint)
    store = NvmeStore.open(folder, drives=drive_folders(run_dir, recipe.storage), read_only=True)
    try:
        origin = None if recipe.model.path is None else Path(recipe.model.path).expanduser()
        tokenizer = kept_tokenizer(recipe.data, origin, run_dir / "data" / "tokenizer", recipe.model.added_tokens)
        vocabulary = tokenizer.vocab_size if tokenizer else None
        stored = model_config(recipe, vocabulary)
        spec = take_apart(with_vocabulary(stored, recipe, vocabulary), recipe.train.freeze)
        flat: dict[str, FlatLayout] = layouts(spec)
        usual = "float32" if recipe.train.compute_dtype == "float32" else "bfloat16"
        remarks = weights.export_folder(
            out_dir,
            spec,
            lambda name: read_parameters(store, name, flat[name]),
            constants=read_constants_file(root / CONSTANTS_FILE, store.meta.get("constants"), spec.constants),
            origin=origin,
            tokenizer=tokenizer,
            dtype=usual if dtype == "auto" else dtype,
            stored=stored if recipe.model.added_tokens else None,
            convert=dtype != "auto",
            max_shard_bytes=max_shard_bytes,
        )
        step = store.meta.get("step")
        return Exported(step if isinstance(step, int) else None, spec.num_params, spec.model_type, remarks)
    finally:
        store.close()
