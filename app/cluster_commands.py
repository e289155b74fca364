"""`penstock cluster` and `penstock import-dcp`, as the command line has them; app/cluster.py carries them out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.app.options import SetOption, complete_recipes
from penstock.storage.untrusted import printable, shell


def cluster(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE|RUN|DCP",
            help="A recipe as train takes it or a run's DCP checkpoint, with --run-dir, or a run's directory.",
            autocompletion=complete_recipes,
        ),
    ],
    overrides: SetOption = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Directory of the run, on a disk that all machines share; goes on if begun."),
    ] = None,
    scratch: Annotated[
        bool, typer.Option("--from-scratch", help="Begin with random weights of the recipe's shape: no model folder.")
    ] = False,
    context_parallel: Annotated[
        int,
        typer.Option(min=1, metavar="RANKS", help="Ranks that share a micro-batch, each with some of its tokens."),
    ] = 1,
) -> None:
    """Train on several machines, or go on with a run there: the same recipe on PyTorch's FSDP2, under torchrun.

    The state is in DIR/dcp, as torch.distributed.checkpoint writes it; a restart by torchrun goes on from the last.
    """
    from penstock.app.cluster import run_cluster

    went = run_cluster(
        recipe,
        run_dir=run_dir,
        overrides=overrides or [],
        from_scratch=scratch,
        context_parallel=context_parallel,
    )
    if not went:
        raise typer.Exit(2)  # the line that says why is another rank's


def import_dcp(
    checkpoint: Annotated[
        Path,
        typer.Argument(metavar="DCP|RUN", help="A DCP checkpoint's folder, or a run, of which its newest."),
    ],
    overrides: SetOption = None,
    run_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory of the new run; default runs/<name>-<time>.")
    ] = None,
) -> None:
    """Make a run directory of a checkpoint that penstock cluster or export --format dcp has written; resume it then."""
    from penstock.app.cluster import import_dcp as make_run

    path, step = make_run(checkpoint, run_dir=run_dir, overrides=overrides or [])
    typer.echo(printable(f"{path}: step {step:,}; go on with: ") + shell("penstock", "resume", path))
