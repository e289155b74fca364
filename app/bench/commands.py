"""`penstock bench` and its commands; each imports its benchmark when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.app.options import JsonOption

bench_cli = typer.Typer(epilog="Example: penstock bench step --json", no_args_is_help=True)


def _list_all(context: typer.Context, value: bool) -> None:
    if value:
        assert isinstance(context.command, typer.core.TyperGroup)
        for command in context.command.commands.values():
            command.hidden = False
        typer.echo(context.get_help())
        raise typer.Exit


@bench_cli.callback()
def bench(
    list_all: Annotated[
        bool, typer.Option("--all", help="List the project's own benchmarks, too.", callback=_list_all, is_eager=True)
    ] = False,
) -> None:
    """Benchmarks that compare in one run and print the ratio."""


@bench_cli.command("step", epilog="Example: penstock bench step --suite gpu --json")
def bench_step_command(
    suite: Annotated[
        str | None,
        typer.Option(metavar="NAME[,NAME...]", help="Measure real shapes: gpu, or suites by name; see --list."),
    ] = None,
    list_suites: Annotated[bool, typer.Option("--list", help="List the suites.")] = False,
    trace_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write a Perfetto trace of one step of each case here.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Scratch files go below this folder; default the current one.")
    ] = None,
    batch: Annotated[
        str, typer.Option(metavar="ROWSxTOKENS", help="Batch of the 168M model; a suite's cases have their own.")
    ] = "2x512",
    time_limit: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Begin no case that would probably end later than this.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Time training steps: of real shapes with --suite, else of a 168M-parameter model against plain PyTorch."""
    from penstock.app.bench.suites import bench_suites, list_text

    if list_suites:
        typer.echo(list_text())
    elif suite is None:
        from penstock.app.bench.step import bench_step, parse_batch

        bench_step(json=as_json, folder=folder, batch=parse_batch(batch))
    else:
        report = bench_suites(suite, json=as_json, trace_dir=trace_dir, folder=folder, time_limit_s=time_limit)
        if any(row["status"] == "failed" for row in report["cases"]):
            raise typer.Exit(1)


@bench_cli.command("memory", hidden=True, epilog="Example: penstock bench memory --save docs/results/memory-law")
def bench_memory_command(
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write FILE.json and the plot FILE.svg (needs matplotlib).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the GPU tier's bytes on the CPU from 4k to 128k tokens, at two depths, K/V window whole and streamed."""
    from penstock.app.bench.memory import bench_memory

    bench_memory(json=as_json, save=save)


@bench_cli.command("attention", hidden=True, epilog="Example: penstock bench attention --tokens 65536")
def bench_attention_command(
    tokens: Annotated[int, typer.Option(help="Tokens of the sequence; a step takes minutes at 65,536.")] = 65_536,
    chunk: Annotated[int, typer.Option(help="Tokens of a chunk.")] = 4096,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; step and plain attention take turns.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """Time a long-context step of a small model on the CPU against its attention alone in plain torch."""
    from penstock.app.bench.attention import bench_attention

    bench_attention(tokens=tokens, chunk_tokens=chunk, rounds=rounds, json=as_json)


@bench_cli.command("precision", hidden=True, epilog="Example: penstock bench precision --save docs/results/precision")
def bench_precision_command(
    steps: Annotated[int, typer.Option(min=1, help="Steps at the low rate.")] = 300,
    before_steps: Annotated[int, typer.Option(min=1, help="Steps that make the model to start from.")] = 300,
    every: Annotated[int, typer.Option(min=1, help="Steps between two measurements.")] = 25,
    lr: Annotated[float, typer.Option(help="The low learning rate.")] = 1e-6,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write FILE.json and the plot FILE.svg (needs matplotlib).")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Scratch files go below this folder; default the current one.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train on at 1e-6 with float32 masters, in bfloat16 in place and in float32; some minutes on a CPU."""
    from penstock.app.bench.precision import bench_precision

    bench_precision(steps=steps, before_steps=before_steps, every=every, lr=lr, json=as_json, save=save, folder=folder)


@bench_cli.command("packing", hidden=True, epilog="Example: penstock bench packing --context 8192 --json")
def bench_packing_command(
    context: Annotated[int, typer.Option(help="Tokens of a row.")] = 32_768,
    document: Annotated[int, typer.Option(help="Tokens of a conversation.")] = 512,
    chunk: Annotated[int, typer.Option(help="Tokens of a chunk.")] = 2048,
    rounds: Annotated[int, typer.Option(min=1, help="Timed steps of each, in turn.")] = 3,
    as_json: JsonOption = False,
) -> None:
    """Time short conversations packed into long rows against one per row, on a small model on the CPU."""
    from penstock.app.bench.packing import bench_packing

    bench_packing(context=context, document=document, chunk_tokens=chunk, rounds=rounds, json=as_json)


@bench_cli.command("storage", epilog="Example: penstock bench storage /mnt/a /mnt/b --json")
def bench_storage_command(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Folders on the drives to measure.")],
    size: Annotated[str, typer.Option(metavar="SIZE", help="State to write and read on each round.")] = "2GiB",
    chunk: Annotated[str, typer.Option(metavar="SIZE", help="Chunk file; training's is 32MiB.")] = "32MiB",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; raw and Penstock take turns in each.")] = 3,
    as_json: JsonOption = False,
) -> None:
    """Measure the NVMe tier against raw direct I/O on the same drives, in one run."""
    from penstock.app.bench.storage import bench_storage
    from penstock.engine.config import parse_bytes

    sizes = {"size_bytes": parse_bytes(size, "--size"), "part_bytes": parse_bytes(chunk, "--chunk")}
    bench_storage(paths, json=as_json, rounds=rounds, **sizes)


@bench_cli.command("offsite", hidden=True, epilog="Example: penstock bench offsite --rounds 5 --json")
def bench_offsite_command(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; with and without an upload take turns in each.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each in a round.")] = 8,
    rate: Annotated[str, typer.Option(metavar="SIZE", help="Bytes a second of the limited upload.")] = "50MB",
    on_drive: Annotated[bool, typer.Option("--on-drive", help="Keep the state on the drive, not in memory.")] = False,
    folder: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The run and its place go below this folder; default here.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Time the steps of a small run on the CPU with an upload beside them, and without, in one run."""
    from penstock.app.bench.offsite import bench_offsite
    from penstock.engine.config import parse_bytes

    bench_offsite(
        rounds=rounds,
        steps=steps,
        bytes_per_s=parse_bytes(rate, "--rate"),
        on_drive=on_drive,
        folder=folder,
        json=as_json,
    )


@bench_cli.command("planned", hidden=True, epilog="Example: penstock bench planned --out docs/results")
def bench_planned_command(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for planned.md and planned.png.")] = Path(
        "docs/results"
    ),
) -> None:
    """Plan the recipes, and models from 7B to 120B at 4k to 1M tokens, on every preset (needs matplotlib); minutes."""
    from penstock.app.bench.planned import bench_planned

    bench_planned(out)


@bench_cli.command("plan", hidden=True, epilog="Example: penstock bench plan --save docs/results/planning.md")
def bench_plan_command(
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the page FILE.")] = None,
    time_limit: Annotated[float, typer.Option(metavar="SECONDS", help="Begin no case after so many seconds.")] = 3600.0,
    as_json: JsonOption = False,
) -> None:
    """Compare what the plan promises with what short trainings take, over small and varied recipes; 15 minutes."""
    from penstock.app.bench.plan import bench_plan

    if bench_plan(json=as_json, save=save, time_limit_s=time_limit)["failed"]:
        raise typer.Exit(1)
