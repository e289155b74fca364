"""The command line: every command in its group, and what becomes of errors. Slow imports are in the commands that need
them."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer

import penstock
from penstock.app.cli import cluster as cluster_commands
from penstock.app.cli import eval as eval_command
from penstock.app.cli import finetune, runs, sample
from penstock.app.cli.bench import bench_cli
from penstock.app.cli.help_groups import CONTROL, KEEP, LOOK, MACHINE, TRAIN, GroupedCommands, help_of
from penstock.app.cli.options import (
    GpusOption,
    RecipeArgument,
    ScratchOption,
    SetOption,
    argument,
    complete_recipes,
    option,
    with_gpus,
)
from penstock.app.console.loading import loading
from penstock.app.console.streams import open_standard_streams, print_failure
from penstock.app.console.working import Working, working
from penstock.app.hub.names import stay_offline
from penstock.app.launch import api
from penstock.app.launch.signals import ABORTED
from penstock.storage.files.errors import UserError, not_ours
from penstock.storage.files.untrusted import RefusedFileError, printable

BAD_INPUT = 2
REFUSED = 1

cli = typer.Typer(
    name="penstock",
    cls=GroupedCommands,
    epilog="Example: penstock train quickstart",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_fields(value: bool) -> None:
    if not value:
        return
    from penstock.app.recipes.fields import fields

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
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Train and fine-tune large language models, all parameters in full precision, on one machine."""


def train(
    recipe: RecipeArgument,
    overrides: SetOption = None,
    run_dir: Annotated[Path | None, option("DIR", "Run directory to create. Default: runs/<name>-<time>.")] = None,
    gpus: GpusOption = None,
    scratch: ScratchOption = False,
    list_fields: Annotated[
        bool,
        typer.Option("--fields", help="List every field that --set can change.", callback=_print_fields, is_eager=True),
    ] = False,
) -> None:
    """Start a new run of a recipe."""
    api.begin(recipe, run_dir=run_dir, overrides=with_gpus(overrides, gpus), from_scratch=scratch)


def plan(
    recipe: Annotated[
        Path,
        argument(
            "RECIPE|MODEL",
            "Recipe file, name of a shipped recipe, or a model: Hugging Face folder, config.json or hf://OWNER/NAME.",
            autocompletion=complete_recipes,
        ),
    ],
    overrides: SetOption = None,
    gpus: GpusOption = None,
    context: Annotated[int | None, option("TOKENS", "Tokens per sequence; sets data.sequence_length.", min=1)] = None,
    machine: Annotated[
        str | None,
        option(
            "NAME|FILE",
            "Machine to plan for: a preset or a profile file. Default: the recipe's machine, else this one.",
        ),
    ] = None,
    scratch: Annotated[
        bool, typer.Option("--from-scratch", help="Use the recipe's model shape and ignore its model folder.")
    ] = False,
    trace: Annotated[Path | None, option("FILE", "Write the planned step as a trace for ui.perfetto.dev.")] = None,
    cluster: Annotated[
        str | None, option("NODESxGPUS", "Also plan for a cluster: 2x8 is two machines of eight H100s; or 2x8xh200.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as one JSON object.")] = False,
) -> None:
    """Predict whether a recipe fits, how long a step takes and what the bottleneck is.

    Nothing is started. Exits with 1 if it does not fit.
    """
    if context is not None:
        overrides = [*(overrides or []), f"data.sequence_length={context}"]
    with working(f"planning {recipe}"):
        forecast = api.plan(
            recipe,
            machine=machine,
            overrides=with_gpus(overrides, gpus),
            from_scratch=scratch,
            trace=trace,
            cluster=cluster,
        )
    if as_json:
        typer.echo(json.dumps(forecast, indent=1))
    else:
        from rich.console import Console

        from penstock.app.planning.view import print_plan

        print_plan(forecast, Console())
    if not forecast["fits"]:
        raise typer.Exit(REFUSED)


