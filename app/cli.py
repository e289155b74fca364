"""The command line. What takes long to import is imported by the commands that need it: the others are instant."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

import penstock
from penstock.app import api, cluster_commands, control, finetune_commands, offsite, sample_command
from penstock.app.bench.commands import bench_cli
from penstock.app.checkpoints import delete_checkpoint_of, make_checkpoint, scrub_run
from penstock.app.evaluation import command as eval_command
from penstock.app.hub_names import stay_offline
from penstock.app.loading import loading
from penstock.app.options import JsonOption, RecipeArgument, SetOption, complete_recipes
from penstock.app.rundir import find_run, list_runs
from penstock.app.streams import open_standard_streams, print_failure
from penstock.storage.errors import UserError, used_up
from penstock.storage.untrusted import RefusedFileError, printable, shell

BAD_INPUT = 2
REFUSED = 1

cli = typer.Typer(
    name="penstock",
    epilog="Example: penstock train quickstart",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
cli.add_typer(bench_cli, name="bench")


def _complete_runs(incomplete: str) -> list[str]:
    return [info.name for info in list_runs() if info.name.startswith(incomplete)]


CheckpointOption = Annotated[
    str | None,
    typer.Option(
        "--checkpoint", metavar="NAME", help="Take this checkpoint, not the last generation; as last-good, or best."
    ),
]
RunArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="Run directory, or its name below runs/.",
        autocompletion=_complete_runs,
    ),
]


def _print_fields(value: bool) -> None:
    if not value:
        return
    from penstock.app.recipe_fields import fields

    for item in fields():
        typer.echo(f"{item.key} = {json.dumps(item.default)}\n    {item.help}")
    raise typer.Exit


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"penstock {penstock.__version__}")
        raise typer.Exit


@cli.callback()
def penstock_command(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Train and fine-tune large language models, every parameter, in full precision, on one machine."""


cli.command(epilog="Example: penstock finetune ~/models/Qwen3-8B talks.jsonl --epochs 2")(finetune_commands.finetune)
cli.command("eval", epilog="Example: penstock eval ~/models/Qwen3-8B --tasks needles --lengths 8k,32k")(
    eval_command.evaluate
)
cli.command(epilog="Example: penstock data ~/models/Qwen3-8B talks.jsonl --show 5")(finetune_commands.data)
cli.command(epilog="Example: penstock sample ~/models/Qwen3-8B --prompt 'Once upon a time'")(sample_command.sample)


@cli.command(epilog="Example: penstock train quickstart --set train.steps=20")
def train(
    recipe: RecipeArgument,
    overrides: SetOption = None,
    run_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory of the run; default runs/<name>-<time>.")
    ] = None,
    scratch: Annotated[
        bool, typer.Option("--from-scratch", help="Begin with random weights of the recipe's shape: no model folder.")
    ] = False,
    list_fields: Annotated[
        bool,
        typer.Option("--fields", help="List every field that --set reaches.", callback=_print_fields, is_eager=True),
    ] = False,
) -> None:
    """Train a recipe from its first step."""
    api.begin(recipe, run_dir=run_dir, overrides=overrides or [], from_scratch=scratch)


