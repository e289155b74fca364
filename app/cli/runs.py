"""Commands on runs: continue, pause, stop, keep, export, list and look at them. What is slow to import is imported
by the command that needs it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from penstock.app.cli.options import (
    CheckpointOption,
    GpuOption,
    GpusOption,
    JsonOption,
    RunArgument,
    argument,
    option,
    with_gpus,
)
from penstock.app.console.working import working
from penstock.app.launch import api
from penstock.app.runs import control, offsite
from penstock.app.runs.checkpoints import delete_checkpoint_of, make_checkpoint, scrub_run
from penstock.app.runs.directory import find_run, list_runs, read_recipe
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import printable, shell


def resume(
    run: RunArgument,
    overrides: Annotated[
        list[str] | None,
        option(
            "KEY=VALUE",
            "Change a field of budgets, storage, train or after; may be repeated. Drives, budgets and device may "
            "differ from before.",
            "--set",
        ),
    ] = None,
    gpus: GpusOption = None,
    checkpoint: CheckpointOption = None,
    copy_state: Annotated[
        bool, typer.Option("--copy-state", help="For a copied run directory: copy the original's state first.")
    ] = False,
    run_dir: Annotated[
        Path | None, option("DIR", "If RUN is an upload such as s3://BUCKET/PREFIX: directory to download it to.")
    ] = None,
) -> None:
    """Continue a paused, stopped, failed or crashed run.

    It starts from the last committed generation, or from --checkpoint. RUN may also be the place its state was uploaded
    to: s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or a folder. The newest generation there is downloaded first. A paused
    run continues in its own process.
    """
    api.go_on(run, overrides=with_gpus(overrides, gpus), checkpoint=checkpoint, copy_state=copy_state, run_dir=run_dir)


def pause(run: RunArgument) -> None:
    """Pause a running run after its current step.

    The step is committed, and the process waits for `penstock resume`. Its memory stays in use.
    """
    path = find_run(run)
    typer.echo(printable(f"{path.name}: {control.pause_or_stop(path, 'pause')}"))


def stop(run: RunArgument) -> None:
    """End a running or paused run after its current step.

    The step is committed; `penstock resume` continues the run later.
    """
    path = find_run(run)
    typer.echo(printable(f"{path.name}: {control.pause_or_stop(path, 'stop')}"))


def checkpoint(
    run: RunArgument,
    name: Annotated[
        str | None,
        argument(
            "NAME",
            "Name of the checkpoint; {step} in it becomes the step number. Without NAME, checkpoints are listed.",
        ),
    ] = None,
    delete: Annotated[bool, typer.Option("--delete", help="Delete the checkpoint instead.")] = False,
    to: Annotated[
        str | None,
        option(
            "PLACE", "Also upload the new or existing checkpoint: s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or a folder."
        ),
    ] = None,
) -> None:
    """Keep a run's state under a name.

    A running run is kept after its next step, any other at its last generation. Without a NAME, RUN may also be a place
    that state was uploaded to; its contents are listed.
    """
    if delete and name is None:
        raise UserError("--delete: give the NAME of the checkpoint to delete")
    if name is None and to is None and (location := offsite.location_of(run)) is not None:
        for line in offsite.listed(location):
            typer.echo(printable(line))
        return
    path = find_run(run)
    if to is not None:
        if name is None or delete:
            raise UserError("--to uploads a checkpoint: give the checkpoint's NAME, and leave out --delete")
        typer.echo(printable(offsite.send(path, name, to)))
        return
    if name is None:
        from penstock.storage.generations.checkpoints import list_checkpoints

        for result, content in list_checkpoints(path / "state").items():
            step = "unknown" if content.step is None else f"{content.step:,}"
            typer.echo(printable(f"{result}  step {step}, generation {content.generation}"))
    elif delete:
        delete_checkpoint_of(path, name)
        typer.echo(f"checkpoint {name} deleted")
    else:
        made, kept = make_checkpoint(path, name)
        typer.echo(f"checkpoint {made}: step {kept:,}")


def scrub(run: RunArgument) -> None:
    """Read all of a run's state, including checkpoints, and verify its checksums."""
    typer.echo(scrub_run(find_run(run)))


