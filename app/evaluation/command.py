"""`penstock eval`: the command. What asks the model is imported when it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from penstock.app.options import JsonOption
from penstock.storage.untrusted import printable


def evaluate(
    where: Annotated[
        str, typer.Argument(metavar="RUN|FOLDER", help="Run directory, its name below runs/, or a Hugging Face folder.")
    ],
    tasks: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Tasks, with commas: of lm-evaluation-harness (extra eval), or needles, needles_single, "
            "needles_multikey, needles_multivalue, which are built in.",
        ),
    ],
    limit: Annotated[int | None, typer.Option(metavar="N", help="The first N documents of each task only.")] = None,
    num_fewshot: Annotated[
        int | None, typer.Option("--num-fewshot", metavar="N", help="Examples before each question.")
    ] = None,
    include_path: Annotated[
        Path | None,
        typer.Option("--include-path", metavar="DIR", help="A folder of your own tasks, as .yaml files."),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask under the model's chat template.")] = False,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="A system message before each question.")] = None,
    lengths: Annotated[
        str | None,
        typer.Option(metavar="TOKENS", help="Of needles: lengths, as 4k,32k; k of 1,024. Default 4k,8k."),
    ] = None,
    depths: Annotated[int, typer.Option(metavar="N", help="Of needles: bands of depth.")] = 5,
    samples: Annotated[int, typer.Option(metavar="N", help="Of needles: questions a kind, length and depth.")] = 2,
    answer_tokens: Annotated[
        int,
        typer.Option("--answer-tokens", metavar="N", help="Of needles: tokens of a length kept for the answer."),
    ] = 128,
    filler: Annotated[str, typer.Option(metavar="KIND", help="Of needles: the text, essay or noise.")] = "essay",
    seed: Annotated[int, typer.Option(metavar="N", help="Of needles, and of what is drawn.")] = 0,
    batch_tokens: Annotated[
        int | None,
        typer.Option("--batch-tokens", metavar="N", help="Read while the weights stream by once; default 32,768."),
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of a run: this checkpoint, not the last generation.")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(metavar="SIZE", help="GPU memory to use, as 20GiB; default the free.")
    ] = None,
    ram: Annotated[str | None, typer.Option(metavar="SIZE", help="RAM to use, as 48GiB; default the free.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the results here too, as JSON.")] = None,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the heat maps as a picture.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Ask a run or a model folder tasks, by streamed weights: log-likelihoods, greedy texts, needles.

    What is asked and how long it takes about is said first. Results of a run are kept in its evals/.
    """
    from penstock.app.evaluation import public

    found = public.evaluate(
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
        typer.echo(json.dumps(found, indent=1))
        return
    from rich.console import Console

    from penstock.app.evaluation.report import print_report

    print_report(found, Console())
    for file in found["files"]:
        typer.echo(printable(f"written to {file}"))