@cli.command(epilog="Example: penstock plan 7b_512k --machine rtx4090-64")
def plan(
    recipe: Annotated[
        Path,
        typer.Argument(
            metavar="RECIPE|MODEL",
            help="A recipe's file, a shipped recipe's name, or a model: Hugging Face folder, config.json, hf://OWNER/NAME.",
            autocompletion=complete_recipes,
        ),
    ],
    overrides: SetOption = None,
    context: Annotated[
        int | None, typer.Option(min=1, metavar="TOKENS", help="Tokens of a sequence, as data.sequence_length.")
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="Preset or profile; default the recipe's machine, or this one."),
    ] = None,
    scratch: Annotated[
        bool, typer.Option("--from-scratch", help="Plan with the recipe's shape, whatever folder it names.")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the planned step as a trace for ui.perfetto.dev.")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="NODESxGPUS", help="Plan for a cluster, too: as 2x8, H100s, or 2x8xh200."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object with all of it.")] = False,
) -> None:
    """Say whether a recipe fits, how long a step takes, and what bounds it, before anything is launched.

    Exits with 1 where it does not fit.
    """
    if context is not None:
        overrides = [*(overrides or []), f"data.sequence_length={context}"]
    forecast = api.plan(
        recipe, machine=machine, overrides=overrides or [], from_scratch=scratch, trace=trace, cluster=cluster
    )
    if as_json:
        typer.echo(json.dumps(forecast, indent=1))
    else:
        from rich.console import Console

        from penstock.app.plan_view import print_plan

        print_plan(forecast, Console())
    if not forecast["fits"]:
        raise typer.Exit(REFUSED)


@cli.command(epilog="Example: penstock fit --machine rtx4090-64 --models Qwen2.5 --contexts 8k,64k")
def fit(
    machine: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="Preset or profile of another machine; default this one.")
    ] = None,
    models: Annotated[
        str | None,
        typer.Option(metavar="PATTERN", help="Part of a model's name, or a pattern with *; several with commas."),
    ] = None,
    contexts: Annotated[
        str | None, typer.Option(metavar="TOKENS", help="Contexts, with commas; default 8k,64k,512k,1M, k of 1,024.")
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(metavar="NUMBER", help="Tokens to train on, as 10M, the default, or 3.5B.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Or a .jsonl or text file, whose tokens are estimated.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object with the question, and one for each cell as it comes.")
    ] = False,
) -> None:
    """Say which published models this machine can train: at which contexts, how fast, bound by what, and at what cost.

    Everything is planned as `penstock plan` does it. Exits with 1 where nothing fits.
    """
    from penstock.app.fit import ask, cells

    question = ask(machine=machine, models=models, contexts=contexts, tokens=tokens, data=data)
    fitting = False

    def found() -> Iterator[dict[str, Any]]:
        nonlocal fitting
        for cell in cells(question):
            fitting = fitting or cell["fits"]
            yield cell

    if as_json:
        for line in itertools.chain([question.to_json()], found()):
            print(json.dumps(line), flush=True)
    else:
        from rich.console import Console

        from penstock.app.fit_view import print_fit

        print_fit(question.to_json(), found(), Console())
    if not fitting:
        raise typer.Exit(REFUSED)


@cli.command(epilog="Example: penstock resume runs/quickstart-20260101-120000 --set budgets.ram=32GiB")
def resume(
    run: RunArgument,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a field of budgets, storage, train or after; may be repeated. Drives, budgets and device may "
            "be others than before.",
        ),
    ] = None,
    checkpoint: CheckpointOption = None,
    copy_state: Annotated[
        bool, typer.Option("--copy-state", help="Of a copied run directory: copy the original's state first.")
    ] = False,
    run_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Of a run at a place, as s3://BUCKET/PREFIX: new directory to fetch it to."),
    ] = None,
) -> None:
    """Go on with a stopped, failed or crashed run from its last committed generation, or from a checkpoint.

    RUN may be where its state was uploaded to: s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or a folder, of which the newest
    generation is fetched first. A run that is paused goes on where it is, in its own process.
    """
    api.go_on(run, overrides=overrides or [], checkpoint=checkpoint, copy_state=copy_state, run_dir=run_dir)


cli.command(epilog="Example: torchrun --nproc-per-node 8 -m penstock cluster 8b_8k --run-dir /shared/runs/8b")(
    cluster_commands.cluster
)
cli.command("import-dcp", epilog="Example: penstock import-dcp /shared/runs/8b --run-dir runs/8b-back")(
    cluster_commands.import_dcp
)