def export(
    run: RunArgument,
    out_dir: Annotated[Path, argument("OUT_DIR", "Folder to write; must be new or empty.")],
    checkpoint: CheckpointOption = None,
    dtype: Annotated[str | None, option("DTYPE", "bf16, fp16 or fp32. Default: that of the original model.")] = None,
    max_shard_size: Annotated[
        str | None, option("SIZE", "Largest weight file, for example 2GB. Default: the recipe's, 5GB.")
    ] = None,
    push: Annotated[
        str | None, option("OWNER/NAME", "Also upload it to this hub repository, which is private if new.")
    ] = None,
    merged: Annotated[
        bool | None,
        typer.Option(
            "--merged/--adapter", help="For an adapter run: merge the adapter into the base, or write it alone."
        ),
    ] = None,
    format: Annotated[
        Literal["hf", "dcp"],
        typer.Option(help="hf: a Hugging Face folder. dcp: the whole state in torch.distributed.checkpoint's format."),
    ] = "hf",
) -> None:
    """Write a run's model as a Hugging Face folder.

    That is the last generation, or --checkpoint; with --format dcp the whole state as a DCP checkpoint. If the run is
    running, a checkpoint is made after its next step first, and kept.
    """
    from penstock.app.runs.model_card import adapter_config, other_programs

    path = find_run(run)
    if format == "dcp" and (dtype, max_shard_size, push, merged) != (None, None, None, None):
        raise UserError(
            "--format dcp: writes the state unchanged; leave out --dtype, --max-shard-size, --push and --merged"
        )
    with working(f"exporting to {out_dir}"):
        if format == "dcp":
            made, said = api.export_dcp(path, out_dir, checkpoint)
        else:
            made, said = api.export_named(path, out_dir, checkpoint, dtype, max_shard_size, push, merged)
    if made is not None:
        typer.echo(
            printable(f"checkpoint {made} is kept; to delete it when the run has ended: ")
            + shell("penstock", "checkpoint", path, made, "--delete")
        )
    if format == "hf" and read_recipe(path).train.objective != "reward":
        said += other_programs(out_dir, adapter_config(out_dir))
    for line in said:
        typer.echo(printable(line))


def runs() -> None:
    """List the runs in runs/, oldest first."""
    from rich.console import Console
    from rich.table import Table

    from penstock.app.runs.measured import measured_of, measured_text

    result = list_runs()
    if not result:
        typer.echo("no runs in runs/")
        return
    table = Table(header_style="bold")
    measured = [measured_text(measured_of(info.metrics or {})) for info in result]
    for name in ("run", "state", "step", "loss", *(["measured"] if any(measured) else [])):
        table.add_column(name, overflow="fold")
    for info, more in zip(result, measured, strict=True):
        loss = "n/a" if info.loss is None else f"{info.loss:.4f}"
        cells = (info.name, info.state, f"{info.step:,}/{info.total_steps:,}", loss)
        table.add_row(*cells, *([more] if any(measured) else []))
    console = Console(markup=False, highlight=False, emoji=False)
    console.print(table)
    for info in result:
        if info.error is not None:
            console.print(f"{info.name}: {info.error}", soft_wrap=True)


def lanes(
    run: RunArgument,
    steps: Annotated[str | None, option("FIRST:LAST", "Steps to look at. Default: all after the warm-up.")] = None,
    gpu: GpuOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Show how busy each lane and the drive were, and how long compute waited for them."""
    from penstock.app.runs.lanes import lanes_report

    with working("reading the run's spans"):
        report = lanes_report(find_run(run), steps, as_json=as_json, gpu=gpu)
    typer.echo(report)


def trace(
    run: RunArgument,
    out: Annotated[Path, option("FILE", "Trace file to write.", "--out", "-o")] = Path("trace.json"),
    steps: Annotated[str | None, option("FIRST:LAST", "Steps to write. Default: all.")] = None,
    gpu: GpuOption = 0,
) -> None:
    """Write a run's timeline as a trace file for https://ui.perfetto.dev."""
    from penstock.app.runs.lanes import parse_steps
    from penstock.app.runs.trace import write_trace

    with working(f"writing {out}"):
        count = write_trace(find_run(run), out, None if steps is None else parse_steps(steps), gpu=gpu)
    typer.echo(printable(f"{count:,} spans written to {out}; open it at https://ui.perfetto.dev"))


def track(
    run: RunArgument,
    to: Annotated[
        list[str] | None,
        option("NAME", "trackio, wandb, tensorboard or mlflow; may be repeated. Default: those of the recipe."),
    ] = None,
) -> None:
    """Send a run's metrics and samples to trackers that lack them, also after the run."""
    from penstock.app.runs.directory import read_recipe
    from penstock.app.trackers.track import track as send

    path = find_run(run)
    with working("sending to trackers") as shown:

        def say(line: str) -> None:
            shown.clear()
            typer.echo(printable(line))

        send(path, to or read_recipe(path).trackers, say)
