"""The public API's verbs: what the commands of the same names do, from Python."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from penstock.app.console.loading import loading, uncollected
from penstock.app.hub import fetch
from penstock.app.hub.names import on_hub
from penstock.app.launch.callbacks import Callbacks, OnMessage, OnSample, OnStep, OnValidation
from penstock.app.planning.opened import opened
from penstock.app.recipes.recipe import apply_overrides, change_run, load_recipe, resolve_paths
from penstock.app.runs import control, offsite
from penstock.app.runs.checkpoints import checkpoint_named, copy_state_of, make_for_export
from penstock.app.runs.directory import RunDir, find_run, is_live, read_recipe
from penstock.engine.config import AfterConfig, DataConfig, ModelConfig, Recipe, idle_notes, parse_bytes
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import one_line, printable, shell


def train(
    recipe: Recipe | str | Path,
    *,
    run_dir: str | Path | None = None,
    overrides: Sequence[str] = (),
    from_scratch: bool = False,
    on_step: OnStep | None = None,
    on_validation: OnValidation | None = None,
    on_sample: OnSample | None = None,
    on_message: OnMessage | None = None,
) -> Path:
    """Train a recipe, or that of a file or of a shipped recipe's name, from its first step; the run directory.

    `overrides`: texts as `--set` takes them, as `train.lr=1e-4`; relative paths are taken from the current folder.
    `from_scratch`: random weights of the recipe's shape, no model folder. Raises UserError for what cannot be trained;
    a run that fails before its first step has ended leaves nothing behind.

    The callbacks are called in this thread, between two steps, with StepMetrics, ValidationMetrics and SampleMetrics;
    `on_message` with each line that is printed without it. One that raises StopTraining stops the run at its next step
    boundary; what else one raises ends it, and comes out of here. Control-C stops it likewise, with the step committed,
    and is KeyboardInterrupt then.
    """
    guest = Callbacks(on_step=on_step, on_validation=on_validation, on_sample=on_sample, on_message=on_message)
    path = begin(recipe, run_dir=run_dir, overrides=overrides, from_scratch=from_scratch, guest=guest)
    guest.deliver()
    return path


def begin(
    recipe: Recipe | str | Path,
    *,
    run_dir: str | Path | None = None,
    overrides: Sequence[str] = (),
    from_scratch: bool = False,
    guest: Callbacks | None = None,
    is_shown: bool = False,
) -> Path:
    """`train`, in a process of the run's own where there is no `guest`; `is_shown`: so were the plan's notes."""
    from penstock.app.launch.run import run_training

    resolved, said = ready_recipe(recipe, overrides, from_scratch)
    if resolved.after.push is not None:
        from penstock.app.hub.push import require_push

        require_push(resolved.after.push)
    with RunDir.create(resolved, None if run_dir is None else Path(run_dir)) as run:
        try:
            run_training(run, resume=False, guest=guest, said=[] if is_shown else said)
        except Exception:
            if not run.has_begun:
                run.discard()
            raise
        return run.path


def finetune(
    model: str | Path,
    data: str | Path,
    *,
    overrides: Sequence[str] = (),
    epochs: float | None = None,
    out: str | Path | None = None,
    run_dir: str | Path | None = None,
    on_step: OnStep | None = None,
    on_validation: OnValidation | None = None,
    on_sample: OnSample | None = None,
    on_message: OnMessage | None = None,
) -> Path:
    """Fine-tune every parameter of a model on data, both a folder, a file or a name on the hub; the run directory.

    What `overrides`, texts as `--set` takes them, and `epochs` do not say is chosen as `penstock finetune` does it. The
    recipe is written to `out`, a new file; None takes a free name in the current folder. Raises UserError for what
    cannot be trained or does not fit: then nothing is written. Callbacks as those of `train`.
    """
    from penstock.app.finetune import propose as tuning

    file = None if out is None else Path(out)
    if file is not None:
        tuning.require_new(file)
    tuning.require_new_run(None if run_dir is None else Path(run_dir))
    result = tuning.propose(str(model), str(data), overrides=overrides, epochs=epochs)
    if not (forecast := plan(result.recipe))["fits"]:
        raise UserError(f"does not fit: {forecast['refusal']['message']}")
    file = file or tuning.recipe_file(result.recipe)
    tuning.write_recipe(result, file, tuning.command(str(model), str(data), overrides, epochs))
    return train(
        file,
        run_dir=run_dir,
        on_step=on_step,
        on_validation=on_validation,
        on_sample=on_sample,
        on_message=on_message,
    )


def resume(
    run: str | Path,
    *,
    overrides: Sequence[str] = (),
    checkpoint: str | None = None,
    copy_state: bool = False,
    run_dir: str | Path | None = None,
    on_step: OnStep | None = None,
    on_validation: OnValidation | None = None,
    on_sample: OnSample | None = None,
    on_message: OnMessage | None = None,
) -> Path:
    """Go on with a run, by its directory or its name below runs/, from its last generation or a checkpoint's.

    `run` may be a place that its state was uploaded to, as s3://bucket/prefix: then `run_dir`, by default a new one
    below runs/, is made of what is there.

    A paused run goes on in its own process, which calls no callbacks. `overrides`: as `--set` takes
    them. `copy_state`: of a copied run directory, copy the original's state first. Callbacks as those of `train`. The
    run directory. Raises UserError for what cannot go on.
    """
    guest = Callbacks(on_step=on_step, on_validation=on_validation, on_sample=on_sample, on_message=on_message)
    path = go_on(run, overrides=overrides, checkpoint=checkpoint, copy_state=copy_state, run_dir=run_dir, guest=guest)
    guest.deliver()
    return path


def go_on(
    run: str | Path,
    *,
    overrides: Sequence[str] = (),
    checkpoint: str | None = None,
    copy_state: bool = False,
    run_dir: str | Path | None = None,
    guest: Callbacks | None = None,
) -> Path:
    """`resume`, in a process of the run's own where there is no `guest`."""
    if (location := offsite.location_of(str(run))) is not None:
        run, checkpoint = (
            offsite.fetch(location, None if run_dir is None else Path(run_dir), checkpoint, overrides),
            None,
        )
    elif run_dir is not None:
        raise UserError(
            f"--run-dir: {one_line(run, 80)} is a run on this machine and stays where it is; leave --run-dir out"
        )
    path = find_run(str(run)).resolve()
    checkpoint = checkpoint_named(path, checkpoint)
    if (overrides or checkpoint is not None or copy_state) and is_live(path):
        raise UserError(
            f"{path}: is running; stop it first (`{shell('penstock', 'stop', path)}`), then resume it with the changes"
        )
    if control.go_on(path):
        print(printable(f"{path.name}: continues"))
        return path
    from penstock.app.launch.run import run_training

    with RunDir.open(path) as directory:
        before, directory.recipe = directory.recipe, change_run(directory.recipe, overrides, Path.cwd())
        if copy_state:
            print(copy_state_of(directory))
        said = idle_notes(directory.recipe, before=before)
        run_training(directory, resume=True, checkpoint=checkpoint, guest=guest, said=said)
    return path


