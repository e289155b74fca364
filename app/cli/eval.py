"""`penstock eval`: the command. What asks the model is imported when it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from penstock.app.cli.options import JsonOption
from penstock.storage.files.untrusted import printable


def evaluate(
    where: Annotated[
        str,
        typer.Argument(metavar="RUN|FOLDER", help="Run directory, the name of one in runs/, or a Hugging Face folder."),
    ],
    tasks: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Tasks, separated by commas: those of lm-evaluation-harness (needs the extra `eval`) or the built-in "
            "needles, needles_single, needles_multikey, needles_multivalue.",
        ),
    ],
    limit: Annotated[int | None, typer.Option(metavar="N", help="Use only the first N documents of each task.")] = None,
    num_fewshot: Annotated[
        int | None, typer.Option("--num-fewshot", metavar="N", help="Examples before each question.")
    ] = None,
    include_path: Annotated[
        Path | None,
        typer.Option("--include-path", metavar="DIR", help="Folder with your own tasks, as .yaml files."),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Use the model's chat template.")] = False,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message before each question.")] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS", help="Needles: context lengths, for example 4k,32k; k is 1,024. Default: 4k,8k."
        ),
    ] = None,
    depths: Annotated[int, typer.Option(metavar="N", help="Needles: number of depths at which facts are hidden.")] = 5,
    samples: Annotated[int, typer.Option(metavar="N", help="Needles: questions per kind, length and depth.")] = 2,
    answer_tokens: Annotated[
        int,
        typer.Option("--answer-tokens", metavar="N", help="Needles: tokens of each length reserved for the answer."),
    ] = 128,
    filler: Annotated[
        str, typer.Option(metavar="KIND", help="Needles: text around the facts, essay or noise.")
    ] = "essay",
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the needles and of sampling.")] = 0,
    batch_tokens: Annotated[
        int | None,
        typer.Option(
            "--batch-tokens", metavar="N", help="Most tokens to read per pass over the weights. Default: 32,768."
        ),
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(metavar="NAME", help="For a run: use this checkpoint, not the last generation.")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(metavar="SIZE", help="GPU memory to use, for example 20GiB. Default: what is free.")
    ] = None,
    ram: Annotated[
        str | None, typer.Option(metavar="SIZE", help="RAM to use, for example 48GiB. Default: what is free.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the results to this JSON file.")] = None,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the heat maps as an SVG picture.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Evaluate a run or a model on lm-evaluation-harness tasks and needles.

    The weights are streamed, so the model need not fit in memory. The number of questions and the expected time are
    printed first. Results for a run are kept in its evals/.
    """
    from penstock.app.evaluation import public

    result = public.evaluate(
        where,
        [name.strip() for name in tasks.split(",") if name.strip()],
        limit=limit,
        num_fewshot=num_fewshot,
        include_path=include_path,
        chat=chat,
        system=system,
        lengths=public.parse_lengths(lengths),
        depths=depths,
        samples=samples,
        answer_tokens=answer_tokens,
        filler=filler,
        batch_tokens=batch_tokens,
        seed=seed,
        checkpoint=checkpoint,
        gpu=gpu,
        ram=ram,
        out=out,
        svg=svg,
    )
    if as_json:
        typer.echo(json.dumps(result, indent=1))
        return
    from rich.console import Console

    from penstock.app.evaluation.report import print_report

    print_report(result, Console())
    for file in result["files"]:
        typer.echo(printable(f"written to {file}"))
