"""`penstock bench` and its commands; each imports its benchmark when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.app.cli.options import JsonOption

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
        bool, typer.Option("--all", help="Also list the project's own benchmarks.", callback=_list_all, is_eager=True)
    ] = False,
) -> None:
    """Run benchmarks: each compares two ways in one run and prints the ratio."""


@bench_cli.command("step", epilog="Example: penstock bench step --suite gpu --json")
def bench_step_command(
    suite: Annotated[
        str | None,
        typer.Option(metavar="NAME[,NAME...]", help="Measure shapes of real models: gpu, or names from --list."),
    ] = None,
    list_suites: Annotated[bool, typer.Option("--list", help="List the suites.")] = False,
    trace_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write a Perfetto trace of one step of each case to this folder.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for scratch files. Default: the current folder.")
    ] = None,
    batch: Annotated[
        str, typer.Option(metavar="ROWSxTOKENS", help="Batch of the 168M model; the cases of a suite have their own.")
    ] = "2x512",
    time_limit: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Skip cases that would probably end after this time.")
    ] = None,
    small: Annotated[
        bool, typer.Option("--small", help="Try the cases with a tiny model; the figures say nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Time a training step of a 168M model compared with plain PyTorch, or real shapes with --suite."""
    from penstock.app.bench.suites import bench_suites, list_text

    if list_suites:
        typer.echo(list_text())
    elif suite is None:
        from penstock.app.bench.step import bench_step, parse_batch

        bench_step(json=as_json, folder=folder, batch=parse_batch(batch))
    else:
        report = bench_suites(
            suite, json=as_json, trace_dir=trace_dir, folder=folder, time_limit_s=time_limit, tiny=small
        )
        if any(row["status"] == "failed" for row in report["cases"]):
            raise typer.Exit(1)


@bench_cli.command("memory", hidden=True, epilog="Example: penstock bench memory --save docs/results/memory-law")
def bench_memory_command(
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write FILE.json and the plot FILE.svg (needs matplotlib).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the GPU tier's memory on the CPU at 4k to 128k tokens, with a whole and a streamed K/V window."""
    from penstock.app.bench.memory import bench_memory

    bench_memory(json=as_json, save=save)


@bench_cli.command("attention", hidden=True, epilog="Example: penstock bench attention --tokens 65536")
def bench_attention_command(
    tokens: Annotated[int, typer.Option(help="Tokens per sequence; a step takes minutes at 65,536.")] = 65_536,
    chunk: Annotated[int, typer.Option(help="Tokens per chunk.")] = 4096,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; step and plain attention alternate.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """Compare a long-context step of a small model on the CPU with its attention alone in plain PyTorch."""
    from penstock.app.bench.attention import bench_attention

    bench_attention(tokens=tokens, chunk_tokens=chunk, rounds=rounds, json=as_json)


@bench_cli.command("precision", hidden=True, epilog="Example: penstock bench precision --save docs/results/precision")
def bench_precision_command(
    steps: Annotated[int, typer.Option(min=1, help="Steps at the low learning rate.")] = 300,
    before_steps: Annotated[int, typer.Option(min=1, help="Steps to train the starting model.")] = 300,
    every: Annotated[int, typer.Option(min=1, help="Steps between measurements.")] = 25,
    lr: Annotated[float, typer.Option(help="The low learning rate.")] = 1e-6,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write FILE.json and the plot FILE.svg (needs matplotlib).")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for scratch files. Default: the current folder.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare training at 1e-6 with float32 masters, bfloat16 in place and float32; some minutes on a CPU."""
    from penstock.app.bench.precision import bench_precision

    bench_precision(steps=steps, before_steps=before_steps, every=every, lr=lr, json=as_json, save=save, folder=folder)


@bench_cli.command("packing", hidden=True, epilog="Example: penstock bench packing --context 8192 --json")
def bench_packing_command(
    context: Annotated[int, typer.Option(help="Tokens per row.")] = 32_768,
    document: Annotated[int, typer.Option(help="Tokens per conversation.")] = 512,
    chunk: Annotated[int, typer.Option(help="Tokens per chunk.")] = 2048,
    rounds: Annotated[int, typer.Option(min=1, help="Timed steps of each, alternating.")] = 3,
    as_json: JsonOption = False,
) -> None:
    """Compare short conversations packed into long rows with one per row, on a small model on the CPU."""
    from penstock.app.bench.packing import bench_packing

    bench_packing(context=context, document=document, chunk_tokens=chunk, rounds=rounds, json=as_json)


@bench_cli.command("storage", epilog="Example: penstock bench storage /mnt/a /mnt/b --json")
def bench_storage_command(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Folders on the drives to measure.")],
    size: Annotated[str, typer.Option(metavar="SIZE", help="Bytes to write and read in each round.")] = "2GiB",
    chunk: Annotated[str, typer.Option(metavar="SIZE", help="Size of a chunk file; training uses 32MiB.")] = "32MiB",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; raw I/O and Penstock alternate in each.")] = 3,
    as_json: JsonOption = False,
) -> None:
    """Compare the NVMe tier with raw direct I/O on the same drives."""
    from penstock.app.bench.storage import bench_storage
    from penstock.engine.config import parse_bytes

    sizes = {"size_bytes": parse_bytes(size, "--size"), "part_bytes": parse_bytes(chunk, "--chunk")}
    bench_storage(paths, json=as_json, rounds=rounds, **sizes)


@bench_cli.command("offsite", hidden=True, epilog="Example: penstock bench offsite --rounds 5 --json")
def bench_offsite_command(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; with and without an upload alternate in each.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each per round.")] = 8,
    rate: Annotated[str, typer.Option(metavar="SIZE", help="Bytes per second of the limited upload.")] = "50MB",
    on_drive: Annotated[bool, typer.Option("--on-drive", help="Keep the state on the drive, not in memory.")] = False,
    folder: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for the run and its upload. Default: the current folder.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare the steps of a small run on the CPU with and without an upload beside them."""
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
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for planned.md and planned.png (needs matplotlib).")
    ] = Path("docs/results"),
) -> None:
    """Plan the recipes, and 7B to 120B models at 4k to 1M tokens, on every machine preset; takes minutes."""
    from penstock.app.bench.planned import bench_planned

    bench_planned(out)


@bench_cli.command("plan", hidden=True, epilog="Example: penstock bench plan --save docs/results/planning.md")
def bench_plan_command(
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the results page to FILE.")] = None,
    time_limit: Annotated[float, typer.Option(metavar="SECONDS", help="Start no case after this time.")] = 3600.0,
    case: Annotated[str | None, typer.Option(metavar="NAME[,NAME...]", help="Run only these cases.")] = None,
    small: Annotated[
        bool, typer.Option("--small", help="Try the cases with a tiny model; the figures say nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Compare plans with short training runs of small, varied recipes; takes 15 minutes."""
    from penstock.app.bench.plan import bench_plan, named_cases

    cases = named_cases(case, tiny=small)
    if bench_plan(json=as_json, save=save, cases=cases, time_limit_s=time_limit)["failed"]:
        raise typer.Exit(1)