def fit(
    machine: Annotated[
        str | None, option("NAME|FILE", "Preset or profile file of another machine. Default: this machine.")
    ] = None,
    models: Annotated[
        str | None, option("PATTERN", "Only these models: parts of names, or patterns with *, separated by commas.")
    ] = None,
    contexts: Annotated[
        str | None, option("TOKENS", "Context lengths, separated by commas; k is 1,024. Default: 8k,64k,512k,1M.")
    ] = None,
    tokens: Annotated[
        str | None, option("NUMBER", "Tokens to train on, for example 10M or 3.5B. Default: 10M.")
    ] = None,
    data: Annotated[
        Path | None, option("FILE", "Estimate the number of tokens from this .jsonl or text file instead.")
    ] = None,
    objective: Annotated[
        str, option("NAME", "What to train: next_token, dpo, kto, orpo, reward, grpo and so on.")
    ] = "next_token",
    gpus: GpusOption = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print JSON lines: first the question, then one object per model and context as it is planned.",
        ),
    ] = False,
) -> None:
    """List which published models this machine can train, at which context lengths, how fast and at what cost.

    All figures are planned, as by `penstock plan`. Exits with 1 if nothing fits.
    """
    from penstock.app.planning.fit import ask, cells

    question = ask(
        machine=machine,
        models=models,
        contexts=contexts,
        tokens=tokens,
        data=data,
        objective=objective,
        gpus=gpus,
    )
    fitting = False

    def found() -> Iterator[dict[str, Any]]:
        nonlocal fitting
        planned, number = cells(question), 0
        with Working() as shown:
            while True:
                with shown.step(f"planning: {number} of {question.num_cells} done"):
                    cell = next(planned, None)
                if cell is None:
                    return
                fitting, number = fitting or cell["fits"], number + 1
                yield cell

    if as_json:
        for line in itertools.chain([question.to_json()], found()):
            print(json.dumps(line), flush=True)
    else:
        from rich.console import Console

        from penstock.app.planning.fit_view import print_fit

        print_fit(question.to_json(), found(), Console())
    if not fitting:
        raise typer.Exit(REFUSED)


def probe(
    paths: Annotated[
        list[Path] | None, argument("PATH", "A folder on each drive to measure. Default: the current folder.")
    ] = None,
    save: Annotated[
        Path | None, option("FILE", "Write the profile to this file instead of using it for this machine.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=1, help="How long to measure. A longer time also measures drives beyond their cache.")
    ] = 50,
    size: Annotated[
        str | None, option("SIZE", "Most bytes to write to each drive, for example 2GB. Default: 1 GiB per second.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before writing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile as one JSON object.")] = False,
) -> None:
    """Measure this machine's compute, memory, links and drives in a minute and save the profile for planning.

    It first says how much it will write to which drive and, on a terminal, asks.
    """
    from penstock.app.planning.probe import probe_machine

    asks = not yes and sys.stdin.isatty() and sys.stderr.isatty()
    ask = (lambda plan: typer.confirm(f"{printable(plan)}\ncontinue?", default=True, err=True)) if asks else None
    if probe_machine(paths or [], seconds=seconds, size=size, save=save, as_json=as_json, ask=ask) is None:
        raise typer.Exit(REFUSED)


def check(
    model: Annotated[
        str | None, argument("MODEL", "Hugging Face folder, config.json, or hf://OWNER/NAME on the hub.")
    ] = None,
    every: Annotated[
        bool,
        typer.Option(
            "--all", help="Check every type of language model that the installed transformers knows, in a few minutes."
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object; with --all one a line as it comes, and last the counts."),
    ] = False,
) -> None:
    """Check that a model would be trained exactly: compare the gradients of a shrunk copy with transformers' own.

    Says whether that holds in chunks of any length, or only with each document in one chunk, whose memory then grows
    with the longest document.

    Exits with 0 if all gradients agree, 1 if one differs (the first is named), 2 for bad input. With --all, which takes
    each type's default sizes without dropout, it exits with 0 once all are told apart; Ctrl-C ends it with what it has.
    """
    from penstock.app.planning.check_view import result_line

    if every == (model is not None):
        raise UserError("check: name a MODEL, or give --all for every type of model, not both")
    if model is None:
        _check_all(as_json)
        return
    from penstock.app.hub.fetch import model_folder
    from penstock.app.hub.names import is_hub

    folder = model_folder(model, config_only=True) if is_hub(model) else Path(model)
    with loading():
        from penstock.app.planning.check import to_json
        from penstock.engine.hf.config import read_config
        from penstock.engine.self_check import check_model

    with working(f"checking {model}"):
        result = to_json(check_model(read_config(folder)))
    typer.echo(json.dumps(result) if as_json else result_line(result))
    if not result["ok"]:
        raise typer.Exit(REFUSED)


def _check_all(as_json: bool) -> None:
    with working("loading the types of models"), loading():
        from penstock.app.planning.check import check_types
        from penstock.engine.model.types import model_types
    from rich.console import Console

    from penstock.app.planning.check_view import counts, counts_text, print_types

    types, seen = model_types(), list[dict[str, Any]]()

    def found() -> Iterator[dict[str, Any]]:
        with Working() as shown, contextlib.closing(check_types(types)) as results:
            while True:
                with shown.step(f"checking: {len(seen)} of {len(types)} done"):
                    result = next(results, None)
                if result is None:
                    return
                seen.append(result)
                yield result

    try:
        if as_json:
            for result in found():
                print(json.dumps(result), flush=True)
        else:
            print_types(found(), Console())
    except KeyboardInterrupt:
        raise typer.Exit(ABORTED) from None
    finally:
        summary = counts(seen)
        if as_json:
            print(json.dumps({"types": len(types), "checked": len(seen), "counts": summary}), flush=True)
        else:
            typer.echo(counts_text(summary, len(types)))


_COMMANDS: tuple[tuple[str, Callable[..., None], str], ...] = (
    (TRAIN, finetune.finetune, "penstock finetune ~/models/Qwen3-8B talks.jsonl --epochs 2"),
    (TRAIN, train, "penstock train quickstart --set train.steps=20"),
    (
        TRAIN,
        cluster_commands.cluster,
        "torchrun --nproc-per-node 8 -m penstock cluster 8b_8k --run-dir /shared/runs/8b",
    ),
    (LOOK, finetune.data, "penstock data ~/models/Qwen3-8B talks.jsonl --show 5"),
    (LOOK, plan, "penstock plan 7b_512k --machine rtx4090-64"),
    (LOOK, check, "penstock check ~/models/Qwen3-8B --json"),
    (LOOK, runs.runs, "penstock runs"),
    (LOOK, runs.lanes, "penstock lanes runs/quickstart-20260101-120000 --steps 10:20"),
    (LOOK, runs.trace, "penstock trace runs/quickstart-20260101-120000 -o trace.json"),
    (LOOK, sample.sample, "penstock sample ~/models/Qwen3-8B --prompt 'Once upon a time'"),
    (LOOK, eval_command.evaluate, "penstock eval ~/models/Qwen3-8B --tasks needles --lengths 8k,32k"),
    (CONTROL, runs.resume, "penstock resume runs/quickstart-20260101-120000 --set budgets.ram=32GiB"),
    (CONTROL, runs.pause, "penstock pause runs/quickstart-20260101-120000"),
    (CONTROL, runs.stop, "penstock stop runs/quickstart-20260101-120000"),
    (KEEP, runs.checkpoint, "penstock checkpoint runs/quickstart-20260101-120000 before-annealing"),
    (KEEP, runs.export, "penstock export runs/quickstart-20260101-120000 ~/models/mine"),
    (KEEP, runs.scrub, "penstock scrub runs/quickstart-20260101-120000"),
    (KEEP, runs.track, "penstock track runs/quickstart-20260101-120000 --to tensorboard"),
    (KEEP, cluster_commands.import_dcp, "penstock import-dcp /shared/runs/8b --run-dir runs/8b-back"),
    (MACHINE, fit, "penstock fit --machine rtx4090-64 --models Qwen2.5 --contexts 8k,64k"),
    (MACHINE, probe, "penstock probe /mnt/nvme0 /mnt/nvme1"),
)
"""Group in --help, function, and an example in which the command's name follows `penstock`."""

for _group, _command, _example in _COMMANDS:
    _name = _example.partition("penstock ")[2].split()[0]
    cli.command(_name, help=help_of(_command), epilog=f"Example: {_example}", rich_help_panel=_group)(_command)
cli.add_typer(bench_cli, name="bench", rich_help_panel=MACHINE)


_PLACES = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG, errno.ELOOP, errno.EIO}
    | {errno.EISDIR, errno.ENOTDIR}
)
"""What the system says of files that the user named, or of the disk below them."""

