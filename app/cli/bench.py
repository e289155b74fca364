"""`penstock bench` and its commands; each imports its benchmark when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.app.cli.options import JsonOption, argument, option

bench_cli = typer.Typer(
    epilog="Example: penstock bench step --json",
    no_args_is_help=True,
    help="Run benchmarks: each compares two ways in one run and prints the ratio.",
)


@bench_cli.command("step", epilog="Example: penstock bench step --batch 8x512 --json")
def bench_step_command(
    folder: Annotated[Path | None, option("DIR", "Folder for scratch files. Default: the current folder.")] = None,
    batch: Annotated[str, option("ROWSxTOKENS", "The batch of a step.")] = "2x512",
    as_json: JsonOption = False,
) -> None:
    """Time a training step of a 168M model compared with plain PyTorch and with its kernels alone."""
    from penstock.app.bench.step import bench_step, parse_batch

    bench_step(json=as_json, folder=folder, batch=parse_batch(batch))


@bench_cli.command("storage", epilog="Example: penstock bench storage /mnt/a /mnt/b --json")
def bench_storage_command(
    paths: Annotated[list[Path], argument("PATH...", "Folders on the drives to measure.")],
    size: Annotated[str, option("SIZE", "Bytes to write and read in each round.")] = "2GiB",
    chunk: Annotated[str, option("SIZE", "Size of a chunk file; training uses 32MiB.")] = "32MiB",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; raw I/O and Penstock alternate in each.")] = 3,
    as_json: JsonOption = False,
) -> None:
    """Compare the NVMe tier with raw direct I/O on the same drives."""
    from penstock.app.bench.storage import bench_storage
    from penstock.engine.config import parse_bytes

    sizes = {"size_bytes": parse_bytes(size, "--size"), "part_bytes": parse_bytes(chunk, "--chunk")}
    bench_storage(paths, json=as_json, rounds=rounds, **sizes)


@bench_cli.command("plan", epilog="Example: penstock bench plan --case 29m-ram,7m-nvme")
def bench_plan_command(
    case: Annotated[str | None, option("NAME[,NAME...]", "Run only these cases.")] = None,
    small: Annotated[
        bool, typer.Option("--small", help="Try the cases with a tiny model; the figures say nothing.")
    ] = False,
    folder: Annotated[Path | None, option("DIR", "Folder for the runs. Default: the current folder.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare the plans of small, varied recipes with short training runs: peak memory and step time; 15 minutes."""
    from penstock.app.bench.plan import bench_plan, named_cases

    if bench_plan(json=as_json, folder=folder, cases=named_cases(case, tiny=small))["failed"]:
        raise typer.Exit(1)