@cli.command(epilog="Example: penstock pause runs/quickstart-20260101-120000")
def pause(run: RunArgument) -> None:
    """Let a running run commit its step and wait until `penstock resume`; its memory stays in use."""
    path = find_run(run)
    typer.echo(printable(f"{path.name}: {control.pause_or_stop(path, 'pause')}"))


@cli.command(epilog="Example: penstock stop runs/quickstart-20260101-120000")
def stop(run: RunArgument) -> None:
    """Let a running or paused run commit its step and end; `penstock resume` goes on with it later."""
    path = find_run(run)
    typer.echo(printable(f"{path.name}: {control.pause_or_stop(path, 'stop')}"))


@cli.command(epilog="Example: penstock checkpoint runs/quickstart-20260101-120000 before-annealing")
def checkpoint(
    run: RunArgument,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="Name to give, in which {step} becomes the step that is kept; none lists checkpoints.",
        ),
    ] = None,
    delete: Annotated[bool, typer.Option("--delete", help="Delete the checkpoint instead.")] = False,
    to: Annotated[
        str | None,
        typer.Option(
            metavar="PLACE",
            help="Upload it as well, or one that there is: s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or a folder.",
        ),
    ] = None,
) -> None:
    """Keep a run's state under a name, in seconds: of the next step if it is running, else of its last generation.

    Without a NAME, RUN may also be where state was uploaded to: what is there is listed.
    """
    if name is None and to is None and (place := offsite.place_of(run)) is not None:
        for line in offsite.listed(place):
            typer.echo(printable(line))
        return
    path = find_run(run)
    if to is not None:
        if name is None or delete:
            raise UserError("--to: uploads a checkpoint; give it a NAME, and no --delete")
        typer.echo(printable(offsite.send(path, name, to)))
        return
    if name is None:
        from penstock.storage.checkpoints import list_checkpoints

        for info in list_checkpoints(path / "state"):
            step = "unknown" if info.step is None else f"{info.step:,}"
            typer.echo(printable(f"{info.name}  step {step}, generation {info.generation}"))
    elif delete:
        delete_checkpoint_of(path, name)
        typer.echo(f"checkpoint {name} deleted")
    else:
        made, kept = make_checkpoint(path, name)
        typer.echo(f"checkpoint {made}: step {kept:,}")


@cli.command(epilog="Example: penstock scrub runs/quickstart-20260101-120000")
def scrub(run: RunArgument) -> None:
    """Read a run's whole state, checkpoints included, and compare it with its checksums."""
    typer.echo(scrub_run(find_run(run)))


@cli.command(epilog="Example: penstock lanes runs/quickstart-20260101-120000 --steps 10:20")
def lanes(
    run: RunArgument,
    steps: Annotated[
        str | None, typer.Option(metavar="FIRST:LAST", help="Steps to look at; default all but the warm-up.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show how busy each lane and the drive were, and how long computing waited for them."""
    from penstock.app.lanes import lanes_report

    typer.echo(lanes_report(find_run(run), steps, as_json=as_json))


@cli.command(epilog="Example: penstock probe /mnt/nvme0 /mnt/nvme1")
def probe(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[PATH]...", help="A folder on each drive to measure; default the current one."),
    ] = None,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep the profile here, not as this machine's own.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=1, help="Time to measure for; more meets a drive past its cache.")] = 50,
    size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Write at most as much to each drive, as 2GB; default 1 GiB a second."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before writing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile as one JSON object.")] = False,
) -> None:
    """Measure this machine in a minute and keep its profile for planning: compute, memory, links and drives.

    What it will write to which drive is said first, and asked on a terminal.
    """
    from penstock.app.probe import probe_machine

    asks = not yes and sys.stdin.isatty() and sys.stderr.isatty()
    ask = (lambda plan: typer.confirm(f"{printable(plan)}\ngo on?", default=True, err=True)) if asks else None
    if probe_machine(paths or [], seconds=seconds, size=size, save=save, as_json=as_json, ask=ask) is None:
        raise typer.Exit(REFUSED)