_LINE_CHARS = 2000
"""Of one line of a message: what it quotes may be of any length. Both ends say most: what is wrong, and what to do."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit code. One message on stderr and exit code 2 are for a UserError, memory, threads
    or open files that are used up, a GPU that fails, and what the system refuses of a file that it names. All else is a
    mistake of ours and gives its traceback."""
    stay_offline()
    open_standard_streams()
    code = 0
    try:
        _require_text(sys.argv[1:] if arguments is None else arguments)
        _all_commands()(arguments, prog_name="penstock")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    except (UserError, MemoryError, OSError, RuntimeError, ImportError) as error:
        known = error if isinstance(error, UserError) else not_ours(error) or _misplaced(error)
        if known is None:
            raise
        return _refuse(known)
    failure = print_failure()
    return code if failure is None else _refuse(f"standard output: {failure}; the output is incomplete") or code


@cache
def _all_commands() -> Callable[..., object]:
    """All commands, made once: a call of the Typer object would make them anew."""
    return typer.main.get_command(cli)


def _misplaced(error: Exception) -> str | None:
    """What is wrong with a place that the user named, where the system says so; None for all else."""
    if not isinstance(error, OSError):
        return None
    if error.errno == errno.ENOENT and "temporary directory" in str(error.strerror):  # tempfile's
        return f"{error.strerror}; free space in one of them, or set TMPDIR to a writable folder"
    if error.filename is None or (error.errno not in _PLACES and not isinstance(error, RefusedFileError)):
        return None
    return f"{error.filename}: {error.strerror}; choose another place, or make this one usable"


def _require_text(arguments: list[str]) -> None:
    """UserError for arguments, or a current folder, that are not UTF-8 or not there: no file could name them."""
    try:
        folder = os.getcwd()
    except OSError as error:
        raise UserError(f"the current folder no longer exists ({error.strerror}); change to another folder") from None
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