def plan(
    recipe: Recipe | str | Path,
    *,
    machine: str | None = None,
    overrides: Sequence[str] = (),
    from_scratch: bool = False,
    trace: Path | None = None,
    cluster: str | None = None,
) -> dict[str, Any]:
    """The forecast of a recipe, as `penstock plan --json` prints it: whether it `fits`, its peaks and its step time.

    `recipe` may be a model, a Hugging Face folder, a config.json or a name on the hub, of which config.json is fetched:
    planned with the defaults of all other fields.
    `machine`: a preset or a profile file; None is the recipe's, or this machine. `trace`: file for the planned step as
    a Chrome trace. `cluster`: nodes x GPUs, as `2x8` or `2x8xh200`, for which `cluster` says the same of FSDP2. Raises
    UserError.
    """
    from penstock.app.planning.plan import plan_stages

    if not isinstance(recipe, Recipe):
        recipe = _model_recipe(recipe) or recipe
    resolved, said = resolved_recipe(recipe, overrides, from_scratch=from_scratch, get=fetch.for_plan)
    with uncollected():
        *_, result = plan_stages(resolved, machine, trace=trace, cluster=cluster, said=said)
    return result


def _model_recipe(given: str | Path) -> Recipe | None:
    """A recipe around a model: a folder, its config.json or a name on the hub; None for all else."""
    path = Path(given).expanduser()
    model = str(path)
    if (named := on_hub(given)) is not None and not path.exists():
        name, model = named.name.rpartition("/")[2].strip("-._"), str(named)
    elif path.name == "config.json" or path.is_dir():
        folder = path.resolve().parent if path.name == "config.json" else path.resolve()
        name = re.sub(r"[^\w.-]+", "-", folder.name).strip("-.")
    else:
        return None
    return Recipe(name=name or "model", model=ModelConfig(path=model), data=DataConfig(source="random"))