@cli.command(epilog="Example: penstock check ~/models/Qwen3-8B --json")
def check(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Hugging Face folder, a config.json, or hf://OWNER/NAME of the hub.")
    ],
    as_json: JsonOption = False,
) -> None:
    """Compare a shrunk copy of a model, streamed, with transformers' own forward and autograd.

    Exit code 0: all gradients agree. 1: refused, with the first parameter that differs. 2: bad input.
    """
    from penstock.app.hub import model_folder
    from penstock.app.hub_names import is_hub

    folder = model_folder(model, config_only=True) if is_hub(model) else Path(model)
    with loading():
        from penstock.engine.hf.config import read_config
        from penstock.engine.model.check import check_model

    result = asdict(check_model(read_config(folder)))
    if not math.isfinite(result["max_rel_error"] or 0.0):  # JSON has no infinity
        result["max_rel_error"] = None
    if as_json:
        typer.echo(json.dumps(result))
    elif result["ok"]:
        typer.echo(f"{result['model_type']}: ok, largest relative error {result['max_rel_error']:.1e}")
    else:
        typer.echo(f"{result['model_type']}: refused: {result['reason']}")
    if not result["ok"]:
        raise typer.Exit(REFUSED)


@cli.command(epilog="Example: penstock export runs/quickstart-20260101-120000 ~/models/mine")
def export(
    run: RunArgument,
    out_dir: Annotated[Path, typer.Argument(metavar="OUT_DIR", help="Folder to make; must be new or empty.")],
    checkpoint: CheckpointOption = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="bf16, fp16 or fp32; default that of the model it began with.")
    ] = None,
    max_shard_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Largest file of weights, as 2GB; default the recipe's, 5GB.")
    ] = None,
    push: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Upload it to the hub, private if new; else nothing is.")
    ] = None,
    merged: Annotated[
        bool | None,
        typer.Option("--merged/--adapter", help="Of an adapter's run: the base with it merged in, or its own folder."),
    ] = None,
    format: Annotated[
        Literal["hf", "dcp"],
        typer.Option(help="hf: a Hugging Face folder. dcp: all of the state, as torch.distributed.checkpoint has it."),
    ] = "hf",
) -> None:
    """Write a run's last committed generation, or a checkpoint's, as a Hugging Face folder or a DCP checkpoint.

    Of a running run a checkpoint is made first, at its next step, and stays.
    """
    from penstock.app.model_card import adapter_config, other_programs

    path = find_run(run)
    if format == "dcp":
        if (dtype, max_shard_size, push, merged) != (None, None, None, None):
            raise UserError(
                "--format dcp: is the state as it is; leave out --dtype, --max-shard-size, --push, --merged"
            )
        made, said = api.export_dcp(path, out_dir, checkpoint)
    else:
        made, said = api.export_named(path, out_dir, checkpoint, dtype, max_shard_size, push, merged)
    if made is not None:
        typer.echo(
            printable(f"checkpoint {made} stays; once the run is over: ")
            + shell("penstock", "checkpoint", path, made, "--delete")
        )
    if format == "hf":
        said += other_programs(out_dir, adapter_config(out_dir))
    for line in said:
        typer.echo(printable(line))


@cli.command(epilog="Example: penstock runs")
def runs() -> None:
    """List the runs below runs/, oldest first."""
    from rich.console import Console
    from rich.table import Table

    found = list_runs()
    if not found:
        typer.echo("no runs below runs/")
        return
    table = Table(header_style="bold")
    for name in ("run", "state", "step", "loss"):
        table.add_column(name, overflow="fold")
    for info in found:
        loss = "n/a" if info.loss is None else f"{info.loss:.4f}"
        table.add_row(info.name, info.state, f"{info.step:,}/{info.total_steps:,}", loss)
    console = Console(markup=False, highlight=False, emoji=False)
    console.print(table)
    for info in found:
        if info.error is not None:
            console.print(f"{info.name}: {info.error}", soft_wrap=True)


