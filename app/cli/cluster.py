"""`penstock cluster` and `penstock import-dcp`, as commands; app/launch/cluster.py carries them out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.app.cli.options import ScratchOption, SetOption, argument, complete_recipes, option
from penstock.storage.files.untrusted import printable, shell


def cluster(
    recipe: Annotated[
        str,
        argument(
            "RECIPE|RUN|DCP",
            "A run directory; or, with --run-dir, a recipe or the DCP checkpoint of a run.",
            autocompletion=complete_recipes,
        ),
    ],
    overrides: SetOption = None,
    run_dir: Annotated[
        Path | None, option("DIR", "Run directory on a disk that all machines share. A run that is there is continued.")
    ] = None,
    scratch: ScratchOption = False,
    context_parallel: Annotated[
        int, option("RANKS", "Number of ranks over which each micro-batch's tokens are spread.", min=1)
    ] = 1,
) -> None:
    """Train or continue a run on several machines with PyTorch's FSDP2.

    Start it with torchrun. The state is written to DIR/dcp by torch.distributed.checkpoint; when torchrun restarts, it
    continues from the last checkpoint there.
    """
    from penstock.app.launch.cluster import run_cluster

    went = run_cluster(
        recipe, run_dir=run_dir, overrides=overrides or [], from_scratch=scratch, context_parallel=context_parallel
    )
    if not went:
        raise typer.Exit(2)  # the line that says why is another rank's


def import_dcp(
    checkpoint: Annotated[Path, argument("DCP|RUN", "Folder of a DCP checkpoint, or a run, whose newest one is used.")],
    overrides: SetOption = None,
    run_dir: Annotated[Path | None, option("DIR", "Run directory to create. Default: runs/<name>-<time>.")] = None,
) -> None:
    """Turn a DCP checkpoint back into a run directory.

    The checkpoint is one that `penstock cluster` or `penstock export --format dcp` wrote. `penstock resume` continues
    the run.
    """
    from penstock.app.launch.cluster import import_dcp as make_run

    path, step = make_run(checkpoint, run_dir=run_dir, overrides=overrides or [])
    typer.echo(printable(f"{path}: step {step:,}; continue with: ") + shell("penstock", "resume", path))