def export(
    run: str | Path,
    out_dir: str | Path,
    *,
    checkpoint: str | None = None,
    dtype: str | None = None,
    max_shard_size: str | int | None = None,
    push: str | None = None,
    merged: bool | None = None,
) -> Path:
    """Write a run's last generation, or a checkpoint's, as a Hugging Face folder at `out_dir`, new or empty.

    Of a run that trains an adapter that is a folder that peft loads, or with `merged` the base with the adapter in it
    (None: as the recipe's `after.export_merged` says).
    `dtype`: bf16, fp16 or fp32, None the recipe's `after.export_dtype`; `max_shard_size`: likewise of one file of
    weights. `push`: a repository on the hub to upload it to, private where it is new; None uploads nothing.
    Of a running run a checkpoint is made first and stays; its name is returned by none of this, and listed by
    `penstock checkpoint RUN`. The folder. Raises UserError.
    """
    export_named(find_run(str(run)), Path(out_dir), checkpoint, dtype, max_shard_size, push, merged)
    return Path(out_dir)


DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""Short names of dtypes."""


def export_named(
    path: Path,
    out_dir: Path,
    checkpoint: str | None,
    dtype: str | None = None,
    max_shard_size: str | int | None = None,
    push: str | None = None,
    merged: bool | None = None,
) -> tuple[str | None, list[str]]:
    """`export`; the name of the checkpoint that was made for it, if one was, and what is to be said of the export."""
    from penstock.app.launch.run import export_run

    after = _after(read_recipe(path), dtype, max_shard_size, push, merged)
    return _exported(path, out_dir, checkpoint, lambda recipe, name: export_run(path, recipe, out_dir, name, after))


def export_dcp(path: Path, out_dir: Path, checkpoint: str | None) -> tuple[str | None, list[str]]:
    """As `export_named`, but a DCP checkpoint at `out_dir`, new or empty."""
    out = out_dir.expanduser().absolute()

    def write(recipe: Recipe, name: str | None) -> list[str]:
        with loading():
            from penstock.engine.cluster.convert import write_dcp

        step, num_bytes = write_dcp(path, recipe, out, name)
        return [f"{out}: step {step:,}, {num_bytes:,} bytes of parameters and optimizer state"]

    return _exported(path, out_dir, checkpoint, write)


def _exported(
    path: Path, out_dir: Path, checkpoint: str | None, write: Callable[[Recipe, str | None], list[str]]
) -> tuple[str | None, list[str]]:
    """Export a run's state to a new folder by `write`, given the recipe and the checkpoint: None is the last
    generation, while which is read nobody else may work on the run, so that of a running one a checkpoint is made
    first. The name of that, and what `write` has to say."""
    from penstock.app.launch.run import require_new_folder

    checkpoint, made = checkpoint_named(path, checkpoint), None
    require_new_folder(out_dir)
    if checkpoint is None and is_live(path):
        checkpoint = made = make_for_export(path)
    if checkpoint is not None:
        return made, write(read_recipe(path), checkpoint)
    with RunDir.open(path, read_only=True) as directory:
        return None, write(directory.recipe, None)


def _after(
    recipe: Recipe, dtype: str | None, max_shard_size: str | int | None, push: str | None, merged: bool | None
) -> AfterConfig:
    """How a run is exported now. A push is none that the recipe wants at the run's end."""
    wanted = recipe.after.export_dtype if dtype is None else DTYPES.get(dtype, dtype)
    if wanted not in ("auto", *DTYPES.values()):
        raise UserError(f"--dtype {one_line(wanted, 40)}: write bf16, fp16 or fp32")
    if max_shard_size is not None:
        parse_bytes(max_shard_size, "--max-shard-size")
    size = recipe.after.export_shard if max_shard_size is None else max_shard_size
    if merged and not recipe.adapter.is_used:
        raise UserError("--merged: this run trains no adapter; leave --merged out")
    whole = recipe.after.export_merged if merged is None else merged
    return AfterConfig(export=True, export_merged=whole, export_dtype=cast(Any, wanted), export_shard=size, push=push)


def ready_recipe(recipe: Recipe | str | Path, overrides: Sequence[str], from_scratch: bool) -> tuple[Recipe, list[str]]:
    """As `resolved_recipe`, with all that is on the hub fetched. UserError where a run of it would lack something."""
    from penstock.app.planning.inputs import require_inputs

    resolved, said = resolved_recipe(
        recipe, overrides, from_scratch=from_scratch, get=lambda given: fetch.fetched(given, weights=not from_scratch)
    )
    require_inputs(resolved)
    return resolved, said


def resolved_recipe(
    recipe: Recipe | str | Path,
    overrides: Sequence[str],
    *,
    from_scratch: bool = False,
    get: Callable[[Recipe], Recipe] = lambda recipe: recipe,
) -> tuple[Recipe, list[str]]:
    """The recipe with its overrides, its paths absolute and its data found, and what to tell of it; `get` puts folders
    in place of names on the hub. UserError."""
    result = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    resolved = get(resolve_paths(apply_overrides(result, overrides), Path.cwd()))
    if from_scratch:
        from penstock.app.planning import inputs

        resolved = inputs.from_scratch(resolved)
    return opened(resolved)