@cli.command(epilog="Example: penstock trace runs/quickstart-20260101-120000 -o trace.json")
def trace(
    run: RunArgument,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Trace file to write.")] = Path("trace.json"),
    steps: Annotated[str | None, typer.Option(metavar="FIRST:LAST", help="Steps to write; default all.")] = None,
) -> None:
    """Write a run's spans as a trace that https://ui.perfetto.dev opens."""
    from penstock.app.lanes import parse_steps
    from penstock.app.trace import write_trace

    count = write_trace(find_run(run), out, None if steps is None else parse_steps(steps))
    typer.echo(printable(f"{count:,} spans written to {out}; open it at https://ui.perfetto.dev"))


@cli.command(epilog="Example: penstock track runs/quickstart-20260101-120000 --to tensorboard")
def track(
    run: RunArgument,
    to: Annotated[
        list[str] | None,
        typer.Option("--to", metavar="NAME", help="trackio, wandb, tensorboard or mlflow; default the recipe's."),
    ] = None,
) -> None:
    """Send to trackers what they lack of a run: one that was away while it ran, or one that it never had."""
    from penstock.app.rundir import read_recipe
    from penstock.app.trackers.track import track as send

    path = find_run(run)
    for line in send(path, to or read_recipe(path).trackers):
        typer.echo(printable(line))


_PLACES = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG, errno.ELOOP, errno.EIO}
    | {errno.EISDIR, errno.ENOTDIR}
)
"""What the system says of files that the user named, or of the disk below them."""

_LINE_CHARS = 2000
"""Of one line of a message: what it quotes may be of any length. Both ends say most: what is wrong, and what to do."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code. A UserError is one message on stderr and exit code 2.

    So are memory, threads or open files that are used up, and what the system refuses of a file that it names. All else
    is a mistake of ours and gives its traceback.
    """
    stay_offline()
    open_standard_streams()
    code = 0
    try:
        _require_text(sys.argv[1:] if arguments is None else arguments)
        _command()(arguments, prog_name="penstock")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    except (UserError, MemoryError, OSError, RuntimeError, ImportError) as error:
        known = error if isinstance(error, UserError) else used_up(error) or _misplaced(error)
        if known is None:
            raise
        return _refuse(known)
    failure = print_failure()
    return code if failure is None else _refuse(f"standard output: {failure}; not all was printed") or code


@cache
def _command() -> Callable[..., object]:
    """All commands, made once: a call of the Typer object would make them anew."""
    return typer.main.get_command(cli)


def _misplaced(error: Exception) -> str | None:
    """What is wrong with a place that the user named, where the system says so; None for all else."""
    if not isinstance(error, OSError):
        return None
    if error.errno == errno.ENOENT and "temporary directory" in str(error.strerror):  # tempfile's
        return f"{error.strerror}; free one of them, or set TMPDIR to a folder that can be written"
    if error.filename is None or (error.errno not in _PLACES and not isinstance(error, RefusedFileError)):
        return None
    return f"{error.filename}: {error.strerror}; choose another place, or free this one"


def _require_text(arguments: list[str]) -> None:
    """UserError for arguments, or a current folder, that are not UTF-8 or not there: no file could name them."""
    try:
        folder = os.getcwd()
    except OSError as error:
        raise UserError(f"the current folder is gone ({error.strerror}); change to another") from None
    for what, text in (("the current folder", folder), *((f"argument {text!r}", text) for text in arguments)):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError(f"{what} is not UTF-8 text ({text!r}); rename it") from None


def _refuse(error: object) -> int:
    half = _LINE_CHARS // 2
    lines = [
        line if len(line) <= _LINE_CHARS else f"{line[:half]} [...] {line[-half:]}" for line in str(error).split("\n")
    ]
    print(f"error: {printable(chr(10).join(lines))}", file=sys.stderr)
    return BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
